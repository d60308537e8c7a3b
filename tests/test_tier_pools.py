# SPDX-License-Identifier: Apache-2.0
"""Shares of DRAM and disk, seen through the tiers: what is reserved stays, what is bounded stays within its bound."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtide.frame import HEADER_BYTES, Frame
from kvtide.keys import Shelf
from kvtide.outcome import Outcome
from kvtide.policy.pools import Members, Pools, Quota
from kvtide.testing import blocks
from kvtide.testing.faults import FailingDevice, VirtualClock
from kvtide.testing.tier_suite.tools import HIT, REJECTED, assert_has, assert_lacks, many, one, present, read, store
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.dram import DramTier

BYTES_MAX = 2 << 20
BLOCK = 16 << 10
PAYLOAD = BLOCK - HEADER_BYTES

ALICE, BOB, CAROL, NOBODY = (blocks.shelf(name) for name in ("alice", "bob", "carol", "nobody"))
MEMBERS: Members = {(ALICE.tenant, None): 1, (BOB.tenant, None): 2, (CAROL.tenant, CAROL.scope): 3}
ALICES = Quota(40 * BLOCK)

LocalTier = DramTier | DiskTier
both_tiers = pytest.mark.parametrize("kind", ["dram", "disk"])


def pools_of(*quotas: Quota, clock: VirtualClock | None = None) -> Pools:
    """Alice's, Bob's and Carol's, as far as they are given."""
    return Pools([Quota(), *quotas, *[Quota()] * (3 - len(quotas))], MEMBERS, clock=clock or VirtualClock())


@contextmanager
def opened(kind: str, folder: Path, pools: Pools, device: FailingDevice | None = None) -> Iterator[LocalTier]:
    tier: LocalTier
    if kind == "dram":
        tier = DramTier(BYTES_MAX, huge_pages=False, pools=pools)
    else:
        tier = DiskTier(folder / "tier", BYTES_MAX, pools=pools, open_file=(device or FailingDevice()).open)
    tier.open()
    try:
        yield tier
    finally:
        tier.close()


def used(tier: LocalTier) -> list[int]:
    return [use.bytes_used for use in tier.stats().pools]


def flood(tier: LocalTier, shelf: Shelf, batch: int, payload_bytes: int = PAYLOAD, times: int = 10) -> list[Frame]:
    """Ten times what the medium holds; returns the last batch."""
    frames: list[Frame] = []
    count = times * BYTES_MAX // (HEADER_BYTES + payload_bytes)
    for first in range(0, count, batch):
        frames = many(f"flood {first}", batch, payload_bytes, shelf)
        assert set(tier.write(frames)) <= {HIT, REJECTED}
    return frames


@both_tiers
@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize("shelf", [BOB, NOBODY], ids=["a pool", "nobody's"])
def test_a_flood_leaves_every_reserved_byte_in_place(kind: str, tmp_path: Path, batch: int, shelf: Shelf) -> None:
    mine = [*blocks.chain_frames("chain", 20, PAYLOAD, on=ALICE), *many("mine", 20, PAYLOAD, ALICE)]
    with opened(kind, tmp_path, pools_of(ALICES)) as tier:
        store(tier, mine)
        last = flood(tier, shelf, batch)
        assert_has(tier, [*mine, *last])
        stats = tier.stats()
        assert stats.pools[1].bytes_used == 40 * BLOCK
        assert stats.pools[1].evicted_blocks == 0
        assert stats.evicted_blocks == sum(use.evicted_blocks for use in stats.pools) > 500


@both_tiers
def test_a_flood_of_all_sizes_leaves_every_reserved_byte_in_place(kind: str, tmp_path: Path) -> None:
    drawn = random.Random(3)
    with opened(kind, tmp_path, pools_of(Quota(60 * BLOCK))) as tier:
        mine: list[Frame] = []
        for i in range(1500):  # mine come in between, so that they stand everywhere
            if i % 20 == 0 and len(mine) < 60:
                mine.append(one(f"mine {i}", PAYLOAD, ALICE))
                store(tier, mine[-1:])
            tier.write([one(i, drawn.randrange(20) * 4096, BOB)])
        assert len(mine) == 60
        assert_has(tier, mine)
        assert tier.stats().pools[1].evicted_blocks == 0
        assert tier.stats().pools[2].evicted_blocks > 100


