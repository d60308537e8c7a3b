# SPDX-License-Identifier: Apache-2.0
"""Who has which share of one medium, how much of it is in use, and who gives when there is no room.

A *pool* is whoever has a share: a tenant, several of them, or a scope with a quota of its own. Pool 0 is
everybody else; it reserves nothing and may take everything.

A reserve is what nobody else can take away. It is no fence around free bytes: those may be used by anybody,
because a pool below its reserve gets room back from those above theirs, and as long as all reserves together
fit the medium there is always somebody above. Blocks that somebody holds may delay it until he lets go. A
reserve is kept to the byte but given out by the block: a block that reaches below its pool's reserve does not
leave for others, so reserves are best multiples of the blocks' size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvtide.deadline import Clock
from kvtide.errors import ConfigError
from kvtide.keys import Digest, Shelf

POOLS_MAX = 1 << 15  # a block's pool is an int16 in the columns of table and policy
_ALL = np.iinfo(np.int64).max

# (tenant, scope) or (tenant, None) to the number of a pool. A scope's own entry goes before its tenant's.
Members = Mapping[tuple[Digest, Digest | None], int]


@dataclass(frozen=True, slots=True)
class Quota:
    """What nobody else can take from a pool, and what it may take at most (None: everything)."""

    bytes_reserved: int = 0
    bytes_max: int | None = None

    def __post_init__(self) -> None:
        if self.bytes_reserved < 0 or (self.bytes_max is not None and self.bytes_max < self.bytes_reserved):
            raise ConfigError(
                f"a quota cannot reserve {self.bytes_reserved} of at most {self.bytes_max} bytes: "
                "reserve 0 or more, and no more than the pool may take"
            )


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A pool at one moment. `byte_seconds`: bytes in use, summed over the time they were, since the medium opened."""

    bytes_used: int
    bytes_reserved: int
    bytes_max: int | None
    byte_seconds: float
    evicted_blocks: int


class Pools:
    """The pools of one medium: `quotas` by their number, the first one being pool 0's, and who belongs to which.

    No locks: its medium has one. A changing amount costs the same however many pools there are.
    """

    def __init__(
        self,
        quotas: Sequence[Quota] = (Quota(),),
        members: Members = MappingProxyType({}),
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if len(quotas) > POOLS_MAX:
            raise ConfigError(f"{len(quotas)} quotas for one medium are too many: give {POOLS_MAX} or fewer")
        assert quotas[0] == Quota(), "pool 0 is everybody who has none: it neither reserves nor is bounded"
        assert all(0 <= pool < len(quotas) for pool in members.values())
        self.count = len(quotas)
        self._members = dict(members)
        self._clock = clock
        self._used: npt.NDArray[np.int64] = np.zeros(self.count, np.int64)
        # In use by blocks that were given up already, but that somebody still holds: they protect nothing.
        self._leaving: npt.NDArray[np.int64] = np.zeros(self.count, np.int64)
        self._reserved: npt.NDArray[np.int64] = np.zeros(self.count, np.int64)
        self._max: npt.NDArray[np.int64] = np.full(self.count, _ALL, np.int64)
        self._evicted: npt.NDArray[np.int64] = np.zeros(self.count, np.int64)
        self._byte_seconds: npt.NDArray[np.float64] = np.zeros(self.count, np.float64)  # up to `_since_s`
        self._since_s: npt.NDArray[np.float64] = np.full(self.count, clock(), np.float64)
        for pool, quota in enumerate(quotas):
            self._set(pool, quota)

    def pool_of(self, shelf: Shelf) -> int:
        members = self._members
        if not members:
            return 0
        pool = members.get((shelf.tenant, shelf.scope))
        return members.get((shelf.tenant, None), 0) if pool is None else pool

    @property
    def tenants(self) -> int:
        """How many have a share here, scopes not counted; at least one."""
        return len({tenant for tenant, _ in self._members}) or 1

    # Quotas ----------------------------------------------------------------------------------------------

    def set_quota(self, pool: int, quota: Quota) -> None:
        """Takes effect when blocks are taken next: nothing leaves because of it alone."""
        assert pool != 0, "pool 0 is everybody who has none: it neither reserves nor is bounded"
        self._set(pool, quota)

    def _set(self, pool: int, quota: Quota) -> None:
        self._reserved[pool] = quota.bytes_reserved
        self._max[pool] = _ALL if quota.bytes_max is None else quota.bytes_max

    @property
    def bytes_reserved(self) -> int:
        """Of all pools together. It is the caller's duty that the medium is at least as large."""
        return int(self._reserved.sum())

    def room_bytes(self, pool: int) -> int:
        """How much more a pool may take before its own bound; negative after the bound was lowered below its use."""
        return self._max.item(pool) - self._used.item(pool)

    def excess_bytes(self, pool: int) -> int:
        """How much a pool has above a bound that was lowered. Goes down as it takes: its own blocks leave for that."""
        return max(0, -self.room_bytes(pool))

    # Use -------------------------------------------------------------------------------------------------

    def used_bytes(self, pool: int) -> int:
        return self._used.item(pool)

    def add(self, pool: int, size_bytes: int) -> None:
        """A place was taken for this pool; it counts until `sub`, whether a block stands in it or not."""
        now_s, used = self._clock(), self._used.item(pool)
        self._byte_seconds[pool] += used * (now_s - self._since_s.item(pool))
        self._since_s[pool] = now_s
        self._used[pool] = used + size_bytes
        assert used + size_bytes >= 0

    def sub(self, pool: int, size_bytes: int) -> None:
        self.add(pool, -size_bytes)

    def leave(self, pool: int, size_bytes: int) -> None:
        """Blocks were given up, but their places are still held. Negative: the places are free now."""
        self._leaving[pool] += size_bytes
        assert self._leaving[pool] >= 0

    def count_evicted(self, pool: int, blocks: int) -> None:
        self._evicted[pool] += blocks

    def byte_seconds(self, now_s: float | None = None) -> npt.NDArray[np.float64]:
        """For each pool the bytes in use, integrated over time: exact, as they change in steps."""
        ages_s = (self._clock() if now_s is None else now_s) - self._since_s
        return self._byte_seconds + self._used * ages_s

    def use(self) -> list[PoolUse]:
        """All pools, by their number."""
        columns = (self._used, self._reserved, self._max, self.byte_seconds(), self._evicted)
        return [
            PoolUse(used, reserved, None if bytes_max == _ALL else bytes_max, byte_seconds, evicted)
            for used, reserved, bytes_max, byte_seconds, evicted in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]

    # Who gives -------------------------------------------------------------------------------------------

    def givers(self, taker: int | None) -> Iterator[tuple[int, int]]:
        """Who makes room for `taker` (None: for nobody, ahead of time), and at most how many bytes each.

        The pool furthest above its reserve first, each down to its reserve; in the end the taker itself, whose own
        blocks may always leave for it. Found one by one, because mostly the first one has enough.
        """
        over = self._used - self._leaving - self._reserved
        while (most_bytes := over.item(pool := int(over.argmax()))) > 0:
            if taker is not None and over.item(taker) == most_bytes:
                pool = taker  # nobody gives for one who has as much
            over[pool] = 0
            yield pool, most_bytes
        if taker is not None and (own_bytes := self._used.item(taker)):
            yield taker, own_bytes

    def protected(self, lost_bytes: int) -> npt.NDArray[np.bool_]:
        """The pools that would fall below their reserve if they lost that much."""
        over = self._used - self._leaving - self._reserved
        is_protected: npt.NDArray[np.bool_] = (self._reserved > 0) & (over < lost_bytes)
        return is_protected
