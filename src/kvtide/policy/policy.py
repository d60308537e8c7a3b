# SPDX-License-Identifier: Apache-2.0
"""What a tier asks of an eviction policy.

A policy speaks of *rows*: small numbers that the tier's table gives to blocks and uses again after a
block has left. So a policy can keep columns instead of objects, and one call serves a whole request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Held = npt.NDArray[np.int32]

NO_ROW = -1

# Pool 0, all that it has: who gives where nobody has a pool of his own.
EVERYBODY: Final = ((0, np.iinfo(np.int64).max),)


class Policy(Protocol):
    """A pure object: same calls, same answers. Its owner serialises the calls."""

    def insert(
        self,
        rows: Rows,
        parents: Rows,
        sizes: npt.NDArray[np.int64],
        clocks: npt.NDArray[np.int64] | None = None,
        pools: int | npt.NDArray[np.int16] = 0,
    ) -> None:
        """Blocks entered, first block of a chain first; each with the row of the block before it, or NO_ROW.

        `clocks` says when they were last used, when a medium remembers it; otherwise it is now. `pools`: to whose
        share they belong (see `policy.pools`); a block and its parent belong to the same.
        """

    def link(self, children: list[int], parent: int) -> None:
        """The parent of these blocks has entered after them. A link that would close a circle is not made."""

    def touch(self, rows: Rows) -> None:
        """These blocks of one chain were used, first block first."""

    def remove(self, rows: Rows) -> tuple[Rows, Rows]:
        """These blocks left for reasons of their own. Returns who lost a parent by it, and which: (rows, parents)."""

    def evict(self, need_bytes: int, held: Held, givers: Iterable[tuple[int, int]] = EVERYBODY) -> list[int]:
        """Choose and remove blocks of at least `need_bytes` together, or none at all: [].

        `givers` are asked in turn until it is enough: a pool, and how many bytes it gives at most. A pool is left
        when the block whose turn it is would exceed that. `held[row] > 0` protects a block. A block whose children
        stay is never chosen.
        """

    def parents(self, rows: Rows) -> Rows:
        """The rows of these blocks' parents, NO_ROW for those without one here."""

    def clocks(self, rows: Rows) -> Rows:
        """When these blocks were last used, in the policy's own time: lower is longer ago."""
