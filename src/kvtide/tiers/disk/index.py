# SPDX-License-Identifier: Apache-2.0
"""The index file: one record of 128 bytes for each row of the table, changed in place.

    page 0     magic, version, record size, checksum; written once
    page 1     the day, and the bytes written on it (for the daily budget)
    then       records; record i describes row i

    offset  bytes  a block                       a shelf
         0     32  key                           namespace, tenant, scope, part:
        32     32  parent key                      112 bytes as Shelf.pack makes them
        64      8  offset in the data file
        72      8  frame bytes
        80      8  clock of the last use
        88      4  row of the parent, -1: unknown
        92      4  position in its chain
        96     16  zero
       112      4  kind 1                        kind 2            (0: the row is free)
       116      4  number of its shelf           its own number
       120      8  checksum of bytes 0 to 119

Records are hints: whatever they say, a frame is believed only after its own header and checksums. So they
need no ordering against the data and no log: a record lost by a crash loses a block, a record too many is
found out when the block is read. A record never crosses a sector, and a torn one fails its checksum.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtide.errors import ConfigError
from kvtide.keys import Key, Shelf
from kvtide.layout import Memory
from kvtide.tiers.disk.files import ALIGNMENT, RawFile

log = logging.getLogger(__name__)

FREE, BLOCK, SHELF = 0, 1, 2
RECORD_BYTES = 128
RECORDS_AT = 2 * ALIGNMENT

BLOCK_RECORD = np.dtype(
    [
        ("key", "V32"),  # V, not S: S would strip trailing zero bytes
        ("parent", "V32"),
        ("offset", "<i8"),
        ("frame_bytes", "<i8"),
        ("clock", "<i8"),
        ("parent_row", "<i4"),
        ("position", "<u4"),
        ("zero", "V16"),
        ("kind", "<u4"),
        ("shelf", "<u4"),
        ("check", "<u8"),
    ]
)
SHELF_RECORD = np.dtype([("shelf", "V112"), ("kind", "<u4"), ("number", "<u4"), ("check", "<u8")])
assert BLOCK_RECORD.itemsize == SHELF_RECORD.itemsize == RECORD_BYTES

Records = npt.NDArray[np.void]

_MAGIC = b"kvtide index\r\n\0\0"
_VERSION = 1
_HEAD = struct.Struct("<16sIIQ")
_DAY = struct.Struct("<QQQ")
# A sum of products with odd constants: unlike a byte-wise hash numpy computes it for a million records at once.
_LANES = np.frombuffer(
    b"".join(sha256(b"kvtide index lane %d" % i).digest()[:8] for i in range(15)), "<u8"
) | np.uint64(1)


def checksums(records: Records) -> npt.NDArray[np.uint64]:
    lanes = np.ascontiguousarray(records).view("<u8").reshape(len(records), RECORD_BYTES // 8)
    total: npt.NDArray[np.uint64] = (lanes[:, :15] * _LANES).sum(axis=1, dtype=np.uint64)
    return total ^ (total >> np.uint64(29))


class IndexFile:
    """Reads and writes records. Not locked: the tier gives each row to one thread at a time."""

    def __init__(self, path: Path, open_file: Callable[[Path], RawFile], *, step_bytes: int) -> None:
        self._step_bytes = step_bytes
        self._file = open_file(path)
        self.allocated_bytes = self._file.size_bytes
        try:
            if self.allocated_bytes < RECORDS_AT:
                self._create()
        except OSError:
            self._file.close()
            raise

    def _create(self) -> None:
        """Write the head before the file is long enough to need one: whoever dies in between leaves none behind."""
        page = np.zeros(ALIGNMENT, np.uint8)
        head = _HEAD.pack(_MAGIC, _VERSION, RECORD_BYTES, 0)
        head = head[:-8] + xxh3_64_intdigest(head).to_bytes(8, "little")
        page[: len(head)] = np.frombuffer(head, np.uint8)
        self._file.write([page], 0)
        self._file.sync()  # a power loss must not keep the length and lose the head
        self._file.allocate(0, RECORDS_AT)
        self.allocated_bytes = RECORDS_AT

    def check_head(self) -> None:
        """Raise ConfigError unless this is an index that this version can read."""
        path = self._file.path
        page = np.zeros(_HEAD.size, np.uint8)
        self._file.read([page], 0)
        magic, version, record_bytes, check = _HEAD.unpack(page.tobytes())
        head = _HEAD.pack(magic, version, record_bytes, 0)
        if magic != _MAGIC or check != xxh3_64_intdigest(head):
            raise ConfigError(
                f"{path} is damaged or not kvtide's: nothing was touched; move the folder away or delete it "
                "to begin with an empty cache",
                path=str(path),
            )
        if (version, record_bytes) != (_VERSION, RECORD_BYTES):
            raise ConfigError(
                f"{path} was made by another version of kvtide (format {version}, this one reads {_VERSION}): "
                "use that version, or name another folder",
                path=str(path),
                version=version,
            )

    @property
    def rows_allocated(self) -> int:
        return (self.allocated_bytes - RECORDS_AT) // RECORD_BYTES

    def bytes_after_growing(self) -> int:
        return self.allocated_bytes + self._step_bytes

    def grow(self) -> None:
        """Room for more rows; raises OSError when the device is full."""
        self._file.allocate(self.allocated_bytes, self._step_bytes)
        self.allocated_bytes += self._step_bytes

    def shrink(self, size_bytes: int) -> None:
        """Give up the records beyond that size, if there are any."""
        size_bytes = max(RECORDS_AT, size_bytes // ALIGNMENT * ALIGNMENT)
        if self.allocated_bytes > size_bytes:
            self._file.truncate(size_bytes)
            self.allocated_bytes = size_bytes

    def read_all(self) -> Records:
        """Every record, whatever its kind and state."""
        raw = np.zeros(self.rows_allocated * RECORD_BYTES, np.uint8)
        self._file.read([raw], RECORDS_AT)
        return raw.view(BLOCK_RECORD)

    def write(self, rows: list[int], records: Records) -> None:
        """Put records in their rows, which ascend; neighbours in one call. Fills in their checksums."""
        records["check"] = checksums(records)
        self._write_raw(rows, records.view(np.uint8))

    def erase(self, rows: list[int]) -> None:
        """Mark rows as free, in any order."""
        self._write_raw(sorted(rows), np.zeros(len(rows) * RECORD_BYTES, np.uint8))

    def _write_raw(self, rows: list[int], raw: Memory) -> None:
        first = 0
        for i in range(1, len(rows) + 1):
            if i == len(rows) or rows[i] != rows[i - 1] + 1:
                run = raw[first * RECORD_BYTES : i * RECORD_BYTES]
                self._file.write([run], RECORDS_AT + rows[first] * RECORD_BYTES)
                first = i

    def read_day(self) -> tuple[int, int]:
        """The last day that something was counted for, and the bytes of that day; (0, 0) when unknown."""
        page = np.zeros(_DAY.size, np.uint8)
        self._file.read([page], ALIGNMENT)
        day, written, check = _DAY.unpack(page.tobytes())
        return (day, written) if check == xxh3_64_intdigest(_DAY.pack(day, written, 0)) else (0, 0)

    def write_day(self, day: int, written_bytes: int) -> None:
        check = xxh3_64_intdigest(_DAY.pack(day, written_bytes, 0))
        self._file.write([np.frombuffer(_DAY.pack(day, written_bytes, check), np.uint8)], ALIGNMENT)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def block_records(count: int) -> Records:
    records: Records = np.zeros(count, BLOCK_RECORD)
    records["kind"] = BLOCK
    return records


def shelf_record(shelf: Shelf, number: int) -> Records:
    record: Records = np.zeros(1, SHELF_RECORD)
    record["shelf"] = np.frombuffer(shelf.pack(), "V112")
    record["kind"], record["number"] = SHELF, number
    return record.view(BLOCK_RECORD)


def keys_of(column: npt.NDArray[np.void]) -> list[Key]:
    """A column of 32-byte fields as keys, without a step per byte."""
    keys: list[Key] = np.ascontiguousarray(column).tolist()  # numpy turns V32 into bytes
    return keys
