# SPDX-License-Identifier: Apache-2.0
"""Content addresses: which block this is, and for whom and for which model it may be used.

Owns the names of things: namespaces, tenants, scopes, parts, shelves, and the keys of blocks.
Promises that equal keys mean equal tokens under an equal root: 32 bytes, never truncated, the same on
every machine and in every process. Does no I/O, keeps no state, and knows neither text nor tensors.
A key is an address, not a permission: whoever serves a block still checks the tenant of its shelf.

Every hashed message starts with a tag of its own (`*_TAG`), so no two kinds of message can be equal.
`lp(x)` is x behind its length as u32. All integers are little-endian.

    namespace digest   SHA-256   lp(tag) then for each field, by name: lp(name) type letter lp(value)
    tenant, scope      SHA-256   lp(tag) lp(name in UTF-8)
    root               HMAC(tenant secret)   lp(tag) lp(namespace digest) lp(scope digest)
    key, our chain     SHA-256   tag                      8 bytes
                                 token count n            u32
                                 parent key, or the root  32 bytes
                                 tokens                   n * u32
                                 extras, sorted, each     kind u16, length u16, offset in block u32, digest
    key, engine's      HMAC(root)   lp(tag) lp(origin) digest of the block's last page
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import math
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Final, NamedTuple, NewType, Self, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, Rejected

Key = NewType("Key", bytes)
Digest = NewType("Digest", bytes)

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | memoryview
RopeValue: TypeAlias = str | bool | int | float | tuple[int | float, ...]
RopeParams: TypeAlias = tuple[tuple[str, RopeValue], ...]

KEY_BYTES: Final = 32
PART_BYTES: Final = 16
SHELF_BYTES: Final = 3 * KEY_BYTES + PART_BYTES
SECRET_BYTES_MIN: Final = 16
ENGINE_DIGEST_BYTES_MIN: Final = 8
EXTRA_DIGEST_BYTES_MAX: Final = 255

# Raised whenever blocks written before must not be read as blocks written after: a new order of the
# payload, a new rule of the chain. It is part of every namespace, so old blocks become misses.
FORMAT_VERSION: Final = 1

# Stands where the parent of a chain's first block would stand.
NO_PARENT: Final = Key(bytes(KEY_BYTES))

# Stands in for a tenant's secret where there is one user and nobody to hide from. It is public: roots made
# from it separate namespaces and scopes, and protect nothing.
PUBLIC_SECRET: Final = b"kvtide: one user, no tenants, no secret"

_NAMESPACE_TAG: Final = b"kvtide namespace"
_TENANT_TAG: Final = b"kvtide tenant"
_SCOPE_TAG: Final = b"kvtide scope"
_ROOT_TAG: Final = b"kvtide root"
_ENGINE_TAG: Final = b"kvtide engine key"
# 8 bytes: with count 4, parent 32 and SHA-256's own padding 9 that is 53 of a round of 64. Blocks of a multiple
# of 16 tokens fill whole rounds, so tag and count cost no round beyond the one that the parent opens.
_CHAIN_TAG: Final = b"kvtchain"

_U16_MAX: Final = 2**16 - 1
_U32_MAX: Final = 2**32 - 1
_U32: Final = struct.Struct("<I")
_PART: Final = struct.Struct("<5H6s")
_PART_RESERVED: Final = bytes(6)
_SHELF: Final = struct.Struct(f"{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{PART_BYTES}s")
_EXTRA: Final = struct.Struct("<HHI")


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Which piece of a block's KV: one rank's heads, one KV group, one range of layers.

    A part is no input of the key chain: eight ranks hash the tokens once and ask for eight parts.
    MLA latents are equal on all ranks, so they are stored once, as rank 0 of 1.
    `layer_count` 0 means all layers of the group.
    """

    group: int = 0
    rank: int = 0
    ranks: int = 1
    layer_first: int = 0
    layer_count: int = 0

    def __post_init__(self) -> None:
        for name in ("group", "rank", "ranks", "layer_first", "layer_count"):
            if not 0 <= getattr(self, name) <= _U16_MAX:
                raise ValueError(f"part: {name} must be in 0..{_U16_MAX}, not {getattr(self, name)}")
        if self.rank >= self.ranks:
            raise ValueError(f"part: rank {self.rank} does not exist among {self.ranks} ranks")
        if self.layer_first and not self.layer_count:
            raise ValueError("part: all layers (layer_count 0) begin at layer_first 0")

    def pack(self) -> bytes:
        return _PART.pack(self.group, self.rank, self.ranks, self.layer_first, self.layer_count, _PART_RESERVED)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Read what `pack` wrote. ValueError for anything that `pack` cannot have written."""
        if len(packed) != PART_BYTES:
            raise ValueError(f"part: {PART_BYTES} bytes expected, not {len(packed)}")
        *numbers, reserved = _PART.unpack(packed)
        if reserved != _PART_RESERVED:
            raise ValueError("part: reserved bytes are not zero; a newer version may have written this")
        return cls(*numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that keeps the KV of two engines from being interchangeable.

    A field too many costs hits; a field too few serves wrong bytes. All fields enter the digest, those at
    their default too, so a field added later makes new digests and cannot collide with old ones.
    """

    # Other weights give other KV for the same tokens. See `model_identity`.
    model: str
    # The same numbers in bf16 and fp8 are different bytes of different length.
    kv_dtype: str
    # Quantised KV means nothing without the scales it was divided by. Digest of them; "" = not quantised.
    kv_scales: str = ""
    # The shape of the whole model's tensors, whatever a rank holds of them. Equal sizes are not equal shapes:
    # 8 heads of 64 take the bytes of 4 heads of 128.
    layers: int
    kv_heads: int = 0
    head_size: int = 0
    # MLA keeps one latent and one rotated piece for each token in place of heads. 0 = no MLA.
    mla_latent: int = 0
    mla_rope: int = 0
    # Keys are cached already rotated: another base or scaling is another rotation. See `rope_params`.
    rope: RopeParams = ()
    # What left the window is not in later layers' KV, so the window's length shapes every value. 0 = none.
    window: int = 0
    # The payload is cut by page, and the chain by block: both shift every byte and every key.
    page_tokens: int
    block_tokens: int
    # Order of the dimensions inside a page. CPU engines also pack by instruction set, so they name it here.
    layout: str
    # An adapter changes the projections that make the KV. Digest of its weights and scale, since names get
    # reused for new weights; "" = none.
    adapter: str = ""
    # An engine's digest stands for a prompt only together with the algorithm, seed and version that made it.
    # See `engine_origin`; "" = our own chain.
    hash_origin: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("model", "kv_dtype", "layout"):
            if not getattr(self, name):
                raise ConfigError(f"namespace: {name} is empty; it must say what the engine uses", field=name)
        for name in ("layers", "page_tokens", "block_tokens", "format_version"):
            _check_range(name, getattr(self, name), least=1)
        for name in ("kv_heads", "head_size", "mla_latent", "mla_rope", "window"):
            _check_range(name, getattr(self, name), least=0)
        if not self.mla_latent and not (self.kv_heads and self.head_size):
            raise ConfigError("namespace: give kv_heads and head_size, or mla_latent for an MLA model")
        if self.block_tokens % self.page_tokens:
            raise ConfigError(
                f"namespace: block_tokens {self.block_tokens} is no multiple of page_tokens"
                f" {self.page_tokens}; round it down to one",
                field="block_tokens",
            )
        # By their encoding: 10000 and 10000.0 are equal in Python but not as bytes of a digest.
        if _encode(rope_params(dict(self.rope))) != _encode(self.rope):
            raise ConfigError("namespace: rope is not in canonical form; build it with rope_params()")

    def digest(self) -> Digest:
        """Digest every field behind its name, so that no two different namespaces are one message."""
        fields = self._encoded_fields()
        encoded = b"".join(_prefixed(name.encode()) + fields[name] for name in sorted(fields))
        return Digest(sha256(_prefixed(_NAMESPACE_TAG) + encoded).digest())

    def differences(self, other: Namespace) -> list[str]:
        """Name the fields that keep blocks of the two apart; empty exactly when the digests are equal."""
        theirs = other._encoded_fields()
        return [name for name, encoded in self._encoded_fields().items() if encoded != theirs[name]]

    def _encoded_fields(self) -> dict[str, bytes]:
        return {item.name: _encode(getattr(self, item.name)) for item in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where all blocks of one namespace, tenant, scope and part stand. Shelf and key make an address."""

    namespace: Digest
    tenant: Digest
    scope: Digest
    part: Part
    # Shelves are dict keys on the path of every lookup; hashing four fields each time would show there.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("namespace", "tenant", "scope"):
            _check_digest(f"shelf: {name}", getattr(self, name))
        object.__setattr__(self, "_hash", hash((self.namespace, self.tenant, self.scope, self.part)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Shelf], tuple[Digest, Digest, Digest, Part]]:
        # A copy made in another process must hash anew: bytes hash differently in each process.
        return Shelf, (self.namespace, self.tenant, self.scope, self.part)

    def pack(self) -> bytes:
        return self.namespace + self.tenant + self.scope + self.part.pack()

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Read what `pack` wrote. ValueError for anything that `pack` cannot have written."""
        if len(packed) != SHELF_BYTES:
            raise ValueError(f"shelf: {SHELF_BYTES} bytes expected, not {len(packed)}")
        namespace, tenant, scope, part = _SHELF.unpack(packed)
        return cls(Digest(namespace), Digest(tenant), Digest(scope), Part.unpack(part))


class Keys(Sequence[Key]):
    """Many keys, as one run of bytes or one by one: each form is made from the other when it is first asked for."""

    __slots__ = ("_count", "_joined", "_split")

    def __init__(self, joined: bytes) -> None:
        if len(joined) % KEY_BYTES:
            raise ValueError(f"keys are {KEY_BYTES} bytes each: {len(joined)} bytes are no whole number of them")
        self._joined: bytes | None = joined
        self._split: tuple[Key, ...] | None = None
        self._count = len(joined) // KEY_BYTES

    @classmethod
    def of(cls, keys: Sequence[Key]) -> Keys:
        if isinstance(keys, Keys):
            return keys
        self = cls(b"")
        self._joined, self._split, self._count = None, tuple(keys), len(keys)
        return self

    @property
    def joined(self) -> bytes:
        """As they travel, and as they are compared."""
        if self._joined is None:
            assert self._split is not None
            self._joined = b"".join(self._split)
            if len(self._joined) != self._count * KEY_BYTES:
                raise Rejected(f"keys are bytes of length {KEY_BYTES}")
        return self._joined

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Key: ...

    @overload
    def __getitem__(self, index: slice) -> Keys: ...

    def __getitem__(self, index: int | slice) -> Key | Keys:
        if isinstance(index, slice):
            start, end, step = index.indices(self._count)
            if step != 1:
                raise ValueError("keys are cut into runs, not picked one by one")
            if self._split is not None:
                return Keys.of(self._split[start:end])
            return Keys(self.joined[start * KEY_BYTES : max(start, end) * KEY_BYTES])
        if self._split is not None:
            return self._split[index]
        start = range(self._count)[index] * KEY_BYTES
        return Key(self.joined[start : start + KEY_BYTES])

    def __iter__(self) -> Iterator[Key]:
        if self._split is None:
            # One C call makes all of them: a sixth of the time of slicing.
            self._split = struct.unpack(f"{KEY_BYTES}s" * self._count, self.joined)
        return iter(self._split)

    def __eq__(self, other: object) -> bool:
        return self.joined == other.joined if isinstance(other, Keys) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.joined)


