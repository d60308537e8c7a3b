# SPDX-License-Identifier: Apache-2.0
"""The byte format of a block part on every medium: one 4 KiB header area, then the payload.

All numbers are little endian. The header area is checksummed as a whole, so that each of its bits is
covered; the payload has a checksum of its own, made when the frame first leaves DRAM.

    offset  bytes  field
         0      8  magic  "kvtide\\r\\n": a transfer that mangles line ends is found at once
         8      2  format version
        10      2  fidelity class: 0 exact, 1 near, 2 lossy
        12      4  reserved, zero
        16     32  key
        48     32  parent key (zeros for the first block of a chain)
        80      4  position: how many blocks come before this one in its chain
        84      4  token count
        88     32  namespace digest
       120     32  tenant digest
       152     32  scope digest
       184     16  part
       200      8  codec ids, four of two bytes, in the order they were applied (0: none)
       208     12  shape of the raw payload: layers, pages, bytes of a page in a layer
       220      4  reserved, zero
       224      8  raw bytes: the payload before any codec
       232      8  stored bytes: the payload as it stands behind this header
       240     16  payload checksum (xxh3-128 of the stored bytes)
       256   3824  zeros, room for later versions
      4080     16  header checksum (xxh3-128 of bytes 0 to 4079)
      4096      -  payload: layer by layer, inside a layer page by page

`decode_header` and `verify` trust nothing: they check magic, version, checksum, every field's range
and finally that the frame is the one that was asked for. Nothing here unpickles or evaluates.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np

from kvtide.errors import BadChecksum, BadField, BadMagic, BadVersion, Misplaced, MissingExtra, Truncated
from kvtide.keys import NO_PARENT, Address, Digest, Key, Part, Shelf
from kvtide.layout import Memory

try:
    from xxhash import xxh3_128_digest
except ImportError as error:  # the engine side never needs frames, so xxhash is an extra
    raise MissingExtra("frames need the package xxhash: pip install 'kvtide[serve]'") from error

MAGIC = b"kvtide\r\n"
VERSION = 1
HEADER_BYTES = 4096
PAYLOAD_BYTES_MAX = 1 << 40
NO_CODECS = (0, 0, 0, 0)

_FIELDS = struct.Struct("<8sHHI32s32sII32s32s32s16s4H3IIQQ16s")
_CHECK_AT = HEADER_BYTES - 16
_ZEROS = bytes(_CHECK_AT - _FIELDS.size)
assert _FIELDS.size == 256


class Fidelity(IntEnum):
    """How a payload relates to the bytes that the engine produced."""

    EXACT = 0
    NEAR = 1
    LOSSY = 2


class Header(msgspec.Struct, frozen=True, gc=False):  # holds nothing that could refer back to it
    """What a frame says of itself. `stored_bytes` differs from the shape's product only behind a codec."""

    shelf: Shelf
    key: Key
    parent: Key
    position: int
    tokens: int
    shape: tuple[int, int, int]
    stored_bytes: int
    fidelity: Fidelity = Fidelity.EXACT
    codecs: tuple[int, int, int, int] = NO_CODECS

    @property
    def address(self) -> Address:
        return Address(self.shelf, self.key)

    @property
    def raw_bytes(self) -> int:
        layers, pages, page_bytes = self.shape
        return layers * pages * page_bytes

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.stored_bytes

    def check(self) -> None:
        """Raise BadField where a field is impossible: called before writing and again after reading."""
        if not 0 <= self.position < 1 << 32 or not 0 < self.tokens < 1 << 32:
            raise BadField("chain position or token count out of range", position=self.position, tokens=self.tokens)
        if (self.position == 0) != (self.parent == NO_PARENT):
            raise BadField("the first block of a chain, and only it, has no parent", position=self.position)
        if min(self.shape) < 0 or max(self.shape) >= 1 << 32:
            raise BadField("shape out of range", shape=self.shape)
        if self.raw_bytes > PAYLOAD_BYTES_MAX or not 0 <= self.stored_bytes <= PAYLOAD_BYTES_MAX:
            raise BadField("payload too large", shape=self.shape, stored_bytes=self.stored_bytes)
        if self.codecs != NO_CODECS:
            raise BadVersion("the frame was encoded with a codec that this version does not have", codecs=self.codecs)
        if self.stored_bytes != self.raw_bytes:
            raise BadField("stored and raw bytes differ without a codec", shape=self.shape)


