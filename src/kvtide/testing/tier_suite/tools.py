# SPDX-License-Identifier: Apache-2.0
"""What the facts are told with: frames, damage, reads that are checked, and the class that every group extends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from kvtide.deadline import NEVER, Deadline
from kvtide.frame import HEADER_BYTES, Frame, payload_checksum, verify
from kvtide.keys import Address, Part, Shelf
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.testing import blocks
from kvtide.tiers.tier import Tier

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


class TierFacts:
    """What a group of facts stands on: the methods that a tier's author supplies, and fixtures made of them."""

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

    def needs_enumeration(self, tier: Tier) -> None:
        if not tier.traits.enumerable:
            pytest.skip(f"{tier.traits.name} cannot name its blocks")

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
