# SPDX-License-Identifier: Apache-2.0
"""OpenAI's HTTP API in front of an engine: a thread with an event loop that never waits for the model."""

from kvtide.errors import MissingExtra

try:
    from kvtide.engines.openai.app import App, Served
    from kvtide.engines.openai.gate import Gate, is_loopback
    from kvtide.engines.openai.server import Server, serving, taken_port
    from kvtide.engines.openai.translator import Translator
except ImportError as error:
    raise MissingExtra(
        "the server needs starlette, uvicorn, prometheus-client and jinja2: pip install 'kvtide[engine]'"
    ) from error

__all__ = ["App", "Gate", "Served", "Server", "Translator", "is_loopback", "serving", "taken_port"]
