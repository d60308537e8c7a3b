# SPDX-License-Identifier: Apache-2.0
"""Opening and closing, deadlines, a full medium, and figures that add up."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvtide.errors import Closed, KvtideError
from kvtide.keys import Address, Key
from kvtide.testing import blocks
from kvtide.testing.tier_suite.tools import (
    ELSEWHERE,
    FILL,
    HERE,
    HIT,
    MISS,
    PASSED,
    REJECTED,
    SIZES,
    TIMEOUT,
    Countdown,
    TierFacts,
    addresses_of,
    assert_has,
    assert_lacks,
    at_once,
    many,
    one,
    present,
    read,
    sizes,
    store,
    target_for,
)
from kvtide.tiers.tier import Tier


class LivingFacts(TierFacts):
    """Opening and closing, deadlines, a full medium, and figures that add up."""

    # Opening and closing --------------------------------------------------------------------------------

    def test_a_durable_tier_opened_again_has_everything(self, folder: Path) -> None:
        frames = [*blocks.chain_frames("chain", 30, 5000), *(one("a", size) for size in SIZES[1:2])]
        frames += [one("same key", on=shelf) for shelf in (HERE, *ELSEWHERE.values())]
        with self.opened(folder) as tier:
            if not tier.traits.durable:
                pytest.skip(f"{tier.traits.name} does not outlive its process")
            store(tier, frames)
            used = tier.stats().bytes_used
        with self.opened(folder) as tier:
            assert_has(tier, frames)
            assert (tier.stats().blocks, tier.stats().bytes_used) == (len(frames), used)

    def test_a_tier_that_is_not_durable_opens_empty(self, folder: Path) -> None:
        frames = many("a", 10)
        with self.opened(folder) as tier:
            if tier.traits.durable:
                pytest.skip(f"{tier.traits.name} is durable")
            store(tier, frames)
        with self.opened(folder) as tier:
            assert_lacks(tier, frames)
            assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)

    def test_what_was_forgotten_stays_forgotten_after_opening_again(self, folder: Path) -> None:
        stays, deleted, cleared = many("s", 5), many("d", 5), many("c", 5, on=ELSEWHERE["tenant"])
        with self.opened(folder) as tier:
            store(tier, [*stays, *deleted, *cleared])
            tier.delete(addresses_of(deleted))
            tier.clear(tenant=ELSEWHERE["tenant"].tenant)
        with self.opened(folder) as tier:
            assert_lacks(tier, [*deleted, *cleared])
            assert present(tier, stays) == (addresses_of(stays) if tier.traits.durable else [])

    def test_a_tier_opened_again_takes_more(self, folder: Path) -> None:
        rounds = [many(i, 10) for i in range(4)]
        for i, frames in enumerate(rounds):
            with self.opened(folder) as tier:
                store(tier, frames)
                assert_has(tier, [f for group in rounds[: i + 1] for f in group] if tier.traits.durable else frames)

    def test_closing_again_does_nothing(self, folder: Path) -> None:
        with self.opened(folder) as tier:
            store(tier, [one("a")])
            tier.close()
            tier.close()

    def test_a_tier_that_was_never_opened_can_be_closed(self, folder: Path) -> None:
        self.make_tier(folder, self.bytes_max).close()

    def test_opening_an_open_tier_serves_no_wrong_byte(self, tier: Tier) -> None:
        frame = one("a")
        store(tier, [frame])
        with suppress(KvtideError, AssertionError):  # to refuse is an answer too
            tier.open()
        assert set(read(tier, [frame])[0]) <= {HIT, MISS}

    @pytest.mark.parametrize("call", ["read", "write", "delete", "clear"])
    def test_use_after_close_raises_closed(self, folder: Path, call: str) -> None:
        frame = one("a")
        with self.opened(folder) as tier:
            store(tier, [frame])
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: tier.read([frame.address], [target_for(frame)]),
            "write": lambda: tier.write([one("b")]),
            "delete": lambda: tier.delete([frame.address]),
            "clear": tier.clear,
        }
        with pytest.raises(Closed):
            calls[call]()

    def test_a_lookup_after_close_finds_nothing(self, folder: Path) -> None:
        frame = one("a")
        with self.opened(folder) as tier:
            store(tier, [frame])
        with suppress(Closed):
            assert sizes(tier, [frame]) == [0]

    def test_closing_under_load_ends_every_call_with_an_outcome_or_closed(self, folder: Path) -> None:
        frames = many("a", 20)
        has_begun = [threading.Event() for _ in range(4)]

        def use(seed: int) -> None:
            order = random.Random(seed).sample(frames, len(frames))
            with suppress(Closed):
                while True:
                    for frame in order:
                        tier.write([frame])
                        read(tier, [frame])
                        tier.delete([frame.address])
                    has_begun[seed].set()

        def close() -> None:
            for event in has_begun:
                assert event.wait(30)
            tier.close()

        with self.opened(folder) as tier:
            at_once(*(partial(use, seed) for seed in range(4)), close)

    def test_a_tier_cannot_be_pickled(self, tier: Tier) -> None:
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(tier)

    # Deadlines ------------------------------------------------------------------------------------------

    def test_a_read_after_its_deadline_is_a_timeout_and_the_block_stays(self, tier: Tier) -> None:
        frames = many("a", 5)
        store(tier, frames)
        outcomes, into = read(tier, frames, PASSED)
        assert outcomes == [TIMEOUT] * 5
        assert all((memory == FILL).all() for memory in into)
        assert_has(tier, frames)

    def test_a_miss_after_its_deadline_is_a_timeout_or_a_miss(self, tier: Tier) -> None:
        assert read(tier, [one("a")], PASSED)[0][0] in (TIMEOUT, MISS)

    def test_a_write_after_its_deadline_is_a_timeout_and_stores_nothing(self, tier: Tier) -> None:
        frames = many("a", 5)
        assert tier.write(frames, PASSED) == [TIMEOUT] * 5
        assert_lacks(tier, frames)
        assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)
        store(tier, frames)
        assert_has(tier, frames)

    def test_a_write_after_its_deadline_evicts_nothing(self, small: Tier) -> None:
        for frame in many("filler", 150):
            small.write([frame])
        here = present(small, many("filler", 150))
        assert set(small.write(many("late", 20), PASSED)) == {TIMEOUT}
        assert present(small, many("filler", 150)) == here

    def test_a_lookup_after_its_deadline_answers_all_the_same(self, tier: Tier) -> None:
        frame = one("a")
        store(tier, [frame])
        assert tier.lookup(HERE, [frame.header.key], PASSED).tolist() in ([0], [frame.header.frame_bytes])

    @pytest.mark.parametrize("asks", [1, 2, 3, 5, 8])
    def test_a_deadline_that_passes_during_a_batch_leaves_everything_sound(self, tier: Tier, asks: int) -> None:
        frames = many("a", 8, 1_500_000)
        outcomes = tier.write(frames, Countdown(asks).deadline)
        assert set(outcomes) <= {HIT, TIMEOUT}
        assert present(tier, frames) == [f.address for f, what in zip(frames, outcomes, strict=True) if what is HIT]
        store(tier, frames)
        assert set(read(tier, frames, Countdown(asks).deadline)[0]) <= {HIT, TIMEOUT}
        assert_has(tier, frames)
        tier.delete(addresses_of(frames))
        assert tier.stats().bytes_used == 0

    # Full -----------------------------------------------------------------------------------------------

    def test_a_full_tier_stays_within_its_bound(self, small: Tier) -> None:
        sizes_bytes = random.Random(3)
        frames = [one(i, sizes_bytes.choice([0, 100, 5000, 30_000, 200_000])) for i in range(200)]
        for frame in frames:
            (outcome,) = small.write([frame])
            assert outcome in (HIT, REJECTED)
            stats = small.stats()
            assert stats.bytes_used <= stats.bytes_max <= self.bytes_max_small
        assert 0 < len(present(small, frames)) < len(frames)

    def test_what_a_full_tier_says_it_stored_is_there(self, small: Tier) -> None:
        for frame in many("a", 300):
            (outcome,) = small.write([frame])
            assert present(small, [frame]) == ([frame.address] if outcome is HIT else [])

    def test_a_batch_larger_than_the_tier_is_stored_in_part(self, small: Tier) -> None:
        frames = many("a", 300)
        outcomes = small.write(frames)
        assert HIT in outcomes
        assert set(outcomes) <= {HIT, REJECTED}
        stats = small.stats()
        assert stats.bytes_used <= stats.bytes_max
        assert stats.blocks == len(present(small, frames)) < 300
        small.delete(addresses_of(frames))
        assert small.stats().bytes_used == 0

    def test_a_frame_larger_than_the_traits_allow_is_rejected(self, small: Tier) -> None:
        here = many("a", 10)
        store(small, here)
        too_large = one("large", self.payload_bytes_max(small) + 1)
        assert small.write([too_large, one("b"), too_large]) == [REJECTED, HIT, REJECTED]
        assert_lacks(small, [too_large])
        assert_has(small, [*here, one("b")])

    def test_no_block_outlives_its_parent(self, small: Tier) -> None:
        if small.traits.shared:
            pytest.skip(f"{small.traits.name} is shared: the medium itself decides who leaves")
        trunk = blocks.chain_frames("trunk", 20, 10_000)
        frames = {frame.header.key: frame for frame in trunk}
        for branch in "ab":
            parent = trunk[-1].header.key
            for position, key in enumerate(blocks.chain_keys(branch, 20), start=20):
                frames[key] = blocks.frame(Address(HERE, key), 10_000, position=position, parent=parent)
                parent = key
        store(small, list(frames.values()))
        left: set[Key] = set(frames)
        for filler in many("filler", 150):
            store(small, [filler])
            found = small.lookup(HERE, list(frames))
            left = {key for key, size in zip(frames, found.tolist(), strict=True) if size}
            assert all(frames[key].header.position == 0 or frames[key].header.parent in left for key in left)
        assert len(left) < len(frames)

    def test_blocks_that_claim_a_circle_of_parents_do_not_keep_others_out(self, small: Tier) -> None:
        # No honest chain does that, but a header is only bytes, and parents leave after their children.
        keys = blocks.chain_keys("circle", 600)
        for i in range(0, 600, 2):
            pair = [blocks.frame(Address(HERE, keys[i + j]), 0, position=1, parent=keys[i + 1 - j]) for j in (0, 1)]
            assert set(small.write(pair)) <= {HIT, REJECTED}
        for frame in many("honest", 100):
            store(small, [frame])
        assert_has(small, many("honest", 100)[-10:])

    def test_evicted_blocks_are_counted(self, small: Tier) -> None:
        if small.traits.shared:
            pytest.skip(f"{small.traits.name} is shared: the medium itself decides who leaves")
        outcomes = [small.write([frame])[0] for frame in many("a", 200)]
        stats = small.stats()
        assert stats.blocks + stats.evicted_blocks == outcomes.count(HIT)
        assert stats.blocks == len(present(small, many("a", 200)))

    # Figures --------------------------------------------------------------------------------------------

    def test_an_empty_tier_counts_nothing(self, tier: Tier) -> None:
        stats = tier.stats()
        assert (stats.blocks, stats.bytes_used, stats.read_bytes, stats.written_bytes) == (0, 0, 0, 0)
        assert 0 < stats.bytes_max <= self.bytes_max

    def test_stats_add_up(self, tier: Tier) -> None:
        frames = [one(i, i * 1000) for i in range(30)]
        stored_bytes = sum(frame.header.frame_bytes for frame in frames[:20])
        store(tier, frames[:20])
        read(tier, frames)
        tier.write(frames[:5])
        tier.read(addresses_of(frames[:2]), [target_for(frame) for frame in frames[:2]], PASSED)
        stats = tier.stats()
        assert stats.blocks == 20
        assert stored_bytes <= stats.bytes_used <= stats.bytes_max
        assert stats.read_bytes == stats.written_bytes == stored_bytes
        assert stats.outcomes["write"] == {"hit": 25}
        assert stats.outcomes["read"] == {"hit": 20, "miss": 10, "timeout": 2}

    def test_stats_belong_to_whoever_asked(self, tier: Tier) -> None:
        store(tier, [one("a")])
        mine = tier.stats()
        mine.outcomes["write"]["hit"] = 99
        mine.outcomes["read"]["miss"] = 99
        mine.blocks = mine.written_bytes = 99
        assert tier.stats().outcomes == {"read": {}, "write": {"hit": 1}}
        assert tier.stats().blocks == 1
        store(tier, [one("b")])
        assert mine.outcomes["write"] == {"hit": 99}
