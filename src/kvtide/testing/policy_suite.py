# SPDX-License-Identifier: Apache-2.0
"""The facts that make an eviction policy one, as tests to inherit.

    class TestMyPolicy(PolicySuite):
        def make_policy(self) -> Policy: ...

Whatever order a policy prefers, it keeps chains whole, spares what is held, and gives all that was asked
for or nothing. `Model` keeps the same blocks in plain dicts and says what is allowed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide.policy.policy import EVERYBODY, NO_ROW, Held, Policy, Rows

ROWS = 40  # of the random tests: few, so that rows are used again and chains meet
POOLS = 3
ALL_BYTES = EVERYBODY[0][1]

Givers = list[tuple[int, int]]


def rows_of(*rows: int) -> Rows:
    return np.array(rows, np.int64)


def held_of(*rows: int, count: int = ROWS) -> Held:
    held = np.zeros(max([count, *(row + 1 for row in rows)]), np.int32)
    held[list(rows)] = 1
    return held


def insert(policy: Policy, *blocks: tuple[int, int], size_bytes: int = 10, pool: int = 0) -> None:
    """Blocks as (row, row of the parent), one after the other."""
    for row, parent in blocks:
        policy.insert(rows_of(row), rows_of(parent), rows_of(size_bytes), pools=pool)


class Model:
    """What a policy has been told, in the plainest form."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.pool: dict[int, int] = {}
        self.held: Held = np.zeros(ROWS, np.int32)

    def children(self, row: int) -> list[int]:
        return [child for child, parent in self.parent.items() if parent == row]

    def forget(self, row: int) -> None:
        del self.parent[row], self.size[row], self.pool[row]

    def may_leave(self) -> set[int]:
        """Blocks that no held block depends on."""
        needed: set[int] = set()
        for row in self.parent:
            if self.held[row]:
                while row != NO_ROW and row not in needed:
                    needed.add(row)
                    row = self.parent[row]
        return set(self.parent) - needed

    def is_ancestor(self, row: int, of: int) -> bool:
        while of != NO_ROW and of != row:
            of = self.parent[of]
        return of == row

    def check(self, victims: list[int], need_bytes: int, givers: Givers) -> None:
        """These are allowed to leave; then they have left."""
        evictable = self.may_leave()
        if not victims:
            assert need_bytes <= 0 or self._surely_given(evictable, givers) < need_bytes, "could have given enough"
            return
        assert len(set(victims)) == len(victims)
        assert set(victims) <= evictable, "chose what is held, absent, or needed by what is held"
        assert sum(self.size[row] for row in victims) >= need_bytes
        assert sum(self.size[row] for row in victims[:-1]) < need_bytes, "gave up more than was needed"
        for pool in {self.pool[row] for row in victims}:
            most_bytes = sum(most for giver, most in givers if giver == pool)
            assert sum(self.size[row] for row in victims if self.pool[row] == pool) <= most_bytes, (
                "a pool gave too much"
            )
        for row in victims:
            assert not self.children(row), "a block left before its children"
            self.forget(row)

    def _surely_given(self, evictable: set[int], givers: Givers) -> int:
        """What these pools have to give, whatever the order: a pool ends at the first block that is too much."""
        given = 0
        for pool in {pool for pool, _ in givers}:
            sizes = [self.size[row] for row in evictable if self.pool[row] == pool]
            most_bytes = max(most for giver, most in givers if giver == pool)
            given += sum(sizes) if sum(sizes) <= most_bytes else max(0, most_bytes - max(sizes) + 1)
        return given