class Address(NamedTuple):
    """Where one part of one block stands."""

    shelf: Shelf
    key: Key


class ExtraKind(IntEnum):
    """What beside its token ids decides a block's KV. The numbers are format: append, never renumber."""

    CONTENT = 1  # an image, sound or video behind placeholder tokens
    EMBEDDING = 2  # embeddings given in place of tokens
    POSITION = 3  # positions that do not count up from zero


@dataclass(frozen=True, slots=True)
class Extra:
    """Something that begins at token `offset` of the prompt and changes the KV from there on."""

    kind: int
    offset: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.kind <= _U16_MAX:
            raise ValueError(f"extra: kind must be in 0..{_U16_MAX}, not {self.kind}")
        if self.offset < 0:
            raise ValueError(f"extra: offset must not be negative, not {self.offset}")
        if not 1 <= len(self.digest) <= EXTRA_DIGEST_BYTES_MAX:
            raise ValueError(f"extra: {len(self.digest)} bytes are no digest; 1..{EXTRA_DIGEST_BYTES_MAX} are")


def rope_params(settings: Mapping[str, object]) -> RopeParams:
    """Bring a model's RoPE settings into the one form that a namespace takes.

    Nested settings become `outer/inner`. Engines disagree on whether a base is 10000 or 10000.0 and on
    whether an absent setting is null or missing: neither may cost a hit.
    """
    params: list[tuple[str, RopeValue]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            params += [(f"{name}/{inner}", inner_value) for inner, inner_value in rope_params(value)]
        elif value is not None:
            params.append((name, _rope_value(name, value)))
    if len(dict(params)) < len(params):
        raise ConfigError("rope: a setting stands there twice, plain and nested; remove one of the two")
    return tuple(sorted(params, key=lambda param: param[0]))


def engine_origin(engine: str, *, algorithm: str, seed: str, version: str) -> str:
    """Name a source of chained digests so that two sources which may disagree never share a name.

    `version` is that of the engine's hash scheme where it has one, else that of the engine.
    """
    return json.dumps([engine, algorithm, seed, version], separators=(",", ":"))


def tenant_digest(name: str) -> Digest:
    """Stand in for a tenant on media and in logs. The secret is no input, so nobody can guess at it here."""
    return _name_digest(_TENANT_TAG, name)


def scope_digest(name: str) -> Digest:
    """Stand in for a scope inside a tenant. Never equal to the digest of a tenant of the same name."""
    return _name_digest(_SCOPE_TAG, name)


def derive_root(tenant_secret: bytes, namespace: Digest, scope: Digest) -> Key:
    """Make the key that all chains of one tenant, namespace and scope start from.

    Whoever holds a root can compute keys of its blocks and nothing of the secret, so roots may go to engines.
    """
    if len(tenant_secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"tenant secret: {len(tenant_secret)} bytes can be guessed; use at least {SECRET_BYTES_MIN}"
            " random ones, for example from `openssl rand -hex 32`"
        )
    _check_digest("root: namespace", namespace)
    _check_digest("root: scope", scope)
    message = _prefixed(_ROOT_TAG) + _prefixed(namespace) + _prefixed(scope)
    return Key(hmac.digest(tenant_secret, message, "sha256"))


def chain(parent: Key, tokens: Tokens, block_tokens: int, extras: Sequence[Extra] = (), position: int = 0) -> list[Key]:
    """Give one key for each full block of `tokens`; a tail shorter than a block has none.

    From the start of a prompt, `parent` is the root and `position` 0. To go on where an earlier call ended,
    pass its last key, the tokens since, and the `position` of the first of them in the prompt: the keys are
    those of one call over everything. Offsets of `extras` count from the start of the prompt always, so the
    same extras can be passed each time; those before `position` are in `parent` already.
    An extra changes the key of its block and of all later blocks.

    Takes lists and tuples of numbers, and whatever numpy sees as integers, without a copy if they have 32 bits.
    ValueError for an id that is no u32, in the tail too; TypeError for an array of anything but integers.
    """
    _check_digest("chain: parent", parent)
    if not 1 <= block_tokens <= _U32_MAX:
        raise ValueError(f"chain: block_tokens must be in 1..{_U32_MAX}, not {block_tokens}")
    if position < 0 or position % block_tokens:
        raise ValueError(f"chain: position {position} is no multiple of block_tokens {block_tokens}")
    # Tag and count come first so that they are hashed once: copying a state is cheaper than making one.
    start = sha256(_CHAIN_TAG + _U32.pack(block_tokens))
    digest: bytes = parent
    keys: list[bytes] = []
    for block in _block_inputs(tokens, block_tokens, extras, position):
        state = start.copy()
        state.update(digest)
        state.update(block)
        digest = state.digest()
        keys.append(digest)
    # One cast for the list: to call Key() for each block is a function call for nothing.
    return cast(list[Key], keys)


def from_engine_digests(root: Key, origin: str, digests: Sequence[bytes], pages_per_block: int = 1) -> list[Key]:
    """Give one key for each full block of an engine's own page digests, in their order.

    The digests must be chained, each covering all pages before it: then the last page of a block tells the
    whole block, and the others need no look. `origin` is the namespace's `hash_origin`.
    """
    _check_digest("engine keys: root", root)
    if not origin:
        raise ValueError("engine keys: origin is empty; build it with engine_origin()")
    if pages_per_block < 1:
        raise ValueError(f"engine keys: pages_per_block must be at least 1, not {pages_per_block}")
    # By index, not by slice: engines hand out lazy sequences that know no steps.
    last_pages = [digests[page] for page in range(pages_per_block - 1, len(digests), pages_per_block)]
    lengths = set(map(len, last_pages))
    if len(lengths) > 1 or min(lengths, default=ENGINE_DIGEST_BYTES_MIN) < ENGINE_DIGEST_BYTES_MIN:
        raise ValueError(
            f"engine keys: digests must have one length of at least {ENGINE_DIGEST_BYTES_MIN} bytes,"
            f" not {sorted(lengths)}"
        )
    start = hmac.new(root, _prefixed(_ENGINE_TAG) + _prefixed(origin.encode()), "sha256")
    keys: list[bytes] = []
    for digest in last_pages:
        state = start.copy()
        state.update(digest)
        keys.append(state.digest())
    return cast(list[Key], keys)


def _block_inputs(
    tokens: Tokens, block_tokens: int, extras: Sequence[Extra], position: int
) -> list[memoryview | bytes]:
    """Cut tokens into full blocks, as bytes, each followed by the records of its extras."""
    data = _token_bytes(tokens)
    block_bytes = block_tokens * _U32.size
    # A list, and not a generator: being resumed for each block costs a few percent of the whole chain.
    inputs: list[memoryview | bytes] = [
        data[start : start + block_bytes] for start in range(0, len(data) - block_bytes + 1, block_bytes)
    ]
    for index, records in _extra_records(extras, block_tokens, position).items():
        if 0 <= index < len(inputs):
            inputs[index] = b"".join((inputs[index], *records))
    return inputs


def _extra_records(extras: Sequence[Extra], block_tokens: int, position: int) -> dict[int, list[bytes]]:
    """Encode the extras of each block, under the block's index from `position`.

    Sorted, so that the order in which a caller found them does not matter; with lengths, so that no two
    different sets of extras make the same bytes.
    """
    by_block: defaultdict[int, list[bytes]] = defaultdict(list)
    for extra in extras:
        index, offset = divmod(extra.offset - position, block_tokens)
        record = _EXTRA.pack(extra.kind, _U32.size + len(extra.digest), offset) + extra.digest
        by_block[index].append(record)
    return {index: sorted(records) for index, records in by_block.items()}


def _token_bytes(tokens: Tokens) -> memoryview:
    """See tokens as little-endian u32, with no Python step for a single token."""
    if isinstance(tokens, bytes | bytearray) or (isinstance(tokens, memoryview) and tokens.itemsize == 1):
        raise TypeError("tokens: bytes may hold a token each or four bytes of one; cast to a wider integer")
    # __array__ is how tensors of the CPU show themselves to numpy without our importing their library.
    if isinstance(tokens, np.ndarray | array | memoryview) or hasattr(tokens, "__array__"):
        return _array_bytes(np.asarray(tokens))
    numbers = tokens if isinstance(tokens, list | tuple) else tuple(tokens)
    try:
        # Three times as fast as array.array or numpy, which take more steps for each number. And twice as
        # fast as struct.pack, which copies all its arguments once more to split off the format.
        return memoryview(struct.Struct(f"<{len(numbers)}I").pack(*numbers))
    except struct.error as error:
        raise ValueError(f"tokens: ids must be integers in 0..{_U32_MAX}") from error


def _array_bytes(numbers: npt.NDArray[np.integer]) -> memoryview:
    if numbers.ndim != 1:
        raise ValueError(f"tokens: one dimension expected, not {numbers.ndim}; pass one prompt at a time")
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"tokens: integers expected, not {numbers.dtype}")
    is_signed, is_wide = numbers.dtype.kind == "i", numbers.itemsize > _U32.size
    if (is_signed and numbers.min(initial=0) < 0) or (is_wide and numbers.max(initial=0) > _U32_MAX):
        raise ValueError(f"tokens: ids must be in 0..{_U32_MAX}")
    if is_signed and numbers.itemsize == _U32.size:
        # Without a negative among them the bits are the same with and without a sign: no copy needed.
        numbers = numbers.view(f"{numbers.dtype.byteorder}u4")
    return np.ascontiguousarray(numbers, dtype="<u4").view(np.uint8).data


