# SPDX-License-Identifier: Apache-2.0
"""Publishing to a share group: a tenant's blocks, copied into the arena that others may read.

The group has a secret of its own, so its keys are other keys; whoever publishes must know the tokens. What is
copied is what the tenant's engines wrote: the readers of a group trust the tenants that it is filled from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import Rejected
from kvtide.frame import Header
from kvtide.keys import NO_PARENT, Digest, Key, Part, Shelf, Tokens, chain, scope_digest
from kvtide.layout import Layout
from kvtide.node.domains import Domain
from kvtide.outcome import Outcome
from kvtide.store import Store
from kvtide.tickets import Fetched, Match

HOLDER = 0  # of leases that the service holds for itself; sessions count from 1
_WAIT_S = 1.0  # beyond the deadline of a fetch, which ends it
_BATCH_BYTES = 256 << 20  # held in either arena at a time: engines need the rest
_GAPS = re.compile(r"[\s,]+")


@dataclass(frozen=True, slots=True)
class Shared:
    """Blocks by what became of them; each part of a block counts."""

    copied: int = 0
    present: int = 0  # in the group already, or being written there
    missing: int = 0  # the tenant does not have them, or not those before them, or not in time
    rejected: int = 0  # the group has no room

    def plus(self, other: Shared) -> Shared:
        return Shared(
            self.copied + other.copied,
            self.present + other.present,
            self.missing + other.missing,
            self.rejected + other.rejected,
        )


def read_tokens(text: str) -> list[int]:
    """The token ids in a file: numbers with commas or white space between them, in brackets or not."""
    words = _GAPS.split(text.strip().removeprefix("[").removesuffix("]").strip(" \t\r\n,"))
    try:
        return [int(word) for word in words if word]
    except ValueError:
        raise Rejected(
            "tokens: the file holds something that is no number; write ids with spaces between them"
        ) from None


def publish(
    source: Domain,
    group: Domain,
    namespace: Digest,
    scope: str,
    tokens: Tokens,
    block_tokens: int,
    parts: Sequence[Part],
    fetch_s: float,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Shared:
    """Copy the blocks of these tokens, part by part. Waits for what is not in DRAM; asks before each step whether it
    may go on. Raises Rejected for tokens that cannot be some.
    """
    mine = source.tenant.scope(namespace, scope_digest(scope))
    theirs = group.tenant.scope(namespace, scope_digest(""))
    try:
        keys = chain(mine.root, tokens, block_tokens)
        targets = chain(theirs.root, tokens, block_tokens)
    except (ValueError, TypeError) as error:
        raise Rejected(str(error)) from None
    shared = Shared()
    for part in parts:
        copy = _Copy(source.store, group.store, mine.shelf(part), theirs.shelf(part), fetch_s, may_go_on)
        shared = shared.plus(copy.run(keys, targets))
    return shared


@dataclass(frozen=True, slots=True)
class _Copy:
    """One part of a chain, from one store to another."""

    source: Store
    target: Store
    source_shelf: Shelf
    target_shelf: Shelf
    fetch_s: float
    may_go_on: Callable[[], bool]

    def run(self, keys: Sequence[Key], targets: Sequence[Key]) -> Shared:
        is_there = find(self.target, self.target_shelf, targets)[0] > 0
        wanted = np.flatnonzero(~is_there).tolist()
        shared = Shared(present=len(targets) - len(wanted))
        while wanted:
            first = wanted[0]
            run = next((n for n, at in enumerate(wanted) if at != first + n), len(wanted))  # no gap in between
            fetched = self._fetch(keys[first : first + run]) if self.may_go_on() else Fetched(0, 0, None)
            if not fetched.blocks:  # whatever comes after a hole is of no use to anybody
                return shared.plus(Shared(missing=len(wanted)))
            try:
                step = self._save(fetched, targets, first)
            finally:
                self.source.release(fetched)
            shared = shared.plus(step)
            done = step.copied + step.present
            if step.rejected:
                return shared.plus(Shared(rejected=len(wanted) - done - step.rejected))
            del wanted[:done]
        return shared

    def _fetch(self, keys: Sequence[Key]) -> Fetched:
        """As many of these, from the first on, as there are and as one request may hold on either side."""
        sizes, tiers = find(self.source, self.source_shelf, keys)
        missing = np.flatnonzero(sizes == 0)
        match = Match((self.source_shelf,), keys, int(missing[0]) if len(missing) else len(keys), (sizes,), (tiers,))
        batch_bytes = max(_BATCH_BYTES, 2 * int(sizes[0]))  # at least one block, however large
        plan = match.plan(min(batch_bytes, self.source.request_bytes_max, self.target.request_bytes_max))
        if plan.first_block == plan.end_block:
            return Fetched(0, 0, None)
        ticket = self.source.fetch(plan, deadline_s=self.fetch_s, holder=HOLDER)
        self.source.wait(ticket, self.fetch_s + _WAIT_S)
        return ticket.result

    def _save(self, fetched: Fetched, targets: Sequence[Key], first: int) -> Shared:
        """Reserve, copy, publish. As far as the blocks have one shape: a reservation has one."""
        assert fetched.lease is not None
        headers = [self.source.dram.header[row] for row in fetched.lease.rows.tolist()]
        layout = _layout(headers[0])
        count = next((n for n, header in enumerate(headers) if _layout(header) != layout), len(headers))
        self.target.check_layout(layout)
        reservation = self.target.reserve(
            self.target_shelf,
            targets[first : first + count],
            layout,
            position=first,
            parent=targets[first - 1] if first else NO_PARENT,
            holder=HOLDER,
        ).result
        try:
            for slot, payload in zip(reservation.payloads, fetched.payloads, strict=False):
                if slot is not None:
                    np.copyto(slot, payload)
            outcomes = self.target.publish(reservation).result
        except BaseException:
            self.target.abort(reservation)
            raise
        was_given = [outcome is Outcome.MISS for outcome in reservation.outcomes]
        copied = sum(given and outcome is Outcome.HIT for given, outcome in zip(was_given, outcomes, strict=True))
        rejected = sum(outcome is Outcome.REJECTED for outcome in outcomes)
        return Shared(copied=copied, present=count - copied - rejected, rejected=rejected)


def find(store: Store, shelf: Shelf, keys: Sequence[Key]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """The frame bytes of each key (0: nowhere), and the first tier that has it. Unlike a match it is not counted:
    what operators look for says nothing about how engines fare."""
    sizes = np.zeros(len(keys), np.int64)
    tiers = np.zeros(len(keys), np.int8)
    for number, tier in enumerate(store.tiers):
        found = tier.lookup(shelf, keys)
        is_new = (sizes == 0) & (found > 0)
        sizes[is_new], tiers[is_new] = found[is_new], number
    return sizes, tiers


def _layout(header: Header | None) -> Layout:
    assert header is not None, "a leased block has a header"
    layers, pages, page_bytes = header.shape
    return Layout(layers, pages, header.tokens // pages, page_bytes)
