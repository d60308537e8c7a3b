# SPDX-License-Identifier: Apache-2.0
"""Rows and places of the disk tier: what is in use, by what, and how much more the bound and the device allow.

The bound covers everything in the folder: data file, index, and what describes them. Both files grow in
steps; the data file stops early enough for the index to grow beside it. When neither may grow, blocks leave:
for their place, or for their record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

from kvtide.frame import Header
from kvtide.keys import Address, Shelf
from kvtide.memory.arena import round_up
from kvtide.observe.fault_log import FaultLog
from kvtide.policy.policy import NO_ROW, Policy
from kvtide.policy.pools import Pools
from kvtide.tiers.disk import recovery
from kvtide.tiers.disk.data import DataFile
from kvtide.tiers.disk.files import ALIGNMENT
from kvtide.tiers.disk.index import RECORD_BYTES, RECORDS_AT, IndexFile, shelf_record
from kvtide.tiers.space import Space
from kvtide.tiers.table import BlockTable

BYTES_MIN = 1 << 20  # below this the bookkeeping would not leave room for blocks
_OVERHEAD_BYTES = 64 << 10  # lock file, index head, and what the filesystem needs to describe the files
_INDEX_SHARE = 256  # at least 1/256 of the bound is kept for the index: enough for frames of 32 KiB on average
_ASIDE_SHARE = 64  # of the bound, for blocks that could not be read
_GROW_BYTES_MAX = 1 << 30
_GROW_AGAIN_S = 10

faults = FaultLog(logging.getLogger(__name__))


def index_step_bytes(bytes_max: int) -> int:
    return max(ALIGNMENT, min(1 << 20, bytes_max // 1024 // ALIGNMENT * ALIGNMENT))


def data_limit(bytes_max: int, index_bytes: int) -> int:
    """How large the data file may get beside an index of that size."""
    index_share = max(index_bytes, bytes_max // _INDEX_SHARE)
    return (bytes_max - _OVERHEAD_BYTES - index_share) // ALIGNMENT * ALIGNMENT


def frame_bytes_max(bytes_max: int) -> int:
    """The largest frame that fits under a bound at all."""
    return data_limit(bytes_max, RECORDS_AT + index_step_bytes(bytes_max))


class Room:
    """The table of all blocks, and the files under it. No lock: its tier has one, held around every method."""

    def __init__(self, index: IndexFile, data: DataFile, bytes_max: int, policy: Policy, pools: Pools) -> None:
        # A record describes at least a page, so a larger index is one of a higher bound, and would leave no room.
        index.shrink(RECORDS_AT + bytes_max * RECORD_BYTES // ALIGNMENT)
        limit = data_limit(bytes_max, index.allocated_bytes)
        if data.size_bytes > limit:  # the bound was lowered, or another version was more generous
            data.truncate(limit)
        self._index = index
        self._data = data
        self._bytes_max = bytes_max
        self._grow_again_at_s = 0.0
        self._freed: list[int] = []  # rows whose records are yet to be erased
        self._unerased: set[int] = set()  # rows whose records could not be erased: tried again and again
        self._retaken: set[int] = set()  # rows among `_freed` that have a new owner already
        self._aside: dict[int, Address] = {}  # blocks that the device failed to read, kept for the next open
        self._aside_bytes = 0
        self._unwritten: set[Shelf] = set()  # shelves whose record could not be written yet
        self.table = BlockTable(policy, tenants=pools.tenants)
        self.space = Space(self.table, on_free=self._freed.extend, pools=pools, grow=self._grow_data)
        self.space.extents.grow(data.size_bytes // ALIGNMENT * ALIGNMENT)
        self.recovered = recovery.load(index, self.space)
        self._shelf_rows = self.recovered.shelf_rows

    def take(self, header: Header, busy: Collection[Shelf]) -> int:
        """A row and a place for this frame, held once by the caller; NO_ROW when nothing can leave for it.

        `busy`: shelves with a write under way. Blocks that left are erased from the index by `erase_freed`, which
        the caller calls before it writes to the place.
        """
        pool = self.space.pools.pool_of(header.shelf)
        if not self._has_row(pool) or not self._has_shelf(header.shelf, busy) or not self._has_row(pool):
            return NO_ROW
        extent = round_up(header.frame_bytes)
        offsets = self.space.take(extent, pool=pool)
        if not offsets:
            return NO_ROW
        [row] = self.table.take_rows(offsets, extent, header.frame_bytes, pool)
        self._take_record(row)
        return row

    def prepare(self, headers: Iterable[Header]) -> None:
        """Let blocks leave for a whole batch in one go, if it will come to that: cheaper than block by block."""
        wanted: dict[int, int] = {}
        for header in headers:
            pool = self.space.pools.pool_of(header.shelf)
            wanted[pool] = wanted.get(pool, 0) + round_up(header.frame_bytes)
        extents = self.space.extents
        may_grow_bytes = max(0, data_limit(self._bytes_max, self._index.allocated_bytes) - extents.capacity_bytes)
        need_bytes = 0
        for pool, size_bytes in wanted.items():
            need_bytes += self.space.fit(size_bytes, size_bytes, pool)
            short_bytes = need_bytes - extents.free_bytes - may_grow_bytes
            if short_bytes > 0:
                self.space.evict(short_bytes, pool)

    def let_go(self, row: int) -> None:
        """One holder less. An invisible row that nobody holds is free, and its record erased."""
        self.table.held[row] -= 1
        if not self.table.held[row] and self.table.shelf[row] == NO_ROW:
            self.space.free([row])
            self.erase_freed()

    def hide(self, row: int) -> None:
        """Make a block invisible that is not hidden already (two readers may find the same damage)."""
        if self.table.shelf[row] != NO_ROW:
            self.space.hide([row])

    def forget(self, rows: list[int]) -> None:
        """Blocks are gone from here on, and from the index; a place is free when its last holder lets go."""
        if not rows:
            return
        self.space.hide(rows)
        self._freed += rows
        self.erase_freed()
        self.space.free([row for row, held in zip(rows, self.table.held[rows].tolist(), strict=True) if not held])
        self._freed.clear()  # erased above

    def erase_freed(self) -> bool:
        """Erase the records of rows whose place is free again, and those that could not be erased before.

        False when some are left. While open nobody sees them; after the next open they would be back.
        """
        rows = self._unerased.union(self._freed)
        try:
            self._index.erase(list(rows))
            self._unerased.clear()
            return True
        except OSError as error:
            faults.warn("disk.not_erased", records=len(rows), error=error.strerror)
            self._unerased = rows - self._retaken  # the others are written anew, or freed once more
            return False
        finally:
            self._freed.clear()
            self._retaken.clear()

    def set_aside(self, row: int) -> None:
        """The device failed to read a block: it is a miss, but place and record are kept, so that it is tried again
        after the next open. Only a share of the space is kept that way; beyond it the block is erased."""
        address = None if self.table.shelf[row] == NO_ROW else self.table.address(row)
        self.hide(row)
        extent = int(self.table.extent[row])
        if address is None or self._aside_bytes + extent > self._bytes_max // _ASIDE_SHARE:
            self.let_go(row)  # another reader has set it aside, or it was forgotten meanwhile, or it is too much
        else:
            self._aside[row] = address
            self._aside_bytes += extent

    def forget_aside(self, is_meant: Callable[[Address], bool]) -> None:
        """Blocks that were set aside are to be gone, too."""
        for row in [row for row, address in self._aside.items() if is_meant(address)]:
            del self._aside[row]
            self._aside_bytes -= int(self.table.extent[row])
            self.let_go(row)

    def _take_record(self, row: int) -> None:
        """A row has a new owner, who writes its record anew or frees it again: nobody else may erase it from now on."""
        self._unerased.discard(row)
        self._retaken.add(row)

    def _has_row(self, pool: int) -> bool:
        """Is there, or can there be, a record for one more row of this pool?"""
        if self.table.has_free_row or self.table.rows < self._index.rows_allocated:
            return True
        after = self._index.bytes_after_growing() + self._data.size_bytes + _OVERHEAD_BYTES
        if after <= self._bytes_max and self._try_to_grow(self._index.grow):
            return True
        return self.space.evict(1, pool) > 0  # a block leaves so that its record can be used again

    def _has_shelf(self, shelf: Shelf, busy: Collection[Shelf]) -> bool:
        """Give a new shelf its record, before any block on it has one."""
        if self.table.knows(shelf) and shelf not in self._unwritten:
            return True
        # A shelf whose first block is under way looks empty, but its number is not to be given to another.
        number = self.table.shelf_id(shelf, busy=busy)
        if number == NO_ROW:
            return False
        self.erase_freed()  # the shelf may get a row that was freed just now: not to be erased after it is written
        if number not in self._shelf_rows:
            [self._shelf_rows[number]] = self.table.take_rows([0], 0, 0)
            self._take_record(self._shelf_rows[number])
        try:
            self._index.write([self._shelf_rows[number]], shelf_record(shelf, number))
        except OSError as error:
            faults.warn("disk.shelf_not_written", error=error.strerror)
            self._unwritten.add(shelf)  # without its record, its blocks would be lost at the next open
            return False
        self._unwritten.discard(shelf)
        return True

    def _grow_data(self, extent: int) -> bool:
        size, limit = self.space.extents.capacity_bytes, data_limit(self._bytes_max, self._index.allocated_bytes)
        step = min(_GROW_BYTES_MAX, self._bytes_max // 64 // ALIGNMENT * ALIGNMENT)
        target = min(limit, size + max(extent, step))
        if target <= size or not self._try_to_grow(partial(self._data.grow, target)):
            return False
        self.space.extents.grow(target)
        return True

    def _try_to_grow(self, grow: Callable[[], None]) -> bool:
        """Ask the device for more room; when it has none, work with what there is and ask again later."""
        if time.monotonic() < self._grow_again_at_s:
            return False
        try:
            grow()
        except OSError as error:
            self._grow_again_at_s = time.monotonic() + _GROW_AGAIN_S
            faults.warn("disk.cannot_grow", error=error.strerror, next_try_s=_GROW_AGAIN_S)
            return False
        return True
