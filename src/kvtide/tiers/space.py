# SPDX-License-Identifier: Apache-2.0
"""Room on a local medium: what is free, then what the policy gives up, then what stands in the way.

Frames of several sizes share a medium. When enough bytes are free but scattered, the cheapest run of
neighbours leaves, whatever its place in its chains: so fragmentation is bounded by one eviction, not by
luck. Blocks that lose their parent by it stay and are found again when the parent returns.

Whoever takes, takes for a pool. A pool at its bound makes room among its own blocks first; then blocks leave as
`Pools.givers` says. On neither way does a pool other than the taker's fall below its reserve. The price: blocks
within reserves may stand so that a larger one finds no piece between them, though enough is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvtide.memory.extents import Extents, cheapest_window
from kvtide.policy.policy import EVERYBODY, NO_ROW
from kvtide.policy.pools import Pools
from kvtide.tiers.table import BlockTable

_ROWS_PER_SEARCH = 1024
_IN_VAIN_MAX = 4096


class Space:
    """The table of a local tier together with the free ranges of its medium. No locks: its tier has one.

    `grow` is asked for more room, for a block of that size, before any block leaves; False: there is none.
    `on_evict` hears of blocks before they leave, `on_free` of rows whose places are free again.
    """

    def __init__(
        self,
        table: BlockTable,
        *,
        on_free: Callable[[list[int]], None],
        on_evict: Callable[[list[int]], None] | None = None,
        pools: Pools | None = None,
        grow: Callable[[int], bool] | None = None,
    ) -> None:
        self.table = table
        self.extents = Extents()
        self.pools = pools or Pools()
        self.evicted_blocks = 0
        self._on_evict = on_evict
        self._on_free = on_free
        self._grow = grow
        self._leaving: set[int] = set()  # rows of blocks that are gone, but whose places somebody still holds
        self._in_vain: dict[tuple[int, int], int] = {}  # (pool, extent): how many searches for a window to leave out

    @property
    def used_bytes(self) -> int:
        return self.extents.capacity_bytes - self.extents.free_bytes

    def occupy(
        self, offsets: npt.NDArray[np.int64], extents: npt.NDArray[np.int64], rows: npt.NDArray[np.intp]
    ) -> None:
        """Start with these places taken, `offsets` ascending, by rows that the table was loaded with."""
        self.extents.occupy(offsets, extents)
        for pool, size_bytes in self._by_pool(rows):
            self.pools.add(pool, size_bytes)

    # Taking ------------------------------------------------------------------------------------------------

    def take(self, extent: int, count: int = 1, pool: int = 0) -> list[int]:
        """Offsets with that much room behind each, now taken for this pool: `count`, or fewer when no more can leave.

        The rows that get them are to be of the same pool: `free` counts them back by their rows.
        """
        count = self.fit(count * extent, extent, pool) // extent
        offsets = self._take_free(extent, count, pool)
        while len(offsets) < count and self._grow is not None and self._grow(extent):
            offsets += self._take_free(extent, count - len(offsets), pool)
        missing = count - len(offsets)
        if not missing or extent > self.extents.capacity_bytes:
            return offsets
        short_bytes = missing * extent - self.extents.free_bytes
        if short_bytes > 0 and not self.evict(short_bytes, pool):  # not that much can leave: as much as can
            while self.evict(extent, pool):
                pass
        offsets += self._take_free(extent, missing, pool)
        while len(offsets) < count and self._leave(self._neighbours(extent, offsets, pool), is_evicted=False):
            offsets += self._take_free(extent, 1, pool)
        return offsets

    def fit(self, need_bytes: int, step_bytes: int, pool: int) -> int:
        """Let blocks of a pool leave until it may take that much more under its own bound, or as many steps of it as
        can be. Returns how much it may take."""
        if need_bytes <= self.pools.room_bytes(pool):
            return need_bytes
        if step_bytes > self.pools.room_bytes(pool) + self.pools.used_bytes(pool):
            return 0  # not one step fits under the bound, whoever leaves
        if not self._evict_own(need_bytes - self.pools.room_bytes(pool), pool):
            while True:
                room_bytes = self.pools.room_bytes(pool)
                next_step_bytes = (room_bytes // step_bytes + 1) * step_bytes
                if not self._evict_own(next_step_bytes - room_bytes, pool):
                    break
        return min(need_bytes, max(0, self.pools.room_bytes(pool) // step_bytes * step_bytes))

    def _take_free(self, extent: int, count: int, pool: int) -> list[int]:
        offsets = self.extents.take_many(extent, count)
        if offsets:
            self.pools.add(pool, extent * len(offsets))
        return offsets

    # Leaving -----------------------------------------------------------------------------------------------

    def evict(self, need_bytes: int, taker: int) -> int:
        """Let the policy give up blocks of that many bytes, or none. Returns how many blocks left."""
        rows = self.table.policy.evict(need_bytes, self.table.held, self._givers(taker))
        return self._leave(rows, is_evicted=True)

    def reclaim(self, need_bytes: int) -> list[int]:
        """Give up blocks of that many bytes ahead of time, or as many as are above their pools' reserves. Returns
        their rows, invisible now and held once by the caller: their places are free when he lets go."""
        rows = self._reclaim(need_bytes)
        if not rows and self.pools.count > 1:
            while need_bytes > 0 and (more := self._reclaim(1)):
                need_bytes -= int(self.table.extent[more].sum())
                rows += more
        return rows

    def _reclaim(self, need_bytes: int) -> list[int]:
        rows = self.table.policy.evict(need_bytes, self.table.held, self._givers(None))
        if rows:
            self.table.held[rows] += 1
            self.hide(rows, is_evicted=True)
            self._count_evicted(rows)
        return rows

    def hide(self, rows: list[int], *, is_evicted: bool = False) -> None:
        """Make blocks invisible whose places are not free yet: their pools pay for them, but have them no more."""
        self.table.hide(rows, is_evicted=is_evicted)
        if self.pools.count > 1:
            self._leaving.update(rows)
            for pool, size_bytes in self._by_pool(rows):
                self.pools.leave(pool, size_bytes)

    def free(self, rows: list[int]) -> None:
        """The places of invisible rows that nobody holds are free."""
        at = np.array(rows, np.int64)
        offsets, extents = self.table.offset[at], self.table.extent[at]
        free_bytes = self.extents.free_bytes
        for extent in set(extents.tolist()):  # mostly one
            self.extents.give(offsets[extents == extent].tolist(), extent)
        if self.pools.count == 1:
            self.pools.sub(0, self.extents.free_bytes - free_bytes)
        else:
            self._give_back(rows)
        self.table.free_rows(rows)
        self._on_free(rows)

    def _give_back(self, rows: list[int]) -> None:
        for pool, size_bytes in self._by_pool(rows):
            self.pools.sub(pool, size_bytes)
        if left := self._leaving.intersection(rows):
            self._leaving -= left
            for pool, size_bytes in self._by_pool(list(left)):
                self.pools.leave(pool, -size_bytes)

    def _givers(self, taker: int | None) -> Iterable[tuple[int, int]]:
        return EVERYBODY if self.pools.count == 1 else self.pools.givers(taker)

    def _evict_own(self, need_bytes: int, pool: int) -> int:
        rows = self.table.policy.evict(need_bytes, self.table.held, [(pool, self.pools.used_bytes(pool))])
        return self._leave(rows, is_evicted=True)

    def _leave(self, rows: list[int], *, is_evicted: bool) -> int:
        if rows:
            if self._on_evict is not None:
                self._on_evict(rows)
            self.table.hide(rows, is_evicted=is_evicted)
            self._count_evicted(rows)
            self.free(rows)
        return len(rows)

    def _count_evicted(self, rows: list[int]) -> None:
        self.evicted_blocks += len(rows)
        if self.pools.count == 1:
            self.pools.count_evicted(0, len(rows))
        else:
            for pool, blocks in enumerate(np.bincount(self.table.pool[rows]).tolist()):
                if blocks:
                    self.pools.count_evicted(pool, blocks)

    def _by_pool(self, rows: list[int] | npt.NDArray[np.intp]) -> list[tuple[int, int]]:
        """How many bytes these rows take of each pool."""
        extents = self.table.extent[rows]
        if self.pools.count == 1:
            return [(0, int(extents.sum()))]
        pools = self.table.pool[rows]
        return [(pool, int(extents[pools == pool].sum())) for pool in set(pools.tolist())]

    def _neighbours(self, extent: int, taken_now: list[int], taker: int) -> list[int]:
        """The rows that stand in the way of one free piece. `taken_now`: places of that size without a row yet."""
        if self.pools.count == 1:
            return self._window(extent, taken_now, None)
        # Where reserves fill the medium, somebody without one may ask in vain for days. On a million rows that would
        # be a tenth of a second each time, so after a search of n rows that found nothing n / 1,024 are left out.
        asked = (taker, extent)
        if self._in_vain.get(asked, 0):
            self._in_vain[asked] -= 1
            return []
        # A window covers `extent` bytes and what its last block has beyond them, all of which may be one pool's.
        extent_max = int(self.table.extent[: self.table.rows].max(initial=0))
        is_protected = self.pools.protected(extent + extent_max)
        rows = self._window(extent, taken_now, is_protected)
        if not rows and is_protected[taker]:  # only when nobody else may does the taker give what it has reserved
            is_protected[taker] = False
            rows = self._window(extent, taken_now, is_protected)
        if not rows:
            if len(self._in_vain) >= _IN_VAIN_MAX:
                self._in_vain.clear()
            self._in_vain[asked] = self.table.rows // _ROWS_PER_SEARCH
        return rows

    def _window(self, extent: int, taken_now: list[int], is_protected: npt.NDArray[np.bool_] | None) -> list[int]:
        table = self.table
        rows = np.flatnonzero(table.extent[: table.rows])
        is_held = (table.held[rows] > 0) | (table.shelf[rows] == NO_ROW)
        if is_protected is not None:
            is_held |= is_protected[table.pool[rows]]
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
