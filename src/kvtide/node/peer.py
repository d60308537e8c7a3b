# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a Unix socket, and whether he is still alive.

A closed connection does not mean a dead process: one that was cut off may still be copying to the arena. So the
service watches the process itself, through a file descriptor that names it for good (a number could be given to
another process). Where the kernel gives none (another PID namespace, before Linux 6.5), the end of the
connection has to stand for the end of the process.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet
_CREDENTIALS = struct.Struct("3i")
NO_FD = -1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(slots=True)
class Peer:
    """A process that connected. `pid` is 0 where it cannot be known."""

    pid: int
    uid: int
    pidfd: int

    @property
    def is_dead(self) -> bool:
        """A process without a descriptor counts as dead: it is asked only after its connection has ended."""
        if self.pidfd == NO_FD:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.pidfd != NO_FD:
            os.close(self.pidfd)
            self.pidfd = NO_FD


def peer_of(connection: socket.socket) -> Peer:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return Peer(pid, uid, _pidfd(connection, pid))


def _pidfd(connection: socket.socket, pid: int) -> int:
    """NO_FD where the kernel has none. Raises OSError where it has, but this process may not open one more."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
    # An older kernel: by number, which is sound as long as the process has not ended meanwhile.
    try:
        return os.pidfd_open(pid) if pid > 0 else NO_FD
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        return NO_FD