def payload_checksum(payload: Memory) -> bytes:
    return xxh3_128_digest(payload)


def encode_header(header: Header, payload_check: bytes) -> bytes:
    """The 4 KiB that stand before a payload with that checksum."""
    header.check()
    shelf = header.shelf
    area = (
        _FIELDS.pack(
            MAGIC,
            VERSION,
            header.fidelity,
            0,
            header.key,
            header.parent,
            header.position,
            header.tokens,
            shelf.namespace,
            shelf.tenant,
            shelf.scope,
            shelf.part.pack(),
            *header.codecs,
            *header.shape,
            0,
            header.raw_bytes,
            header.stored_bytes,
            payload_check,
        )
        + _ZEROS
    )
    return area + xxh3_128_digest(area)


def decode_header(area: Memory) -> tuple[Header, bytes]:
    """Read a header area, or raise Damaged. Returns the header and the checksum its payload must have."""
    if len(area) < HEADER_BYTES:
        raise Truncated("shorter than a header area", bytes=len(area))
    raw = area[:HEADER_BYTES].tobytes()
    if raw[: len(MAGIC)] != MAGIC:
        raise BadMagic("not a frame")
    if xxh3_128_digest(raw[:_CHECK_AT]) != raw[_CHECK_AT:]:
        raise BadChecksum("header checksum differs")
    fields = _FIELDS.unpack_from(raw)
    _, version, fidelity, zero_a, key, parent, position, tokens, namespace, tenant, scope, part = fields[:12]
    codecs, shape, (zero_b, raw_bytes, stored_bytes, payload_check) = fields[12:16], fields[16:19], fields[19:]
    if version != VERSION:
        raise BadVersion(f"frame format {version}, this version reads {VERSION}", version=version)
    if zero_a or zero_b or raw[_FIELDS.size : _CHECK_AT] != _ZEROS:
        raise BadField("reserved bytes are not zero")
    try:
        shelf = Shelf(Digest(namespace), Digest(tenant), Digest(scope), Part.unpack(part))
        fidelity = Fidelity(fidelity)
    except ValueError as error:
        raise BadField(str(error)) from error
    header = Header(shelf, Key(key), Key(parent), position, tokens, shape, stored_bytes, fidelity, codecs)
    if header.raw_bytes != raw_bytes:
        raise BadField("shape and raw bytes differ", shape=shape, raw_bytes=raw_bytes)
    header.check()
    return header, payload_check


def verify(memory: Memory, address: Address) -> Header:
    """Check what was read for `address`; raise Damaged unless every byte of the memory is as it was written."""
    header, payload_check = decode_header(memory)
    if header.key != address.key or header.shelf != address.shelf:
        raise Misplaced("a sound frame of another address")
    if len(memory) < header.frame_bytes:
        raise Truncated("payload shorter than the header says", bytes=len(memory), wanted=header.frame_bytes)
    if len(memory) > header.frame_bytes:  # another frame than the one whose length was known: nothing covers the rest
        raise Misplaced("a frame of another length", bytes=len(memory), wanted=header.frame_bytes)
    if payload_checksum(memory[HEADER_BYTES:]) != payload_check:
        raise BadChecksum("payload checksum differs")
    return header


@dataclass(slots=True)
class Frame:
    """A header and the memory that it is about: `memory` is the header area and the payload, in one piece.

    The memory belongs to whoever made the frame. `seal` fills the header area; until then a frame has no
    checksums, which keeps them off the engine's write path. The thread that moves the frame seals it.
    """

    header: Header
    memory: Memory
    is_sealed: bool = False

    @property
    def address(self) -> Address:
        return self.header.address

    @property
    def payload(self) -> Memory:
        return self.memory[HEADER_BYTES : self.header.frame_bytes]

    def seal(self) -> None:
        if not self.is_sealed:
            area = encode_header(self.header, payload_checksum(self.payload))
            self.memory[:HEADER_BYTES] = np.frombuffer(area, np.uint8)
            self.is_sealed = True
