# SPDX-License-Identifier: Apache-2.0
"""The account of a tenant: each token counted once, and no seconds where nobody has said what a token costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.keys import Digest, Part, Shelf
from kvtide.layout import Layout
from kvtide.node.usage import Usage, UsageStats
from kvtide.store import Store
from kvtide.testing import blocks
from kvtide.tickets import Fetched
from kvtide.tiers.dram import DramTier

LAYOUT = Layout(layers=1, pages=2, page_tokens=16, page_bytes=64)
TOKENS = LAYOUT.block_tokens
SHELF = blocks.shelf()
MODEL = SHELF.namespace


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(DramTier(4 << 20, huge_pages=False)) as store:
        yield store


@pytest.fixture
def usage(store: Store) -> Usage:
    return Usage(store)


def leased(store: Store, shelf: Shelf, count: int = 3) -> Fetched:
    """Blocks that somebody saved and reads now."""
    keys = blocks.chain_keys("usage", count)
    reservation = store.reserve(shelf, keys, LAYOUT).result
    for payload in reservation.payloads:
        if payload is not None:
            np.copyto(payload, 1)
    store.publish(reservation)
    (fetched,) = store.match_and_lease([shelf], keys).result.fetched
    assert fetched.blocks == count
    return fetched


def test_a_new_account_is_empty_and_knows_no_seconds(usage: Usage) -> None:
    assert usage.stats() == UsageStats(0, 0, None)


def test_blocks_and_tokens_that_were_read_are_counted(store: Store, usage: Usage) -> None:
    fetched = leased(store, SHELF, 3)
    usage.served(SHELF, fetched)
    usage.served(SHELF, fetched)
    assert usage.stats() == UsageStats(6, 6 * TOKENS, None)


def test_a_miss_is_not_counted(usage: Usage) -> None:
    usage.served(SHELF, Fetched(0, 0, None))
    assert usage.stats() == UsageStats(0, 0, None)


@pytest.mark.parametrize(
    "part",
    [Part(rank=1, ranks=2), Part(group=1), Part(layer_first=4, layer_count=4), Part(rank=7, ranks=8, group=1)],
)
def test_parts_beyond_the_first_are_the_same_tokens_and_not_counted(store: Store, usage: Usage, part: Part) -> None:
    shelf = blocks.shelf(part=part)
    usage.served(shelf, leased(store, shelf))
    assert usage.stats() == UsageStats(0, 0, None)


@pytest.mark.parametrize("part", [Part(), Part(rank=0, ranks=8), Part(layer_first=0, layer_count=4)])
def test_the_first_part_stands_for_its_block(store: Store, usage: Usage, part: Part) -> None:
    shelf = blocks.shelf(part=part)
    usage.served(shelf, leased(store, shelf, 2))
    assert usage.stats() == UsageStats(2, 2 * TOKENS, None)


def test_seconds_are_those_of_tokens_read_after_the_report(store: Store, usage: Usage) -> None:
    fetched = leased(store, SHELF, 4)
    usage.served(SHELF, fetched)
    usage.prefilled(MODEL, 1000, 2.0)
    assert usage.stats().compute_seconds_saved == 0.0
    usage.served(SHELF, fetched)
    assert usage.stats().compute_seconds_saved == pytest.approx(4 * TOKENS * 2.0 / 1000)
    usage.served(SHELF, fetched)
    assert usage.stats().compute_seconds_saved == pytest.approx(8 * TOKENS * 2.0 / 1000)


def test_the_price_of_one_model_is_not_that_of_another(store: Store, usage: Usage) -> None:
    usage.prefilled(Digest(bytes(32)), 1000, 2.0)
    usage.served(SHELF, leased(store, SHELF))
    assert usage.stats().compute_seconds_saved == 0.0


def test_reports_are_averaged_by_their_tokens(store: Store, usage: Usage) -> None:
    usage.prefilled(MODEL, 100, 1.0)
    usage.prefilled(MODEL, 900, 1.0)
    usage.served(SHELF, leased(store, SHELF, 1))
    assert usage.stats().compute_seconds_saved == pytest.approx(TOKENS * 2.0 / 1000)


def test_a_price_follows_an_engine_that_became_faster(store: Store, usage: Usage) -> None:
    for _ in range(100):
        usage.prefilled(MODEL, 1_000_000, 100.0)
    for _ in range(100):
        usage.prefilled(MODEL, 1_000_000, 1.0)
    usage.served(SHELF, leased(store, SHELF, 1))
    assert usage.stats().compute_seconds_saved == pytest.approx(TOKENS * 1e-6, rel=0.01)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (1, 0.0), (0, 0.0), (5, -0.0)])
def test_a_report_of_nothing_is_no_report(usage: Usage, tokens: int, seconds: float) -> None:
    usage.prefilled(MODEL, tokens, seconds)
    assert usage.stats().compute_seconds_saved is None


def test_the_price_reported_longest_ago_is_forgotten_first(store: Store, usage: Usage) -> None:
    fetched = leased(store, SHELF, 1)
    names = [Digest(number.to_bytes(32, "little")) for number in range(1023)]
    usage.prefilled(MODEL, 10, 1.0)
    for name in names:
        usage.prefilled(name, 10, 1.0)
    usage.served(SHELF, fetched)
    known = usage.stats().compute_seconds_saved
    assert known == pytest.approx(TOKENS / 10)
    usage.prefilled(MODEL, 10, 1.0)  # the newest again: the next to be forgotten is another one
    usage.prefilled(Digest(b"\xff" * 32), 10, 1.0)
    usage.served(SHELF, fetched)
    known = usage.stats().compute_seconds_saved
    assert known == pytest.approx(2 * TOKENS / 10)
    for name in names:
        usage.prefilled(name, 10, 1.0)
    usage.prefilled(Digest(b"\xfe" * 32), 10, 1.0)
    usage.served(SHELF, fetched)
    assert usage.stats().compute_seconds_saved == known


@given(st.lists(st.tuples(st.integers(0, 2**62 - 1), st.floats(0, 1e9)), min_size=1, max_size=20))
def test_whatever_is_reported_the_seconds_stay_a_number(reports: list[tuple[int, float]]) -> None:
    with Store(DramTier(1 << 20, huge_pages=False)) as store:
        usage = Usage(store)
        for tokens, seconds in reports:
            usage.prefilled(MODEL, tokens, seconds)
        usage.served(SHELF, leased(store, SHELF, 1))
        saved = usage.stats().compute_seconds_saved
        assert saved is None or 0 <= saved < float("inf")
