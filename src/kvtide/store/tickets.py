# SPDX-License-Identifier: Apache-2.0
"""What the store's calls return at once, and what they turn into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.frame import Memory
from kvtide.keys import Key, Shelf
from kvtide.memory.leases import Lease
from kvtide.tiers.tier import Outcome

T = TypeVar("T")


class Ticket(Generic[T]):
    """A result that may still be under way. `Store.poll` and `Store.wait` complete it; nothing else blocks."""

    __slots__ = ("_result", "is_done")

    def __init__(self) -> None:
        self.is_done = False

    @classmethod
    def done(cls, result: T) -> Ticket[T]:
        ticket = cls()
        ticket.complete(result)
        return ticket

    def complete(self, result: T) -> None:
        assert not self.is_done
        self._result = result
        self.is_done = True

    @property
    def result(self) -> T:
        assert self.is_done, "the ticket is not done yet: poll or wait first"
        return self._result


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of `keys` of which every part is somewhere."""

    shelves: tuple[Shelf, ...]
    keys: Sequence[Key]
    blocks: int
    frame_bytes: tuple[npt.NDArray[np.int64], ...]  # of each shelf, for at least `blocks` blocks
    tiers: tuple[npt.NDArray[np.int8], ...]  # likewise: 0 is DRAM, then the lower tiers in order


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a match to fetch. `reasons` says what was left out and why."""

    match: Match
    first_block: int
    end_block: int
    first_page: int  # inside the first block: pages before it are not needed
    reasons: tuple[str, ...] = ()

    @property
    def keys(self) -> Sequence[Key]:
        return self.match.keys[self.first_block : self.end_block]


@dataclass(slots=True, eq=False)
class Fetched:
    """Blocks in DRAM, in order, from the plan's first on. Yours to read until the lease is released."""

    blocks: int
    first_page: int
    lease: Lease | None
    payloads: list[Memory] = field(default_factory=list)
    outcome: Outcome = Outcome.HIT  # otherwise: why the blocks after the last one are not here


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots to fill. An outcome for each key: MISS, here is a slot; HIT, it is there already; PENDING,
    somebody else fills it; REJECTED, no room. `payloads[i]` is the slot of `keys[i]`, or None."""

    shelf: Shelf
    keys: Sequence[Key]
    outcomes: list[Outcome]
    payloads: list[Memory | None]
    rows: list[int]  # parallel to the keys, NO_ROW without a slot
    lease: Lease | None = None
