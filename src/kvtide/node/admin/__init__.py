# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the node service: health, metrics, administration.

A thread with an event loop of its own; whatever may wait runs in a few more. None of it is on the way of an
engine's request: without it, the service serves on.
"""

from kvtide.errors import MissingExtra

try:
    from kvtide.node.admin.server import open_admin
except ImportError as error:
    raise MissingExtra(
        "the admin side needs starlette, uvicorn and prometheus-client: pip install 'kvtide[serve]', "
        "or start without it (--admin-is-on false)"
    ) from error

__all__ = ["open_admin"]
