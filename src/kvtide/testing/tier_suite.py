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
from contextlib import contextmanager
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
    """The memory holds this frame, sealed, with the payload of its address."""
    assert verify(memory, frame.address) == frame.header
    payload = memory[HEADER_BYTES : frame.header.frame_bytes]
    assert np.array_equal(payload, blocks.pattern(frame.address, frame.header.stored_bytes))


def sizes(tier: Tier, frames: Sequence[Frame]) -> list[int]:
    """What a lookup says of each frame."""
    return [int(tier.lookup(frame.header.shelf, [frame.header.key])[0]) for frame in frames]


def present(tier: Tier, frames: Sequence[Frame]) -> list[Frame]:
    """Those that a lookup finds, each checked to be readable byte for byte."""
    found = [frame for frame, size in zip(frames, sizes(tier, frames), strict=True) if size]
    assert read(tier, found)[0] == [HIT] * len(found)
    return found


def store(tier: Tier, frames: Sequence[Frame]) -> None:
    assert tier.write(frames) == [HIT] * len(frames)


def assert_has(tier: Tier, frames: Sequence[Frame]) -> None:
    assert sizes(tier, frames) == [frame.header.frame_bytes for frame in frames]
    assert present(tier, frames) == list(frames)


def assert_lacks(tier: Tier, frames: Sequence[Frame]) -> None:
    assert not any(sizes(tier, frames))
    assert read(tier, frames)[0] == [MISS] * len(frames)


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
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        return iter_of(tmp_path / "tier")

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
