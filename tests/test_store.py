# SPDX-License-Identifier: Apache-2.0
"""The store's interface, fact by fact. Time is virtual; what must happen in between is held at a gate."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtide.config import DiskSettings, DramSettings, LeaseSettings, Settings, SpillWhen
from kvtide.deadline import NEVER, Deadline
from kvtide.errors import ConfigError, FolderOwned, Rejected
from kvtide.frame import HEADER_BYTES, Frame
from kvtide.keys import NO_PARENT, Address, Digest, Key, Part, Shelf
from kvtide.layout import Layout, Memory
from kvtide.outcome import Outcome
from kvtide.store import Fetched, Lower, Plan, Reservation, Store, Ticket, open_store
from kvtide.testing.blocks import chain_keys
from kvtide.testing.blocks import header as make_header
from kvtide.testing.blocks import shelf as make_shelf
from kvtide.testing.faults import FaultyTier, VirtualClock
from kvtide.testing.store_machine import assert_payloads, fetch, fill, matched, payload_of, save
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.folder import DATA
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Tier

HIT, MISS, PENDING, REJECTED = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.REJECTED
TIMEOUT, CORRUPT, ERROR = Outcome.TIMEOUT, Outcome.CORRUPT, Outcome.ERROR

LAYOUT = Layout(layers=2, pages=4, page_tokens=16, page_bytes=1536)
SLOT = HEADER_BYTES + LAYOUT.payload_bytes
assert SLOT == 16 << 10  # of whole pages, so that a slot is as large as its frame
SLOTS = 16
HERE = make_shelf()
KEYS = chain_keys("chain", 6)


class SignallingDram(DramTier):
    """Says when it has been cleared, which is in the middle of a store's clear."""

    def __init__(self, bytes_max: int, *, huge_pages: bool) -> None:
        super().__init__(bytes_max, huge_pages=huge_pages)
        self.is_cleared = threading.Event()

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        count = super().clear(namespace=namespace, tenant=tenant, prefix=prefix)
        self.is_cleared.set()
        return count


