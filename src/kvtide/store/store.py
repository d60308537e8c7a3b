# SPDX-License-Identifier: Apache-2.0
"""The store: the only place that knows the order of tiers.

    keys ── match ──▶ plan ── fetch ──▶ leased slots ── release
    keys ── reserve ──▶ slots to fill ── publish or abort      (then spilled in the background)

No call of the engine-facing interface waits for a medium: `match`, `fetch`, `reserve`, `pin` and `prefetch`
return a ticket at once, `poll` completes those that are due. Only `wait`, `clear`, `drain` and `close` block, and
say so. A cache fault is never a request fault: what cannot be had is simply not in the result.

One lock, the DRAM tier's, guards all state here. It is never held during I/O, copies or checksums.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.config import LeaseSettings, SpillWhen
from kvtide.deadline import Clock, Deadline
from kvtide.errors import ConfigError
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Digest, Key, Keys, Shelf, check_chain, scope_digest
from kvtide.layout import Layout
from kvtide.memory.arena import round_up
from kvtide.memory.leases import Lease, Ledger, Use
from kvtide.outcome import Outcome
from kvtide.policy.policy import Rows
from kvtide.store.fetches import Fetch, Fetches, Wanted
from kvtide.store.saves import Saves
from kvtide.store.spill import Spiller, SpillStats
from kvtide.tenant import Scope, Tenant
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Slots, Ticket, check_pages, slot_bytes
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Tier, TierStats, is_cleared

T = TypeVar("T")

_COMPLETED_MAX = 4096  # tickets remembered for the next poll
_PROBE_ABOVE = 64  # below this many keys, asking for the first one alone saves nothing
_CLEAR_S = 10.0  # how long `clear` waits for writes under way


def _unheard() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Lower:
    """A tier below DRAM, and when blocks go down to it."""

    tier: Tier
    spill_when: SpillWhen = "publish"
    spill_queue_bytes_max: int | None = None  # None: a quarter of the arena


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store did and holds now; counts are since it was opened."""

    matched_blocks: int
    asked_blocks: int
    published_blocks: int
    rejected_blocks: int
    stale_publishes: int
    shared_flights: int
    leases: int
    quarantined_bytes: int
    quarantined_total: int
    pinned_bytes: int
    spill: dict[str, SpillStats]
    tiers: dict[str, TierStats]


