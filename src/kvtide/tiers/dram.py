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
from kvtide.errors import Closed, ConfigError
from kvtide.frame import HEADER_BYTES, Frame, Header
from kvtide.keys import Address, Digest, Key, Shelf
from kvtide.layout import Memory
from kvtide.memory.arena import PAGE_BYTES, Arena, round_up
from kvtide.outcome import Outcome
from kvtide.policy.leaf_lru import LeafLru
from kvtide.policy.policy import NO_ROW, Policy, Rows
from kvtide.policy.pools import Pools, Quota
from kvtide.tickets import Slots
from kvtide.tiers.runs import Runs
from kvtide.tiers.space import Space
from kvtide.tiers.table import BlockTable
from kvtide.tiers.tier import Tier, TierStats, Traits

_ONE = np.int32(1)  # of the column's own type: numpy's fast path, seventeen times as fast


class DramTier(Tier):
    """Every method may be called from any thread. The store combines several under `lock`."""

    def __init__(
        self,
        bytes_max: int,
        *,
        policy: Policy | None = None,
        huge_pages: bool = True,
        pools: Pools | None = None,
        is_private_to_write: bool = False,
    ) -> None:
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
        self.table = BlockTable(policy or LeafLru(), Runs())
        self.header: list[Header | None] = []
        self.generation: npt.NDArray[np.int64] = np.zeros(1024, np.int64)  # counts how often a row was used again
        self.on_evict: Callable[[list[int]], None] = _unheard  # hears of blocks before they leave
        self.on_free: Callable[[list[int]], None] = _unheard
        self._huge_pages = huge_pages
        self._is_private_to_write = is_private_to_write  # see Arena
        self._space = Space(self.table, on_evict=lambda rows: self.on_evict(rows), on_free=self._forget, pools=pools)
        self._space.extents.grow(self.bytes_max)
        self._stats = TierStats(bytes_max=self.bytes_max)
        self._state = "new"

    def open(self) -> None:
        assert self._state == "new", "a tier is opened once"
        self.arena = Arena(self.bytes_max, huge_pages=self._huge_pages, is_private_to_write=self._is_private_to_write)
        self._state = "open"

    def close(self) -> None:
        with self.lock:
            if self._state == "open":
                self._state = "closed"
                self.arena.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise Closed("the DRAM tier is not open")

    # Rows, for the store ---------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        return self._space.extents.free_bytes

    def pool_of(self, shelf: Shelf) -> int:
        """Whose share blocks on this shelf are to be taken from."""
        return self._space.pools.pool_of(shelf)

    def bytes_max_of(self, shelf: Shelf) -> int:
        """What blocks of this shelf's pool may take together: a block above it can never be saved."""
        with self.lock:
            pools = self._space.pools
            pool = pools.pool_of(shelf)
            return min(self.bytes_max, pools.room_bytes(pool) + pools.used_bytes(pool))

    def set_quota(self, pool: int, quota: Quota) -> None:
        """Change a pool's share; blocks leave for it as others are taken. All reserves together must fit the arena."""
        with self.lock:
            self._space.pools.set_quota(pool, quota)

    def take(self, frame_bytes: int, count: int = 1, pool: int = 0) -> list[int]:
        """Rows with slots for frames of that size, each held once by the caller: `count`, or fewer, at once, when
        no more can leave, or when the pool may have no more. Each needs its `header` before it is published, and is
        published on a shelf of that pool."""
        extent = round_up(frame_bytes)
        with self.lock:
            offsets = self._space.take(extent, count, pool)
            rows = self.table.take_rows(offsets, extent, frame_bytes, pool)
            if len(self.header) < self.table.rows:
                self.header += [None] * (self.table.rows - len(self.header))
            while len(self.generation) < self.table.rows:
                self.generation = np.concatenate((self.generation, np.zeros_like(self.generation)))
            if extent != frame_bytes:
                for offset in offsets:  # what another tenant left behind the payload's end must not travel with it
                    self.arena.memory[offset + frame_bytes : offset + extent] = 0
            return rows

    def publish(self, shelf: Shelf, rows: list[int], keys: Sequence[Key], parents: Sequence[Key]) -> list[int]:
        """Make taken rows visible. Returns which are: a block that is here already is not published twice.
        The caller still holds all of them."""
        with self.lock:
            if self._space.pools.count > 1:
                assert (self.table.pool[rows] == self.pool_of(shelf)).all(), "slots were taken from another pool"
            twins = self.table.find(shelf, keys)
            if (twins != NO_ROW).any():
                new = np.flatnonzero(twins == NO_ROW).tolist()
                rows, keys, parents = [rows[i] for i in new], [keys[i] for i in new], [parents[i] for i in new]
            return rows if rows and self.table.insert(shelf, rows, keys, parents) else []

    def hold(self, rows: Rows) -> None:
        np.add.at(self.table.held, rows, _ONE)

    def release(self, rows: Rows | list[int]) -> None:
        """Let go of rows. An invisible row that nobody holds any more is free."""
        rows = np.asarray(rows, np.int64)
        with self.lock:
            np.subtract.at(self.table.held, rows, _ONE)
            held, is_invisible = self.table.held.take(rows), self.table.shelf.take(rows) == NO_ROW
            assert held.min(initial=0) >= 0, "a row was let go by one who did not hold it"
            if is_invisible.any():
                gone = np.flatnonzero(is_invisible & (held == 0)).tolist()
                if gone:  # each once, though somebody may have held it twice
                    self._space.free(list(dict.fromkeys(int(rows[i]) for i in gone)))

    def withdraw(self, rows: list[int]) -> None:
        """Make published blocks invisible now; each slot is free when its last holder lets go."""
        with self.lock:
            self._space.hide(rows)
            self._space.free([row for row, held in zip(rows, self.table.held[rows].tolist(), strict=True) if not held])

    def memory(self, row: int) -> Memory:
        """The frame's memory: header area and payload."""
        offset = int(self.table.offset[row])
        return self.arena.memory[offset : offset + int(self.table.frame_bytes[row])]

    def payload(self, row: int) -> Memory:
        return self.memory(row)[HEADER_BYTES:]

    def slots(self, rows: Rows) -> Slots:
        """Where the payloads of many rows stand: what an engine copies to and from."""
        offsets, sizes = self.table.offset.take(rows), self.table.frame_bytes.take(rows)
        offsets += HEADER_BYTES
        if len(sizes) > 1 and (sizes == sizes[0]).all():
            sizes = sizes[:1]  # mostly: one number stands for all
        sizes -= HEADER_BYTES
        return Slots(self.arena.memory, offsets, sizes)

    def reclaim(self, free_bytes: int) -> list[int]:
        """Withdraw the blocks that would leave next until that much is free or leaving; the caller holds them.
        Nobody takes here, so no pool gives what it has reserved."""
        with self.lock:
            return self._space.reclaim(free_bytes - self.free_bytes)

    def _forget(self, rows: list[int]) -> None:
        self.generation[rows] += 1
        self.on_free(rows)

    # The tier interface ----------------------------------------------------------------------------------

    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        with self.lock:
            if self._state != "open":
                return np.zeros(len(keys), np.int64)
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
            self._check_open()
            row = self.table.row(address)
            if row == NO_ROW:
                return Outcome.MISS
            header = self.header[row]
            assert header is not None
            if len(target) < header.frame_bytes:  # another frame than the one that was looked up
                return Outcome.MISS
            rows = np.array([row])
            self.hold(rows)
            self.table.policy.touch(rows)
            payload = self.payload(row)  # stays valid should the tier be closed meanwhile
        np.copyto(target[HEADER_BYTES : header.frame_bytes], payload)
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
        header = frame.header
        with self.lock:
            self._check_open()
            if self.table.row(frame.address) != NO_ROW:
                return Outcome.HIT
            rows = self.take(header.frame_bytes, pool=self.pool_of(header.shelf))
            if not rows:
                return Outcome.REJECTED
            self.header[rows[0]] = header
            payload = self.payload(rows[0])
        np.copyto(payload, frame.payload)
        with self.lock:
            self._stats.written_bytes += header.frame_bytes
            self.publish(header.shelf, rows, [header.key], [header.parent])
            self.release(rows)
            is_here = self.table.row(frame.address) != NO_ROW  # by us or by somebody else; else no shelf is left
        return Outcome.HIT if is_here else Outcome.REJECTED

    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        with self.lock:
            self._check_open()
            rows = [self.table.row(address) for address in addresses]
            self.withdraw([row for row in dict.fromkeys(rows) if row != NO_ROW])
            return [Outcome.MISS if row == NO_ROW else Outcome.HIT for row in rows]

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        with self.lock:
            self._check_open()
            rows = self.table.of(namespace, tenant, prefix)
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
                self._space.pools.use(),
            )


def _unheard(rows: list[int]) -> None:
    """Nobody wants to know."""
