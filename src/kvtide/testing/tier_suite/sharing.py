# SPDX-License-Identifier: Apache-2.0
"""Who sees what, and what threads do to each other."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path

import pytest

from kvtide.frame import Frame
from kvtide.keys import Address, Shelf
from kvtide.testing import blocks
from kvtide.testing.tier_suite.tools import (
    ELSEWHERE,
    HERE,
    HIT,
    MISS,
    PENDING,
    REJECTED,
    TierFacts,
    addresses_of,
    assert_has,
    assert_lacks,
    at_once,
    elsewhere,
    many,
    one,
    present,
    read,
    store,
)
from kvtide.tiers.tier import Tier


class SharingFacts(TierFacts):
    """Who sees what, and what threads do to each other."""

    # Who sees what --------------------------------------------------------------------------------------

    @elsewhere
    def test_a_block_is_invisible_on_every_other_shelf(self, tier: Tier, other: Shelf) -> None:
        frame = one("a")
        store(tier, [frame])
        assert_lacks(tier, [one("a", on=other)])
        assert tier.delete([Address(other, frame.header.key)]) == [MISS]
        assert_has(tier, [frame])

    def test_one_key_holds_other_bytes_on_each_shelf(self, tier: Tier) -> None:
        frames = [one("a", on=shelf) for shelf in (HERE, *ELSEWHERE.values())]
        store(tier, frames)
        assert tier.stats().blocks == len(frames)
        assert_has(tier, frames)
        for i in range(len(frames)):
            tier.delete([frames[i].address])
            assert_has(tier, frames[i + 1 :])

    def test_clear_forgets_everything(self, tier: Tier) -> None:
        frames = [*many("a", 9), *many("b", 9, on=ELSEWHERE["tenant"])]
        store(tier, frames)
        assert tier.clear() == 18
        assert_lacks(tier, frames)
        assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)

    @pytest.mark.parametrize("by", ["namespace", "tenant", "namespace and tenant"])
    def test_clear_forgets_what_it_names_and_nothing_else(self, tier: Tier, by: str) -> None:
        self.needs_enumeration(tier)
        shelves = [blocks.shelf(t, namespace=n, scope=s) for t in "tu" for n in "nm" for s in ("", "s")]
        namespace = shelves[0].namespace if "namespace" in by else None
        tenant = shelves[0].tenant if "tenant" in by else None
        goes = [s for s in shelves if namespace in (None, s.namespace) and tenant in (None, s.tenant)]
        frames = {shelf: many("a", 3, on=shelf) for shelf in shelves}
        store(tier, [frame for group in frames.values() for frame in group])
        assert tier.clear(namespace=namespace, tenant=tenant) == 3 * len(goes)
        for shelf, group in frames.items():
            (assert_lacks if shelf in goes else assert_has)(tier, group)

    def test_clear_of_an_unknown_tenant_forgets_nothing(self, tier: Tier) -> None:
        self.needs_enumeration(tier)
        store(tier, [one("a")])
        assert tier.clear(tenant=ELSEWHERE["tenant"].tenant) == 0
        assert tier.clear(namespace=ELSEWHERE["namespace"].namespace) == 0
        assert_has(tier, [one("a")])

    def test_cleared_blocks_can_be_written_again(self, tier: Tier) -> None:
        frames = many("a", 5)
        store(tier, frames)
        tier.clear()
        store(tier, frames)
        assert_has(tier, frames)

    def test_clear_of_a_prefix_forgets_it_and_all_that_follows_it(self, tier: Tier) -> None:
        self.needs_enumeration(tier)
        trunk, other = (blocks.chain_frames(name, 10, 5000) for name in ("trunk", "other"))
        branches = [_branch(trunk[at], f"branch {at}", 4) for at in (2, 4, 9)]
        store(tier, [*trunk, *other, *(frame for branch in branches for frame in branch)])
        assert tier.clear(prefix=trunk[4].header.key) == 6 + 4 + 4
        assert_lacks(tier, [*trunk[4:], *branches[1], *branches[2]])
        assert_has(tier, [*trunk[:4], *branches[0], *other])
        assert tier.clear(prefix=trunk[4].header.key) == 0
        store(tier, trunk[4:])
        assert_has(tier, trunk)

    def test_clear_of_a_prefix_is_about_all_shelves_that_are_meant(self, tier: Tier) -> None:
        self.needs_enumeration(tier)
        chains = {name: blocks.chain_frames("a", 5, 5000, on=shelf) for name, shelf in ELSEWHERE.items()}
        chains["here"] = blocks.chain_frames("a", 5, 5000, on=HERE)
        store(tier, [frame for chain in chains.values() for frame in chain])
        prefix = chains["here"][3].header.key
        assert tier.clear(namespace=HERE.namespace, tenant=HERE.tenant, prefix=prefix) == 3 * 2
        for name, chain in chains.items():
            is_meant = name in ("here", "scope", "part")
            assert_has(tier, chain[:3] if is_meant else chain)
            assert_lacks(tier, chain[3:] if is_meant else [])
        assert tier.clear(prefix=prefix) == 2 * 2
        assert tier.clear(prefix=chains["here"][0].header.key) == 5 * 3

    def test_clear_of_a_prefix_that_is_missing_forgets_those_that_follow_it(self, tier: Tier) -> None:
        self.needs_enumeration(tier)
        never, deleted = (blocks.chain_frames(name, 8, 5000) for name in ("never", "deleted"))
        store(tier, [*never[:3], *never[4:], *deleted])
        tier.delete([deleted[3].address])
        for chain in (never, deleted):
            assert tier.clear(prefix=chain[3].header.key) == 4
            assert_has(tier, chain[:3])
            assert_lacks(tier, chain[4:])

    def test_clear_of_a_prefix_knows_chains_that_came_in_any_order(self, tier: Tier) -> None:
        self.needs_enumeration(tier)
        for seed in range(5):
            chain = blocks.chain_frames(seed, 30, 0)
            for frame in random.Random(seed).sample(chain, 30):
                store(tier, [frame])
            assert tier.clear(prefix=chain[7].header.key) == 23
            assert_has(tier, chain[:7])
            assert_lacks(tier, chain[7:])

    def test_clear_of_a_prefix_lasts_and_is_known_after_opening_again(self, folder: Path) -> None:
        chains = [blocks.chain_frames(i, 12, 3000) for i in range(4)]
        with self.opened(folder) as tier:
            self.needs_enumeration(tier)
            if not tier.traits.durable:
                pytest.skip(f"{tier.traits.name} does not outlive its process")
            store(tier, [frame for chain in chains for frame in chain])
            tier.delete([chains[2][5].address])
            tier.clear(prefix=chains[0][4].header.key)
        with self.opened(folder) as tier:
            assert_lacks(tier, chains[0][4:])
            assert_has(tier, [*chains[0][:4], *chains[1], *chains[3]])
            assert tier.clear(prefix=chains[1][4].header.key) == 8
            assert tier.clear(prefix=chains[2][5].header.key) == 6
            assert_has(tier, [*chains[0][:4], *chains[1][:4], *chains[2][:5], *chains[3]])
        with self.opened(folder) as tier:
            assert_lacks(tier, [*chains[0][4:], *chains[1][4:], *chains[2][5:]])
            assert tier.stats().blocks == 4 + 4 + 5 + 12

    def test_clear_of_an_unknown_prefix_forgets_nothing(self, tier: Tier) -> None:
        self.needs_enumeration(tier)
        chain = blocks.chain_frames("a", 5, 5000)
        store(tier, chain)
        assert tier.clear(prefix=one("b").header.key) == 0
        assert tier.clear(tenant=ELSEWHERE["tenant"].tenant, prefix=chain[0].header.key) == 0
        assert_has(tier, chain)

    # Threads --------------------------------------------------------------------------------------------

    def test_threads_that_write_one_address_store_one_block(self, tier: Tier) -> None:
        for i in range(20):
            outcomes = [outcome for (outcome,) in at_once(*[lambda i=i: tier.write([one(i, 50_000)])] * 4)]
            assert HIT in outcomes
            assert set(outcomes) <= {HIT, PENDING}
        stats = tier.stats()
        assert stats.blocks == 20
        assert_has(tier, [one(i, 50_000) for i in range(20)])
        tier.delete(addresses_of([one(i, 50_000) for i in range(20)]))
        assert tier.stats().bytes_used == 0

    def test_threads_that_write_different_blocks_store_them_all(self, tier: Tier) -> None:
        groups = [many(i, 30) for i in range(6)]
        at_once(*(partial(store, tier, group) for group in groups))
        assert_has(tier, [frame for group in groups for frame in group])

    def test_who_reads_during_a_write_sees_all_of_it_or_nothing(self, tier: Tier) -> None:
        frames = many("a", 60, 30_000)
        is_done = threading.Event()

        def write() -> None:
            for frame in frames:
                store(tier, [frame])
            is_done.set()

        def watch(seed: int) -> None:
            drawn = random.Random(seed)
            while not is_done.is_set():
                assert set(read(tier, drawn.sample(frames, 5))[0]) <= {HIT, MISS, PENDING}

        at_once(write, partial(watch, 1), partial(watch, 2))
        assert_has(tier, frames)

    def test_who_reads_during_evictions_sees_all_of_a_block_or_nothing(self, small: Tier) -> None:
        frames = many("a", 250)
        is_done = threading.Event()

        def write(part: list[Frame]) -> None:
            for _ in range(2):
                for frame in part:
                    assert small.write([frame])[0] in (HIT, REJECTED)
            is_done.set()

        def watch() -> None:
            drawn = random.Random(1)
            while not is_done.is_set():
                assert set(read(small, drawn.sample(frames, 10))[0]) <= {HIT, MISS, PENDING}
                assert small.stats().bytes_used <= small.stats().bytes_max

        at_once(partial(write, frames[:125]), partial(write, frames[125:]), watch)
        small.delete(addresses_of(frames))
        assert (small.stats().blocks, small.stats().bytes_used) == (0, 0)

    def test_who_reads_during_deletes_sees_all_of_a_block_or_nothing(self, tier: Tier) -> None:
        frames = many("a", 10, 40_000)

        def churn(seed: int) -> None:
            drawn = random.Random(seed)
            for _ in range(60):
                frame = drawn.choice(frames)
                tier.delete([frame.address])
                assert tier.write([frame])[0] in (HIT, PENDING)
                assert set(read(tier, drawn.sample(frames, 3))[0]) <= {HIT, MISS, PENDING}

        at_once(*(partial(churn, seed) for seed in range(4)))
        tier.delete(addresses_of(frames))
        assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)

    def test_clear_during_writes_leaves_nothing_half_done(self, tier: Tier) -> None:
        frames = many("a", 100, 20_000)

        def write() -> None:
            for i in range(0, 100, 5):
                assert set(tier.write(frames[i : i + 5])) <= {HIT, REJECTED}

        def clear() -> None:
            for _ in range(20):
                tier.clear(tenant=HERE.tenant)

        at_once(write, clear)
        assert tier.stats().blocks == len(present(tier, frames))
        tier.clear()
        assert_lacks(tier, frames)
        assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)


def _branch(trunk: Frame, name: str, count: int) -> list[Frame]:
    """A chain that goes on from a block of another one."""
    shelf, first = trunk.header.shelf, trunk.header.position + 1
    keys = blocks.chain_keys(name, count)
    parents = [trunk.header.key, *keys[:-1]]
    return [
        blocks.frame(Address(shelf, key), 5000, position=first + i, parent=parent)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
