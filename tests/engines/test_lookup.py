# SPDX-License-Identifier: Apache-2.0
"""What the cache has of a prompt: leased blocks, or a miss, whatever the cache does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from faulty_cache import FaultyCache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import BLOCK, PATIENCE_S, prompt_of

from kvtide.cache import Cache
from kvtide.config import DiskSettings, DramSettings, Settings
from kvtide.engines.transformers.generation import Reuse
from kvtide.engines.transformers.lookup import Lookup
from kvtide.keys import NO_PARENT, Digest, chain
from kvtide.layout import Layout
from kvtide.store import Store, open_store

LAYOUT = Layout(2, 1, BLOCK, 1024)
NAMESPACE = Digest(sha256(b"a model").digest())


def save(
    store: Cache, prompt: Sequence[int], *, layout: Layout = LAYOUT, scope: str = "", end: int | None = None
) -> None:
    """Blocks whose bytes are their number."""
    opened = store.open_scope(NAMESPACE, scope).result
    assert opened is not None
    keys = chain(opened.root, list(prompt), BLOCK)[:end]
    reservation = store.reserve(opened.shelf(), keys, layout, parent=NO_PARENT).result
    for number, payload in enumerate(reservation.payloads):
        if payload is not None:
            payload[:] = number
    store.publish(reservation)


def looked_up(cache: Cache | None, prompt: Sequence[int], scope: str = "", fetch_s: float = 10.0) -> Lookup:
    lookup = Lookup(cache, NAMESPACE, scope, prompt, LAYOUT, lambda _tokens: fetch_s)
    for _ in range(1000):
        if lookup.poll():
            return lookup
        lookup.wait(PATIENCE_S)
    raise AssertionError("a lookup without an end")


def assert_right(lookup: Lookup, blocks: int) -> None:
    assert lookup.blocks == len(lookup.payloads) == blocks
    for number, payload in enumerate(lookup.payloads):
        assert (payload == number % 256).all()


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 0), (BLOCK, 0), (BLOCK + 1, 1), (2 * BLOCK, 1), (5 * BLOCK, 4), (5 * BLOCK + 7, 5)]
)
def test_all_whole_blocks_are_found_but_one_token_is_left_to_compute(store: Store, tokens: int, blocks: int) -> None:
    prompt = prompt_of("a", tokens)
    save(store, [*prompt, *prompt_of("more", BLOCK)])
    lookup = looked_up(store, prompt)
    assert_right(lookup, blocks)
    assert len(lookup.keys) == tokens // BLOCK, "also of the block that is computed: it may be saved"
    assert lookup.reuse() == Reuse(blocks * BLOCK, {"dram": blocks * BLOCK} if blocks else {})
    assert store.stats().leases == bool(blocks)
    for _ in range(2):
        lookup.release()
    assert store.stats().leases == 0
    assert not lookup.payloads


def test_the_common_beginning_is_found(store: Store) -> None:
    prompt = prompt_of("a", 4 * BLOCK)
    save(store, prompt)
    lookup = looked_up(store, [*prompt[: 2 * BLOCK + 5], *prompt_of("b", 3 * BLOCK)])
    assert_right(lookup, 2)
    lookup.release()


def test_without_a_cache_there_is_nothing_and_nothing_to_save_to() -> None:
    lookup = looked_up(None, prompt_of("a", 100))
    assert (lookup.blocks, lookup.shelf, lookup.root, lookup.reuse()) == (0, None, None, Reuse())
    lookup.wait(PATIENCE_S)
    lookup.release()


def test_a_miss_knows_where_to_save(store: Store) -> None:
    for tokens in (3, 100):
        lookup = looked_up(store, prompt_of("a", tokens))
        assert lookup.blocks == 0
        assert lookup.shelf is not None
        assert lookup.root is not None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=5), st.text(max_size=5))
def test_scopes_share_nothing_unless_they_are_equal(store: Store, one: str, other: str) -> None:
    prompt = prompt_of((one, other), 3 * BLOCK)
    save(store, prompt, scope=one)
    lookup = looked_up(store, prompt, other)
    assert lookup.blocks == (2 if one == other else 0)
    lookup.release()


# From below ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def with_disk(folder: Path, dram_bytes: int = 8 << 20) -> Store:
    disk = DiskSettings(folder=str(folder), bytes_max=64 << 20)
    return open_store(Settings(dram=DramSettings(bytes_max=dram_bytes, huge_pages=False), disk=disk))


def test_blocks_are_told_by_the_tier_where_they_were_found(folder: Path) -> None:
    prompt = prompt_of("a", 6 * BLOCK + 1)
    with with_disk(folder) as store:
        save(store, prompt, end=4)
    with with_disk(folder) as store:
        first = looked_up(store, prompt[: 2 * BLOCK + 1])
        assert first.reuse() == Reuse(2 * BLOCK, {"disk": 2 * BLOCK})
        first.release()
        save(store, prompt, end=2)
        second = looked_up(store, prompt)
        assert second.reuse() == Reuse(4 * BLOCK, {"dram": 2 * BLOCK, "disk": 2 * BLOCK})
        assert_right(second, 4)
        second.release()


def test_more_than_a_requests_share_is_cut(folder: Path) -> None:
    slots = 64
    prompt = prompt_of("a", slots * BLOCK + 1)
    with with_disk(folder, slots * (4096 + LAYOUT.payload_bytes + 2048)) as store:
        share = store.request_bytes_max // 8192
        for start in range(0, slots, 16):
            save(store, prompt, end=start + 16)
            assert store.drain()
        lookup = looked_up(store, prompt)
        assert 0 < lookup.blocks <= share < slots
        assert sum(lookup.reuse().by_tier.values()) == lookup.reuse().tokens == lookup.blocks * BLOCK
        assert_right(lookup, lookup.blocks)
        lookup.release()
        assert store.stats().leases == 0


# Faults -------------------------------------------------------------------------------------------------------

STEPS = ("open_scope", "match", "plan", "fetch")


@pytest.fixture
def faulty(store: Store) -> Iterator[FaultyCache]:
    yield FaultyCache(store)
    assert store.stats().leases == 0


@pytest.mark.parametrize("fault", ["nothing", "closed", "error", "late"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_is_a_miss(store: Store, faulty: FaultyCache, step: str, fault: Any) -> None:
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt)
    faulty.faults[step] = fault
    lookup = looked_up(faulty, prompt)
    assert (lookup.blocks, list(lookup.payloads), lookup.reuse()) == (0, [], Reuse())
    lookup.release()
    assert (lookup.shelf is None) == (step == "open_scope")


@pytest.mark.parametrize("fault", ["closed", "error"])
@pytest.mark.parametrize("call", ["poll", "wait", "release"])
def test_a_cache_that_cannot_even_be_waited_for_is_a_miss(
    store: Store, faulty: FaultyCache, call: str, fault: Any
) -> None:
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt)
    faulty.faults |= {"fetch": "late", call: fault}
    lookup = Lookup(faulty, NAMESPACE, "", prompt, LAYOUT, lambda _tokens: 10.0)
    assert not lookup.poll()
    if call == "wait":
        lookup.wait(PATIENCE_S)
    assert lookup.poll() or call == "release"
    assert lookup.blocks == 0
    faulty.faults = {call: fault}
    looked_up(faulty, prompt).release()


def test_a_scope_that_cannot_be_named_is_a_miss(store: Store) -> None:
    lookup = looked_up(store, prompt_of("a", 5 * BLOCK), "\ud800")
    assert (lookup.blocks, lookup.shelf) == (0, None)


def test_a_store_that_was_closed_is_a_miss(store: Store) -> None:
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt)
    store.close()
    assert looked_up(store, prompt).blocks == 0


def test_a_store_that_is_closed_meanwhile_is_a_miss(store: Store, faulty: FaultyCache) -> None:
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt)
    faulty.withhold("match")
    lookup = Lookup(faulty, NAMESPACE, "", prompt, LAYOUT, lambda _tokens: 10.0)
    assert not lookup.poll()
    store.close()
    faulty.give()
    assert lookup.poll()
    assert lookup.blocks == 0


def test_blocks_of_another_size_are_a_miss_from_there_on(store: Store) -> None:
    """Nobody saves such blocks on purpose; but whoever shares the tenant could."""
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt, end=2)
    save(store, prompt, layout=Layout(2, 1, BLOCK, 1040))
    lookup = looked_up(store, prompt)
    assert_right(lookup, 2)
    assert lookup.reuse() == Reuse(2 * BLOCK, {"dram": 2 * BLOCK})
    lookup.release()
    assert store.stats().leases == 0


def test_no_fetch_is_waited_for_longer_than_computing_takes(store: Store) -> None:
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt)
    asked: list[int] = []

    class Noting(FaultyCache):
        def fetch(self, *arguments: Any, deadline_s: float | None = None, **options: Any) -> Any:
            assert deadline_s == 0.75
            return super().fetch(*arguments, deadline_s=deadline_s, **options)

    def recompute_s(tokens: int) -> float:
        asked.append(tokens)
        return 0.75

    lookup = Lookup(Noting(store), NAMESPACE, "", prompt, LAYOUT, recompute_s)
    assert lookup.poll()
    assert asked == [4 * BLOCK]
    lookup.release()


def test_a_lookup_that_nobody_needs_gives_back_what_it_gets(store: Store, faulty: FaultyCache) -> None:
    prompt = prompt_of("a", 5 * BLOCK)
    save(store, prompt)
    faulty.withhold("fetch")
    lookup = Lookup(faulty, NAMESPACE, "", prompt, LAYOUT, lambda _tokens: 10.0)
    assert not lookup.poll()
    lookup.release()
    faulty.give()
    assert lookup.poll()
    assert store.stats().leases == 1
    lookup.release()
