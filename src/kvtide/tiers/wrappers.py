# SPDX-License-Identifier: Apache-2.0
"""Tiers around tiers: what concerns any medium is said once, here, and not inside each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtide.deadline import NEVER, Deadline
from kvtide.frame import Frame
from kvtide.keys import Address, Digest, Key, Shelf
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.tiers.tier import Tier, TierStats


class Wrapper(Tier):
    """Passes everything on to the tier inside."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.traits = tier.traits

    def open(self) -> None:
        self.tier.open()

    def close(self) -> None:
        self.tier.close()

    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        return self.tier.lookup(shelf, keys, deadline)

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        return self.tier.read(addresses, into, deadline)

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        return self.tier.write(frames, deadline)

    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        return self.tier.delete(addresses)

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        return self.tier.clear(namespace=namespace, tenant=tenant, prefix=prefix)

    def stats(self) -> TierStats:
        return self.tier.stats()


class Borrowed(Wrapper):
    """A tier that several stores use and none of them owns: its owner opens it before them and closes it after."""

    def open(self) -> None:
        """The owner did."""

    def close(self) -> None:
        """The owner will."""


class Switch(Wrapper):
    """A tier that an operator can take out of use while everything runs: then it finds and takes nothing.

    Deletes and clears go through in any case: what is to be gone must not come back with the tier.
    """

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.is_bypassed = False

    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        return np.zeros(len(keys), np.int64) if self.is_bypassed else self.tier.lookup(shelf, keys, deadline)

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        return [Outcome.MISS] * len(addresses) if self.is_bypassed else self.tier.read(addresses, into, deadline)

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        return [Outcome.REJECTED] * len(frames) if self.is_bypassed else self.tier.write(frames, deadline)
