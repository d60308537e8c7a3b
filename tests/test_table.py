# SPDX-License-Identifier: Apache-2.0
"""The table of a local tier: who is found where, and who is whose parent, in whatever order they come."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvtide.keys import NO_PARENT, Address, Key, Shelf
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW, Rows
from kvtide.testing import blocks
from kvtide.testing.tier_suite.tools import ELSEWHERE, HERE
from kvtide.tiers.table import BlockTable


@pytest.fixture
def table() -> BlockTable:
    return BlockTable(LeafLru())


def enter(table: BlockTable, shelf: Shelf, key: Key, parent: Key = NO_PARENT, extent: int = 4096) -> int:
    """A visible block that nobody holds."""
    (row,) = table.take_rows([0], extent, extent - 10)
    assert table.insert(shelf, [row], [key], [parent])
    table.held[row] = 0
    return row


def leave(table: BlockTable) -> list[Key]:
    """Everybody leaves, one after the other; whose turn it is follows from who is whose parent."""
    keys = []
    while victims := table.policy.evict(1, table.held):
        keys += [table.address(row).key for row in victims]
        table.hide(victims, is_evicted=True)
        table.free_rows(victims)
    return keys


def test_an_empty_table_finds_nothing(table: BlockTable) -> None:
    keys = blocks.chain_keys("a", 3)
    assert table.find(HERE, keys).tolist() == [NO_ROW] * 3
    assert table.row(Address(HERE, keys[0])) == NO_ROW
    assert (table.blocks, table.rows, table.has_free_row, table.visible.tolist()) == (0, 0, False, [])


def test_a_row_is_found_from_insert_to_hide(table: BlockTable) -> None:
    (key,) = blocks.chain_keys("a", 1)
    (row,) = table.take_rows([8192], 8192, 5000)
    assert table.row(Address(HERE, key)) == NO_ROW
    assert table.held[row] == 1
    table.insert(HERE, [row], [key], [NO_PARENT])
    assert table.find(HERE, [key, blocks.chain_keys("b", 1)[0]]).tolist() == [row, NO_ROW]
    assert table.address(row) == Address(HERE, key)
    assert (table.offset[row], table.extent[row], table.frame_bytes[row]) == (8192, 8192, 5000)
    assert (table.blocks, table.visible.tolist()) == (1, [row])
    table.hide([row])
    assert table.row(Address(HERE, key)) == NO_ROW
    assert (table.blocks, table.visible.tolist(), table.has_free_row) == (0, [], False)
    table.free_rows([row])
    assert table.has_free_row
    assert table.take_rows([0], 4096, 4096) == [row]


def test_a_row_that_is_visible_cannot_be_freed(table: BlockTable) -> None:
    row = enter(table, HERE, blocks.chain_keys("a", 1)[0])
    with pytest.raises(AssertionError):
        table.free_rows([row])


def test_a_block_cannot_become_visible_twice(table: BlockTable) -> None:
    (key,) = blocks.chain_keys("a", 1)
    enter(table, HERE, key)
    with pytest.raises(AssertionError):
        enter(table, HERE, key)


def test_rows_beyond_the_first_thousand_are_like_the_others(table: BlockTable) -> None:
    keys = blocks.chain_keys("a", 3000)
    rows = table.take_rows(list(range(0, 3000 * 4096, 4096)), 4096, 4000)
    table.insert(HERE, rows, keys, [NO_PARENT, *keys[:-1]])
    assert table.find(HERE, keys).tolist() == rows == list(range(3000))
    assert (table.offset[rows] == np.arange(3000) * 4096).all()
    table.held[rows] = 0
    assert leave(table) == keys[::-1]


@pytest.mark.parametrize("other", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_shelves_do_not_see_each_other(table: BlockTable, other: Shelf) -> None:
    parent, child = blocks.chain_keys("a", 2)
    rows = [enter(table, shelf, parent) for shelf in (HERE, other)]
    assert [table.row(Address(shelf, parent)) for shelf in (HERE, other)] == rows
    # A child on one shelf is nobody's child on the other: there the parent leaves at once.
    child_row = enter(table, HERE, child, parent)
    assert table.find(other, [child]).tolist() == [NO_ROW]
    table.policy.touch(np.array([rows[1]]))
    assert table.policy.evict(4096, table.held) == [child_row]
    table.hide([child_row], is_evicted=True)
    table.hide([rows[0]])
    assert table.row(Address(other, parent)) == rows[1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_chain_is_linked_whatever_order_its_blocks_come_in(table: BlockTable, order: tuple[int, ...]) -> None:
    keys = blocks.chain_keys("a", 4)
    for i in order:
        enter(table, HERE, keys[i], keys[i - 1] if i else NO_PARENT)
    assert leave(table) == keys[::-1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_chain_in_one_batch_is_linked_whatever_its_order(table: BlockTable, order: tuple[int, ...]) -> None:
    keys = blocks.chain_keys("a", 4)
    rows = table.take_rows([0] * 4, 4096, 4096)
    parents = [keys[i - 1] if i else NO_PARENT for i in order]
    table.insert(HERE, rows, [keys[i] for i in order], parents)
    table.held[rows] = 0
    assert leave(table) == keys[::-1]


def test_children_of_a_hidden_parent_are_linked_again_when_it_returns(table: BlockTable) -> None:
    keys = blocks.chain_keys("a", 5)
    for i, key in enumerate(keys):
        enter(table, HERE, key, keys[i - 1] if i else NO_PARENT)
    for gone in ([1], [2, 1], [0, 1, 2, 3]):
        rows = [table.row(Address(HERE, keys[i])) for i in gone]
        table.hide(rows)
        table.free_rows(rows)
        assert table.find(HERE, [keys[i] for i in gone]).tolist() == [NO_ROW] * len(gone)
        for i in random.Random(len(gone)).sample(gone, len(gone)):
            enter(table, HERE, keys[i], keys[i - 1] if i else NO_PARENT)
    assert leave(table) == keys[::-1]


def test_an_orphan_that_left_is_not_linked_when_its_parent_comes(table: BlockTable) -> None:
    parent, child, sibling = (*blocks.chain_keys("a", 2), blocks.chain_keys("b", 1)[0])
    rows = [enter(table, HERE, key, parent) for key in (child, sibling)]
    table.hide(rows[:1])
    table.free_rows(rows[:1])
    assert enter(table, HERE, parent) == rows[0]  # in the very row that the orphan had
    assert leave(table) == [sibling, parent]


def test_random_trees_leave_leaves_first_whatever_came_and_went(table: BlockTable) -> None:
    drawn = random.Random(5)
    keys = blocks.chain_keys("tree", 200)
    parents = {key: keys[drawn.randrange(i)] if i else NO_PARENT for i, key in enumerate(keys)}
    here: set[Key] = set()
    for _ in range(3000):
        key = drawn.choice(keys)
        if key in here:
            row = table.row(Address(HERE, key))
            table.hide([row])
            table.free_rows([row])
            here.remove(key)
        else:
            enter(table, HERE, key, parents[key])
            here.add(key)
    assert table.blocks == len(here) == len(table.visible)
    for key in leave(table):
        here.remove(key)
        assert not any(parents[other] == key for other in here)
    assert not here


def test_clearing_names_the_blocks_of_a_namespace_and_a_tenant(table: BlockTable) -> None:
    shelves = [blocks.shelf(t, namespace=n, scope=s) for t in "tu" for n in "nm" for s in ("", "s")]
    rows = {shelf: [enter(table, shelf, key) for key in blocks.chain_keys("a", 2)] for shelf in shelves}
    first = shelves[0]
    for namespace, tenant in itertools.product((None, first.namespace), (None, first.tenant)):
        wanted = [
            row
            for shelf in shelves
            for row in rows[shelf]
            if namespace in (None, shelf.namespace) and tenant in (None, shelf.tenant)
        ]
        assert sorted(table.of(namespace, tenant)) == sorted(wanted)


# Numbers of shelves -----------------------------------------------------------------------------------------


def test_an_empty_shelf_gives_its_number_to_a_new_one(table: BlockTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 3)
    (key,) = blocks.chain_keys("a", 1)
    shelves = [blocks.shelf(f"tenant {i}") for i in range(5)]
    rows = [enter(table, shelf, key) for shelf in shelves[:3]]
    assert table.shelf_id(shelves[3]) == NO_ROW
    (late,) = table.take_rows([0], 4096, 4096)
    assert table.insert(shelves[3], [late], [key], [NO_PARENT]) is False
    assert table.blocks == 3
    assert not table.knows(shelves[3])
    table.hide([rows[1]])
    assert table.insert(shelves[3], [late], [key], [NO_PARENT]) is True
    assert table.address(late) == Address(shelves[3], key)
    assert (table.knows(shelves[1]), table.knows(shelves[3])) == (False, True)
    assert [table.row(Address(shelf, key)) for shelf in shelves[:4]] == [rows[0], NO_ROW, rows[2], late]
    assert table.shelf_id(shelves[4]) == NO_ROW


def test_a_shelf_keeps_its_number(table: BlockTable) -> None:
    numbers = [table.shelf_id(shelf) for shelf in (HERE, *ELSEWHERE.values())]
    assert numbers == [0, 1, 2, 3, 4]
    assert [table.shelf_id(shelf) for shelf in (HERE, *ELSEWHERE.values())] == numbers


def test_a_busy_shelf_keeps_its_number_though_it_looks_empty(
    table: BlockTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 2)
    shelves = [blocks.shelf(f"tenant {i}") for i in range(3)]
    assert [table.shelf_id(shelf) for shelf in shelves[:2]] == [0, 1]
    assert table.shelf_id(shelves[2], busy=shelves[:2]) == NO_ROW
    assert table.shelf_id(shelves[2], busy=shelves[:1]) == 1


# A table that a medium has kept -----------------------------------------------------------------------------


@pytest.mark.parametrize("hinted", [0.0, 0.5, 1.0])
def test_a_loaded_table_is_like_one_that_was_filled(table: BlockTable, hinted: float) -> None:
    drawn = random.Random(7)
    shelves = [HERE, *ELSEWHERE.values()]
    keys = blocks.chain_keys("tree", 300)
    rows = sorted(drawn.sample(range(1500), 300))
    reserved = sorted(drawn.sample(sorted(set(range(1600)) - set(rows)), 10))
    number = [i % 5 for i in range(300)]
    parent_of = [drawn.randrange(i % 5, i, 5) if i % 50 >= 5 else None for i in range(300)]
    parents = [NO_PARENT if parent is None else keys[parent] for parent in parent_of]
    parent_rows = [NO_ROW if p is None or drawn.random() >= hinted else rows[p] for p in parent_of]
    loaded = BlockTable(LeafLru())
    loaded.load(
        shelves=dict(enumerate(shelves)),
        reserved_rows=reserved,
        rows=np.array(rows),
        shelf=np.array(number, np.int32),
        keys=keys,
        parent_rows=np.array(parent_rows),
        parents=[parent for parent, row in zip(parents, parent_rows, strict=True) if row == NO_ROW],
        is_next=all_next,
        extents=(np.arange(300) * 4096, np.full(300, 4096), np.full(300, 4000)),
        clocks=np.arange(1, 301),
    )
    for i in range(300):
        address = Address(shelves[number[i]], keys[i])
        enter(table, *address, parents[i])
        assert loaded.row(address) == rows[i]
        assert loaded.address(rows[i]) == address
        assert [column[rows[i]] for column in (loaded.offset, loaded.extent, loaded.frame_bytes)] == [
            i * 4096,
            4096,
            4000,
        ]
    assert loaded.blocks == table.blocks == 300
    assert all(loaded.knows(shelf) for shelf in shelves)
    taken = loaded.take_rows([0] * 1300, 1, 1)
    assert not set(taken) & {*rows, *reserved}
    for one_of_both in (loaded, table):
        one_of_both.hide([one_of_both.row(Address(shelves[number[3]], keys[3]))])
    assert leave(loaded) == leave(table)


def all_next(rows: Rows, parents: Rows) -> npt.NDArray[np.bool_]:
    """Every block comes right after its parent."""
    return np.ones(len(np.broadcast_arrays(rows, parents)[0]), np.bool_)


def load(
    table: BlockTable,
    shelves: dict[int, Shelf],
    keys: list[Key],
    parents: list[Key],
    is_next: Callable[[Rows, Rows], npt.NDArray[np.bool_]] | None = None,
) -> None:
    """Blocks in the rows from 1 on, all on shelf 0."""
    count = len(keys)
    rows = np.arange(1, count + 1)
    table.load(
        shelves,
        [0] if count else [],
        rows,
        np.zeros(count, np.int32),
        keys,
        np.full(count, NO_ROW),
        parents,
        is_next or all_next,
        (rows * 4096, np.full(count, 4096), np.full(count, 4096)),
        rows,
    )


def test_orphans_of_a_loaded_table_are_linked_when_their_parent_comes(table: BlockTable) -> None:
    keys = blocks.chain_keys("a", 4)
    load(table, {0: HERE}, keys[2:], keys[1:3])
    enter(table, HERE, keys[0])
    enter(table, HERE, keys[1], keys[0])
    assert leave(table) == keys[::-1]


def test_a_loaded_table_with_a_lost_shelf_number_gives_it_out_again(
    table: BlockTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 4)
    load(table, {3: HERE}, [], [])
    (key,) = blocks.chain_keys("a", 1)
    enter(table, HERE, key)
    numbers = []
    for i in range(4):
        shelf = blocks.shelf(f"tenant {i}")
        numbers.append(table.shelf_id(shelf))
        if numbers[-1] != NO_ROW:
            enter(table, shelf, key)
    assert sorted(numbers) == [NO_ROW, 0, 1, 2]
    assert table.shelf_id(HERE) == 3


def test_a_table_can_be_loaded_with_nothing(table: BlockTable) -> None:
    load(table, {}, [], [])
    assert (table.blocks, table.rows) == (0, 0)
    enter(table, HERE, blocks.chain_keys("a", 1)[0])


def test_a_circle_of_parents_that_a_medium_claims_is_not_loaded(table: BlockTable) -> None:
    one, other = blocks.chain_keys("a", 2)
    position = np.array([0, 5, 6])
    load(table, {0: HERE}, [one, other], [other, one], lambda rows, parents: position[rows] == position[parents] + 1)
    assert sorted(table.policy.evict(2 * 4096, table.held)) == [1, 2]


def test_a_prefix_is_its_block_and_all_that_follow_it_on_every_shelf_that_is_meant(table: BlockTable) -> None:
    keys = blocks.chain_keys("a", 6)
    shelves = [HERE, *ELSEWHERE.values()]
    rows = {
        shelf: [enter(table, shelf, key, p) for key, p in zip(keys, [NO_PARENT, *keys], strict=False)]
        for shelf in shelves
    }
    (branch,) = blocks.chain_keys("b", 1)
    branch_row = enter(table, HERE, branch, keys[3])
    assert sorted(table.of(HERE.namespace, HERE.tenant, keys[2])) == sorted(
        [*rows[HERE][2:], branch_row, *rows[ELSEWHERE["scope"]][2:], *rows[ELSEWHERE["part"]][2:]]
    )
    assert table.of(None, ELSEWHERE["tenant"].tenant, keys[5]) == [rows[ELSEWHERE["tenant"]][5]]
    assert table.of(None, None, branch) == [branch_row]
    assert table.of(None, ELSEWHERE["tenant"].tenant, branch) == []


def test_a_prefix_that_is_missing_is_all_that_are_known_to_follow_it(table: BlockTable) -> None:
    keys = blocks.chain_keys("a", 7)
    rows = {i: enter(table, HERE, keys[i], keys[i - 1] if i else NO_PARENT) for i in (0, 1, 3, 4, 6)}
    assert sorted(table.of(None, None, keys[2])) == [rows[3], rows[4]]
    assert table.of(None, None, keys[5]) == [rows[6]]
    assert sorted(table.of(None, None, keys[0])) == [rows[0], rows[1]]
    rows[2] = enter(table, HERE, keys[2], keys[1])
    assert sorted(table.of(None, None, keys[0])) == sorted(rows[i] for i in range(5))
    assert table.of(None, None, NO_PARENT) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_prefix_in_a_tree_is_what_a_walk_through_it_finds(table: BlockTable, seed: int) -> None:
    drawn = random.Random(seed)
    keys = blocks.chain_keys("tree", 200)
    parent_of = [
        drawn.randrange(max(0, i - drawn.choice([1, 1, 30])), i) if i and drawn.random() < 0.97 else None
        for i in range(200)
    ]
    here = drawn.sample(range(200), 190)
    rows = {i: enter(table, HERE, keys[i], NO_PARENT if parent_of[i] is None else keys[parent_of[i]]) for i in here}
    for i in range(200):
        found: set[int] = {i}
        for j in range(i + 1, 200):  # parents come before their children in this list
            if parent_of[j] in found and j in rows and (parent_of[j] in rows or parent_of[j] == i):
                found.add(j)
        assert sorted(table.of(None, None, keys[i])) == sorted(rows[j] for j in found if j in rows)


def test_a_tenant_cannot_take_the_shelves_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 4)
    table = BlockTable(LeafLru(), tenants=2)
    (key,) = blocks.chain_keys("a", 1)
    greedy = [blocks.shelf("greedy", scope=str(i)) for i in range(4)]
    rows = [enter(table, shelf, key) for shelf in greedy[:2]]
    assert table.shelf_id(greedy[2]) == NO_ROW
    modest = [blocks.shelf("modest", scope=str(i)) for i in range(2)]
    for shelf in modest:
        enter(table, shelf, key)
    table.hide([rows[0]])  # one of its own is empty: it may have that one for another
    enter(table, greedy[3], key)
    assert [table.knows(shelf) for shelf in (*greedy, *modest)] == [False, True, False, True, True, True]
