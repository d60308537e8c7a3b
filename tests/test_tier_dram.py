# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier: what every tier promises, and what lending its memory to others adds to it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Address
from kvtide.testing import blocks
from kvtide.testing.tier_suite import TierSuite
from kvtide.testing.tier_suite.tools import (
    ELSEWHERE,
    HERE,
    HIT,
    REJECTED,
    assert_has,
    assert_lacks,
    many,
    one,
    read,
    store,
)
from kvtide.tiers.dram import DramTier

SLOT_BYTES = 16_384


class TestDramTier(TierSuite):
    def make_tier(self, folder: Path, bytes_max: int) -> DramTier:
        return DramTier(bytes_max)

    def raw_get(self, tier: DramTier, address: Address) -> bytes | None:
        row = tier.table.row(address)
        return None if row < 0 else tier.memory(row).tobytes()


@pytest.fixture
def tier() -> Iterator[DramTier]:
    """Room for exactly eight slots."""
    tier = DramTier(8 * SLOT_BYTES)
    tier.open()
    yield tier
    tier.close()


def fill(tier: DramTier, name: object, count: int = 8) -> list[int]:
    """Published blocks of one slot each that nobody holds; their rows."""
    frames = many(name, count, SLOT_BYTES - HEADER_BYTES)
    store(tier, frames)
    return [tier.table.row(frame.address) for frame in frames]


def test_a_bound_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dram\.bytes_max"):
        DramTier(8191)


def test_a_bound_between_pages_is_rounded_down() -> None:
    assert DramTier(100_000).bytes_max == 98_304


def test_slots_are_page_aligned_and_do_not_overlap(tier: DramTier) -> None:
    rows = tier.take(10_000, 5) + tier.take(20_000, 1)
    ranges = sorted((int(tier.table.offset[row]), int(tier.table.extent[row])) for row in rows)
    assert all(offset % 4096 == 0 for offset, _ in ranges)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))
    payloads = tier.slots(np.array(rows)).views()
    assert [len(memory) for memory in payloads] == [10_000 - HEADER_BYTES] * 5 + [20_000 - HEADER_BYTES]
    for row, payload in zip(rows, payloads, strict=True):
        payload[:] = row + 1
        assert (tier.payload(row) == row + 1).all()


def test_taken_rows_are_invisible_until_they_are_published(tier: DramTier) -> None:
    frames = many("a", 2)
    rows = tier.take(frames[0].header.frame_bytes, 2)
    for row, frame in zip(rows, frames, strict=True):
        tier.header[row] = frame.header
        tier.payload(row)[:] = frame.payload
    assert_lacks(tier, frames)
    keys = [frame.header.key for frame in frames]
    assert tier.publish(HERE, rows, keys, [NO_PARENT] * 2) == rows
    tier.release(rows)
    assert_has(tier, frames)


def test_a_block_that_is_here_is_not_published_again(tier: DramTier) -> None:
    frame, new = many("a", 2)
    store(tier, [frame])
    rows = tier.take(frame.header.frame_bytes, 2)
    for row, each in zip(rows, (frame, new), strict=True):
        tier.header[row] = each.header
        tier.payload(row)[:] = 0 if each is frame else each.payload
    assert tier.publish(HERE, rows, [frame.header.key, new.header.key], [NO_PARENT] * 2) == rows[1:]
    tier.release(rows)
    assert_has(tier, [frame, new])
    assert tier.stats().bytes_used == 2 * SLOT_BYTES


def test_what_is_held_is_neither_evicted_nor_used_again(tier: DramTier) -> None:
    rows = fill(tier, "a")
    tier.hold(np.array(rows[:6]))
    assert sorted(tier.take(SLOT_BYTES, 5)) == sorted(rows[6:])
    assert tier.take(SLOT_BYTES) == []
    assert tier.write([one("late")]) == [REJECTED]
    assert_has(tier, many("a", 6, SLOT_BYTES - HEADER_BYTES))


def test_a_withdrawn_slot_is_used_again_when_its_last_holder_lets_go(tier: DramTier) -> None:
    (row, *_) = fill(tier, "a")
    before = tier.payload(row).copy()
    tier.hold(np.array([row, row]))
    tier.withdraw([row])
    assert_lacks(tier, many("a", 1, SLOT_BYTES - HEADER_BYTES))
    for frame in many("b", 20, SLOT_BYTES - HEADER_BYTES):
        store(tier, [frame])
        assert np.array_equal(tier.payload(row), before)
    tier.release([row])
    assert tier.free_bytes == 0
    tier.release([row])
    assert tier.free_bytes == SLOT_BYTES


