# SPDX-License-Identifier: Apache-2.0
"""The shape of blocks: sizes that are known from real models, and views that share the payload's memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.layout import FIELD_MAX, PAYLOAD_BYTES_MAX, TARGET_BYTES, Layout, kv_token_bytes, mla_token_bytes

SMALL = Layout(layers=3, pages=4, page_tokens=16, page_bytes=32)


def numbered_payload(layout: Layout) -> np.ndarray:
    return np.arange(layout.payload_bytes, dtype=np.uint32).astype(np.uint8)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_size", "model_token_bytes"),
    [
        pytest.param(30, 3, 64, 23_040, id="SmolLM2-135M"),
        pytest.param(32, 8, 128, 131_072, id="Llama-3-8B"),
    ],
)
def test_token_size_of_a_known_model(layers: int, kv_heads: int, head_size: int, model_token_bytes: int) -> None:
    assert layers * kv_token_bytes(kv_heads, head_size, dtype_bytes=2) == model_token_bytes


def test_token_size_of_a_known_mla_model() -> None:
    assert 61 * mla_token_bytes(latent_size=512, rope_size=64, dtype_bytes=2) == 70_272  # DeepSeek-V3


def test_block_of_a_known_model() -> None:
    layout = Layout.for_part(layers=32, page_tokens=16, token_bytes_per_layer=kv_token_bytes(8, 128, 2))
    # 4 MiB / (32 layers * 4 KiB) = 32 tokens, which are 2 pages of 16.
    assert (layout.pages, layout.block_tokens, layout.payload_bytes) == (2, 32, TARGET_BYTES)


@given(
    layers=st.integers(1, 128),
    page_tokens=st.sampled_from([1, 16, 32, 128]),
    token_bytes=st.integers(1, 8192),
    target_bytes=st.integers(1, 2**26),
)
def test_a_block_has_the_most_pages_within_the_target(
    layers: int, page_tokens: int, token_bytes: int, target_bytes: int
) -> None:
    layout = Layout.for_part(layers, page_tokens, token_bytes, target_bytes)
    one_page_more = Layout(layers, layout.pages + 1, page_tokens, layout.page_bytes)
    assert layout.payload_bytes <= target_bytes or layout.pages == 1
    assert one_page_more.payload_bytes > target_bytes
    assert layout.payload_bytes == layers * layout.block_tokens * token_bytes


def test_payload_goes_layer_by_layer_and_page_by_page() -> None:
    payload = numbered_payload(SMALL)
    view = SMALL.pages_view(payload)
    assert view.shape == SMALL.shape == (3, 4, 32)
    for layer in range(3):
        for page in range(4):
            start = (layer * 4 + page) * 32
            assert view[layer, page].tobytes() == payload[start : start + 32].tobytes()


def test_views_write_through_to_the_payload() -> None:
    payload = np.zeros(SMALL.payload_bytes, dtype=np.uint8)
    SMALL.pages_view(payload)[0, 0] = 1
    SMALL.layer(payload, 1)[3] = 2
    SMALL.from_page(payload, 2)[2, 0] = 3
    pages = payload.reshape(12, 32)
    assert [int(page[0]) for page in pages] == [1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 3, 0]
    assert all((page == page[0]).all() for page in pages)


def test_from_page_shows_the_rest_of_every_layer() -> None:
    payload = numbered_payload(SMALL)
    assert (SMALL.from_page(payload, 0) == SMALL.pages_view(payload)).all()
    assert SMALL.from_page(payload, 3).shape == (3, 1, 32)
    assert (SMALL.from_page(payload, 3)[:, 0] == SMALL.pages_view(payload)[:, 3]).all()


@pytest.mark.parametrize("index", [-1, 4])
def test_a_page_or_layer_outside_is_refused(index: int) -> None:
    payload = numbered_payload(SMALL)
    with pytest.raises(ValueError, match="first_page"):
        SMALL.from_page(payload, index)
    with pytest.raises(ValueError, match="layer"):
        SMALL.layer(payload, index)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(np.zeros(SMALL.payload_bytes - 1, dtype=np.uint8), id="too short"),
        pytest.param(np.zeros(SMALL.payload_bytes + 1, dtype=np.uint8), id="too long"),
        pytest.param(np.zeros(SMALL.payload_bytes // 2, dtype=np.uint16), id="no bytes"),
        pytest.param(np.zeros(SMALL.shape, dtype=np.uint8), id="shaped already"),
        pytest.param(np.zeros(2 * SMALL.payload_bytes, dtype=np.uint8)[::2], id="with gaps"),
    ],
)
def test_a_payload_that_cannot_be_viewed_is_refused(payload: np.ndarray) -> None:
    with pytest.raises(ValueError, match="payload"):
        SMALL.pages_view(payload)


@pytest.mark.parametrize("name", ["layers", "pages", "page_tokens", "page_bytes"])
@pytest.mark.parametrize("value", [0, -1, FIELD_MAX + 1])
def test_a_size_outside_the_header_field_is_refused(name: str, value: int) -> None:
    sizes = {"layers": 1, "pages": 1, "page_tokens": 1, "page_bytes": 1}
    with pytest.raises(ConfigError, match=name) as caught:
        Layout(**(sizes | {name: value}))
    assert caught.value.context["field"] == name


def test_the_largest_payload_is_the_bound() -> None:
    assert Layout(2**10, 2**10, 1, 2**20).payload_bytes == PAYLOAD_BYTES_MAX
    with pytest.raises(ConfigError, match="payload_bytes"):
        Layout(2**10, 2**10 + 1, 1, 2**20)
    with pytest.raises(ConfigError, match="block_tokens"):
        Layout(layers=1, pages=2**16, page_tokens=2**16, page_bytes=1)


@pytest.mark.parametrize("name", ["layers", "page_tokens", "token_bytes_per_layer", "target_bytes"])
def test_for_part_refuses_sizes_of_zero(name: str) -> None:
    sizes = {"layers": 2, "page_tokens": 16, "token_bytes_per_layer": 64, "target_bytes": 4096}
    with pytest.raises(ConfigError, match=name):
        Layout.for_part(**(sizes | {name: 0}))