class PolicyMachine(RuleBasedStateMachine):
    """Random calls, each answer held against the model. Subclasses may expect one exact order."""

    make_policy: Callable[[], Policy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make_policy()
        self.model = Model()

    def entered(self, rows: list[int]) -> None:
        """Blocks of a chain were inserted or touched, first block first."""

    def expected(self, need_bytes: int, givers: Givers) -> list[int] | None:
        """The victims that this policy must choose, where that is known."""
        return None

    @property
    def free_rows(self) -> list[int]:
        return [row for row in range(ROWS) if row not in self.model.parent]

    def draw_block(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.parent)))

    @initialize(count=st.integers(1, 10))
    def begin_with_a_chain(self, count: int) -> None:
        self._insert(list(range(count)), NO_ROW, [5] * count, 0)

    @precondition(lambda self: self.free_rows)
    @rule(data=st.data(), count=st.integers(1, 5), is_root=st.booleans(), pool=st.integers(0, POOLS - 1))
    def insert_chain(self, data: st.DataObject, count: int, is_root: bool, pool: int) -> None:
        free = self.free_rows
        first = data.draw(st.integers(0, len(free) - 1))
        rows = [*free[first:], *free[:first]][:count]
        parent = NO_ROW if is_root or not self.model.parent else self.draw_block(data)
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
        self._insert(rows, parent, sizes, self.model.pool.get(parent, pool))

    def _insert(self, rows: list[int], parent: int, sizes: list[int], pool: int) -> None:
        parents = [parent, *rows[:-1]]
        self.policy.insert(rows_of(*rows), rows_of(*parents), rows_of(*sizes), pools=pool)
        for row, its_parent, size in zip(rows, parents, sizes, strict=True):
            self.model.parent[row], self.model.size[row], self.model.pool[row] = its_parent, size, pool
        self.entered(rows)

    @precondition(lambda self: self.model.parent)
    @rule(data=st.data())
    def link_orphans(self, data: st.DataObject) -> None:
        parent = self.draw_block(data)
        orphans = [
            row
            for row, its in self.model.parent.items()
            if its == NO_ROW
            and self.model.pool[row] == self.model.pool[parent]
            and not self.model.is_ancestor(row, parent)
        ]
        if orphans:
            children = data.draw(st.lists(st.sampled_from(orphans), unique=True, min_size=1))
            self.policy.link(children, parent)
            self.model.parent.update(dict.fromkeys(children, parent))

    @precondition(lambda self: self.model.parent)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        row = self.draw_block(data)
        chain: list[int] = []
        while row != NO_ROW:
            chain.insert(0, row)
            row = self.model.parent[row]
        self.policy.touch(rows_of(*chain))
        self.entered(chain)

    @precondition(lambda self: self.model.parent)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model.parent)), unique=True, min_size=1, max_size=4))
        orphans, parents = self.policy.remove(rows_of(*rows))
        lost = {child: row for row in rows for child in self.model.children(row) if child not in rows}
        assert dict(zip(orphans.tolist(), parents.tolist(), strict=True)) == lost
        for row in rows:
            self.model.forget(row)
            self.model.held[row] = 0
        self.model.parent.update(dict.fromkeys(lost, NO_ROW))

    @precondition(lambda self: self.model.parent)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.model.held[self.draw_block(data)] += 1

    @rule()
    def release_all(self) -> None:
        self.model.held[:] = 0

    @rule(
        need_bytes=st.integers(0, 60),
        givers=st.lists(  # one pool more than there are
            st.tuples(st.integers(0, POOLS), st.just(ALL_BYTES) | st.integers(0, 60)), max_size=POOLS + 2
        ),
    )
    def evict(self, need_bytes: int, givers: Givers) -> None:
        expected = self.expected(need_bytes, givers)
        victims = self.policy.evict(need_bytes, self.model.held, givers)
        self.model.check(victims, need_bytes, givers)
        assert expected is None or victims == expected

    @invariant()
    def parents_are_known(self) -> None:
        assert self.policy.parents(rows_of(*self.model.parent)).tolist() == [*self.model.parent.values()]

    @invariant()
    def clocks_tell_blocks_apart(self) -> None:
        clocks = self.policy.clocks(rows_of(*self.model.parent))
        assert len(set(clocks.tolist())) == len(self.model.parent)

    def teardown(self) -> None:
        """Whatever happened, everything can leave in the end, and then nothing more."""
        self.model.held[:] = 0
        total = sum(self.model.size.values())
        givers = [(pool, ALL_BYTES) for pool in range(POOLS)]
        self.model.check(self.policy.evict(total, self.model.held, givers), total, givers)
        assert not self.model.parent
        assert self.policy.evict(1, self.model.held, givers) == []


