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
from kvtide.policy.policy import Rows

RUN_MIN = 4  # shorter ones are found as fast by looking up each key


@dataclass(slots=True, eq=False)
class Run:
    """Blocks in the order of their chain. Those before `end` are visible, and have been since they were added."""

    rows: Rows
    joined: bytes
    end: int


class Runs:
    """Of one table. No locks: its tier has one."""

    def __init__(self) -> None:
        self._run_of: dict[int, Run] = {}
        self._place: npt.NDArray[np.int32] = np.zeros(1024, np.int32)  # of a row in its run

    def add(self, rows: list[int], keys: Sequence[Key], parents: Sequence[Key]) -> None:
        """These blocks became visible together."""
        if len(rows) < RUN_MIN or list(parents[1:]) != list(keys[:-1]):
            return
        at = np.array(rows, np.int64)
        run = Run(at, Keys.of(keys).joined, len(rows))
        self._run_of.update(dict.fromkeys(rows, run))
        self._reach(int(at.max()) + 1)
        self._place[at] = np.arange(len(rows))

    def remove(self, rows: list[int]) -> None:
        """These blocks became invisible."""
        self._reach(max(rows, default=0) + 1)
        for row, place in zip(rows, self._place.take(np.array(rows, np.int64)).tolist(), strict=True):
            run = self._run_of.pop(row, None)
            if run is not None and place < run.end:
                run.end = place

    def follow(self, row: int, keys: Keys, first: int) -> Rows | None:
        """The rows of keys from `first` on, whose own row this is, as far as its run goes; None: it is in none."""
        run = self._run_of.get(row)
        if run is None or (place := self._place.item(row)) >= run.end:
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
            self._place = np.concatenate((self._place, np.zeros(more, np.int32)))


def _equal_keys(stored: bytes, wanted: bytes) -> int:
    """How many keys from the start are the same."""
    differs = np.frombuffer(stored, np.uint8) != np.frombuffer(wanted, np.uint8)
    return int(np.argmax(differs)) // KEY_BYTES
