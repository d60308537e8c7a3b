# SPDX-License-Identifier: Apache-2.0
"""Room on a local medium: what is free, then what the policy gives up, then what stands in the way.

Frames of several sizes share a medium. When enough bytes are free but scattered, the cheapest run of
neighbours leaves, whatever its place in its chains: so fragmentation is bounded by one eviction, not by
luck. Blocks that lose their parent by it stay and are found again when the parent returns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtide.memory.extents import Extents, cheapest_window
from kvtide.policy.policy import NO_ROW
from kvtide.tiers.table import BlockTable


class Space:
    """The table of a local tier together with the free ranges of its medium. No locks: its tier has one.

    `on_evict` hears of blocks before they leave, `on_free` of rows whose places are free again.
    """

    def __init__(
        self,
        table: BlockTable,
        *,
        on_free: Callable[[list[int]], None],
        on_evict: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.table = table
        self.extents = Extents()
        self.evicted_blocks = 0
        self._on_evict = on_evict
        self._on_free = on_free

    @property
    def used_bytes(self) -> int:
        return self.extents.capacity_bytes - self.extents.free_bytes

    def take(self, extent: int, count: int = 1) -> list[int]:
        """Offsets with that much room behind each, now taken: `count` of them, or fewer when no more can leave."""
        offsets = self._take_free(extent, count)
        missing = count - len(offsets)
        if not missing or extent > self.extents.capacity_bytes:
            return offsets
        short_bytes = missing * extent - self.extents.free_bytes
        if short_bytes > 0 and not self.evict(short_bytes):  # not that much can leave: as much as can
            while self.evict(extent):
                pass
        offsets += self._take_free(extent, missing)
        while len(offsets) < count and self._leave(self._neighbours(extent, offsets), is_evicted=False):
            offsets += self._take_free(extent, 1)
        return offsets

    def _take_free(self, extent: int, count: int) -> list[int]:
        offsets: list[int] = []
        while len(offsets) < count and (offset := self.extents.take(extent)) >= 0:
            offsets.append(offset)
        return offsets

    def evict(self, need_bytes: int) -> int:
        """Let the policy give up blocks of that many bytes, or none. Returns how many blocks left."""
        rows = self.table.policy.evict(need_bytes, self.table.held)
        return self._leave(rows, is_evicted=True)

    def free(self, rows: list[int]) -> None:
        """The places of invisible rows that nobody holds are free."""
        at = np.array(rows, np.int64)
        offsets, extents = self.table.offset[at], self.table.extent[at]
        for extent in set(extents.tolist()):  # mostly one
            self.extents.give(offsets[extents == extent].tolist(), extent)
        self.table.free_rows(rows)
        self._on_free(rows)

    def _leave(self, rows: list[int], *, is_evicted: bool) -> int:
        if rows:
            if self._on_evict is not None:
                self._on_evict(rows)
            self.table.hide(rows, is_evicted=is_evicted)
            self.free(rows)
            self.evicted_blocks += len(rows)
        return len(rows)

    def _neighbours(self, extent: int, taken_now: list[int]) -> list[int]:
        """The rows that stand in the way of one free piece. `taken_now`: places of that size without a row yet."""
        table = self.table
        rows = np.flatnonzero(table.extent[: table.rows])
        is_held = (table.held[rows] > 0) | (table.shelf[rows] == NO_ROW)
        clocks = np.where(is_held, 0, table.policy.clocks(rows))
        more = len(taken_now)
        at = cheapest_window(
            np.concatenate((table.offset[rows], np.array(taken_now, np.int64))),
            np.concatenate((table.extent[rows], np.full(more, extent))),
            np.concatenate((clocks, np.zeros(more, np.int64))),
            np.concatenate((is_held, np.ones(more, np.bool_))),
            extent,
            self.extents.capacity_bytes,
        )
        return [] if at is None else [int(rows[i]) for i in at]
