# SPDX-License-Identifier: Apache-2.0
"""What the facts are told with: a cache and who uses it, and the class that every group extends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import pytest

from kvtide.cache import Cache
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Address, Digest, Key, Part, Shelf
from kvtide.layout import Layout, Memory
from kvtide.memory.arena import round_up
from kvtide.outcome import Outcome
from kvtide.tenant import Scope
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Ticket

if TYPE_CHECKING:  # what is true of both without a line that runs
    from kvtide.client import Client
    from kvtide.store import Store

    def _a_store_is_a_cache(store: Store) -> ClearableCache:
        return store

    def _a_client_is_a_cache(client: Client) -> ClearableCache:
        return client


T = TypeVar("T")

HIT, MISS, PENDING, REJECTED = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.REJECTED
TIMEOUT = Outcome.TIMEOUT

PATIENCE_S = 60.0  # for what certainly comes: a slow machine is no failure
LAYOUT = Layout(layers=2, pages=4, page_tokens=16, page_bytes=7680)
SLOT_BYTES = HEADER_BYTES + LAYOUT.payload_bytes
assert SLOT_BYTES == round_up(SLOT_BYTES) == 64 << 10
KEYS = chain_keys("chain", 6)


class ClearableCache(Cache, Protocol):
    """An engine never clears, but an operator does. Both stores and clients can."""

    def clear(self, *, namespace: Digest | None = None, prefix: Key | None = None) -> int:
        """Forget the blocks of a namespace, or a block and those that follow it. Blocks."""

    def stats(self) -> Any:
        """Has `leases`, as an attribute or by that name."""


@dataclass
class User:
    """An engine in front of a cache: one namespace, one customer, one shelf for each part."""

    cache: ClearableCache
    scope: Scope
    settle: Callable[[], None]

    @property
    def here(self) -> Shelf:
        return self.scope.shelf()

    def ranks(self, count: int = 2) -> list[Shelf]:
        return [self.scope.shelf(Part(rank=i, ranks=count)) for i in range(count)]

    def done(self, ticket: Ticket[T]) -> T:
        assert self.cache.wait(ticket, PATIENCE_S), "a ticket that is not done for a minute"
        return ticket.result

    def reserved(
        self, keys: Sequence[Key] = KEYS, shelf: Shelf | None = None, layout: Layout = LAYOUT, first: int = 0
    ) -> Reservation:
        """A filled reservation for the blocks of a chain from its block `first` on."""
        parent = keys[first - 1] if first else NO_PARENT
        place = shelf or self.here
        reservation = self.done(self.cache.reserve(place, keys[first:], layout, position=first, parent=parent))
        for key, slot in zip(reservation.keys, reservation.payloads, strict=True):
            if slot is not None:
                slot[:] = pattern(Address(place, key), layout.payload_bytes)
        return reservation

    def save(
        self, keys: Sequence[Key] = KEYS, shelf: Shelf | None = None, layout: Layout = LAYOUT, first: int = 0
    ) -> None:
        """Save a chain a few blocks at a time, and see it written below: what waits for that has a bound."""
        step = max(1, (1 << 20) // round_up(HEADER_BYTES + layout.payload_bytes))
        for start in range(first, len(keys), step):
            reservation = self.reserved(keys[: start + step], shelf, layout, start)
            assert self.done(self.cache.publish(reservation)) == [HIT] * len(reservation.keys)
            self.settle()

    def matched(self, keys: Sequence[Key] = KEYS, shelves: Sequence[Shelf] | None = None) -> Match:
        return self.done(self.cache.match([self.here] if shelves is None else shelves, keys))

    def plan(self, keys: Sequence[Key] = KEYS, shelves: Sequence[Shelf] | None = None, **pages: int) -> Plan:
        return self.cache.plan(self.matched(keys, shelves), **pages)

    def fetch(self, keys: Sequence[Key] = KEYS, shelf: Shelf | None = None) -> Fetched:
        return self.done(self.cache.fetch(self.plan(keys, None if shelf is None else [shelf])))

    def lease(self, keys: Sequence[Key] = KEYS, shelves: Sequence[Shelf] | None = None, **pages: int) -> Leased:
        return self.done(self.cache.match_and_lease([self.here] if shelves is None else shelves, keys, **pages))

    @property
    def leases(self) -> int:
        """How many leases the cache counts, whoever holds them."""
        stats = self.cache.stats()
        return int(stats["leases"] if isinstance(stats, dict) else stats.leases)

    def assert_right(self, fetched: Fetched, keys: Sequence[Key] = KEYS, shelf: Shelf | None = None) -> None:
        """All of these blocks came, and with their own bytes."""
        assert (fetched.blocks, fetched.outcome) == (len(keys), HIT)
        assert_bytes(fetched, keys, shelf or self.here)


def assert_bytes(fetched: Fetched, keys: Sequence[Key], shelf: Shelf, layout: Layout = LAYOUT) -> None:
    """What came are the blocks' own bytes, those of the first one from its page on."""
    assert len(fetched.payloads) == fetched.blocks <= len(keys)
    for place, (key, payload) in enumerate(zip(keys, fetched.payloads, strict=False)):
        right: Memory = pattern(Address(shelf, key), layout.payload_bytes)
        first = fetched.first_page if place == 0 else 0
        same = np.array_equal(layout.from_page(payload, first), layout.from_page(right, first))
        assert same, f"block {place} of {fetched.blocks} holds bytes that are not its own"


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Look until it is so: for what another thread or process does in its own time."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, f"after {PATIENCE_S:g} s still not: {what}"
        threading.Event().wait(0.002)


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Let threads begin these calls at the same moment; their exceptions are the test's."""
    barrier = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        barrier.wait(PATIENCE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(begin, call) for call in calls]]


