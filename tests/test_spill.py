# SPDX-License-Identifier: Apache-2.0
"""The way down: when blocks are written below, what bounds it, and what happens to those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtide.config import SpillWhen
from kvtide.frame import HEADER_BYTES
from kvtide.keys import Address, Key
from kvtide.layout import Layout
from kvtide.outcome import Outcome
from kvtide.store import Lower, Store
from kvtide.store.spill import SpillStats
from kvtide.testing.blocks import chain_keys
from kvtide.testing.blocks import shelf as make_shelf
from kvtide.testing.faults import FaultyTier, VirtualClock
from kvtide.testing.store_machine import assert_payloads, fetch, matched, save
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.room import BYTES_MIN
from kvtide.tiers.dram import DramTier

HIT, MISS, REJECTED = Outcome.HIT, Outcome.MISS, Outcome.REJECTED

LAYOUT = Layout(layers=2, pages=4, page_tokens=16, page_bytes=1536)
SLOT = HEADER_BYTES + LAYOUT.payload_bytes
SLOTS = 16
HERE = make_shelf()
KEYS = chain_keys("chain", 6)
MODES: list[SpillWhen] = ["publish", "evict", "second_use"]


class Rig:
    """A store of 16 slots above a disk whose calls can be counted, stopped and answered for it."""

    def __init__(
        self,
        folder: Path,
        spill_when: SpillWhen = "publish",
        queue_slots: int | None = 8,
        disk_bytes: int = 4 << 20,
        daily_bytes: int | None = None,
    ) -> None:
        today = lambda: 20_000  # noqa: E731
        self.disk = FaultyTier(DiskTier(folder, disk_bytes, bytes_written_daily_max=daily_bytes, today=today))
        queue_bytes = None if queue_slots is None else queue_slots * SLOT
        below = [Lower(self.disk, spill_when, queue_bytes)]
        self.store = Store(DramTier(SLOTS * SLOT, huge_pages=False), below, clock=VirtualClock())

    def save(self, keys: Sequence[Key] = KEYS, first: int = 0) -> None:
        assert save(self.store, HERE, keys, LAYOUT, first=first) == [HIT] * (len(keys) - first)

    def use(self, keys: Sequence[Key] = KEYS) -> None:
        """Fetch these and see that they are right."""
        fetched = fetch(self.store, HERE, keys)
        assert (fetched.blocks, fetched.outcome) == (len(keys), HIT)
        assert_payloads(HERE, keys, fetched.payloads, LAYOUT, 0)
        self.store.release(fetched)

    def in_dram(self, keys: Sequence[Key] = KEYS) -> int:
        return int((self.store.dram.lookup(HERE, keys) > 0).sum())

    def on_disk(self, keys: Sequence[Key] = KEYS) -> int:
        return int((self.disk.lookup(HERE, keys) > 0).sum())

    @property
    def stats(self) -> SpillStats:
        return self.store.stats().spill["disk"]


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(spill_when: SpillWhen = "publish", **settings: object) -> Rig:
        if made:
            made[-1].store.close()
        made.append(Rig(tmp_path / "disk", spill_when, **settings))
        return made[-1]

    yield make
    made[-1].store.close(drain_s=0)


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs()


# On publish -------------------------------------------------------------------------------------------------


def test_what_is_published_goes_down_and_is_found_there(rig: Rig) -> None:
    rig.save()
    assert rig.store.drain()
    assert rig.on_disk() == 6
    rig.store.dram.delete([Address(HERE, key) for key in KEYS])
    rig.use()


def test_what_went_down_is_counted(rig: Rig) -> None:
    rig.save()
    assert rig.store.drain()
    assert rig.stats == SpillStats(spilled_blocks=6, spilled_bytes=6 * SLOT)
    assert rig.store.stats().tiers["disk"].written_bytes == 6 * SLOT


def test_a_block_goes_down_once(rig: Rig) -> None:
    rig.save()
    assert rig.store.drain()
    rig.use()
    rig.store.dram.delete([Address(HERE, key) for key in KEYS])
    rig.use()
    rig.use()
    assert rig.store.drain()
    assert set(rig.disk.writes.values()) == {1}


def test_a_publish_does_not_wait_for_a_tier_that_hangs(rigs: Callable[..., Rig]) -> None:
    rig = rigs(queue_slots=None)
    with rig.disk.gate("write") as gate:
        for name in range(8):
            rig.save(chain_keys(name, 1))
        gate.wait_reached()
        assert rig.stats.queued_bytes == 4 * SLOT  # a quarter of the arena, without a setting
        assert rig.stats.dropped_full == 4
        assert rig.in_dram([chain_keys(name, 1)[0] for name in range(8)]) == 8
    assert rig.store.drain()
    assert rig.stats == SpillStats(spilled_blocks=4, spilled_bytes=4 * SLOT, dropped_full=4)


@pytest.mark.parametrize("queue_slots", [1, 3])
def test_the_queue_holds_no_more_than_its_bound(rigs: Callable[..., Rig], queue_slots: int) -> None:
    rig = rigs(queue_slots=queue_slots)
    with rig.disk.gate("write"):
        rig.save()
        assert rig.stats.queued_bytes == queue_slots * SLOT
        assert rig.stats.dropped_full == 6 - queue_slots
    assert rig.store.drain()
    assert rig.on_disk() == queue_slots


def test_what_the_queue_had_no_room_for_goes_down_when_it_is_used(rigs: Callable[..., Rig]) -> None:
    rig = rigs(queue_slots=4)
    with rig.disk.gate("write"):
        rig.save()
    assert rig.store.drain()
    assert rig.on_disk() == 4
    rig.use()
    assert rig.store.drain()
    assert rig.on_disk() == 6


def test_what_waits_to_go_down_does_not_leave(rigs: Callable[..., Rig]) -> None:
    rig = rigs(queue_slots=8)
    waiting = [key for name in range(2) for key in chain_keys(("waiting", name), 4)]
    with rig.disk.gate("write"):
        for name in range(2):
            rig.save(chain_keys(("waiting", name), 4))
        for name in range(6):
            rig.save(chain_keys(name, 4))
        assert rig.in_dram(waiting) == 8
    assert rig.store.drain()
    assert rig.on_disk(waiting) == 8
    for name in range(6, 12):
        rig.save(chain_keys(name, 4))
    assert rig.in_dram(waiting) == 0


def test_when_all_slots_wait_to_go_down_a_reservation_is_refused(rigs: Callable[..., Rig]) -> None:
    rig = rigs(queue_slots=16)
    with rig.disk.gate("write"):
        for name in range(2):
            rig.save(chain_keys(name, 8))
        assert rig.store.reserve(HERE, KEYS, LAYOUT).result.outcomes == [REJECTED] * 6
    assert rig.store.drain()
    rig.save()


@pytest.mark.parametrize("outcome", [REJECTED, Outcome.THROTTLED, Outcome.TIMEOUT, Outcome.ERROR])
def test_what_the_tier_refuses_is_counted_and_stays_in_dram(rig: Rig, outcome: Outcome) -> None:
    rig.disk.answers = {"write": outcome}
    rig.save()
    assert rig.store.drain()
    assert rig.stats == SpillStats(dropped_refused=6)
    assert (rig.in_dram(), rig.on_disk()) == (6, 0)
    rig.disk.answers = {}
    rig.use()
    assert rig.store.drain()
    assert rig.on_disk() == 6


def test_a_mistake_of_the_tier_costs_the_blocks_and_the_next_ones_go_down(rig: Rig) -> None:
    rig.disk.mistakes = {"write": ZeroDivisionError()}
    for i in range(3):  # more than there are threads to lose
        rig.save(KEYS[: 2 * i + 2], first=2 * i)
        assert rig.store.drain()
    assert rig.stats == SpillStats(dropped_refused=6)
    rig.disk.mistakes = {}
    rig.use()
    assert rig.store.drain()
    assert rig.on_disk() == 6


def test_what_somebody_else_writes_already_counts_as_written(rig: Rig) -> None:
    rig.disk.answers = {"write": Outcome.PENDING}
    rig.save()
    assert rig.store.drain()
    assert (rig.stats.spilled_blocks, rig.stats.dropped_refused) == (6, 0)


def test_a_spent_budget_is_a_refusal(rigs: Callable[..., Rig]) -> None:
    rig = rigs(daily_bytes=4 * SLOT + 100)
    rig.save()
    assert rig.store.drain()
    assert (rig.stats.spilled_blocks, rig.stats.spilled_bytes, rig.stats.dropped_refused) == (4, 4 * SLOT, 2)
    assert rig.store.stats().tiers["disk"].outcomes["write"] == {"hit": 4, "throttled": 2}
    rig.use()


def test_blocks_that_leave_after_they_went_down_are_not_lost(rig: Rig) -> None:
    chains = [chain_keys(name, 4) for name in range(6)]
    for keys in chains:
        rig.save(keys)
        assert rig.store.drain()
    assert rig.stats.evicted_unspilled == 0
    assert rig.store.stats().tiers["dram"].evicted_blocks == 8
    for keys in chains:
        rig.use(keys)


def test_blocks_that_leave_before_they_went_down_are_lost_and_counted(rig: Rig) -> None:
    rig.disk.answers = {"write": REJECTED}
    for name in range(6):
        rig.save(chain_keys(name, 4))
        assert rig.store.drain()
    assert rig.stats.evicted_unspilled == 8
    assert matched(rig.store, HERE, chain_keys(0, 4)).blocks == 0


# On second use ----------------------------------------------------------------------------------------------


def test_on_second_use_a_block_goes_down_when_it_is_fetched(rigs: Callable[..., Rig]) -> None:
    rig = rigs("second_use")
    rig.save()
    assert rig.store.drain()
    assert rig.on_disk() == 0
    rig.use(KEYS[:4])
    assert rig.store.drain()
    assert rig.on_disk() == 4
    rig.use()
    assert rig.store.drain()
    assert rig.on_disk() == 6
    assert set(rig.disk.writes.values()) == {1}


def test_on_second_use_what_was_used_once_is_lost_when_it_leaves(rigs: Callable[..., Rig]) -> None:
    rig = rigs("second_use")
    for name in range(6):
        rig.save(chain_keys(name, 4))
    assert rig.stats.evicted_unspilled == 8
    assert not rig.disk.writes


# On evict ---------------------------------------------------------------------------------------------------


def fill_up(rig: Rig, chains: int = 4) -> None:
    """Four blocks each: four of them fill the arena."""
    for name in range(chains):
        rig.save(chain_keys(name, 4))


def test_on_evict_nothing_goes_down_while_there_is_room(rigs: Callable[..., Rig]) -> None:
    rig = rigs("evict")
    fill_up(rig, 3)
    rig.save(chain_keys(3, 3))
    rig.use(chain_keys(0, 4))
    assert rig.store.drain()
    assert not rig.disk.writes


def test_on_evict_a_share_is_kept_free_ahead_and_what_left_is_found_below(rigs: Callable[..., Rig]) -> None:
    rig = rigs("evict")
    with rig.disk.gate("write", "after") as gate:
        fill_up(rig)
        gate.wait_reached()
    assert rig.store.drain()
    assert rig.store.dram.free_bytes == SLOT  # a sixteenth
    assert set(rig.disk.writes) == {Address(HERE, chain_keys(0, 4)[3])}  # who was used longest ago, and has no children
    assert rig.stats == SpillStats(spilled_blocks=1, spilled_bytes=SLOT)
    rig.use(chain_keys(0, 4))


def test_on_evict_what_must_leave_faster_than_it_can_be_written_is_lost_and_counted(rigs: Callable[..., Rig]) -> None:
    rig = rigs("evict")
    with rig.disk.gate("write") as gate:
        fill_up(rig)
        gate.wait_reached()
        rig.save(chain_keys("more", 4))
        assert rig.stats.evicted_unspilled == 4
    assert rig.store.drain()


def test_on_evict_what_the_tier_refuses_is_lost_and_counted(rigs: Callable[..., Rig]) -> None:
    rig = rigs("evict")
    rig.disk.answers = {"write": REJECTED}
    with rig.disk.gate("write") as gate:
        fill_up(rig)
        gate.wait_reached()
    assert rig.store.drain()
    assert (rig.stats.dropped_refused, rig.stats.evicted_unspilled) == (1, 1)
    assert matched(rig.store, HERE, chain_keys(0, 4)).blocks == 3


def test_on_evict_what_is_below_already_simply_leaves(rigs: Callable[..., Rig]) -> None:
    rig = rigs("evict")
    rig.save()
    rig = rigs("evict")  # opened again: the blocks are below only
    rig.use()
    fill_up(rig, 2)
    with rig.disk.gate("write") as gate:
        rig.save(chain_keys(2, 4))  # six blocks are below, and twelve are not
        rig.use(chain_keys(0, 4))
        rig.save(chain_keys(3, 4))
        gate.wait_reached()
    assert rig.store.drain()
    assert not set(rig.disk.writes) & {Address(HERE, key) for key in KEYS}
    rig.use()


def test_on_evict_a_clear_forgets_what_is_leaving(rigs: Callable[..., Rig]) -> None:
    rig = rigs("evict")
    with rig.disk.gate("write") as gate:
        fill_up(rig)
        gate.wait_reached()
        other = make_shelf("another tenant")
        assert rig.store.clear(tenant=other.tenant) == 0
    rig.store.clear()
    assert rig.store.drain()
    assert rig.store.dram.stats().bytes_used == 0
    assert rig.on_disk(chain_keys(0, 4)) == 0


# Draining and closing ---------------------------------------------------------------------------------------


def test_a_drain_says_when_its_time_was_too_short(rig: Rig) -> None:
    with rig.disk.gate("write"):
        rig.save()
        assert not rig.store.drain(0)
    assert rig.store.drain()


@pytest.mark.parametrize("spill_when", MODES)
def test_a_store_that_was_closed_is_warm_when_it_opens_again(rigs: Callable[..., Rig], spill_when: SpillWhen) -> None:
    rig = rigs(spill_when, queue_slots=1)
    chains = [chain_keys(name, 4) for name in range(3)]
    for keys in chains:
        rig.save(keys)
    rig = rigs(spill_when)
    for keys in chains:
        rig.use(keys)


def test_a_store_that_is_closed_in_a_hurry_keeps_what_was_below(rig: Rig, rigs: Callable[..., Rig]) -> None:
    rig.save(KEYS[:2])
    assert rig.store.drain()
    with rig.disk.gate("write") as gate:
        for i in range(2, 4):  # one for each thread that writes
            rig.save(KEYS[: i + 1], first=i)
            gate.wait_reached(i - 1)
        rig.save(KEYS, first=4)
        gate.open()
        rig.disk.answers = {"write": REJECTED}
        rig.store.close(drain_s=0)
    assert rig.stats.queued_bytes == 0
    assert rig.stats.spilled_blocks + rig.stats.dropped_full + rig.stats.dropped_refused == 6
    again = rigs()
    assert 2 <= matched(again.store, HERE, KEYS).blocks <= 6


def test_what_is_still_queued_when_the_time_is_over_is_dropped_and_counted(rig: Rig) -> None:
    with rig.disk.gate("write") as gate:
        for i in range(2):
            rig.save(KEYS[: i + 1], first=i)
            gate.wait_reached(i + 1)
        rig.save(KEYS[:4], first=2)
        with rig.store.dram.lock:  # the writers cannot take more before they see that the store closes
            gate.open()
    rig.store.close(drain_s=0)
    assert rig.stats.spilled_blocks + rig.stats.dropped_full == 4
    assert rig.stats.queued_bytes == 0


def test_closing_writes_again_what_has_left_below_since(rigs: Callable[..., Rig]) -> None:
    rig = rigs(disk_bytes=BYTES_MIN)
    rig.save()
    assert rig.store.drain()
    rig.disk.delete([Address(HERE, KEYS[0]), Address(HERE, KEYS[5])])
    rig = rigs(disk_bytes=BYTES_MIN)
    rig.use()


def test_a_full_disk_goes_on_taking_new_blocks(rigs: Callable[..., Rig]) -> None:
    rig = rigs(disk_bytes=BYTES_MIN)
    chains = [chain_keys(name, 4) for name in range(40)]
    for keys in chains:
        rig.save(keys)
        assert rig.store.drain()
    assert rig.stats.spilled_blocks == 160
    assert rig.store.stats().tiers["disk"].evicted_blocks > 80
    rig.use(chains[-1])
    rig.use(chains[-8])
