# SPDX-License-Identifier: Apache-2.0
"""One client of the service: its socket, what it asked for, and what it holds."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtide import wire
from kvtide.errors import ProtocolError
from kvtide.keys import Digest
from kvtide.node.domains import Domain
from kvtide.node.doorkeeper import Principal
from kvtide.node.peer import Peer
from kvtide.tickets import Fetched, Reservation, Ticket

OUTBOX_BYTES_MAX = 4 << 20  # of answers that the client does not read; then it is cut off
_SEND_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """A domain as one session sees it: under which number it has its arena, and whether it may write there."""

    domain: Domain
    arena: int
    is_writable: bool


@dataclass(slots=True, eq=False)
class Holding:
    """A lease that a session has, and whose store it is of."""

    seat: Seat
    what: Fetched | Reservation


@dataclass(slots=True, eq=False)
class Waiting:
    """A request whose ticket is not done yet."""

    id: int
    ticket: Ticket[Any]
    answer: Callable[[Any], wire.Answer]
    op: str
    began_s: float


class Session:
    """From accept to the death of the process behind it. Used by the service's loop only."""

    def __init__(self, number: int, connection: socket.socket, peer: Peer, now_s: float) -> None:
        self.number = number
        self.peer = peer
        self.principal: Principal | None = None
        self.seats: Mapping[Digest, Seat] = {}  # by the tenant digest of the shelves that stand there
        self.unread: deque[memoryview] = deque()  # messages that have arrived and were not looked at yet
        self.is_paused = False  # nobody reads from it: it is their turn first
        self.requests: deque[wire.Request] = deque()
        self.queued_bytes = 0  # of its requests
        self.waiting: list[Waiting] = []
        self.holdings: dict[int, Holding] = {}
        self.has_said_bye = False
        self.is_over = False
        self.late_at_s: float | None = now_s  # since when it owes us the rest of a message; None: nothing
        self._connection = connection
        self._inbox = wire.Inbox()
        self._outbox = bytearray()
        self._last_lease = 0
        self._sizes: deque[int] = deque()  # of its requests

    @property
    def fd(self) -> int:
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def seat(self) -> Seat:
        """The own tenant's."""
        return next(iter(self.seats.values()))

    def receive(self, now_s: float) -> list[memoryview] | None:
        """The messages that have arrived whole; None at the end of the connection."""
        try:
            data = self._connection.recv(wire.RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        messages = self._inbox.feed(data)
        if not self._inbox.is_within_message:
            self.late_at_s = None
        elif messages or self.late_at_s is None:
            self.late_at_s = now_s
        return messages

    def welcome(self, message: wire.Welcome, fds: list[int]) -> None:
        """Send the first answer, with the arenas beside it."""
        data = wire.encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, "little") for fd in fds))]
        try:
            sent = self._connection.sendmsg([data], rights)
        except OSError:  # it did not wait for the answer
            sent = 0
        if sent != len(data):
            raise ProtocolError("the client does not read its welcome")
        self._inbox.bytes_max = wire.MESSAGE_BYTES_MAX

    def send(self, answer: wire.Answer) -> None:
        """Send, or keep for later. Raises ProtocolError when the client has not read for too long."""
        data = wire.encode(answer)
        if not self._outbox:
            try:
                sent = self._connection.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the end of the connection is seen, and handled, where it is read
            if sent == len(data):
                return
            data = data[sent:]
        self._outbox += data
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            raise ProtocolError("the client does not read its answers")

    def flush(self) -> None:
        try:
            sent = self._connection.send(memoryview(self._outbox)[:_SEND_AT_ONCE])
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()
            return
        del self._outbox[:sent]

    def queue(self, request: wire.Request, size_bytes: int) -> None:
        self.requests.append(request)
        self._sizes.append(size_bytes)
        self.queued_bytes += size_bytes

    def next_request(self) -> wire.Request:
        self.queued_bytes -= self._sizes.popleft()
        return self.requests.popleft()

    def drop_ended(self) -> None:
        """Pins end by themselves."""
        self.holdings = {
            n: each for n, each in self.holdings.items() if each.what.lease and not each.what.lease.is_over
        }

    def hold(self, seat: Seat, what: Fetched | Reservation) -> int:
        """A number by which the client can return this."""
        self._last_lease += 1
        self.holdings[self._last_lease] = Holding(seat, what)
        return self._last_lease

    def close_connection(self) -> None:
        self._connection.close()
