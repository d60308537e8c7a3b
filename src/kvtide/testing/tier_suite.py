# SPDX-License-Identifier: Apache-2.0
"""The facts that make a tier a tier, as tests to inherit.

    class TestMyTier(TierSuite):
        def make_tier(self, folder: Path, bytes_max: int) -> Tier: ...
        def raw_get(self, tier: Tier, address: Address) -> bytes | None: ...
        def raw_set(self, tier: Tier, address: Address, raw: bytes) -> None: ...

Owns no tier and knows no medium: what differs between media is read from `Traits`, and a fact that a
medium does not claim is skipped with the reason. Content is `blocks.pattern`, so every byte that comes
back can be told right from wrong.
"""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from kvtide.deadline import NEVER, Deadline
from kvtide.errors import Closed, KvtideError
from kvtide.frame import HEADER_BYTES, VERSION, Fidelity, Frame, Header, Memory, payload_checksum, verify
from kvtide.keys import Address, Key, Part, Shelf
from kvtide.testing import blocks
from kvtide.tiers.tier import Outcome, Tier

Result = TypeVar("Result")

HIT, MISS, PENDING, REJECTED = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.REJECTED
CORRUPT, TIMEOUT = Outcome.CORRUPT, Outcome.TIMEOUT

# What target memory holds before a read: neither zero nor likely to be taken for a frame.
FILL = 0xA5
PASSED = Deadline(0.0, clock=lambda: 1.0)

SIZES = [0, 1, 4095, 4096, 4097]
HERE = blocks.shelf()
ELSEWHERE = {
    "namespace": blocks.shelf(namespace="another model"),
    "tenant": blocks.shelf("another tenant"),
    "scope": blocks.shelf(scope="another scope"),
    "part": blocks.shelf(part=Part(rank=1, ranks=2)),
}
elsewhere = pytest.mark.parametrize("other", ELSEWHERE.values(), ids=ELSEWHERE.keys())

Damage = Callable[[bytearray], None]


def _flip(at: int) -> Damage:
    def damage(raw: bytearray) -> None:
        raw[at] ^= 0x10

    return damage


def _zero(first: int, end: int | None) -> Damage:
    def damage(raw: bytearray) -> None:
        raw[first:end] = bytes(len(raw[first:end]))

    return damage


DAMAGES: dict[str, Damage] = {
    "magic": _flip(0),
    "version": _flip(8),
    "key": _flip(20),
    "parent": _flip(50),
    "token count": _flip(84),
    "tenant": _flip(130),
    "stored bytes": _flip(232),
    "payload checksum": _flip(250),
    "reserved bytes": _flip(2000),
    "header checksum": _flip(HEADER_BYTES - 1),
    "first payload byte": _flip(HEADER_BYTES),
    "last payload byte": _flip(-1),
    "all zero": _zero(0, None),
    "header zero": _zero(0, HEADER_BYTES),
    "payload zero": _zero(HEADER_BYTES, None),
    "last page zero": _zero(-1000, None),
    "one sector zero": _zero(HEADER_BYTES, HEADER_BYTES + 512),
}


def one(name: object, payload_bytes: int = 10_000, on: Shelf = HERE) -> Frame:
    """A frame that starts a chain of its own."""
    return blocks.frame(Address(on, blocks.chain_keys(name, 1)[0]), payload_bytes)


def many(name: object, count: int, payload_bytes: int = 10_000, on: Shelf = HERE) -> list[Frame]:
    """Frames that have nothing to do with each other."""
    return [one(f"{name}-{i}", payload_bytes, on) for i in range(count)]


def addresses_of(frames: Sequence[Frame]) -> list[Address]:
    return [frame.address for frame in frames]


def target_for(frame: Frame, more_bytes: int = 0) -> Memory:
    return np.full(frame.header.frame_bytes + more_bytes, FILL, np.uint8)


def read(tier: Tier, frames: Sequence[Frame], deadline: Deadline = NEVER) -> tuple[list[Outcome], list[Memory]]:
    """Read into fresh memory; whatever the outcome, no unverified byte may be in it."""
    into = [target_for(frame) for frame in frames]
    outcomes = tier.read(addresses_of(frames), into, deadline)
    for outcome, frame, memory in zip(outcomes, frames, into, strict=True):
        if outcome is HIT:
            assert_is(frame, memory)
        else:
            assert not memory.any() or (memory == FILL).all(), f"{outcome} left bytes in the caller's memory"
    return outcomes, into


def assert_is(frame: Frame, memory: Memory) -> None:
    """The memory begins with this frame, sealed, with the payload of its address."""
    whole = memory[: frame.header.frame_bytes]
    assert verify(whole, frame.address) == frame.header
    assert np.array_equal(whole[HEADER_BYTES:], blocks.pattern(frame.address, frame.header.stored_bytes))


def sizes(tier: Tier, frames: Sequence[Frame]) -> list[int]:
    """What a lookup says of each frame."""
    return [int(tier.lookup(frame.header.shelf, [frame.header.key])[0]) for frame in frames]


