# SPDX-License-Identifier: Apache-2.0
"""Bringing blocks up into DRAM: each address in one *flight*, however many wait for it.

A flight owns a row of the DRAM tier from take-off to landing. Fetches that want the block hold the row
too, so it stays until the last of them has let go. A fetch whose deadline passes takes what has arrived
and leaves; flights that have begun land all the same and serve whoever comes next.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.deadline import Deadline
from kvtide.errors import Damaged
from kvtide.frame import Header, decode_header
from kvtide.keys import Address, Key, Shelf
from kvtide.observe.fault_log import FaultLog
from kvtide.outcome import Outcome
from kvtide.policy.policy import NO_ROW
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Tier

faults = FaultLog(logging.getLogger(__name__))

_BATCH_BYTES = 32 << 20  # of one read call: enough to keep a device busy, little enough to serve others soon
_BATCH_FRAMES = 256
_READERS = 2  # for each lower tier: one reads on while the other lands its flights


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one shelf to bring up, and where a match saw them: 0 is DRAM, then the lower tiers in order."""

    shelf: Shelf
    keys: Sequence[Key]
    frame_bytes: npt.NDArray[np.int64]
    tiers: npt.NDArray[np.int8]


@dataclass(slots=True, eq=False)
class Fetch:
    """A request for a run of blocks. `rows` are held for it; those from `end` on are not wanted any more."""

    rows: list[int]
    deadline: Deadline
    holder: int
    on_done: Callable[[Fetch], None]
    end: int
    outcome: Outcome = Outcome.HIT
    missing: set[int] = field(default_factory=set)  # places in `rows` whose flights have not landed

    def cut(self, at: int, outcome: Outcome) -> None:
        if at < self.end:
            self.end, self.outcome = at, outcome
            self.missing = {place for place in self.missing if place < at}


@dataclass(slots=True, eq=False)
class Flight:
    """One block on its way up."""

    address: Address
    row: int
    waiting: list[tuple[Fetch, int]] = field(default_factory=list)
    is_wanted: bool = False  # by a prefetch: nobody waits, but it shall come
    is_cleared: bool = False  # the block was cleared meanwhile: it must not become visible


