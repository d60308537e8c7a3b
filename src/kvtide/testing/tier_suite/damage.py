# SPDX-License-Identifier: Apache-2.0
"""What somebody else did to the medium is found, and never served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtide.frame import HEADER_BYTES, VERSION
from kvtide.keys import Shelf
from kvtide.testing import blocks
from kvtide.testing.tier_suite.tools import (
    CORRUPT,
    DAMAGES,
    HIT,
    MISS,
    Damage,
    TierFacts,
    assert_has,
    assert_lacks,
    at_once,
    elsewhere,
    many,
    one,
    read,
    store,
    with_check,
)
from kvtide.tiers.tier import Tier


class DamageFacts(TierFacts):
    """What somebody else did to the medium is found, and never served."""

    @pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES.keys())
    def test_damage_is_corrupt_then_a_miss_then_written_anew(self, tier: Tier, how: Damage) -> None:
        self.needs_checksums(tier)
        frame = one("a")
        store(tier, [frame])
        self.damage(tier, frame, how)
        assert read(tier, [frame])[0] == [CORRUPT]
        assert_lacks(tier, [frame])
        store(tier, [frame])
        assert_has(tier, [frame])
        assert tier.stats().outcomes["read"]["corrupt"] == 1

    def test_a_flip_of_any_bit_is_corrupt(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frame = one("a", 5000)
        drawn = random.Random(9)
        for _ in range(200):
            store(tier, [frame])
            raw = self.raw(tier, frame)
            raw[drawn.randrange(len(raw))] ^= 1 << drawn.randrange(8)
            self.raw_set(tier, frame.address, bytes(raw))
            assert read(tier, [frame])[0] == [CORRUPT]

    def test_a_header_only_frame_is_checked_too(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frame = one("a", 0)
        store(tier, [frame])
        self.damage(tier, frame)
        assert read(tier, [frame])[0] == [CORRUPT]

    def test_damage_of_one_block_leaves_the_others(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        chain = blocks.chain_frames("chain", 10, 5000)
        store(tier, chain)
        self.damage(tier, chain[3])
        assert read(tier, chain)[0] == [HIT] * 3 + [CORRUPT] + [HIT] * 6
        assert_has(tier, chain[:3] + chain[4:])

    def test_two_frames_that_changed_places_are_corrupt(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frames = [one("a"), one("b")]
        store(tier, frames)
        raw_a, raw_b = (self.raw(tier, frame) for frame in frames)
        self.raw_set(tier, frames[0].address, bytes(raw_b))
        self.raw_set(tier, frames[1].address, bytes(raw_a))
        assert read(tier, frames)[0] == [CORRUPT, CORRUPT]
        assert_lacks(tier, frames)

    @elsewhere
    def test_a_sound_frame_of_another_shelf_is_corrupt(self, tier: Tier, other: Shelf) -> None:
        self.needs_checksums(tier)
        frame, foreign = one("a"), one("a", on=other)
        store(tier, [frame])
        foreign.seal()
        self.raw_set(tier, frame.address, foreign.memory.tobytes())
        assert read(tier, [frame])[0] == [CORRUPT]
        assert_lacks(tier, [frame, foreign])

    def test_a_sound_frame_of_another_key_is_corrupt(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frame, foreign = one("a"), one("b")
        store(tier, [frame])
        foreign.seal()
        self.raw_set(tier, frame.address, foreign.memory.tobytes())
        assert read(tier, [frame])[0] == [CORRUPT]
        assert_lacks(tier, [frame, foreign])

    def test_a_sound_frame_of_another_length_is_corrupt(self, tier: Tier) -> None:
        # Were it a hit, the memory behind it would hold bytes that no checksum covers.
        self.needs_checksums(tier)
        frame, shorter = one("a", 10_000), one("a", 3000)
        store(tier, [frame])
        shorter.seal()
        self.raw_set(tier, frame.address, shorter.memory.tobytes())
        assert read(tier, [frame])[0] == [CORRUPT]

    def test_a_frame_of_a_future_format_is_corrupt(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frame = one("a")
        store(tier, [frame])
        raw = self.raw(tier, frame)
        raw[8:10] = (VERSION + 1).to_bytes(2, "little")
        self.raw_set(tier, frame.address, with_check(bytes(raw[:HEADER_BYTES])) + raw[HEADER_BYTES:])
        assert read(tier, [frame])[0] == [CORRUPT]
        assert_lacks(tier, [frame])

    def test_damage_while_closed_is_found(self, folder: Path) -> None:
        frames = many("a", 3)
        with self.opened(folder) as tier:
            self.needs_checksums(tier)
            store(tier, frames)
            self.damage(tier, frames[1])
        with self.opened(folder) as tier:
            if not tier.traits.durable:
                pytest.skip(f"{tier.traits.name} does not outlive its process")
            assert read(tier, frames)[0] == [HIT, CORRUPT, HIT]

    def test_readers_who_find_the_same_damage_do_not_disturb_each_other(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frame = one("a", 300_000)
        for _ in range(10):
            store(tier, [frame])
            self.damage(tier, frame)
            outcomes = [outcome for (outcome,), _ in at_once(*[lambda: read(tier, [frame])] * 4)]
            assert CORRUPT in outcomes
            assert set(outcomes) <= {CORRUPT, MISS}
            assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)
