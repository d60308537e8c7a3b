# SPDX-License-Identifier: Apache-2.0
"""Blocks whose bytes follow from their address, so that whoever reads one can tell whether it is right."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from kvtide.frame import HEADER_BYTES, Frame, Header
from kvtide.keys import NO_PARENT, Address, Digest, Key, Part, Shelf, scope_digest, tenant_digest
from kvtide.layout import Memory

_PATTERN_BYTES = 1 << 16


def shelf(tenant: str = "tenant", *, namespace: str = "model", scope: str = "", part: Part | None = None) -> Shelf:
    digest = Digest(sha256(b"test namespace " + namespace.encode()).digest())
    return Shelf(digest, tenant_digest(tenant), scope_digest(scope), part or Part())


def chain_keys(name: object, count: int) -> list[Key]:
    """Keys of a chain that is known by its name alone."""
    return [Key(sha256(f"{name}/{i}".encode()).digest()) for i in range(count)]


def pattern(address: Address, payload_bytes: int) -> Memory:
    """The payload that belongs to an address: another address, or another place in it, has other bytes."""
    seed = int.from_bytes(sha256(address.shelf.pack() + address.key).digest()[:8], "little")
    size = min(payload_bytes, _PATTERN_BYTES)
    tile = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size, np.uint8)
    tiles = -(-payload_bytes // _PATTERN_BYTES)
    # Each tile is the one before it, shifted: cheap, and a swapped or repeated tile is still found.
    return np.concatenate([tile + np.uint8(i * 7 % 256) for i in range(max(tiles, 1))])[:payload_bytes]


def header(
    address: Address, payload_bytes: int, *, position: int = 0, parent: Key = NO_PARENT, tokens: int = 16
) -> Header:
    return Header(address.shelf, address.key, parent, position, tokens, (1, 1, payload_bytes), payload_bytes)


def frame(address: Address, payload_bytes: int, *, position: int = 0, parent: Key = NO_PARENT) -> Frame:
    """A frame of its own memory (not page aligned) with the payload that belongs to its address."""
    memory = np.zeros(HEADER_BYTES + payload_bytes, np.uint8)
    memory[HEADER_BYTES:] = pattern(address, payload_bytes)
    return Frame(header(address, payload_bytes, position=position, parent=parent), memory)


def chain_frames(name: object, count: int, payload_bytes: int, *, on: Shelf | None = None) -> list[Frame]:
    """The frames of a whole chain."""
    place = on or shelf()
    keys = chain_keys(name, count)
    parents = [NO_PARENT, *keys[:-1]]
    return [
        frame(Address(place, key), payload_bytes, position=i, parent=parent)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
