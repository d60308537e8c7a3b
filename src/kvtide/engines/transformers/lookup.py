# SPDX-License-Identifier: Apache-2.0
"""What the cache has of a prompt: from tokens to leased blocks, in steps that each return at once.

Whatever the cache raises is a miss, and logged: it is never the request's fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvtide.cache import Cache
from kvtide.engines.transformers.generation import Reuse
from kvtide.errors import Closed
from kvtide.keys import Digest, Key, Shelf, chain
from kvtide.layout import Layout
from kvtide.observe.fault_log import FaultLog
from kvtide.tickets import Fetched, Match, Ticket

log = logging.getLogger(__name__)
faults = FaultLog(log)

T = TypeVar("T")


class Lookup:
    """Of one prompt. `poll` until it is done; then `release`, when the blocks are copied."""

    def __init__(
        self,
        cache: Cache | None,
        namespace: Digest,
        scope: str,
        prompt: Sequence[int],
        layout: Layout,
        recompute_s: Callable[[int], float],
    ) -> None:
        """`recompute_s`: how long computing so many tokens would take; no fetch is waited for longer than that."""
        self.shelf: Shelf | None = None  # None: there is no cache for this request
        self.keys: list[Key] = []  # of all whole blocks of the prompt
        self.root: Key | None = None
        self.blocks = 0
        self.payloads: Sequence[Any] = ()
        self._cache = cache
        self._prompt = prompt
        self._layout = layout
        self._recompute_s = recompute_s
        self._match: Match | None = None
        self._fetched: Fetched | None = None
        self._next: Callable[[Any], Ticket[Any] | None] = self._scope_opened
        self._ticket: Ticket[Any] | None = None  # None: there is nothing more to come
        if cache is not None:
            self._ticket = self._try(lambda: cache.open_scope(namespace, scope))

    def poll(self) -> bool:
        """Go on as far as possible. Whether it is done."""
        if self._cache is not None and self._ticket is not None and not self._ticket.is_done:
            self._try(self._cache.poll)
        while self._ticket is not None and self._ticket.is_done:
            self._ticket = self._try(partial(self._next, self._ticket.result))
        return self._ticket is None

    def wait(self, timeout_s: float) -> None:
        """Block until the step under way is over. For an engine that has nothing else to do."""
        if self._cache is not None and self._ticket is not None:
            self._try(partial(self._cache.wait, self._ticket, timeout_s))

    def _try(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except Closed:
            log.debug("engine.lookup_after_close")
        except Exception as error:
            faults.warn("engine.lookup_failed", kind=type(error).__name__, error=error)
        self._ticket = None
        return None

    def _scope_opened(self, scope: Any) -> Ticket[Any] | None:
        if scope is None:
            return None
        assert self._cache is not None
        self.shelf, self.root = scope.shelf(), scope.root
        self.keys = chain(scope.root, self._prompt, self._layout.block_tokens)
        # The last token is computed in any case: somebody has to say what comes after it.
        wanted = self.keys[: (len(self._prompt) - 1) // self._layout.block_tokens]
        if not wanted:
            return None
        self._next = self._matched
        return self._cache.match([self.shelf], wanted)

    def _matched(self, match: Match) -> Ticket[Any] | None:
        if not match.blocks:
            return None
        assert self._cache is not None
        plan = self._cache.plan(match)
        if plan.first_block == plan.end_block:
            return None
        self._match = match
        self._next = self._arrived
        deadline_s = self._recompute_s(len(plan.keys) * self._layout.block_tokens)
        return self._cache.fetch(plan, deadline_s=deadline_s)

    def _arrived(self, fetched: Fetched) -> None:
        self._fetched = fetched
        payloads, size = fetched.payloads, self._layout.payload_bytes
        # Of another size is a block that is not ours, though somebody saved it under our key.
        self.blocks = next((i for i, payload in enumerate(payloads) if len(payload) != size), len(payloads))
        self.payloads = payloads[: self.blocks]

    def reuse(self) -> Reuse:
        """How many tokens came, and where each block was when it was found."""
        if not self.blocks:
            return Reuse()
        assert self._match is not None and self._cache is not None
        by_tier: dict[str, int] = {}
        names = self._cache.tier_names
        for number in self._match.tiers[0][: self.blocks].tolist():
            name = names[number] if number < len(names) else str(number)
            by_tier[name] = by_tier.get(name, 0) + self._layout.block_tokens
        return Reuse(self.blocks * self._layout.block_tokens, by_tier)

    def release(self) -> None:
        """Give the lease back; also of a lookup that nobody needs any more, once it is done. Twice is once."""
        self.payloads = ()
        if self._fetched is not None and self._cache is not None:
            self._try(partial(self._cache.release, self._fetched))
            self._fetched = None
