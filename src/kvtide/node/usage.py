# SPDX-License-Identifier: Apache-2.0
"""What a tenant got out of the cache: tokens that it did not compute, and the seconds they would have taken.

Seconds are known only where engines report how long they take to compute tokens of a namespace; without a report
there is no figure, rather than a guess.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvtide.keys import Digest, Shelf
from kvtide.store import Store
from kvtide.tickets import Fetched

_NAMESPACES_MAX = 1024  # with a price each; beyond it the oldest is forgotten
_MEMORY_TOKENS = 4_000_000  # a price is an average over about so many tokens: engines and their load change


@dataclass(slots=True)
class Price:
    """How long an engine takes for tokens of one namespace."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        if self.tokens > _MEMORY_TOKENS:
            self.tokens /= 2
            self.seconds /= 2


@dataclass(frozen=True, slots=True)
class UsageStats:
    """Since the service started."""

    blocks_served: int
    tokens_served: int
    compute_seconds_saved: float | None  # None: no engine has reported how long it takes


class Usage:
    """The account of one tenant. Any thread may use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._prices: dict[Digest, Price] = {}
        self._blocks = 0
        self._tokens = 0
        self._seconds: float | None = None

    def served(self, shelf: Shelf, fetched: Fetched) -> None:
        """Blocks were leased for reading. Parts of one block count once: the first one."""
        lease, part = fetched.lease, shelf.part
        if lease is None or part.rank or part.group or part.layer_first:
            return
        header = self._store.dram.header[int(lease.rows[0])]
        assert header is not None, "a leased block has a header"
        tokens = header.tokens * fetched.blocks  # all blocks of a shelf are equally long
        with self._lock:
            self._blocks += fetched.blocks
            self._tokens += tokens
            if price := self._prices.get(shelf.namespace):
                self._seconds = (self._seconds or 0.0) + tokens * price.seconds / price.tokens

    def prefilled(self, namespace: Digest, tokens: int, seconds: float) -> None:
        """An engine computed so many tokens in that time."""
        if not tokens or not seconds:
            return
        with self._lock:
            price = self._prices.pop(namespace, None) or Price()
            price.add(tokens, seconds)
            self._prices[namespace] = price  # the one reported last stands last
            if len(self._prices) > _NAMESPACES_MAX:
                del self._prices[next(iter(self._prices))]
            self._seconds = self._seconds or 0.0

    def stats(self) -> UsageStats:
        with self._lock:
            return UsageStats(self._blocks, self._tokens, self._seconds)
