# SPDX-License-Identifier: Apache-2.0
"""Runs are a short cut: whatever came, left and came back, they find what looking up each key finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.keys import NO_PARENT, Key, Keys, Part, Shelf
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW
from kvtide.testing import blocks
from kvtide.tiers.runs import RUN_MIN, Runs
from kvtide.tiers.table import BlockTable

SHELVES = [blocks.shelf(part=Part(rank=0, ranks=2)), blocks.shelf(part=Part(rank=1, ranks=2)), blocks.shelf("other")]
CHAIN = blocks.chain_keys("chain", 24)
# Two prompts that part ways after eight blocks, and one that has nothing in common with them.
CHAINS = [CHAIN, CHAIN[:8] + blocks.chain_keys("fork", 16), blocks.chain_keys("alone", 24)]


class Blocks:
    """A table with runs, and what was done to it."""

    def __init__(self) -> None:
        self.table = BlockTable(LeafLru(), Runs())

    def add(self, shelf: Shelf, keys: list[Key], parent: Key = NO_PARENT) -> list[int]:
        """Publish these together, as one chain. None of them may be there already."""
        rows = self.table.take_rows([0] * len(keys), 8192, 8192)
        assert self.table.insert(shelf, rows, keys, [parent, *keys[:-1]])
        self.table.held[rows] = 0
        return rows

    def drop(self, shelf: Shelf, keys: list[Key]) -> None:
        rows = [row for row in self.table.find(shelf, keys).tolist() if row != NO_ROW]
        self.table.hide(rows)
        self.table.free_rows(rows)

    def found(self, shelf: Shelf, keys: list[Key]) -> int:
        """How many of the keys are there from the first on. Both ways to ask agree, to the row."""
        for asked in (Keys.of(keys), Keys(b"".join(keys))):
            rows = self.table.find(shelf, keys)
            missing = np.flatnonzero(rows == NO_ROW)
            prefix = rows[: missing[0]] if len(missing) else rows
            assert self.table.find_prefix(shelf, asked).tolist() == prefix.tolist()
        return len(prefix)


@pytest.fixture
def here() -> Blocks:
    return Blocks()


A, B, C = SHELVES


def test_a_table_that_knows_nothing_finds_nothing(here: Blocks) -> None:
    assert here.found(A, CHAIN) == 0
    assert here.found(A, []) == 0


def test_a_run_is_found_as_far_as_the_prompt_follows_it(here: Blocks) -> None:
    here.add(A, CHAIN)
    assert here.found(A, CHAIN) == 24
    assert here.found(A, CHAIN[:5]) == 5
    assert here.found(A, CHAINS[1]) == 8
    assert here.found(A, [*CHAIN, *blocks.chain_keys("more", 3)]) == 24
    assert here.found(A, CHAINS[2]) == 0


def test_a_prompt_may_begin_in_the_middle_of_a_run(here: Blocks) -> None:
    here.add(A, CHAIN)
    assert here.found(A, CHAIN[7:]) == 17
    assert here.found(A, CHAIN[-1:]) == 1


def test_a_prompt_is_found_across_runs(here: Blocks) -> None:
    here.add(A, CHAIN[:6])
    here.add(A, CHAIN[6:16], CHAIN[5])
    here.add(A, CHAIN[16:], CHAIN[15])
    assert here.found(A, CHAIN) == 24
    assert here.found(A, CHAIN[3:20]) == 17


@pytest.mark.parametrize("size", [1, RUN_MIN - 1, RUN_MIN, RUN_MIN + 1])
def test_a_prompt_is_found_whether_its_turns_were_long_or_short(here: Blocks, size: int) -> None:
    for start in range(0, 24, size):
        here.add(A, CHAIN[start : start + size], CHAIN[start - 1] if start else NO_PARENT)
    assert here.found(A, CHAIN) == 24


def test_a_fork_is_found_on_both_sides(here: Blocks) -> None:
    here.add(A, CHAIN)
    here.add(A, CHAINS[1][8:], CHAIN[7])
    assert here.found(A, CHAIN) == here.found(A, CHAINS[1]) == 24


def test_blocks_published_together_that_do_not_follow_each_other_are_found(here: Blocks) -> None:
    keys = CHAIN[:4] + CHAIN[6:10]
    rows = here.table.take_rows([0] * 8, 8192, 8192)
    here.table.insert(A, rows, keys, [NO_PARENT, *CHAIN[:3], CHAIN[5], *CHAIN[6:9]])
    assert here.found(A, CHAIN) == 4
    assert here.found(A, keys) == 8


def test_a_hole_in_the_middle_ends_what_is_found(here: Blocks) -> None:
    here.add(A, CHAIN)
    here.drop(A, CHAIN[10:12])
    assert here.found(A, CHAIN) == 10
    assert here.found(A, CHAIN[12:]) == 12


def test_a_hole_that_is_filled_again_is_no_hole(here: Blocks) -> None:
    here.add(A, CHAIN)
    here.drop(A, CHAIN[10:12])
    here.add(A, CHAIN[10:12], CHAIN[9])
    assert here.found(A, CHAIN) == 24


def test_a_run_whose_end_has_left_is_found_up_to_there(here: Blocks) -> None:
    here.add(A, CHAIN)
    for left in range(23, 0, -1):
        here.drop(A, CHAIN[left:])
        assert here.found(A, CHAIN) == left


def test_a_run_whose_start_has_left_is_not_found_from_the_start(here: Blocks) -> None:
    here.add(A, CHAIN)
    here.drop(A, CHAIN[:1])
    assert here.found(A, CHAIN) == 0
    assert here.found(A, CHAIN[1:]) == 23


def test_rows_that_left_a_run_and_hold_other_blocks_are_not_taken_for_its_own(here: Blocks) -> None:
    rows = here.add(A, CHAIN)
    here.drop(A, CHAIN[12:])
    reused = here.add(A, CHAINS[2][:12])
    assert set(reused) <= set(rows)
    assert here.found(A, CHAIN) == 12
    assert here.found(A, CHAINS[2]) == 12


def test_rows_that_left_a_run_and_hold_the_same_blocks_of_another_part_are_not_taken_for_its_own(here: Blocks) -> None:
    rows = here.add(A, CHAIN)
    here.drop(A, CHAIN[12:])
    reused = here.add(B, CHAIN[12:], CHAIN[11])  # the same keys in the same rows, on another shelf
    assert set(reused) == set(rows[12:])
    assert here.found(A, CHAIN) == 12
    assert here.found(B, CHAIN[12:]) == 12
    assert here.found(B, CHAIN) == 0


def test_a_row_that_comes_back_to_its_place_with_its_own_key_is_found(here: Blocks) -> None:
    rows = here.add(A, CHAIN)
    here.drop(A, CHAIN[20:21])
    assert here.add(A, CHAIN[20:21], CHAIN[19]) == rows[20:21]
    assert here.found(A, CHAIN) == 24


def test_parts_with_the_same_keys_are_found_each_on_its_own_shelf(here: Blocks) -> None:
    rows = {shelf: here.add(shelf, CHAIN) for shelf in SHELVES}
    here.drop(B, CHAIN[5:])
    assert [here.found(shelf, CHAIN) for shelf in SHELVES] == [24, 5, 24]
    assert here.table.find_prefix(A, Keys.of(CHAIN)).tolist() == rows[A]
    assert here.table.find_prefix(C, Keys.of(CHAIN)).tolist() == rows[C]


def test_a_run_that_is_all_gone_leaves_its_number_to_another(here: Blocks) -> None:
    for name in range(50):
        keys = blocks.chain_keys(name, 8)
        here.add(A, keys)
        assert here.found(A, keys) == 8
        here.drop(A, keys)
        assert here.found(A, keys) == 0
    here.add(A, CHAIN)
    assert here.found(A, CHAIN) == 24


def test_more_rows_than_there_were_at_first_are_found(here: Blocks) -> None:
    chains = [blocks.chain_keys(("many", name), 500) for name in range(5)]
    for keys in chains:
        here.add(A, keys)
    assert [here.found(A, keys) for keys in chains] == [500] * 5


@pytest.mark.parametrize(
    "asked",
    [
        [CHAIN[0], CHAIN[0]],
        [*CHAIN[:6], CHAIN[5], *CHAIN[6:]],
        [*CHAIN[:6], *CHAIN[:6]],
        CHAIN[::-1],
        [CHAIN[0]] * 24,
        [*CHAIN, *CHAIN],
    ],
)
def test_keys_that_come_twice_or_in_another_order_are_found_one_by_one(here: Blocks, asked: list[Key]) -> None:
    here.add(A, CHAIN)
    assert here.found(A, asked) == len(asked)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_after_any_history_the_short_cut_finds_what_looking_up_finds(seed: int, steps: int) -> None:
    random_ = random.Random(seed)
    here = Blocks()
    for _ in range(steps):
        shelf, chain = random_.choice(SHELVES), random_.choice(CHAINS)
        first = random_.randrange(24)
        keys = chain[first : first + random_.randint(1, 12)]
        if random_.random() < 0.6:
            # What is there already stays; the rest is published together, as a store does.
            new = [i for i, row in enumerate(here.table.find(shelf, keys)) if row == NO_ROW]
            if new:
                parents = [chain[first + i - 1] if first + i else NO_PARENT for i in new]
                rows = here.table.take_rows([0] * len(new), 8192, 8192)
                assert here.table.insert(shelf, rows, [keys[i] for i in new], parents)
                here.table.held[rows] = 0
        elif random_.random() < 0.7:
            here.drop(shelf, random_.sample(keys, random_.randint(1, len(keys))))
        else:
            gone = here.table.policy.evict(8192 * random_.randint(1, 10), here.table.held)
            here.table.hide(gone, is_evicted=True)
            here.table.free_rows(gone)
        for asked in (*CHAINS, random_.choice(CHAINS)[random_.randrange(24) :]):
            for each in SHELVES:
                here.found(each, asked)


@given(st.integers(0, 2**32 - 1))
def test_any_question_after_any_history_is_answered_as_by_looking_up(seed: int) -> None:
    random_ = random.Random(seed)
    here = Blocks()
    for chain in CHAINS[::2]:
        for shelf in SHELVES:
            start = 0
            while start < 24:
                size = random_.randint(1, 10)
                here.add(shelf, chain[start : start + size], chain[start - 1] if start else NO_PARENT)
                start += size
    for shelf in SHELVES:
        here.drop(shelf, random_.sample(CHAIN, random_.randint(0, 6)))
    for _ in range(20):
        pool = random_.choice(CHAINS)
        asked = [random_.choice(pool) for _ in range(random_.randint(0, 10))]
        asked[2:2] = pool[random_.randrange(24) :]
        here.found(random_.choice(SHELVES), asked)
