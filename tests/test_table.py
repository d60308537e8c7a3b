# SPDX-License-Identifier: Apache-2.0
"""The table of a local tier: who is found where, and who is whose parent, in whatever order they come."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvtide.frame import NO_PARENT
from kvtide.keys import Address, Key, Shelf
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW
from kvtide.testing import blocks
from kvtide.testing.tier_suite import ELSEWHERE, HERE
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


# A table that a medium has kept -----------------------------------------------------------------------------


def test_a_loaded_table_is_like_one_that_was_filled(table: BlockTable) -> None:
    drawn = random.Random(7)
    shelves = [HERE, *ELSEWHERE.values()]
    keys = blocks.chain_keys("tree", 300)
    parents = [keys[drawn.randrange(i)] if i % 50 else NO_PARENT for i in range(300)]
    at = [shelves[i % 5] for i in range(300)]
    rows = drawn.sample(range(400), 300)
    reserved = sorted(set(range(400)) - set(rows))[:10]
    loaded = BlockTable(LeafLru())
    columns = (np.arange(300) * 4096, np.full(300, 4096), np.full(300, 4000))
    loaded.load(
        dict(enumerate(shelves)),
        reserved,
        np.array(rows, np.int64),
        np.array([i % 5 for i in range(300)], np.int32),
        keys,
        parents,
        columns,
        np.arange(1, 301),
    )
    for shelf, key, parent in zip(at, keys, parents, strict=True):
        enter(table, shelf, key, parent)
    assert loaded.blocks == table.blocks == 300
    for shelf in shelves:
        assert loaded.knows(shelf)
    for i in range(300):
        row = loaded.row(Address(at[i], keys[i]))
        assert row == rows[i]
        assert loaded.address(row) == Address(at[i], keys[i])
        assert (loaded.offset[row], loaded.extent[row], loaded.frame_bytes[row]) == (i * 4096, 4096, 4000)
    free = loaded.take_rows([0] * (max(rows) + 1 - 300 - len([r for r in reserved if r < max(rows)])), 1, 1)
    assert not set(free) & ({*rows} | {*reserved})
    loaded.hide([rows[3]])
    table.hide([table.row(Address(at[3], keys[3]))])
    assert leave(loaded) == leave(table)


def test_orphans_of_a_loaded_table_are_linked_when_their_parent_comes() -> None:
    keys = blocks.chain_keys("a", 4)
    table = BlockTable(LeafLru())
    columns = (np.arange(2) * 4096, np.full(2, 4096), np.full(2, 4096))
    table.load({0: HERE}, [0], np.array([1, 2]), np.zeros(2, np.int32), keys[2:], keys[1:3], columns, np.array([1, 2]))
    enter(table, HERE, keys[0])
    enter(table, HERE, keys[1], keys[0])
    assert leave(table) == keys[::-1]


def test_a_loaded_table_with_a_lost_shelf_number_gives_it_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 4)
    table = BlockTable(LeafLru())
    nothing = np.zeros(0, np.int64)
    table.load({3: HERE}, [], nothing, nothing.astype(np.int32), [], [], (nothing, nothing, nothing), nothing)
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


def test_a_table_can_be_loaded_with_nothing() -> None:
    table = BlockTable(LeafLru())
    nothing = np.zeros(0, np.int64)
    table.load({}, [], nothing, nothing.astype(np.int32), [], [], (nothing, nothing, nothing), nothing)
    assert (table.blocks, table.rows) == (0, 0)
    enter(table, HERE, blocks.chain_keys("a", 1)[0])
