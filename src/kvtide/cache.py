# SPDX-License-Identifier: Apache-2.0
"""What an engine needs of a cache, and no more: a store in its own process, or a client of the node service.

    keys ── match ──▶ plan ── fetch ──▶ leased slots ── release        (or all of it at once: match_and_lease)
    keys ── reserve ──▶ slots to fill ── publish or abort

Only `wait` and `close` block. Everything else returns at once, a ticket where there is something to wait for.
A cache fault is never a request fault: what cannot be had is simply not in the result.
`kvtide.testing.store_suite` has the facts that every cache passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvtide.keys import NO_PARENT, Digest, Key, Shelf
from kvtide.layout import Layout
from kvtide.outcome import Outcome
from kvtide.tenant import Scope
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Ticket


class Cache(Protocol):
    """Every method may be called from any thread.

    After `close`, `release`, `abort`, `poll` and `wait` do no harm; the others raise Closed, or give nothing.
    """

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Of the tiers that a match tells by number, DRAM first."""

    def open_scope(self, namespace: Digest, name: str = "") -> Ticket[Scope | None]:
        """What keys and shelves are derived from: one for each namespace and customer (a `cache_salt`, say).
        None: there is no cache for that customer now."""

    def match(self, shelves: Sequence[Shelf], keys: Sequence[Key]) -> Ticket[Match]:
        """Find the longest prefix of `keys` whose block stands on every one of `shelves` (one for each part)."""

    def plan(self, match: Match, *, first_page: int = 0, pages_per_block: int = 1) -> Plan:
        """Choose what of a match to fetch: all from `first_page` on, as far as one request's share of DRAM goes."""

    def match_and_lease(
        self,
        shelves: Sequence[Shelf],
        keys: Sequence[Key],
        *,
        first_page: int = 0,
        pages_per_block: int = 1,
        deadline_s: float | None = None,
    ) -> Ticket[Leased]:
        """`match`, `plan` and `fetch` of every shelf in one call. `release` each of the fetched ones."""

    def fetch(self, plan: Plan, shelf: Shelf | None = None, *, deadline_s: float | None = None) -> Ticket[Fetched]:
        """Lease the plan's blocks in DRAM; the result holds those, from the first on, that were there in time."""

    def pin(
        self, plan: Plan, shelf: Shelf | None = None, *, ttl_s: float, deadline_s: float | None = None
    ) -> Ticket[Fetched]:
        """Keep the plan's blocks in DRAM for `ttl_s` seconds, or until `release`."""

    def release(self, fetched: Fetched) -> None:
        """Give a fetch's or a pin's lease back: its payloads may change from now on. Twice is once."""

    def prefetch(self, plan: Plan, shelf: Shelf | None = None) -> Ticket[int]:
        """Begin to bring the plan's blocks up into DRAM. The result is how many are there or on their way."""

    def reserve(
        self,
        shelf: Shelf,
        keys: Sequence[Key],
        layout: Layout,
        *,
        position: int = 0,
        parent: Key = NO_PARENT,
    ) -> Ticket[Reservation]:
        """Ask for slots for consecutive blocks of one chain; `position` and `parent` are those of the first.
        Raises Rejected for arguments that cannot be a chain."""

    def publish(self, reservation: Reservation, which: Sequence[int] | None = None) -> Ticket[list[Outcome]]:
        """Make filled slots visible: all, or those of the keys at `which`; the rest is aborted."""

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back unfilled. Twice is once."""

    def report_prefill(self, namespace: Digest, tokens: int, seconds: float) -> None:
        """Tell how long the engine took to compute so many tokens, where somebody keeps account of what is saved."""

    def poll(self) -> list[Ticket[Any]]:
        """The tickets that were completed since the last poll."""

    def wait(self, ticket: Ticket[Any], timeout_s: float | None = None) -> bool:
        """Block until a ticket is done. For callers that have nothing else to do; engines poll."""

    def close(self) -> None:
        """Let go of everything. Twice is once."""
