# SPDX-License-Identifier: Apache-2.0
"""Free ranges: nothing is given out twice, nothing is lost, and what must leave is the cheapest that will do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtide.memory.extents import Extents, cheapest_window

sizes = st.one_of(st.sampled_from([4, 8, 12]), st.integers(1, 40))


class ExtentsAgainstAByteMap(RuleBasedStateMachine):
    """The model has one flag for each byte of the space."""

    ranges = Bundle("ranges")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(100)
        self.is_taken = np.zeros(100, bool)

    @rule(target=ranges, size=sizes)
    def take(self, size: int) -> object:
        offset = self.extents.take(size)
        if offset < 0:
            assert self.longest_gap() < size
            return multiple()
        assert not self.is_taken[offset : offset + size].any()
        assert offset + size <= len(self.is_taken)
        self.is_taken[offset : offset + size] = True
        return offset, size

    @rule(given_back=consumes(ranges))
    def give(self, given_back: tuple[int, int]) -> None:
        offset, size = given_back
        self.extents.give([offset], size)
        self.is_taken[offset : offset + size] = False

    @rule(more=st.integers(0, 30))
    def grow(self, more: int) -> None:
        self.extents.grow(len(self.is_taken) + more)
        self.is_taken = np.concatenate((self.is_taken, np.zeros(more, bool)))

    @invariant()
    def free_bytes_are_exact(self) -> None:
        assert self.extents.free_bytes == np.count_nonzero(~self.is_taken)
        assert self.extents.capacity_bytes == len(self.is_taken)

    def teardown(self) -> None:
        """Whatever happened, the whole space is one range again when everything came back."""
        taken = np.flatnonzero(self.is_taken)
        for offset in taken.tolist():
            self.extents.give([offset], 1)
        assert self.extents.take(self.extents.capacity_bytes) == 0
        assert self.extents.take(1) == -1

    def longest_gap(self) -> int:
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self.is_taken, [True])).astype(int)))
        return int((edges[1::2] - edges[::2]).max(initial=0))


TestExtentsAgainstAByteMap = ExtentsAgainstAByteMap.TestCase


def test_an_empty_space_has_nothing_to_give() -> None:
    assert Extents().take(1) == -1


def test_ranges_of_one_size_given_back_together_are_given_out_again() -> None:
    extents = Extents(64)
    offsets = [extents.take(16) for _ in range(4)]
    assert (sorted(offsets), extents.take(16)) == ([0, 16, 32, 48], -1)
    extents.give(offsets[1:3], 16)
    assert extents.free_bytes == 32
    assert extents.take(32) == 16


def test_the_smallest_gap_that_fits_is_used() -> None:
    extents = Extents(100)
    extents.occupy(np.array([30, 50, 60]), np.array([10, 5, 20]))  # gaps of 30, 10, 5 and 20
    assert [extents.take(5), extents.take(9), extents.take(20), extents.take(30)] == [55, 40, 80, 0]


def test_more_given_back_than_taken_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        Extents(10).give([0], 11)


def test_a_space_does_not_shrink() -> None:
    with pytest.raises(AssertionError):
        Extents(10).grow(9)


@st.composite
def occupied(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A capacity, and ranges in it as (offset, size), in ascending order."""
    cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=16)))
    pairs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return draw(st.integers(max(cuts, default=0), 70)), pairs


def columns(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([o for o, _ in ranges], np.int64), np.array([s for _, s in ranges], np.int64)


@given(occupied(), st.integers(1, 30))
def test_an_occupied_space_gives_out_its_gaps_and_nothing_else(
    space: tuple[int, list[tuple[int, int]]], size: int
) -> None:
    capacity, ranges = space
    extents = Extents(capacity)
    extents.occupy(*columns(ranges))
    is_taken = np.zeros(capacity, bool)
    for offset, length in ranges:
        is_taken[offset : offset + length] = True
    assert extents.free_bytes == np.count_nonzero(~is_taken)
    while (offset := extents.take(size)) >= 0:
        assert not is_taken[offset : offset + size].any()
        is_taken[offset : offset + size] = True
    gap = 0
    for taken in [*is_taken.tolist(), True]:
        assert gap < size
        gap = 0 if taken else gap + 1
    for offset in np.flatnonzero(is_taken).tolist():
        extents.give([offset], 1)
    assert extents.take(capacity) == (0 if capacity else -1)


@pytest.mark.parametrize("ranges", [[(0, 10), (5, 5)], [(60, 20)], [(-5, 10)]])
def test_ranges_that_overlap_or_lie_outside_cannot_be_occupied(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(AssertionError):
        Extents(64).occupy(*columns(ranges))


@given(occupied(), st.integers(1, 50), st.data())
def test_the_cheapest_window_is_the_one_that_a_search_of_all_windows_finds(
    space: tuple[int, list[tuple[int, int]]], need: int, data: st.DataObject
) -> None:
    capacity, ranges = space
    order = data.draw(st.permutations(range(len(ranges))))  # a table's rows are in no order
    shuffled = [ranges[i] for i in order]
    clocks = data.draw(st.lists(st.integers(1, 9), min_size=len(ranges), max_size=len(ranges)))
    is_held = data.draw(st.lists(st.booleans(), min_size=len(ranges), max_size=len(ranges)))
    found = cheapest_window(*columns(shuffled), np.array(clocks, np.int64), np.array(is_held, bool), need, capacity)

    def leavers(start: int) -> list[int]:
        return [i for i, (o, s) in enumerate(shuffled) if o < start + need and start < o + s]

    def is_usable(start: int) -> bool:
        return start + need <= capacity and not any(is_held[i] for i in leavers(start))

    def age(start: int) -> float:
        return sum(clocks[i] for i in leavers(start)) / max(len(leavers(start)), 1)

    usable = [start for start in {0, *(o + s for o, s in ranges)} if is_usable(start)]
    if found is None:
        assert not any(is_usable(start) for start in range(capacity))
        return
    chosen = sorted(found.tolist())
    assert any(sorted(leavers(start)) == chosen for start in usable)
    assert not any(is_held[i] for i in chosen)
    assert sum(clocks[i] for i in chosen) / max(len(chosen), 1) == pytest.approx(min(map(age, usable)))
    # And it does what it is for.
    stays = [ranges_i for i, ranges_i in enumerate(shuffled) if i not in chosen]
    extents = Extents(capacity)
    extents.occupy(*columns(sorted(stays)))
    assert extents.take(need) >= 0


def test_many_ranges_are_taken_as_if_one_by_one() -> None:
    one_by_one, together = Extents(1000), Extents(1000)
    for space in (one_by_one, together):
        taken = [space.take(100) for _ in range(10)]
        space.give(taken[2:5], 100)
        space.give(taken[7:8], 100)
    expected = [one_by_one.take(100) for _ in range(5)]
    assert together.take_many(100, 0) == []
    assert together.take_many(100, 5) == expected[:4]
    assert expected[4] == -1
    assert (together.free_bytes, one_by_one.free_bytes) == (0, 0)
