# SPDX-License-Identifier: Apache-2.0
"""From the index file to the table, at open: without reading a payload, a million blocks in a second.

What cannot be right is dropped and counted, never guessed: records that fail their checksum, that point
outside the data file, whose shelf is unknown, or that claim a place or an address twice (the later one is
believed; only a power loss leaves such pairs).
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtide.frame import HEADER_BYTES
from kvtide.keys import Shelf
from kvtide.policy.policy import NO_ROW
from kvtide.policy.pools import Pools
from kvtide.tiers.disk.files import ALIGNMENT
from kvtide.tiers.disk.index import BLOCK, FREE, SHELF, SHELF_RECORD, IndexFile, Records, checksums, keys_of
from kvtide.tiers.space import Space
from kvtide.tiers.table import SHELVES_MAX, BlockTable

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]
_CLOCK_MAX = 1 << 62  # no life is that long, and those after it still find numbers to count on with
RowNumbers = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an index held: blocks that are back, records that were dropped, and where shelves are written."""

    blocks: int
    dropped: int
    clock: int
    shelf_rows: dict[int, int]


def load(index: IndexFile, space: Space) -> Recovered:
    """Fill an empty table and space from the index; records that are dropped are erased from it."""
    with _no_garbage_collection():
        records = index.read_all()
        is_sound = _is_sound(records)
        shelves, shelf_rows = _shelves(records, is_sound & (records["kind"] == SHELF))
        keep = is_sound & (records["kind"] == BLOCK) & _is_possible(records, space.extents.capacity_bytes, shelves)
        rows = _without_rivals(records, np.flatnonzero(keep))
        _fill(space, records, rows, shelves, shelf_rows)
        is_left_out = records["kind"] != FREE
        is_left_out[rows] = False
        is_left_out[list(shelf_rows.values())] = False
        dropped = np.flatnonzero(is_left_out).tolist()
        index.erase(dropped)
        clock = int(records["clock"][rows].max()) if len(rows) else 0
        recovered = Recovered(len(rows), len(dropped), clock, shelf_rows)
    del records, is_sound, keep, rows, is_left_out
    _give_back_memory()
    if dropped:
        log.warning("disk.recovered blocks=%d dropped=%d", recovered.blocks, recovered.dropped)
    return recovered


def _is_sound(records: Records) -> Mask:
    is_sound: Mask = checksums(records) == records["check"]
    return is_sound


def _shelves(records: Records, is_shelf: Mask) -> tuple[dict[int, Shelf], dict[int, int]]:
    """The shelves by number, and the rows of their records."""
    shelves: dict[int, Shelf] = {}
    rows: dict[int, int] = {}
    known: set[Shelf] = set()
    at = np.flatnonzero(is_shelf)
    for row, record in zip(at.tolist(), records[at].view(SHELF_RECORD), strict=True):
        try:
            shelf = Shelf.unpack(record["shelf"].tobytes())
        except ValueError:
            continue
        number = int(record["number"])
        if number < SHELVES_MAX and number not in shelves and shelf not in known:
            shelves[number], rows[number] = shelf, row
            known.add(shelf)
    return shelves, rows


def _is_possible(records: Records, capacity_bytes: int, shelves: dict[int, Shelf]) -> Mask:
    offset, frame_bytes = records["offset"], records["frame_bytes"]
    is_inside: Mask = (offset >= 0) & (offset % ALIGNMENT == 0)
    is_inside &= (frame_bytes >= HEADER_BYTES) & (frame_bytes <= capacity_bytes)
    is_inside &= offset <= capacity_bytes - _extent(frame_bytes)
    is_inside &= (records["clock"] >= 0) & (records["clock"] < _CLOCK_MAX)
    return is_inside & np.isin(records["shelf"], list(shelves))


def _without_rivals(records: Records, rows: RowNumbers) -> RowNumbers:
    """Of records that claim the same address or the same place, keep the newest."""
    lanes = np.ascontiguousarray(records["key"][rows]).view("<u8").reshape(len(rows), 4)
    digests = np.sort(lanes[:, 0] ^ records["shelf"][rows])
    if (digests[1:] == digests[:-1]).any():
        rows = _without_repeats(records, rows)
    while True:
        by_place = rows[np.argsort(records["offset"][rows], kind="stable")]
        start = records["offset"][by_place]
        end = start + _extent(records["frame_bytes"][by_place])
        # Of all records before each one, the one that reaches furthest: one round settles all that it covers.
        is_furthest = end == np.maximum.accumulate(end)
        furthest = np.maximum.accumulate(np.where(is_furthest, np.arange(len(end)), 0))
        clash = np.flatnonzero(start[1:] < end[furthest[:-1]]) + 1
        if not len(clash):
            return rows
        first, second = by_place[furthest[clash - 1]], by_place[clash]
        older = np.where(records["clock"][first] < records["clock"][second], first, second)
        rows = np.setdiff1d(rows, older)