def present(tier: Tier, frames: Sequence[Frame]) -> list[Address]:
    """Those that a lookup finds, each checked to be readable byte for byte."""
    found = [frame for frame, size in zip(frames, sizes(tier, frames), strict=True) if size]
    assert read(tier, found)[0] == [HIT] * len(found)
    return addresses_of(found)


def store(tier: Tier, frames: Sequence[Frame]) -> None:
    assert tier.write(frames) == [HIT] * len(frames)


def assert_has(tier: Tier, frames: Sequence[Frame]) -> None:
    assert sizes(tier, frames) == [frame.header.frame_bytes for frame in frames]
    assert present(tier, frames) == addresses_of(frames)


def assert_lacks(tier: Tier, frames: Sequence[Frame]) -> None:
    assert not any(sizes(tier, frames))
    assert read(tier, frames)[0] == [MISS] * len(frames)


class Countdown:
    """A clock that stands before a deadline until it has been asked so many times."""

    def __init__(self, asks: int) -> None:
        self._asks = itertools.count()
        self._limit = asks

    def __call__(self) -> float:
        return 0.0 if next(self._asks) < self._limit else 2.0

    @property
    def deadline(self) -> Deadline:
        return Deadline(1.0, clock=self)


def with_check(header_area: bytes) -> bytes:
    """A header area under a checksum that fits, whatever it says."""
    fields = header_area[: HEADER_BYTES - 16]
    return fields + payload_checksum(np.frombuffer(fields, np.uint8))


def at_once(*calls: Callable[[], Result]) -> list[Result]:
    """Let threads begin these calls at the same moment; their exceptions are the test's."""
    barrier = threading.Barrier(len(calls))

    def begin(call: Callable[[], Result]) -> Result:
        barrier.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(begin, call) for call in calls]]


class TierSuite:
    """Inherit, supply the three methods, receive the facts. Override `bytes_max` if the medium needs more."""

    bytes_max: ClassVar[int] = 32 << 20
    bytes_max_small: ClassVar[int] = 2 << 20  # for facts about a full tier

    def make_tier(self, folder: Path, bytes_max: int) -> Tier:
        """A tier that is not open yet. The same folder again means the same medium again."""
        raise NotImplementedError

    def raw_get(self, tier: Tier, address: Address) -> bytes | None:
        """The frame's bytes as the medium holds them, past the tier. None: there are none."""
        raise NotImplementedError

    def raw_set(self, tier: Tier, address: Address, raw: bytes) -> None:
        """Replace the bytes of a frame that is there, past the tier. `raw` is no longer than what it replaces."""
        raise NotImplementedError

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "tier"

    @pytest.fixture
    def tier(self, folder: Path) -> Iterator[Tier]:
        with self.opened(folder) as tier:
            yield tier

    @pytest.fixture
    def small(self, folder: Path) -> Iterator[Tier]:
        with self.opened(folder, self.bytes_max_small) as tier:
            yield tier

    @contextmanager
    def opened(self, folder: Path, bytes_max: int | None = None) -> Iterator[Tier]:
        tier = self.make_tier(folder, bytes_max or self.bytes_max)
        tier.open()
        try:
            yield tier
        finally:
            tier.close()

    def needs_checksums(self, tier: Tier) -> None:
        if not tier.traits.checksummed:
            pytest.skip(f"{tier.traits.name} does not claim to find damage: its frames have no checksums")

    def payload_bytes_max(self, tier: Tier) -> int:
        if tier.traits.frame_bytes_max > 1 << 30:
            pytest.skip(f"{tier.traits.name} takes frames that are too large for a test")
        return tier.traits.frame_bytes_max - HEADER_BYTES

    def raw(self, tier: Tier, frame: Frame) -> bytearray:
        raw = self.raw_get(tier, frame.address)
        assert raw is not None
        return bytearray(raw)

    def damage(self, tier: Tier, frame: Frame, how: Damage = DAMAGES["last payload byte"]) -> None:
        raw = self.raw(tier, frame)
        how(raw)
        self.raw_set(tier, frame.address, bytes(raw))

    # What is written comes back -----------------------------------------------------------------------------

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

    # Batches ------------------------------------------------------------------------------------------------

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

    # Missing and deleted ------------------------------------------------------------------------------------

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

    # Who sees what ------------------------------------------------------------------------------------------

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
        if not tier.traits.enumerable:
            pytest.skip(f"{tier.traits.name} cannot name its blocks")
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
        if not tier.traits.enumerable:
            pytest.skip(f"{tier.traits.name} cannot name its blocks")
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

    # Opening and closing ------------------------------------------------------------------------------------

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

    # Deadlines ----------------------------------------------------------------------------------------------

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

    # Full ---------------------------------------------------------------------------------------------------

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

    # Figures ------------------------------------------------------------------------------------------------

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

    # Damage -------------------------------------------------------------------------------------------------

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

    # Threads ------------------------------------------------------------------------------------------------

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