def _encode(value: object) -> bytes:
    """Encode type, length and value, so that values of different types or cuts never meet."""
    if isinstance(value, tuple):
        return b"t" + _prefixed(b"".join(map(_encode, value)))
    if isinstance(value, bool):
        return b"b" + _prefixed(b"1" if value else b"0")
    if isinstance(value, int):
        return b"i" + _prefixed(str(value).encode())
    if isinstance(value, float):
        # Hexadecimal: exact, and the same on every machine.
        return b"f" + _prefixed(value.hex().encode())
    if isinstance(value, str):
        return b"s" + _prefixed(value.encode())
    raise TypeError(f"namespace: a {type(value).__name__} has no canonical form")


def _rope_value(name: str, value: object) -> RopeValue:
    if isinstance(value, list | tuple):
        return tuple(_rope_number(name, number) for number in value)
    if isinstance(value, str | bool):
        return value
    return _rope_number(name, value)


def _rope_number(name: str, value: object) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return int(value) if value == int(value) else value
    raise ConfigError(f"rope: {name} must be text, finite numbers or a flag, not {value!r}", field=name)


def _prefixed(piece: bytes) -> bytes:
    return _U32.pack(len(piece)) + piece


def check_chain(keys: Sequence[Key], position: int, parent: Key) -> None:
    """Raise Rejected unless these can be consecutive blocks of a chain: a frame could not say what is not true."""
    if type(position) is not int or not 0 <= position <= (1 << 32) - len(keys):
        raise Rejected(f"position is {position!r}: give it the number of blocks that come before the first key")
    if (position == 0) != (parent == NO_PARENT):
        raise Rejected("the first block of a chain, and only it, has no parent: give position and parent together")
    if set(map(type, (*keys, parent))) != {bytes} or set(map(len, (*keys, parent))) != {KEY_BYTES}:
        raise Rejected(f"keys and parent are bytes of length {KEY_BYTES}")
    if NO_PARENT in keys:
        raise Rejected("a key of zeros stands for no block")


def _name_digest(tag: bytes, name: str) -> Digest:
    return Digest(sha256(_prefixed(tag) + _prefixed(name.encode())).digest())


def _check_digest(what: str, digest: bytes) -> None:
    if len(digest) != KEY_BYTES:
        raise ValueError(f"{what} must have {KEY_BYTES} bytes, not {len(digest)}")


def _check_range(name: str, value: int, least: int) -> None:
    if not least <= value <= _U32_MAX:
        raise ConfigError(f"namespace: {name} must be in {least}..{_U32_MAX}, not {value}", field=name)
