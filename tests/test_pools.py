# SPDX-License-Identifier: Apache-2.0
"""Shares of a medium: what each pool uses, what nobody can take from it, what it may take, and who gives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.errors import ConfigError
from kvtide.keys import NO_PARENT, Key
from kvtide.memory.extents import cheapest_window
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW
from kvtide.policy.pools import POOLS_MAX, Pools, PoolUse, Quota
from kvtide.testing import blocks
from kvtide.testing.faults import VirtualClock
from kvtide.tiers.space import Space
from kvtide.tiers.table import BlockTable

# Pools ------------------------------------------------------------------------------------------------------


def test_a_scope_with_a_pool_of_its_own_goes_before_its_tenant() -> None:
    shelf = blocks.shelf("a", scope="vip")
    pools = Pools([Quota()] * 3, {(shelf.tenant, None): 1, (shelf.tenant, shelf.scope): 2})
    assert pools.pool_of(shelf) == 2
    assert pools.pool_of(blocks.shelf("a", scope="vip", namespace="another model")) == 2
    assert [pools.pool_of(blocks.shelf("a", scope=scope)) for scope in ("", "other")] == [1, 1]


def test_whoever_has_no_pool_belongs_to_pool_0() -> None:
    shelf = blocks.shelf("a", scope="vip")
    assert Pools().pool_of(shelf) == 0
    pools = Pools([Quota()] * 2, {(shelf.tenant, shelf.scope): 1})
    assert [pools.pool_of(each) for each in (blocks.shelf("a"), blocks.shelf("b", scope="vip"))] == [0, 0]


def test_several_tenants_may_share_a_pool() -> None:
    tenants = [blocks.shelf(name) for name in "abc"]
    pools = Pools([Quota()] * 2, {(shelf.tenant, None): 1 for shelf in tenants[:2]})
    assert [pools.pool_of(shelf) for shelf in tenants] == [1, 1, 0]


@pytest.mark.parametrize(("reserved", "most"), [(-1, None), (2, 1), (0, -1)])
def test_a_quota_that_cannot_be_is_refused(reserved: int, most: int | None) -> None:
    with pytest.raises(ConfigError, match="reserve"):
        Quota(reserved, most)


def test_more_pools_than_can_be_numbered_are_refused() -> None:
    with pytest.raises(ConfigError, match="too many"):
        Pools([Quota()] * (POOLS_MAX + 1))


def test_byte_seconds_are_exact() -> None:
    clock = VirtualClock()
    pools = Pools([Quota()] * 3, clock=clock)
    clock.advance(5)
    pools.add(1, 100)
    clock.advance(0.25)
    pools.add(1, 28)
    pools.add(2, 1 << 40)
    clock.advance(1000)
    pools.sub(1, 100)
    assert pools.byte_seconds().tolist() == [0, 25 + 128_000, float(1000 << 40)]
    assert pools.byte_seconds(clock.now_s + 2).tolist() == [0, 25 + 128_000 + 56, float(1002 << 40)]
    clock.advance(0.5)
    pools.sub(1, 28)
    pools.sub(2, 1 << 40)
    clock.advance(1e6)
    assert pools.byte_seconds().tolist() == [0, 25 + 128_000 + 14, 1000.5 * (1 << 40)]


def test_the_pool_furthest_above_its_reserve_gives_first_and_the_taker_in_the_end() -> None:
    pools = Pools([Quota(), Quota(50), Quota(10), Quota(30), Quota(100)])
    for pool, used in enumerate((20, 60, 70, 30, 40)):
        pools.add(pool, used)
    assert [*pools.givers(4)] == [(2, 60), (0, 20), (1, 10), (4, 40)]
    assert [*pools.givers(1)] == [(2, 60), (0, 20), (1, 10), (1, 60)]
    assert [*pools.givers(None)] == [(2, 60), (0, 20), (1, 10)]


def test_who_takes_gives_before_others_who_have_no_more() -> None:
    pools = Pools([Quota()] * 4)
    for pool in range(4):
        pools.add(pool, 10)
    assert next(pools.givers(2)) == (2, 10)


def test_what_is_leaving_already_is_not_asked_for_again() -> None:
    pools = Pools([Quota(), Quota(10)])
    pools.add(1, 30)
    pools.leave(1, 15)
    assert [*pools.givers(0)] == [(1, 5)]
    pools.sub(1, 15)
    pools.leave(1, -15)
    assert [*pools.givers(0)] == [(1, 5)]


def test_a_quota_can_change_and_says_what_is_above_it() -> None:
    pools = Pools([Quota(), Quota(10, 100)])
    pools.add(1, 80)
    assert (pools.room_bytes(1), pools.excess_bytes(1), pools.bytes_reserved) == (20, 0, 10)
    pools.set_quota(1, Quota(20, 50))
    assert (pools.room_bytes(1), pools.excess_bytes(1), pools.bytes_reserved) == (-30, 30, 20)
    assert pools.use()[1] == PoolUse(80, 20, 50, pytest.approx(0, abs=1e6), 0)
    pools.set_quota(1, Quota())
    assert pools.excess_bytes(1) == 0
    assert pools.use()[1].bytes_max is None


# Space ------------------------------------------------------------------------------------------------------

POOLS = 4
CAPACITY = 48
SHELVES = [blocks.shelf(f"tenant {pool}") for pool in range(POOLS)]
MEMBERS = {(shelf.tenant, None): pool for pool, shelf in enumerate(SHELVES) if pool}
pool_numbers = st.integers(0, POOLS - 1)


@dataclass
class Block:
    """What the model knows of a row."""

    pool: int
    extent: int
    key: Key | None  # None: invisible, not yet or no more
    held: int
    is_leaving: bool = False


class SpaceMachine(RuleBasedStateMachine):
    """A space with pools, against one that is told in dicts and loops. Subclasses say how large blocks are."""

    extents: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock(0)
        self.pools = Pools([Quota()] * POOLS, MEMBERS, clock=self.clock)
        self.table = BlockTable(LeafLru())
        self.space = Space(self.table, on_evict=self.on_evict, on_free=self.on_free, pools=self.pools)
        self.space.extents.grow(CAPACITY)
        self.quotas = [Quota()] * POOLS
        self.model: dict[int, Block] = {}
        self.evicted = [0] * POOLS
        self.byte_seconds = [0.0] * POOLS
        self.names = itertools.count()

    # The model

    def on_evict(self, rows: list[int]) -> None:
        for row in rows:
            assert not self.model[row].held, "a block left that somebody holds"
            assert self.model[row].key is not None
            self.evicted[self.model[row].pool] += 1

    def on_free(self, rows: list[int]) -> None:
        for row in rows:
            assert not self.model.pop(row).held

    def used(self, pool: int) -> int:
        return sum(block.extent for block in self.model.values() if block.pool == pool)

    def kept(self, pool: int) -> int:
        """Without what is on its way out."""
        return sum(block.extent for block in self.model.values() if block.pool == pool and not block.is_leaving)

    def kept_by_all(self) -> list[int]:
        return [self.kept(pool) for pool in range(POOLS)]

    def check_reserves(self, before: list[int], taker: int | None) -> None:
        for pool, kept in enumerate(self.kept_by_all()):
            if pool != taker and kept < before[pool]:
                assert kept >= self.quotas[pool].bytes_reserved, "somebody lost what he had reserved"

    def rows(self, *, visible: bool) -> list[int]:
        return [row for row, block in self.model.items() if (block.key is not None) == visible]

    @property
    def is_nothing_held(self) -> bool:
        return not any(block.held or block.key is None for block in self.model.values())

    # The calls

    @initialize(data=st.data())
    def quotas_at_first(self, data: st.DataObject) -> None:
        for pool in range(1, POOLS):
            self.set_quota(data, pool)

    @rule(data=st.data(), pool=st.integers(1, POOLS - 1))
    def set_quota(self, data: st.DataObject, pool: int) -> None:
        others = sum(quota.bytes_reserved for i, quota in enumerate(self.quotas) if i != pool)
        reserved = data.draw(st.integers(0, CAPACITY - others))
        most = data.draw(st.none() | st.integers(reserved, CAPACITY))
        self.quotas[pool] = Quota(reserved, most)
        self.pools.set_quota(pool, self.quotas[pool])

    @rule(data=st.data(), pool=pool_numbers, count=st.integers(1, 8), is_shown=st.sampled_from([True, True, False]))
    def take(self, data: st.DataObject, pool: int, count: int, is_shown: bool) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        parents = [key for block in self.model.values() if block.pool == pool and (key := block.key)]
        parent = data.draw(st.sampled_from([NO_PARENT, *parents]))
        rows = self.take_rows(pool, extent, count)
        if is_shown:
            self.show(rows, parent)

    def take_rows(self, pool: int, extent: int, count: int) -> list[int]:
        before, expected = self.kept_by_all(), self.expected(pool, extent, count)
        offsets = self.space.take(extent, count, pool)
        rows = self.table.take_rows(offsets, extent, extent, pool)
        self.model.update({row: Block(pool, extent, None, 1) for row in rows})
        assert expected is None or len(rows) == expected
        self.check_reserves(before, pool)
        most = self.quotas[pool].bytes_max
        assert not rows or most is None or self.used(pool) <= most, "a pool exceeded its bound"
        return rows

    def show(self, rows: list[int], parent: Key = NO_PARENT) -> None:
        keys = blocks.chain_keys(next(self.names), len(rows))
        for row, key, before in zip(rows, keys, [parent, *keys], strict=False):
            self.table.insert(SHELVES[self.model[row].pool], [row], [key], [before])
            self.model[row].key = key
            self.let_go(row)

    def expected(self, pool: int, extent: int, count: int) -> int | None:
        """How many places there must be, where that is known."""
        return None

    @precondition(lambda self: self.rows(visible=True))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows(visible=True)))
        self.model[row].held += 1
        self.table.held[row] += 1

    @rule()
    def release_all(self) -> None:
        for row in [row for row, block in self.model.items() for _ in range(block.held)]:
            self.let_go(row)

    def let_go(self, row: int) -> None:
        self.model[row].held -= 1
        self.table.held[row] -= 1
        if not self.model[row].held and self.model[row].key is None:
            self.space.free([row])

    @precondition(lambda self: self.rows(visible=True))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.rows(visible=True)), unique=True, min_size=1, max_size=4))
        self.space.hide(rows)
        self.gone(rows)
        self.space.free([row for row in rows if not self.model[row].held])

    def gone(self, rows: list[int]) -> None:
        for row in rows:
            self.model[row].key, self.model[row].is_leaving = None, True

    @rule(need_bytes=st.integers(0, CAPACITY))
    def reclaim(self, need_bytes: int) -> None:
        before = self.kept_by_all()
        rows = self.space.reclaim(need_bytes)
        self.gone(rows)
        for row in rows:
            self.model[row].held += 1
            self.evicted[self.model[row].pool] += 1
        self.check_reserves(before, None)
        assert sum(self.model[row].extent for row in rows[:-1]) < max(need_bytes, 1)

    @rule(need_bytes=st.integers(0, CAPACITY), pool=pool_numbers)
    def evict(self, need_bytes: int, pool: int) -> None:
        before, used_bytes = self.kept_by_all(), self.space.used_bytes
        count = self.space.evict(need_bytes, pool)
        assert used_bytes - self.space.used_bytes >= (need_bytes if count else 0)
        self.check_reserves(before, pool)

    @precondition(lambda self: self.rows(visible=True))
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.table.policy.touch(np.array([data.draw(st.sampled_from(self.rows(visible=True)))]))

    @rule(seconds=st.sampled_from([0.25, 1.0, 7.5]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for pool in range(POOLS):
            self.byte_seconds[pool] += self.used(pool) * seconds

    # What always holds

    @invariant()
    def figures_are_exact(self) -> None:
        uses = self.pools.use()
        assert [use.bytes_used for use in uses] == [self.used(pool) for pool in range(POOLS)]
        assert sum(use.bytes_used for use in uses) == self.space.used_bytes
        assert [use.byte_seconds for use in uses] == self.byte_seconds
        assert [use.evicted_blocks for use in uses] == self.evicted
        assert self.space.evicted_blocks == sum(self.evicted)
        assert [Quota(use.bytes_reserved, use.bytes_max) for use in uses] == self.quotas

    def teardown(self) -> None:
        """When nobody holds anything, every pool gets what it has reserved, and so do all of them together."""
        self.release_all()
        extent = self.extents[0]
        for pool, quota in enumerate(self.quotas):
            if (count := (quota.bytes_reserved - self.used(pool)) // extent) > 0:
                self.show(self.take_rows(pool, extent, count))


class OneSizeMachine(SpaceMachine):
    """With blocks of one size nothing is ever scattered, so it is known how many there is room for."""

    extents = (4,)

    def expected(self, pool: int, extent: int, count: int) -> int | None:
        if not self.is_nothing_held:
            return None
        kept = 0
        for other, quota in enumerate(self.quotas):
            if other != pool:
                above = max(0, self.used(other) - quota.bytes_reserved)
                kept += self.used(other) - above // extent * extent
        most = self.quotas[pool].bytes_max
        return min(count, (CAPACITY - kept) // extent, CAPACITY if most is None else most // extent)


class WholeBlocksMachine(OneSizeMachine):
    """Reserves of whole blocks: then no block reaches below one, and all reserves can be had to the last byte."""

    def set_quota(self, data: st.DataObject, pool: int) -> None:
        (extent,) = self.extents
        others = sum(quota.bytes_reserved for i, quota in enumerate(self.quotas) if i != pool)
        reserved = data.draw(st.integers(0, (CAPACITY - others) // extent)) * extent
        self.quotas[pool] = Quota(reserved)
        self.pools.set_quota(pool, self.quotas[pool])

    def expected(self, pool: int, extent: int, count: int) -> int | None:
        expected = super().expected(pool, extent, count)
        if expected is not None and self.used(pool) + count * extent <= self.quotas[pool].bytes_reserved:
            assert expected == count
        return expected


class ManySizesMachine(SpaceMachine):
    extents = (1, 2, 3, 5, 8, 13)


TestOneSize = OneSizeMachine.TestCase
TestWholeBlocks = WholeBlocksMachine.TestCase
TestManySizes = ManySizesMachine.TestCase


class Medium:
    """A space whose blocks all stand alone: for stories about one event."""

    def __init__(self, capacity: int, *quotas: Quota) -> None:
        self.pools = Pools([Quota(), *quotas])
        self.table = BlockTable(LeafLru())
        self.space = Space(self.table, on_free=lambda _: None, pools=self.pools)
        self.space.extents.grow(capacity)
        self.names = itertools.count()

    def write(self, pool: int, extent: int, count: int = 1) -> list[int]:
        """Visible blocks that nobody holds; their rows."""
        rows = self.table.take_rows(self.space.take(extent, count, pool), extent, extent, pool)
        keys = [blocks.chain_keys(next(self.names), 1)[0] for _ in rows]
        self.table.insert(SHELVES[pool], rows, keys, [NO_PARENT] * len(rows))
        self.table.held[rows] = 0
        return rows

    def blocks(self, pool: int) -> int:
        return int(np.count_nonzero(self.table.pool[self.table.visible] == pool))

    @property
    def used(self) -> list[int]:
        return [use.bytes_used for use in self.pools.use()]


def test_a_medium_that_is_not_full_keeps_everybody_whatever_is_reserved() -> None:
    medium = Medium(100, Quota(90))
    assert len(medium.write(0, 10, 10)) == 10
    assert medium.used == [100, 0]


def test_free_bytes_that_others_used_come_back_to_whoever_reserved_them() -> None:
    medium = Medium(100, Quota(40), Quota(60))
    medium.write(0, 10, 10)
    for pool, count in ((1, 4), (2, 6)):
        assert len(medium.write(pool, 10, count)) == count
    assert medium.used == [0, 40, 60]


def test_those_furthest_above_their_reserves_give_until_all_are_equal() -> None:
    medium = Medium(120, Quota(10), Quota(30), Quota())
    for pool, count in ((0, 4), (1, 5), (2, 3)):
        medium.write(pool, 10, count)
    for _ in range(6):
        medium.write(3, 10)
    # Above their reserves were 40, 40 and 0. Who takes gives to himself as soon as nobody has more than he.
    assert medium.used == [20, 40, 30, 30]


def test_a_pool_at_its_bound_makes_room_among_its_own() -> None:
    medium = Medium(100, Quota(0, 30))
    mine = medium.write(0, 10, 5)
    for _ in range(10):
        assert len(medium.write(1, 10, 2)) == 2
    assert medium.used == [50, 30]
    assert len(medium.write(1, 10, 5)) == 3
    assert medium.write(1, 31) == []
    assert medium.blocks(1) == 3
    assert (medium.table.shelf[mine] != NO_ROW).all()


def test_a_pool_whose_blocks_are_held_gets_no_more_than_its_bound() -> None:
    medium = Medium(100, Quota(0, 30))
    held = medium.write(1, 10, 2)
    medium.table.held[held] = 1
    assert len(medium.write(1, 10, 5)) == 1
    medium.table.held[medium.table.visible] = 1
    assert medium.write(1, 10) == []
    assert medium.used == [0, 30]


def test_a_bound_that_was_lowered_takes_effect_with_the_next_block() -> None:
    medium = Medium(100, Quota(0, 80))
    medium.write(1, 10, 8)
    medium.pools.set_quota(1, Quota(0, 25))
    assert medium.used == [0, 80]
    assert medium.pools.excess_bytes(1) == 55
    assert len(medium.write(1, 10)) == 1
    assert medium.used == [0, 20]


def test_a_taker_below_its_reserve_still_gives_its_own_when_nobody_else_may() -> None:
    medium = Medium(100, Quota(50), Quota(50))
    medium.write(1, 10, 5)
    medium.write(2, 20, 2)
    assert len(medium.write(2, 20)) == 1
    assert medium.used == [0, 50, 40]
    assert [use.evicted_blocks for use in medium.pools.use()] == [0, 0, 1]


def test_a_large_block_finds_its_place_among_those_who_may_leave() -> None:
    medium = Medium(80, Quota(40))
    kept = medium.write(1, 10, 4)
    medium.write(0, 10, 4)
    assert len(medium.write(0, 40)) == 1
    assert medium.used == [40, 40]
    assert (medium.table.shelf[kept] != NO_ROW).all()


def test_blocks_within_a_reserve_do_not_leave_for_a_large_one_that_they_stand_in_the_way_of() -> None:
    medium = Medium(80, Quota(40))
    for _ in range(4):  # one beside the other
        medium.write(1, 10)
        medium.write(0, 10)
    assert medium.write(0, 20) == []
    assert medium.used[1] == 40
    assert len(medium.write(1, 20)) == 1  # they do for one of their own
    assert medium.used[1] <= 60


def test_a_pool_gives_ahead_of_time_only_what_it_has_above_its_reserve() -> None:
    medium = Medium(100, Quota(30), Quota(25))
    medium.write(1, 10, 5)
    medium.write(2, 10, 5)
    rows = medium.space.reclaim(60)
    assert sorted(medium.table.pool[rows].tolist()) == [1, 1, 2, 2]
    assert medium.space.reclaim(60) == []  # what is leaving is not counted as theirs any more
    assert medium.used == [0, 50, 50]
    medium.table.held[rows] = 0
    medium.space.free(rows)
    assert medium.used == [0, 30, 30]
    assert [use.evicted_blocks for use in medium.pools.use()] == [0, 2, 2]


def test_a_search_in_vain_among_many_blocks_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def counted(*columns: object) -> object:
        searches.append(columns)
        return cheapest_window(*columns)

    monkeypatch.setattr("kvtide.tiers.space.cheapest_window", counted)
    medium = Medium(3000, Quota(3000))
    first = medium.write(1, 1, 3000)
    for _ in range(30):
        assert medium.write(0, 1) == []
    assert len(searches) == 10  # 3,000 rows: two of three are left out
    medium.space.hide(first[:1])
    medium.space.free(first[:1])
    assert len(medium.write(0, 1)) == 1
