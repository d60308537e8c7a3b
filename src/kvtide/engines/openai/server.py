# SPDX-License-Identifier: Apache-2.0
"""The HTTP server in a thread of its own: where it listens, how it starts, and how it ends.

The port is taken before the model is loaded, which may take minutes, and listened on after: until then a client is
refused, not kept waiting.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from kvtide.engines.openai.app import App
from kvtide.errors import ConfigError, Unavailable
from kvtide.observe.fault_log import FaultLog

log = logging.getLogger(__name__)
faults = FaultLog(log)

_CONNECTIONS_MAX = (
    896  # more than calls, so one call too many hears it in JSON; less than 1,024, the usual limit of files
)
_BACKLOG = 128
_KEEP_ALIVE_S = 30
_START_S = 10.0
_END_S = 5.0  # for requests under way, when the server ends
_ABORT_S = 3.0  # for their ends to be told, after that
_STUCK_MS = 60_000  # a client that takes nothing for so long is cut off


@dataclass(frozen=True, slots=True)
class Server:
    """One that serves."""

    url: str
    thread: threading.Thread

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive()


@contextmanager
def taken_port(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound and does not listen yet. Raises ConfigError when the port is in use."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host} is no address of this machine: {error}; write 127.0.0.1") from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # What an earlier server left in TIME_WAIT is no hindrance. The sockets of clients inherit the rest.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_MS)
        try:
            listener.bind(address)
        except OSError as error:
            raise _cannot_listen(error, host, port) from error
        yield listener


@contextmanager
def serving(app: App, listener: socket.socket) -> Iterator[Server]:
    """Serve until the end of the block; then let requests end, for a few seconds."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)  # two sockets can be bound to one port, as long as neither listens
    except OSError as error:
        raise _cannot_listen(error, host, port) from error
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_END_S + _ABORT_S),
    )
    server = uvicorn.Server(config)
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.addFilter(_count_repeated)
    thread = threading.Thread(target=server.run, args=([listener],), name="kvtide-http", daemon=True)
    thread.start()
    try:
        end_s = time.monotonic() + _START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > end_s:
                raise Unavailable("the server did not start; the log says more")
            time.sleep(0.005)
        yield Server(_url(host, port), thread)
    finally:
        app.stop_admitting()
        server.should_exit = True
        try:
            thread.join(_END_S)
        finally:  # also for who does not wait: those who do are told
            app.end()
            thread.join()
            uvicorn_log.removeFilter(_count_repeated)


def _count_repeated(record: logging.LogRecord) -> bool:
    """Whether uvicorn logs this itself: not what strangers can make it say as often as they like."""
    if record.exc_info or record.levelno != logging.WARNING:
        return True
    faults.warn("engine.http_refused", why=record.getMessage())
    return False


def _cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} is in use on {host}, perhaps by another engine: name another one (--port; 0: any that is "
            "free)",
            port=port,
        )
    return ConfigError(f"host {host} with port {port} cannot be listened on: {error.strerror}; name others")


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