def test_a_flood_of_blocks_that_use_up_all_records_leaves_every_reserved_byte_in_place(tmp_path: Path) -> None:
    mine = many("mine", 40, PAYLOAD, ALICE)
    with opened("disk", tmp_path, pools_of(ALICES)) as tier:
        store(tier, mine)
        flood(tier, BOB, 64, payload_bytes=0, times=4)
        assert_has(tier, mine)


@both_tiers
@pytest.mark.parametrize("payload_bytes", [PAYLOAD, 0], ids=["no room", "no record"])
@pytest.mark.parametrize("batch", [1, 24])
def test_whoever_comes_to_a_medium_that_is_all_reserved_gets_nothing(
    kind: str, tmp_path: Path, payload_bytes: int, batch: int
) -> None:
    with opened(kind, tmp_path, pools_of(Quota(BYTES_MAX))) as tier:
        flood(tier, ALICE, 16, payload_bytes, times=2)
        before = tier.stats()
        assert before.pools[1].evicted_blocks > 0
        assert tier.write(many("bobs", batch, payload_bytes, BOB)) == [REJECTED] * batch
        after = tier.stats()
        assert (after.blocks, after.evicted_blocks) == (before.blocks, before.evicted_blocks)


@both_tiers
@pytest.mark.parametrize("batch", [1, 7, 10])
def test_a_pool_at_its_bound_costs_nobody_else_a_block(kind: str, tmp_path: Path, batch: int) -> None:
    with opened(kind, tmp_path, pools_of(Quota(), Quota(0, 10 * BLOCK))) as tier:
        store(tier, many("bobs", 10, PAYLOAD, BOB))
        flood(tier, NOBODY, 16, times=1)
        evicted = tier.stats().pools[0].evicted_blocks
        for i in range(5):
            store(tier, many(i, batch, PAYLOAD, BOB))
        assert tier.stats().pools[0].evicted_blocks == evicted


@both_tiers
@pytest.mark.parametrize("batch", [1, 20])
def test_a_reserve_can_be_had_though_others_were_first(kind: str, tmp_path: Path, batch: int) -> None:
    mine = many("mine", 40, PAYLOAD, ALICE)
    with opened(kind, tmp_path, pools_of(ALICES)) as tier:
        flood(tier, BOB, 16)
        for first in range(0, 40, batch):
            store(tier, mine[first : first + batch])
        assert_has(tier, mine)


@both_tiers
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_pool_never_exceeds_its_bound_and_its_newest_blocks_are_there(kind: str, tmp_path: Path, batch: int) -> None:
    theirs = many("theirs", 30, PAYLOAD, NOBODY)
    with opened(kind, tmp_path, pools_of(Quota(), Quota(0, 10 * BLOCK + 1))) as tier:
        store(tier, theirs)
        for first in range(0, 20 * batch, batch):
            frames = many(first, batch, PAYLOAD, BOB)
            outcomes = tier.write(frames)
            assert used(tier)[2] <= 10 * BLOCK
            assert outcomes.count(HIT) >= min(batch, 10)
            assert len(present(tier, frames)) == min(batch, 10)
        assert_has(tier, theirs)


@both_tiers
def test_a_block_larger_than_its_pools_bound_is_rejected_and_costs_nobody_anything(kind: str, tmp_path: Path) -> None:
    mine = many("mine", 5, PAYLOAD, BOB)
    with opened(kind, tmp_path, pools_of(Quota(), Quota(0, 10 * BLOCK))) as tier:
        store(tier, mine)
        assert tier.write([one("large", 11 * BLOCK, BOB)]) == [REJECTED]
        assert_has(tier, mine)
        assert tier.stats().evicted_blocks == 0


@both_tiers
def test_a_batch_of_several_pools_is_bounded_for_each(kind: str, tmp_path: Path) -> None:
    mine = many("mine", 40, PAYLOAD, ALICE)
    with opened(kind, tmp_path, pools_of(ALICES, Quota(0, 20 * BLOCK))) as tier:
        flood(tier, NOBODY, 16)
        for i in range(8):
            batch = [*mine[i * 5 : i * 5 + 5], *many(f"b{i}", 10, PAYLOAD, BOB), *many(f"n{i}", 10, PAYLOAD, NOBODY)]
            random.Random(i).shuffle(batch)
            store(tier, batch)
            assert_has(tier, batch)
        assert_has(tier, mine)
        assert used(tier)[1:3] == [40 * BLOCK, 20 * BLOCK]


