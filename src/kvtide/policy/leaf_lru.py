# SPDX-License-Identifier: Apache-2.0
"""Leaf-first LRU, the default: the block unused for longest leaves, but never before its children.

A block is useless without those before it in its chain, so a chain must shrink from its end. Touching
a chain makes its first block the newest, and a block counts as a candidate only without children.

Columns instead of objects: 24 bytes a block, nothing for the garbage collector to walk, and one vectorised
call for a request of any length. Victims come from a scan that is amortised over a thousand of them.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvtide.policy.policy import NO_ROW, Held, Rows

_SCAN_VICTIMS = 1024
_ABSENT = np.iinfo(np.int64).max


class LeafLru:
    """See the module's text; the methods are described in `policy.Policy`."""

    def __init__(self) -> None:
        self._now = 0
        self._clock: npt.NDArray[np.int64] = np.full(1024, _ABSENT, np.int64)  # _ABSENT: no block in this row
        self._bytes: npt.NDArray[np.int64] = np.zeros(1024, np.int64)
        self._parent: npt.NDArray[np.int32] = np.full(1024, NO_ROW, np.int32)
        self._children: npt.NDArray[np.int32] = np.zeros(1024, np.int32)
        self._high = 0  # no row at or above this one was ever used
        # What the last scan found, oldest first, as (clock, row). An entry whose clock is no longer the row's
        # own is stale and skipped. A parent that becomes a leaf joins it if it is older than the scan's end.
        self._candidates: list[tuple[int, int]] = []
        self._scanned_to = -1

    def insert(
        self, rows: Rows, parents: Rows, sizes: npt.NDArray[np.int64], clocks: npt.NDArray[np.int64] | None = None
    ) -> None:
        if not len(rows):
            return
        self._reach(int(rows.max()) + 1)
        if clocks is None:
            self.touch(rows)
        else:
            self._clock[rows] = clocks
            self._candidates, self._scanned_to = [], -1  # these may be older than what the last scan found
            self._now = max(self._now, int(clocks.max()))
        self._bytes[rows] = sizes
        self._parent[rows] = parents
        self._children[rows] = 0
        self._add_children(parents)

    def link(self, children: list[int], parent: int) -> None:
        above: set[int] = set()
        at = parent
        while at != NO_ROW and at not in above:
            above.add(at)
            at = int(self._parent[at])
        # Headers may claim a circle of parents. Nobody in a circle would ever be without children and leave.
        children = [child for child in children if child not in above]
        self._parent[children] = parent
        self._children[parent] += len(children)

    def touch(self, rows: Rows) -> None:
        self._now += len(rows)
        self._clock[rows] = np.arange(self._now, self._now - len(rows), -1)  # the first block becomes the newest

    def remove(self, rows: Rows) -> tuple[Rows, Rows]:
        parents = self._parent[rows]
        parents = parents[parents != NO_ROW]
        np.subtract.at(self._children, parents, 1)
        self._clock[rows] = _ABSENT
        for parent in np.unique(parents[self._children[parents] == 0]).tolist():
            if self._clock[parent] <= self._scanned_to:
                heapq.heappush(self._candidates, (int(self._clock[parent]), parent))
        self._parent[rows] = NO_ROW
        if not self._children[rows].any():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        gone = np.zeros(self._high + 1, np.bool_)
        gone[rows] = True
        orphans = np.flatnonzero(gone[self._parent[: self._high]])  # NO_ROW is the last place: never gone
        lost_parents = self._parent[orphans].astype(np.int64)
        self._parent[orphans] = NO_ROW
        self._children[rows] = 0
        return orphans, lost_parents

    def evict(self, need_bytes: int, held: Held) -> list[int]:
        victims: list[int] = []
        clocks: list[int] = []
        found_bytes = 0
        has_seen_all = False
        freed: tuple[int, int] | None = None  # a parent whose last child has just left: often the next to leave
        # The columns' items as plain numbers: this loop runs once for each block that ever leaves.
        clock_of, bytes_of, children_of, parent_of, held_of = (
            column.item for column in (self._clock, self._bytes, self._children, self._parent, held)
        )
        clock_column, children_column = self._clock, self._children
        while found_bytes < need_bytes:
            if freed is None and not self._candidates:
                if has_seen_all:
                    break  # and all of them are used up
                has_seen_all = self._scan(held)
                if not self._candidates:
                    break
            clock, row = heapq.heappushpop(self._candidates, freed) if freed else heapq.heappop(self._candidates)
            freed = None
            if clock_of(row) != clock or children_of(row) or held_of(row):
                continue
            victims.append(row)
            clocks.append(clock)
            found_bytes += bytes_of(row)
            clock_column[row] = _ABSENT
            if (parent := parent_of(row)) != NO_ROW:
                left = children_column[parent] = children_of(parent) - 1
                if not left and (clock := clock_of(parent)) <= self._scanned_to:
                    freed = (clock, parent)
        if found_bytes < need_bytes:
            self._put_back(victims, clocks)
            return []
        if freed is not None:
            heapq.heappush(self._candidates, freed)
        self._parent[victims] = NO_ROW
        return victims

    def clocks(self, rows: Rows) -> Rows:
        return self._clock[rows]

    def _scan(self, held: Held) -> bool:
        """Find the oldest leaves. True: these are all leaves there are."""
        high = self._high
        leaves = np.flatnonzero((self._clock[:high] != _ABSENT) & (self._children[:high] == 0) & (held[:high] == 0))
        self._scanned_to = self._now
        clocks = self._clock[leaves]
        is_all = len(leaves) <= _SCAN_VICTIMS
        if not is_all:
            oldest = np.argpartition(clocks, _SCAN_VICTIMS)[:_SCAN_VICTIMS]
            leaves, clocks = leaves[oldest], clocks[oldest]
            self._scanned_to = int(clocks.max())
        self._candidates = sorted(zip(clocks.tolist(), leaves.tolist(), strict=True))  # sorted is a heap
        return is_all

    def _put_back(self, rows: list[int], clocks: list[int]) -> None:
        self._candidates, self._scanned_to = [], -1  # the next call scans afresh
        self._clock[rows] = clocks
        self._add_children(self._parent[rows])

    def _add_children(self, parents: npt.NDArray[np.integer]) -> None:
        known = parents[parents != NO_ROW]
        if len(known) < self._high // 8:
            np.add.at(self._children, known, 1)
        else:  # a whole table at once: counting is faster than adding one by one
            self._children[: self._high] += np.bincount(known, minlength=self._high).astype(np.int32)

    def _reach(self, rows: int) -> None:
        if rows > len(self._clock):
            more = max(rows, 2 * len(self._clock)) - len(self._clock)
            self._clock = np.concatenate((self._clock, np.full(more, _ABSENT, np.int64)))
            self._bytes = np.concatenate((self._bytes, np.zeros(more, np.int64)))
            self._parent = np.concatenate((self._parent, np.full(more, NO_ROW, np.int32)))
            self._children = np.concatenate((self._children, np.zeros(more, np.int32)))
        self._high = max(self._high, rows)
