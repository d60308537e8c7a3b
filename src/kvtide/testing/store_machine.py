# SPDX-License-Identifier: Apache-2.0
"""A store under random orders, checked against a model; runs on anybody's lower tiers.

    Machine = make_store_machine(lambda folder: [Lower(MyTier(folder))])
    run_state_machine_as_test(Machine)

The model is small: which blocks were published and not cleared since. A cache may forget any of them; it
may not show others, nor other bytes, nor change memory that somebody has leased. The store's threads are
real, so nothing that is drawn depends on what they have done by then.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.config import LeaseSettings
from kvtide.frame import HEADER_BYTES, NO_PARENT, Memory
from kvtide.keys import Address, Digest, Key, Part, Shelf
from kvtide.layout import Layout
from kvtide.memory.arena import round_up
from kvtide.store.store import Lower, Store
from kvtide.store.tickets import Fetched, Match, Plan, Reservation, Ticket
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.testing.blocks import shelf as make_shelf
from kvtide.testing.faults import FailingDevice, FaultyTier, VirtualClock
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Outcome, Tier

HIT, MISS, PENDING, REJECTED = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.REJECTED
_FAILURES = [Outcome.ERROR, Outcome.TIMEOUT, Outcome.THROTTLED, Outcome.REJECTED, Outcome.MISS]

# What an engine does with a store ---------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def payload_of(address: Address, payload_bytes: int) -> Memory:
    """The one payload that may ever be found under an address."""
    payload = pattern(address, payload_bytes)
    payload.flags.writeable = False
    return payload


def fill(reservation: Reservation, payload_bytes: int) -> None:
    """Write into each slot what belongs there."""
    for key, slot in zip(reservation.keys, reservation.payloads, strict=True):
        if slot is not None:
            slot[:] = payload_of(Address(reservation.shelf, key), payload_bytes)


def save(
    store: Store, shelf: Shelf, keys: Sequence[Key], layout: Layout, *, first: int = 0, holder: int = 0
) -> list[Outcome]:
    """Reserve, fill and publish the blocks of a chain from its block `first` on."""
    parent = keys[first - 1] if first else NO_PARENT
    reservation = store.reserve(shelf, keys[first:], layout, position=first, parent=parent, holder=holder).result
    fill(reservation, layout.payload_bytes)
    return store.publish(reservation)


def matched(store: Store, shelves: Shelf | Sequence[Shelf], keys: Sequence[Key]) -> Match:
    return store.match([shelves] if isinstance(shelves, Shelf) else shelves, keys).result


def fetch(store: Store, shelf: Shelf, keys: Sequence[Key], *, holder: int = 0) -> Fetched:
    """Match, plan, fetch, and wait for it."""
    ticket = store.fetch(store.plan(matched(store, shelf, keys)), holder=holder)
    store.wait(ticket)
    return ticket.result


def assert_payloads(shelf: Shelf, keys: Sequence[Key], payloads: Sequence[Memory], layout: Layout, page: int) -> None:
    """These are the blocks' own bytes, those of the first one from a page on."""
    for i, (key, payload) in enumerate(zip(keys, payloads, strict=False)):
        right = payload_of(Address(shelf, key), layout.payload_bytes)
        first = page if i == 0 else 0
        same = np.array_equal(layout.from_page(payload, first), layout.from_page(right, first))
        assert same, f"block {i} of {len(payloads)} holds bytes that are not its own"


# The world of the machine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One conversation of one tenant with one model: a chain whose blocks have two parts."""

    namespace: str
    layout: Layout
    tenant: str
    keys: tuple[Key, ...]

    @property
    def shelves(self) -> list[Shelf]:
        return [make_shelf(self.tenant, namespace=self.namespace, part=Part(rank=i, ranks=2)) for i in range(2)]


# Frames of 8 and 32 KiB: a few dozen of them fill the arena, and all of them together do not fit on a small disk.
_MODELS = {"small": Layout(1, 2, 16, 50), "large": Layout(2, 4, 16, 3500)}
_TENANTS = ["ada", "bob"]
_TRUNK = 2  # blocks that all chains share
CHAIN_BLOCKS = 8
LINES = [
    Line(name, layout, tenant, (*chain_keys("trunk", _TRUNK), *chain_keys(branch, CHAIN_BLOCKS - _TRUNK)))
    for name, layout in _MODELS.items()
    for tenant in _TENANTS
    for branch in range(3)
]
HOLDERS = [1, 2, 3]
ARENA_BYTES = 512 << 10
LEASES = LeaseSettings(lease_s=30.0, fetch_s=10.0)

lines = st.sampled_from(LINES)
parts = st.integers(0, 1)
counts = st.integers(1, CHAIN_BLOCKS)
holders = st.sampled_from(HOLDERS)
picks = st.integers(0, 1 << 16)  # of a list whose length is not known when it is drawn