def chains(policy: Policy, starts: Iterable[int], length: int, size_bytes: int = 10, pool: int = 0) -> None:
    for start in starts:
        rows = np.arange(start, start + length)
        parents = np.concatenate(([NO_ROW], rows[:-1]))
        policy.insert(rows, parents, np.full(length, size_bytes), pools=pool)


def run_machine(machine: type[PolicyMachine], make_policy: Callable[[], Policy]) -> None:
    made = type(machine.__name__, (machine,), {"make_policy": staticmethod(make_policy)})
    run_state_machine_as_test(made)


class PolicySuite:
    """Inherit, supply `make_policy`, receive the facts. A policy with an exact order adds a stricter PolicyMachine."""

    def make_policy(self) -> Policy:
        """An empty policy."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> Policy:
        return self.make_policy()

    def test_random_calls_keep_every_promise(self) -> None:
        run_machine(PolicyMachine, self.make_policy)

    def test_an_empty_policy_has_nobody_to_give_up(self, policy: Policy) -> None:
        assert policy.evict(1, held_of()) == []

    def test_nothing_needed_is_nobody_given_up(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW))
        assert policy.evict(0, held_of()) == []
        assert policy.evict(10, held_of()) == [0]

    def test_a_chain_leaves_from_its_end(self, policy: Policy) -> None:
        chains(policy, [0], 10)
        assert [policy.evict(10, held_of()) for _ in range(10)] == [[row] for row in reversed(range(10))]

    def test_a_chain_whose_blocks_came_last_block_first_leaves_from_its_end(self, policy: Policy) -> None:
        for row in (2, 1, 0):
            insert(policy, (row, NO_ROW))
            if row < 2:
                policy.link([row + 1], row)
        assert policy.evict(30, held_of()) == [2, 1, 0]

    def test_a_shared_beginning_outlives_all_its_branches(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW), (1, 0), (2, 1), (3, 1), (4, 1))
        assert policy.evict(50, held_of())[3:] == [1, 0]

    def test_what_is_held_stays(self, policy: Policy) -> None:
        insert(policy, *((row, NO_ROW) for row in range(6)))
        assert set(policy.evict(30, held_of(0, 2, 4))) == {1, 3, 5}
        assert set(policy.evict(30, held_of())) == {0, 2, 4}

    def test_what_a_held_block_builds_on_stays(self, policy: Policy) -> None:
        chains(policy, [0], 5)
        assert policy.evict(10, held_of(4)) == []
        assert policy.evict(20, held_of(2)) == [4, 3]
        assert policy.evict(10, held_of(2)) == []

    def test_more_than_can_leave_is_nobody_given_up(self, policy: Policy) -> None:
        chains(policy, [0, 10], 5)
        assert policy.evict(101, held_of()) == []
        assert policy.evict(100, held_of(7, 0)) == []
        assert len(policy.evict(100, held_of())) == 10

    def test_a_refusal_changes_nothing(self, policy: Policy) -> None:
        twin = self.make_policy()
        for one_of_both in (policy, twin):
            chains(one_of_both, [0, 10, 20], 5)
        for _ in range(3):
            assert policy.evict(1000, held_of(12)) == []
        assert policy.evict(150, held_of()) == twin.evict(150, held_of())

    def test_no_more_leave_than_are_needed(self, policy: Policy) -> None:
        chains(policy, [0, 10], 5)
        assert [len(policy.evict(need, held_of())) for need in (1, 10, 11, 25)] == [1, 1, 2, 3]

    def test_a_large_block_is_worth_many_small_ones(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW), (1, NO_ROW), size_bytes=1000)
        assert len(policy.evict(900, held_of())) == 1

    def test_who_has_left_does_not_leave_again(self, policy: Policy) -> None:
        insert(policy, *((row, NO_ROW) for row in range(5)))
        gone = policy.evict(20, held_of())
        assert sorted(gone + policy.evict(30, held_of())) == [0, 1, 2, 3, 4]

    def test_a_row_can_be_used_again(self, policy: Policy) -> None:
        for _ in range(3):
            chains(policy, [0], 3)
            assert policy.evict(30, held_of()) == [2, 1, 0]

    def test_removing_a_parent_names_those_who_lost_it(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW), (1, 0), (2, 1), (3, 1), (4, 0))
        children, parents = policy.remove(rows_of(1))
        assert sorted(zip(children.tolist(), parents.tolist(), strict=True)) == [(2, 1), (3, 1)]
        children, parents = policy.remove(rows_of(0, 4))
        assert (children.tolist(), parents.tolist()) == ([], [])
        assert sorted(policy.evict(20, held_of())) == [2, 3]

    def test_removing_a_whole_chain_leaves_no_orphan(self, policy: Policy) -> None:
        chains(policy, [0, 10], 4)
        children, _ = policy.remove(rows_of(2, 0, 3, 1))
        assert children.tolist() == []
        assert policy.evict(40, held_of()) == [13, 12, 11, 10]

    def test_a_parent_that_comes_back_protects_its_children_again(self, policy: Policy) -> None:
        chains(policy, [0], 3)
        policy.remove(rows_of(1))
        insert(policy, (7, 0))
        policy.link([2], 7)
        assert policy.evict(30, held_of()) == [2, 7, 0]

    def test_a_circle_of_parents_is_not_closed(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW), (1, 0), (2, 1), (3, NO_ROW))
        policy.link([0, 3], 2)
        policy.link([1], 1)
        assert sorted(policy.evict(40, held_of())) == [0, 1, 2, 3]

    def test_parents_are_those_that_were_named_linked_or_lost(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW), (1, 0), (2, 1), (3, NO_ROW))
        policy.link([3], 2)
        assert policy.parents(np.arange(4)).tolist() == [NO_ROW, 0, 1, 2]
        policy.remove(rows_of(1))
        assert policy.parents(rows_of(0, 2, 3)).tolist() == [NO_ROW, NO_ROW, 2]

    def test_only_pools_that_are_asked_give(self, policy: Policy) -> None:
        for pool in range(4):
            chains(policy, [10 * pool], 5, pool=pool)
        assert policy.evict(20, held_of(), [(2, ALL_BYTES)]) == [24, 23]
        assert policy.evict(31, held_of(), [(2, ALL_BYTES)]) == []
        assert policy.evict(10, held_of()) == [4]  # nobody named: those without a pool of their own
        assert policy.evict(30, held_of(), [(2, ALL_BYTES)]) == [22, 21, 20]
        assert policy.evict(10, held_of(), [(2, ALL_BYTES), (9, ALL_BYTES)]) == []
        assert policy.evict(100, held_of(), [(3, ALL_BYTES), (1, ALL_BYTES)]) == [
            34,
            33,
            32,
            31,
            30,
            14,
            13,
            12,
            11,
            10,
        ]
        assert policy.evict(40, held_of()) == [3, 2, 1, 0]

    def test_pools_are_asked_in_turn_and_for_no_more_than_they_may_give(self, policy: Policy) -> None:
        for pool in range(3):
            chains(policy, [10 * pool], 5, pool=pool)
        assert policy.evict(40, held_of(), [(1, 20), (0, 19), (2, ALL_BYTES)]) == [14, 13, 4, 24]
        assert policy.evict(10, held_of(), [(0, 9), (1, 0), (2, 9)]) == []
        assert policy.evict(30, held_of(), [(0, 10), (1, 10), (0, ALL_BYTES)]) == [3, 12, 2]

    def test_pools_that_have_too_little_together_give_nothing(self, policy: Policy) -> None:
        twin = self.make_policy()
        for one_of_both in (policy, twin):
            for pool in range(3):
                chains(one_of_both, [10 * pool], 5, pool=pool)
        for givers in ([(0, ALL_BYTES), (1, 40)], [(2, 20), (1, 20), (0, ALL_BYTES)]):
            assert policy.evict(100, held_of(), givers) == []
        givers = [(1, 30), (2, 20), (0, ALL_BYTES)]
        assert policy.evict(90, held_of(), givers) == twin.evict(90, held_of(), givers)

    def test_links_and_removals_count_in_their_own_pool(self, policy: Policy) -> None:
        for pool in (1, 2):
            insert(policy, (10 * pool + 1, NO_ROW), (10 * pool, NO_ROW), pool=pool)
            policy.link([10 * pool + 1], 10 * pool)
        assert policy.evict(20, held_of(), [(1, ALL_BYTES)]) == [11, 10]
        children, parents = policy.remove(rows_of(20))
        assert (children.tolist(), parents.tolist()) == ([21], [20])
        assert policy.evict(10, held_of(), [(1, ALL_BYTES)]) == []
        assert policy.evict(10, held_of(), [(2, ALL_BYTES)]) == [21]

    def test_a_row_can_change_its_pool_with_its_block(self, policy: Policy) -> None:
        for pool in (0, 2, 1, 0):
            chains(policy, [0], 3, pool=pool)
            assert policy.evict(10, held_of(), [((pool + 1) % 3, ALL_BYTES)]) == []
            assert policy.evict(30, held_of(), [(pool, ALL_BYTES)]) == [2, 1, 0]

    def test_each_block_that_a_medium_remembers_has_its_own_pool(self, policy: Policy) -> None:
        rows, pools = np.arange(30), np.arange(30, dtype=np.int16) % 3
        policy.insert(rows, np.full(30, NO_ROW), np.full(30, 10), np.arange(1, 31), pools)
        for pool in (1, 0, 2):
            assert sorted(policy.evict(100, held_of(), [(pool, ALL_BYTES)])) == list(range(pool, 30, 3))

    def test_clocks_rise_with_use(self, policy: Policy) -> None:
        insert(policy, (0, NO_ROW), (1, NO_ROW))
        before = policy.clocks(rows_of(0, 1))
        policy.touch(rows_of(0))
        after = policy.clocks(rows_of(0, 1))
        assert after[0] > before.max()
        assert after[1] == before[1]

    def test_clocks_that_a_medium_remembers_are_taken_over(self, policy: Policy) -> None:
        rows = np.arange(20)
        clocks = np.array(random.Random(2).sample(range(1000), 20))
        policy.insert(rows, np.full(20, NO_ROW), np.full(20, 10), clocks)
        assert np.array_equal(np.argsort(policy.clocks(rows)), np.argsort(clocks))
        insert(policy, (20, NO_ROW))
        assert policy.clocks(rows_of(20))[0] > policy.clocks(rows).max()

    def test_many_blocks_at_once_are_as_good_as_one_after_the_other(self, policy: Policy) -> None:
        twin = self.make_policy()
        drawn = random.Random(8)
        parents = [NO_ROW if row % 9 == 0 else drawn.randrange(row // 9 * 9, row) for row in range(30)]
        sizes = [drawn.randrange(1, 50) for _ in range(30)]
        insert_each = [(row, parents[row], sizes[row]) for row in range(30)]
        for row, parent, size in insert_each:
            twin.insert(rows_of(row), rows_of(parent), rows_of(size))
        clocks = twin.clocks(np.arange(30))
        policy.insert(np.arange(30), np.array(parents), np.array(sizes), clocks)
        while victims := twin.evict(40, held_of()):
            assert policy.evict(40, held_of()) == victims

    def test_a_hundred_thousand_blocks_leave_in_good_order(self, policy: Policy) -> None:
        count, length = 100_000, 50
        chains(policy, range(0, count, length), length)
        held = np.zeros(count, np.int32)
        held[:length] = 1
        left = np.full(count // length, length)
        while victims := policy.evict(20_000, held):
            for row in victims:
                chain, place = divmod(row, length)
                assert chain != 0
                assert place == left[chain] - 1
                left[chain] -= 1
        assert left[0] == length
        assert left.sum() * 10 - length * 10 < 20_000
