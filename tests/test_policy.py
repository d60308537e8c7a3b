# SPDX-License-Identifier: Apache-2.0
"""Leaf-first LRU: what every policy promises, and that it is really the oldest who leaves."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.policy import leaf_lru
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW
from kvtide.testing.policy_suite import PolicyMachine, PolicySuite, chains, held_of, insert, rows_of


class LruMachine(PolicyMachine):
    """Knows whose turn it is by looking at everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.used: dict[int, int] = {}

    def entered(self, rows: list[int]) -> None:
        for row in reversed(rows):  # the first block of a chain is the newest
            self.now += 1
            self.used[row] = self.now

    def expected(self, need_bytes: int) -> list[int]:
        parent, victims = dict(self.model.parent), []
        while sum(self.model.size[row] for row in victims) < need_bytes:
            leaves = set(parent) - set(parent.values()) - set(np.flatnonzero(self.model.held).tolist())
            if not leaves:
                return []
            victims.append(min(leaves, key=self.used.__getitem__))
            del parent[victims[-1]]
        return victims


class TestLeafLru(PolicySuite):
    machine = LruMachine

    def make_policy(self) -> LeafLru:
        return LeafLru()

    @pytest.fixture(params=[2, 1024], autouse=True)
    def scan_victims(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """With few victims from each scan, too: a scan that sees less than everything is the harder case."""
        monkeypatch.setattr(leaf_lru, "_SCAN_VICTIMS", request.param)

    def test_the_block_unused_for_longest_leaves_first(self, policy: LeafLru) -> None:
        insert(policy, *((row, NO_ROW) for row in range(10)))
        policy.touch(rows_of(3))
        policy.touch(rows_of(0))
        assert policy.evict(100, held_of()) == [1, 2, 4, 5, 6, 7, 8, 9, 3, 0]

    def test_a_touched_chain_outlives_an_untouched_one(self, policy: LeafLru) -> None:
        chains(policy, [0, 10], 3)
        policy.touch(rows_of(0, 1, 2))
        assert policy.evict(60, held_of()) == [12, 11, 10, 2, 1, 0]

    def test_a_block_that_is_let_go_is_not_forgotten(self, policy: LeafLru) -> None:
        insert(policy, *((row, NO_ROW) for row in range(6)))
        assert policy.evict(10, held_of(0)) == [1]
        assert policy.evict(10, held_of()) == [0]

    def test_a_parent_whose_children_were_removed_is_as_old_as_it_is(self, policy: LeafLru) -> None:
        insert(policy, (0, NO_ROW), (1, 0), *((row, NO_ROW) for row in range(2, 8)))
        assert policy.evict(10, held_of(1)) == [2]
        policy.remove(rows_of(1))
        assert policy.evict(10, held_of()) == [0]