class Rig:
    """A store over a small arena and a disk whose calls can be counted, stopped and answered for it."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = SLOTS,
        spill_when: SpillWhen = "publish",
        leases: LeaseSettings | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.folder = folder
        self.disk = FaultyTier(DiskTier(folder, 4 << 20))
        self.dram = SignallingDram(slots * SLOT, huge_pages=False)
        below = [Lower(self.disk, spill_when, slots * SLOT)]
        self.store = Store(self.dram, below, leases=leases, clock=self.clock)

    def save(self, keys: Sequence[Key] = KEYS, shelf: Shelf = HERE, first: int = 0) -> None:
        """Save a chain, and see it written below."""
        assert save(self.store, shelf, keys, LAYOUT, first=first) == [HIT] * (len(keys) - first)
        assert self.store.drain()

    def cool(self, keys: Sequence[Key] = KEYS, shelf: Shelf = HERE) -> None:
        """These blocks leave DRAM."""
        self.store.dram.delete([Address(shelf, key) for key in keys])

    def plan(self, keys: Sequence[Key] = KEYS, shelf: Shelf = HERE) -> Plan:
        return self.store.plan(matched(self.store, shelf, keys))

    def in_dram(self, keys: Sequence[Key] = KEYS, shelf: Shelf = HERE) -> int:
        return int((self.store.dram.lookup(shelf, keys) > 0).sum())

    def on_disk(self, keys: Sequence[Key] = KEYS, shelf: Shelf = HERE) -> int:
        return int((self.disk.lookup(shelf, keys) > 0).sum())

    @property
    def used_slots(self) -> int:
        return self.store.dram.stats().bytes_used // SLOT

    def arrival(self, ticket: Ticket[Fetched]) -> Fetched:
        self.store.wait(ticket)
        return ticket.result


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**settings: object) -> Rig:
        made.append(Rig(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.store.close(drain_s=0)


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs()


def assert_right(fetched: Fetched, keys: Sequence[Key] = KEYS, shelf: Shelf = HERE) -> None:
    """All of these blocks came, and with their own bytes."""
    assert (fetched.blocks, fetched.outcome) == (len(keys), HIT)
    assert_payloads(shelf, keys, fetched.payloads, LAYOUT, fetched.first_page)


# Finding ----------------------------------------------------------------------------------------------------


def test_a_match_is_the_longest_prefix_that_is_there(rig: Rig) -> None:
    rig.save(KEYS[:4])
    assert matched(rig.store, HERE, KEYS).blocks == 4
    assert matched(rig.store, HERE, KEYS[:2]).blocks == 2
    assert matched(rig.store, HERE, []).blocks == 0
    assert matched(rig.store, HERE, chain_keys("another", 3)).blocks == 0


def test_a_match_is_done_at_once(rig: Rig) -> None:
    assert rig.store.match([HERE], KEYS).is_done


def test_a_hole_ends_a_match(rig: Rig) -> None:
    rig.save()
    rig.store.drain()
    for tier in rig.store.tiers:
        tier.delete([Address(HERE, KEYS[2])])
    assert matched(rig.store, HERE, KEYS).blocks == 2
    assert matched(rig.store, HERE, KEYS[3:]).blocks == 3


def test_a_block_without_all_its_parts_ends_a_match(rig: Rig) -> None:
    ranks = [make_shelf(part=Part(rank=i, ranks=3)) for i in range(3)]
    for count, rank in zip((5, 2, 6), ranks, strict=True):
        save(rig.store, rank, KEYS[:count], LAYOUT)
    assert matched(rig.store, ranks, KEYS).blocks == 2
    assert matched(rig.store, [ranks[0], ranks[2]], KEYS).blocks == 5
    assert matched(rig.store, [], KEYS).blocks == 0


@pytest.mark.parametrize(
    "other",
    [
        make_shelf("another tenant"),
        make_shelf(namespace="another model"),
        make_shelf(scope="another scope"),
        make_shelf(part=Part(rank=1, ranks=2)),
    ],
    ids=["tenant", "namespace", "scope", "part"],
)
@pytest.mark.parametrize("is_cold", [False, True])
def test_blocks_of_another_shelf_are_never_matched(rig: Rig, other: Shelf, is_cold: bool) -> None:
    rig.save()
    if is_cold:
        rig.cool()
    assert matched(rig.store, HERE, KEYS).blocks == 6
    assert matched(rig.store, other, KEYS).blocks == 0


def test_a_match_spans_tiers(rig: Rig) -> None:
    rig.save()
    rig.cool([KEYS[0], KEYS[3]])
    match = matched(rig.store, HERE, KEYS)
    assert match.blocks == 6
    assert match.tiers[0].tolist() == [1, 0, 0, 1, 0, 0]
    assert match.frame_bytes[0].tolist() == [SLOT] * 6


def test_a_long_miss_asks_for_one_block_only(rig: Rig) -> None:
    rig.save()
    rig.disk.lookups.clear()
    assert matched(rig.store, HERE, chain_keys("a document", 10_000)).blocks == 0
    assert max(rig.disk.lookups) == 1


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_long_prompt_with_a_known_beginning_is_matched(rig: Rig, is_cold: bool) -> None:
    rig.save()
    if is_cold:
        rig.cool()
    assert matched(rig.store, HERE, [*KEYS, *chain_keys("the rest", 1000)]).blocks == 6


# Planning ---------------------------------------------------------------------------------------------------


def test_a_plan_is_everything_that_was_matched(rig: Rig) -> None:
    rig.save()
    plan = rig.store.plan(matched(rig.store, HERE, KEYS))
    assert (plan.first_block, plan.end_block, plan.first_page, plan.reasons) == (0, 6, 0, ())
    assert list(plan.keys) == KEYS


def test_a_plan_is_cut_to_the_requests_share_and_says_why(rigs: Callable[..., Rig]) -> None:
    rig = rigs(leases=LeaseSettings(request_share=0.25))
    for first in (0, 3):
        save(rig.store, HERE, KEYS[: first + 3], LAYOUT, first=first)
    plan = rig.plan()
    assert (plan.first_block, plan.end_block) == (0, 4)
    assert plan.reasons == ("2 blocks beyond the request's share of DRAM",)
    assert_right(rig.arrival(rig.store.fetch(plan)), KEYS[:4])


def test_a_plan_counts_what_blocks_take_and_not_what_they_hold(rig: Rig) -> None:
    layout = Layout(1, 1, 16, 100)  # frames of 4,196 bytes in slots of 8,192: 16 of them are half of the arena
    keys = chain_keys("tiny", 24)
    for first in (0, 12):
        save(rig.store, HERE, keys[: first + 12], layout, first=first)
    assert rig.plan(keys).end_block == 16


def test_the_parts_of_a_request_share_its_share(rig: Rig) -> None:
    ranks = [make_shelf(part=Part(rank=i, ranks=2)) for i in range(2)]
    for rank in ranks:
        rig.save(KEYS, rank)
    plan = rig.store.plan(matched(rig.store, ranks, KEYS))
    assert plan.end_block == 4  # 8 of 16 slots
    assert len(plan.reasons) == 1


def test_a_plan_without_parts_is_empty(rig: Rig) -> None:
    rig.save()
    plan = rig.store.plan(matched(rig.store, [], KEYS))
    assert (plan.first_block, plan.end_block, plan.reasons) == (0, 0, ())
    assert rig.store.fetch(plan).result.blocks == 0


def test_a_plan_may_start_inside_a_block(rig: Rig) -> None:
    rig.save()
    plan = rig.store.plan(matched(rig.store, HERE, KEYS), first_page=2 * LAYOUT.pages + 3, pages_per_block=LAYOUT.pages)
    assert (plan.first_block, plan.end_block, plan.first_page) == (2, 6, 3)


@pytest.mark.parametrize("first_page", [24, 25, 1000])
def test_a_plan_beyond_the_match_is_empty(rig: Rig, first_page: int) -> None:
    rig.save()
    plan = rig.store.plan(matched(rig.store, HERE, KEYS), first_page=first_page, pages_per_block=LAYOUT.pages)
    assert (plan.first_block, plan.end_block, plan.first_page, plan.reasons) == (6, 6, 0, ())
    ticket = rig.store.fetch(plan)
    assert (ticket.result.blocks, ticket.result.lease, ticket.result.outcome) == (0, None, HIT)


# Reading ----------------------------------------------------------------------------------------------------


def test_what_is_in_dram_is_fetched_at_once(rig: Rig) -> None:
    rig.save()
    ticket = rig.store.fetch(rig.plan())
    assert ticket.is_done
    assert_right(ticket.result)
    assert rig.store.poll() == [ticket]
    assert rig.store.poll() == []


def test_a_ticket_has_no_result_before_it_is_done_and_one_result_afterwards() -> None:
    ticket: Ticket[int] = Ticket()
    with pytest.raises(AssertionError, match="not done"):
        _ = ticket.result
    ticket.complete(3)
    assert ticket.result == 3
    with pytest.raises(AssertionError):
        ticket.complete(4)


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_fetch_may_start_at_a_page_inside_a_block(rig: Rig, is_cold: bool) -> None:
    rig.save()
    if is_cold:
        rig.cool()
    plan = rig.store.plan(matched(rig.store, HERE, KEYS), first_page=7, pages_per_block=LAYOUT.pages)
    fetched = rig.arrival(rig.store.fetch(plan))
    assert (fetched.blocks, fetched.first_page) == (5, 3)
    pages = LAYOUT.from_page(fetched.payloads[0], fetched.first_page)
    right = LAYOUT.pages_view(payload_of(Address(HERE, KEYS[1]), LAYOUT.payload_bytes))
    assert np.array_equal(pages, right[:, 3:])
    assert_payloads(HERE, KEYS[1:], fetched.payloads, LAYOUT, 3)


def test_each_part_is_fetched_on_its_own(rig: Rig) -> None:
    ranks = [make_shelf(part=Part(rank=i, ranks=2)) for i in range(2)]
    for rank in ranks:
        rig.save(KEYS[:3], rank)
    plan = rig.store.plan(matched(rig.store, ranks, KEYS))
    for rank in ranks:
        assert_right(rig.arrival(rig.store.fetch(plan, rank)), KEYS[:3], rank)


def test_what_was_fetched_once_is_in_dram_the_next_time(rig: Rig) -> None:
    rig.save()
    rig.cool()
    for _ in range(2):
        fetched = fetch(rig.store, HERE, KEYS)
        assert_right(fetched)
        rig.store.release(fetched)
    assert rig.disk.reads == dict.fromkeys((Address(HERE, key) for key in KEYS), 1)
    assert rig.in_dram() == 6


def test_a_fetch_shares_a_flight_that_is_under_way(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read") as gate:
        first = rig.store.fetch(rig.plan(KEYS[:4]))
        gate.wait_reached()
        second = rig.store.fetch(rig.plan())
    assert_right(rig.arrival(first), KEYS[:4])
    assert_right(rig.arrival(second))
    assert set(rig.disk.reads.values()) == {1}
    assert rig.store.stats().shared_flights == 4


def test_a_herd_reads_each_block_once(rig: Rig) -> None:
    rig.save()
    rig.cool()
    herd = 100
    all_asked = threading.Barrier(herd + 1)

    def ask() -> None:
        ticket = rig.store.fetch(rig.plan())
        all_asked.wait(60)
        assert_right(rig.arrival(ticket))
        rig.store.release(ticket.result)

    with ThreadPoolExecutor(herd) as pool:
        with rig.disk.gate("read"):
            requests = [pool.submit(ask) for _ in range(herd)]
            all_asked.wait(60)
        for request in requests:
            request.result(60)
    assert rig.disk.reads == dict.fromkeys((Address(HERE, key) for key in KEYS), 1)
    assert rig.store.stats().shared_flights == (herd - 1) * 6
    assert rig.store.stats().leases == 0
    assert rig.used_slots == 6


def test_at_its_deadline_a_fetch_gives_what_has_arrived_and_late_flights_serve_the_next(rig: Rig) -> None:
    rig.save()
    rig.cool(KEYS[2:])
    with rig.disk.gate("read") as gate:
        ticket = rig.store.fetch(rig.plan(), deadline_s=1.0)
        gate.wait_reached()
        rig.clock.advance(0.9)
        assert rig.store.poll() == []
        rig.clock.advance(0.1)
        assert rig.store.poll() == [ticket]
        assert (ticket.result.blocks, ticket.result.outcome) == (2, TIMEOUT)
        assert_payloads(HERE, KEYS, ticket.result.payloads, LAYOUT, 0)
    fetched = fetch(rig.store, HERE, KEYS)
    assert_right(fetched)
    assert set(rig.disk.reads.values()) == {1}


def test_without_a_deadline_of_its_own_a_fetch_ends_after_the_time_in_the_settings(rigs: Callable[..., Rig]) -> None:
    rig = rigs(leases=LeaseSettings(fetch_s=7.0))
    rig.save()
    rig.cool()
    with rig.disk.gate("read"):
        ticket = rig.store.fetch(rig.plan())
        rig.clock.advance(6.9)
        assert rig.store.poll() == []
        rig.clock.advance(0.1)
        assert rig.store.poll() == [ticket]
    assert (ticket.result.blocks, ticket.result.lease, ticket.result.outcome) == (0, None, TIMEOUT)


def test_a_flight_that_nobody_waits_for_any_more_is_not_begun(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read") as gate:
        for i in range(2):  # one for each thread that reads
            rig.store.fetch(rig.plan(KEYS[: i + 1]))
            gate.wait_reached(i + 1)
        late = rig.store.fetch(rig.plan(), deadline_s=1.0)
        rig.clock.advance(1.0)
        rig.store.poll()
        assert late.result.outcome is TIMEOUT
    for ticket in (rig.store.fetch(rig.plan(KEYS[:1])), rig.store.fetch(rig.plan(KEYS[:2]))):
        rig.store.wait(ticket)
    rig.store.close()
    assert set(rig.disk.reads) == {Address(HERE, key) for key in KEYS[:2]}


def test_a_flight_of_a_fetch_that_gave_up_takes_another_fetch_along(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read") as gate:
        first = rig.store.fetch(rig.plan(), deadline_s=1.0)
        gate.wait_reached()
        rig.clock.advance(1.0)
        second = rig.store.fetch(rig.plan())
        assert first.is_done
    assert_right(rig.arrival(second))
    assert set(rig.disk.reads.values()) == {1}


def test_a_hole_found_while_reading_cuts_the_fetch_there_and_is_a_miss_afterwards(rig: Rig) -> None:
    rig.save()
    right = payload_of(Address(HERE, KEYS[3]), LAYOUT.payload_bytes)
    rig.cool()
    data = bytearray((rig.folder / DATA).read_bytes())
    at = data.index(right[:64].tobytes())
    data[at] ^= 1
    (rig.folder / DATA).write_bytes(data)
    fetched = fetch(rig.store, HERE, KEYS)
    assert (fetched.blocks, fetched.outcome) == (3, CORRUPT)
    assert_payloads(HERE, KEYS, fetched.payloads, LAYOUT, 0)
    assert matched(rig.store, HERE, KEYS).blocks == 3


def test_of_several_holes_the_first_one_cuts_the_fetch(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read", of=Address(HERE, KEYS[0])) as gate:
        first = rig.store.fetch(rig.plan(KEYS[:1]))
        gate.wait_reached()
        rig.disk.answers = {"read": ERROR}  # all but the first block
        second = rig.store.fetch(rig.plan())
        third = rig.store.fetch(rig.plan(KEYS[2:5]))
        assert rig.arrival(third).outcome is ERROR
        assert not second.is_done
        rig.disk.answers = {}
    assert_right(rig.arrival(first), KEYS[:1])
    fetched = rig.arrival(second)
    assert (fetched.blocks, fetched.outcome) == (1, ERROR)
    assert_payloads(HERE, KEYS, fetched.payloads, LAYOUT, 0)


@pytest.mark.parametrize("outcome", [MISS, TIMEOUT, ERROR, Outcome.THROTTLED])
def test_a_tier_that_does_not_deliver_costs_the_blocks_and_no_more(rig: Rig, outcome: Outcome) -> None:
    rig.save()
    rig.cool(KEYS[4:])
    rig.disk.answers = {"read": outcome}
    fetched = fetch(rig.store, HERE, KEYS)
    assert (fetched.blocks, fetched.outcome) == (4, outcome)
    assert rig.used_slots == 4
    rig.disk.answers = {}
    assert_right(fetch(rig.store, HERE, KEYS))


class MeddlingTier(FaultyTier):
    """Somebody who maps the arena changes a frame's header after it was verified."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.meddle: Callable[[Memory], None] | None = None

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        outcomes = super().read(addresses, into, deadline)
        for memory in into:
            if self.meddle is not None:
                self.meddle(memory)
        return outcomes


