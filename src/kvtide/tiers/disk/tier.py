# SPDX-License-Identifier: Apache-2.0
"""The disk tier: many blocks in one preallocated file, bounded, and still there after kill -9.

Order of a write: room is made (blocks that leave are erased from the index), the frame is written, its
index record is written, and only then a lookup sees it. A process that dies in between leaves at worst a
record or a frame without its counterpart, and neither can be taken for a block: reads verify the frame
against the address that was asked for.

The data file grows step by step and its space is used again in place; it never shrinks while open, so a full
cache writes to extents that the filesystem has long allocated.

Locking: `_lock` guards table, room and budget and is never held during I/O on frames. A row that is being read
or written is held, so neither its place nor its record can change meanwhile.
"""

from __future__ import annotations

import copy
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.deadline import NEVER, Deadline
from kvtide.errors import Closed, ConfigError, Damaged, MediumFailed, Truncated
from kvtide.frame import Frame, Header, verify
from kvtide.keys import NO_PARENT, Address, Digest, Key, Shelf
from kvtide.layout import Memory
from kvtide.observe.fault_log import FaultLog
from kvtide.outcome import Outcome
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW, Policy
from kvtide.policy.pools import Pools, Quota
from kvtide.tiers.disk import recovery
from kvtide.tiers.disk.budget import DailyBudget, utc_day
from kvtide.tiers.disk.data import DataFile, Piece, runs
from kvtide.tiers.disk.files import ALIGNMENT, RawFile, supports_direct
from kvtide.tiers.disk.folder import DATA, INDEX, Folder
from kvtide.tiers.disk.index import IndexFile, block_records
from kvtide.tiers.disk.room import BYTES_MIN, Room, frame_bytes_max, index_step_bytes
from kvtide.tiers.tier import Tier, TierStats, Traits, is_cleared

faults = FaultLog(logging.getLogger(__name__))

