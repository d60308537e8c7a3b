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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.config import LeaseSettings
from kvtide.errors import MediumFailed
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Address, Key, Part, Shelf
from kvtide.layout import Layout, Memory
from kvtide.memory.arena import round_up
from kvtide.memory.leases import Lease
from kvtide.outcome import Outcome
from kvtide.store.store import Lower, Store
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.testing.blocks import shelf as make_shelf
from kvtide.testing.faults import FailingDevice, FaultyTier, Op, VirtualClock, When
from kvtide.tickets import Fetched, Match, Plan, Reservation, Ticket
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Tier, is_cleared

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
    return store.publish(reservation).result


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


# Slots of 8 and 64 KiB: a dozen of the large ones fill the arena, and as many a disk of the smallest size.
_MODELS = {"small": Layout(1, 2, 16, 50), "large": Layout(2, 4, 16, 7500)}
_TENANTS = ["ada", "bob"]
_TRUNK = 2  # blocks that all chains share
CHAIN_BLOCKS = 8
LINES = [
    Line(name, layout, tenant, (*chain_keys("trunk", _TRUNK), *chain_keys(branch, CHAIN_BLOCKS - _TRUNK)))
    for name, layout in _MODELS.items()
    for tenant in _TENANTS
    for branch in range(2)
]
HOLDERS = [1, 2]
ARENA_BYTES = 1 << 20
LEASES = LeaseSettings(lease_s=30.0, fetch_s=10.0)

MakeLower = Callable[[Path], Sequence[Lower]]
Damage = Callable[[Path, random.Random], None]
Seen = dict[Address, list[str]]  # blocks, and the names of the tiers that have them

lines = st.sampled_from(LINES)
picks = st.integers(0, 1 << 16)  # of a list whose length is not known when it is drawn
counts = st.just(CHAIN_BLOCKS) | st.integers(1, CHAIN_BLOCKS)
holders = st.sampled_from(HOLDERS)


@dataclass(frozen=True)
class Order:
    """A fetch to be: of which line and parts, how much of it, for whom, and what becomes of it."""

    pick: int
    which: tuple[int, ...]
    count: int
    page: int
    holder: int
    end: str


orders = st.builds(
    Order,
    pick=picks,
    which=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
    count=counts,
    page=st.just(0) | st.integers(0, 10),
    holder=holders,
    end=st.sampled_from(["release", "keep", "wait later", "too late"]),
)


@dataclass(eq=False)
class Read:
    """A fetch or a pin: under way, or leased and to be given back."""

    line: Line
    shelf: Shelf
    plan: Plan
    holder: int
    ticket: Ticket[Fetched]
    is_cleared: bool = False  # its blocks were cleared after it had begun: what it held by then it keeps
    is_gone: bool = False  # others do not find its blocks in DRAM any more

    @property
    def fetched(self) -> Fetched:
        return self.ticket.result

    @property
    def lease(self) -> Lease | None:
        return self.fetched.lease if self.ticket.is_done else None

    @property
    def addresses(self) -> list[Address]:
        return [Address(self.shelf, key) for key in self.plan.keys[: self.fetched.blocks]]

    def check(self) -> None:
        fetched, planned = self.fetched, self.plan.end_block - self.plan.first_block
        assert fetched.blocks == len(fetched.payloads) <= planned
        assert planned == 0 or (fetched.outcome is HIT) == (fetched.blocks == planned), "short, and does not say why"
        assert (fetched.lease is None) == (fetched.blocks == 0)
        assert fetched.first_page == (self.plan.first_page if fetched.blocks else 0)
        assert_payloads(self.shelf, self.plan.keys, fetched.payloads, self.line.layout, fetched.first_page)


@dataclass(eq=False)
class Write:
    """Slots that an engine is filling."""

    line: Line
    reservation: Reservation
    holder: int
    expires_at_s: float
    is_cleared: bool = False

    @property
    def lease(self) -> Lease | None:
        return self.reservation.lease

    @property
    def slots(self) -> list[tuple[Address, Memory]]:
        pairs = zip(self.reservation.keys, self.reservation.payloads, strict=True)
        return [(Address(self.reservation.shelf, key), slot) for key, slot in pairs if slot is not None]


