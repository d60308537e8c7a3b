# SPDX-License-Identifier: Apache-2.0
"""What is written comes back, batch by batch, until it is deleted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtide.frame import HEADER_BYTES, Fidelity, Frame, Header
from kvtide.keys import Part
from kvtide.testing import blocks
from kvtide.testing.tier_suite.tools import (
    CORRUPT,
    FILL,
    HERE,
    HIT,
    MISS,
    PENDING,
    REJECTED,
    SIZES,
    TierFacts,
    addresses_of,
    assert_has,
    assert_is,
    assert_lacks,
    many,
    one,
    present,
    read,
    store,
    target_for,
)
from kvtide.tiers.tier import Tier


class KeepingFacts(TierFacts):
    """What is written comes back, batch by batch, until it is deleted."""

    # What is written comes back -------------------------------------------------------------------------

    @pytest.mark.parametrize("payload_bytes", SIZES)
    def test_a_frame_comes_back_byte_for_byte(self, tier: Tier, payload_bytes: int) -> None:
        frame = one("a", payload_bytes)
        store(tier, [frame])
        assert_has(tier, [frame])

    def test_the_largest_frame_that_the_traits_allow_comes_back(self, small: Tier) -> None:
        frame = one("a", self.payload_bytes_max(small))
        store(small, [frame])
        assert_has(small, [frame])

    def test_the_largest_frame_enters_a_full_tier(self, small: Tier) -> None:
        for filler in many("filler", 150):
            small.write([filler])
        frame = one("a", self.payload_bytes_max(small))
        outcome = small.write([frame])[0]
        assert outcome in (HIT, REJECTED)
        assert present(small, [frame]) == ([frame.address] if outcome is HIT else [])

    def test_every_field_of_a_header_comes_back(self, tier: Tier) -> None:
        shelf = blocks.shelf("t", namespace="n", scope="s", part=Part(65_534, 65_533, 65_534, 65_535, 65_535))
        key, parent = blocks.chain_keys("fields", 2)
        header = Header(shelf, key, parent, 2**32 - 1, 2**32 - 1, (3, 5, 700), 10_500, Fidelity.LOSSY)
        frame = blocks.frame(header.address, header.stored_bytes)
        frame.header = header
        store(tier, [frame])
        assert_has(tier, [frame])

    def test_frames_of_many_sizes_share_a_batch(self, tier: Tier) -> None:
        frames = [one(size, size) for size in (*SIZES, 8191, 8192, 65_537, 1 << 20, 3 << 20)]
        store(tier, frames)
        assert_has(tier, frames)

    def test_a_thousand_frames_share_a_batch(self, tier: Tier) -> None:
        frames = many("small", 1000, 64)
        store(tier, frames)
        assert tier.lookup(HERE, [frame.header.key for frame in frames]).tolist() == [HEADER_BYTES + 64] * 1000
        assert read(tier, frames)[0] == [HIT] * 1000
        assert tier.stats().blocks == 1000

    def test_a_chain_comes_back_whole(self, tier: Tier) -> None:
        frames = blocks.chain_frames("chain", 50, 5000)
        store(tier, frames)
        assert_has(tier, frames)

    def test_a_chain_written_last_block_first_comes_back_whole(self, tier: Tier) -> None:
        frames = blocks.chain_frames("chain", 50, 5000)
        for frame in reversed(frames):
            store(tier, [frame])
        assert_has(tier, frames)

    @pytest.mark.parametrize("shift", [0, 1, 8, 511, 512, 4095])
    def test_memory_of_any_alignment_is_written_and_read(self, tier: Tier, shift: int) -> None:
        frame = one("a", 20_000)
        length = frame.header.frame_bytes
        room = np.full(length + 3 * HEADER_BYTES, FILL, np.uint8)
        first = -room.ctypes.data % HEADER_BYTES + shift
        place = room[first : first + length]
        place[:] = frame.memory
        store(tier, [Frame(frame.header, place)])
        place[:] = FILL
        assert tier.read([frame.address], [place]) == [HIT]
        assert_is(frame, place)
        assert (room[:first] == FILL).all()
        assert (room[first + length :] == FILL).all()

    def test_a_frame_in_larger_memory_is_written_without_the_rest(self, tier: Tier) -> None:
        frame = one("a", 5000)
        larger = np.concatenate((frame.memory, np.full(9000, FILL, np.uint8)))
        store(tier, [Frame(frame.header, larger)])
        assert_has(tier, [frame])
        assert tier.stats().written_bytes == frame.header.frame_bytes

    def test_memory_behind_a_frame_is_left_alone(self, tier: Tier) -> None:
        frame = one("a", 5000)
        store(tier, [frame])
        target = target_for(frame, more_bytes=9000)
        assert tier.read([frame.address], [target]) == [HIT]
        assert_is(frame, target)
        assert (target[frame.header.frame_bytes :] == FILL).all()

    def test_memory_too_short_for_a_frame_is_a_miss_and_stays(self, tier: Tier) -> None:
        # Between a lookup and a read a block may have been replaced by a longer one.
        frame = one("a", 5000)
        store(tier, [frame])
        target = target_for(frame)[:-1]
        assert tier.read([frame.address], [target]) == [MISS]
        assert (target == FILL).all()
        assert_has(tier, [frame])
        assert tier.delete([frame.address]) == [HIT]
        assert tier.stats().bytes_used == 0

    def test_memory_of_a_written_frame_may_be_used_again(self, tier: Tier) -> None:
        frames = many("a", 20)
        store(tier, frames)
        for frame in frames:
            frame.memory[:] = FILL
        assert_has(tier, frames)

    def test_a_frame_that_is_sealed_already_is_written_as_it_is(self, tier: Tier) -> None:
        frame = one("a")
        frame.seal()
        sealed = frame.memory.copy()
        store(tier, [frame])
        assert np.array_equal(frame.memory, sealed)
        assert np.array_equal(read(tier, [frame])[1][0], sealed)

    def test_a_checksummed_medium_holds_the_sealed_frame(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        frame = one("a")
        store(tier, [frame])
        assert_is(frame, np.frombuffer(self.raw(tier, frame), np.uint8))

    # Batches --------------------------------------------------------------------------------------------

    def test_empty_batches_do_nothing(self, tier: Tier) -> None:
        assert tier.lookup(HERE, []).tolist() == []
        assert tier.read([], []) == tier.write([]) == tier.delete([]) == []
        assert tier.stats().outcomes == {"read": {}, "write": {}}

    def test_writing_what_is_there_is_a_success_and_changes_nothing(self, tier: Tier) -> None:
        frame = one("a")
        store(tier, [frame])
        before = tier.stats()
        store(tier, [one("a")])
        after = tier.stats()
        assert (after.blocks, after.bytes_used, after.written_bytes) == (1, before.bytes_used, before.written_bytes)
        assert_has(tier, [frame])

    def test_a_frame_twice_in_a_write_batch_is_stored_once(self, tier: Tier) -> None:
        outcomes = tier.write([one("a"), one("b"), one("a")])
        assert outcomes[1] is HIT
        assert HIT in (outcomes[0], outcomes[2])
        assert {outcomes[0], outcomes[2]} <= {HIT, PENDING}
        assert_has(tier, [one("a"), one("b")])
        assert tier.stats().blocks == 2

    def test_an_address_twice_in_a_read_batch_is_read_twice(self, tier: Tier) -> None:
        frame = one("a")
        store(tier, [frame])
        assert read(tier, [frame, one("b"), frame])[0] == [HIT, MISS, HIT]

    def test_outcomes_come_in_the_order_of_the_batch(self, tier: Tier) -> None:
        frames = many("a", 60)
        here = set(random.Random(1).sample(range(60), 30))
        store(tier, [frames[i] for i in here])
        for seed in range(5):
            order = random.Random(seed).sample(range(60), 60)
            batch = [frames[i] for i in order]
            assert read(tier, batch)[0] == [HIT if i in here else MISS for i in order]
            keys = [frame.header.key for frame in batch]
            bytes_each = frames[0].header.frame_bytes
            assert tier.lookup(HERE, keys).tolist() == [bytes_each if i in here else 0 for i in order]

    def test_lookup_says_exactly_how_long_each_frame_is(self, tier: Tier) -> None:
        frames = [one(i, i * 777) for i in range(40)]
        store(tier, frames)
        found = tier.lookup(HERE, [frame.header.key for frame in frames])
        assert found.tolist() == [HEADER_BYTES + i * 777 for i in range(40)]
        assert found.dtype == np.int64

    def test_hit_miss_and_corrupt_share_a_batch(self, tier: Tier) -> None:
        self.needs_checksums(tier)
        good, bad, good_too = frames = many("a", 3)
        store(tier, frames)
        self.damage(tier, bad)
        assert read(tier, [good, bad, one("absent"), good_too])[0] == [HIT, CORRUPT, MISS, HIT]
        assert_has(tier, [good, good_too])
        assert_lacks(tier, [bad])

    # Missing and deleted --------------------------------------------------------------------------------

    def test_what_was_never_written_is_a_miss_and_memory_stays(self, tier: Tier) -> None:
        outcomes, into = read(tier, [one("a")])
        assert outcomes == [MISS]
        assert (into[0] == FILL).all()
        assert_lacks(tier, [one("a")])

    def test_a_deleted_block_is_a_miss_and_others_stay(self, tier: Tier) -> None:
        frames = many("a", 5)
        store(tier, frames)
        assert tier.delete(addresses_of(frames[1:3])) == [HIT, HIT]
        assert_lacks(tier, frames[1:3])
        assert_has(tier, [frames[0], *frames[3:]])

    def test_deleting_what_is_not_there_is_a_miss(self, tier: Tier) -> None:
        store(tier, [one("a")])
        assert tier.delete(addresses_of([one("b"), one("a"), one("c")])) == [MISS, HIT, MISS]
        assert tier.delete(addresses_of([one("a")])) == [MISS]

    def test_an_address_twice_in_a_delete_batch_is_deleted_once(self, tier: Tier) -> None:
        frame = one("a")
        store(tier, [frame, one("b")])
        assert tier.delete([frame.address, frame.address])[0] is HIT
        assert_lacks(tier, [frame])
        assert tier.stats().blocks == 1

    def test_a_deleted_block_can_be_written_again(self, tier: Tier) -> None:
        frame = one("a")
        for _ in range(3):
            store(tier, [frame])
            assert_has(tier, [frame])
            assert tier.delete([frame.address]) == [HIT]

    def test_a_block_deleted_from_the_middle_of_a_chain_leaves_the_rest(self, tier: Tier) -> None:
        chain = blocks.chain_frames("chain", 10, 5000)
        store(tier, chain)
        tier.delete([chain[4].address])
        assert_lacks(tier, [chain[4]])
        assert_has(tier, chain[:4] + chain[5:])
        store(tier, [chain[4]])
        assert_has(tier, chain)

    def test_deleting_everything_gives_all_room_back(self, tier: Tier) -> None:
        frames = [one(i, i * 1234) for i in range(60)]
        store(tier, frames)
        tier.delete(addresses_of(frames))
        assert (tier.stats().blocks, tier.stats().bytes_used) == (0, 0)
