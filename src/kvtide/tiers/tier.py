# SPDX-License-Identifier: Apache-2.0
"""The one interface of every medium that holds frames.

Batch first, because every medium amortises. Calls may block, so the store makes them from its own
threads; `lookup` of a local medium answers from memory. Reads land in memory that the caller owns, and
nothing unverified is ever reported as a hit. A fault of the medium is an Outcome, never an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.deadline import NEVER, Deadline
from kvtide.frame import Frame
from kvtide.keys import Address, Digest, Key, Shelf
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.policy.pools import PoolUse


@dataclass(frozen=True, slots=True)
class Traits:
    """How media differ, as data: nobody asks a tier for its class."""

    name: str
    durable: bool  # survives the process
    shared: bool  # other nodes see what this one writes
    enumerable: bool  # can clear by namespace or tenant
    checksummed: bool  # frames are sealed on the way in and verified on the way out
    alignment: int  # memory and lengths that avoid a staging copy
    frame_bytes_max: int


@dataclass(slots=True)
class TierStats:
    """Counts since open, and what is there now."""

    blocks: int = 0
    bytes_used: int = 0
    bytes_max: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    outcomes: dict[str, dict[str, int]] = field(default_factory=lambda: {"read": {}, "write": {}})
    pools: list[PoolUse] = field(default_factory=list)  # by number; none where a medium has no shares

    def count(self, op: str, outcome: Outcome) -> None:
        counts = self.outcomes[op]
        counts[outcome.value] = counts.get(outcome.value, 0) + 1


class Tier(ABC):
    """A place that holds frames. Content-addressed: writing what is there already is a success."""

    traits: Traits

    @abstractmethod
    def open(self) -> None:
        """Make ready, or raise ConfigError that says what to do. Called once, before anything else."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was begun and let go of everything. Calling it again does nothing."""

    @abstractmethod
    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        """The frame bytes of each key, 0 where it is not here. A lookup cannot fail, it can only miss."""

    @abstractmethod
    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        """Read whole frames into the caller's memory, each piece at least as long as `lookup` said.

        On HIT the memory holds a verified frame, on anything else zeros or what it held before: never
        unverified bytes. What the medium has not begun by the deadline is TIMEOUT; what it has begun is
        waited for, because the memory is not the caller's again before it ends.
        """

    @abstractmethod
    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        """Store frames; the calling thread seals those that are not sealed yet, while others are under way.

        The frames' memory must not change until this returns. HIT: stored, now or earlier.
        """

    @abstractmethod
    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        """Forget these. HIT: it was here; MISS: it was not."""

    @abstractmethod
    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        """Forget every block of this namespace and this tenant (None: of any). Returns how many.

        With `prefix`, only the block of that key and all that follow it in their chains, on every shelf that is
        meant. A block whose parent is missing here is known to follow that parent, but nobody before it.
        Kept apart from `delete` so that a medium can drop a tenant without naming each block of it.
        After it returned no crash brings them back; raises MediumFailed when that cannot be promised.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """A snapshot that the caller owns."""


def is_cleared(shelf: Shelf, namespace: Digest | None, tenant: Digest | None) -> bool:
    """Does a `clear` with these arguments mean this shelf?"""
    return namespace in (None, shelf.namespace) and tenant in (None, shelf.tenant)