class StoreMachine(RuleBasedStateMachine):
    """See the module's text. `make_store_machine` supplies what is declared first."""

    make_lower: MakeLower
    damage_folder: Damage | None
    device: FailingDevice | None
    folder_bytes_max: int | None

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvtide-"))
        self.folder = self.root / "0"
        self.clock = VirtualClock()
        self.is_calm = True
        self.is_damaged = False
        self.possible: set[Address] = set()  # published, and not cleared since
        self.uncleared: set[Address] = set()  # cleared on a device that fails: may be back after a restart
        self.flights: list[Read] = []  # fetches that nobody has waited for yet
        self.reads: list[Read] = []  # leased
        self.pins: list[Read] = []
        self.writes: list[Write] = []
        self.saved: list[Line] = []  # lately
        self.plans: list[tuple[Line, Shelf, Plan]] = []  # lately
        self.gates = ExitStack()
        self.tiers: list[FaultyTier] = []
        self.open_store()

    @initialize(is_calm=st.booleans(), known=st.lists(lines, min_size=1, max_size=4))
    def begin(self, is_calm: bool, known: list[Line]) -> None:
        """In calm examples nothing fails, so that more can be demanded of them."""
        self.is_calm = is_calm
        for line in known:
            self.save(line, 0, CHAIN_BLOCKS, HOLDERS[0], "publish")

    def recent(self, pick: int) -> Line:
        """One of those that were saved lately: what is read should often be there."""
        return self.saved[pick % len(self.saved)]

    def open_store(self) -> None:
        self.heal()
        lower = self.make_lower(self.folder)
        self.tiers = [FaultyTier(each.tier) for each in lower]
        below = [replace(each, tier=tier) for each, tier in zip(lower, self.tiers, strict=True)]
        self.store = Store(DramTier(ARENA_BYTES, huge_pages=False), below, leases=LEASES, clock=self.clock)
        self.possible |= self.uncleared

    # Writing -----------------------------------------------------------------------------------------------

    @rule(
        line=lines,
        first=st.just(0) | st.integers(0, 5),
        count=counts,
        holder=holders,
        end=st.sampled_from(["publish", "publish", "publish some", "abort", "keep"]),
    )
    def save(self, line: Line, first: int, count: int, holder: int, end: str) -> None:
        """Reserve slots for both parts and fill them; what becomes of them may be left to a later step."""
        self.saved = [line, *(each for each in self.saved if each is not line)][:4]
        keys, parent = line.keys[first : first + count], line.keys[first - 1] if first else NO_PARENT
        for shelf in line.shelves:
            ticket = self.store.reserve(shelf, keys, line.layout, position=first, parent=parent, holder=holder)
            write = Write(line, ticket.result, holder, self.clock() + LEASES.lease_s)
            self.check_reservation(write)
            fill(write.reservation, line.layout.payload_bytes)
            self.writes.append(write)
            if end != "keep":
                self.end_write(-1, end)

    def check_reservation(self, write: Write) -> None:
        reservation = write.reservation
        pending = {address for each in self.writes if not self.is_late(each) for address, _ in each.slots}
        for key, outcome, slot in zip(reservation.keys, reservation.outcomes, reservation.payloads, strict=True):
            address = Address(reservation.shelf, key)
            assert (outcome is MISS) == (slot is not None)
            assert outcome is not HIT or address in self.possible, "a hit on a block that nobody published"
            assert outcome is not PENDING or address in pending, "pending, but nobody fills it"
        taken_bytes = sum(round_up(HEADER_BYTES + len(slot)) for _, slot in write.slots)
        assert taken_bytes <= LEASES.request_share * ARENA_BYTES

    def is_late(self, write: Write) -> bool:
        return write.is_cleared or write.expires_at_s <= self.clock()

    @rule(pick=picks, end=st.sampled_from(["publish", "publish some", "abort"]))
    def end_write(self, pick: int, end: str) -> None:
        if not self.writes:
            return
        write = self.writes.pop(pick % len(self.writes))
        reservation = write.reservation
        if end == "abort":
            self.store.abort(reservation)
            self.store.abort(reservation)
            return
        chosen = [i for i in range(len(reservation.keys)) if end == "publish" or i % 3 != pick % 3]
        outcomes = self.store.publish(reservation, None if end == "publish" else chosen).result
        for i, (key, slot) in enumerate(zip(reservation.keys, reservation.payloads, strict=True)):
            if slot is None or i not in chosen:
                assert outcomes[i] is reservation.outcomes[i]
            else:
                assert outcomes[i] is (REJECTED if self.is_late(write) else HIT)
                if outcomes[i] is HIT:
                    self.possible.add(Address(reservation.shelf, key))

    # Reading -----------------------------------------------------------------------------------------------

    def matched(self, line: Line, shelves: Sequence[Shelf], count: int) -> Match:
        keys = line.keys[:count]
        before = self.found_in_tiers(shelves, keys)
        match = self.store.match(shelves, keys).result
        if before == self.found_in_tiers(shelves, keys):  # otherwise something moved meanwhile
            prefix = next((i for i, is_found in enumerate(before) if not is_found), count)
            assert match.blocks == prefix, "a match ends where a part of a block is on no tier"
        if not self.is_damaged:  # a damaged index may promise anything: reads find out
            found = {Address(shelf, key) for shelf in shelves for key in keys[: match.blocks]}
            assert found <= self.possible, "a match of what nobody published, or of what was cleared"
        return match

    def found_in_tiers(self, shelves: Sequence[Shelf], keys: Sequence[Key]) -> list[bool]:
        """Whether each block stands, with every part, on some tier."""
        found = np.ones(len(keys), np.bool_)
        for shelf in shelves:
            found &= np.any([tier.lookup(shelf, keys) > 0 for tier in self.store.tiers], axis=0)
        flags: list[bool] = found.tolist()
        return flags

    def plan(self, line: Line, shelves: Sequence[Shelf], count: int, first_page: int = 0) -> Plan:
        match = self.matched(line, shelves, count)
        plan = self.store.plan(match, first_page=first_page, pages_per_block=line.layout.pages)
        assert plan.first_block <= plan.end_block <= match.blocks
        assert bool(plan.reasons) == (plan.end_block < match.blocks)
        self.plans = [*self.plans[-7:], (line, shelves[0], plan)]
        return plan

    @rule(orders=st.lists(orders, min_size=1, max_size=4))
    def fetch(self, orders: list[Order]) -> None:
        for order in orders:
            self.fetch_one(order)

    def fetch_one(self, order: Order) -> None:
        line = self.recent(order.pick)
        shelves = [line.shelves[i] for i in order.which]
        plan = self.plan(line, shelves, order.count, order.page)
        for shelf in shelves:
            deadline_s = 0.0 if order.end == "too late" else None
            ticket = self.store.fetch(plan, shelf, deadline_s=deadline_s, holder=order.holder)
            self.flights.append(Read(line, shelf, plan, order.holder, ticket))
            if order.end == "too late":
                self.store.poll()
                assert ticket.is_done, "the deadline has passed, and the fetch goes on"
            if order.end != "wait later":
                self.await_flight(-1, order.end == "keep")
        if plan.match.blocks < order.count:  # the engine computes the rest, and saves it
            self.save(line, plan.match.blocks, order.count - plan.match.blocks, order.holder, "publish")

    @rule(order=orders, when=st.sampled_from(["before", "after"]))
    def fetch_slowly(self, order: Order, when: When) -> None:
        """Blocks are below only, and stay on their way up until somebody waits: what comes next comes in between."""
        self.drain()
        self.leave_dram(order.pick, 0)
        for tier in self.tiers:
            self.gates.enter_context(tier.gate("read", when))
        self.fetch_one(replace(order, count=CHAIN_BLOCKS, page=0, end="wait later"))

    @rule(pick=picks, holder=holders, keep=st.booleans())
    def fetch_by_an_old_plan(self, pick: int, holder: int, keep: bool) -> None:
        if self.plans:
            line, shelf, plan = self.plans[pick % len(self.plans)]
            self.flights.append(Read(line, shelf, plan, holder, self.store.fetch(plan, shelf, holder=holder)))
            self.await_flight(-1, keep)

    @rule(pick=picks, keep=st.booleans())
    def await_flight(self, pick: int, keep: bool) -> None:
        if not self.flights:
            return
        read = self.flights.pop(pick % len(self.flights))
        self.await_read(read)
        if keep and read.lease is not None:
            self.reads.append(read)
        else:
            self.store.release(read.fetched)

    def await_read(self, read: Read) -> None:
        self.go_on()
        self.store.wait(read.ticket)
        read.check()
        assert read.is_cleared or set(read.addresses) <= self.possible, "served what was cleared or never published"

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        held = [*self.reads, *self.pins]
        if held:
            read = held[pick % len(held)]
            (self.reads if read in self.reads else self.pins).remove(read)
            self.store.release(read.fetched)
            self.store.release(read.fetched)

    @rule(pick=picks, part=st.integers(0, 1), count=counts)
    def prefetch(self, pick: int, part: int, count: int) -> None:
        line = self.recent(pick)
        plan = self.plan(line, [line.shelves[part]], count)
        assert 0 <= self.store.prefetch(plan).result <= plan.end_block - plan.first_block

    @rule(pick=picks, part=st.integers(0, 1), count=counts, ttl_s=st.sampled_from([5.0, 100.0]), holder=holders)
    def pin(self, pick: int, part: int, count: int, ttl_s: float, holder: int) -> None:
        line = self.recent(pick)
        plan = self.plan(line, [line.shelves[part]], count)
        pin = Read(line, line.shelves[part], plan, holder, self.store.pin(plan, ttl_s=ttl_s, holder=holder))
        self.await_read(pin)
        if pin.lease is not None:
            self.pins.append(pin)

    @rule(pick=picks, first=st.just(0) | st.integers(0, CHAIN_BLOCKS - 1))
    def leave_dram(self, pick: int, first: int) -> None:
        """The end of a chain leaves DRAM, as if others had needed the room; what has gone down is found there."""
        line = self.recent(pick)
        gone = {Address(shelf, key) for shelf in line.shelves for key in line.keys[first:]}
        self.store.dram.delete(list(gone))
        for pin in self.pins:
            pin.is_gone |= not gone.isdisjoint(pin.addresses)

    # Time, and clients that die ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.poll()
        self.pins = [pin for pin in self.pins if pin.lease is not None and pin.lease.expires_at_s > self.clock()]
        if seconds > LEASES.fetch_s:
            assert all(read.ticket.is_done for read in self.flights), "a fetch goes on beyond its time"

    @rule(holder=holders)
    def client_dies(self, holder: int) -> None:
        self.store.forget(holder)
        dead: list[Read | Write] = [each for each in self.everything_held() if each.holder == holder]
        assert all(not isinstance(each, Read) or each.ticket.is_done for each in dead), "a dead client still waits"
        assert all(each.lease is None or each.lease.is_over for each in dead), "a dead client still holds slots"
        self.flights = [each for each in self.flights if each.holder != holder]
        self.reads = [each for each in self.reads if each.holder != holder]
        self.pins = [each for each in self.pins if each.holder != holder]
        self.writes = [each for each in self.writes if each.holder != holder]

    def everything_held(self) -> list[Read | Write]:
        return [*self.flights, *self.reads, *self.pins, *self.writes]

    def let_go(self) -> None:
        for read in (*self.flights, *self.reads, *self.pins):
            self.await_read(read)
            self.store.release(read.fetched)
        for write in self.writes:
            self.store.abort(write.reservation)
        self.flights, self.reads, self.pins, self.writes = [], [], [], []

    # The tiers below ---------------------------------------------------------------------------------------

    @rule(when=st.sampled_from(["before", "after"]))
    def write_slowly(self, when: When) -> None:
        """What goes down from now on takes until somebody waits for it."""
        self.go_on()
        for tier in self.tiers:
            self.gates.enter_context(tier.gate("write", when))

    def go_on(self) -> None:
        self.gates.close()

    @rule(namespace=st.sampled_from([*_MODELS, None]), tenant=st.sampled_from([*_TENANTS, None]))
    def clear(self, namespace: str | None, tenant: str | None) -> None:
        if any(tier.is_stopped("write") for tier in self.tiers):
            self.go_on()  # a clear waits for the writes that are under way
        example = make_shelf(tenant or "", namespace=namespace or "")
        in_namespace = None if namespace is None else example.namespace
        of_tenant = None if tenant is None else example.tenant
        is_meant = partial(is_cleared, namespace=in_namespace, tenant=of_tenant)
        gone = {address for address in self.possible | self.uncleared if is_meant(address.shelf)}
        self.possible -= gone
        self.uncleared -= gone
        try:
            self.store.clear(namespace=in_namespace, tenant=of_tenant)
        except MediumFailed:  # they may be back after a restart, but not before
            assert self.device is not None
            assert self.device.failing
            self.uncleared |= gone
        for read in (*self.flights, *self.reads, *self.pins):
            read.is_cleared |= is_meant(read.shelf)
            read.is_gone |= read.is_cleared
        for write in self.writes:
            write.is_cleared |= is_meant(write.reservation.shelf)

    @rule()
    def drain(self) -> None:
        self.go_on()
        assert self.store.drain()

    @rule(is_crash=st.booleans())
    def restart(self, is_crash: bool) -> None:
        """Open again, in calm weather with all that was there, unless a bound was in the way."""
        if is_crash and self.is_local():
            self.check_survivors(self.crash())
            return
        self.go_on()
        self.let_go()
        if self.is_calm:
            self.drain()  # a block on its way down may have left below in the very call that brings it there
        losses, survivors = self.losses(), self.survivors()
        self.store.close()
        has_lost = self.losses() != losses
        self.open_store()
        if not has_lost:
            self.check_survivors(survivors)

    def crash(self) -> Seen:
        """The next process sees the files as they are, in the middle of whatever was being done."""
        losses, survivors = self.losses(), self.survivors(with_dram=False)
        copied = self.root / str(int(self.folder.name) + 1)
        shutil.copytree(self.folder, copied)
        if self.losses() != losses:  # something left and made room for others while it was copied
            survivors = {}
        self.go_on()
        self.let_go()
        self.store.close(drain_s=0)
        shutil.rmtree(self.folder)
        self.folder = copied
        self.open_store()
        return survivors

    def is_local(self) -> bool:
        """All that the lower tiers keep is in the folder."""
        return all(tier.traits.durable and not tier.traits.shared for tier in self.tiers)

    def losses(self) -> list[int]:
        """Whatever may keep a block from being there after the next open."""
        stats = self.store.stats()
        lost = [tier.evicted_blocks for tier in stats.tiers.values()]
        for spill in stats.spill.values():
            lost += [spill.dropped_full, spill.dropped_refused, spill.evicted_unspilled]
        return lost

    def survivors(self, *, with_dram: bool = True) -> Seen:
        """What must be there after the next open, and where it is now."""
        if not self.is_calm or not all(tier.traits.durable for tier in self.tiers):
            return {}
        tiers: Sequence[Tier] = self.store.tiers if with_dram else self.tiers
        seen = {
            each: [tier.traits.name for tier in tiers if tier.lookup(each.shelf, [each.key])[0]]
            for each in self.possible
        }
        return {each: names for each, names in seen.items() if names}

    def check_survivors(self, survivors: Seen) -> None:
        """Read all that is back: survivors are, with their own bytes; others may be torn, which reading finds out."""
        outcomes: dict[Address, Outcome] = {}
        for tier in self.tiers:
            sizes = {each: int(tier.lookup(each.shelf, [each.key])[0]) for each in self.possible}
            there = [each for each, size in sizes.items() if size]
            into = [np.zeros(sizes[each], np.uint8) for each in there]
            for address, memory, outcome in zip(there, into, tier.read(there, into), strict=True):
                outcomes[address] = outcome
                if outcome is HIT:
                    assert np.array_equal(memory[HEADER_BYTES:], payload_of(address, len(memory) - HEADER_BYTES))
        lost = [(on, outcomes.get(each)) for each, on in survivors.items() if outcomes.get(each) is not HIT]
        assert not lost, f"{len(lost)} of {len(survivors)} blocks did not survive: {lost}"

    @precondition(lambda self: not self.is_calm)
    @rule(op=st.sampled_from(["read", "write"]), answer=st.sampled_from(_FAILURES))
    def tier_answers(self, op: Op, answer: Outcome) -> None:
        for tier in self.tiers:
            tier.answers = {op: answer}

    @precondition(lambda self: not self.is_calm and self.device is not None)
    @rule(
        op=st.sampled_from(["read", "write", "allocate", "sync"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
    )
    def device_fails(self, op: str, code: int) -> None:
        assert self.device is not None
        self.device.failing = {op: code}

    @precondition(lambda self: not self.is_calm)
    @rule()
    def heal(self) -> None:
        if self.device is not None:
            self.device.failing = {}
        for tier in self.tiers:
            tier.answers = {}

    @precondition(lambda self: not self.is_calm and self.damage_folder is not None)
    @rule(seed=picks)
    def damage(self, seed: int) -> None:
        """Bytes change behind the tiers' backs."""
        assert self.damage_folder is not None
        self.damage_folder(self.folder, random.Random(seed))
        self.is_damaged = True

    # What always holds -------------------------------------------------------------------------------------

    @invariant()
    def leased_memory_is_nobody_elses(self) -> None:
        for read in self.reads:
            read.check()
        for write in self.writes:
            for address, slot in write.slots:
                if self.is_late(write):  # a client that slept and goes on writing into what it was once given
                    slot[:] = 0xEE
                else:
                    assert np.array_equal(slot, payload_of(address, len(slot))), "somebody wrote into a reserved slot"

    @invariant()
    def bounds_are_kept(self) -> None:
        dram = self.store.dram.stats()
        assert dram.bytes_used <= dram.bytes_max == ARENA_BYTES
        if self.folder_bytes_max is not None:
            assert folder_bytes(self.folder) <= self.folder_bytes_max

    @invariant()
    def pinned_blocks_stay(self) -> None:
        for pin in self.pins:
            found = self.store.dram.lookup(pin.shelf, [address.key for address in pin.addresses])
            assert pin.is_gone or found.all()

    @invariant()
    def the_books_balance(self) -> None:
        stats = self.store.stats()
        leases = [each.lease for each in self.everything_held() if each.lease is not None]
        assert len([*self.reads, *self.pins]) <= stats.leases <= len(leases)
        assert all(not lease.is_over for lease in leases), "a lease ended that nobody gave back"
        assert stats.quarantined_bytes == sum(lease.size_bytes for lease in leases if lease.is_quarantined)
        assert stats.pinned_bytes == sum(pin.lease.size_bytes for pin in self.pins if pin.lease is not None)
        assert stats.pinned_bytes <= LEASES.pinned_share * ARENA_BYTES
        assert stats.matched_blocks <= stats.asked_blocks

    def teardown(self) -> None:
        """Everything given back and cleared, nothing is left."""
        try:
            self.heal()
            self.go_on()
            self.let_go()
            stats = self.store.stats()
            assert (stats.leases, stats.quarantined_bytes, stats.pinned_bytes) == (0, 0, 0)
            self.store.clear()
            self.store.close()
            self.bounds_are_kept()
            dram = self.store.dram.stats()
            assert (dram.blocks, dram.bytes_used) == (0, 0), "slots leaked"
        finally:
            self.store.close(drain_s=0)
            shutil.rmtree(self.root)


def folder_bytes(folder: Path) -> int:
    """How much of a disk a folder's files take, by their length or by their blocks, whichever is more."""
    stats = [entry.stat() for entry in os.scandir(folder)] if folder.exists() else []
    return max(sum(each.st_size for each in stats), sum(each.st_blocks * 512 for each in stats))


def make_store_machine(
    make_lower: MakeLower,
    *,
    folder_bytes_max: int | None = None,
    damage: Damage | None = None,
    device: FailingDevice | None = None,
) -> type[StoreMachine]:
    """A machine over a small arena and the tiers that `make_lower` builds, unopened, on a folder.

    It is called again for each opening; durable tiers find their blocks again in the same folder. With
    `folder_bytes_max` the folder is measured after each step. `damage` changes bytes in it behind the tiers'
    backs; `device` is one whose files the tiers use. Both are left alone in half of the examples.
    """
    members = {
        "make_lower": staticmethod(make_lower),
        "damage_folder": None if damage is None else staticmethod(damage),
        "device": device,
        "folder_bytes_max": folder_bytes_max,
    }
    return type("StoreMachine", (StoreMachine,), members)