def forge(memory: Memory) -> None:
    """A sound header, of a block that stands on another tenant's shelf."""
    payload_bytes = len(memory) - HEADER_BYTES
    Frame(make_header(Address(make_shelf("victim"), KEYS[0]), payload_bytes), memory).seal()


def break_magic(memory: Memory) -> None:
    memory[0] ^= 1


@pytest.mark.parametrize("meddle", [forge, break_magic])
def test_a_header_that_changes_in_memory_after_it_was_verified_leads_nowhere(
    tmp_path: Path, meddle: Callable[[Memory], None]
) -> None:
    rig = Rig(tmp_path)
    rig.save()
    rig.store.close()
    disk = MeddlingTier(DiskTier(tmp_path, 4 << 20))
    with Store(DramTier(SLOTS * SLOT, huge_pages=False), [Lower(disk)]) as store:
        disk.meddle = meddle
        for _ in range(3):  # more than there are threads to lose
            fetched = fetch(store, HERE, KEYS)
            assert (fetched.blocks, fetched.outcome) == (0, CORRUPT)
        assert matched(store, make_shelf("victim"), KEYS[:1]).blocks == 0
        disk.meddle = None
        assert_right(fetch(store, HERE, KEYS))
    assert not disk.tier.stats().outcomes["write"].get("hit"), "nothing of it went down to the disk"


def test_a_mistake_of_a_tier_costs_the_blocks_and_the_next_ones_come(rig: Rig) -> None:
    rig.save()
    rig.cool()
    rig.disk.mistakes = {"read": ZeroDivisionError()}
    for _ in range(3):  # more than there are threads to lose
        fetched = fetch(rig.store, HERE, KEYS)
        assert (fetched.blocks, fetched.outcome) == (0, ERROR)
    rig.disk.mistakes = {}
    assert_right(fetch(rig.store, HERE, KEYS))


@pytest.mark.parametrize("page_bytes", [100, 3000])
def test_a_block_that_has_another_size_than_when_it_was_matched_is_a_miss(rig: Rig, page_bytes: int) -> None:
    rig.save()
    plan = rig.plan()
    rig.store.clear()
    layout = replace(LAYOUT, page_bytes=page_bytes)
    save(rig.store, HERE, KEYS[:1], layout)
    assert rig.store.drain()
    rig.cool()
    fetched = rig.arrival(rig.store.fetch(replace(plan, match=replace(plan.match, tiers=(np.ones(6, np.int8),)))))
    assert (fetched.blocks, fetched.outcome) == (0, MISS)
    again = fetch(rig.store, HERE, KEYS)
    assert again.blocks == 1
    assert_payloads(HERE, KEYS, again.payloads, layout, 0)


def test_a_block_that_has_left_dram_since_the_match_is_brought_up(rig: Rig) -> None:
    rig.save()
    plan = rig.plan()
    rig.cool(KEYS[2:])
    assert_right(rig.arrival(rig.store.fetch(plan)))


def test_a_block_that_has_left_all_tiers_since_the_match_cuts_the_fetch(rig: Rig) -> None:
    rig.save()
    plan = rig.plan()
    rig.disk.delete([Address(HERE, KEYS[2])])
    rig.cool([KEYS[2]])
    fetched = rig.arrival(rig.store.fetch(plan))
    assert (fetched.blocks, fetched.outcome) == (2, MISS)
    assert rig.used_slots == 5


