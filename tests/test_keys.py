# SPDX-License-Identifier: Apache-2.0
"""Keys: the same everywhere and forever (golden values), and different wherever anything differs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import hmac
import os
import struct
import subprocess
import sys
from array import array
from collections import UserList
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.keys import (
    EXTRA_DIGEST_BYTES_MAX,
    KEY_BYTES,
    PUBLIC_SECRET,
    SHELF_BYTES,
    Address,
    Digest,
    Extra,
    ExtraKind,
    Key,
    Namespace,
    Part,
    Shelf,
    Tokens,
    chain,
    derive_root,
    engine_origin,
    from_engine_digests,
    rope_params,
    scope_digest,
    tenant_digest,
)

ROPE = rope_params({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low": 0.5}})
ORIGIN = engine_origin("vllm", algorithm="sha256_cbor", seed="0", version="1")
NAMESPACE = Namespace(
    model="hub:org/name@0123456789abcdef0123456789abcdef01234567",
    kv_dtype="bfloat16",
    layers=32,
    kv_heads=8,
    head_size=128,
    rope=ROPE,
    page_tokens=16,
    block_tokens=32,
    layout="kv-page-head-size",
)
SECRET = b"0123456789abcdef"
SCOPE = scope_digest("customer 7")
ROOT = derive_root(SECRET, NAMESPACE.digest(), SCOPE)
IMAGE = Extra(ExtraKind.CONTENT, offset=5, digest=bytes(range(32)))
PAGE_DIGESTS = [hashlib.sha256(bytes([page])).digest() for page in range(5)]

Value = TypeVar("Value", Namespace, Shelf)

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
block_sizes = st.integers(1, 8)
extras_lists = st.lists(
    st.builds(Extra, kind=st.integers(0, 3), offset=st.integers(0, 40), digest=st.binary(min_size=1, max_size=4)),
    max_size=4,
)


def altered(value: Value, **changes: Any) -> Value:
    return dataclasses.replace(value, **changes)


def lp(piece: bytes) -> bytes:
    return struct.pack("<I", len(piece)) + piece


# Format: a change here makes every stored block unreachable, so it must be meant, and raise FORMAT_VERSION.


def test_golden_digests() -> None:
    assert NAMESPACE.digest().hex() == "07a9692f56a4cad3be10ede2677ff7aa2ad1520d478a28c22591d1f09159f13f"
    assert tenant_digest("acme").hex() == "a0db7bac313c34ed0b8071357b3a5488d0e2c286b1640f982c7ee339e056a134"
    assert SCOPE.hex() == "ff29dfd38a4e319789a6d367688c6018523471b42ce61b33271587ac9bbe835e"


def test_golden_roots() -> None:
    assert ROOT.hex() == "fe3714172cae98809e68ca259ab7ed5e009adf544eea3a89e01118b606ffc93e"
    assert (
        derive_root(PUBLIC_SECRET, NAMESPACE.digest(), SCOPE).hex()
        == "8bead676fdcacbfc57dbd6d021ffdf276834c799f712cfb7579a483efa4a2b96"
    )


def test_golden_chain() -> None:
    assert [key.hex() for key in chain(ROOT, range(10), 4)] == [
        "619f0b0b15656079b2e78d133c2538150e90665424944a437fa57ba6cd682c97",
        "4bf0219e8f64460cba8d0af812b39dbc471104392858f854ec6ebdb4620bb786",
    ]
    assert [key.hex() for key in chain(ROOT, range(10), 4, [IMAGE])] == [
        "619f0b0b15656079b2e78d133c2538150e90665424944a437fa57ba6cd682c97",
        "648e29eb1a2b8b9bfd38c040009cca3906e9c3432658e7d3a5bc38c7b0bd5efe",
    ]


def test_golden_engine_keys() -> None:
    assert ORIGIN == '["vllm","sha256_cbor","0","1"]'
    assert [key.hex() for key in from_engine_digests(ROOT, ORIGIN, PAGE_DIGESTS, pages_per_block=2)] == [
        "b2824e95f0e86d7f52cb525e316bffb9b0f7524fb081ba2325634e973315ef42",
        "05dc13c3d1511a454b09e6ce6eaaf5df3e05e04770f56786476fa3ce909f4721",
    ]


def test_the_chain_hashes_what_its_table_says() -> None:
    first = hashlib.sha256(b"kvtchain" + struct.pack("<I", 4) + ROOT + struct.pack("<4I", 0, 1, 2, 3)).digest()
    record = struct.pack("<HHI", 1, 4 + 32, 5 - 4) + IMAGE.digest
    second = hashlib.sha256(b"kvtchain" + struct.pack("<I", 4) + first + struct.pack("<4I", 4, 5, 6, 7) + record)
    assert chain(ROOT, range(10), 4, [IMAGE]) == [first, second.digest()]


def test_engine_keys_and_roots_hash_what_their_table_says() -> None:
    root = hmac.digest(SECRET, lp(b"kvtide root") + lp(NAMESPACE.digest()) + lp(SCOPE), "sha256")
    message = lp(b"kvtide engine key") + lp(ORIGIN.encode()) + PAGE_DIGESTS[1]
    assert root == ROOT
    assert from_engine_digests(ROOT, ORIGIN, PAGE_DIGESTS)[1] == hmac.digest(root, message, "sha256")


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_the_hash_seed_of_the_process(hash_seed: str) -> None:
    program = (
        "from kvtide.keys import *\n"
        f"namespace = Namespace(**{dataclasses.asdict(NAMESPACE)!r})\n"
        f"root = derive_root({SECRET!r}, namespace.digest(), scope_digest('customer 7'))\n"
        f"print(*(key.hex() for key in chain(root, range(10), 4, [Extra(1, 5, {IMAGE.digest!r})])))"
    )
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [key.hex() for key in chain(ROOT, range(10), 4, [IMAGE])]


# Tokens


def as_every_container(tokens: list[int]) -> dict[str, Tokens]:
    """Give the same small tokens in every shape that engines hold them in."""
    gapped = np.zeros(2 * len(tokens), dtype=np.int32)
    gapped[::2] = tokens
    containers: dict[str, Tokens] = {
        "tuple": tuple(tokens),
        "other sequence": UserList(tokens),
        "memoryview": memoryview(array("I", tokens)),
        "memoryview of 64 bits": memoryview(array("q", tokens)),
        "gapped": gapped[::2],
        "gapped memoryview": gapped.data[::2],
        "reversed twice": np.array(tokens[::-1], dtype=np.uint32)[::-1],
    }
    for typecode in "bBhHiIlLqQ":
        containers[f"array of {typecode}"] = array(typecode, tokens)
    for dtype in ("i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"):
        containers[f"numpy {dtype}"] = np.array(tokens, dtype=dtype)
    return containers


@given(tokens=st.lists(st.integers(0, 127), max_size=40), block_tokens=block_sizes)
def test_keys_do_not_depend_on_the_container(tokens: list[int], block_tokens: int) -> None:
    expected = chain(ROOT, tokens, block_tokens)
    for name, container in as_every_container(tokens).items():
        assert chain(ROOT, container, block_tokens) == expected, name


@given(tokens=tokens_lists, block_tokens=block_sizes)
def test_large_ids_do_not_depend_on_the_container(tokens: list[int], block_tokens: int) -> None:
    expected = chain(ROOT, tokens, block_tokens)
    for container in (array("I", tokens), array("q", tokens), np.array(tokens, "u4"), np.array(tokens, "i8")):
        assert chain(ROOT, container, block_tokens) == expected


def test_what_numpy_can_take_as_an_array_is_taken() -> None:
    class Tensor:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.arange(10)

    assert chain(ROOT, Tensor(), 4) == chain(ROOT, list(range(10)), 4)  # type: ignore[arg-type]  # as a tensor would


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, -(2**63)])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_ids_outside_u32_are_refused_in_lists(bad: int, at: int) -> None:
    tokens = list(range(10))
    tokens[at] = bad
    for container in (tokens, tuple(tokens)):
        with pytest.raises(ValueError, match=r"0\.\.4294967295"):
            chain(ROOT, container, 4)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("i1", -1), ("<i4", -1), (">i4", -(2**31)), ("<i8", -1), ("i8", 2**32), ("u8", 2**63), (">i8", -5)],
)
@pytest.mark.parametrize("at", [0, 3, 9])
def test_ids_outside_u32_are_refused_in_arrays(dtype: str, bad: int, at: int) -> None:
    tokens = np.arange(10).astype(dtype)
    tokens[at] = bad
    with pytest.raises(ValueError, match=r"0\.\.4294967295"):
        chain(ROOT, tokens, 4)


@pytest.mark.parametrize("tokens", [[1.0, 2.0], ["1", "2"], [None, 1]])
def test_lists_of_anything_but_integers_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="integers"):
        chain(ROOT, tokens, 2)


@pytest.mark.parametrize("tokens", [np.zeros(4), np.zeros(4, bool), array("d", [1]), np.array(["a"])])
def test_arrays_of_anything_but_integers_are_refused(tokens: Tokens) -> None:
    with pytest.raises(TypeError, match="integers"):
        chain(ROOT, tokens, 2)


@pytest.mark.parametrize("tokens", [b"1234", bytearray(b"1234"), memoryview(b"1234")])
def test_bytes_are_refused_since_they_can_be_read_in_two_ways(tokens: Tokens) -> None:
    with pytest.raises(TypeError, match="bytes"):
        chain(ROOT, tokens, 1)


def test_a_batch_of_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        chain(ROOT, np.zeros((2, 4), dtype=np.int32), 4)


def test_an_array_is_not_changed() -> None:
    tokens = np.arange(10, dtype=np.int32)
    tokens.flags.writeable = False
    chain(ROOT, tokens, 4)
    assert (tokens == np.arange(10)).all()
    assert tokens.dtype == np.int32


# The chain


@given(tokens=tokens_lists, block_tokens=block_sizes)
def test_only_full_blocks_have_a_key(tokens: list[int], block_tokens: int) -> None:
    keys = chain(ROOT, tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert len(set(keys)) == len(keys)
    assert all(type(key) is bytes and len(key) == KEY_BYTES for key in keys)


@given(tokens=tokens_lists, more=tokens_lists, block_tokens=block_sizes, extras=extras_lists)
def test_a_prefix_has_the_first_keys(
    tokens: list[int], more: list[int], block_tokens: int, extras: list[Extra]
) -> None:
    keys = chain(ROOT, tokens, block_tokens, extras)
    assert chain(ROOT, tokens + more, block_tokens, extras)[: len(keys)] == keys


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), block_tokens=block_sizes, data=st.data())
def test_another_token_changes_its_key_and_all_later_and_no_earlier(
    tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] ^= 1 << data.draw(st.integers(0, 31))
    assert_differ_from(at // block_tokens, chain(ROOT, tokens, block_tokens), chain(ROOT, changed, block_tokens))


@given(tokens=tokens_lists, block_tokens=block_sizes, extras=extras_lists, data=st.data())
def test_going_on_gives_the_keys_of_one_call(
    tokens: list[int], block_tokens: int, extras: list[Extra], data: st.DataObject
) -> None:
    keys = chain(ROOT, tokens, block_tokens, extras)
    known = data.draw(st.integers(0, len(keys)))
    parent, position = ([ROOT, *keys])[known], known * block_tokens
    assert chain(parent, tokens[position:], block_tokens, extras, position) == keys[known:]


def test_the_block_size_is_in_the_key() -> None:
    assert not set(chain(ROOT, range(64), 16)) & set(chain(ROOT, range(64), 32))


@pytest.mark.parametrize(("block_tokens", "position"), [(0, 0), (-1, 0), (2**32, 0), (4, 2), (4, -4)])
def test_blocks_that_cannot_be_are_refused(block_tokens: int, position: int) -> None:
    with pytest.raises(ValueError, match="chain"):
        chain(ROOT, range(8), block_tokens, position=position)


def test_a_parent_that_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        chain(Key(b"short"), range(8), 4)


def assert_differ_from(block: int, keys: Sequence[Key], others: Sequence[Key]) -> None:
    assert len(keys) == len(others)
    assert keys[:block] == others[:block]
    assert not set(keys[block:]) & set(others[block:])


# Extras


@given(tokens=tokens_lists, block_tokens=block_sizes, extras=extras_lists, extra=st.sampled_from([IMAGE]))
def test_an_extra_changes_its_key_and_all_later_and_no_earlier(
    tokens: list[int], block_tokens: int, extras: list[Extra], extra: Extra
) -> None:
    without, with_extra = (chain(ROOT, tokens, block_tokens, found) for found in (extras, [*extras, extra]))
    assert_differ_from(extra.offset // block_tokens, without, with_extra)


@given(extras=extras_lists, others=extras_lists)
def test_different_extras_give_different_keys(extras: list[Extra], others: list[Extra]) -> None:
    def canonical(found: list[Extra]) -> list[tuple[int, int, bytes]]:
        return sorted((extra.kind, extra.offset, extra.digest) for extra in found)

    keys, other_keys = (chain(ROOT, range(48), 48, found) for found in (extras, others))
    assert (keys == other_keys) == (canonical(extras) == canonical(others))


@given(extras=extras_lists, data=st.data())
def test_the_order_of_extras_does_not_matter(extras: list[Extra], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(extras))
    assert chain(ROOT, range(40), 8, extras) == chain(ROOT, range(40), 8, shuffled)


def test_bytes_cannot_move_between_tokens_and_extras() -> None:
    # One extra whose record has the bytes of two, and tokens that have the bytes of a record.
    inner = struct.pack("<HHI", 1, 4 + 1, 0) + b"b"
    assert chain(ROOT, [7], 1, [Extra(1, 0, b"a"), Extra(1, 0, b"b")]) != chain(
        ROOT, [7], 1, [Extra(1, 0, b"a" + inner)]
    )
    record_as_tokens = struct.unpack("<3I", struct.pack("<HHI", 1, 4 + 4, 0) + b"abcd")
    assert chain(ROOT, [7], 1, [Extra(1, 0, b"abcd")])[0] != chain(ROOT, [7, *record_as_tokens], 4)[0]


@pytest.mark.parametrize(
    ("kind", "offset", "digest"),
    [(-1, 0, b"x"), (2**16, 0, b"x"), (1, -1, b"x"), (1, 0, b""), (1, 0, bytes(EXTRA_DIGEST_BYTES_MAX + 1))],
)
def test_extras_that_cannot_be_are_refused(kind: int, offset: int, digest: bytes) -> None:
    with pytest.raises(ValueError, match="extra"):
        Extra(kind, offset, digest)


# Roots


def test_tenants_scopes_and_namespaces_share_no_key() -> None:
    other_namespace = dataclasses.replace(NAMESPACE, kv_dtype="float8_e4m3")
    roots = [
        derive_root(secret, namespace.digest(), scope)
        for secret in (PUBLIC_SECRET, SECRET, SECRET + b"!")
        for namespace in (NAMESPACE, other_namespace)
        for scope in (SCOPE, scope_digest(""))
    ]
    keys = [key for root in roots for key in chain(root, range(64), 4)]
    keys += [key for root in roots for key in from_engine_digests(root, ORIGIN, PAGE_DIGESTS)]
    assert len(set(keys) | set(roots)) == len(keys) + len(roots)


def test_namespace_and_scope_cannot_change_places() -> None:
    a, b = Digest(bytes(32)), Digest(b"\x01" * 32)
    assert derive_root(SECRET, a, b) != derive_root(SECRET, b, a)


def test_a_guessable_secret_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="at least 16") as caught:
        derive_root(b"hunter2", NAMESPACE.digest(), SCOPE)
    assert "hunter2" not in str(caught.value)


def test_a_root_takes_whole_digests_only() -> None:
    for namespace, scope in ((b"x", SCOPE), (NAMESPACE.digest(), b"x")):
        with pytest.raises(ValueError, match="32 bytes"):
            derive_root(SECRET, Digest(namespace), Digest(scope))


def test_a_tenant_and_a_scope_of_one_name_differ() -> None:
    assert tenant_digest("acme") != scope_digest("acme")
    assert len(tenant_digest("")) == len(scope_digest("ünïcode")) == KEY_BYTES


# An engine's own digests


@given(pages=st.integers(0, 20), pages_per_block=st.integers(1, 6))
def test_the_last_page_stands_for_its_block(pages: int, pages_per_block: int) -> None:
    digests = [hashlib.sha256(bytes([page])).digest() for page in range(pages)]
    by_page = from_engine_digests(ROOT, ORIGIN, digests)
    assert (
        from_engine_digests(ROOT, ORIGIN, digests, pages_per_block) == by_page[pages_per_block - 1 :: pages_per_block]
    )


def test_engine_keys_differ_by_origin_and_root() -> None:
    other_origin = engine_origin("vllm", algorithm="sha256_cbor", seed="1", version="1")
    other_root = derive_root(PUBLIC_SECRET, NAMESPACE.digest(), SCOPE)
    keys = [
        key
        for root in (ROOT, other_root)
        for origin in (ORIGIN, other_origin)
        for key in from_engine_digests(root, origin, PAGE_DIGESTS)
    ]
    assert len(set(keys)) == len(keys)


def test_origins_do_not_run_together() -> None:
    assert engine_origin("a,b", algorithm="", seed="", version="") != engine_origin(
        "a", algorithm="b", seed="", version=""
    )


@pytest.mark.parametrize("digest_bytes", [8, 16, 20, 32, 64])
def test_digests_of_any_one_length_are_taken(digest_bytes: int) -> None:
    assert len(from_engine_digests(ROOT, ORIGIN, [bytes(digest_bytes), b"\x01" * digest_bytes])) == 2


@pytest.mark.parametrize("digests", [[bytes(7)], [b""], [bytes(32), bytes(16)]])
def test_short_or_mixed_digests_are_refused(digests: list[bytes]) -> None:
    with pytest.raises(ValueError, match="one length"):
        from_engine_digests(ROOT, ORIGIN, digests)


@pytest.mark.parametrize(
    "call",
    [
        lambda: from_engine_digests(Key(b"short"), ORIGIN, PAGE_DIGESTS),
        lambda: from_engine_digests(ROOT, "", PAGE_DIGESTS),
        lambda: from_engine_digests(ROOT, ORIGIN, PAGE_DIGESTS, 0),
    ],
)
def test_engine_keys_of_nothing_are_refused(call: Callable[[], list[Key]]) -> None:
    with pytest.raises(ValueError, match="engine keys"):
        call()


# Namespaces

# Another valid value for each field. A new field without one here fails the test below.
OTHER_VALUES: dict[str, object] = {
    "model": "id:other",
    "kv_dtype": "float16",
    "kv_scales": "ab12",
    "layers": 33,
    "kv_heads": 9,
    "head_size": 64,
    "mla_latent": 512,
    "mla_rope": 64,
    "rope": rope_params({"rope_theta": 10000}),
    "window": 4096,
    "page_tokens": 32,
    "block_tokens": 64,
    "layout": "page-kv-head-size",
    "adapter": "cd34",
    "hash_origin": ORIGIN,
    "format_version": 2,
}


def test_every_field_changes_the_digest_and_is_named_as_the_difference() -> None:
    digests = {NAMESPACE.digest()}
    for item in dataclasses.fields(Namespace):
        other = altered(NAMESPACE, **{item.name: OTHER_VALUES[item.name]})
        assert NAMESPACE.differences(other) == other.differences(NAMESPACE) == [item.name]
        digests.add(other.digest())
    assert len(digests) == 1 + len(OTHER_VALUES)


def test_equal_namespaces_have_no_difference() -> None:
    same = dataclasses.replace(NAMESPACE)
    assert same.differences(NAMESPACE) == []
    assert same.digest() == NAMESPACE.digest()


@given(st.lists(st.text(max_size=3), min_size=4, max_size=4), st.lists(st.text(max_size=3), min_size=4, max_size=4))
def test_text_cannot_move_from_field_to_field(texts: list[str], others: list[str]) -> None:
    names = ("kv_scales", "adapter", "hash_origin", "model")
    one, other = (
        altered(NAMESPACE, **dict(zip(names, [*values[:3], "x" + values[3]], strict=True)))
        for values in (texts, others)
    )
    assert (one.digest() == other.digest()) == (texts == others) == (one.differences(other) == [])


def test_a_namespace_survives_the_wire() -> None:
    mla = dataclasses.replace(NAMESPACE, rope=rope_params({"long_factor": [1.0, 2.5], "flag": True}))
    for namespace in (NAMESPACE, mla):
        decoded = msgspec.json.decode(msgspec.json.encode(namespace), type=Namespace)
        assert decoded == namespace
        assert decoded.digest() == namespace.digest()


def test_rope_settings_that_mean_the_same_are_the_same() -> None:
    settings = {"rope_theta": 10000.0, "rope_scaling": {"factor": 8, "long": [1.0, 1.5]}, "partial": None}
    same = {"rope_scaling": {"long": (1, 1.5), "factor": 8.0}, "rope_theta": 10000}
    assert rope_params(settings) == rope_params(same)
    assert rope_params(settings) == (("rope_scaling/factor", 8), ("rope_scaling/long", (1, 1.5)), ("rope_theta", 10000))
    assert rope_params({"rope_scaling": None}) == rope_params({}) == ()


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_different_rope_numbers_give_different_digests(one: float, other: float) -> None:
    namespaces = [dataclasses.replace(NAMESPACE, rope=rope_params({"base": base})) for base in (one, other)]
    assert (namespaces[0].digest() == namespaces[1].digest()) == (one == other)


def test_a_flag_is_not_a_number() -> None:
    flag, number = (dataclasses.replace(NAMESPACE, rope=rope_params({"x": value})) for value in (True, 1))
    assert flag.digest() != number.digest()
    assert flag.differences(number) == ["rope"]


@pytest.mark.parametrize(
    "settings",
    [{"x": float("nan")}, {"x": float("inf")}, {"x": object()}, {"x": [True]}, {"x": [[1]]}, {"a/b": 1, "a": {"b": 2}}],
)
def test_rope_settings_without_a_canonical_form_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="rope"):
        rope_params(settings)


@pytest.mark.parametrize("rope", [(("b", 1), ("a", 2)), (("a", 1.0),), (("a", 1), ("a", 1))])
def test_a_namespace_takes_canonical_rope_only(rope: tuple[tuple[str, float], ...]) -> None:
    with pytest.raises(ConfigError, match="rope_params"):
        dataclasses.replace(NAMESPACE, rope=rope)


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"kv_dtype": ""},
        {"layout": ""},
        {"layers": 0},
        {"layers": 2**32},
        {"page_tokens": 0},
        {"block_tokens": 0},
        {"block_tokens": 33},
        {"format_version": 0},
        {"kv_heads": 0},
        {"head_size": 0},
        {"kv_heads": -1},
        {"mla_latent": -1},
        {"mla_rope": -1},
        {"window": -1},
    ],
)
def test_namespaces_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        altered(NAMESPACE, **change)


def test_an_mla_namespace_needs_no_heads() -> None:
    mla = dataclasses.replace(NAMESPACE, kv_heads=0, head_size=0, mla_latent=512, mla_rope=64)
    assert mla.digest() != NAMESPACE.digest()


# Parts, shelves, addresses

u16 = st.integers(0, 2**16 - 1)
parts = st.builds(
    lambda group, ranks, layer_first, layer_count, rank: Part(group, rank % ranks, ranks, layer_first, layer_count),
    u16,
    st.integers(1, 2**16 - 1),
    u16,
    st.integers(1, 2**16 - 1),
    u16,
)


@given(parts)
def test_a_part_comes_back_from_its_bytes(part: Part) -> None:
    assert len(part.pack()) == 16
    assert Part.unpack(part.pack()) == part


def test_golden_part() -> None:
    assert Part().pack().hex() == "00000000010000000000000000000000"
    assert Part(1, 2, 8, 16, 0x1234).pack().hex() == "01000200080010003412000000000000"


def test_parts_have_an_order() -> None:
    assert sorted([Part(1), Part(rank=1, ranks=2), Part()]) == [Part(), Part(rank=1, ranks=2), Part(1)]


@given(st.binary(min_size=16, max_size=16))
def test_bytes_are_a_part_or_refused(packed: bytes) -> None:
    try:
        part = Part.unpack(packed)
    except ValueError:
        return
    assert part.pack() == packed


@pytest.mark.parametrize("at", range(10, 16))
def test_reserved_bytes_must_be_zero(at: int) -> None:
    packed = bytearray(Part().pack())
    packed[at] = 1
    with pytest.raises(ValueError, match="reserved"):
        Part.unpack(bytes(packed))


@pytest.mark.parametrize("packed", [b"", bytes(15), bytes(17)])
def test_a_part_of_the_wrong_length_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Part.unpack(packed)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"ranks": 0},
        {"rank": -1},
        {"group": 2**16},
        {"ranks": 2**16},
        {"layer_first": 1},
        {"layer_count": 2**16},
    ],
)
def test_parts_that_cannot_be_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="part"):
        Part(**fields)


SHELF = Shelf(NAMESPACE.digest(), tenant_digest("acme"), SCOPE, Part(rank=3, ranks=8))


def test_a_shelf_comes_back_from_its_bytes() -> None:
    packed = SHELF.pack()
    assert packed == SHELF.namespace + SHELF.tenant + SHELF.scope + SHELF.part.pack()
    assert len(packed) == SHELF_BYTES == 112
    again = Shelf.unpack(packed)
    assert again == SHELF
    assert hash(again) == hash(SHELF)


def test_shelves_differ_in_every_field() -> None:
    other = Digest(b"\x07" * KEY_BYTES)
    changes: list[dict[str, object]] = [{"namespace": other}, {"tenant": other}, {"scope": other}, {"part": Part()}]
    shelves = [SHELF, *(altered(SHELF, **change) for change in changes)]
    assert len(set(shelves)) == len(shelves)
    assert {Address(shelf, ROOT): shelf for shelf in shelves}[Address(SHELF, ROOT)] is SHELF


def test_a_copied_shelf_hashes_like_its_original() -> None:
    assert copy.deepcopy(SHELF) == SHELF
    assert hash(copy.deepcopy(SHELF)) == hash(SHELF)


@pytest.mark.parametrize("name", ["namespace", "tenant", "scope"])
def test_a_shelf_takes_whole_digests_only(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        altered(SHELF, **{name: Digest(b"short")})


@pytest.mark.parametrize("packed", [b"", SHELF.pack()[:-1], SHELF.pack() + b"\0"])
def test_a_shelf_of_the_wrong_length_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="112 bytes"):
        Shelf.unpack(packed)