@dataclass
class Read:
    """A fetch or a pin: under way, or leased and to be given back."""

    line: Line
    shelf: Shelf
    plan: Plan
    holder: int
    ticket: Ticket[Fetched]
    expires_at_s: float | None = None  # of a pin

    def check(self) -> None:
        fetched = self.ticket.result
        planned = self.plan.end_block - self.plan.first_block
        assert fetched.blocks == len(fetched.payloads) <= planned
        assert (fetched.outcome is HIT) == (fetched.blocks == planned), "a short fetch says why, a full one is a hit"
        assert (fetched.lease is None) == (fetched.blocks == 0)
        assert fetched.first_page == (self.plan.first_page if fetched.blocks else 0)
        assert_payloads(self.shelf, self.plan.keys, fetched.payloads, self.line.layout, fetched.first_page)

    @property
    def addresses(self) -> list[Address]:
        return [Address(self.shelf, key) for key in self.plan.keys[: self.ticket.result.blocks]]


@dataclass
class Write:
    """Slots that an engine is filling."""

    line: Line
    reservation: Reservation
    holder: int
    expires_at_s: float
    is_cleared: bool = False

    def slots(self) -> list[tuple[Address, Memory]]:
        pairs = zip(self.reservation.keys, self.reservation.payloads, strict=True)
        return [(Address(self.reservation.shelf, key), slot) for key, slot in pairs if slot is not None]


@dataclass
class Model:
    """What may be found, and who holds what."""

    possible: set[Address] = field(default_factory=set)  # published, and not cleared since
    uncleared: set[Address] = field(default_factory=set)  # cleared on a device that failed: may be back after a restart
    reads: list[Read] = field(default_factory=list)  # leased
    flights: list[Read] = field(default_factory=list)  # not waited for yet
    pins: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    prefetches: list[tuple[Shelf, Plan]] = field(default_factory=list)


MakeLower = Callable[[Path], Sequence[Lower]]
Damage = Callable[[Path, random.Random], None]


