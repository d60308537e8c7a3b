# SPDX-License-Identifier: Apache-2.0
"""The node service from an engine's side: the store's own interface, over a Unix socket."""

from kvtide.client.client import Client, connect

__all__ = ["Client", "connect"]