def test_a_slot_that_one_holder_held_twice_is_free_once(tier: DramTier) -> None:
    rows = fill(tier, "a", 2)
    tier.hold(np.array([rows[0], rows[0], rows[1]]))
    tier.withdraw(rows)
    tier.release([rows[0], rows[0], rows[1]])
    assert tier.free_bytes == tier.bytes_max
    taken = tier.take(SLOT_BYTES, 8)
    assert len(taken) == len(set(tier.table.offset[taken].tolist())) == 8


def test_to_let_go_of_what_one_does_not_hold_is_a_mistake(tier: DramTier) -> None:
    (row,) = fill(tier, "a", 1)
    with pytest.raises(AssertionError):
        tier.release([row])


def test_each_use_of_a_row_has_a_generation_of_its_own(tier: DramTier) -> None:
    freed: list[int] = []
    tier.on_free = freed.extend
    (row,) = tier.take(SLOT_BYTES)
    generation = int(tier.generation[row])
    tier.release([row])
    assert freed == [row]
    assert tier.take(SLOT_BYTES) == [row]
    assert tier.generation[row] == generation + 1


def test_who_listens_hears_of_blocks_before_they_leave(tier: DramTier) -> None:
    heard: list[Address] = []
    tier.on_evict = lambda rows: heard.extend(tier.table.address(row) for row in rows)
    fill(tier, "a")
    fill(tier, "b", 3)
    assert heard == [frame.address for frame in many("a", 3)]


def test_reclaiming_withdraws_the_oldest_for_the_caller_to_hold(tier: DramTier) -> None:
    rows = fill(tier, "a", 6)
    assert tier.reclaim(2 * SLOT_BYTES) == []  # that much is free
    assert tier.reclaim(4 * SLOT_BYTES) == rows[:2]
    assert_lacks(tier, many("a", 2))
    assert tier.free_bytes == 2 * SLOT_BYTES
    assert np.array_equal(tier.payload(rows[0]), blocks.pattern(many("a", 1)[0].address, SLOT_BYTES - HEADER_BYTES))
    tier.release(rows[:2])
    assert tier.free_bytes == 4 * SLOT_BYTES
    assert tier.stats().evicted_blocks == 2
    assert tier.reclaim(9 * SLOT_BYTES) == []


def test_as_many_slots_are_taken_as_can_be_had(tier: DramTier) -> None:
    rows = fill(tier, "a")
    tier.hold(np.array(rows[3:5]))
    taken = tier.take(SLOT_BYTES, 8)
    assert sorted(taken) == sorted(rows[:3] + rows[5:])
    tier.release(taken)
    assert tier.take(2 * SLOT_BYTES, 9)  # a pair of neighbours beside those that are held


def test_scattered_room_is_made_whole_for_a_large_slot(tier: DramTier) -> None:
    fill(tier, "a")
    tier.delete([frame.address for frame in many("a", 8)[::2]])
    (row,) = tier.take(3 * SLOT_BYTES)
    assert len(tier.memory(row)) == 3 * SLOT_BYTES
    assert tier.stats().blocks > 0


def test_bytes_of_one_tenant_do_not_stand_behind_a_frame_of_another(tier: DramTier) -> None:
    theirs = one("a", SLOT_BYTES - HEADER_BYTES, on=ELSEWHERE["tenant"])
    theirs.memory[HEADER_BYTES:] = 0x55
    store(tier, [theirs])
    tier.delete([theirs.address])
    (row,) = tier.take(SLOT_BYTES - 1000)
    start = int(tier.table.offset[row])
    assert (tier.arena.memory[start : start + SLOT_BYTES - 1000] == 0x55).any()  # the filler overwrites this
    assert not tier.arena.memory[start + SLOT_BYTES - 1000 : start + SLOT_BYTES].any()


def test_blocks_that_are_read_outlive_those_that_are_not(tier: DramTier) -> None:
    frames = many("a", 8, SLOT_BYTES - HEADER_BYTES)
    store(tier, frames)
    assert read(tier, frames[:4])[0] == [HIT] * 4
    fill(tier, "b", 4)
    assert_has(tier, frames[:4])
    assert_lacks(tier, frames[4:])


def test_a_block_without_a_shelf_is_rejected(tier: DramTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 2)
    frames = [one("a", on=blocks.shelf(f"tenant {i}")) for i in range(3)]
    assert tier.write(frames) == [HIT, HIT, REJECTED]
    assert tier.stats().bytes_used == 2 * SLOT_BYTES
    tier.clear(tenant=frames[0].header.shelf.tenant)
    assert tier.write(frames[2:]) == [HIT]
    assert_has(tier, frames[1:])


def test_rows_beyond_the_first_thousand_are_like_the_others() -> None:
    tier = DramTier(16 << 20)
    tier.open()
    frames = many("a", 2500, 0)
    store(tier, frames)
    assert_has(tier, frames)
    tier.close()