class CacheFacts:
    """What a group of facts stands on: what a cache's author supplies, and fixtures made of it."""

    arena_bytes: ClassVar[int] = 4 << 20  # of DRAM, of which one request gets half, and all pins together half
    has_lower_tier: ClassVar[bool] = True  # blocks that leave DRAM are found below it
    is_closed_an_error: ClassVar[bool] = True  # after close() calls raise Closed; otherwise they give nothing
    keys_max: ClassVar[int | None] = None  # keys of one call that are looked at; None: all

    def make_cache(self, folder: Path) -> ClearableCache:
        """An open cache with this much DRAM and nothing leased; the suite clears it first, and closes it."""
        raise NotImplementedError

    def settle(self, cache: ClearableCache) -> None:
        """Block until nothing waits to be spilled. By what `stats` says, unless the cache has `drain`."""
        drain = getattr(cache, "drain", None)
        if drain is not None:
            assert drain()
            return
        eventually(
            lambda: not any(each["queued_bytes"] for each in cache.stats()["spill"].values()), "everything is spilled"
        )

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Iterator[ClearableCache]:
        cache = self.make_cache(tmp_path / "cache")
        cache.clear()  # of what earlier tests left: blocks of other sizes would leave gaps
        yield cache
        cache.close()

    @pytest.fixture
    def namespace(self, request: pytest.FixtureRequest) -> Digest:
        return Digest(sha256(request.node.nodeid.encode()).digest())

    @pytest.fixture
    def user(self, cache: ClearableCache, namespace: Digest) -> User:
        return self.user_of(cache, namespace)

    def user_of(self, cache: ClearableCache, namespace: Digest, name: str = "") -> User:
        ticket = cache.open_scope(namespace, name)
        assert cache.wait(ticket, PATIENCE_S)
        assert ticket.result is not None
        return User(cache, ticket.result, lambda: self.settle(cache))

    @property
    def slots(self) -> int:
        """How many blocks of LAYOUT the arena has room for."""
        return self.arena_bytes // SLOT_BYTES

    def churn(self, user: User, name: object = "others") -> None:
        """Fill the arena with blocks of others, so that what nobody holds leaves it."""
        for number in range(3):
            for part in range(2):
                keys = chain_keys((name, number, part), self.slots // 4)
                reservation = user.done(user.cache.reserve(user.here, keys, LAYOUT))
                for slot in reservation.payloads:
                    if slot is not None:
                        slot[:] = number
                user.done(user.cache.publish(reservation))
                user.settle()

    def cool(self, user: User, keys: Sequence[Key] = KEYS, shelf: Shelf | None = None) -> None:
        """These blocks leave DRAM, and are below."""
        if not self.has_lower_tier:
            pytest.skip("this cache has nothing below DRAM")
        self.churn(user)
        match = user.matched(keys, None if shelf is None else [shelf])
        assert match.blocks == len(keys)
        assert match.tiers[0].all(), "blocks that nobody holds stay in DRAM though others need the room"
