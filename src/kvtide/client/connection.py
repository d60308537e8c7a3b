# SPDX-License-Identifier: Apache-2.0
"""One login at the node service: a socket and the arenas that came with it. Never blocks after the login."""

from __future__ import annotations

import os
import select
import socket
import threading
from array import array
from contextlib import suppress
from pathlib import Path

from kvtide import __version__, wire
from kvtide.deadline import Deadline
from kvtide.errors import Busy, ConfigError, Denied, KvtideError, ProtocolError, Rejected, Unavailable
from kvtide.layout import Memory
from kvtide.memory.arena import map_arena, populate
from kvtide.spin import Spin

_OUTBOX_BYTES_MAX = 1 << 20  # of requests that the service does not take; then it counts as gone
_PATH_BYTES_MAX = 107  # sun_path holds 108, with the zero at its end
_REFUSALS: dict[str, type[KvtideError]] = {error.kind: error for error in (Busy, Denied, ProtocolError, Rejected)}


class Connection:
    """From login to loss. Its owner serialises the calls. Any method may raise Unavailable: then it is lost."""

    def __init__(self, path: Path, token: str, tenant: str, number: int, deadline: Deadline) -> None:
        """Log in. Blocks until the deadline; raises Unavailable, or Denied and its like when turned away."""
        self.number = number
        self.held: set[int] = set()  # numbers of leases that were not returned
        self._inbox = wire.Inbox(wire.MESSAGE_BYTES_MAX)
        self._outbox = bytearray()
        self._spin = Spin()
        self._poll = select.poll()
        self._polled = 0  # for what
        self._is_stopped = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.welcome, fds = self._log_in(path, token, tenant, deadline)
            self.arenas = self._map(fds)
        except OSError as error:
            self._socket.close()
            raise Unavailable(
                f"no service answers at {path} ({error.strerror or 'timed out'}): start one with `kvtide serve`"
            ) from error
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._populates = threading.Thread(target=self._populate, name="kvtide-arena-map", daemon=True)
        self._populates.start()

    def _log_in(self, path: Path, token: str, tenant: str, deadline: Deadline) -> tuple[wire.Welcome, list[int]]:
        self._socket.settimeout(max(deadline.left_s, 0.001))
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            raise ConfigError(f"{path} is too long for a socket: name a shorter path", path=str(path))
        self._socket.connect(os.fspath(path))
        self._socket.sendall(wire.encode(wire.Hello(wire.VERSION, __version__, token, tenant)))
        fds: list[int] = []
        try:
            while True:
                self._socket.settimeout(max(deadline.left_s, 0.001))
                data, rights, _, _ = self._socket.recvmsg(
                    wire.HELLO_BYTES_MAX, socket.CMSG_LEN(4 * wire.ARENAS_MAX), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, content in rights:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        fds += array("i", content[: len(content) // 4 * 4])
                if not data:
                    raise Unavailable(f"the service at {path} closed the connection at login: its log says why")
                if messages := self._inbox.feed(data):
                    break
            answer = wire.decode_welcome(messages[0])
            if isinstance(answer, wire.Refused):
                raise _REFUSALS.get(answer.kind, Denied)(answer.message)
            if answer.version != wire.VERSION or len(fds) != len(answer.arenas):
                raise ProtocolError("the service's welcome makes no sense: install the same kvtide on both sides")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return answer, fds

    def _map(self, fds: list[int]) -> list[Memory]:
        try:
            return [
                map_arena(fd, arena.size_bytes, is_writable=arena.is_writable)
                for fd, arena in zip(fds, self.welcome.arenas, strict=True)
            ]
        finally:
            for fd in fds:
                os.close(fd)

    def _populate(self) -> None:
        for memory, arena in zip(self.arenas, self.welcome.arenas, strict=True):
            populate(memory, self._is_stopped, is_writable=arena.is_writable)

    def wait_populated(self) -> None:
        """Block until first copies are as fast as later ones. For benchmarks."""
        self._populates.join()

    def send(self, data: bytes) -> None:
        """Hand an encoded request to the kernel, or keep it for later when the kernel takes no more."""
        if not self._outbox:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass  # kept for later
            except OSError as error:
                raise Unavailable(f"the service is gone: {error.strerror}") from error
            if not data:
                return
        self._outbox += data
        self.flush()

    def flush(self) -> None:
        if not self._outbox:
            return
        try:
            sent = self._socket.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise Unavailable(f"the service is gone: {error.strerror}") from error
        del self._outbox[:sent]
        if len(self._outbox) > _OUTBOX_BYTES_MAX:
            raise Unavailable("the service has stopped reading")

    def receive(self) -> list[wire.Answer]:
        """The answers that have arrived."""
        answers: list[wire.Answer] = []
        while True:
            try:
                data = self._socket.recv(wire.RECEIVE_BYTES)
            except BlockingIOError:
                return answers
            except OSError as error:
                raise Unavailable(f"the service is gone: {error.strerror}") from error
            if not data:
                raise Unavailable("the service closed the connection")
            answers += [wire.decode_answer(body) for body in self._inbox.feed(data)]
            if len(data) < wire.RECEIVE_BYTES:
                return answers

    def wait_readable(self, timeout_s: float) -> None:
        """Block until there is something to receive. May be called beside the other methods."""
        wanted = select.POLLIN | (select.POLLOUT if self._outbox else 0)
        if wanted != self._polled:
            try:
                self._poll.register(self._socket, wanted)
            except ValueError:  # closed meanwhile: the caller looks again
                return
            self._polled = wanted
        self._spin.wait(self._poll_s, max(timeout_s, 0.0))

    def _poll_s(self, timeout_s: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout_s * 1000)

    def close(self, *, is_goodbye: bool) -> None:
        if is_goodbye:
            with suppress(Unavailable):  # it is gone already, and everything that was held with it
                self.send(wire.encode(wire.Bye()))
        self._is_stopped.set()
        with suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)  # a child that was forked meanwhile has the socket, too
        self._socket.close()
