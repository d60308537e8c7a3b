# SPDX-License-Identifier: Apache-2.0
"""Saving blocks beside the engine's work: one thread that reserves, copies and publishes.

What waits is bounded, in blocks and in sequences; beyond the bound blocks are dropped and counted. The sequence's
buffer is held until its blocks are copied, so an answer that has ended keeps its memory a moment longer and nothing is
copied twice.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.cache import Cache
from kvtide.deadline import Deadline
from kvtide.engines.transformers.buffer import Buffers, KvBuffer
from kvtide.errors import Closed
from kvtide.keys import Key, Shelf
from kvtide.layout import Layout
from kvtide.observe.fault_log import FaultLog
from kvtide.outcome import Outcome

log = logging.getLogger(__name__)
faults = FaultLog(log)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of one sequence, complete in its buffer."""

    buffer: KvBuffer
    shelf: Shelf
    keys: Sequence[Key]
    first: int  # which block of the prompt the first key is of
    parent: Key


class Saver:
    """`submit` returns at once, from any thread."""

    def __init__(
        self, cache: Cache, layout: Layout, buffers: Buffers, blocks_max: int, sequences_max: int = 16
    ) -> None:
        self.saved = 0  # blocks that are in the cache, by us or by somebody else
        self.dropped = 0  # blocks that are not, for whatever reason
        self._cache = cache
        self._layout = layout
        self._buffers = buffers
        self._blocks_max = blocks_max
        self._sequences_max = sequences_max
        self._waiting: deque[Blocks] = deque()
        self._queued = 0  # blocks that wait or are being copied
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvtide-save", daemon=True)
        self._thread.start()

    def submit(self, blocks: Blocks) -> None:
        with self._changed:
            if self._is_closed or self._is_too_much(blocks):
                self.dropped += len(blocks.keys)
                return
            self._buffers.hold(blocks.buffer)
            self._queued += len(blocks.keys)
            self._waiting.append(blocks)
            self._changed.notify_all()

    def _is_too_much(self, blocks: Blocks) -> bool:
        """Each buffer is the memory of a whole sequence, however few of its blocks wait."""
        held = {id(waiting.buffer) for waiting in self._waiting} | {id(blocks.buffer)}
        return self._queued + len(blocks.keys) > self._blocks_max or len(held) > self._sequences_max

    def flush(self, timeout_s: float) -> bool:
        """Block until everything submitted so far is saved or dropped."""
        deadline = Deadline.after(timeout_s)
        with self._changed:
            while self._queued and not deadline.has_passed:
                self._changed.wait(deadline.left_s)
            return not self._queued

    def close(self, timeout_s: float) -> None:
        """Save what waits, for a bounded time; the rest is dropped."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            while self._waiting:
                blocks = self._waiting.popleft()
                self._buffers.release(blocks.buffer)
                self._queued -= len(blocks.keys)
                self.dropped += len(blocks.keys)
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closed:
                        return
                    self._changed.wait()
                blocks = self._waiting.popleft()
            saved = 0
            try:
                saved = self._save(blocks)
            except Closed:
                log.debug("engine.save_after_close blocks=%d", len(blocks.keys))
            except Exception as error:  # a mistake of ours costs these blocks, and no request
                faults.warn("engine.save_failed", kind=type(error).__name__, error=error)
            self._buffers.release(blocks.buffer)
            with self._changed:
                self.saved += saved
                self.dropped += len(blocks.keys) - saved
                self._queued -= len(blocks.keys)
                self._changed.notify_all()

    def _save(self, blocks: Blocks) -> int:
        """How many of the blocks are in the cache now."""
        reserving = self._cache.reserve(
            blocks.shelf, blocks.keys, self._layout, position=blocks.first, parent=blocks.parent
        )
        self._cache.wait(reserving)
        reservation = reserving.result
        try:
            for number, payload in enumerate(reservation.payloads, blocks.first):
                if payload is not None:
                    blocks.buffer.save(number, payload)
            publishing = self._cache.publish(reservation)
        except BaseException:
            self._cache.abort(reservation)
            raise
        self._cache.wait(publishing)
        return sum(outcome in (Outcome.HIT, Outcome.PENDING) for outcome in publishing.result)
