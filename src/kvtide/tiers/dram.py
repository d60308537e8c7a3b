# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier: slots of the arena, and which block stands in which.

A slot is a frame's memory: 4 KiB of header area and the payload, page aligned, so that a raw frame moves
to and from any medium in one vectored call. The header area is filled when the frame leaves DRAM.

A row goes through: *taken* (somebody fills it: an engine, or a read from a lower tier), *published*
(visible to lookups), *withdrawn* (invisible, but somebody still holds it), free. A slot is used again
only when its row is free, so nobody's memory changes while he holds the row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.deadline import NEVER, Deadline
from kvtide.errors import ConfigError
from kvtide.frame import HEADER_BYTES, Frame, Header, Memory
from kvtide.keys import Address, Digest, Key, Shelf
from kvtide.memory.arena import PAGE_BYTES, Arena, round_up
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW, Policy, Rows
from kvtide.tiers.space import Space
from kvtide.tiers.table import BlockTable
from kvtide.tiers.tier import Outcome, Tier, TierStats, Traits


class DramTier(Tier):
    """Every method may be called from any thread. The store combines several under `lock`."""

    def __init__(self, bytes_max: int, *, policy: Policy | None = None, huge_pages: bool = True) -> None:
        if bytes_max < HEADER_BYTES + PAGE_BYTES:
            raise ConfigError(f"dram.bytes_max is {bytes_max}, which holds not one block: give it at least some MiB")
        self.bytes_max = bytes_max // PAGE_BYTES * PAGE_BYTES
        self.traits = Traits(
            name="dram",
            durable=False,
            shared=False,
            enumerable=True,
            checksummed=False,
            alignment=1,
            frame_bytes_max=self.bytes_max,
        )
        self.lock = threading.RLock()
        self.table = BlockTable(policy or LeafLru())
        self.header: list[Header | None] = []
        self.generation: list[int] = []  # counts the uses of a row, so that a late publish is known as late
        self.on_evict: Callable[[int], None] = _unheard  # hears of each block before it leaves
        self.on_free: Callable[[int], None] = _unheard
        self._huge_pages = huge_pages
        self._space = Space(self.table, on_evict=lambda row: self.on_evict(row), on_free=self._forget)
        self._space.extents.grow(self.bytes_max)
        self._stats = TierStats(bytes_max=self.bytes_max)
        self._is_open = False

    def open(self) -> None:
        self.arena = Arena(self.bytes_max, huge_pages=self._huge_pages)
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.arena.close()

    # Rows, for the store ---------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        return self._space.extents.free_bytes

    def take(self, frame_bytes: int, header: Header | None = None) -> int:
        """A row with a slot for a frame, held once by the caller; NO_ROW at once when nothing can leave.

        The header may follow, but must be there before `publish`.
        """
        extent = round_up(frame_bytes)
        with self.lock:
            offset = self._space.take(extent)
            if offset < 0:
                return NO_ROW
            row = self.table.take_row(offset, extent, frame_bytes)
            if row == len(self.header):
                self.header.append(header)
                self.generation.append(0)
            else:
                self.header[row] = header
            # What another tenant left behind the payload's end must not travel with this frame.
            self.arena.memory[offset + frame_bytes : offset + extent] = 0
            return row

    def publish(self, row: int) -> bool:
        """Make a taken row visible and let go of it. False, and the slot is free, if the block is here already."""
        with self.lock:
            header = self.header[row]
            assert header is not None
            done = self.table.row(header.address) == NO_ROW and self.table.insert(row, header.address, header.parent)
            self.release([row])
            return done

    def hold(self, rows: Rows) -> None:
        np.add.at(self.table.held, rows, 1)

    def release(self, rows: Rows | list[int]) -> None:
        """Let go of rows. An invisible row that nobody holds any more is free."""
        with self.lock:
            np.subtract.at(self.table.held, rows, 1)
            held, shelf = self.table.held[rows], self.table.shelf[rows]
            assert (held >= 0).all()
            for i in np.flatnonzero((held == 0) & (shelf == NO_ROW)).tolist():
                self._space.free(int(rows[i]))

    def withdraw(self, rows: list[int]) -> None:
        """Make published blocks invisible now; each slot is free when its last holder lets go."""
        with self.lock:
            self.table.hide(rows)
            for row in rows:
                if not self.table.held[row]:
                    self._space.free(row)

    def memory(self, row: int) -> Memory:
        """The frame's memory: header area and payload."""
        offset = int(self.table.offset[row])
        return self.arena.memory[offset : offset + int(self.table.frame_bytes[row])]

    def payload(self, row: int) -> Memory:
        return self.memory(row)[HEADER_BYTES:]

    def reclaim(self, free_bytes: int) -> list[int]:
        """Withdraw the blocks that would leave next until that much is free or leaving; the caller holds them."""
        with self.lock:
            missing = free_bytes - self.free_bytes
            rows = self.table.policy.evict(missing, self.table.held) if missing > 0 else []
            self.hold(np.array(rows, np.int64))
            self.table.hide(rows, is_evicted=True)
            self._space.evicted_blocks += len(rows)
            return rows

    def _forget(self, row: int) -> None:
        self.header[row] = None
        self.generation[row] += 1
        self.on_free(row)

    # The tier interface ----------------------------------------------------------------------------------

    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        with self.lock:
            rows = self.table.find(shelf, keys)
            return np.where(rows == NO_ROW, 0, self.table.frame_bytes[rows])

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        outcomes = []
        for address, target in zip(addresses, into, strict=True):
            outcome = Outcome.TIMEOUT if deadline.has_passed else self._read_one(address, target)
            outcomes.append(outcome)
            with self.lock:
                self._stats.count("read", outcome)
        return outcomes

    def _read_one(self, address: Address, target: Memory) -> Outcome:
        with self.lock:
            row = self.table.row(address)
            if row == NO_ROW:
                return Outcome.MISS
            header = self.header[row]
            assert header is not None
            rows = np.array([row])
            self.hold(rows)
            self.table.policy.touch(rows)
        np.copyto(target[HEADER_BYTES : header.frame_bytes], self.payload(row))
        self.release(rows)
        Frame(header, target).seal()
        with self.lock:
            self._stats.read_bytes += header.frame_bytes
        return Outcome.HIT

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        outcomes = []
        for frame in frames:
            outcome = Outcome.TIMEOUT if deadline.has_passed else self._write_one(frame)
            outcomes.append(outcome)
            with self.lock:
                self._stats.count("write", outcome)
        return outcomes

    def _write_one(self, frame: Frame) -> Outcome:
        with self.lock:
            if self.table.row(frame.address) != NO_ROW:
                return Outcome.HIT
            row = self.take(frame.header.frame_bytes, frame.header)
        if row == NO_ROW:
            return Outcome.REJECTED
        np.copyto(self.payload(row), frame.payload)
        with self.lock:
            self._stats.written_bytes += frame.header.frame_bytes
            self.publish(row)
        return Outcome.HIT

    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        with self.lock:
            rows = [self.table.row(address) for address in addresses]
            self.withdraw([row for row in dict.fromkeys(rows) if row != NO_ROW])
            return [Outcome.MISS if row == NO_ROW else Outcome.HIT for row in rows]

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None) -> int:
        with self.lock:
            rows = self.table.of(namespace, tenant)
            self.withdraw(rows)
            return len(rows)

    def stats(self) -> TierStats:
        with self.lock:
            outcomes = {op: dict(counts) for op, counts in self._stats.outcomes.items()}
            return TierStats(
                self.table.blocks,
                self._space.used_bytes,
                self.bytes_max,
                self._stats.read_bytes,
                self._stats.written_bytes,
                self._space.evicted_blocks,
                outcomes,
            )


def _unheard(row: int) -> None:
    """Nobody wants to know."""
