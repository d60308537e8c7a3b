# SPDX-License-Identifier: Apache-2.0
"""The KV memory of a sequence: the model's cache on one side, blocks of bytes on the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import KINDS, tiny_model
from transformers import DynamicCache, LlamaConfig

from kvtide.engines.transformers.buffer import BufferLayer, Buffers, KvBuffer
from kvtide.engines.transformers.shape import PAGE_TOKENS, KvShape

CONFIG = LlamaConfig(**KINDS["llama"][1])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
shapes = st.builds(
    KvShape,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 5),
    head_size=st.sampled_from([1, 8, 16, 20]),
    dtype=st.sampled_from(DTYPES),
    device=st.just(torch.device("cpu")),
)
SHAPE = KvShape(3, 2, 16, torch.float32, torch.device("cpu"))
LAYOUT = SHAPE.layout(PAGE_TOKENS)


def buffer_of(shape: KvShape, pages: int, tokens_max: int) -> KvBuffer:
    return KvBuffer(shape, shape.layout(pages * PAGE_TOKENS), tokens_max, CONFIG)


def scribble(buffer: KvBuffer, seed: int) -> None:
    """Any bits, also such as are no numbers."""
    buffer.length = buffer.tokens_max
    draw = np.random.default_rng(seed)
    for layer in buffer.cache.layers:
        for part in (layer.keys, layer.values):
            raw = draw.integers(0, 256, (*part.shape[:-1], part.shape[-1] * part.element_size()), np.uint8)
            part.copy_(torch.from_numpy(raw).view(part.dtype))


def bits(buffer: KvBuffer) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(layer, key or value, head, token, bytes)"""
    parts = [
        torch.stack([layer.keys[0], layer.values[0]]).contiguous().view(torch.uint8) for layer in buffer.cache.layers
    ]
    return torch.stack(parts).numpy()


@given(shapes, st.integers(1, 3), st.integers(0, 2), st.integers(0, 9), st.booleans())
def test_a_block_comes_back_bit_by_bit_and_its_neighbours_stay(
    shape: KvShape, pages: int, block: int, seed: int, is_device: bool
) -> None:
    size = pages * PAGE_TOKENS
    source, target = buffer_of(shape, pages, 3 * size), buffer_of(shape, pages, 3 * size + 5)
    if is_device:  # there is none here: the copies that it would need are made all the same
        source._bytes = target._bytes = None
    scribble(source, seed)
    scribble(target, seed + 1)
    before, payload = bits(target), np.zeros(shape.token_bytes * size, np.uint8)
    source.save(block, payload)
    target.fill(block, payload)
    after, place = bits(target), slice(block * size, (block + 1) * size)
    assert np.array_equal(after[:, :, :, place], bits(source)[:, :, :, place])
    after[:, :, :, place] = before[:, :, :, place]
    assert np.array_equal(after, before), "what is not of the block has changed"


@given(shapes, st.integers(1, 3), st.integers(0, 9))
def test_a_payload_is_layer_by_layer_then_page_by_page(shape: KvShape, pages: int, seed: int) -> None:
    source = buffer_of(shape, pages, 4 * pages * PAGE_TOKENS)
    scribble(source, seed)
    payload = np.zeros(shape.token_bytes * pages * PAGE_TOKENS, np.uint8)
    source.save(1, payload)
    whole, rest = bits(source), payload
    for layer in range(shape.layers):
        for page in range(pages):
            start = (pages + page) * PAGE_TOKENS
            expected = whole[layer, :, :, start : start + PAGE_TOKENS].tobytes()
            assert rest[: len(expected)].tobytes() == expected
            rest = rest[len(expected) :]
    assert not len(rest)


def test_a_payload_that_may_only_be_read_can_be_filled_in() -> None:
    source, target = buffer_of(SHAPE, 1, 64), buffer_of(SHAPE, 1, 64)
    scribble(source, 1)
    payload = np.zeros(LAYOUT.payload_bytes, np.uint8)
    source.save(0, payload)
    payload.flags.writeable = False
    for is_device in (False, True):
        scribble(target, 2)
        if is_device:
            target._bytes = None
        target.fill(0, payload)
        assert np.array_equal(bits(target)[:, :, :, :PAGE_TOKENS], bits(source)[:, :, :, :PAGE_TOKENS])


def test_a_payload_of_another_size_is_no_block() -> None:
    buffer = buffer_of(SHAPE, 1, 64)
    with pytest.raises(ValueError, match="reshape"):
        buffer.fill(0, np.zeros(LAYOUT.payload_bytes - 1, np.uint8))
    with pytest.raises(ValueError, match="reshape"):
        buffer.save(0, np.zeros(LAYOUT.payload_bytes + 1, np.uint8))


@pytest.mark.parametrize("is_device", [False, True])
def test_a_block_beyond_the_end_is_a_mistake(is_device: bool) -> None:
    buffer = buffer_of(SHAPE, 1, 64)
    if is_device:
        buffer._bytes = None
    with pytest.raises((ValueError, RuntimeError)):
        buffer.fill(4, np.zeros(LAYOUT.payload_bytes, np.uint8))


