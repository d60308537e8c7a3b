# SPDX-License-Identifier: Apache-2.0
"""Runs: blocks of one chain that were published together, so that a prompt is found by comparing, not by looking up.

A prompt of five hundred blocks was mostly saved in a few runs, one for each turn. Finding its first block leads to a
run; one comparison of bytes tells how far the prompt follows it; the block after that leads to the next run. So
the cost goes with the number of runs, not of blocks.

A chain shrinks from its end, so a run is what is left of it up to the first block that has become invisible. What
stands behind a gap is found as every other block is, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.keys import KEY_BYTES, Key, Keys
from kvtide.policy.policy import NO_ROW, Rows

RUN_MIN = 4  # shorter ones are found as fast by looking up each key


@dataclass(slots=True, eq=False)
class Run:
    """Blocks in the order of their chain. Those before `end` are visible, and have been since they were added; `left`
    counts all that still are."""

    rows: Rows
    joined: bytes
    end: int
    left: int


class Runs:
    """Of one table. No locks: its tier has one."""

    def __init__(self) -> None:
        self._runs: list[Run | None] = []
        self._free: list[int] = []  # numbers of runs of which nothing is left
        self._number: npt.NDArray[np.int32] = np.full(1024, NO_ROW, np.int32)  # of the run that a row is in
        self._place: npt.NDArray[np.int32] = np.zeros(1024, np.int32)  # in it

    def add(self, rows: list[int], keys: Sequence[Key], parents: Sequence[Key]) -> None:
        """These blocks became visible together."""
        if len(rows) < RUN_MIN or list(parents[1:]) != list(keys[:-1]):
            return
        at = np.array(rows, np.int64)
        self._reach(int(at.max()) + 1)
        if not self._free:
            self._free.append(len(self._runs))
            self._runs.append(None)
        number = self._free.pop()
        self._runs[number] = Run(at, Keys.of(keys).joined, len(rows), len(rows))
        self._number[at] = number
        self._place[at] = np.arange(len(rows))

    def remove(self, rows: list[int]) -> None:
        """These blocks became invisible."""
        if not rows:
            return
        self._reach(max(rows) + 1)
        at = np.array(rows, np.int64)
        numbers = self._number.take(at)
        for number in set(numbers.tolist()) - {NO_ROW}:
            run = self._runs[number]
            assert run is not None
            places = self._place.take(at[numbers == number])
            run.end = min(run.end, int(places.min()))
            run.left -= len(places)
            if not run.left:
                self._runs[number] = None
                self._free.append(number)
        self._number[at] = NO_ROW

    def follow(self, row: int, keys: Keys, first: int) -> Rows | None:
        """The rows of keys from `first` on, whose own row this is, as far as its run goes; None: it is in none."""
        number = self._number.item(row) if row < len(self._number) else NO_ROW
        if number == NO_ROW:
            return None
        run, place = self._runs[number], self._place.item(row)
        assert run is not None
        if place >= run.end:
            return None
        count = min(run.end - place, len(keys) - first)
        stored = run.joined[place * KEY_BYTES : (place + count) * KEY_BYTES]
        wanted = keys.joined[first * KEY_BYTES : (first + count) * KEY_BYTES]
        if stored != wanted:  # mostly they are equal
            count = _equal_keys(stored, wanted)
        return run.rows[place : place + count]

    def _reach(self, rows: int) -> None:
        if rows > len(self._place):
            more = max(rows, 2 * len(self._place)) - len(self._place)
            self._number = np.concatenate((self._number, np.full(more, NO_ROW, np.int32)))
            self._place = np.concatenate((self._place, np.zeros(more, np.int32)))


def _equal_keys(stored: bytes, wanted: bytes) -> int:
    """How many keys from the start are the same."""
    differs = np.frombuffer(stored, np.uint8) != np.frombuffer(wanted, np.uint8)
    return int(np.argmax(differs)) // KEY_BYTES