class StoreMachine(RuleBasedStateMachine):
    """See the module's text. Made by `make_store_machine`, which supplies what is declared first."""

    make_lower: staticmethod[[Path], Sequence[Lower]]
    damage: staticmethod[[Path, random.Random], None] | None
    device: FailingDevice | None
    folder_bytes_max: int | None

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvtide-"))
        self.folder = self.root / "0"
        self.clock = VirtualClock()
        self.model = Model()
        self.is_calm = True
        self.is_damaged = False
        self.lives = 0
        self.open()

    @initialize(is_calm=st.booleans())
    def choose_the_weather(self, is_calm: bool) -> None:
        """In calm examples nothing fails, so that more can be demanded of them."""
        self.is_calm = is_calm

    def open(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.lower = [replace(each, tier=FaultyTier(each.tier)) for each in self.make_lower(self.folder)]
        self.store = Store(
            DramTier(ARENA_BYTES, huge_pages=False), self.lower, leases=LEASES, clock=self.clock
        )

    @property
    def faulty_tiers(self) -> list[FaultyTier]:
        return [each.tier for each in self.lower if isinstance(each.tier, FaultyTier)]

    # Writing -----------------------------------------------------------------------------------------------

    @rule(line=lines, part=parts, first=st.integers(0, 5), count=counts, holder=holders, end=st.sampled_from("pppsak"))
    def save(self, line: Line, part: int, first: int, count: int, holder: int, end: str) -> None:
        shelf, keys = line.shelves[part], line.keys[first : first + count]
        parent = line.keys[first - 1] if first else NO_PARENT
        ticket = self.store.reserve(shelf, keys, line.layout, position=first, parent=parent, holder=holder)
        write = Write(line, ticket.result, holder, self.clock() + LEASES.lease_s)
        self.check_reservation(write)
        fill(write.reservation, line.layout.payload_bytes)
        self.model.writes.append(write)
        if end != "k":
            self.end_write(len(self.model.writes) - 1, end)

    def check_reservation(self, write: Write) -> None:
        reservation = write.reservation
        pending = {address for each in self.running_writes() for address, _ in each.slots()}
        for key, outcome, slot in zip(reservation.keys, reservation.outcomes, reservation.payloads, strict=True):
            address = Address(reservation.shelf, key)
            assert (outcome is MISS) == (slot is not None)
            assert outcome is not HIT or address in self.model.possible, "a hit on a block that nobody published"
            assert (outcome is PENDING) <= (address in pending), "pending, but nobody fills it"
        taken = sum(round_up(HEADER_BYTES + len(slot)) for _, slot in write.slots())
        assert taken <= LEASES.request_share * ARENA_BYTES

    def running_writes(self) -> list[Write]:
        return [each for each in self.model.writes if each.expires_at_s > self.clock() and not each.is_cleared]

    @rule(pick=picks, end=st.sampled_from("psa"))
    def end_write(self, pick: int, end: str) -> None:
        """Publish all, publish some, or abort what has been reserved."""
        if not self.model.writes:
            return
        write = self.model.writes.pop(pick % len(self.model.writes))
        if end == "a":
            self.store.abort(write.reservation)
            self.store.abort(write.reservation)
            return
        which = None if end == "p" else [i for i in range(len(write.reservation.keys)) if i % 3 != pick % 3]
        is_late = write.is_cleared or write.expires_at_s <= self.clock()
        outcomes = self.store.publish(write.reservation, which)
        for i, (key, slot) in enumerate(zip(write.reservation.keys, write.reservation.payloads, strict=True)):
            if slot is None or (which is not None and i not in which):
                assert outcomes[i] is write.reservation.outcomes[i]
            else:
                assert outcomes[i] is (REJECTED if is_late else HIT)
                if not is_late:
                    self.model.possible.add(Address(write.reservation.shelf, key))

    # Reading -----------------------------------------------------------------------------------------------

    def plan(self, line: Line, which: Sequence[int], count: int, first_page: int = 0) -> Plan:
        match = self.match(line, which, count)
        plan = self.store.plan(match, first_page=first_page, pages_per_block=line.layout.pages)
        assert plan.first_block <= plan.end_block <= match.blocks
        assert bool(plan.reasons) == (plan.end_block < match.blocks)
        return plan

    @rule(line=lines, which=st.sampled_from([[0], [1], [0, 1], [1, 0]]), count=counts)
    def match(self, line: Line, which: Sequence[int], count: int) -> Match:
        shelves, keys = [line.shelves[i] for i in which], line.keys[:count]
        before = self.found_in_tiers(shelves, keys)
        match = matched(self.store, shelves, keys)
        after = self.found_in_tiers(shelves, keys)
        if before == after:  # otherwise the background moved something meanwhile
            assert match.blocks == next((i for i, is_found in enumerate(before) if not is_found), len(keys))
        if not self.is_damaged:  # a damaged index may promise anything; reads find out
            found = {Address(shelf, key) for shelf in shelves for key in keys[: match.blocks]}
            assert found <= self.model.possible, "a match of what nobody published, or of what was cleared"
        return match

    def found_in_tiers(self, shelves: Sequence[Shelf], keys: Sequence[Key]) -> list[bool]:
        """Whether each block stands, with every part, on some tier."""
        found = np.ones(len(keys), np.bool_)
        for shelf in shelves:
            found &= np.any([tier.lookup(shelf, keys) > 0 for tier in self.store.tiers], axis=0)
        flags: list[bool] = found.tolist()
        return flags

    @rule(line=lines, part=parts, count=counts, first_page=st.integers(0, 10), holder=holders, end=st.sampled_from("rkw"))
    def fetch(self, line: Line, part: int, count: int, first_page: int, holder: int, end: str) -> None:
        """Fetch, and release at once, keep the lease, or wait for it in a later step."""
        plan, shelf = self.plan(line, [part], count, first_page), line.shelves[part]
        read = Read(line, shelf, plan, holder, self.store.fetch(plan, holder=holder))
        self.model.flights.append(read)
        if end != "w":
            self.await_flight(len(self.model.flights) - 1, keep=end == "k")

    @rule(line=lines, count=counts, part=parts, holder=holders)
    def fetch_for_both_parts(self, line: Line, count: int, part: int, holder: int) -> None:
        plan, shelf = self.plan(line, [0, 1], count), line.shelves[part]
        read = Read(line, shelf, plan, holder, self.store.fetch(plan, shelf, holder=holder))
        self.model.flights.append(read)
        self.await_flight(len(self.model.flights) - 1, keep=False)

    @rule(line=lines, part=parts, count=counts, holder=holders)
    def fetch_too_late(self, line: Line, part: int, count: int, holder: int) -> None:
        plan, shelf = self.plan(line, [part], count), line.shelves[part]
        read = Read(line, shelf, plan, holder, self.store.fetch(plan, deadline_s=0.0, holder=holder))
        self.model.flights.append(read)
        self.store.poll()
        assert read.ticket.is_done, "the deadline has passed and the fetch goes on"
        self.await_flight(len(self.model.flights) - 1, keep=False)

    @rule(pick=picks, keep=st.booleans())
    def await_flight(self, pick: int, keep: bool) -> None:
        if not self.model.flights:
            return
        read = self.model.flights.pop(pick % len(self.model.flights))
        self.store.wait(read.ticket)
        self.arrived(read)
        if keep and read.ticket.result.lease is not None:
            self.model.reads.append(read)
        else:
            self.store.release(read.ticket.result)

    def arrived(self, read: Read) -> None:
        read.check()
        assert set(read.addresses) <= self.model.possible | self.cleared_while_leased(read), "served what was cleared"

    def cleared_while_leased(self, read: Read) -> set[Address]:
        """A fetch that began before a clear keeps the slots that it already held."""
        return set(read.addresses) if read.plan in self.cleared_plans else set()

    @property
    def cleared_plans(self) -> list[Plan]:
        return []

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        if self.model.reads:
            fetched = self.model.reads.pop(pick % len(self.model.reads)).ticket.result
            self.store.release(fetched)
            self.store.release(fetched)
