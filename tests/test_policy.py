# SPDX-License-Identifier: Apache-2.0
"""Leaf-first LRU: what every policy promises, and that it is really the oldest who leaves."""

from __future__ import annotations

import pytest

from kvtide.policy import leaf_lru
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW
from kvtide.testing.policy_suite import (
    ALL_BYTES,
    Givers,
    PolicyMachine,
    PolicySuite,
    chains,
    held_of,
    insert,
    rows_of,
    run_machine,
)


class LruMachine(PolicyMachine):
    """Knows whose turn it is by looking at everybody.

    Nothing is held here: a block that was held when a scan passed it by may stay until the next scan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.used: dict[int, int] = {}

    def entered(self, rows: list[int]) -> None:
        for row in reversed(rows):  # the first block of a chain is the newest
            self.now += 1
            self.used[row] = self.now

    def hold(self, data: object) -> None:
        """Not here."""

    def expected(self, need_bytes: int, givers: Givers) -> list[int]:
        parent, victims = dict(self.model.parent), []
        size, pool_of = self.model.size, self.model.pool
        for pool, most_bytes in givers:
            given = 0
            while sum(size[row] for row in victims) < need_bytes:
                leaves = {row for row in set(parent) - set(parent.values()) if pool_of[row] == pool}
                oldest = min(leaves, key=self.used.__getitem__, default=NO_ROW)
                if oldest == NO_ROW or given + size[oldest] > most_bytes:
                    break
                victims.append(oldest)
                given += size[oldest]
                del parent[oldest]
        return victims if sum(size[row] for row in victims) >= need_bytes else []


class TestLeafLru(PolicySuite):
    def make_policy(self) -> LeafLru:
        return LeafLru()

    @pytest.mark.parametrize("scan_victims", [2, 1024])
    def test_victims_are_those_of_a_search_through_all_blocks(
        self, scan_victims: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # With few victims from each scan, too: a scan that sees less than everything is the harder case.
        monkeypatch.setattr(leaf_lru, "_SCAN_VICTIMS", scan_victims)
        run_machine(LruMachine, self.make_policy)

    def test_held_blocks_beyond_a_scan_do_not_hide_the_others(
        self, policy: LeafLru, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leaf_lru, "_SCAN_VICTIMS", 2)
        insert(policy, *((row, NO_ROW) for row in range(30)))
        assert policy.evict(50, held_of(*range(20))) == [20, 21, 22, 23, 24]
        assert policy.evict(300, held_of(*range(20))) == []
        assert policy.evict(50, held_of()) == [0, 1, 2, 3, 4]

    def test_the_block_unused_for_longest_leaves_first(self, policy: LeafLru) -> None:
        insert(policy, *((row, NO_ROW) for row in range(10)))
        policy.touch(rows_of(3))
        policy.touch(rows_of(0))
        assert policy.evict(100, held_of()) == [1, 2, 4, 5, 6, 7, 8, 9, 3, 0]

    def test_a_touched_chain_outlives_an_untouched_one(self, policy: LeafLru) -> None:
        chains(policy, [0, 10], 3)
        policy.touch(rows_of(0, 1, 2))
        assert policy.evict(60, held_of()) == [12, 11, 10, 2, 1, 0]

    def test_a_parent_whose_children_were_removed_is_as_old_as_it_is(self, policy: LeafLru) -> None:
        insert(policy, (0, NO_ROW), (1, 0), *((row, NO_ROW) for row in range(2, 8)))
        assert policy.evict(10, held_of(1)) == [2]
        policy.remove(rows_of(1))
        assert policy.evict(10, held_of()) == [0]

    def test_a_scan_of_one_pool_leaves_what_it_knows_of_others(
        self, policy: LeafLru, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leaf_lru, "_SCAN_VICTIMS", 2)
        for row in range(20):
            insert(policy, (row, NO_ROW), pool=row % 2)
        for row in range(0, 20, 2):
            assert policy.evict(10, held_of(), [(0, ALL_BYTES)]) == [row]
            assert policy.evict(10, held_of(), [(1, ALL_BYTES)]) == [row + 1]

    def test_a_pool_that_may_give_no_whole_block_is_asked_again_later(self, policy: LeafLru) -> None:
        insert(policy, *((row, NO_ROW) for row in range(4)), pool=1)
        for _ in range(3):
            assert policy.evict(10, held_of(), [(1, 9)]) == []
        assert policy.evict(20, held_of(0), [(1, 20)]) == [1, 2]
        assert sorted(policy.evict(20, held_of(), [(1, ALL_BYTES)])) == [0, 3]
