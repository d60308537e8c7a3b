# SPDX-License-Identifier: Apache-2.0
"""The HTTP server in a thread of its own, and the files by which its users find it.

`admin.token` holds the operator's token and stays; `admin.url` says where the server is, and is there while it is.
The server keeps a lock on it: a file that a killed service left behind can be told from a true one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from kvtide.config import AdminSettings
from kvtide.errors import ConfigError, Unavailable
from kvtide.node.admin.app import App
from kvtide.node.admin.audit import AuditLog
from kvtide.node.admin.desk import Desk
from kvtide.node.admin.gate import Gate, is_loopback
from kvtide.node.secrets import kept_secret
from kvtide.node.serve import Node

log = logging.getLogger(__name__)

TOKEN_FILE = "admin.token"
URL_FILE = "admin.url"
AUDIT_FILE = "audit.log"
_CONNECTIONS_MAX = 128
_KEEP_ALIVE_S = 5
_END_S = 2  # for calls under way, when the service ends
_START_S = 10.0


@contextmanager
def open_admin(node: Node) -> Iterator[str]:
    """Serve until the end of the block, under the URL that is given. Raises ConfigError when the port is taken."""
    settings, folder = node.settings, Path(node.settings.folder)
    gate = Gate(settings, kept_secret(folder / TOKEN_FILE))
    is_metrics_open = settings.admin.is_metrics_open
    if is_metrics_open is None:
        is_metrics_open = not settings.tenants
    desk = Desk(node)
    app = App(desk, gate, AuditLog(folder / AUDIT_FILE), is_metrics_open=is_metrics_open)
    with _listening(settings.admin) as listener:
        url = _url(listener)
        if not is_loopback(settings.admin.host):
            log.warning(
                "admin.not_loopback host=%s: tokens travel in the clear, and whoever reaches this address can try some",
                settings.admin.host,
            )
        with _serving(app, listener, desk), _url_file(folder / URL_FILE, url):
            log.info("admin.listening url=%s", url)
            yield url


@contextmanager
def _serving(app: App, listener: socket.socket, desk: Desk) -> Iterator[None]:
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
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_END_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="kvtide-admin", daemon=True)
    thread.start()
    try:
        end_s = time.monotonic() + _START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > end_s:
                raise Unavailable("the admin side did not start; the log says more")
            time.sleep(0.005)
        yield
    finally:
        desk.is_ending.set()
        server.should_exit = True
        thread.join()


@contextmanager
def _listening(settings: AdminSettings) -> Iterator[socket.socket]:
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"admin.host {host} is no address of this machine: {error}; write 127.0.0.1") from error
    try:
        listener = socket.create_server(address[:2], family=family, backlog=_CONNECTIONS_MAX)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"admin.port {port} is in use on {host}, perhaps by another kvtide: name another one "
                "(--admin-port; 0: any that is free)",
                port=port,
            ) from error
        raise ConfigError(
            f"admin.host {host} with admin.port {port} cannot be listened on: {error.strerror}; name others"
        ) from error
    with listener:
        # An answer goes out in two writes; without this the second one waits forty milliseconds for the client. The
        # sockets of clients inherit it (asyncio sets it only on those that it made itself).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _url_file(path: Path, url: str) -> Iterator[None]:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, f"{url}\n".encode())
        os.replace(scratch, path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)
