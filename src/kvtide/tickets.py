# SPDX-License-Identifier: Apache-2.0
"""What the calls of a store, or of a client of one, return at once, and what they turn into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.errors import Rejected
from kvtide.keys import Key, Shelf
from kvtide.layout import Memory
from kvtide.memory.arena import PAGE_BYTES
from kvtide.memory.leases import Lease
from kvtide.outcome import Outcome

T = TypeVar("T")


def slot_bytes(frame_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What frames take in an arena."""
    return -(-frame_bytes // PAGE_BYTES) * PAGE_BYTES


def check_pages(first_page: int, pages_per_block: int) -> None:
    """Raise Rejected unless these can be pages of a prompt."""
    if not 0 <= first_page < 1 << 32 or not 1 <= pages_per_block < 1 << 32:
        raise Rejected(f"page {first_page} of blocks of {pages_per_block} pages: give 0 or more, and 1 or more")


class Ticket(Generic[T]):
    """A result that may still be under way. `poll` and `wait` complete it; nothing else blocks."""

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

    def plan(self, bytes_max: int, first_page: int = 0, pages_per_block: int = 1) -> Plan:
        """All of it from `first_page` on, as far as `bytes_max` goes."""
        check_pages(first_page, pages_per_block)
        first_block, page = divmod(first_page, pages_per_block)
        first_block = min(first_block, self.blocks)
        sizes = [slot_bytes(each[first_block : self.blocks]) for each in self.frame_bytes]
        total = np.cumsum(np.sum(sizes, axis=0))  # of all parts: they are one request
        end = min(self.blocks, first_block + int(np.searchsorted(total, bytes_max, side="right")))
        reasons = () if end == self.blocks else (f"{self.blocks - end} blocks beyond the request's share of DRAM",)
        return Plan(self, first_block, end, page if end > first_block else 0, reasons)


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


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Where payloads stand in an arena. Numbers, so that they can be handed to whoever maps the same arena."""

    arena: Memory
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]  # one for each, or a single one for all

    def views(self) -> list[Memory]:
        arena = self.arena
        ends = (self.offsets + self.sizes).tolist()
        return [arena[start:end] for start, end in zip(self.offsets.tolist(), ends, strict=True)]


NO_SLOTS = Slots(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(eq=False)
class Fetched:
    """Blocks in DRAM, in order, from the plan's first on. Yours to read until the lease is released."""

    blocks: int
    first_page: int
    lease: Lease | None
    slots: Slots = NO_SLOTS
    outcome: Outcome = Outcome.HIT  # otherwise: why the blocks after the last one are not here

    @cached_property
    def payloads(self) -> list[Memory]:
        return self.slots.views()


@dataclass(frozen=True, slots=True, eq=False)
class Leased:
    """A match, and what of it is leased in DRAM: one Fetched for each shelf."""

    matched_blocks: int
    first_block: int
    fetched: tuple[Fetched, ...]

    @property
    def blocks(self) -> int:
        """How many blocks, from `first_block` on, are here with every part."""
        return min((each.blocks for each in self.fetched), default=0)


@dataclass(eq=False)
class Reservation:
    """Slots to fill. An outcome for each key: MISS, here is a slot; HIT, it is there already; PENDING,
    somebody else fills it; REJECTED, no room. `payloads[i]` is the slot of `keys[i]`, or None."""

    shelf: Shelf
    keys: Sequence[Key]
    outcomes: list[Outcome]
    slots: Slots  # of those keys that got one, in their order
    rows: list[int]  # parallel to the keys, NO_ROW without a slot
    lease: Lease | None = None

    @cached_property
    def payloads(self) -> list[Memory | None]:
        given: list[Memory | None] = [*self.slots.views()]
        if len(given) == len(self.outcomes):  # mostly: all of them
            return given
        views = iter(given)
        return [next(views) if outcome is Outcome.MISS else None for outcome in self.outcomes]
