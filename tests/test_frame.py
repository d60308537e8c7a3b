# SPDX-License-Identifier: Apache-2.0
"""The byte format: what is written comes back, and whatever else is found there is refused."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import BadChecksum, BadField, BadMagic, BadVersion, Damaged, Misplaced, Truncated
from kvtide.frame import (
    HEADER_BYTES,
    MAGIC,
    NO_PARENT,
    PAYLOAD_BYTES_MAX,
    VERSION,
    Fidelity,
    Frame,
    Header,
    Memory,
    decode_header,
    encode_header,
    payload_checksum,
    verify,
)
from kvtide.keys import Address, Digest, Key, Part, Shelf
from kvtide.testing import blocks
from kvtide.testing.tier_suite.tools import with_check

FIELDS = struct.Struct("<8sHHI32s32sII32s32s32s16s4H3IIQQ16s")
# fmt: off
NAMES = (
    "magic", "version", "fidelity", "reserved_a", "key", "parent", "position", "tokens", "namespace", "tenant", "scope",
    "part", "codec_a", "codec_b", "codec_c", "codec_d", "layers", "pages", "page_bytes", "reserved_b", "raw_bytes",
    "stored_bytes", "payload_check",
)
# fmt: on


def memory_of(raw: bytes) -> Memory:
    return np.frombuffer(bytearray(raw), np.uint8)


def header_with(**changes: object) -> Header:
    key, parent = blocks.chain_keys("frame", 2)
    header = blocks.header(Address(blocks.shelf(), key), 6000, position=3, parent=parent)
    return msgspec.structs.replace(header, **changes)


def sealed(payload_bytes: int = 6000) -> Frame:
    key, parent = blocks.chain_keys("frame", 2)
    frame = blocks.frame(Address(blocks.shelf(), key), payload_bytes, position=3, parent=parent)
    frame.seal()
    return frame


def area_with(**changes: object) -> Memory:
    """A header area in which some fields say something else, under a checksum that fits."""
    raw = sealed().memory[:HEADER_BYTES].tobytes()
    fields = {**dict(zip(NAMES, FIELDS.unpack_from(raw), strict=True)), **changes}
    return memory_of(with_check(FIELDS.pack(*(fields[name] for name in NAMES)) + raw[FIELDS.size :]))


digests = st.binary(min_size=32, max_size=32)
u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
parts = st.builds(
    lambda group, ranks, rank, first, count: Part(group, rank % ranks, ranks, first if count else 0, count),
    u16,
    st.integers(1, 2**16 - 1),
    u16,
    u16,
    u16,
)
shelves = st.builds(Shelf, digests, digests, digests, parts)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    position = draw(st.one_of(st.just(0), st.integers(1, 2**32 - 1)))
    parent = NO_PARENT if position == 0 else draw(digests.filter(lambda digest: digest != NO_PARENT))
    shape = draw(st.tuples(st.integers(0, 80), st.integers(0, 64), st.integers(0, 1 << 20)))
    return Header(
        draw(shelves),
        Key(draw(digests)),
        Key(parent),
        position,
        draw(st.integers(1, 2**32 - 1)),
        shape,
        shape[0] * shape[1] * shape[2],
        draw(st.sampled_from(Fidelity)),
    )


# What is written comes back ---------------------------------------------------------------------------------


@given(headers(), st.binary(min_size=16, max_size=16))
def test_every_header_comes_back_as_it_was_written(header: Header, check: bytes) -> None:
    area = encode_header(header, check)
    assert len(area) == HEADER_BYTES
    assert decode_header(memory_of(area)) == (header, check)


@pytest.mark.parametrize("payload_bytes", [0, 1, 4095, 4096, 4097, 1 << 20])
def test_a_sealed_frame_is_sound(payload_bytes: int) -> None:
    frame = sealed(payload_bytes)
    assert verify(frame.memory, frame.address) == frame.header
    assert frame.header.frame_bytes == HEADER_BYTES + payload_bytes
    assert np.array_equal(frame.payload, blocks.pattern(frame.address, payload_bytes))


def test_a_frame_does_not_vouch_for_what_stands_behind_it() -> None:
    frame = sealed()
    for more in (1, 5000):
        with pytest.raises(Misplaced):
            verify(np.concatenate((frame.memory, np.full(more, 255, np.uint8))), frame.address)


def test_sealing_again_changes_nothing() -> None:
    frame = sealed()
    before = frame.memory.tobytes()
    frame.payload[0] ^= 1
    frame.seal()
    assert frame.memory[:HEADER_BYTES].tobytes() == before[:HEADER_BYTES]
    with pytest.raises(BadChecksum):
        verify(frame.memory, frame.address)


def test_the_format_is_what_it_has_always_been() -> None:
    # These bytes are on disks. If this fails, raise the version and keep a reader of the old one.
    shelf = Shelf(Digest(b"n" * 32), Digest(b"t" * 32), Digest(b"s" * 32), Part(1, 2, 8, 16, 4))
    header = Header(shelf, Key(b"k" * 32), Key(b"p" * 32), 7, 256, (2, 3, 500), 3000, Fidelity.NEAR)
    memory = np.zeros(header.frame_bytes, np.uint8)
    memory[HEADER_BYTES:] = np.arange(3000) % 251
    Frame(header, memory).seal()
    assert memory[:16].tobytes() == b"kvtide\r\n\x01\x00\x01\x00\x00\x00\x00\x00"
    assert sha256(memory).hexdigest() == "5f0718abfd7b83ae96fc1a8640cea4530f6120009bf8deec23c30289d0f6067e"
    assert verify(memory, header.address) == header


# Damage -----------------------------------------------------------------------------------------------------


def test_no_bit_of_the_header_area_can_change_unnoticed() -> None:
    sound = sealed().memory[:HEADER_BYTES]
    area = sound.copy()
    for at in range(HEADER_BYTES):
        for bit in range(8):
            area[at] ^= 1 << bit
            with pytest.raises(BadMagic if at < len(MAGIC) else BadChecksum):
                decode_header(area)
            area[at] = sound[at]
    decode_header(area)


def test_a_frame_cut_anywhere_in_its_header_is_refused() -> None:
    frame = sealed()
    for length in range(HEADER_BYTES):
        with pytest.raises(Truncated):
            verify(frame.memory[:length], frame.address)


def test_a_frame_cut_anywhere_in_its_payload_is_refused() -> None:
    frame = sealed()
    for length in range(HEADER_BYTES, frame.header.frame_bytes):
        with pytest.raises(Truncated):
            verify(frame.memory[:length], frame.address)


def test_a_header_whose_rest_became_zero_is_refused() -> None:
    # What a torn write leaves: a beginning of the frame, and then what the device gives for nothing.
    frame = sealed()
    for length in range(0, frame.header.frame_bytes, 61):
        torn = np.zeros_like(frame.memory)
        torn[:length] = frame.memory[:length]
        with pytest.raises(Damaged):
            verify(torn, frame.address)


def test_no_flip_in_the_payload_goes_unnoticed() -> None:
    frame = sealed(20_000)
    drawn = random.Random(4)
    for _ in range(10_000):
        at, bit = drawn.randrange(HEADER_BYTES, frame.header.frame_bytes), 1 << drawn.randrange(8)
        frame.memory[at] ^= bit
        with pytest.raises(BadChecksum):
            verify(frame.memory, frame.address)
        frame.memory[at] ^= bit
    verify(frame.memory, frame.address)


@given(st.binary(max_size=2 * HEADER_BYTES), st.booleans())
def test_noise_is_refused(noise: bytes, has_magic: bool) -> None:
    raw = memory_of(((MAGIC if has_magic else b"") + noise).ljust(HEADER_BYTES, b"\0"))
    with pytest.raises(Damaged):
        verify(raw, sealed().address)


# A checksum that fits proves nothing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (BadMagic, {"magic": b"KVTIDE\r\n"}),
        (BadMagic, {"magic": b"kvtide\n\n"}),
        (BadVersion, {"version": VERSION + 1}),
        (BadVersion, {"version": 0}),
        (BadField, {"fidelity": 3}),
        (BadField, {"reserved_a": 1}),
        (BadField, {"reserved_b": 1}),
        (BadField, {"tokens": 0}),
        (BadField, {"position": 0}),
        (BadField, {"parent": NO_PARENT}),
        (BadField, {"part": bytes(16)}),  # rank 0 of 0
        (BadField, {"part": Part().pack()[:-1] + b"\1"}),
        (BadField, {"page_bytes": 5999}),
        (BadField, {"layers": 2**32 - 1, "pages": 2**32 - 1, "page_bytes": 2**32 - 1}),
        (BadField, {"layers": 1 << 20, "pages": 1 << 20, "page_bytes": 2, "raw_bytes": 1 << 41}),
        (BadField, {"raw_bytes": 6001}),
        (BadField, {"stored_bytes": 6001}),
        (BadField, {"stored_bytes": PAYLOAD_BYTES_MAX + 1}),
        (BadField, {"stored_bytes": 2**64 - 1}),
        (BadVersion, {"codec_a": 1}),
        (BadVersion, {"codec_d": 2**16 - 1}),
    ],
)
def test_a_field_that_cannot_be_is_refused(error: type[Damaged], changes: dict[str, object]) -> None:
    with pytest.raises(error):
        decode_header(area_with(**changes))


def test_room_for_later_versions_must_be_empty() -> None:
    raw = bytearray(sealed().memory[:HEADER_BYTES].tobytes())
    raw[3000] = 1
    with pytest.raises(BadField):
        decode_header(memory_of(with_check(bytes(raw))))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "version": st.sampled_from([0, VERSION, VERSION + 1, 2**16 - 1]),
            "fidelity": st.integers(0, 5),
            "reserved_a": st.sampled_from([0, 0, 1]),
            "key": digests,
            "parent": st.one_of(st.just(NO_PARENT), digests),
            "position": st.sampled_from([0, 1, 2**32 - 1]),
            "tokens": st.sampled_from([0, 1, 2**32 - 1]),
            "namespace": digests,
            "tenant": digests,
            "scope": digests,
            "part": st.one_of(st.binary(min_size=16, max_size=16), parts.map(Part.pack)),
            "codec_b": st.sampled_from([0, 0, 1]),
            "layers": st.sampled_from([0, 1, 2, 2**32 - 1]),
            "pages": st.sampled_from([0, 1, 3, 2**32 - 1]),
            "page_bytes": st.sampled_from([0, 1, 1000, 6000, 2**32 - 1]),
            "raw_bytes": st.sampled_from([0, 1, 6000, 12_000, 2**63, 2**64 - 1]),
            "stored_bytes": st.sampled_from([0, 1, 6000, 12_000, 2**63, 2**64 - 1]),
            "payload_check": st.binary(min_size=16, max_size=16),
        },
    )
)
def test_a_forged_header_is_refused_or_means_exactly_what_it_says(changes: dict[str, object]) -> None:
    area = area_with(**changes)
    try:
        header, check = decode_header(area)
    except Damaged:
        return
    assert encode_header(header, check) == area.tobytes()


@given(st.integers(0, 255), st.binary(min_size=1, max_size=32))
def test_bytes_forged_anywhere_are_refused_or_mean_exactly_what_they_say(at: int, forged: bytes) -> None:
    raw = bytearray(sealed().memory[:HEADER_BYTES].tobytes())
    raw[at : at + len(forged)] = forged
    area = memory_of(with_check(bytes(raw)))
    try:
        header, check = decode_header(area)
    except Damaged:
        return
    assert encode_header(header, check) == area.tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"position": -1},
        {"position": 1 << 32},
        {"tokens": 0},
        {"tokens": 1 << 32},
        {"position": 0},
        {"parent": NO_PARENT},
        {"stored_bytes": -1},
        {"stored_bytes": 6001},
        {"shape": (1, 1, 5999)},
        {"shape": (1 << 14, 1 << 14, 1 << 14)},
        {"shape": (1 << 32, 0, 6000), "stored_bytes": 0},
        {"shape": (-1, -1, 6000)},
    ],
)
def test_an_impossible_header_is_never_written(changes: dict[str, object]) -> None:
    with pytest.raises(BadField):
        encode_header(header_with(**changes), bytes(16))


def test_a_codec_of_the_future_is_neither_written_nor_read() -> None:
    with pytest.raises(BadVersion):
        encode_header(header_with(codecs=(0, 0, 7, 0)), bytes(16))


# A sound frame in the wrong place ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": Digest(bytes(32))},
        {"tenant": Digest(bytes(32))},
        {"scope": Digest(bytes(32))},
        {"part": Part(rank=1, ranks=2)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_frame_of_another_shelf_is_refused(change: dict[str, object]) -> None:
    frame = sealed()
    other = Shelf(
        **{name: getattr(frame.header.shelf, name) for name in ("namespace", "tenant", "scope", "part")} | change
    )
    with pytest.raises(Misplaced):
        verify(frame.memory, Address(other, frame.header.key))


def test_a_frame_of_another_key_is_refused() -> None:
    frame = sealed()
    with pytest.raises(Misplaced):
        verify(frame.memory, Address(frame.header.shelf, blocks.chain_keys("other", 1)[0]))


def test_a_frame_of_another_address_is_refused_before_its_payload_is_looked_at() -> None:
    frame = sealed()
    with pytest.raises(Misplaced):
        verify(frame.memory[:HEADER_BYTES], Address(frame.header.shelf, NO_PARENT))


def test_the_checksum_of_a_payload_is_that_of_its_bytes_alone() -> None:
    frame = sealed()
    shifted = np.concatenate(([7], frame.payload)).astype(np.uint8)[1:]
    assert payload_checksum(shifted) == payload_checksum(frame.payload) != payload_checksum(frame.payload[1:])


def test_without_xxhash_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from kvtide.errors import MissingExtra\n"
        "try:\n    import kvtide.frame\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "kvtide[serve]" in said
