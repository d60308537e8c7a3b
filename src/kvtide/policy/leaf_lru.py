# SPDX-License-Identifier: Apache-2.0
"""Leaf-first LRU, the default: the block unused for longest leaves, but never before its children.

A block is useless without those before it in its chain, so a chain must shrink from its end. Touching
a chain makes its first block the newest, and a block counts as a candidate only without children.

Columns instead of objects: 26 bytes a block, nothing for the garbage collector to walk, and one vectorised
call for a request of any length. Victims come from a scan that is amortised over a thousand of them, or over
all blocks of a pool that has fewer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtide.policy.policy import EVERYBODY, NO_ROW, Held, Rows

_SCAN_VICTIMS = 1024
_ONE = np.int32(1)  # of the type of the column it is added to: numpy is many times faster then
_ABSENT = np.iinfo(np.int64).max


class LeafLru:
    """See the module's text; the methods are described in `policy.Policy`."""

    def __init__(self) -> None:
        self._now = 0
        self._clock: npt.NDArray[np.int64] = np.full(1024, _ABSENT, np.int64)  # _ABSENT: no block in this row
        self._bytes: npt.NDArray[np.int64] = np.zeros(1024, np.int64)
        self._parent: npt.NDArray[np.int32] = np.full(1024, NO_ROW, np.int32)
        self._children: npt.NDArray[np.int32] = np.zeros(1024, np.int32)
        self._pool: npt.NDArray[np.int16] = np.zeros(1024, np.int16)
        self._high = 0  # no row at or above this one was ever used
        # For each pool what its last scan found, oldest first, as (clock, row). An entry whose clock is no longer the
        # row's own is stale and skipped. A parent that becomes a leaf joins it if it is older than the scan's end.
        self._candidates: list[list[tuple[int, int]]] = [[]]
        self._scanned_to: list[int] = [-1]

    def insert(
        self,
        rows: Rows,
        parents: Rows,
        sizes: npt.NDArray[np.int64],
        clocks: npt.NDArray[np.int64] | None = None,
        pools: int | npt.NDArray[np.int16] = 0,
    ) -> None:
        if not len(rows):
            return
        self._reach(int(rows.max()) + 1)
        self._assign(rows, pools)
        if clocks is None:
            self.touch(rows)
        else:
            self._clock[rows] = clocks
            self._forget_candidates(range(len(self._candidates)))  # these may be older than what a scan found
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
        np.subtract.at(self._children, parents, _ONE)
        self._clock[rows] = _ABSENT
        for parent in np.unique(parents[self._children[parents] == 0]).tolist():
            pool = self._pool.item(parent)
            if self._clock[parent] <= self._scanned_to[pool]:
                heapq.heappush(self._candidates[pool], (int(self._clock[parent]), parent))
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

    def evict(self, need_bytes: int, held: Held, givers: Iterable[tuple[int, int]] = EVERYBODY) -> list[int]:
        victims: list[int] = []
        clocks: list[int] = []
        if need_bytes <= 0:
            return victims
        for pool, most_bytes in givers:
            if pool < len(self._candidates):  # else nobody of it was ever here
                need_bytes -= self._give(pool, need_bytes, most_bytes, held, victims, clocks)
            if need_bytes <= 0:
                self._parent[victims] = NO_ROW
                return victims
        self._put_back(victims, clocks)
        return []

    def _give(
        self, pool: int, need_bytes: int, most_bytes: int, held: Held, victims: list[int], clocks: list[int]
    ) -> int:
        """Let blocks of one pool leave and add them to `victims`. Returns their bytes, which may be too few."""
        found_bytes = 0
        has_seen_all = False
        freed: tuple[int, int] | None = None  # a parent whose last child has just left: often the next to leave
        # The columns' items as plain numbers: this loop runs once for each block that ever leaves.
        clock_of, bytes_of, children_of, parent_of, held_of = (
            column.item for column in (self._clock, self._bytes, self._children, self._parent, held)
        )
        clock_column, children_column = self._clock, self._children
        candidates, scanned_to = self._candidates[pool], self._scanned_to[pool]
        while found_bytes < need_bytes:
            if freed is None and not candidates:
                if not has_seen_all:
                    has_seen_all = self._scan(pool, held)
                    candidates, scanned_to = self._candidates[pool], self._scanned_to[pool]
                if not candidates:
                    self._scanned_to[pool] = -1  # all of them are used up: the next call scans afresh
                    break
            clock, row = heapq.heappushpop(candidates, freed) if freed else heapq.heappop(candidates)
            freed = None
            if clock_of(row) != clock or children_of(row) or held_of(row):
                continue
            found_bytes += bytes_of(row)
            if found_bytes > most_bytes:
                found_bytes -= bytes_of(row)
                heapq.heappush(candidates, (clock, row))
                break
            victims.append(row)
            clocks.append(clock)
            clock_column[row] = _ABSENT
            if (parent := parent_of(row)) != NO_ROW:
                left = children_column[parent] = children_of(parent) - 1
                if not left and (clock := clock_of(parent)) <= scanned_to:
                    freed = (clock, parent)
        if freed is not None:
            heapq.heappush(candidates, freed)
        return found_bytes

    def parents(self, rows: Rows) -> Rows:
        return self._parent[rows].astype(np.int64)

    def clocks(self, rows: Rows) -> Rows:
        return self._clock[rows]

    def _scan(self, pool: int, held: Held) -> bool:
        """Find the oldest leaves of a pool. True: these are all leaves it has."""
        high = self._high
        is_leaf = (self._clock[:high] != _ABSENT) & (self._children[:high] == 0) & (held[:high] == 0)
        if len(self._candidates) > 1:
            is_leaf &= self._pool[:high] == pool
        leaves = np.flatnonzero(is_leaf)
        self._scanned_to[pool] = self._now
        clocks = self._clock[leaves]
        is_all = len(leaves) <= _SCAN_VICTIMS
        if not is_all:
            oldest = np.argpartition(clocks, _SCAN_VICTIMS)[:_SCAN_VICTIMS]
            leaves, clocks = leaves[oldest], clocks[oldest]
            self._scanned_to[pool] = int(clocks.max())
        self._candidates[pool] = sorted(zip(clocks.tolist(), leaves.tolist(), strict=True))  # sorted is a heap
        return is_all

    def _put_back(self, rows: list[int], clocks: list[int]) -> None:
        self._forget_candidates(set(self._pool[rows].tolist()))  # the next call scans afresh
        self._clock[rows] = clocks
        self._add_children(self._parent[rows])

    def _forget_candidates(self, pools: Iterable[int]) -> None:
        for pool in pools:
            self._candidates[pool], self._scanned_to[pool] = [], -1

    def _assign(self, rows: Rows, pools: int | npt.NDArray[np.int16]) -> None:
        highest = pools if isinstance(pools, int) else int(pools.max())
        while highest >= len(self._candidates):
            self._candidates.append([])
            self._scanned_to.append(-1)
        if len(self._candidates) > 1:  # else it says 0 everywhere
            self._pool[rows] = pools

    def _add_children(self, parents: npt.NDArray[np.integer]) -> None:
        known = parents[parents != NO_ROW]
        if len(known) < self._high // 8:
            np.add.at(self._children, known, _ONE)
        else:  # a whole table at once: counting is faster than adding one by one
            self._children[: self._high] += np.bincount(known, minlength=self._high).astype(np.int32)

    def _reach(self, rows: int) -> None:
        if rows > len(self._clock):
            more = max(rows, 2 * len(self._clock)) - len(self._clock)
            self._clock = np.concatenate((self._clock, np.full(more, _ABSENT, np.int64)))
            self._bytes = np.concatenate((self._bytes, np.zeros(more, np.int64)))
            self._parent = np.concatenate((self._parent, np.full(more, NO_ROW, np.int32)))
            self._children = np.concatenate((self._children, np.zeros(more, np.int32)))
            self._pool = np.concatenate((self._pool, np.zeros(more, np.int16)))
        self._high = max(self._high, rows)