@both_tiers
def test_a_scope_with_a_quota_is_apart_from_its_tenant(kind: str, tmp_path: Path) -> None:
    other = blocks.shelf("carol", scope="other")
    with opened(kind, tmp_path, pools_of(Quota(), Quota(), Quota(10 * BLOCK))) as tier:
        mine = many("mine", 10, PAYLOAD, CAROL)
        store(tier, mine)
        flood(tier, other, 8)
        assert_has(tier, mine)
        assert used(tier)[3] == 10 * BLOCK


@both_tiers
def test_a_quota_can_change_while_in_use(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, pools_of(ALICES)) as tier:
        mine = many("mine", 40, PAYLOAD, ALICE)
        store(tier, mine)
        tier.set_quota(1, Quota(0, 10 * BLOCK))
        assert_has(tier, mine)
        store(tier, [one("more", PAYLOAD, ALICE)])
        assert used(tier)[1] == 10 * BLOCK
        tier.set_quota(2, Quota(30 * BLOCK))
        store(tier, many("bobs", 30, PAYLOAD, BOB))
        flood(tier, NOBODY, 16)
        assert_has(tier, many("bobs", 30, PAYLOAD, BOB))
        assert tier.stats().pools[2].bytes_reserved == 30 * BLOCK


@both_tiers
def test_use_is_counted_in_bytes_times_seconds(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    with opened(kind, tmp_path, pools_of(clock=clock)) as tier:
        store(tier, many("mine", 3, PAYLOAD, ALICE))
        clock.advance(10)
        store(tier, many("bobs", 1, PAYLOAD, BOB))
        clock.advance(0.5)
        tier.clear(tenant=ALICE.tenant)
        clock.advance(100)
        uses = tier.stats().pools
        assert [use.byte_seconds for use in uses] == [0, 3 * BLOCK * 10.5, BLOCK * 100.5, 0]
        assert [use.bytes_used for use in uses] == [0, 0, BLOCK, 0]


@both_tiers
def test_what_is_deleted_and_cleared_is_counted_back(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, pools_of(ALICES)) as tier:
        for shelf in (ALICE, BOB, NOBODY):
            store(tier, blocks.chain_frames("chain", 10, PAYLOAD, on=shelf))
        chain = blocks.chain_frames("chain", 10, PAYLOAD, on=ALICE)
        tier.delete([chain[9].address, chain[2].address])
        assert used(tier) == [10 * BLOCK, 8 * BLOCK, 10 * BLOCK, 0]
        tier.clear(prefix=chain[5].header.key)
        assert used(tier) == [5 * BLOCK, 4 * BLOCK, 5 * BLOCK, 0]
        tier.clear()
        assert used(tier) == [0, 0, 0, 0]


@both_tiers
def test_a_tier_without_pools_has_one_that_holds_everything(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, Pools()) as tier:
        store(tier, [*many("a", 5, PAYLOAD, ALICE), *many("a", 5, PAYLOAD, BOB)])
        flood(tier, CAROL, 16, times=2)
        stats = tier.stats()
        (use,) = stats.pools
        assert (use.bytes_used, use.bytes_reserved, use.bytes_max) == (stats.bytes_used, 0, None)
        assert use.evicted_blocks == stats.evicted_blocks > 0


# A disk that is opened again ----------------------------------------------------------------------------------


def test_a_disk_opened_again_knows_what_each_pool_uses(tmp_path: Path) -> None:
    mine = [*blocks.chain_frames("chain", 20, PAYLOAD, on=ALICE), *many("mine", 20, PAYLOAD, ALICE)]
    with opened("disk", tmp_path, pools_of(ALICES)) as tier:
        store(tier, [*mine, *many("b", 10, 5000, BOB), *many("n", 7, 0, NOBODY)])
        before = used(tier)
    assert before == [7 * 4096, 40 * BLOCK, 10 * 12_288, 0]
    with opened("disk", tmp_path, pools_of(ALICES)) as tier:
        assert used(tier) == before
        flood(tier, BOB, 16)
        assert_has(tier, mine)


def test_a_disk_opened_with_other_pools_counts_by_those(tmp_path: Path) -> None:
    bobs = many("bobs", 30, PAYLOAD, BOB)
    with opened("disk", tmp_path, pools_of(ALICES)) as tier:
        store(tier, [*many("a", 40, PAYLOAD, ALICE), *bobs, *many("n", 10, PAYLOAD, NOBODY)])
    swapped = Pools(
        [Quota(), Quota(30 * BLOCK), Quota(0, 5 * BLOCK)],
        {(BOB.tenant, None): 1, (ALICE.tenant, None): 2},
        clock=VirtualClock(),
    )
    with opened("disk", tmp_path, swapped) as tier:
        assert used(tier) == [10 * BLOCK, 30 * BLOCK, 40 * BLOCK]
        assert swapped.excess_bytes(2) == 35 * BLOCK
        flood(tier, NOBODY, 16)
        assert_has(tier, bobs)
        store(tier, [one("more", PAYLOAD, ALICE)])
        assert used(tier)[2] <= 5 * BLOCK
    with opened("disk", tmp_path, Pools()) as tier:
        assert used(tier) == [tier.stats().bytes_used]
        assert_has(tier, bobs)
        flood(tier, NOBODY, 16)
        assert_lacks(tier, bobs)


def test_blocks_that_could_not_be_read_count_for_their_pool_and_protect_nobody(tmp_path: Path) -> None:
    device = FailingDevice()
    frames = many("mine", 42, 4096, ALICE)
    with opened("disk", tmp_path, pools_of(Quota(40 * 8192)), device) as tier:
        store(tier, frames)
        device.failing = {"read": errno.EIO}
        assert read(tier, frames[:2])[0] == [Outcome.ERROR] * 2
        device.failing.clear()
        assert used(tier)[1] == 42 * 8192
        flood(tier, BOB, 16)
        assert_has(tier, frames[2:])
    with opened("disk", tmp_path, pools_of()) as tier:
        assert used(tier)[1] == 42 * 8192


# Slots that are lent ------------------------------------------------------------------------------------------


@pytest.fixture
def dram(tmp_path: Path) -> Iterator[DramTier]:
    with opened("dram", tmp_path, pools_of(ALICES, Quota(20 * BLOCK, 30 * BLOCK))) as tier:
        assert isinstance(tier, DramTier)
        yield tier


def test_slots_count_for_their_pool_from_taking_to_freeing(dram: DramTier) -> None:
    assert [dram.pool_of(shelf) for shelf in (ALICE, BOB, CAROL, NOBODY)] == [1, 2, 3, 0]
    rows = dram.take(BLOCK, 10, dram.pool_of(BOB))
    assert used(dram) == [0, 0, 10 * BLOCK, 0]
    assert len(dram.take(BLOCK, 30, dram.pool_of(BOB))) == 20
    assert dram.take(BLOCK, 1, dram.pool_of(BOB)) == []
    dram.release(rows[:4])
    assert used(dram) == [0, 0, 26 * BLOCK, 0]


def test_blocks_that_are_read_while_they_are_withdrawn_protect_nobody(dram: DramTier) -> None:
    frames = many("mine", 50, PAYLOAD, ALICE)
    store(dram, frames)
    lent = [dram.table.row(frame.address) for frame in frames[:20]]
    dram.hold(dram.table.find(ALICE, [frame.header.key for frame in frames[:20]]))
    dram.withdraw(lent)
    flood(dram, NOBODY, 16)
    assert_has(dram, frames[20:])  # 30 of 40 reserved ones, although 50 slots are in use
    assert used(dram)[1] == 50 * BLOCK
    dram.release(lent)
    assert used(dram)[1] == 30 * BLOCK


def test_reclaiming_ahead_of_time_leaves_every_reserved_byte_in_place(dram: DramTier) -> None:
    mine, bobs = many("mine", 60, PAYLOAD, ALICE), many("bobs", 30, PAYLOAD, BOB)
    store(dram, [*mine, *bobs])
    rows = dram.reclaim(BYTES_MAX)
    assert len(rows) == 20 + 10
    assert dram.reclaim(BYTES_MAX) == []
    assert_has(dram, [*mine[20:], *bobs[10:]])
    assert used(dram) == [0, 60 * BLOCK, 30 * BLOCK, 0]
    dram.release(rows)
    assert used(dram) == [0, 40 * BLOCK, 20 * BLOCK, 0]
    flood(dram, NOBODY, 16)
    assert_has(dram, [*mine[20:], *bobs[10:]])


def test_slots_are_not_published_for_another_pool(dram: DramTier) -> None:
    (row,) = dram.take(BLOCK)
    frame = one("a", PAYLOAD, ALICE)
    dram.header[row] = frame.header
    with pytest.raises(AssertionError, match="another pool"):
        dram.publish(ALICE, [row], [frame.header.key], [frame.header.parent])