# As the model's cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [[(0, 40)], [(0, 1), (1, 40)], [(0, 33), (33, 39), (39, 40)]], ids=str)
def test_a_model_computes_the_same_as_with_its_own_cache(kind: str, passes: list[tuple[int, int]]) -> None:
    model = tiny_model(kind)
    shape = KvShape.of(model)
    buffer = KvBuffer(shape, shape.layout(PAGE_TOKENS), 64, model.config)
    stock = DynamicCache(config=model.config)
    ids = torch.arange(40)[None] * 7 % 512
    with torch.inference_mode():
        for start, end in passes:
            ours, theirs = (
                model(ids[:, start:end], past_key_values=cache, use_cache=True).logits
                for cache in (buffer.cache, stock)
            )
            assert torch.equal(ours, theirs)
            assert buffer.length == stock.get_seq_length() == buffer.cache.get_seq_length() == end
        whole = model(ids).logits[0, -1]
    assert torch.allclose(ours[0, -1], whole, atol=1e-3), "pieces are another prompt"
    for mine, other in zip(buffer.cache.layers, stock.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


def test_a_layer_is_written_in_place_and_cut_without_a_copy() -> None:
    memory = torch.zeros(2, 1, 2, 8, 4)
    layer = BufferLayer(memory[0], memory[1])
    assert (layer.get_seq_length(), layer.get_max_length()) == (0, -1)
    keys, values = layer.update(torch.ones(1, 2, 3, 4), torch.full((1, 2, 3, 4), 2.0))
    assert keys.data_ptr() == memory[0].data_ptr()
    assert (keys.shape, values.shape) == ((1, 2, 3, 4),) * 2
    assert memory.sum() == 3 * 8 * (1 + 2)
    layer.crop(0)
    assert layer.get_seq_length() == 3
    layer.crop(-2)
    assert layer.get_seq_length() == 1
    layer.update(torch.full((1, 2, 1, 4), 5.0), torch.full((1, 2, 1, 4), 5.0))
    assert memory[0, 0, 0, :, 0].tolist() == [1, 5, 1, 0, 0, 0, 0, 0]
    assert layer.get_mask_sizes(3) == (5, 0)
    layer.crop(-100)
    assert layer.get_seq_length() == 0
    layer.update(torch.ones(1, 2, 8, 4), torch.ones(1, 2, 8, 4))
    with pytest.raises(AssertionError, match="token 9 of a sequence of 8"):
        layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    layer.reset()
    assert layer.get_seq_length() == 0


# Using them again ---------------------------------------------------------------------------------------------


def buffers(free_bytes_max: int = 1 << 30) -> Buffers:
    return Buffers(SHAPE, LAYOUT, CONFIG, free_bytes_max)


def test_a_buffer_is_used_again_and_is_empty_then() -> None:
    some = buffers()
    first = some.take(100)
    assert (first.holders, first.length, first.tokens_max) == (1, 0, 256)
    assert first.size_bytes == 256 * SHAPE.token_bytes
    first.length = 100
    some.release(first)
    again = some.take(256)
    assert again is first
    assert (again.holders, again.length) == (1, 0)
    assert some.take(10) is not first


@pytest.mark.parametrize(("tokens", "tokens_max"), [(1, 256), (256, 256), (257, 512), (1000, 1024), (1025, 2048)])
def test_buffers_come_in_few_sizes(tokens: int, tokens_max: int) -> None:
    assert buffers().take(tokens).tokens_max == tokens_max


def test_the_smallest_that_fits_is_taken() -> None:
    some = buffers()
    taken = [some.take(tokens) for tokens in (2000, 300, 600)]
    for each in taken:
        some.release(each)
    assert some.take(500) is taken[1]
    assert some.take(500) is taken[2]
    assert some.take(500) is taken[0]


def test_a_buffer_that_somebody_holds_is_nobody_elses() -> None:
    some = buffers()
    first = some.take(1)
    some.hold(first)
    some.release(first)
    assert some.take(1) is not first
    some.release(first)
    assert some.take(1) is first


def test_what_is_kept_for_later_has_a_bound() -> None:
    some = buffers(free_bytes_max=2 * 256 * SHAPE.token_bytes)
    taken = [some.take(1) for _ in range(4)]
    for each in taken:
        some.release(each)
    assert {some.take(1) for _ in range(4)} & {*taken} == {*taken[2:]}
    none = buffers(free_bytes_max=0)
    first = none.take(1)
    none.release(first)
    assert none.take(1) is not first


@pytest.mark.parametrize(
    ("tokens", "room_tokens", "tokens_max"), [(1000, 4096, 1024), (4096, 1024, 1024), (4096, 0, 0)]
)
def test_one_is_ready_from_the_start_within_the_bound(tokens: int, room_tokens: int, tokens_max: int) -> None:
    some = buffers(free_bytes_max=room_tokens * SHAPE.token_bytes)
    some.prepare(tokens)
    assert some.take(1).tokens_max == max(tokens_max, 256)


def test_to_let_go_of_what_one_does_not_hold_is_a_mistake() -> None:
    some = buffers()
    first = some.take(1)
    some.release(first)
    with pytest.raises(AssertionError, match="did not hold it"):
        some.release(first)
