# SPDX-License-Identifier: Apache-2.0
"""Who holds which slots, and until when.

A *lease* lets its holder use slots: read published ones, fill reserved ones, or keep blocks pinned. The
holder is a number: one for each client, so that what a dead client held comes back in one step.

A lease past its time is not taken away: its holder may be asleep in the middle of a copy, and would tear
whatever stood in the slot next. It is *quarantined* instead: the slots stay out of use until the holder
returns them or is known to be dead. A holder with too much in quarantine gets nothing new, so a client
that leaks leases starves itself and not the others. Pins have no copy behind them and simply end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtide.keys import Key, Shelf

Rows = npt.NDArray[np.int64]


class Use(Enum):
    """What a lease is for."""

    READ = "read"
    WRITE = "write"
    PIN = "pin"


@dataclass(slots=True, eq=False)
class Lease:
    """Slots that a holder may use until `expires_at_s`, and must return in any case."""

    use: Use
    holder: int
    rows: Rows
    size_bytes: int
    expires_at_s: float
    number: int = 0
    is_quarantined: bool = False
    is_over: bool = False
    # Of a lease for writing: what the rows are for, and their generations when they were given.
    shelf: Shelf | None = None
    keys: Sequence[Key] = ()
    generations: Rows | None = None


class Ledger:
    """All leases of a store. No clock and no locks of its own."""

    def __init__(self, quarantine_bytes_max: int) -> None:
        self.quarantined_bytes = 0
        self.quarantined_total = 0
        self._quarantine_bytes_max = quarantine_bytes_max
        self._leases: dict[int, Lease] = {}
        self._quarantine: dict[int, int] = {}  # holder to bytes
        self._last_number = 0
        self._next_expiry_s = math.inf

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def may_take(self, holder: int) -> bool:
        return self._quarantine.get(holder, 0) <= self._quarantine_bytes_max

    def add(self, lease: Lease) -> None:
        self._last_number += 1
        lease.number = self._last_number
        self._leases[lease.number] = lease
        self._next_expiry_s = min(self._next_expiry_s, lease.expires_at_s)

    def remove(self, lease: Lease) -> None:
        """The holder returned it, or is dead. The caller frees the slots."""
        del self._leases[lease.number]
        lease.is_over = True
        if lease.is_quarantined:
            self.quarantined_bytes -= lease.size_bytes
            self._quarantine[lease.holder] -= lease.size_bytes
            if not self._quarantine[lease.holder]:
                del self._quarantine[lease.holder]

    def of(self, holder: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.holder == holder]

    def expire(self, now_s: float) -> list[Lease]:
        """The leases whose time has passed since the last call; those that are no pins are now in quarantine."""
        if now_s < self._next_expiry_s:
            return []
        running = [lease for lease in self._leases.values() if not lease.is_quarantined]
        due = [lease for lease in running if lease.expires_at_s <= now_s]
        self._next_expiry_s = min((x.expires_at_s for x in running if x.expires_at_s > now_s), default=math.inf)
        for lease in due:
            if lease.use is not Use.PIN:
                lease.is_quarantined = True
                self.quarantined_total += 1
                self.quarantined_bytes += lease.size_bytes
                self._quarantine[lease.holder] = self._quarantine.get(lease.holder, 0) + lease.size_bytes
        return due