def test_without_room_in_dram_a_fetch_gives_what_is_there(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    rig.save(KEYS[:4])
    rig.cool(KEYS[2:4])
    others = [rig.store.reserve(HERE, chain_keys(name, 3), LAYOUT).result for name in range(2)]
    assert rig.used_slots == 8
    fetched = fetch(rig.store, HERE, KEYS)
    assert (fetched.blocks, fetched.outcome) == (2, REJECTED)
    assert_payloads(HERE, KEYS, fetched.payloads, LAYOUT, 0)
    for each in others:
        rig.store.abort(each)
    rig.store.release(fetched)
    assert_right(fetch(rig.store, HERE, KEYS), KEYS[:4])


def test_a_fetch_never_evicts_its_own_blocks(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=4, leases=LeaseSettings(request_share=1.0))
    rig.save(KEYS[:4])
    rig.cool(KEYS[:2])
    rig.save(chain_keys("other", 2))
    assert_right(fetch(rig.store, HERE, KEYS), KEYS[:4])


def test_nobody_changes_what_is_leased(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    rig.save(KEYS[:4])
    fetched = fetch(rig.store, HERE, KEYS)
    for name in range(6):
        rig.save(chain_keys(name, 4))
    assert_right(fetched, KEYS[:4])
    assert rig.in_dram() == 4
    rig.store.release(fetched)
    for name in range(6, 12):
        rig.save(chain_keys(name, 4))
    assert rig.in_dram() == 0


def test_releasing_twice_is_releasing_once(rig: Rig) -> None:
    rig.save()
    first, second = fetch(rig.store, HERE, KEYS), fetch(rig.store, HERE, KEYS)
    assert rig.store.stats().leases == 2
    for _ in range(2):
        rig.store.release(first)
    assert rig.store.stats().leases == 1
    rig.cool()
    rig.save(chain_keys("others", 8))
    assert_right(second)


def test_to_release_nothing_does_nothing(rig: Rig) -> None:
    rig.store.release(fetch(rig.store, HERE, KEYS))
    assert rig.store.stats().leases == 0


def test_only_the_newest_tickets_wait_for_a_poll(rig: Rig) -> None:
    plan = rig.plan([])
    tickets = [rig.store.fetch(plan) for _ in range(5000)]
    polled = rig.store.poll()
    assert polled == tickets[-len(polled) :]
    assert 1000 < len(polled) < 5000


def test_to_wait_for_a_ticket_ends_with_its_deadline_on_a_real_clock(tmp_path: Path) -> None:
    disk = FaultyTier(DiskTier(tmp_path, 4 << 20))
    with Store(DramTier(1 << 20, huge_pages=False), [Lower(disk)], leases=LeaseSettings(fetch_s=0.01)) as store:
        save(store, HERE, KEYS, LAYOUT)
        assert store.drain()
        store.dram.delete([Address(HERE, key) for key in KEYS])
        with disk.gate("read"):
            ticket = store.fetch(store.plan(matched(store, HERE, KEYS)))
            assert store.wait(ticket)
            assert ticket.result.outcome is TIMEOUT
            ticket = store.fetch(store.plan(matched(store, HERE, KEYS)), deadline_s=1000)
            assert not store.wait(ticket, timeout_s=0.01)


def test_a_fetch_of_one_block_twice_is_harmless(rig: Rig) -> None:
    rig.save(KEYS[:1])
    for _ in range(2):
        fetched = fetch(rig.store, HERE, [KEYS[0]] * 3)
        assert_right(fetched, [KEYS[0]] * 3)
        rig.cool()
        rig.store.release(fetched)
        assert rig.used_slots == 0
    rig.save(chain_keys("others", 6))
    assert_right(fetch(rig.store, HERE, chain_keys("others", 6)), chain_keys("others", 6))


# Prefetching and pinning ------------------------------------------------------------------------------------


def test_a_prefetch_brings_blocks_up_without_a_lease(rig: Rig) -> None:
    rig.save()
    rig.cool(KEYS[1:])
    assert rig.store.prefetch(rig.plan()).result == 6
    assert_right(fetch(rig.store, HERE, KEYS))
    assert rig.in_dram() == 6
    assert set(rig.disk.reads.values()) == {1}
    assert rig.store.stats().leases == 1


def test_a_prefetch_shares_flights_in_both_directions(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read") as gate:
        ticket = rig.store.fetch(rig.plan(KEYS[:3]), deadline_s=1.0)
        gate.wait_reached()
        assert rig.store.prefetch(rig.plan()).result == 6
        assert rig.store.prefetch(rig.plan()).result == 6
        rig.clock.advance(1.0)
        rig.store.poll()
        assert ticket.result.outcome is TIMEOUT
    assert_right(fetch(rig.store, HERE, KEYS))
    assert set(rig.disk.reads.values()) == {1}


def test_a_prefetch_takes_only_the_room_there_is(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    rig.save(KEYS[:4])
    rig.cool()
    held = [rig.store.reserve(HERE, chain_keys(name, 3), LAYOUT).result for name in range(2)]
    assert rig.store.prefetch(rig.plan()).result == 2
    fetched = fetch(rig.store, HERE, KEYS[:2])
    assert_right(fetched, KEYS[:2])
    assert all(outcome is MISS for each in held for outcome in each.outcomes)


def test_a_prefetch_of_what_is_gone_ends_there(rig: Rig) -> None:
    rig.save()
    plan = rig.plan()
    rig.disk.delete([Address(HERE, KEYS[4])])
    rig.cool([KEYS[4]])
    assert rig.store.prefetch(plan).result == 4


def test_pinned_blocks_stay_until_their_time_is_over(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    rig.save(KEYS[:3])
    pin = rig.arrival(rig.store.pin(rig.plan(), ttl_s=60.0))
    assert_right(pin, KEYS[:3])
    assert rig.store.stats().pinned_bytes == 3 * SLOT
    for name in range(6):
        rig.save(chain_keys(name, 4))
        rig.clock.advance(9.9)
        rig.store.poll()
    assert rig.in_dram() == 3
    rig.clock.advance(0.6)
    rig.store.poll()
    assert (rig.store.stats().pinned_bytes, rig.store.stats().leases) == (0, 0)
    assert rig.store.stats().quarantined_total == 0
    for name in range(6):
        rig.save(chain_keys(("later", name), 4))
    assert rig.in_dram() == 0
    rig.store.release(pin)


def test_a_pin_brings_blocks_up_and_is_undone_by_a_release(rig: Rig) -> None:
    rig.save()
    rig.cool()
    pin = rig.arrival(rig.store.pin(rig.plan(), ttl_s=60.0))
    assert_right(pin)
    for _ in range(2):
        rig.store.release(pin)
    assert (rig.store.stats().pinned_bytes, rig.store.stats().leases) == (0, 0)


def test_all_pins_together_get_a_share(rigs: Callable[..., Rig]) -> None:
    rig = rigs(leases=LeaseSettings(pinned_share=0.5))
    rig.save()
    first = rig.arrival(rig.store.pin(rig.plan(), ttl_s=60.0))
    refused = rig.store.pin(rig.plan(KEYS[:3]), ttl_s=60.0).result
    assert (refused.blocks, refused.lease, refused.outcome) == (0, None, REJECTED)
    assert rig.store.stats().rejected_blocks == 3
    assert_right(rig.arrival(rig.store.pin(rig.plan(KEYS[:2]), ttl_s=60.0)), KEYS[:2])
    assert rig.store.stats().pinned_bytes == 8 * SLOT
    rig.store.release(first)
    assert_right(rig.arrival(rig.store.pin(rig.plan(KEYS[:3]), ttl_s=60.0)), KEYS[:3])


def test_pins_on_their_way_count(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read"):
        ticket = rig.store.pin(rig.plan(), ttl_s=60.0, deadline_s=1.0)
        assert rig.store.stats().pinned_bytes == 6 * SLOT
        assert rig.store.pin(rig.plan(KEYS[:3]), ttl_s=60.0).result.outcome is REJECTED
        rig.clock.advance(1.0)
        rig.store.poll()
        assert ticket.result.outcome is TIMEOUT
        assert rig.store.stats().pinned_bytes == 0


def test_pins_count_what_blocks_take_and_not_what_they_hold(rig: Rig) -> None:
    layout = Layout(1, 1, 16, 100)  # in slots of 8,192 bytes: 16 of them are half of the arena
    keys = chain_keys("tiny", 20)
    for first in (0, 10):
        save(rig.store, HERE, keys[: first + 10], layout, first=first)
    pins = [rig.store.pin(rig.plan(keys[:10]), ttl_s=60.0).result for _ in range(2)]
    assert [pin.blocks for pin in pins] == [10, 0]
    assert rig.store.stats().pinned_bytes == 10 * 8192


# Writing ----------------------------------------------------------------------------------------------------


def reserved(rig: Rig, keys: Sequence[Key] = KEYS, *, holder: int = 0, shelf: Shelf = HERE) -> Reservation:
    """A filled reservation."""
    reservation = rig.store.reserve(shelf, keys, LAYOUT, holder=holder).result
    fill(reservation, LAYOUT.payload_bytes)
    return reservation


def test_a_reservation_says_of_each_block_what_to_do(rig: Rig) -> None:
    rig.save(KEYS[:1])
    other = rig.store.reserve(HERE, KEYS[:3], LAYOUT).result
    assert other.outcomes == [HIT, MISS, MISS]
    mine = rig.store.reserve(HERE, KEYS, LAYOUT).result
    assert mine.outcomes == [HIT, PENDING, PENDING, MISS, MISS, MISS]
    assert [payload is None for payload in mine.payloads] == [True, True, True, False, False, False]
    assert rig.store.reserve(make_shelf("another tenant"), KEYS[:2], LAYOUT).result.outcomes == [MISS, MISS]


def test_a_block_that_is_only_below_may_be_saved_again(rig: Rig) -> None:
    rig.save()
    rig.cool()
    rig.save()
    assert_right(fetch(rig.store, HERE, KEYS))
    assert rig.disk.reads == {}


def test_nobody_sees_a_block_before_it_is_published(rig: Rig) -> None:
    reservation = reserved(rig)
    assert matched(rig.store, HERE, KEYS).blocks == 0
    assert rig.store.publish(reservation).result == [HIT] * 6
    assert matched(rig.store, HERE, KEYS).blocks == 6
    assert_right(fetch(rig.store, HERE, KEYS))


def test_some_may_be_published_and_the_rest_comes_back(rig: Rig) -> None:
    assert rig.store.publish(reserved(rig), [0, 1, 4]).result == [HIT, HIT, MISS, MISS, HIT, MISS]
    assert matched(rig.store, HERE, KEYS).blocks == 2
    assert rig.used_slots == 3
    assert rig.store.stats().published_blocks == 3
    assert rig.store.reserve(HERE, KEYS, LAYOUT).result.outcomes == [HIT, HIT, MISS, MISS, HIT, MISS]


def test_to_publish_all_is_to_publish_what_was_given(rig: Rig) -> None:
    rig.save(KEYS[:2])
    other = reserved(rig, [*KEYS[:2], KEYS[4]])
    mine = reserved(rig)
    assert mine.outcomes == [HIT, HIT, MISS, MISS, PENDING, MISS]
    assert rig.store.publish(mine).result == [HIT, HIT, HIT, HIT, PENDING, HIT]
    assert rig.store.publish(other, [2]).result == [HIT, HIT, HIT]
    assert_right(fetch(rig.store, HERE, KEYS))


def test_when_dram_has_no_more_shelves_a_publish_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.save(KEYS[:2])
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 1)
    other = make_shelf("another tenant")
    assert rig.store.publish(reserved(rig, KEYS[:2], shelf=other)).result == [REJECTED] * 2
    assert rig.used_slots == 2
    assert matched(rig.store, other, KEYS).blocks == 0


@pytest.mark.parametrize(
    ("keys", "position", "parent"),
    [
        (KEYS, 1, NO_PARENT),
        (KEYS, 0, KEYS[0]),
        (KEYS, -1, KEYS[0]),
        (KEYS, 1 << 32, KEYS[0]),
        (KEYS, 1.0, KEYS[0]),
        ([KEYS[0][:-1]], 0, NO_PARENT),
        (["no bytes"], 0, NO_PARENT),
        (KEYS, 1, b"short"),
        ([KEYS[0], NO_PARENT], 0, NO_PARENT),
    ],
)
def test_what_cannot_be_a_chain_is_refused(rig: Rig, keys: Sequence[Key], position: int, parent: Key) -> None:
    with pytest.raises(Rejected):
        rig.store.reserve(HERE, keys, LAYOUT, position=position, parent=parent)
    assert rig.used_slots == 0


def test_an_abort_gives_slots_and_addresses_back(rig: Rig) -> None:
    reservation = reserved(rig)
    for _ in range(2):
        rig.store.abort(reservation)
    assert (rig.used_slots, rig.store.stats().leases) == (0, 0)
    assert matched(rig.store, HERE, KEYS).blocks == 0
    assert rig.store.reserve(HERE, KEYS, LAYOUT).result.outcomes == [MISS] * 6


def test_publishing_or_aborting_nothing_does_nothing(rig: Rig) -> None:
    rig.save()
    reservation = rig.store.reserve(HERE, KEYS, LAYOUT).result
    assert (reservation.outcomes, reservation.lease) == ([HIT] * 6, None)
    assert rig.store.publish(reservation).result == [HIT] * 6
    rig.store.abort(reservation)
    assert rig.store.stats().published_blocks == 6


def test_a_reservation_is_published_once(rig: Rig) -> None:
    reservation = reserved(rig)
    rig.store.publish(reservation, [0, 1])
    assert rig.store.publish(reservation).result == [REJECTED] * 6
    assert matched(rig.store, HERE, KEYS).blocks == 2
    assert rig.store.stats().stale_publishes == 6


def test_one_key_twice_is_one_block(rig: Rig) -> None:
    reservation = reserved(rig, [KEYS[0], KEYS[0]])
    rig.store.publish(reservation)
    assert_right(fetch(rig.store, HERE, KEYS), KEYS[:1])
    assert rig.used_slots == 1


def test_a_block_that_came_up_while_it_was_computed_is_there_once(rig: Rig) -> None:
    rig.save()
    rig.cool()
    reservation = reserved(rig)
    assert reservation.outcomes == [MISS] * 6
    assert_right(fetch(rig.store, HERE, KEYS))
    assert rig.store.publish(reservation).result == [HIT] * 6
    assert rig.used_slots == 6
    assert rig.store.stats().published_blocks == 6


def test_a_block_that_was_computed_while_it_came_up_is_there_once(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with rig.disk.gate("read"):
        ticket = rig.store.fetch(rig.plan())
        assert rig.store.publish(reserved(rig)).result == [HIT] * 6
    assert_right(rig.arrival(ticket))
    rig.store.release(ticket.result)
    assert rig.used_slots == 6


def test_a_full_arena_is_answered_at_once(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    held = [reserved(rig, chain_keys(name, 4)) for name in range(2)]
    assert rig.store.reserve(HERE, KEYS, LAYOUT).result.outcomes == [REJECTED] * 6
    assert rig.store.stats().rejected_blocks == 6
    rig.store.publish(held[0])
    assert rig.store.drain()
    leased = fetch(rig.store, HERE, chain_keys(0, 4))
    assert rig.store.reserve(HERE, KEYS, LAYOUT).result.outcomes == [REJECTED] * 6
    rig.store.release(leased)
    assert rig.store.reserve(HERE, KEYS, LAYOUT).result.outcomes == [MISS] * 4 + [REJECTED] * 2


def test_one_request_gets_at_most_its_share(rig: Rig) -> None:
    keys = chain_keys("long", 20)
    reservation = rig.store.reserve(HERE, keys, LAYOUT).result
    assert reservation.outcomes == [MISS] * 8 + [REJECTED] * 12
    assert rig.used_slots == 8


def test_a_reservation_counts_what_blocks_take_and_not_what_they_hold(rig: Rig) -> None:
    layout = Layout(1, 1, 16, 100)
    rig.store.reserve(HERE, chain_keys("tiny", 40), layout)
    assert rig.store.dram.stats().bytes_used == SLOTS * SLOT // 2


def test_a_block_larger_than_a_request_may_take_is_rejected(rig: Rig) -> None:
    large = Layout(1, 1, 16, 9 * SLOT)
    assert rig.store.reserve(HERE, KEYS[:1], large).result.outcomes == [REJECTED]


def test_a_chain_can_be_saved_in_pieces(rig: Rig) -> None:
    rig.save(KEYS[:2])
    rig.save(KEYS[:5], first=2)
    rig.save(KEYS, first=5)
    rig.cool()
    assert_right(fetch(rig.store, HERE, KEYS))


# Time, and clients that are silent or dead ------------------------------------------------------------------


def test_a_publish_that_comes_too_late_is_refused(rig: Rig) -> None:
    reservation = reserved(rig)
    rig.clock.advance(30.0)
    rig.store.poll()
    assert rig.store.stats().quarantined_bytes == 6 * SLOT
    assert rig.store.publish(reservation).result == [REJECTED] * 6
    assert matched(rig.store, HERE, KEYS).blocks == 0
    stats = rig.store.stats()
    assert (stats.stale_publishes, stats.quarantined_bytes, stats.quarantined_total, stats.leases) == (6, 0, 1, 0)
    assert rig.used_slots == 0


def test_slots_of_a_silent_writer_are_not_used_again_until_it_returns_them(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    silent = reserved(rig, KEYS[:4], holder=1)
    rig.clock.advance(30.0)
    chains = [chain_keys(name, 4) for name in range(4)]
    for keys in chains:
        rig.save(keys)
    leased = fetch(rig.store, HERE, chains[3])
    for payload in silent.payloads:
        assert payload is not None
        payload[:] = 0xEE
    assert_right(leased, chains[3])
    for keys in chains:
        fetched = fetch(rig.store, HERE, keys)
        assert_payloads(HERE, keys, fetched.payloads, LAYOUT, 0)
        rig.store.release(fetched)
    assert rig.store.stats().quarantined_bytes == 4 * SLOT
    rig.store.abort(silent)
    assert rig.store.stats().quarantined_bytes == 0
    assert rig.store.reserve(HERE, KEYS[:4], LAYOUT).result.outcomes == [MISS] * 4


def test_another_writer_gets_the_address_of_a_silent_one(rig: Rig) -> None:
    silent = reserved(rig, holder=1)
    rig.clock.advance(30.0)
    quick = reserved(rig, holder=2)
    assert quick.outcomes == [MISS] * 6
    assert rig.store.publish(silent).result == [REJECTED] * 6
    assert rig.store.publish(quick).result == [HIT] * 6
    assert_right(fetch(rig.store, HERE, KEYS))


def test_a_silent_reader_keeps_its_bytes(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slots=8)
    rig.save(KEYS[:4])
    fetched = fetch(rig.store, HERE, KEYS, holder=1)
    rig.clock.advance(30.0)
    for name in range(4):
        rig.save(chain_keys(name, 4))
    assert rig.store.stats().quarantined_bytes == 4 * SLOT
    assert_right(fetched, KEYS[:4])
    rig.store.release(fetched)
    assert rig.store.stats().quarantined_bytes == 0


def test_a_holder_with_too_much_in_quarantine_gets_nothing_new_and_others_do(rig: Rig) -> None:
    rig.save(chain_keys("known", 2))
    plan = rig.plan(chain_keys("known", 2))
    leaked = reserved(rig, KEYS[:3], holder=1)
    rig.clock.advance(30.0)
    assert rig.store.reserve(HERE, KEYS[3:], LAYOUT, holder=1).result.outcomes == [REJECTED] * 3
    assert rig.store.fetch(plan, holder=1).result.outcome is REJECTED
    assert rig.store.pin(plan, ttl_s=1.0, holder=1).result.outcome is REJECTED
    assert rig.store.stats().rejected_blocks == 7
    assert rig.store.reserve(HERE, KEYS[3:], LAYOUT, holder=2).result.outcomes == [MISS] * 3
    assert rig.store.fetch(plan, holder=2).result.outcome is HIT
    rig.store.abort(leaked)
    assert rig.store.fetch(plan, holder=1).result.outcome is HIT


def test_everything_that_a_dead_client_held_comes_back(rig: Rig) -> None:
    rig.save(KEYS[:3])
    his = reserved(rig, chain_keys("his", 2), holder=2)
    silent = reserved(rig, chain_keys("silent", 2), holder=1)
    rig.clock.advance(30.0)
    rig.store.poll()
    read = rig.arrival(rig.store.fetch(rig.plan(), holder=1))
    pin = rig.arrival(rig.store.pin(rig.plan(), ttl_s=60.0, holder=1))
    reserved(rig, chain_keys("unfinished", 2), holder=1)
    assert rig.store.stats().leases == 5
    rig.store.forget(1)
    stats = rig.store.stats()
    assert (stats.leases, stats.pinned_bytes, stats.quarantined_bytes) == (1, 0, 2 * SLOT)
    assert rig.used_slots == 5
    assert rig.store.reserve(HERE, chain_keys("unfinished", 2), LAYOUT).result.outcomes == [MISS] * 2
    rig.store.release(read)
    rig.store.release(pin)
    rig.store.abort(silent)
    rig.store.abort(his)
    rig.store.forget(3)


def test_a_fetch_of_a_dead_client_ends_and_leaves_no_lease_behind(rig: Rig) -> None:
    rig.save()
    rig.cool(KEYS[2:])
    with rig.disk.gate("read") as gate:
        his = rig.store.fetch(rig.plan(), holder=1)
        pin = rig.store.pin(rig.plan(), ttl_s=1000.0, holder=1)
        other = rig.store.fetch(rig.plan(), holder=2)
        gate.wait_reached()
        rig.store.forget(1)
        assert his.is_done
        assert (his.result.blocks, his.result.lease, pin.result.blocks, pin.result.lease) == (0, None, 0, None)
    assert_right(rig.arrival(other))
    assert (rig.store.stats().leases, rig.store.stats().pinned_bytes) == (1, 0)


# Nothing blocks ---------------------------------------------------------------------------------------------


def test_no_call_of_an_engine_waits_for_a_tier_that_hangs(rig: Rig) -> None:
    rig.save()
    rig.cool(KEYS[3:])
    with rig.disk.gate("read"), rig.disk.gate("write") as writing:
        ticket = rig.store.fetch(rig.plan())
        pin = rig.store.pin(rig.plan(), ttl_s=60.0)
        assert rig.store.publish(reserved(rig, chain_keys("new", 4))).result == [HIT] * 4
        writing.wait_reached()
        assert rig.store.publish(reserved(rig, chain_keys("newer", 2))).result == [HIT] * 2
        rig.store.abort(reserved(rig, chain_keys("newest", 2)))
        assert rig.store.prefetch(rig.plan()).result == 6
        assert matched(rig.store, HERE, KEYS).blocks == 6
        rig.store.check_layout(LAYOUT)
        rig.store.forget(99)
        assert not rig.store.drain(0)
        assert not ticket.is_done
        assert rig.store.stats().spill["disk"].queued_bytes == 6 * SLOT
        rig.clock.advance(10.0)
        assert rig.store.poll() == [ticket, pin] or rig.store.poll() == []
        assert (ticket.result.blocks, ticket.result.outcome) == (3, TIMEOUT)
        rig.store.release(ticket.result)
        rig.store.release(pin.result)


# Clearing ---------------------------------------------------------------------------------------------------


def test_a_clear_forgets_blocks_on_every_tier(rig: Rig) -> None:
    rig.save()
    rig.cool(KEYS[4:])
    assert rig.store.clear() == 4 + 6
    assert (rig.in_dram(), rig.on_disk(), rig.used_slots) == (0, 0, 0)
    assert rig.store.clear() == 0
    rig.save()
    assert_right(fetch(rig.store, HERE, KEYS))


@pytest.mark.parametrize("what", ["tenant", "namespace"])
def test_a_clear_leaves_others_alone(rig: Rig, what: str) -> None:
    other = make_shelf("another tenant", namespace="another model")
    rig.save(KEYS[:4])
    rig.save(KEYS[:4], other)
    assert rig.store.clear(**{what: getattr(HERE, what)}) == 8
    assert matched(rig.store, HERE, KEYS).blocks == 0
    assert_right(fetch(rig.store, other, KEYS), KEYS[:4], other)


def test_a_reservation_that_was_cleared_is_not_published(rig: Rig) -> None:
    other = make_shelf("another tenant")
    mine, his = reserved(rig, KEYS[:3]), reserved(rig, KEYS[:3], shelf=other)
    rig.store.clear(tenant=HERE.tenant)
    again = reserved(rig, KEYS[:3])
    assert rig.store.publish(mine).result == [REJECTED] * 3
    assert matched(rig.store, HERE, KEYS).blocks == 0
    assert rig.store.publish(again).result == [HIT] * 3
    assert rig.store.publish(his).result == [HIT] * 3
    assert rig.store.stats().stale_publishes == 3


def test_what_is_leased_when_it_is_cleared_stays_readable_and_nobody_else_finds_it(rig: Rig) -> None:
    rig.save()
    fetched = fetch(rig.store, HERE, KEYS)
    rig.store.clear()
    assert matched(rig.store, HERE, KEYS).blocks == 0
    rig.save(chain_keys("others", 8))
    assert_right(fetched)
    assert rig.used_slots == 14
    rig.store.release(fetched)
    assert rig.used_slots == 8


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_flight_does_not_bring_back_what_was_cleared(rig: Rig, when: str) -> None:
    rig.save()
    rig.cool()
    old_plan = rig.plan()
    with rig.disk.gate("read", when) as gate:
        ticket = rig.store.fetch(old_plan)
        gate.wait_reached()
        rig.store.clear()
        late = rig.store.fetch(old_plan)
        assert (late.result.blocks, late.result.outcome) == (0, MISS)
        assert rig.store.prefetch(old_plan).result == 0
    fetched = rig.arrival(ticket)
    assert (fetched.blocks, fetched.outcome) == (0, MISS)
    assert matched(rig.store, HERE, KEYS).blocks == 0
    assert rig.used_slots == 0


def test_a_flight_that_begins_during_a_clear_does_not_bring_blocks_back(rig: Rig) -> None:
    rig.save()
    rig.cool()
    with ThreadPoolExecutor(1) as pool, rig.disk.gate("clear") as gate:
        clearing = pool.submit(rig.store.clear)
        gate.wait_reached()
        # DRAM has been cleared, the disk not yet.
        ticket = rig.store.fetch(rig.plan())
        assert rig.store.prefetch(rig.plan()).result == 0
        fetched = rig.arrival(ticket)
        assert (fetched.blocks, fetched.outcome) == (0, MISS)
        gate.open()
        clearing.result(60)
    assert matched(rig.store, HERE, KEYS).blocks == 0
    rig.save()
    rig.cool()
    assert_right(fetch(rig.store, HERE, KEYS))


def test_flights_of_others_begin_and_land_during_a_clear(rig: Rig) -> None:
    other = make_shelf("another tenant")
    rig.save(shelf=other)
    rig.cool(shelf=other)
    with ThreadPoolExecutor(1) as pool, rig.disk.gate("clear") as gate:
        with rig.disk.gate("read"):
            begun_before = rig.store.fetch(rig.plan(KEYS[:3], other))
            clearing = pool.submit(rig.store.clear, tenant=HERE.tenant)
            gate.wait_reached()
            begun_during = rig.store.fetch(rig.plan(KEYS, other))
        assert_right(rig.arrival(begun_before), KEYS[:3], other)
        assert_right(rig.arrival(begun_during), KEYS, other)
        gate.open()
        clearing.result(60)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_spill_does_not_bring_back_what_was_cleared(rig: Rig, when: str) -> None:
    other = make_shelf("another tenant")
    with ThreadPoolExecutor(1) as pool, rig.disk.gate("write", when) as gate:
        for i in range(2):  # one for each thread that writes
            save(rig.store, HERE, KEYS[: i + 1], LAYOUT, first=i)
            gate.wait_reached(i + 1)
        save(rig.store, HERE, KEYS[:3], LAYOUT, first=2)
        save(rig.store, other, KEYS[:3], LAYOUT)
        clearing = pool.submit(rig.store.clear, tenant=HERE.tenant)
        assert rig.dram.is_cleared.wait(60)  # now the clear waits for the two that are under way
        gate.open()
        clearing.result(60)
    assert rig.store.drain()
    assert (rig.in_dram(), rig.on_disk()) == (0, 0)
    assert Address(HERE, KEYS[2]) not in rig.disk.writes
    assert (rig.on_disk(shelf=other), rig.used_slots) == (3, 3)


def test_a_fetch_that_ends_after_a_clear_does_not_spill_what_was_cleared(rigs: Callable[..., Rig]) -> None:
    rig = rigs(spill_when="second_use")
    rig.save(KEYS[:4])
    assert_right(fetch(rig.store, HERE, KEYS), KEYS[:4])
    assert rig.store.drain()
    rig.disk.delete([Address(HERE, key) for key in KEYS[:2]])
    rig.cool()
    rig.save(KEYS[:2])
    with rig.disk.gate("read") as gate:
        ticket = rig.store.fetch(rig.plan(KEYS[:4]))  # two blocks are in DRAM only, two on the disk only
        gate.wait_reached()
        rig.store.clear()
    fetched = rig.arrival(ticket)
    assert (fetched.blocks, fetched.outcome) == (2, MISS)
    assert rig.store.drain()
    assert rig.on_disk() == 0


def test_a_clear_ends_a_drain_that_waited_for_what_was_cleared(rig: Rig) -> None:
    with ThreadPoolExecutor(1) as pool, rig.disk.gate("write") as gate:
        for i in range(2):
            save(rig.store, HERE, KEYS[: i + 1], LAYOUT, first=i)
            gate.wait_reached(i + 1)
        draining = pool.submit(rig.store.drain, 1e6)
        save(rig.store, HERE, KEYS, LAYOUT, first=2)
        clearing = threading.Thread(target=rig.store.clear)
        clearing.start()
        gate.open()
        assert draining.result(60)
        clearing.join(60)
    assert rig.store.stats().spill["disk"].queued_bytes == 0


# Opening and closing ----------------------------------------------------------------------------------------


def threads_of_kvtide() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvtide")}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_layout_that_a_tier_cannot_hold_is_refused_by_name(rig: Rig) -> None:
    rig.store.check_layout(LAYOUT)
    with pytest.raises(ConfigError, match=r"dram\.bytes_max leaves room for 262,144") as refusal:
        rig.store.check_layout(Layout(1, 1, 16, SLOTS * SLOT))
    assert refusal.value.context["tier"] == "dram"


def test_a_layout_that_only_the_disk_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with (
        Store(DramTier(8 << 20, huge_pages=False), [Lower(DiskTier(tmp_path, 1 << 20))]) as store,
        pytest.raises(ConfigError, match=r"a block takes 2,004,096 bytes, but disk\.bytes_max"),
    ):
        store.check_layout(Layout(1, 1, 16, 2_000_000))


def test_a_folder_belongs_to_one_store_and_that_one_goes_on(rig: Rig) -> None:
    rig.save()
    threads, files = threads_of_kvtide(), open_files()
    with pytest.raises(FolderOwned, match=str(os.getpid())):
        Rig(rig.folder)
    assert threads_of_kvtide() == threads
    assert open_files() <= files
    rig.cool()
    assert_right(fetch(rig.store, HERE, KEYS))


def test_a_tier_that_does_not_open_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    files = open_files()
    dram = DramTier(1 << 20, huge_pages=False)
    with pytest.raises(ConfigError, match=r"disk\.folder"):
        Store(dram, [Lower(DiskTier(tmp_path / "good", 1 << 20)), Lower(DiskTier(tmp_path / "file", 1 << 20))])
    assert threads_of_kvtide() == set()
    assert open_files() <= files
    reopened = DiskTier(tmp_path / "good", 1 << 20)
    reopened.open()
    reopened.close()


def test_a_closed_store_holds_nothing(tmp_path: Path) -> None:
    files = open_files()
    rig = Rig(tmp_path)
    rig.save()
    for _ in range(2):
        rig.store.close()
    assert threads_of_kvtide() == set()
    assert open_files() <= files


def test_a_closed_store_gives_nothing_and_breaks_nobody(rig: Rig) -> None:
    rig.save()
    plan, leased, reservation = rig.plan(), fetch(rig.store, HERE, KEYS), reserved(rig, chain_keys("late", 2))
    rig.store.close()
    assert rig.store.fetch(plan).result.outcome is REJECTED
    assert rig.store.pin(plan, ttl_s=1.0).result.outcome is REJECTED
    assert rig.store.prefetch(plan).result == 0
    assert rig.store.reserve(HERE, chain_keys("later", 2), LAYOUT).result.outcomes == [REJECTED] * 2
    assert_right(leased)
    rig.store.release(leased)
    rig.store.abort(reservation)
    assert rig.store.stats().leases == 0


def test_closing_ends_the_fetches_that_wait(rig: Rig) -> None:
    rig.save()
    rig.cool(KEYS[2:])
    with ThreadPoolExecutor(1) as pool, rig.disk.gate("read") as gate:
        for i in range(2):
            rig.store.fetch(rig.plan(KEYS[: 3 + i]))
            gate.wait_reached(i + 1)
        queued = rig.store.fetch(rig.plan())
        closing = pool.submit(rig.store.close)
        while rig.store.prefetch(rig.plan([])).result or rig.store.fetch(rig.plan([])).result.outcome is not REJECTED:
            threading.Event().wait(0.001)
        gate.open()
        closing.result(60)
    assert queued.is_done
    assert_payloads(HERE, KEYS, queued.result.payloads, LAYOUT, 0)
    rig.store.release(queued.result)


def test_a_store_of_dram_alone_works(tmp_path: Path) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=1 << 20, huge_pages=False))) as store:
        save(store, HERE, KEYS, LAYOUT)
        assert_right(fetch(store, HERE, KEYS))
        assert store.drain()
        assert store.clear() == 6
        assert list(store.stats().tiers) == ["dram"]


def test_a_store_is_built_from_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    disk = DiskSettings(folder="~/cache", bytes_max=8 << 20, io_threads=2)
    settings = Settings(dram=DramSettings(bytes_max=1 << 20, huge_pages=False), disk=disk)
    with open_store(settings) as store:
        save(store, HERE, KEYS, LAYOUT)
    with open_store(settings) as store:
        assert_right(fetch(store, HERE, KEYS))
        stats = store.stats()
        assert (stats.tiers["dram"].bytes_max, stats.tiers["disk"].bytes_max) == (1 << 20, 8 << 20)
    assert (tmp_path / "cache" / DATA).exists()


def test_settings_that_cannot_work_open_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.io_threads"):
        open_store(Settings(disk=DiskSettings(folder=str(tmp_path / "cache"), io_threads=0)))
    assert not (tmp_path / "cache").exists()


# Counting, and several tiers --------------------------------------------------------------------------------


def test_stats_add_up(rig: Rig) -> None:
    rig.save(KEYS[:4])
    rig.cool(KEYS[2:4])
    fetched = fetch(rig.store, HERE, KEYS)
    reserved(rig, chain_keys("open", 3))
    stats = rig.store.stats()
    assert (stats.asked_blocks, stats.matched_blocks) == (6, 4)
    assert (stats.published_blocks, stats.rejected_blocks, stats.stale_publishes) == (4, 0, 0)
    assert (stats.leases, stats.quarantined_bytes, stats.pinned_bytes) == (2, 0, 0)
    assert (stats.tiers["dram"].blocks, stats.tiers["dram"].bytes_used) == (4, 7 * SLOT)
    assert (stats.tiers["disk"].blocks, stats.tiers["disk"].read_bytes) == (4, 2 * SLOT)
    assert stats.tiers["disk"].written_bytes == stats.spill["disk"].spilled_bytes == 4 * SLOT
    rig.store.release(fetched)
    assert stats.leases == 2, "a snapshot does not change"
    assert rig.store.stats().leases == 1


def test_a_block_is_found_on_the_tier_that_has_it(tmp_path: Path) -> None:
    near, far = FaultyTier(DiskTier(tmp_path / "near", 4 << 20)), FaultyTier(DiskTier(tmp_path / "far", 4 << 20))
    far.traits = replace(far.traits, name="far")
    with Store(DramTier(1 << 20, huge_pages=False), [Lower(near), Lower(far)]) as store:
        save(store, HERE, KEYS, LAYOUT)
        assert store.drain()
        plan = store.plan(matched(store, HERE, KEYS))
        store.dram.delete([Address(HERE, key) for key in KEYS])
        near.delete([Address(HERE, key) for key in KEYS[2:]])
        match = matched(store, HERE, KEYS)
        assert (match.blocks, match.tiers[0].tolist()) == (6, [1, 1, 2, 2, 2, 2])
        ticket = store.fetch(plan)  # by a match from when all of it was in DRAM
        store.wait(ticket)
        assert_right(ticket.result)
        assert (len(near.reads), len(far.reads)) == (2, 4)
        assert store.drain()
        assert (near.lookup(HERE, KEYS) > 0).all(), "what came up from far away goes down to the nearer tier"
        assert store.clear(tenant=HERE.tenant) == 6 + 6 + 6
        assert set(store.stats().spill) == {"disk", "far"}
