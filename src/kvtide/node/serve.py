# SPDX-License-Identifier: Apache-2.0
"""The composition root of the node service: builds everything from settings, runs it, takes it down in order."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtide.config import Settings
from kvtide.config.defaults import resolve
from kvtide.errors import ConfigError
from kvtide.node.domains import Domains
from kvtide.node.doorkeeper import Doorkeeper
from kvtide.node.service import Service

log = logging.getLogger(__name__)

# The loop shares its interpreter with threads that verify and seal frames: it should get its turn sooner than
# after Python's five milliseconds.
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class Node:
    """A service that is ready to run."""

    settings: Settings
    domains: Domains
    service: Service


@contextmanager
def open_node(settings: Settings, on_drain: Callable[[float], None] = lambda _: None) -> Iterator[Node]:
    """Open everything, or raise ConfigError and leave nothing behind. At the end DRAM is spilled, for a bounded time.

    `on_drain` hears that this begins.
    """
    settings = resolve(settings)
    settings.check()
    with ExitStack() as stack:
        folder = Path(settings.folder)
        _make_folder(folder)
        listener = stack.enter_context(listening(Path(settings.node.socket or ""), settings.node.socket_mode))
        domains = Domains(settings)
        is_drained = False

        def close() -> None:
            domains.close(settings.node.drain_s if is_drained else 0.0)

        stack.callback(close)
        service = Service(settings, domains, Doorkeeper(settings.tenants, os.getuid()), listener)
        sys.setswitchinterval(_SWITCH_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # two for each session; the low default is for programs that use select()
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        gc.collect()
        gc.freeze()  # what was built up to here stays: no collection has to look at it again
        yield Node(settings, domains, service)
        is_drained = True
        on_drain(settings.node.drain_s)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"folder {folder} cannot be made: {error.strerror}; name another one", folder=str(folder)
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"folder {folder} is another user's or others can write to it: chmod 700 it, or name another one",
            folder=str(folder),
        )


@contextmanager
def listening(path: Path, mode: int) -> Iterator[socket.socket]:
    """A Unix socket at this path that nobody else serves. Gone at the end."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two services that start at once must not both find the path free. The lock outlives no process.
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"node.socket {path} cannot be made: {error.strerror}; name another one") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another service serves {path}: use that one, or name another folder (--folder) for this one",
                socket=str(path),
            ) from None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            _bind(listener, path, mode)
            try:
                yield listener
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _bind(listener: socket.socket, path: Path, mode: int) -> None:
    try:
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"node.socket {path} exists and is no socket: name another path")
            path.unlink()  # of a service that was killed: we hold its lock
        mask = os.umask(0o177)  # nobody may connect before the mode is the one that was asked for
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(mask)
        path.chmod(mode)
        listener.listen(1024)
    except OSError as error:
        reason = "the path is too long" if error.errno == errno.ENAMETOOLONG else error.strerror or str(error)
        raise ConfigError(f"node.socket {path} cannot be made: {reason}; name another one") from error
