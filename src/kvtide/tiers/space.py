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

    `on_evict` hears of each block before it leaves, `on_free` of each row whose place is free again.
    """

    def __init__(
        self, table: BlockTable, *, on_free: Callable[[int], None], on_evict: Callable[[int], None] | None = None
    ) -> None:
        self.table = table
        self.extents = Extents()
        self.evicted_blocks = 0
        self._on_evict = on_evict
        self._on_free = on_free

    @property
    def used_bytes(self) -> int:
        return self.extents.capacity_bytes - self.extents.free_bytes

    def take(self, extent: int) -> int:
        """An offset with that much room behind it, now taken; -1 at once when nothing can leave."""
        offset = self.extents.take(extent)
        if offset >= 0 or extent > self.extents.capacity_bytes:
            return offset
        self.evict(extent)
        offset = self.extents.take(extent)
        if offset >= 0:
            return offset
        self._leave(self._neighbours(extent), is_evicted=False)
        return self.extents.take(extent)

    def evict(self, need_bytes: int) -> int:
        """Let the policy give up blocks of that many bytes, or none. Returns how many blocks left."""
        rows = self.table.policy.evict(need_bytes, self.table.held)
        self._leave(rows, is_evicted=True)
        return len(rows)

    def free(self, row: int) -> None:
        """The place of an invisible row that nobody holds is free."""
        self.extents.give(int(self.table.offset[row]), int(self.table.extent[row]))
        self.table.free_row(row)
        self._on_free(row)

    def _leave(self, rows: list[int], *, is_evicted: bool) -> None:
        if self._on_evict is not None:
            for row in rows:
                self._on_evict(row)
        if rows:
            self.table.hide(rows, is_evicted=is_evicted)
        for row in rows:
            self.free(row)
        self.evicted_blocks += len(rows)

    def _neighbours(self, extent: int) -> list[int]:
        table = self.table
        taken = np.flatnonzero(table.extent[: table.rows])
        is_held = (table.held[taken] > 0) | (table.shelf[taken] == NO_ROW)
        clocks = np.where(is_held, 0, table.policy.clocks(taken))
        capacity = self.extents.capacity_bytes
        at = cheapest_window(table.offset[taken], table.extent[taken], clocks, is_held, extent, capacity)
        rows: list[int] = [] if at is None else taken[at].tolist()
        return rows
