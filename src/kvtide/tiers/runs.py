# SPDX-License-Identifier: Apache-2.0
"""Runs: blocks of one chain that were published together, so that a prompt is found by comparing, not by looking up.

A prompt of five hundred blocks was mostly saved in a few runs, one for each turn. Finding its first block leads to a
run; one comparison of bytes tells how far the prompt follows it; the block after that leads to the next run. So
the cost goes with the number of runs, not of blocks.

A run is a hint: whether a row still holds the block it held then is seen by its key, which is erased when the block
becomes invisible. Nothing here has to be told of blocks that move or come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtide.keys import KEY_BYTES, Key, Keys
from kvtide.policy.policy import NO_ROW, Rows

_WORDS = KEY_BYTES // 8
Words = npt.NDArray[np.uint64]

RUN_MIN = 4  # shorter ones are found as fast by looking up each key


class Runs:
    """Of one table. No locks: its tier has one."""

    def __init__(self) -> None:
        self._keys: Words = np.zeros((1024, _WORDS), np.uint64)  # of visible blocks, by row; zeros: none
        self._run: npt.NDArray[np.int32] = np.full(1024, NO_ROW, np.int32)
        self._place: npt.NDArray[np.int32] = np.zeros(1024, np.int32)  # in its run
        self._rows: list[Rows | None] = []  # of each run
        self._left: list[int] = []  # how many of them are still in it
        self._free: list[int] = []

    def add(self, rows: list[int], keys: Sequence[Key], parents: Sequence[Key]) -> None:
        """These blocks became visible together."""
        at = np.array(rows, np.int64)
        self._reach(int(at.max()) + 1)
        self._keys[at] = _words(Keys.of(keys))
        if len(rows) < RUN_MIN or list(parents[1:]) != list(keys[:-1]):
            self._run[at] = NO_ROW
            return
        number = self._free.pop() if self._free else len(self._rows)
        if number == len(self._rows):
            self._rows.append(None)
            self._left.append(0)
        self._rows[number] = at
        self._left[number] = len(rows)
        self._run[at] = number
        self._place[at] = np.arange(len(rows))

    def remove(self, rows: list[int]) -> None:
        """These blocks became invisible."""
        at = np.array(rows, np.int64)
        self._keys[at] = 0
        numbers = self._run.take(at).tolist()
        self._run[at] = NO_ROW
        for number in numbers:
            if number != NO_ROW:
                self._left[number] -= 1
                if not self._left[number]:
                    self._rows[number] = None
                    self._free.append(number)

    def follow(self, row: int, keys: Keys, first: int) -> Rows | None:
        """The rows of keys from `first` on, whose own row this is, as far as its run goes; None: it is in none."""
        number = self._run.item(row)
        if number == NO_ROW:
            return None
        run = self._rows[number]
        assert run is not None
        rows = run[self._place.item(row) :][: len(keys) - first]
        # A row that left may have come back, even with the same key: on the shelf of another part.
        is_equal = self._run.take(rows) == number
        found = self._keys.take(rows, axis=0)  # `take` is several times as fast as an index here
        end = first + len(rows)
        wanted = keys.joined if end - first == len(keys) else keys.joined[first * KEY_BYTES : end * KEY_BYTES]
        if found.tobytes() != wanted:  # mostly it is all of it
            is_equal &= (found == np.frombuffer(wanted, np.uint64).reshape(-1, _WORDS)).all(axis=1)
        return rows if is_equal.all() else rows[: int(np.argmin(is_equal))]

    def _reach(self, rows: int) -> None:
        if rows > len(self._run):
            more = max(rows, 2 * len(self._run)) - len(self._run)
            self._keys = np.concatenate((self._keys, np.zeros((more, _WORDS), np.uint64)))
            self._run = np.concatenate((self._run, np.full(more, NO_ROW, np.int32)))
            self._place = np.concatenate((self._place, np.zeros(more, np.int32)))


def _words(keys: Keys) -> Words:
    return np.frombuffer(keys.joined, np.uint64).reshape(-1, _WORDS)