class Fetches:
    """All fetches and flights of a store. Methods without a note are called with the DRAM tier's lock held."""

    def __init__(self, dram: DramTier, lower: Sequence[Tier], on_landed: Callable[[list[int], int], None]) -> None:
        self._dram = dram
        self._lower = lower
        self._on_landed = on_landed
        self._work = [threading.Condition(dram.lock) for _ in lower]  # one each: a waiter is of the right tier
        self._queues: list[deque[Flight]] = [deque() for _ in lower]
        self._flights: dict[Address, Flight] = {}
        self._open: set[Fetch] = set()
        self._clears: list[Callable[[Shelf], bool]] = []  # under way: their shelves have no flights
        self._is_closing = False
        self.joined = 0  # flights that served one more fetch
        self._threads = [
            threading.Thread(target=self._read_forever, args=(number,), name=f"kvtide-read-{tier.traits.name}-{i}")
            for number, tier in enumerate(lower)
            for i in range(_READERS)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def start(self, wanted: Wanted, deadline: Deadline, holder: int, on_done: Callable[[Fetch], None]) -> None:
        """Hold what is in DRAM, join or begin flights for the rest; calls `on_done` when all that can come has."""
        table = self._dram.table
        found = table.find(wanted.shelf, wanted.keys)
        fetch = Fetch(found.tolist(), deadline, holder, on_done, len(found))
        here = found[found != NO_ROW]
        self._dram.hold(here)
        table.policy.touch(here)
        if len(here) < len(found):
            self._lift(fetch, wanted)
        if fetch.missing:
            self._open.add(fetch)
        else:
            self._finish(fetch)

    def prefetch(self, wanted: Wanted) -> int:
        """Begin flights that nobody waits for. Returns how many blocks are here or on their way."""
        rows = self._dram.table.find(wanted.shelf, wanted.keys)
        places = np.flatnonzero(rows == NO_ROW).tolist()
        flights, _ = self._flights_for(wanted, places)
        for flight in flights:
            flight.is_wanted = True
        return len(rows) if len(flights) == len(places) else places[len(flights)]

    def expire(self) -> None:
        """End the fetches whose deadline has passed with what has arrived."""
        for fetch in [fetch for fetch in self._open if fetch.deadline.has_passed]:
            fetch.cut(min(fetch.missing), Outcome.TIMEOUT)
            self._settle(fetch)

    def next_deadline_s(self) -> float:
        return min((fetch.deadline.left_s for fetch in self._open), default=float("inf"))

    def forget(self, holder: int) -> None:
        """End the fetches of a client that is dead: nobody would give back what they bring."""
        for fetch in [fetch for fetch in self._open if fetch.holder == holder]:
            fetch.cut(0, Outcome.REJECTED)
            self._settle(fetch)

    def begin_clear(self, is_meant: Callable[[Shelf], bool]) -> None:
        """Flights of these shelves shall not become visible, and none begin until `end_clear`: a lower tier that is
        not cleared yet would give them what is about to go."""
        self._clears.append(is_meant)
        for flight in self._flights.values():
            if is_meant(flight.address.shelf):
                flight.is_cleared = True

    def end_clear(self, is_meant: Callable[[Shelf], bool]) -> None:
        self._clears.remove(is_meant)

    def close(self) -> None:
        """Without the lock: end all reads, then the flights that were not begun and the fetches that wait for them."""
        with self._dram.lock:
            self._is_closing = True
            for work in self._work:
                work.notify_all()
        for thread in self._threads:
            thread.join()
        with self._dram.lock:
            flights = list(self._flights.values())
            self._land(flights, [Outcome.ERROR] * len(flights), [None] * len(flights), 0)

    def _lift(self, fetch: Fetch, wanted: Wanted) -> None:
        places = [place for place, row in enumerate(fetch.rows) if row == NO_ROW]
        known = len(self._flights)
        flights, outcome = self._flights_for(wanted, places)
        self.joined += len(flights) - (len(self._flights) - known)
        for place, flight in zip(places, flights, strict=False):
            flight.waiting.append((fetch, place))
            fetch.rows[place] = flight.row
        fetch.missing.update(places[: len(flights)])
        self._dram.hold(np.array([flight.row for flight in flights], np.int64))
        if len(flights) < len(places):
            fetch.cut(places[len(flights)], outcome)

    def _flights_for(self, wanted: Wanted, places: list[int]) -> tuple[list[Flight], Outcome]:
        """The flights that bring these blocks up, under way or new, in their order; fewer when one has none, and why.

        Slots are taken for all of them at once: one by one, making room would keep everybody else from the lock.
        """
        if any(is_meant(wanted.shelf) for is_meant in self._clears):
            return [], Outcome.MISS
        addresses: list[Address] = []
        found: dict[Address, tuple[int, int]] = {}  # those without a flight: which tier has it, and its size
        outcome = Outcome.HIT
        keys = [*wanted.keys]
        for place in places:
            address = Address(wanted.shelf, keys[place])
            flight = self._flights.get(address)
            if flight is None and address not in found:
                found[address] = self._whereabouts(address, wanted, place)
            if (flight is not None and flight.is_cleared) or (flight is None and not found[address][1]):
                outcome = Outcome.MISS
                found.pop(address, None)
                break
            addresses.append(address)
        if not self._take_off(found):
            outcome = Outcome.REJECTED
        flights = []
        for address in addresses:
            flight = self._flights.get(address)
            if flight is None:
                break
            flights.append(flight)
        return flights, outcome

    def _whereabouts(self, address: Address, wanted: Wanted, place: int) -> tuple[int, int]:
        """The number of the lower tier that has a block, and the size of its frame; size 0: none has it."""
        number, frame_bytes = int(wanted.tiers[place]) - 1, int(wanted.frame_bytes[place])
        if number < 0:  # it was in DRAM when it was matched, and has left since
            return self._look_below(address)
        return (number, frame_bytes) if number < len(self._lower) else (0, 0)

    def _take_off(self, found: dict[Address, tuple[int, int]]) -> bool:
        """Begin a flight for each, in order, until DRAM has no slot for the next: then False."""
        counts = Counter(frame_bytes for _, frame_bytes in found.values())  # mostly of one size
        pools = {address.shelf: self._dram.pool_of(address.shelf) for address in found}
        rows = {
            frame_bytes: deque(self._dram.take(frame_bytes, count, *set(pools.values())))
            for frame_bytes, count in counts.items()
        }
        for address, (number, frame_bytes) in found.items():
            if not rows[frame_bytes]:
                break
            flight = self._flights[address] = Flight(address, rows[frame_bytes].popleft())
            self._queues[number].append(flight)
        for number in {number for number, _ in found.values()}:
            self._work[number].notify(_READERS)
        left = [row for some in rows.values() for row in some]
        if left:
            self._dram.release(left)
        return all(address in self._flights for address in found)

    def _look_below(self, address: Address) -> tuple[int, int]:
        for number, tier in enumerate(self._lower):
            if frame_bytes := int(tier.lookup(address.shelf, [address.key])[0]):
                return number, frame_bytes
        return 0, 0

    def _read_forever(self, number: int) -> None:
        queue, tier, work = self._queues[number], self._lower[number], self._work[number]
        while True:
            with work:
                while not queue and not self._is_closing:
                    work.wait()
                if self._is_closing:
                    return
                flights = self._board(queue)
            outcomes = self._read(tier, flights)
            headers = [self._header(flight, outcome) for flight, outcome in zip(flights, outcomes, strict=True)]
            with work:
                self._land(flights, outcomes, headers, number)

    def _read(self, tier: Tier, flights: list[Flight]) -> list[Outcome]:
        try:
            return tier.read([each.address for each in flights], [self._dram.memory(each.row) for each in flights])
        except Exception as error:
            # A mistake in a tier must cost its blocks, not this thread: others wait for it.
            faults.warn("store.read_failed", tier=tier.traits.name, error=repr(error))
            return [Outcome.ERROR] * len(flights)

    def _board(self, queue: deque[Flight]) -> list[Flight]:
        """The next flights to read together. Those that nobody wants any more end here."""
        flights: list[Flight] = []
        size = 0
        while queue and size < _BATCH_BYTES and len(flights) < _BATCH_FRAMES:
            flight = queue.popleft()
            if flight.waiting or flight.is_wanted:
                flights.append(flight)
                size += int(self._dram.table.frame_bytes[flight.row])
            else:
                self._land([flight], [Outcome.TIMEOUT], [None], 0)
        return flights

    def _header(self, flight: Flight, outcome: Outcome) -> Header | None:
        """Without the lock: what a frame that has arrived says of itself, None when it is not the one asked for.

        The tier has verified it, but in memory that clients of this tenant may write to: what is read there once
        more could be anything by now, and must not lead to another shelf.
        """
        if outcome is not Outcome.HIT:
            return None
        try:
            header, _ = decode_header(self._dram.memory(flight.row))
        except Damaged as error:
            faults.warn("store.changed_in_memory", error=error)
            return None
        if header.address != flight.address:
            faults.warn("store.changed_in_memory", error="the frame is another one")
            return None
        return header

    def _land(
        self, flights: list[Flight], outcomes: list[Outcome], headers: Sequence[Header | None], number: int
    ) -> None:
        """Flights have ended. All in one step, because everybody waits for the lock meanwhile."""
        outcomes = list(outcomes)
        arrived: dict[Shelf, list[tuple[int, Header]]] = {}
        for i, (flight, header) in enumerate(zip(flights, headers, strict=True)):
            del self._flights[flight.address]
            if header is None:
                if outcomes[i] is Outcome.HIT:
                    outcomes[i] = Outcome.CORRUPT
                continue
            self._dram.header[flight.row] = header
            # Written anew since it was matched, and shorter: behind it stands what another block left in the slot.
            is_whole = header.frame_bytes == self._dram.table.frame_bytes[flight.row]
            if flight.is_cleared or not is_whole:
                outcomes[i] = Outcome.MISS
            else:
                arrived.setdefault(header.shelf, []).append((flight.row, header))
        for shelf, blocks in arrived.items():
            rows, keys = [row for row, _ in blocks], [header.key for _, header in blocks]
            self._on_landed(self._dram.publish(shelf, rows, keys, [header.parent for _, header in blocks]), number)
        self._dram.release([flight.row for flight in flights])
        for flight, outcome in zip(flights, outcomes, strict=True):
            for fetch, place in flight.waiting:
                fetch.missing.discard(place)
                if outcome is not Outcome.HIT:
                    fetch.cut(place, outcome)
                self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        if fetch in self._open and not fetch.missing:
            self._open.remove(fetch)
            self._finish(fetch)

    def _finish(self, fetch: Fetch) -> None:
        unwanted = [row for row in fetch.rows[fetch.end :] if row != NO_ROW]
        if unwanted:
            for flight in self._flights.values():
                flight.waiting = [each for each in flight.waiting if each[0] is not fetch]
            self._dram.release(unwanted)
        del fetch.rows[fetch.end :]
        fetch.on_done(fetch)
