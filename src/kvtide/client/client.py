# SPDX-License-Identifier: Apache-2.0
"""A client of the node service, with the store's own interface.

Nothing blocks but `wait`, `clear`, `stats` and `close`: a call sends its message and returns a ticket, `poll` reads
what has arrived. Every ticket has a deadline; what has no answer by then is a miss. When the service is gone,
everything is a miss at once, and a thread looks for it until it is back. A cache fault is never a request fault.

A client belongs to the process that made it: after a fork the child makes its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide import wire
from kvtide.client.connection import Connection
from kvtide.config import CallSettings
from kvtide.deadline import Deadline
from kvtide.errors import Closed, ConfigError, Denied, KvtideError, MediumFailed, ProtocolError, Rejected, Unavailable
from kvtide.keys import KEY_BYTES, NO_PARENT, Digest, Key, Keys, Shelf, check_chain, scope_digest
from kvtide.layout import Layout, Memory
from kvtide.memory.leases import Lease, Use
from kvtide.observe.fault_log import FaultLog
from kvtide.outcome import Outcome
from kvtide.tenant import Scope
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Slots, Ticket, check_pages

log = logging.getLogger(__name__)
faults = FaultLog(log)

T = TypeVar("T")

DEFAULT_SOCKET = "~/.cache/kvtide/kvtide.sock"
_COMPLETED_MAX = 4096  # tickets remembered for the next poll
_SCOPES_MAX = 4096
_CLEAR_S = 60.0
_PIN_S_MIN, _PIN_S_MAX = 1e-3, 1e9  # 0 would be no pin, and forever has no number on the wire
_ANSWER_BYTES = wire.MESSAGE_BYTES_MAX - (1 << 16)  # for numbers that come with each key and shelf
_NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Asked(Generic[T]):
    """A request without its answer yet."""

    ticket: Ticket[T]
    due_at_s: float
    read: Callable[[Any], T]  # from the answer
    miss: Callable[[Outcome], T]  # what it is without one, and why


@dataclass(slots=True, eq=False)
class Former:
    """A connection that was lost, to a service that may still be there and keep what it held."""

    session: int
    instance: int
    held: set[int]


def connect(
    where: str | None = None,
    *,
    token: str | None = None,
    tenant: str | None = None,
    calls: CallSettings | None = None,
    must_answer: bool = True,
) -> Client:
    """A client of the service at `unix:PATH`; by default that of this user, or what KVTIDE_SOCKET names.

    Raises Unavailable when nobody answers, or with `must_answer=False` returns a client that goes on looking and
    misses everything meanwhile. Raises Denied when the service turns this process away. `token` and `tenant` default
    to KVTIDE_TOKEN and KVTIDE_TENANT.
    """
    where = where or os.environ.get("KVTIDE_SOCKET") or DEFAULT_SOCKET
    path = Path(where.removeprefix("unix:")).expanduser()
    if "://" in where:
        raise ConfigError(f"{where} is no place of a node service: write unix:/path/to/kvtide.sock")
    return Client(
        path,
        token=os.environ.get("KVTIDE_TOKEN", "") if token is None else token,
        tenant=os.environ.get("KVTIDE_TENANT", "") if tenant is None else tenant,
        calls=calls,
        must_answer=must_answer,
    )


class Client:
    """Every method may be called from any thread of the process that made it."""

    def __init__(
        self,
        path: Path,
        *,
        token: str = "",
        tenant: str = "",
        calls: CallSettings | None = None,
        must_answer: bool = True,
    ) -> None:
        self._path = path
        self._token = token
        self._tenant = tenant
        self._calls = calls or CallSettings()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_somebody_reading = False
        self._asked: dict[int, Asked[Any]] = {}
        self._last_id = 0
        self._completed: deque[Ticket[Any]] = deque(maxlen=_COMPLETED_MAX)
        self._scopes: OrderedDict[tuple[Digest, str, str], Scope] = OrderedDict()
        self._connections = 0
        self._connection: Connection | None = None
        self._former: dict[int, Former] = {}  # by the number of the connection
        self._known_as = ""  # by the service
        self._request_bytes_max = 0
        self._tier_names: tuple[str, ...] = ()
        self._is_closed = threading.Event()
        self._looks: threading.Thread | None = None
        self._is_looking = False
        try:
            self._connect(self._calls.connect_s)
        except Unavailable as error:
            if must_answer:
                raise
            self._lost(error)

    # The connection ----------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def tenant(self) -> str:
        """As whom the service knows this client; empty before the first login."""
        connection = self._connection
        return connection.welcome.tenant if connection else ""

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Of the tiers that a match tells by number, DRAM first; those of the last service that was there."""
        return self._tier_names

    def wait_populated(self) -> None:
        """Block until the arenas are mapped page by page. For benchmarks; nothing else needs to wait."""
        if (connection := self._connection) is not None:
            connection.wait_populated()

    def _connect(self, timeout_s: float) -> None:
        connection = Connection(self._path, self._token, self._tenant, self._connections + 1, Deadline.after(timeout_s))
        with self._lock:
            if self._is_closed.is_set():
                connection.close(is_goodbye=True)
                return
            if connection.welcome.tenant != self._known_as:
                self._scopes.clear()  # they were another tenant's
            self._known_as = connection.welcome.tenant
            self._connections = connection.number
            self._connection = connection
            self._tell_of_former(connection)
            self._request_bytes_max = connection.welcome.request_bytes_max
            self._tier_names = connection.welcome.tiers
        log.info("client.connected path=%s tenant=%s", self._path, connection.welcome.tenant)

    def _tell_of_former(self, connection: Connection) -> None:
        """The same service still keeps what lost connections held: say what of it is in use. With the lock held."""
        instance = connection.welcome.instance
        self._former = {n: lost for n, lost in self._former.items() if lost.instance == instance}
        for number, lost in list(self._former.items()):
            if self._connection is not connection:
                return  # it is lost as well
            self._tell(wire.Keep(lost.session, tuple(lost.held)[: wire.LEASES_MAX]))
            if not lost.held and self._connection is connection:
                del self._former[number]

    def _lost(self, error: KvtideError) -> None:
        """Everything under way is a miss now; look for the service in the background."""
        with self._lock:
            if self._connection is not None:
                self._connection.close(is_goodbye=False)
                welcome = self._connection.welcome
                former = Former(welcome.session, welcome.instance, self._connection.held)
                self._former[self._connection.number] = former
                self._connection = None
            asked, self._asked = self._asked, {}
            for each in asked.values():
                self._complete(each.ticket, each.miss(Outcome.ERROR))
            self._changed.notify_all()
            if self._is_closed.is_set():
                return
            faults.warn("client.no_service", path=self._path, error=error)
            if self._looks is None or not (self._is_looking and self._looks.is_alive()):
                self._is_looking = True
                self._looks = threading.Thread(target=self._look, name="kvtide-reconnect", daemon=True)
                self._looks.start()

    def _look(self) -> None:
        pause_s = 0.02
        while not self._is_closed.wait(pause_s):
            pause_s = min(2 * pause_s, self._calls.reconnect_s_max)
            try:
                self._connect(self._calls.connect_s)
            except Unavailable:
                continue
            except Exception as error:  # turned away, or a mistake of ours: one day it may be otherwise
                faults.warn("client.turned_away", path=self._path, kind=type(error).__name__, error=error)
                pause_s = max(pause_s, 5.0)
            with self._lock:
                if self._connection is not None:  # not lost again meanwhile: nobody else would look for it then
                    self._is_looking = False
                    return

    # Asking ------------------------------------------------------------------------------------------------

    def _ask(
        self,
        make: Callable[[int], wire.Request],
        timeout_s: float,
        read: Callable[[Any], T],
        miss: Callable[[Outcome], T],
        *,
        is_owed: bool = False,
    ) -> Ticket[T]:
        """Send a request. A ticket that is done at once when it cannot be sent. `is_owed`: it gives something back,
        so it goes out however many are under way."""
        self._check_process()
        with self._lock:
            connection = self._usable()
            if connection is None:
                return Ticket.done(miss(Outcome.ERROR))
            if not is_owed and len(self._asked) >= connection.welcome.requests_max:
                return Ticket.done(miss(Outcome.REJECTED))
            self._last_id = self._last_id % (wire.MESSAGE_BYTES_MAX * 4) + 1
            message = wire.encode(make(self._last_id))  # a mistake of the caller's shows here, before anything is begun
            ticket: Ticket[T] = Ticket()
            self._asked[self._last_id] = Asked(ticket, time.monotonic() + timeout_s, read, miss)
            try:
                connection.send(message)
            except Unavailable as error:
                self._lost(error)  # completes the ticket
            return ticket

    def _tell(self, message: wire.Request) -> None:
        """Send what has no answer."""
        self._check_process()
        with self._lock:
            connection = self._usable()
            if connection is None:
                return
            try:
                connection.send(wire.encode(message))
            except Unavailable as error:
                self._lost(error)

    def _usable(self) -> Connection | None:
        if self._is_closed.is_set():
            raise Closed("the client is closed")
        return self._connection

    def _check_process(self) -> None:
        """Before the lock is taken: a thread that the child does not have may have held it."""
        if self._pid != os.getpid():
            raise Closed("this client was made before a fork: make another one in the child")

    def _receive(self) -> None:
        """Read what has arrived, and give up what is overdue."""
        if (connection := self._connection) is not None:
            try:
                connection.flush()
                for answer in connection.receive():
                    self._take(connection, answer)
            except (Unavailable, ProtocolError) as error:
                self._lost(error)
        now_s = time.monotonic()
        overdue = [id for id, asked in self._asked.items() if asked.due_at_s <= now_s]
        for id in overdue:
            asked = self._asked.pop(id)
            self._complete(asked.ticket, asked.miss(Outcome.TIMEOUT))

    def _take(self, connection: Connection, answer: wire.Answer) -> None:
        asked = self._asked.pop(answer.id, None)
        if asked is None:
            if isinstance(answer, wire.Refused) and answer.id == 0:
                raise ProtocolError(f"the service ended the session: {answer.message}")
            if leases := _leases_of(answer):  # too late: nobody waits for these any more
                connection.send(wire.encode(wire.Return(leases)))
        elif isinstance(answer, wire.Refused):
            faults.warn(f"client.refused_{answer.kind}", message=answer.message)
            self._complete(asked.ticket, _refused(asked, answer))
        else:
            try:
                self._complete(asked.ticket, asked.read(answer))
            except (AttributeError, IndexError, ProtocolError) as error:
                self._complete(asked.ticket, asked.miss(Outcome.ERROR))
                raise ProtocolError(f"the service's answer does not fit the request: {error}") from error

    def _complete(self, ticket: Ticket[Any], result: Any) -> None:
        ticket.complete(result)
        self._completed.append(ticket)

    # Finding -----------------------------------------------------------------------------------------------

    def open_scope(self, namespace: Digest, name: str = "", *, group: str = "") -> Ticket[Scope | None]:
        """What keys and shelves are derived from: one for each namespace and customer (a `cache_salt`, say).

        `group`: of a share group that this tenant reads. None when the service gives none, or is gone; those that
        were given before are remembered.
        """
        if len(namespace) != KEY_BYTES:
            raise Rejected(f"a namespace is a digest of {KEY_BYTES} bytes, not of {len(namespace)}")
        place = (namespace, name, group)
        self._check_process()
        with self._lock:
            if (known := self._scopes.get(place)) is not None:
                self._scopes.move_to_end(place)
                return Ticket[Scope | None].done(known)
        digest = scope_digest(name)

        def read(answer: wire.ScopeOpened) -> Scope | None:
            scope = Scope(namespace, Digest(answer.tenant), digest, Key(answer.root))
            self._scopes[place] = scope
            if len(self._scopes) > _SCOPES_MAX:
                self._scopes.popitem(last=False)
            return scope

        return self._ask(
            lambda id: wire.OpenScope(id, namespace, digest, group), self._calls.control_s, read, lambda _: None
        )

    def match(self, shelves: Sequence[Shelf], keys: Sequence[Key]) -> Ticket[Match]:
        """Find the longest prefix of `keys` whose block stands on every one of `shelves` (one for each part)."""
        shelves = _checked(shelves)
        joined = Keys.of(keys[: _keys_max(shelves)])
        nothing = tuple(_NO_ROWS for _ in shelves), tuple(np.empty(0, np.int8) for _ in shelves)

        def read(answer: wire.Found) -> Match:
            sizes = tuple(map(wire.unpack_numbers, answer.frame_bytes))
            tiers = tuple(np.frombuffer(each, np.int8) for each in answer.tiers)
            if {len(shelves)} != {len(sizes), len(tiers)} or {answer.blocks} != {*map(len, sizes), *map(len, tiers)}:
                raise ProtocolError("a match that does not fit the question")
            return Match(shelves, joined, answer.blocks, sizes, tiers)

        if not shelves:
            return Ticket.done(Match(shelves, joined, 0, (), ()))
        return self._ask(
            lambda id: wire.Find(id, _pack(shelves), joined.joined),
            self._calls.match_s,
            read,
            lambda _: Match(shelves, joined, 0, *nothing),
        )

    def plan(self, match: Match, *, first_page: int = 0, pages_per_block: int = 1) -> Plan:
        """Choose what of a match to fetch: all from `first_page` on (those before are in the engine already),
        as far as one request's share of the arena goes."""
        return match.plan(self._request_bytes_max, first_page, pages_per_block)

    # Reading -----------------------------------------------------------------------------------------------

    def match_and_lease(
        self,
        shelves: Sequence[Shelf],
        keys: Sequence[Key],
        *,
        first_page: int = 0,
        pages_per_block: int = 1,
        deadline_s: float | None = None,
    ) -> Ticket[Leased]:
        """`match`, `plan` and `fetch` of every shelf in one round trip: what an engine asks for each request.

        `release` each of the fetched ones; what one shelf brought and another did not is among them.
        """
        shelves = _checked(shelves)
        check_pages(first_page, pages_per_block)
        deadline_s = self._fetch_s(deadline_s)

        def read(answer: wire.PiecesLeased) -> Leased:
            if len(answer.pieces) != len(shelves):
                raise ProtocolError("a lease that does not fit the question")
            fetched = tuple(self._fetched(piece) for piece in answer.pieces)
            return Leased(answer.matched_blocks, answer.first_block, fetched)

        def miss(why: Outcome) -> Leased:
            return Leased(0, 0, tuple(Fetched(0, 0, None, outcome=why) for _ in shelves))

        if not shelves:
            return Ticket.done(miss(Outcome.HIT))
        keys_max = _keys_max(shelves)
        joined = Keys.of(keys if len(keys) <= keys_max else keys[:keys_max]).joined
        return self._ask(
            lambda id: wire.MatchAndLease(
                id, _pack(shelves), joined, int(first_page), int(pages_per_block), _for_the_service(deadline_s)
            ),
            deadline_s,
            read,
            miss,
        )

    def fetch(self, plan: Plan, shelf: Shelf | None = None, *, deadline_s: float | None = None) -> Ticket[Fetched]:
        """Lease the plan's blocks in DRAM, bringing up what is lower. The result holds the blocks, from the
        plan's first on, that were there by the deadline; `release` its lease when they are copied."""
        return self._fetch(plan, shelf, 0.0, deadline_s)

    def pin(
        self, plan: Plan, shelf: Shelf | None = None, *, ttl_s: float, deadline_s: float | None = None
    ) -> Ticket[Fetched]:
        """Keep the plan's blocks in DRAM for `ttl_s` seconds, or until `release`. All pins together get a share
        of the arena; beyond it nothing is pinned."""
        return self._fetch(plan, shelf, min(max(ttl_s, _PIN_S_MIN), _PIN_S_MAX), deadline_s)

    def _fetch(self, plan: Plan, shelf: Shelf | None, pin_s: float, deadline_s: float | None) -> Ticket[Fetched]:
        if not plan.match.shelves or plan.first_block == plan.end_block:
            return Ticket.done(Fetched(0, 0, None))
        deadline_s = self._fetch_s(deadline_s)
        place, keys, sizes, tiers = _parts_of(plan, shelf)
        return self._ask(
            lambda id: wire.Fetch(id, place, keys, sizes, tiers, plan.first_page, pin_s, _for_the_service(deadline_s)),
            deadline_s,
            lambda answer: self._fetched(answer.piece),
            lambda why: Fetched(0, 0, None, outcome=why),
        )

    def _fetch_s(self, deadline_s: float | None) -> float:
        connection = self._connection
        longest_s = connection.welcome.fetch_s if connection is not None else 0.0
        return longest_s if deadline_s is None else min(deadline_s, longest_s)

    def _fetched(self, piece: wire.Piece) -> Fetched:
        outcome = wire.unpack_outcome(piece.outcome)
        if not piece.lease:
            return Fetched(0, 0, None, outcome=outcome)
        slots = self._slots(piece.arena, wire.unpack_numbers(piece.offsets), wire.unpack_numbers(piece.sizes))
        return Fetched(len(slots.offsets), piece.first_page, self._lease(Use.READ, piece.lease), slots, outcome)

    def _slots(self, arena: int, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Slots:
        assert self._connection is not None
        memory: Memory = self._connection.arenas[arena]
        if len(offsets) and not _fit(offsets, sizes, len(memory)):
            raise ProtocolError("a slot outside of the arena")
        return Slots(memory, offsets, sizes)

    def _lease(self, use: Use, number: int) -> Lease:
        """`holder` is the number of the connection: what an earlier one gave cannot be returned to this one."""
        assert self._connection is not None
        lease = Lease(use, self._connection.number, _NO_ROWS, 0, 0.0)
        lease.number = number
        self._connection.held.add(number)
        return lease

    def release(self, fetched: Fetched) -> None:
        """Give a fetch's or a pin's lease back. Its payloads may change from now on. Twice is once."""
        self._return(fetched.lease)

    def _return(self, lease: Lease | None) -> None:
        self._check_process()
        with self._lock:
            if lease is None or lease.is_over:
                return
            lease.is_over = True
            connection = self._connection
            if connection is not None and lease.holder == connection.number:
                connection.held.discard(lease.number)
                self._tell(wire.Return((lease.number,)))
            elif (lost := self._former.get(lease.holder)) is not None:
                lost.held.discard(lease.number)
                self._tell(wire.Return((lease.number,), lost.session))

    def prefetch(self, plan: Plan, shelf: Shelf | None = None) -> Ticket[int]:
        """Begin to bring the plan's blocks up into DRAM. The result is how many are there or on their way."""
        if not plan.match.shelves or plan.first_block == plan.end_block:
            return Ticket.done(0)
        place, keys, sizes, tiers = _parts_of(plan, shelf)
        return self._ask(
            lambda id: wire.Prefetch(id, place, keys, sizes, tiers),
            self._calls.control_s,
            lambda answer: int(answer.count),
            lambda _: 0,
        )

    # Writing -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        shelf: Shelf,
        keys: Sequence[Key],
        layout: Layout,
        *,
        position: int = 0,
        parent: Key = NO_PARENT,
    ) -> Ticket[Reservation]:
        """Ask for slots for consecutive blocks of one chain; `position` and `parent` are those of the first.

        A full arena is REJECTED, never waited for. What is given must be published or aborted.
        Raises Rejected for arguments that cannot be a chain.
        """
        keys = tuple(keys)
        check_chain(keys, position, parent)
        beyond = len(keys) - wire.KEYS_MAX

        def read(answer: wire.Reserved) -> Reservation:
            outcomes = wire.unpack_outcomes(answer.outcomes)
            offsets = wire.unpack_numbers(answer.offsets)
            if len(outcomes) + max(beyond, 0) != len(keys) or outcomes.count(Outcome.MISS) != len(offsets):
                raise ProtocolError("a reservation that does not fit the question")
            outcomes += [Outcome.REJECTED] * beyond
            slots = self._slots(answer.arena, offsets, np.array([layout.payload_bytes], np.int64))
            lease = self._lease(Use.WRITE, answer.lease) if answer.lease else None
            return Reservation(shelf, keys, outcomes, slots, [], lease)

        def miss(_: Outcome) -> Reservation:
            none = Slots(np.empty(0, np.uint8), _NO_ROWS, _NO_ROWS)
            return Reservation(shelf, keys, [Outcome.REJECTED] * len(keys), none, [])

        return self._ask(
            lambda id: wire.Reserve(
                id,
                shelf.pack(),
                b"".join(keys[: wire.KEYS_MAX]),
                layout.layers,
                layout.pages,
                layout.page_tokens,
                layout.page_bytes,
                position,
                parent,
            ),
            self._calls.control_s,
            read,
            miss,
        )

    def publish(self, reservation: Reservation, which: Sequence[int] | None = None) -> Ticket[list[Outcome]]:
        """Make filled slots visible: all, or those of the keys at `which`; the rest is aborted.

        An outcome for each key as in the reservation: HIT, it is there; REJECTED, it came too late.
        """
        lease = reservation.lease
        chosen = range(len(reservation.keys)) if which is None else which
        too_late = list(reservation.outcomes)
        for i in chosen:
            if too_late[i] is Outcome.MISS:
                too_late[i] = Outcome.REJECTED
        if lease is None:
            return Ticket.done(list(reservation.outcomes))
        self._check_process()
        with self._lock:
            if lease.is_over or self._connection is None or lease.holder != self._connection.number:
                self._return(lease)
                return Ticket.done(too_late)
            lease.is_over = True
            self._connection.held.discard(lease.number)
            beyond = too_late[wire.KEYS_MAX :]
            places = None if which is None else np.array([i for i in which if i < wire.KEYS_MAX], "<u4")
            return self._ask(
                lambda id: wire.Publish(id, lease.number, None if places is None else places.tobytes()),
                self._calls.control_s,
                lambda answer: wire.unpack_outcomes(answer.outcomes) + beyond,
                lambda _: too_late,
                is_owed=True,
            )

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back unfilled. Also the way to return a reservation that came too late. Twice is once."""
        self._return(reservation.lease)

    def report_prefill(self, namespace: Digest, tokens: int, seconds: float) -> None:
        """Tell how long the engine took to compute so many tokens: the service tells its operators what it saves."""
        if tokens < 0 or not 0 <= seconds <= 1e9 or len(namespace) != KEY_BYTES:
            raise Rejected(f"{tokens} tokens of a namespace of {len(namespace)} bytes in {seconds} s: that cannot be")
        self._tell(wire.ReportPrefill(namespace, int(tokens), float(seconds)))

    # Waiting, and the rest ---------------------------------------------------------------------------------

    def poll(self) -> list[Ticket[Any]]:
        """The tickets that were completed since the last poll; only the newest, if nobody polls for long."""
        self._check_process()
        with self._lock:
            self._receive()
            completed = list(self._completed)
            self._completed.clear()
            if completed:
                self._changed.notify_all()
            return completed

    def wait(self, ticket: Ticket[Any], timeout_s: float | None = None) -> bool:
        """Block until a ticket is done. For callers that have nothing else to do; engines poll."""
        self._check_process()
        end = Deadline.after(1e9 if timeout_s is None else timeout_s)
        with self._changed:
            self._receive()  # who asks ahead finds the answer there
            while not ticket.is_done and not end.has_passed:
                due_s = min((asked.due_at_s for asked in self._asked.values()), default=float("inf")) - time.monotonic()
                self._wait_for_news(max(0.0, min(end.left_s, due_s, 1.0)))
                self._receive()
            if ticket.is_done:  # who waited for it knows: no poll need keep its result
                if self._completed and self._completed[-1] is ticket:
                    self._completed.pop()
                elif ticket in self._completed:
                    self._completed.remove(ticket)
            self._changed.notify_all()
            return ticket.is_done

    def _wait_for_news(self, timeout_s: float) -> None:
        """With the lock held, which is let go meanwhile. One thread waits at the socket, the others for that one."""
        connection = self._connection
        if connection is None or self._is_somebody_reading:
            self._changed.wait(timeout_s)
            return
        self._is_somebody_reading = True
        self._lock.release()
        try:
            connection.wait_readable(timeout_s)
        finally:
            self._lock.acquire()
            self._is_somebody_reading = False
            self._changed.notify_all()

    def clear(self, *, namespace: Digest | None = None, prefix: Key | None = None) -> int:
        """Forget every block of this tenant, or those of a namespace, or a block and all that follow it. Blocks.

        Raises MediumFailed or Unavailable when it is not certain, Denied when this client may not.
        """
        result = self._answer(lambda id: wire.Clear(id, namespace, prefix), _CLEAR_S)
        assert isinstance(result, wire.Counted)
        return result.count

    def stats(self) -> dict[str, Any]:
        """What the service says of this tenant. Blocks; raises Unavailable when it does not answer."""
        result = self._answer(wire.AskStats, self._calls.control_s)
        assert isinstance(result, wire.Stats)
        stats: dict[str, Any] = msgspec.json.decode(result.json)
        return stats

    def _answer(self, make: Callable[[int], wire.Request], timeout_s: float) -> wire.Answer:
        """Ask, and wait: for calls that must not fail in silence."""
        ticket: Ticket[wire.Answer | None] = self._ask(make, timeout_s, _as_it_is, lambda _: None)
        self.wait(ticket, timeout_s + 1.0)
        answer = ticket.result if ticket.is_done else None
        if answer is None:
            raise Unavailable(f"the service at {self._path} does not answer: is it running?")
        if isinstance(answer, wire.Refused):
            raise _ERRORS.get(answer.kind, Rejected)(answer.message)
        return answer

    def close(self) -> None:
        """Say goodbye: what this client still holds goes back, so nothing may be copying any more. Twice is once."""
        if self._pid != os.getpid():
            return  # it is the parent's
        with self._lock:
            if self._is_closed.is_set():
                return
            for lost in list(self._former.values()):
                self._tell(wire.Keep(lost.session, ()))
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close(is_goodbye=True)
            self._is_closed.set()
            self._former.clear()  # what they held is nobody's concern any more: giving it back is no error
            asked, self._asked = self._asked, {}
            for each in asked.values():
                self._complete(each.ticket, each.miss(Outcome.ERROR))
            self._completed.clear()  # their results hold the arena
            self._changed.notify_all()
        if self._looks is not None:
            self._looks.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_it_is(answer: wire.Answer) -> wire.Answer:
    return answer


def _refused(asked: Asked[Any], answer: wire.Refused) -> Any:
    return answer if asked.read is _as_it_is else asked.miss(Outcome.REJECTED)


_ERRORS: dict[str, type[KvtideError]] = {error.kind: error for error in (Denied, MediumFailed, Rejected)}


def _fit(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], arena_bytes: int) -> bool:
    """Do all slots lie inside of the arena? As unsigned numbers, negative ones are too large as well."""
    if len(sizes) == 1:
        return int(offsets.view(np.uint64).max()) + int(sizes.view(np.uint64)[0]) <= arena_bytes
    if len(sizes) != len(offsets) or int(sizes.view(np.uint64).max()) > arena_bytes:
        return False
    return bool((offsets.view(np.uint64) <= (arena_bytes - sizes).view(np.uint64)).all())


def _checked(shelves: Sequence[Shelf]) -> tuple[Shelf, ...]:
    if len(shelves) > wire.SHELVES_MAX:
        raise Rejected(f"{len(shelves)} shelves in one call: ask for at most {wire.SHELVES_MAX} at a time")
    return tuple(shelves)


def _keys_max(shelves: tuple[Shelf, ...]) -> int:
    """Of how many keys an answer fits into one message: with an offset and a size for each, on every shelf."""
    return min(wire.KEYS_MAX, _ANSWER_BYTES // (16 * max(len(shelves), 1)))


def _pack(shelves: tuple[Shelf, ...]) -> tuple[bytes, ...]:
    return tuple(shelf.pack() for shelf in shelves)


def _parts_of(plan: Plan, shelf: Shelf | None) -> tuple[bytes, bytes, bytes, bytes]:
    """The shelf, keys, sizes and tiers of a plan, as they travel."""
    match = plan.match
    number = 0 if shelf is None else match.shelves.index(shelf)
    blocks = slice(plan.first_block, plan.end_block)
    return (
        match.shelves[number].pack(),
        Keys.of(plan.keys).joined,
        wire.pack_numbers(match.frame_bytes[number][blocks]),
        match.tiers[number][blocks].tobytes(),
    )


def _for_the_service(deadline_s: float) -> float:
    """A little less than the client's own, so that what has arrived by then still finds somebody waiting."""
    return max(0.0, deadline_s - min(0.02, deadline_s / 10))


def _leases_of(answer: wire.Answer) -> tuple[int, ...]:
    if isinstance(answer, wire.PiecesLeased):
        return tuple(piece.lease for piece in answer.pieces if piece.lease)
    if isinstance(answer, wire.PieceFetched):
        return (answer.piece.lease,) if answer.piece.lease else ()
    if isinstance(answer, wire.Reserved):
        return (answer.lease,) if answer.lease else ()
    return ()