class Store:
    """DRAM and the tiers below it as one cache. Open until `close`; every method may be called from any thread."""

    def __init__(
        self,
        dram: DramTier,
        lower: Sequence[Lower] = (),
        *,
        leases: LeaseSettings | None = None,
        tenant: Tenant | None = None,
        lookup_s: float = 0.05,
        clock: Clock = time.monotonic,
    ) -> None:
        """`lookup_s`: how long all lookups of one request together may wait for a busy medium."""
        self.dram = dram
        self.tiers: list[Tier] = [dram, *(each.tier for each in lower)]
        self._settings = leases or LeaseSettings()
        self._tenant = tenant or Tenant()
        self._lookup_s = lookup_s
        self._clock = clock
        self._lock = dram.lock
        self._changed = threading.Condition(dram.lock)
        self._open_tiers()
        self._ledger = Ledger(int(self._settings.quarantine_share * dram.bytes_max))
        self.request_bytes_max = int(self._settings.request_share * dram.bytes_max)
        self._pinned_bytes = 0
        self._completed: deque[Ticket[Any]] = deque(maxlen=_COMPLETED_MAX)
        self._matched = self._asked = self._rejected = 0
        self._spillers = [
            Spiller(dram, each.tier, each.spill_when, each.spill_queue_bytes_max or dram.bytes_max // 4)
            for each in lower
        ]
        self._saves = Saves(dram, self._published)
        self._fetches = Fetches(dram, [each.tier for each in lower], self._landed)
        dram.on_evict = self._evicted
        dram.on_free = self._freed
        self.on_complete: Callable[[], None] = _unheard  # hears of every completed ticket, with the lock held
        self._is_closed = False

    def _open_tiers(self) -> None:
        opened: list[Tier] = []
        try:
            for tier in self.tiers:
                tier.open()
                opened.append(tier)
        except BaseException:
            for tier in opened:
                tier.close()
            raise

    def check_layout(self, layout: Layout) -> None:
        """Raise ConfigError unless every tier can hold blocks of this shape."""
        frame_bytes = HEADER_BYTES + layout.payload_bytes
        for tier in self.tiers:
            if frame_bytes > tier.traits.frame_bytes_max:
                raise ConfigError(
                    f"a block takes {frame_bytes:,} bytes, but {tier.traits.name}.bytes_max leaves room for "
                    f"{tier.traits.frame_bytes_max:,}: raise it, or choose smaller blocks",
                    tier=tier.traits.name,
                )

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Of the tiers that a match tells by number, DRAM first."""
        return tuple(tier.traits.name for tier in self.tiers)

    def open_scope(self, namespace: Digest, name: str = "") -> Ticket[Scope | None]:
        """What keys and shelves are derived from: one for each namespace and customer (a `cache_salt`, say).

        None when it cannot be had: there is no cache for that customer now. An embedded store always has it.
        """
        return Ticket[Scope | None].done(self._tenant.scope(namespace, scope_digest(name)))

    # Finding -----------------------------------------------------------------------------------------------

    def match(self, shelves: Sequence[Shelf], keys: Sequence[Key]) -> Ticket[Match]:
        """Find the longest prefix of `keys` whose block stands on every one of `shelves` (one for each part)."""
        keys = Keys.of(keys)  # the caller's own list may grow while he waits
        deadline = Deadline.after(self._lookup_s)
        found = [self._locate(shelf, keys, deadline) for shelf in shelves]
        blocks = min((_prefix(sizes) for sizes, _ in found), default=0)
        with self._lock:
            self._asked += len(keys)
            self._matched += blocks
        sizes, tiers = tuple(sizes for sizes, _ in found), tuple(tiers for _, tiers in found)
        return Ticket.done(Match(tuple(shelves), keys, blocks, sizes, tiers))

    def _locate(
        self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """The frame bytes of each key (0: nowhere) and the first tier that has it."""
        if len(keys) > _PROBE_ABOVE and not any(tier.lookup(shelf, keys[:1], deadline).any() for tier in self.tiers):
            keys = keys[:1]  # the first block is nowhere, so no other one matters: a miss costs next to nothing
        sizes = self.tiers[0].lookup(shelf, keys)
        tiers = np.zeros(len(keys), np.int8)
        for number, tier in enumerate(self.tiers[1:], 1):
            missing = np.flatnonzero(sizes == 0)
            if not len(missing):
                break
            sizes[missing] = tier.lookup(shelf, [keys[i] for i in missing.tolist()], deadline)
            tiers[missing] = number
        return sizes, tiers

    def plan(self, match: Match, *, first_page: int = 0, pages_per_block: int = 1) -> Plan:
        """Choose what of a match to fetch: all from `first_page` on (those before are in the engine already),
        as far as one request's share of the arena goes."""
        return match.plan(self.request_bytes_max, first_page, pages_per_block)

    # Reading -----------------------------------------------------------------------------------------------

    def fetch(
        self, plan: Plan, shelf: Shelf | None = None, *, deadline_s: float | None = None, holder: int = 0
    ) -> Ticket[Fetched]:
        """Lease the plan's blocks in DRAM, bringing up what is lower. The result holds the blocks, from the
        plan's first on, that were there by the deadline; `release` its lease when they are copied."""
        return self._fetch(plan, shelf, Use.READ, self._settings.lease_s, deadline_s, holder)

    def pin(
        self, plan: Plan, shelf: Shelf | None = None, *, ttl_s: float, deadline_s: float | None = None, holder: int = 0
    ) -> Ticket[Fetched]:
        """Keep the plan's blocks in DRAM for `ttl_s` seconds, or until `release`. All pins together get a share
        of the arena; beyond it nothing is pinned."""
        return self._fetch(plan, shelf, Use.PIN, ttl_s, deadline_s, holder)

    def _fetch(
        self,
        plan: Plan,
        shelf: Shelf | None,
        use: Use,
        lease_s: float,
        deadline_s: float | None,
        holder: int,
        on_fetched: Callable[[], None] = _unheard,
    ) -> Ticket[Fetched]:
        if not plan.match.shelves:
            return Ticket.done(Fetched(0, 0, None))
        wanted = _wanted(plan, shelf)
        planned_bytes = int(slot_bytes(wanted.frame_bytes).sum())
        ticket: Ticket[Fetched] = Ticket()
        deadline = Deadline.after(self._settings.fetch_s if deadline_s is None else deadline_s, self._clock)
        with self._lock:
            self._tidy()
            if not self._may_take(planned_bytes, use, holder):
                self._rejected += len(wanted.keys)
                return Ticket.done(Fetched(0, 0, None, outcome=Outcome.REJECTED))
            if use is Use.PIN:
                self._pinned_bytes += planned_bytes  # until it is known what came

            def on_done(fetch: Fetch) -> None:
                if use is Use.PIN:
                    self._pinned_bytes -= planned_bytes
                self._complete(ticket, self._leased(fetch, plan, use, lease_s, holder))
                on_fetched()

            self._fetches.start(wanted, deadline, holder, on_done)
        return ticket

    def _may_take(self, planned_bytes: int, use: Use, holder: int) -> bool:
        if self._is_closed or not self._ledger.may_take(holder):
            return False
        pinned_bytes = self._pinned_bytes + planned_bytes
        return use is not Use.PIN or pinned_bytes <= self._settings.pinned_share * self.dram.bytes_max

    def match_and_lease(
        self,
        shelves: Sequence[Shelf],
        keys: Sequence[Key],
        *,
        first_page: int = 0,
        pages_per_block: int = 1,
        deadline_s: float | None = None,
        holder: int = 0,
    ) -> Ticket[Leased]:
        """`match`, `plan` and `fetch` of every shelf in one call: what an engine asks for each request.

        `release` each of the fetched ones; what one shelf brought and another did not is among them.
        """
        check_pages(first_page, pages_per_block)
        keys, shelves = Keys.of(keys), tuple(shelves)
        leased = self._lease_here(shelves, keys, first_page, pages_per_block, holder)
        if leased is not None:
            return Ticket.done(leased)
        match = self.match(shelves, keys).result
        plan = self.plan(match, first_page=first_page, pages_per_block=pages_per_block)
        if plan.first_block == plan.end_block:
            return Ticket.done(Leased(match.blocks, plan.first_block, tuple(Fetched(0, 0, None) for _ in shelves)))
        ticket: Ticket[Leased] = Ticket()
        with self._lock:  # nothing lands in between, so the last to arrive sees all of them
            parts: list[Ticket[Fetched]] = []

            def on_done() -> None:
                if len(parts) == len(shelves) and all(part.is_done for part in parts) and not ticket.is_done:
                    fetched = tuple(part.result for part in parts)
                    self._complete(ticket, Leased(match.blocks, plan.first_block, fetched))

            for shelf in shelves:
                lease_s = self._settings.lease_s
                parts.append(self._fetch(plan, shelf, Use.READ, lease_s, deadline_s, holder, on_done))
            on_done()
        return ticket

    def _lease_here(
        self, shelves: tuple[Shelf, ...], keys: Keys, first_page: int, pages_per_block: int, holder: int
    ) -> Leased | None:
        """The whole of a request at once, when DRAM has all that there is of it, and it may be leased."""
        with self._lock:
            self._tidy()
            found = self._prefixes(shelves, keys)
            blocks = min(map(len, found), default=0)
            if blocks == len(keys):
                return self._lease_found(found, blocks, len(keys), first_page, pages_per_block, holder)
        deadline = Deadline.after(self._lookup_s)
        if blocks == 0 or not any(
            len(rows) == blocks and self._is_nowhere_below(shelf, keys[blocks : blocks + 1], deadline)
            for shelf, rows in zip(shelves, found, strict=True)
        ):
            return None
        with self._lock:
            found = self._prefixes(shelves, keys[:blocks])
            return self._lease_found(found, blocks, len(keys), first_page, pages_per_block, holder)

    def _is_nowhere_below(self, shelf: Shelf, keys: Keys, deadline: Deadline) -> bool:
        return not any(tier.lookup(shelf, keys, deadline).any() for tier in self.tiers[1:])

    def _prefixes(self, shelves: tuple[Shelf, ...], keys: Keys) -> list[Rows]:
        return [self.dram.table.find_prefix(shelf, keys) for shelf in shelves]

    def _lease_found(
        self, found: list[Rows], blocks: int, asked: int, first_page: int, pages_per_block: int, holder: int
    ) -> Leased | None:
        first_block, page = divmod(first_page, pages_per_block)
        if first_block >= blocks or min(map(len, found)) < blocks:
            return None
        table = self.dram.table
        found = [rows[first_block:blocks] for rows in found]
        slots = [self.dram.slots(rows) for rows in found]
        sizes = [self._arena_bytes(rows, each) for rows, each in zip(found, slots, strict=True)]
        if sum(sizes) > self.request_bytes_max or not self._may_take(sum(sizes), Use.READ, holder):
            return None
        self._asked += asked
        self._matched += blocks
        expires_at_s = self._clock() + self._settings.lease_s
        fetched = []
        for rows, size, each in zip(found, sizes, slots, strict=True):
            self.dram.hold(rows)
            table.policy.touch(rows)
            fetched.append(self._lease(rows, size, each, page, Use.READ, expires_at_s, holder))
        return Leased(blocks, first_block, tuple(fetched))

    def _leased(self, fetch: Fetch, plan: Plan, use: Use, lease_s: float, holder: int) -> Fetched:
        if not fetch.rows:
            return Fetched(0, 0, None, outcome=fetch.outcome)
        rows = np.array(fetch.rows, np.int64)
        slots = self.dram.slots(rows)
        size, expires_at_s = self._arena_bytes(rows, slots), self._clock() + lease_s
        return self._lease(rows, size, slots, plan.first_page, use, expires_at_s, holder, fetch.outcome)

    def _arena_bytes(self, rows: Rows, slots: Slots) -> int:
        if len(slots.sizes) == 1:
            return len(rows) * round_up(HEADER_BYTES + slots.sizes.item(0))
        return int(self.dram.table.extent.take(rows).sum())

    def _lease(
        self,
        rows: Rows,
        size: int,
        slots: Slots,
        first_page: int,
        use: Use,
        expires_at_s: float,
        holder: int,
        outcome: Outcome = Outcome.HIT,
    ) -> Fetched:
        lease = Lease(use, holder, rows, size, expires_at_s)
        self._ledger.add(lease)
        if use is Use.PIN:
            self._pinned_bytes += size
        for spiller in self._spillers:
            spiller.used(rows)
        return Fetched(len(rows), first_page, lease, slots, outcome)

    def release(self, fetched: Fetched) -> None:
        """Give a fetch's or a pin's lease back. Its payloads may change from now on. Twice is once."""
        with self._lock:
            if fetched.lease is not None and not fetched.lease.is_over:
                self._end(fetched.lease)

    def prefetch(self, plan: Plan, shelf: Shelf | None = None) -> Ticket[int]:
        """Begin to bring the plan's blocks up into DRAM. The result is how many are there or on their way."""
        with self._lock:
            self._tidy()
            if self._is_closed or not plan.match.shelves:
                return Ticket.done(0)
            return Ticket.done(self._fetches.prefetch(_wanted(plan, shelf)))

    # Writing -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        shelf: Shelf,
        keys: Sequence[Key],
        layout: Layout,
        *,
        position: int = 0,
        parent: Key = NO_PARENT,
        holder: int = 0,
    ) -> Ticket[Reservation]:
        """Ask for slots for consecutive blocks of one chain; `position` and `parent` are those of the first.

        Answered at once: a full arena is REJECTED, never waited for. What is given must be published or aborted.
        Raises Rejected for arguments that cannot be a chain.
        """
        keys = tuple(keys)
        check_chain(keys, position, parent)
        with self._lock:
            self._tidy()
            may_take = not self._is_closed and self._ledger.may_take(holder)
            bytes_max = self.request_bytes_max if may_take else 0
            reservation = self._saves.reserve(shelf, keys, layout, position, parent, bytes_max)
            lease = self._saves.lease(reservation, holder, self._clock() + self._settings.lease_s)
            if lease is not None:
                self._ledger.add(lease)
            return Ticket.done(reservation)

    def publish(self, reservation: Reservation, which: Sequence[int] | None = None) -> Ticket[list[Outcome]]:
        """Make filled slots visible: all, or those of the keys at `which`; the rest is aborted.

        An outcome for each key as in the reservation: HIT, it is there; REJECTED, it came too late.
        """
        with self._lock:
            lease = reservation.lease
            if lease is None:
                return Ticket.done(list(reservation.outcomes))
            outcomes = self._saves.publish(reservation, lease, which)
            self._abort(lease)
            return Ticket.done(outcomes)

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back unfilled. Also the way to return a reservation that came too late. Twice is once."""
        with self._lock:
            if reservation.lease is not None:
                self._abort(reservation.lease)

    def _abort(self, lease: Lease) -> None:
        if not lease.is_over:
            self._saves.unreserve(lease)
            self._end(lease)

    def report_prefill(self, namespace: Digest, tokens: int, seconds: float) -> None:
        """The node service keeps account of what its engines save; a store in an engine's own process does not."""

    # Waiting, and being tidy -------------------------------------------------------------------------------

    def poll(self) -> list[Ticket[Any]]:
        """The tickets that were completed since the last poll; only the newest, if nobody polls for long."""
        with self._lock:
            self._tidy()
            completed = list(self._completed)
            self._completed.clear()
            return completed

    def wait(self, ticket: Ticket[Any], timeout_s: float | None = None) -> bool:
        """Block until a ticket is done. For callers that have nothing else to do; engines poll."""
        end = Deadline.after(1e9 if timeout_s is None else timeout_s, self._clock)
        with self._changed:
            while not ticket.is_done and not end.has_passed:
                self._changed.wait(min(end.left_s, self._fetches.next_deadline_s(), 60.0))
                self._tidy()
            if ticket.is_done and ticket in self._completed:
                self._completed.remove(ticket)  # who waited for it knows: no poll need keep its result
        return ticket.is_done

    def next_deadline_s(self) -> float:
        """Seconds until the next fetch under way is over in any case."""
        with self._lock:
            return self._fetches.next_deadline_s()

    def forget(self, holder: int) -> None:
        """A client is dead: everything that it held comes back."""
        with self._lock:
            self._fetches.forget(holder)
            for lease in self._ledger.of(holder):
                self._abort(lease)

    def _tidy(self) -> None:
        self._fetches.expire()
        for lease in self._ledger.expire(self._clock()):
            if lease.use is Use.PIN:
                self._end(lease)
            elif lease.use is Use.WRITE:
                self._saves.unreserve(lease)  # another writer may have the address; the slots stay out of use

    def _end(self, lease: Lease) -> None:
        self._ledger.remove(lease)
        if lease.use is Use.PIN:
            self._pinned_bytes -= lease.size_bytes
        self.dram.release(lease.rows)

    def _complete(self, ticket: Ticket[T], result: T) -> None:
        ticket.complete(result)
        self._completed.append(ticket)
        self._changed.notify_all()
        self.on_complete()

    def _published(self, rows: list[int]) -> None:
        for spiller in self._spillers:
            spiller.published(rows)

    def _landed(self, rows: list[int], number: int) -> None:
        self._spillers[number].landed(rows)

    def _evicted(self, rows: list[int]) -> None:
        for spiller in self._spillers:
            spiller.evicted(rows)

    def _freed(self, rows: list[int]) -> None:
        for spiller in self._spillers:
            spiller.freed(rows)

    # The rest ----------------------------------------------------------------------------------------------

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        """Forget every block of this namespace and this tenant (None: of any) on every tier. Blocks.

        `prefix`: only that block, and those that follow it in their chains. What is under way at this moment
        between engine and tiers may be lost with it, though it follows another one.
        Slots that somebody reads stay his until he releases them, but nobody finds them any more.
        Returns how many blocks were forgotten, copies on several tiers counted each.
        """
        is_meant = partial(is_cleared, namespace=namespace, tenant=tenant)
        with self._lock:
            self._saves.clear(is_meant)
            self._fetches.begin_clear(is_meant)
            for spiller in self._spillers:
                spiller.clear(is_meant)
            count = self.dram.clear(namespace=namespace, tenant=tenant, prefix=prefix)
        try:
            # A write that was under way when the lists above were cleared ends before its tier is.
            deadline = Deadline.after(_CLEAR_S)
            for spiller in self._spillers:
                spiller.wait_until_written(is_meant, deadline)
                count += spiller.tier.clear(namespace=namespace, tenant=tenant, prefix=prefix)
        finally:
            with self._lock:
                self._fetches.end_clear(is_meant)
        return count

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Block until everything that waits to be spilled is below. False when the time was too short."""
        deadline = Deadline.after(timeout_s)
        return all(spiller.drain(deadline) for spiller in self._spillers)

    def stats(self, tiers_shown: Collection[str] | None = None) -> StoreStats:
        """`tiers_shown`: only what these tiers say of themselves (None: all)."""
        shown = [tier for tier in self.tiers if tiers_shown is None or tier.traits.name in tiers_shown]
        tiers = {tier.traits.name: tier.stats() for tier in shown}  # each with its own lock, not under ours
        with self._lock:
            return StoreStats(
                matched_blocks=self._matched,
                asked_blocks=self._asked,
                published_blocks=self._saves.published,
                rejected_blocks=self._rejected + self._saves.rejected,
                stale_publishes=self._saves.stale,
                shared_flights=self._fetches.joined,
                leases=len(self._ledger),
                quarantined_bytes=self._ledger.quarantined_bytes,
                quarantined_total=self._ledger.quarantined_total,
                pinned_bytes=self._pinned_bytes,
                spill={each.tier.traits.name: _copy(each.stats) for each in self._spillers},
                tiers=tiers,
            )

    def close(self, drain_s: float = 30.0) -> None:
        """Spill what is not below yet, for at most `drain_s` seconds, then let go of everything. Twice is once."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if drain_s > 0:
                for spiller in self._spillers:
                    spiller.spill_all()
        try:
            self.drain(drain_s)
        finally:  # also when somebody loses patience with the drain
            self._fetches.close()
            for spiller in self._spillers:
                spiller.close()
            for tier in reversed(self.tiers):
                tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _prefix(sizes: npt.NDArray[np.int64]) -> int:
    """How many blocks from the start are there."""
    missing = np.flatnonzero(sizes == 0)
    return int(missing[0]) if len(missing) else len(sizes)


def _wanted(plan: Plan, shelf: Shelf | None) -> Wanted:
    match = plan.match
    number = 0 if shelf is None else match.shelves.index(shelf)
    blocks = slice(plan.first_block, plan.end_block)
    return Wanted(match.shelves[number], plan.keys, match.frame_bytes[number][blocks], match.tiers[number][blocks])


def _copy(stats: SpillStats) -> SpillStats:
    return SpillStats(**{name: getattr(stats, name) for name in SpillStats.__slots__})
