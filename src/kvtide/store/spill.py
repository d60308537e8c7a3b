# SPDX-License-Identifier: Apache-2.0
"""Writing blocks down to a lower tier, behind the engine's back.

The queue is bounded in bytes; its blocks are held in DRAM until they are written. What does not fit is
dropped and counted, never waited for. When to spill is a setting: on *publish* (default), on *second use*,
or on *evict*: then the spiller keeps a share of the arena free ahead of time by writing what would leave
next, and whatever must leave faster than that is lost, and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.config import SpillWhen
from kvtide.deadline import Deadline
from kvtide.frame import Frame
from kvtide.keys import Shelf
from kvtide.observe.fault_log import FaultLog
from kvtide.outcome import Outcome
from kvtide.policy.policy import NO_ROW, Rows
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Tier

faults = FaultLog(logging.getLogger(__name__))

_BATCH_BYTES = 32 << 20
_BATCH_FRAMES = 256
_WRITERS = 2  # one seals and hands over frames while the other waits for the device
_FREE_SHARE = 16  # spill on evict keeps 1/16 of the arena free


@dataclass(slots=True)
class SpillStats:
    """Blocks by fate; `queued_bytes` is what waits now."""

    queued_bytes: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    dropped_full: int = 0  # the queue had no room
    dropped_refused: int = 0  # the tier refused: no room, budget spent, timed out, failed
    evicted_unspilled: int = 0  # left DRAM before they were anywhere else


class Spiller:
    """The way down to one lower tier. Methods without a note are called with the DRAM tier's lock held."""

    def __init__(self, dram: DramTier, tier: Tier, when: SpillWhen, queue_bytes_max: int) -> None:
        self.stats = SpillStats()
        self.tier = tier
        self._dram = dram
        self._when = when
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[int] = deque()  # rows, each held once by the queue
        self._is_queued: set[int] = set()
        self._is_below: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)  # rows whose block the tier is known to have
        self._leaving: set[int] = set()  # rows withdrawn from DRAM that only wait to be written
        self._moving: set[int] = set()
        self._work = threading.Condition(dram.lock)
        self._idle = threading.Condition(dram.lock)
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._write_forever, name=f"kvtide-spill-{tier.traits.name}-{i}", daemon=True)
            for i in range(_WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def published(self, rows: list[int]) -> None:
        if self._when == "publish":
            self._enqueue(rows)
        elif self._when == "evict":
            self._work.notify()

    def used(self, rows: Rows) -> None:
        """These were fetched: each has now been used at least twice. What the queue had no room for gets its chance."""
        if self._when != "evict" and not self._below(rows).all():
            self._enqueue(rows.tolist())

    def landed(self, rows: list[int]) -> None:
        """These came up from the tier: they need not go down again."""
        self._below(rows)
        self._is_below[rows] = True

    def evicted(self, rows: list[int]) -> None:
        self.stats.evicted_unspilled += len(rows) - int(self._below(rows).sum())

    def freed(self, rows: list[int]) -> None:
        self._below(rows)
        self._is_below[rows] = False

    def _below(self, rows: Rows | list[int]) -> npt.NDArray[np.bool_]:
        """Which of these the tier is known to have."""
        while len(self._is_below) < self._dram.table.rows:
            self._is_below = np.concatenate((self._is_below, np.zeros_like(self._is_below)))
        return self._is_below.take(np.asarray(rows, np.int64))

    def drain(self, deadline: Deadline) -> bool:
        """Without the lock: wait until everything queued is written. False when the deadline came first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._queue and not self._moving, timeout=min(deadline.left_s, 1e6))

    def clear(self, is_meant: Callable[[Shelf], bool]) -> None:
        """Forget what is queued of these shelves. What is being written now is the caller's to wait for."""
        kept: deque[int] = deque()
        gone: list[int] = []
        for row in self._queue:
            header = self._dram.header[row]
            assert header is not None
            (gone if is_meant(header.shelf) else kept).append(row)
        self._queue = kept
        self._let_go(gone)
        self._idle.notify_all()  # whoever drains may have waited for these only

    def wait_until_written(self, is_meant: Callable[[Shelf], bool], deadline: Deadline) -> None:
        """Without the lock: wait for the writes under way of these shelves."""

        def is_over() -> bool:
            headers = [self._dram.header[row] for row in self._moving]
            return not any(header is not None and is_meant(header.shelf) for header in headers)

        with self._idle:
            self._idle.wait_for(is_over, timeout=deadline.left_s)

    def spill_all(self) -> None:
        """Queue whatever in DRAM is not below (any more), without a bound: before closing."""
        rows = self._dram.table.visible
        rows_below = zip(rows.tolist(), self._below(rows).tolist(), strict=True)
        self._push([r for r, below in rows_below if r not in self._is_queued and not (below and self._still_has(r))])

    def _still_has(self, row: int) -> bool:
        """A block that is much used in DRAM is little used below, and may have left there."""
        address = self._dram.table.address(row)
        return bool(self.tier.lookup(address.shelf, [address.key])[0])

    def close(self) -> None:
        """Without the lock: end the threads. What is still queued is not written."""
        with self._work:
            self._is_closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        with self._work:
            self.stats.dropped_full += len(self._queue)
            self._let_go(list(self._queue))
            self._queue.clear()

    def _enqueue(self, rows: list[int]) -> None:
        rows = [row for row, is_below in zip(rows, self._below(rows).tolist(), strict=True) if not is_below]
        rows = [row for row in rows if row not in self._is_queued]
        # What was cleared while somebody reads it must not come back.
        rows = [row for row, shelf in zip(rows, self._dram.table.shelf[rows].tolist(), strict=True) if shelf != NO_ROW]
        room_bytes = self._queue_bytes_max - self.stats.queued_bytes
        fitting = int(np.searchsorted(np.cumsum(self._dram.table.extent[rows]), room_bytes, side="right"))
        self.stats.dropped_full += len(rows) - fitting
        self._push(rows[:fitting])

    def _push(self, rows: list[int]) -> None:
        if not rows:
            return
        self._dram.hold(np.array(rows, np.int64))
        self._queue.extend(rows)
        self._is_queued.update(rows)
        self.stats.queued_bytes += int(self._dram.table.extent[rows].sum())
        self._work.notify(_WRITERS)

    def _let_go(self, rows: list[int]) -> None:
        if not rows:
            return
        self._is_queued.difference_update(rows)
        self._leaving.difference_update(rows)
        self.stats.queued_bytes -= int(self._dram.table.extent[rows].sum())
        self._dram.release(rows)

    def _write_forever(self) -> None:
        while True:
            with self._work:
                while not self._queue and not self._is_closing:
                    if self._when == "evict":
                        self._reclaim_ahead()
                    if not self._queue:
                        self._work.wait()
                if self._is_closing:
                    return
                rows = self._load()
            frames = [Frame(header, self._dram.memory(row)) for row in rows if (header := self._dram.header[row])]
            assert len(frames) == len(rows)
            outcomes = self._write(frames)
            with self._work:
                self._unload(rows, outcomes)

    def _write(self, frames: list[Frame]) -> list[Outcome]:
        try:
            return self.tier.write(frames)
        except Exception as error:
            # A mistake in a tier must cost its blocks, not this thread: everybody's blocks go down through it.
            faults.warn("store.write_failed", tier=self.tier.traits.name, error=repr(error))
            return [Outcome.ERROR] * len(frames)

    def _reclaim_ahead(self) -> None:
        leaving_bytes = int(self._dram.table.extent[list(self._leaving)].sum())  # free as soon as it is written
        for row in self._dram.reclaim(self._dram.bytes_max // _FREE_SHARE - leaving_bytes):
            if self._below([row])[0]:
                self._dram.release([row])
            else:
                self._leaving.add(row)
                self._is_queued.add(row)
                self._queue.append(row)  # `reclaim` holds it for us
                self.stats.queued_bytes += int(self._dram.table.extent[row])

    def _load(self) -> list[int]:
        rows: list[int] = []
        size = 0
        while self._queue and size < _BATCH_BYTES and len(rows) < _BATCH_FRAMES:
            row = self._queue.popleft()
            rows.append(row)
            size += int(self._dram.table.frame_bytes[row])
        self._moving.update(rows)
        return rows

    def _unload(self, rows: list[int], outcomes: list[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome in (Outcome.HIT, Outcome.PENDING):
                self._is_below[row] = True
                self.stats.spilled_blocks += 1
                self.stats.spilled_bytes += int(self._dram.table.frame_bytes[row])
            else:
                self.stats.dropped_refused += 1
                if row in self._leaving:
                    self.stats.evicted_unspilled += 1
        self._moving.difference_update(rows)
        self._let_go(rows)
        self._idle.notify_all()