def _without_repeats(records: Records, rows: RowNumbers) -> RowNumbers:
    newest: dict[tuple[int, bytes], int] = {}
    clock = records["clock"]
    for row, key, shelf in zip(
        rows.tolist(), keys_of(records["key"][rows]), records["shelf"][rows].tolist(), strict=True
    ):
        other = newest.get((shelf, key))
        if other is None or clock[other] < clock[row]:
            newest[shelf, key] = row
    return np.array(sorted(newest.values()), np.intp)


def _extent(frame_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-frame_bytes // ALIGNMENT) * ALIGNMENT


def _fill(
    space: Space, records: Records, rows: RowNumbers, shelves: dict[int, Shelf], shelf_rows: dict[int, int]
) -> None:
    offset, frame_bytes = records["offset"][rows], records["frame_bytes"][rows]
    extent = _extent(frame_bytes)
    parent_rows = _parent_rows(records, rows)
    parents = keys_of(records["parent"][rows[parent_rows == NO_ROW]])  # to be looked up: those without a sure row
    is_next = partial(_is_next, records["position"])
    space.table.load(
        shelves=shelves,
        reserved_rows=sorted(shelf_rows.values()),
        rows=rows,
        shelf=records["shelf"][rows].astype(np.int32),
        keys=keys_of(records["key"][rows]),
        parent_rows=parent_rows,
        parents=parents,
        is_next=is_next,
        extents=(offset, extent, frame_bytes),
        clocks=records["clock"][rows],
        pools=_pools(space.pools, shelves, records["shelf"][rows]),
    )
    by_place = np.argsort(offset)
    space.occupy(offset[by_place], extent[by_place], rows)


def _pools(pools: Pools, shelves: dict[int, Shelf], shelf: npt.NDArray[np.uint32]) -> npt.NDArray[np.int16] | None:
    """The pool of each block, as they are assigned now: the medium does not remember it."""
    if pools.count == 1:
        return None
    of_shelf = np.zeros(max(shelves, default=0) + 1, np.int16)
    for number, each in shelves.items():
        of_shelf[number] = pools.pool_of(each)
    return of_shelf[shelf]


def _is_next(position: npt.NDArray[np.uint32], rows: RowNumbers, parents: npt.NDArray[np.int64]) -> Mask:
    """Does each row come right after its parent? Where it does not, whatever the keys say, a link could close a
    circle, and nobody in a circle ever leaves."""
    is_next: Mask = position[rows].astype(np.int64) == position[parents].astype(np.int64) + 1
    return is_next


def _parent_rows(records: Records, rows: RowNumbers) -> npt.NDArray[np.int64]:
    """The rows of the parents, where a record's hint holds: that row is kept and has the parent's key and shelf."""
    hint = records["parent_row"][rows].astype(np.int64)
    is_kept = np.zeros(len(records) + 1, np.bool_)  # one more, for the hint -1
    is_kept[rows] = True
    hint[(hint < 0) | (hint >= len(records))] = NO_ROW
    keys = np.ascontiguousarray(records["key"]).view("<u8").reshape(len(records), 4)
    parents = np.ascontiguousarray(records["parent"][rows]).view("<u8").reshape(len(rows), 4)
    holds = is_kept[hint] & (keys[hint] == parents).all(axis=1)
    holds &= records["shelf"][hint] == records["shelf"][rows]
    holds &= _is_next(records["position"], rows, hint)
    return np.where(holds, hint, NO_ROW)


def save_clocks(index: IndexFile, table: BlockTable) -> None:
    """Write down when each block was last used, so that the next process evicts in the right order."""
    rows = table.visible
    if len(rows):
        records = index.read_all()
        # Above all that was ever written: a record that could not be erased must not look newer than a living one.
        newest = records["clock"][_is_sound(records) & (records["kind"] == BLOCK)].max(initial=0)
        records = records[rows]
        is_sound = _is_sound(records)  # one that was damaged meanwhile must not get a checksum that says otherwise
        records["clock"] = newest + 1 + np.argsort(np.argsort(table.policy.clocks(rows)))
        index.write(rows[is_sound].tolist(), records[is_sound])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A million fresh objects would trigger dozens of full collections that find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _give_back_memory() -> None:
    """The columns of a million records leave over 100 MB behind that glibc would keep; other libcs do not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
