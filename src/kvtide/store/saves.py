# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way in: slots reserved, filled by whoever asked for them, then published or aborted.

A reserved address belongs to its writer: others are told PENDING. The writer loses the address when his time
is up or when it is cleared, and a publish that comes later is refused; the slots themselves stay his until he
returns them, because he may still be writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtide.frame import HEADER_BYTES, Header
from kvtide.keys import Key, Shelf
from kvtide.layout import Layout
from kvtide.memory.arena import round_up
from kvtide.memory.leases import Lease, Use
from kvtide.outcome import Outcome
from kvtide.policy.policy import NO_ROW
from kvtide.tickets import Reservation
from kvtide.tiers.dram import DramTier


class Saves:
    """All reservations of a store. Called with the DRAM tier's lock held."""

    def __init__(self, dram: DramTier, on_published: Callable[[list[int]], None]) -> None:
        self.published = 0  # blocks
        self.rejected = 0
        self.stale = 0
        self._dram = dram
        self._on_published = on_published
        self._reserved: dict[Shelf, dict[Key, int]] = {}  # being filled, and in which row

    def reserve(
        self, shelf: Shelf, keys: Sequence[Key], layout: Layout, position: int, parent: Key, bytes_max: int
    ) -> Reservation:
        """Slots for those keys that nobody has or fills, as far as `bytes_max` and the arena go."""
        outcomes = self._presence(shelf, keys)
        wanted = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.MISS]
        frame_bytes = HEADER_BYTES + layout.payload_bytes
        count = min(len(wanted), bytes_max // round_up(frame_bytes))
        taken = self._dram.take(frame_bytes, count, self._dram.pool_of(shelf)) if count else []
        rows = [NO_ROW] * len(keys)
        if taken:
            reserved = self._reserved.setdefault(shelf, {})
            headers, tokens, shape = self._dram.header, layout.block_tokens, layout.shape
            payload_bytes = layout.payload_bytes
            for i, row in zip(wanted, taken, strict=False):
                key, before = keys[i], keys[i - 1] if i else parent
                headers[row] = Header(shelf, key, before, position + i, tokens, shape, payload_bytes)
                rows[i] = reserved[key] = row
        for i in wanted[len(taken) :]:
            outcomes[i] = Outcome.REJECTED
        self.rejected += len(wanted) - len(taken)
        return Reservation(shelf, keys, outcomes, self._dram.slots(np.array(taken, np.int64)), rows)

    def lease(self, reservation: Reservation, holder: int, expires_at_s: float) -> Lease | None:
        """The lease on a reservation's slots; None when it has none."""
        rows, keys = np.array(reservation.rows, np.int64), reservation.keys
        if (rows == NO_ROW).any():
            given = np.flatnonzero(rows != NO_ROW)
            rows, keys = rows[given], [keys[i] for i in given.tolist()]
        if not len(rows):
            return None
        lease = Lease(Use.WRITE, holder, rows, int(self._dram.table.extent[rows].sum()), expires_at_s)
        lease.shelf, lease.keys, lease.generations = reservation.shelf, keys, self._dram.generation[rows]
        reservation.lease = lease
        return lease

    def publish(self, reservation: Reservation, lease: Lease, which: Sequence[int] | None) -> list[Outcome]:
        """Make filled slots visible, all or those at `which`. The lease goes on: the caller ends it."""
        is_late = lease.is_over or lease.is_quarantined
        # An address that was lost since it was reserved, to a clear or to another writer, is not there any more.
        reserved = {} if is_late else self._reserved.get(reservation.shelf, {})
        assert is_late or (self._dram.generation[lease.rows] == lease.generations).all(), "a slot changed hands"
        if which is None and [*map(reserved.get, reservation.keys)] == reservation.rows:  # mostly: all of them
            header = self._dram.header[reservation.rows[0]]
            assert header is not None
            parents = [header.parent, *reservation.keys[:-1]]
            return self._show(reservation.shelf, reservation.rows, reservation.keys, parents)
        return self._publish_some(reservation, reserved, range(len(reservation.rows)) if which is None else which)

    def _publish_some(self, reservation: Reservation, reserved: dict[Key, int], which: Sequence[int]) -> list[Outcome]:
        outcomes = list(reservation.outcomes)
        headers: dict[int, Header] = {}
        for i in which:
            if (row := reservation.rows[i]) == NO_ROW:
                continue
            if reserved.get(reservation.keys[i]) == row:
                header = self._dram.header[row]
                assert header is not None
                headers[i] = header
            else:
                outcomes[i] = Outcome.REJECTED
                self.stale += 1
        if headers:
            rows = [reservation.rows[i] for i in headers]
            keys, parents = zip(*((header.key, header.parent) for header in headers.values()), strict=True)
            for i, outcome in zip(headers, self._show(reservation.shelf, rows, keys, parents), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _show(self, shelf: Shelf, rows: list[int], keys: Sequence[Key], parents: Sequence[Key]) -> list[Outcome]:
        """HIT where the block is there now, whoever brought it; REJECTED where DRAM has no more shelves."""
        visible = self._dram.publish(shelf, rows, keys, parents)
        self.published += len(visible)
        self._on_published(visible)
        if len(visible) == len(rows):
            return [Outcome.HIT] * len(rows)
        is_there = self._dram.table.find(shelf, keys) != NO_ROW
        return [Outcome.HIT if there else Outcome.REJECTED for there in is_there.tolist()]

    def unreserve(self, lease: Lease) -> None:
        """The addresses of a lease for writing are free for others. Does nothing for other leases."""
        if lease.shelf is None or (reserved := self._reserved.get(lease.shelf)) is None:
            return
        rows = lease.rows.tolist()
        if len(reserved) == len(rows) and [*map(reserved.get, lease.keys)] == rows:  # mostly: nobody else's
            del self._reserved[lease.shelf]
            return
        for key, row in zip(lease.keys, rows, strict=True):
            if reserved.get(key) == row:
                del reserved[key]
        if not reserved:
            del self._reserved[lease.shelf]

    def clear(self, is_meant: Callable[[Shelf], bool]) -> None:
        """What is being filled on these shelves shall not become visible."""
        self._reserved = {shelf: rows for shelf, rows in self._reserved.items() if not is_meant(shelf)}

    def _presence(self, shelf: Shelf, keys: Sequence[Key]) -> list[Outcome]:
        """HIT where a block is in DRAM, PENDING where somebody fills it, MISS otherwise."""
        is_here = self._dram.table.find(shelf, keys) != NO_ROW
        reserved = self._reserved.get(shelf)
        if not reserved and not is_here.any():  # a prompt that nobody has seen
            return [Outcome.MISS] * len(keys)
        reserved = reserved or {}
        return [
            Outcome.HIT if here else Outcome.PENDING if key in reserved else Outcome.MISS
            for here, key in zip(is_here.tolist(), keys, strict=True)
        ]
