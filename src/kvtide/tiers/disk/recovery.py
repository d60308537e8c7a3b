# SPDX-License-Identifier: Apache-2.0
"""From the index file to the table, at open: without reading a payload, a million blocks in a second.

What cannot be right is dropped and counted, never guessed: records that fail their checksum, that point
outside the data file, whose shelf is unknown, or that claim a place or an address twice (the later one is
believed; only a power loss leaves such pairs).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.frame import HEADER_BYTES
from kvtide.keys import Shelf
from kvtide.tiers.disk.files import ALIGNMENT
from kvtide.tiers.disk.index import BLOCK, FREE, SHELF, SHELF_RECORD, IndexFile, Records, checksums, keys_of
from kvtide.tiers.space import Space
from kvtide.tiers.table import SHELVES_MAX, BlockTable

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]


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
        sound = checksums(records) == records["check"]
        is_written = records["kind"] != FREE
        shelves, shelf_rows = _shelves(records, sound & (records["kind"] == SHELF))
        blocks = np.flatnonzero(sound & (records["kind"] == BLOCK))
        blocks = _believable(records, blocks, space.extents.capacity_bytes, set(shelf_rows))
        keep = np.zeros(len(records), np.bool_)
        keep[blocks] = True
        keep[list(shelf_rows.values())] = True
        dropped = np.flatnonzero(is_written & ~keep).tolist()
        index.erase(dropped)
        _fill(space, records[blocks], blocks, shelves, shelf_rows)
    if dropped:
        log.warning("disk.recovered blocks=%d dropped=%d", len(blocks), len(dropped))
    clock = int(records["clock"][blocks].max()) if len(blocks) else 0
    return Recovered(len(blocks), len(dropped), clock, shelf_rows)


def _shelves(records: Records, is_shelf: Mask) -> tuple[list[Shelf], dict[int, int]]:
    """All shelves by number, and the rows of their records. Numbers without a record get a stand-in."""
    found: dict[int, Shelf] = {}
    rows: dict[int, int] = {}
    at = np.flatnonzero(is_shelf)
    for row, record in zip(at.tolist(), records[at].view(SHELF_RECORD), strict=True):
        try:
            shelf = Shelf.unpack(record["shelf"].tobytes())
        except ValueError:
            continue
        number = int(record["number"])
        if number < SHELVES_MAX and number not in found and shelf not in found.values():
            found[number], rows[number] = shelf, row
    return [found[number] for number in sorted(found)], rows


def _believable(
    records: Records, blocks: npt.NDArray[np.intp], capacity: int, shelves: set[int]
) -> npt.NDArray[np.intp]:
    its = records[blocks]
    offset, frame_bytes = its["offset"], its["frame_bytes"]
    is_inside = (offset >= 0) & (offset % ALIGNMENT == 0) & (frame_bytes >= HEADER_BYTES) & (frame_bytes <= capacity)
    is_inside &= offset <= capacity - frame_bytes
    is_inside &= np.isin(its["shelf"], list(shelves))
    blocks = blocks[is_inside]
    # Newest first: of two records that claim the same place or address the newer one is kept.
    blocks = blocks[np.argsort(-records["clock"][blocks], kind="stable")]
    return _without_overlaps(records, _without_repeats(records, blocks))


def _without_repeats(records: Records, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    lanes = np.ascontiguousarray(records["key"][blocks]).view("<u8").reshape(len(blocks), 4)
    digests = lanes[:, 0] ^ records["shelf"][blocks]
    if len(np.unique(digests)) == len(blocks):  # the common case, without a step per block
        return blocks
    seen: set[tuple[int, bytes]] = set()
    keep = np.ones(len(blocks), np.bool_)
    for i, key in enumerate(keys_of(records["key"][blocks])):
        name = (int(records["shelf"][blocks[i]]), key)
        keep[i] = name not in seen
        seen.add(name)
    return blocks[keep]


def _without_overlaps(records: Records, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    while True:
        order = np.argsort(records["offset"][blocks], kind="stable")
        offset, end = records["offset"][blocks[order]], _ends(records, blocks[order])
        clash = np.flatnonzero(offset[1:] < end[:-1])
        if not len(clash):
            return blocks[order]
        clock = records["clock"][blocks[order]]
        older = np.where(clock[clash] < clock[clash + 1], clash, clash + 1)
        blocks = np.delete(blocks[order], np.unique(older))


def _ends(records: Records, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    ends: npt.NDArray[np.int64] = records["offset"][blocks] + _extent(records["frame_bytes"][blocks])
    return ends


def _extent(frame_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-frame_bytes // ALIGNMENT) * ALIGNMENT


def _fill(
    space: Space, its: Records, rows: npt.NDArray[np.intp], shelves: list[Shelf], shelf_rows: dict[int, int]
) -> None:
    extents = (its["offset"].astype(np.int64), _extent(its["frame_bytes"]), its["frame_bytes"].astype(np.int64))
    numbers = np.array(sorted(shelf_rows), np.int64)
    space.table.load(
        shelves=dict(zip(numbers.tolist(), shelves, strict=True)),
        reserved_rows=sorted(shelf_rows.values()),
        rows=rows.astype(np.int64),
        shelf=its["shelf"].astype(np.int32),
        keys=keys_of(its["key"]),
        parents=keys_of(its["parent"]),
        extents=extents,
        clocks=its["clock"].astype(np.int64),
    )
    space.extents.occupy(extents[0], extents[1])


def save_clocks(index: IndexFile, table: BlockTable) -> None:
    """Write down when each block was last used, so that the next process evicts in the right order."""
    rows = table.visible
    if len(rows):
        records = index.read_all()[rows]
        clocks = table.policy.clocks(rows)
        records["clock"] = 1 + np.argsort(np.argsort(clocks))
        index.write(rows.tolist(), records)


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
