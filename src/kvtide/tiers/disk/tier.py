# SPDX-License-Identifier: Apache-2.0
"""The disk tier: many blocks in one preallocated file, bounded, and still there after kill -9.

Order of a write: room is made (blocks that leave are erased from the index), the frame is written, its
index record is written, and only then a lookup sees it. A process that dies in between leaves at worst a
record or a frame without its counterpart, and neither can be taken for a block: reads verify the frame
against the address that was asked for.

The bound covers everything in the folder. The data file grows step by step and its space is used again
in place; it never shrinks while open, so a full cache writes to extents that the filesystem has long
allocated.

Locking: `_lock` guards table and space and is never held during I/O on frames. A row that is being read
or written is held, so neither its place nor its record can change meanwhile.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.deadline import NEVER, Deadline
from kvtide.errors import Closed, ConfigError, Damaged, Truncated
from kvtide.frame import NO_PARENT, Frame, Header, Memory, verify
from kvtide.keys import Address, Digest, Key, Shelf
from kvtide.memory.arena import round_up
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW, Policy
from kvtide.tiers.disk import recovery
from kvtide.tiers.disk.data import DataFile, Piece, runs
from kvtide.tiers.disk.files import ALIGNMENT, RawFile, supports_direct
from kvtide.tiers.disk.folder import DATA, INDEX, Folder
from kvtide.tiers.disk.index import RECORD_BYTES, RECORDS_AT, IndexFile, block_records, shelf_record
from kvtide.tiers.space import Space
from kvtide.tiers.table import BlockTable
from kvtide.tiers.tier import Outcome, Tier, TierStats, Traits, is_cleared

log = logging.getLogger(__name__)

BYTES_MIN = 1 << 20  # below this the bookkeeping would not leave room for blocks
_OVERHEAD_BYTES = 64 << 10  # lock file, index head, and what the filesystem needs to describe the files
_INDEX_SHARE = 256  # at least 1/256 of the bound is kept for the index: enough for frames of 32 KiB on average
_GROW_BYTES_MAX = 1 << 30
_GROW_AGAIN_S = 10
_SYNC_S = 5.0

OpenFile = Callable[..., RawFile]


class DiskTier(Tier):
    """See the module's text. `bytes_written_daily_max`: None for no budget; days are UTC."""

    def __init__(
        self,
        folder: Path,
        bytes_max: int,
        *,
        policy: Policy | None = None,
        io_threads: int = 4,
        bytes_written_daily_max: int | None = None,
        open_file: OpenFile = RawFile,
        today: Callable[[], int] = lambda: int(time.time() // 86_400),
    ) -> None:
        if bytes_max < BYTES_MIN:
            raise ConfigError(f"disk.bytes_max is {bytes_max}, which holds not one block: give it {BYTES_MIN} or more")
        self.bytes_max = bytes_max // ALIGNMENT * ALIGNMENT
        self._index_step_bytes = max(ALIGNMENT, min(1 << 20, bytes_max // 1024 // ALIGNMENT * ALIGNMENT))
        self.traits = Traits(
            name="disk",
            durable=True,
            shared=False,
            enumerable=True,
            checksummed=True,
            alignment=ALIGNMENT,
            frame_bytes_max=self._data_limit(RECORDS_AT + self._index_step_bytes),
        )
        self._path = folder
        self._policy = policy
        self._io_threads = io_threads
        self._daily_max = bytes_written_daily_max
        self._open_file = open_file
        self._today = today
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)  # a write has ended
        self._stats = TierStats(bytes_max=self.bytes_max)
        self._state = "new"
        self._calls = 0  # that are under way, and that a close waits for
        self._is_idle = threading.Condition(self._lock)

    # Opening and closing -----------------------------------------------------------------------------------

    def open(self) -> None:
        with ExitStack() as undo:  # whatever was opened is closed again if something after it fails
            self._folder = Folder(self._path)
            undo.callback(self._folder.close)
            try:
                self._open_files(undo)
            except OSError as error:
                raise ConfigError(
                    f"disk.folder {self._path} cannot be used: {error.strerror}; free space or name another folder",
                    folder=str(self._path),
                ) from error
            self._pool = ThreadPoolExecutor(self._io_threads, "kvtide-disk")
            self._close_files = undo.pop_all()
        self._state = "open"

    def _open_files(self, undo: ExitStack) -> None:
        self.is_direct = supports_direct(self._path)
        self._index = IndexFile(self._path / INDEX, self._open_file, step_bytes=self._index_step_bytes)
        undo.callback(self._index.close)
        self._index.check_head()
        # A record describes at least a page, so a larger index is one of a higher bound, and would leave no room.
        self._index.shrink(RECORDS_AT + self.bytes_max * RECORD_BYTES // ALIGNMENT)
        self._data = DataFile(self._path / DATA, partial(self._open_file, direct=self.is_direct))
        undo.callback(self._data.close)
        limit = self._data_limit(self._index.allocated_bytes)
        if self._data.size_bytes > limit:  # the bound was lowered, or another version was more generous
            self._data.truncate(limit)
        self.table = BlockTable(self._policy or LeafLru())
        self._freed: list[int] = []  # rows whose records are yet to be erased
        self._space = Space(self.table, on_free=self._freed.extend)
        self._space.extents.grow(self._data.size_bytes // ALIGNMENT * ALIGNMENT)
        self.recovered = recovery.load(self._index, self._space)
        self._freed.clear()
        self._shelf_rows = self.recovered.shelf_rows
        self._clock = self.recovered.clock
        self._pending: dict[Address, int] = {}  # being written, and in which row; NO_ROW: cleared meanwhile
        self._grow_again_at_s = 0.0
        self._day, self._day_bytes = self._index.read_day()
        self._synced_at_s = time.monotonic()

    def close(self) -> None:
        with self._lock:
            if self._state != "open":
                return
            self._state = "closed"
            # A call that wrote its record after the files are closed would hit whatever file got their numbers.
            self._is_idle.wait_for(lambda: not self._calls)
        self._pool.shutdown(wait=True)
        with self._close_files:
            try:
                recovery.save_clocks(self._index, self.table)
                self._index.write_day(self._day, self._day_bytes)
                self._data.sync()
                self._index.sync()
            except OSError as error:  # what is on the medium is as sound as after a crash
                log.warning("disk.not_synced folder=%s error=%s", self._path, error.strerror)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call that uses the files: they stay open until it ends."""
        with self._lock:
            if self._state != "open":
                raise Closed("the disk tier is not open")
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._is_idle.notify_all()

    # Reading -----------------------------------------------------------------------------------------------

    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        with self._lock:
            if self._state != "open":
                return np.zeros(len(keys), np.int64)
            rows = self.table.find(shelf, keys)
            return np.where(rows == NO_ROW, 0, self.table.frame_bytes[rows])

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        with self._call():
            return self._read(addresses, into, deadline)

    def _read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline) -> list[Outcome]:
        outcomes = [Outcome.MISS] * len(addresses)
        pieces = self._hold_for_reading(addresses, into)
        # The pool only moves bytes; this thread verifies what has arrived while the rest is under way.
        for run, error, whole in self._each_done(self._read_run, runs(pieces), deadline):
            for i, piece in enumerate(run):
                outcomes[piece.at] = self._verified(piece, addresses[piece.at], error, is_whole=i < whole)
        with self._lock:
            for outcome in outcomes:
                self._stats.count("read", outcome)
        return outcomes

    def _hold_for_reading(self, addresses: Sequence[Address], into: Sequence[Memory]) -> list[Piece]:
        pieces = []
        with self._lock:
            for at, (address, memory) in enumerate(zip(addresses, into, strict=True)):
                row = self.table.row(address)
                if row == NO_ROW:
                    continue
                frame_bytes = int(self.table.frame_bytes[row])
                if len(memory) < frame_bytes:  # another frame than the one that was looked up
                    continue
                self.table.held[row] += 1
                pieces.append(Piece(at, row, int(self.table.offset[row]), memory[:frame_bytes]))
            if pieces:
                self.table.policy.touch(np.array([piece.row for piece in pieces]))
        return pieces

    def _read_run(self, run: list[Piece], deadline: Deadline) -> int:
        if deadline.has_passed:
            raise TimeoutError
        return self._data.read(run)

    def _verified(self, piece: Piece, address: Address, error: OSError | None, *, is_whole: bool) -> Outcome:
        outcome = _outcome_of(error)
        if error is None:
            try:
                if not is_whole:
                    raise Truncated("the data file ends before the frame does")
                if verify(piece.memory, address).frame_bytes != len(piece.memory):
                    raise Truncated("shorter than its record says: nothing vouches for the bytes behind it")
            except Damaged as damage:
                outcome = Outcome.CORRUPT
                log.warning("disk.damaged kind=%s offset=%d", damage.kind, piece.offset)
        if outcome in (Outcome.CORRUPT, Outcome.ERROR):
            piece.memory[:] = 0
        with self._lock:
            if outcome is Outcome.HIT:
                self._stats.read_bytes += len(piece.memory)
            elif outcome is not Outcome.TIMEOUT:
                self._hide([piece.row])
            if outcome is not Outcome.ERROR:
                self._let_go(piece.row)
            # After an error of the device the row stays held: its place is not used again and its record
            # not erased, so that the block is tried once more after the next open.
        return outcome

    def _hide(self, rows: list[int]) -> None:
        """Make blocks invisible that are not hidden already (two readers may find the same damage)."""
        if visible := [row for row in rows if self.table.shelf[row] != NO_ROW]:
            self.table.hide(visible)

    def _let_go(self, row: int) -> None:
        self.table.held[row] -= 1
        if not self.table.held[row] and self.table.shelf[row] == NO_ROW:
            self._space.free([row])
            self._erase_freed()

    # Writing -----------------------------------------------------------------------------------------------

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        with self._call():
            return self._write(frames, deadline)

    def _write(self, frames: Sequence[Frame], deadline: Deadline) -> list[Outcome]:
        outcomes = [Outcome.REJECTED] * len(frames)
        pieces = self._make_room(frames, outcomes, deadline)
        # This thread seals the next frames while the pool writes those before.
        seal = partial(_seal, frames)
        for run, error, _ in self._each_done(self._write_run, runs(pieces), deadline, before=seal):
            error = error or self._write_records(run, frames)
            self._settle(run, frames, error, outcomes)
        with self._lock:
            for outcome in outcomes:
                self._stats.count("write", outcome)
        self._sync_sometimes()
        return outcomes

    def _make_room(self, frames: Sequence[Frame], outcomes: list[Outcome], deadline: Deadline) -> list[Piece]:
        """Take a row and a place for each frame that needs one; `outcomes` says why others get none."""
        pieces: list[Piece] = []
        with self._lock:
            for at, frame in enumerate(frames):
                outcomes[at] = self._refusal(frame)
                if outcomes[at] is not Outcome.MISS:
                    continue
                if deadline.has_passed:  # before a block leaves for it
                    outcomes[at] = Outcome.TIMEOUT
                    continue
                row = self._take(frame)
                if row == NO_ROW:
                    outcomes[at] = Outcome.REJECTED
                    continue
                self._pending[frame.address] = row
                self._day_bytes += frame.header.frame_bytes
                pieces.append(Piece(at, row, int(self.table.offset[row]), frame.memory[: frame.header.frame_bytes]))
            self._erase_freed()  # before any of the freed places is written to
        return pieces

    def _refusal(self, frame: Frame) -> Outcome:
        """Why this frame is not to be written; MISS: no reason, it is welcome."""
        if self.table.row(frame.address) != NO_ROW:
            return Outcome.HIT
        if frame.address in self._pending:
            return Outcome.PENDING
        if frame.header.frame_bytes > self.traits.frame_bytes_max:
            return Outcome.REJECTED
        if self._daily_max is not None:
            if (today := self._today()) != self._day:
                self._day, self._day_bytes = today, 0
            if self._day_bytes + frame.header.frame_bytes > self._daily_max:
                return Outcome.THROTTLED
        return Outcome.MISS

    def _take(self, frame: Frame) -> int:
        if not self._has_row() or not self._has_shelf(frame.header.shelf) or not self._has_row():
            return NO_ROW
        extent = round_up(frame.header.frame_bytes)
        offset = self._space.extents.take(extent)
        while offset < 0 and self._grow_data(extent):
            offset = self._space.extents.take(extent)
        offsets = [offset] if offset >= 0 else self._space.take(extent)
        return self.table.take_rows(offsets, extent, frame.header.frame_bytes)[0] if offsets else NO_ROW

    def _write_run(self, run: list[Piece], deadline: Deadline) -> int:
        if deadline.has_passed:
            raise TimeoutError
        self._data.write(run)
        return len(run)

    def _write_records(self, run: list[Piece], frames: Sequence[Frame]) -> OSError | None:
        """The frames are on the medium; now the index may say so."""
        run.sort(key=lambda piece: piece.row)
        headers = [frames[piece.at].header for piece in run]
        rows = [piece.row for piece in run]
        records = block_records(len(run))
        records["key"] = np.frombuffer(b"".join(header.key for header in headers), "V32")
        records["parent"] = np.frombuffer(b"".join(header.parent for header in headers), "V32")
        with self._lock:
            records["offset"] = self.table.offset[rows]
            records["frame_bytes"] = self.table.frame_bytes[rows]
            records["shelf"] = [self.table.shelf_id(header.shelf) for header in headers]
            records["parent_row"] = [self._row_of_parent(header) for header in headers]
            self._clock += 1
            records["clock"] = self._clock
        try:
            self._index.write(rows, records)
        except OSError as error:
            return error
        return None

    def _row_of_parent(self, header: Header) -> int:
        if header.parent == NO_PARENT:
            return NO_ROW
        parent = Address(header.shelf, header.parent)
        row = self.table.row(parent)
        return self._pending.get(parent, NO_ROW) if row == NO_ROW else row

    def _settle(
        self, run: list[Piece], frames: Sequence[Frame], error: OSError | None, outcomes: list[Outcome]
    ) -> None:
        """A run's frames become visible, or give back what they took."""
        outcome = _outcome_of(error)
        with self._lock:
            for piece in run:
                header = frames[piece.at].header
                is_cleared = self._pending.pop(header.address) != piece.row
                if outcome is Outcome.TIMEOUT:
                    self._day_bytes -= header.frame_bytes
                outcomes[piece.at] = Outcome.REJECTED if is_cleared else outcome
                if outcomes[piece.at] is Outcome.HIT:
                    is_visible = self.table.insert(header.shelf, [piece.row], [header.key], [header.parent])
                    assert is_visible, "a shelf with a write under way lost its number"
                    self._stats.written_bytes += len(piece.memory)
                self._let_go(piece.row)
            self._settled.notify_all()

    # Room --------------------------------------------------------------------------------------------------

    def _data_limit(self, index_bytes: int) -> int:
        """How large the data file may get beside an index of that size."""
        index_share = max(index_bytes, self.bytes_max // _INDEX_SHARE)
        return (self.bytes_max - _OVERHEAD_BYTES - index_share) // ALIGNMENT * ALIGNMENT

    def _grow_data(self, extent: int) -> bool:
        size, limit = self._space.extents.capacity_bytes, self._data_limit(self._index.allocated_bytes)
        target = min(limit, size + max(extent, min(_GROW_BYTES_MAX, self.bytes_max // 64 // ALIGNMENT * ALIGNMENT)))
        if target <= size or not self._try_to_grow(partial(self._data.grow, target)):
            return False
        self._space.extents.grow(target)
        return True

    def _has_row(self) -> bool:
        """Is there, or can there be, a record for one more row?"""
        if self.table.has_free_row or self.table.rows < self._index.rows_allocated:
            return True
        after = self._index.bytes_after_growing() + self._data.size_bytes + _OVERHEAD_BYTES
        if after <= self.bytes_max and self._try_to_grow(self._index.grow):
            return True
        return self._space.evict(1) > 0  # a block leaves so that its record can be used again

    def _try_to_grow(self, grow: Callable[[], None]) -> bool:
        """Ask the device for more room; when it has none, work with what there is and ask again later."""
        if time.monotonic() < self._grow_again_at_s:
            return False
        try:
            grow()
        except OSError as error:
            self._grow_again_at_s = time.monotonic() + _GROW_AGAIN_S
            log.warning("disk.cannot_grow folder=%s error=%s next_try_s=%d", self._path, error.strerror, _GROW_AGAIN_S)
            return False
        return True

    def _has_shelf(self, shelf: Shelf) -> bool:
        """Give a new shelf its record, before any block on it has one."""
        if self.table.knows(shelf):
            return True
        # A shelf whose first block is under way looks empty, but its number is not to be given to another.
        number = self.table.shelf_id(shelf, busy={address.shelf for address in self._pending})
        if number == NO_ROW:
            return False
        self._erase_freed()  # the shelf may get a row that was freed just now: not to be erased after it is written
        if number not in self._shelf_rows:
            [self._shelf_rows[number]] = self.table.take_rows([0], 0, 0)
        try:
            self._index.write([self._shelf_rows[number]], shelf_record(shelf, number))
        except OSError as error:
            log.warning("disk.shelf_not_written error=%s", error.strerror)
        return True

    def _erase_freed(self) -> None:
        """Erase the records of rows whose place is free again. Should it fail, reads still find out."""
        try:
            self._index.erase(self._freed)
        except OSError as error:
            log.warning("disk.not_erased records=%d error=%s", len(self._freed), error.strerror)
        self._freed.clear()

    # The rest ----------------------------------------------------------------------------------------------

    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        with self._call(), self._lock:
            rows = [self.table.row(address) for address in addresses]
            self._forget([row for row in dict.fromkeys(rows) if row != NO_ROW])
        return [Outcome.MISS if row == NO_ROW else Outcome.HIT for row in rows]

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None) -> int:
        with self._call():
            with self._lock:
                rows = self.table.of(namespace, tenant)
                self._forget(rows)
                # A write that is under way will not become visible; but it may be about to say so in the index, so
                # its end is waited for before the index is synced.
                writing = [address for address in self._pending if is_cleared(address.shelf, namespace, tenant)]
                for address in writing:
                    self._pending[address] = NO_ROW
                self._settled.wait_for(lambda: not any(self._pending.get(each) == NO_ROW for each in writing))
            self._index.sync()
            return len(rows)

    def _forget(self, rows: list[int]) -> None:
        if not rows:
            return
        self.table.hide(rows)
        self._freed += rows
        self._erase_freed()
        self._space.free([row for row, held in zip(rows, self.table.held[rows].tolist(), strict=True) if not held])
        self._freed.clear()

    def stats(self) -> TierStats:
        with self._lock:
            stats = copy.deepcopy(self._stats)
            stats.blocks = self.table.blocks
            stats.bytes_used = self._space.used_bytes
            stats.evicted_blocks = self._space.evicted_blocks
            return stats

    def _each_done(
        self,
        move: Callable[[list[Piece], Deadline], int],
        grouped: list[list[Piece]],
        deadline: Deadline,
        before: Callable[[list[Piece]], None] | None = None,
    ) -> Iterator[tuple[list[Piece], OSError | None, int]]:
        """Move runs in parallel and yield each as it ends: the run, its error, how many pieces were moved."""
        futures: dict[Future[int], list[Piece]] = {}
        try:
            for run in grouped:
                if before is not None:
                    before(run)
                futures[self._pool.submit(move, run, deadline)] = run
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, OSError):
                    raise error
                yield futures[future], error, 0 if error else future.result()
        finally:
            wait(futures)  # the memory is the caller's again only when the kernel is done with it

    def _sync_sometimes(self) -> None:
        now_s = time.monotonic()
        if now_s - self._synced_at_s > _SYNC_S:
            self._synced_at_s = now_s
            self._pool.submit(self._sync)

    def _sync(self) -> None:
        try:
            self._index.write_day(self._day, self._day_bytes)
            self._data.sync()
            self._index.sync()
        except OSError as error:
            log.warning("disk.not_synced error=%s", error.strerror)


def _seal(frames: Sequence[Frame], run: list[Piece]) -> None:
    for piece in run:
        frames[piece.at].seal()


def _outcome_of(error: OSError | None) -> Outcome:
    if error is None:
        return Outcome.HIT
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT
    log.warning("disk.io_failed error=%s", error)
    return Outcome.ERROR
