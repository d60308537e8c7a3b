# SPDX-License-Identifier: Apache-2.0
"""Which byte ranges of a space are free. Serves the arena and the disk's data file alike.

Most spaces hold frames of one or a few sizes, so a freed range waits in the bin of its exact size and is
handed out again from there: no search, no splitting. Only when nothing fits are all free ranges merged
with their neighbours. What merging cannot mend (enough bytes, but scattered) is the business of
`cheapest_window`: it says which neighbours must leave so that one range becomes free.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Extents:
    """Free ranges of the space [0, capacity). No locks: its owner has one."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = 0
        self.free_bytes = 0
        self._bins: dict[int, list[int]] = {}
        self._ranges: list[tuple[int, int]] = []  # (size, offset), smallest first: the best fit is a bisection
        self._is_merged = True
        self.grow(capacity_bytes)

    def take(self, size_bytes: int) -> int:
        """The offset of a range of that size, now taken, or -1."""
        if size_bytes > self.free_bytes:
            return -1
        offset = self._from_bin_or_range(size_bytes)
        if offset < 0 and not self._is_merged:
            self._merge()
            offset = self._from_bin_or_range(size_bytes)
        if offset >= 0:
            self.free_bytes -= size_bytes
        return offset

    def take_many(self, size_bytes: int, count: int) -> list[int]:
        """The offsets of ranges of that size, now taken: `count` of them, or as many as there are."""
        waiting = self._bins.get(size_bytes, [])
        offsets = waiting[len(waiting) - min(count, len(waiting)) :][::-1]
        del waiting[len(waiting) - len(offsets) :]
        self.free_bytes -= size_bytes * len(offsets)
        while len(offsets) < count and (offset := self.take(size_bytes)) >= 0:
            offsets.append(offset)
        return offsets

    def give(self, offsets: list[int], size_bytes: int) -> None:
        """Hand ranges of one size back. They must have been taken, and with this size."""
        self._bins.setdefault(size_bytes, []).extend(offsets)
        self.free_bytes += size_bytes * len(offsets)
        self._is_merged = False
        assert self.free_bytes <= self.capacity_bytes
        if self.free_bytes == self.capacity_bytes:  # nothing is left of what the pieces were cut for
            self._bins, self._ranges, self._is_merged = {}, [(self.capacity_bytes, 0)], True

    def grow(self, capacity_bytes: int) -> None:
        added = capacity_bytes - self.capacity_bytes
        assert added >= 0
        if added:
            insort(self._ranges, (added, self.capacity_bytes))
            self.capacity_bytes = capacity_bytes
            self.free_bytes += added
            self._is_merged = False

    def occupy(self, offsets: Int64s, sizes: Int64s) -> None:
        """Start over with exactly these ranges taken; `offsets` ascend and nothing overlaps."""
        starts = np.concatenate(([0], offsets + sizes))
        gaps = np.concatenate((offsets, [self.capacity_bytes])) - starts
        assert (gaps >= 0).all(), "taken ranges overlap or lie outside"
        free = np.flatnonzero(gaps)
        self._bins = {}
        self._ranges = sorted(zip(gaps[free].tolist(), starts[free].tolist(), strict=True))
        self.free_bytes = int(gaps.sum())
        self._is_merged = True

    def _from_bin_or_range(self, size_bytes: int) -> int:
        if bin_ := self._bins.get(size_bytes):
            return bin_.pop()
        at = bisect_left(self._ranges, (size_bytes, -1))
        if at == len(self._ranges):
            return -1
        size, offset = self._ranges.pop(at)
        if size > size_bytes:
            insort(self._ranges, (size - size_bytes, offset + size_bytes))
        return offset

    def _merge(self) -> None:
        free = [(offset, size) for size, offset in self._ranges]
        free += [(offset, size) for size, offsets in self._bins.items() for offset in offsets]
        free.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in free:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._bins = {}
        self._ranges = sorted((size, offset) for offset, size in merged)
        self._is_merged = True


def cheapest_window(
    offsets: Int64s, sizes: Int64s, clocks: Int64s, is_held: npt.NDArray[np.bool_], need_bytes: int, capacity_bytes: int
) -> npt.NDArray[np.intp] | None:
    """Which of the taken ranges must leave so that `need_bytes` in one piece become free.

    Takes parallel columns of all taken ranges and returns positions in them: of all windows without a held
    range the one whose occupants were used longest ago on average, or None when there is no such window.
    """
    order = np.argsort(offsets)
    starts, ends = offsets[order], (offsets + sizes)[order]
    # A window begins where the range before it ends, so it also covers the gap between the two.
    window_starts = np.concatenate(([0], ends))
    window_ends = window_starts + need_bytes
    first = np.arange(len(order) + 1)
    last = np.searchsorted(starts, window_ends, side="left")
    held_before = np.concatenate(([0], np.cumsum(is_held[order])))
    clock_before = np.concatenate(([0], np.cumsum(clocks[order].astype(np.float64))))
    count = last - first
    usable = (window_ends <= capacity_bytes) & (held_before[last] == held_before[first])
    if not usable.any():
        return None
    age = np.where(usable, (clock_before[last] - clock_before[first]) / np.maximum(count, 1), np.inf)
    best = int(np.argmin(age))
    return order[best : last[best]]