_PASSING = {errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT}  # say nothing of the block itself
_LOOKUP_WAIT_S = 0.05
_SYNC_S = 5.0
_CLEAR_S = 30.0  # how long a clear waits for writes under way

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
        today: Callable[[], int] = utc_day,
        pools: Pools | None = None,
    ) -> None:
        if bytes_max < BYTES_MIN:
            raise ConfigError(f"disk.bytes_max is {bytes_max}, which holds not one block: give it {BYTES_MIN} or more")
        self.bytes_max = bytes_max // ALIGNMENT * ALIGNMENT
        self.traits = Traits(
            name="disk",
            durable=True,
            shared=False,
            enumerable=True,
            checksummed=True,
            alignment=ALIGNMENT,
            frame_bytes_max=frame_bytes_max(self.bytes_max),
        )
        self._path = folder
        self._policy = policy
        self._pools = pools or Pools()
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
        self._index = IndexFile(self._path / INDEX, self._open_file, step_bytes=index_step_bytes(self.bytes_max))
        undo.callback(self._index.close)
        self._index.check_head()
        self._data = DataFile(self._path / DATA, partial(self._open_file, direct=self.is_direct))
        undo.callback(self._data.close)
        self._room = Room(self._index, self._data, self.bytes_max, self._policy or LeafLru(), self._pools)
        self.table = self._room.table
        self.recovered = self._room.recovered
        self._clock = self.recovered.clock
        self._pending: dict[Address, int] = {}  # being written, and in which row; NO_ROW: cleared meanwhile
        self._pending_parents: dict[Address, Key] = {}
        self._budget = DailyBudget(self._daily_max, self._index, self._today)
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
                self._budget.write_down()
                self._data.sync()
                self._index.sync()
            except OSError as error:  # what is on the medium is as sound as after a crash
                faults.warn("disk.not_synced", folder=self._path, error=error.strerror)

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
        # The lock may be held while the files grow or a record is written, and on a sick device that can take long.
        # An engine is waiting: after a moment the answer is a miss.
        if not self._lock.acquire(timeout=min(_LOOKUP_WAIT_S, deadline.left_s)):
            return np.zeros(len(keys), np.int64)
        try:
            if self._state != "open":
                return np.zeros(len(keys), np.int64)
            rows = self.table.find(shelf, keys)
            return np.where(rows == NO_ROW, 0, self.table.frame_bytes[rows])
        finally:
            self._lock.release()

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        with self._call():
            return self._read(addresses, into, deadline)

    def _read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline) -> list[Outcome]:
        outcomes = [Outcome.MISS] * len(addresses)
        pieces = self._hold_for_reading(addresses, into)
        # The pool only moves bytes; this thread verifies what has arrived while the rest is under way.
        for run, error, whole in self._each_done(self._read_run, runs(pieces), deadline):
            for i, piece in enumerate(run):
                if error is not None and len(run) > 1:  # one bad sector must not cost its neighbours
                    piece_error, is_whole = self._read_alone(piece, deadline)
                else:
                    piece_error, is_whole = error, i < whole
                outcomes[piece.at] = self._verified(piece, addresses[piece.at], piece_error, is_whole=is_whole)
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
            raise _Late
        return self._data.read(run)

    def _read_alone(self, piece: Piece, deadline: Deadline) -> tuple[OSError | None, bool]:
        try:
            return None, self._read_run([piece], deadline) == 1
        except OSError as error:
            return error, False

    def _verified(self, piece: Piece, address: Address, error: OSError | None, *, is_whole: bool) -> Outcome:
        outcome = _outcome_of(error)
        if error is None:
            try:
                if not is_whole:
                    raise Truncated("the data file ends before the frame does")
                verify(piece.memory, address)
            except Damaged as damage:
                outcome = Outcome.CORRUPT
                faults.warn("disk.damaged", kind=damage.kind, offset=piece.offset)
        if outcome in (Outcome.CORRUPT, Outcome.ERROR):
            piece.memory[:] = 0
        with self._lock:
            if outcome is Outcome.HIT:
                self._stats.read_bytes += len(piece.memory)
            elif outcome is Outcome.CORRUPT:
                self._room.hide(piece.row)
            if outcome is Outcome.ERROR and error is not None and error.errno not in _PASSING:
                self._room.set_aside(piece.row)
            else:
                self._room.let_go(piece.row)
        return outcome

    # Writing -----------------------------------------------------------------------------------------------

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        with self._call():
            return self._write(frames, deadline)

    def _write(self, frames: Sequence[Frame], deadline: Deadline) -> list[Outcome]:
        outcomes = [Outcome.REJECTED] * len(frames)
        pieces = self._make_room(frames, outcomes, deadline)
        # This thread seals the next frames while the pool writes those before.
        seal = partial(_seal, frames)
        unsettled = {piece.at: piece for piece in pieces}
        try:
            for run, error, _ in self._each_done(self._write_run, runs(pieces), deadline, before=seal):
                error = error or self._write_records(run, frames)
                for piece in run:
                    del unsettled[piece.at]
                self._settle(run, frames, error, outcomes)
        finally:  # a frame that cannot be sealed ends this call, but must not leave anything behind
            if unsettled:
                self._settle(list(unsettled.values()), frames, OSError(errno.EINVAL, "not written"), outcomes)
        with self._lock:
            for outcome in outcomes:
                self._stats.count("write", outcome)
        self._sync_sometimes()
        return outcomes

    def _make_room(self, frames: Sequence[Frame], outcomes: list[Outcome], deadline: Deadline) -> list[Piece]:
        """Take a row and a place for each frame that needs one; `outcomes` says why others get none."""
        pieces: list[Piece] = []
        with self._lock:
            outcomes[:] = [self._refusal(frame, deadline) for frame in frames]
            welcome = [at for at, outcome in enumerate(outcomes) if outcome is Outcome.MISS]
            if len(welcome) > 1:
                self._room.prepare(frames[at].header for at in welcome)
            busy = {address.shelf for address in self._pending}
            for at in welcome:
                frame = frames[at]
                outcomes[at] = self._refusal(frame, deadline)  # the same frame may stand in the batch twice
                if outcomes[at] is not Outcome.MISS:
                    continue
                row = self._room.take(frame.header, busy)
                if row == NO_ROW:
                    outcomes[at] = Outcome.REJECTED
                    continue
                self._pending[frame.address] = row
                self._pending_parents[frame.address] = frame.header.parent
                busy.add(frame.header.shelf)
                self._budget.spend(frame.header.frame_bytes)
                pieces.append(Piece(at, row, int(self.table.offset[row]), frame.memory[: frame.header.frame_bytes]))
            self._room.erase_freed()  # before any of the freed places is written to
        return pieces

    def _refusal(self, frame: Frame, deadline: Deadline) -> Outcome:
        """Why this frame is not to be written; MISS: no reason, it is welcome."""
        if self.table.row(frame.address) != NO_ROW:
            return Outcome.HIT
        if frame.address in self._pending:
            return Outcome.PENDING
        if frame.header.frame_bytes > self.traits.frame_bytes_max:
            return Outcome.REJECTED
        if deadline.has_passed:  # before a block leaves for it
            return Outcome.TIMEOUT
        if not self._budget.allows(frame.header.frame_bytes):
            return Outcome.THROTTLED
        return Outcome.MISS

    def _write_run(self, run: list[Piece], deadline: Deadline) -> int:
        if deadline.has_passed:
            raise _Late
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
            records["position"] = [header.position for header in headers]
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
                del self._pending_parents[header.address]
                if outcome is Outcome.TIMEOUT:
                    self._budget.refund(header.frame_bytes)
                outcomes[piece.at] = Outcome.REJECTED if is_cleared else outcome
                if outcomes[piece.at] is Outcome.HIT:
                    is_visible = self.table.insert(header.shelf, [piece.row], [header.key], [header.parent])
                    assert is_visible, "a shelf with a write under way lost its number"
                    self._stats.written_bytes += len(piece.memory)
                self._room.let_go(piece.row)
            self._settled.notify_all()

    # The rest ----------------------------------------------------------------------------------------------

    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        with self._call(), self._lock:
            rows = [self.table.row(address) for address in addresses]
            self._room.forget([row for row in dict.fromkeys(rows) if row != NO_ROW])
            self._room.forget_aside(set(addresses).__contains__)
        return [Outcome.MISS if row == NO_ROW else Outcome.HIT for row in rows]

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        with self._call():
            with self._lock:
                rows, writing = self._meant(namespace, tenant, prefix)
                self._room.forget(rows)
                # Nobody knows whom a block follows that was set aside: with a prefix, too, it is better gone.
                self._room.forget_aside(lambda address: is_cleared(address.shelf, namespace, tenant))
                # A write that is under way will not become visible; but it may be about to say so in the index, so
                # its end is waited for before the index is synced.
                for address in writing:
                    self._pending[address] = NO_ROW
                is_settled = self._settled.wait_for(
                    lambda: not any(self._pending.get(each) == NO_ROW for each in writing), timeout=_CLEAR_S
                )
                is_erased = self._room.erase_freed()
            self._confirm_clear(is_erased and is_settled)
            return len(rows)

    def _meant(
        self, namespace: Digest | None, tenant: Digest | None, prefix: Key | None
    ) -> tuple[list[int], list[Address]]:
        """What a clear with these arguments is about: rows of blocks, and addresses that are being written."""
        rows = self.table.of(namespace, tenant, prefix)
        under_way = {address for address in self._pending if is_cleared(address.shelf, namespace, tenant)}
        if prefix is None or not under_way:
            return rows, list(under_way)
        gone = {self.table.address(row) for row in rows} | {Address(each.shelf, prefix) for each in under_way}
        writing: list[Address] = []
        while more := [
            each for each in under_way if each in gone or Address(each.shelf, self._pending_parents[each]) in gone
        ]:
            under_way.difference_update(more)
            writing += more
            for address in more:  # it may be the link to blocks that are here
                followers = self.table.of(namespace, tenant, address.key)
                gone |= {address, *map(self.table.address, followers)}
                rows += followers
        return list(dict.fromkeys(rows)), writing

    def _confirm_clear(self, is_done: bool) -> None:
        try:
            self._index.sync()
        except OSError:
            is_done = False
        if not is_done:
            raise MediumFailed(
                f"{self._path / INDEX} could not be written: the blocks are out of reach now, but may be back after a "
                "restart; mend the device and clear again, or delete the folder",
                folder=str(self._path),
            )

    def set_quota(self, pool: int, quota: Quota) -> None:
        """Change a pool's share; blocks leave for it as others are written. All reserves together must fit the bound,
        less what the index takes: `traits.frame_bytes_max`."""
        with self._lock:
            self._pools.set_quota(pool, quota)

    def stats(self) -> TierStats:
        with self._lock:
            stats = copy.deepcopy(self._stats)
            stats.blocks = self.table.blocks
            stats.bytes_used = self._room.space.used_bytes
            stats.evicted_blocks = self._room.space.evicted_blocks
            stats.pools = self._pools.use()
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
                futures[self._begin(move, run, deadline)] = run
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, OSError):
                    raise error
                yield futures[future], error, 0 if error else future.result()
        finally:
            wait(futures)  # the memory is the caller's again only when the kernel is done with it

    def _begin(self, move: Callable[[list[Piece], Deadline], int], run: list[Piece], deadline: Deadline) -> Future[int]:
        try:
            return self._pool.submit(move, run, deadline)
        except RuntimeError:  # the interpreter is exiting and takes no more work: do it here, blocks are to be kept
            future: Future[int] = Future()
            try:
                future.set_result(move(run, deadline))
            except OSError as error:
                future.set_exception(error)
            return future

    def _sync_sometimes(self) -> None:
        now_s = time.monotonic()
        if now_s - self._synced_at_s > _SYNC_S:
            self._synced_at_s = now_s
            with suppress(RuntimeError):  # the interpreter is exiting; close syncs
                self._pool.submit(self._sync)

    def _sync(self) -> None:
        try:
            self._budget.write_down()
            self._data.sync()
            self._index.sync()
        except OSError as error:
            faults.warn("disk.not_synced", folder=self._path, error=error.strerror)


class _Late(OSError):
    """The deadline passed before the device was asked. (Not TimeoutError: a device may raise that, too.)"""


def _seal(frames: Sequence[Frame], run: list[Piece]) -> None:
    for piece in run:
        frames[piece.at].seal()


def _outcome_of(error: OSError | None) -> Outcome:
    if error is None:
        return Outcome.HIT
    if isinstance(error, _Late):
        return Outcome.TIMEOUT
    faults.warn("disk.io_failed", error=error)
    return Outcome.ERROR
