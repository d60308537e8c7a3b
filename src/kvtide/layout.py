# SPDX-License-Identifier: Apache-2.0
"""The shape of a block: how the KV of one part lies in a payload, and how many tokens a block holds.

Payload order is layer by layer, inside a layer page by page:

    layer 0: page 0, page 1 ... | layer 1: page 0, page 1 ... | ...

so layers can be handed to the engine one by one, and a fetch can start at any page of the block.
Owns sizes and views; copies nothing, and does not know what stands inside a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError

Memory: TypeAlias = npt.NDArray[np.uint8]  # a piece of an arena or of a buffer

# Large enough that a medium streams rather than seeks, small enough that a prompt has several of them.
TARGET_BYTES: Final = 4 * 2**20
# A frame header stores the shape in 32-bit fields. 1 TiB is far above any real block, and far below where
# sums of sizes would leave 64 bits.
FIELD_MAX: Final = 2**32 - 1
PAYLOAD_BYTES_MAX: Final = 2**40


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of one part of a block. `page_bytes` is what one page takes in one layer."""

    layers: int
    pages: int
    page_tokens: int
    page_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "pages", "page_tokens", "page_bytes"):
            _check_size(name, getattr(self, name), FIELD_MAX)
        _check_size("block_tokens", self.block_tokens, FIELD_MAX)
        _check_size("payload_bytes", self.payload_bytes, PAYLOAD_BYTES_MAX)

    @classmethod
    def for_part(
        cls, layers: int, page_tokens: int, token_bytes_per_layer: int, target_bytes: int = TARGET_BYTES
    ) -> Self:
        """Choose the most pages whose payload stays within the target; one page if a single one is over it."""
        _check_size("layers", layers, FIELD_MAX)
        _check_size("page_tokens", page_tokens, FIELD_MAX)
        _check_size("token_bytes_per_layer", token_bytes_per_layer, FIELD_MAX)
        _check_size("target_bytes", target_bytes, PAYLOAD_BYTES_MAX)
        page_bytes = page_tokens * token_bytes_per_layer
        pages = max(1, target_bytes // (layers * page_bytes))
        return cls(layers, pages, page_tokens, page_bytes)

    @property
    def block_tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.pages * self.page_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.layers, self.pages, self.page_bytes

    def pages_view(self, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """See a payload as (layers, pages, page_bytes). Writes go through to it."""
        if payload.dtype != np.uint8 or payload.shape != (self.payload_bytes,):
            raise ValueError(
                f"payload: {self.payload_bytes} bytes expected, not {payload.dtype} of shape {payload.shape}"
            )
        if not payload.flags.c_contiguous:
            # reshape would answer with a copy, and what the engine writes there would be lost.
            raise ValueError("payload: the bytes do not follow each other in memory")
        return payload.reshape(self.shape)

    def from_page(self, payload: npt.NDArray[np.uint8], first_page: int) -> npt.NDArray[np.uint8]:
        """See the pages from `first_page` on, in all layers: the rest of a block that is partly there."""
        _check_index("first_page", first_page, self.pages)
        return self.pages_view(payload)[:, first_page:]

    def layer(self, payload: npt.NDArray[np.uint8], index: int) -> npt.NDArray[np.uint8]:
        """See all pages of one layer, as (pages, page_bytes)."""
        _check_index("layer", index, self.layers)
        pages: npt.NDArray[np.uint8] = self.pages_view(payload)[index]
        return pages


def kv_token_bytes(kv_heads: int, head_size: int, dtype_bytes: int) -> int:
    """Size of one token in one layer: a key and a value for each head that this part holds."""
    return 2 * kv_heads * head_size * dtype_bytes


def mla_token_bytes(latent_size: int, rope_size: int, dtype_bytes: int) -> int:
    """Size of one token in one layer under MLA: one latent for keys and values, one rotated key for all heads."""
    return (latent_size + rope_size) * dtype_bytes


def _check_size(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise ConfigError(f"layout: {name} must be in 1..{limit}, not {value}", field=name)


def _check_index(name: str, index: int, count: int) -> None:
    # Checked, because numpy would take a negative index from the end and an index too high as nothing.
    if not 0 <= index < count:
        raise ValueError(f"{name} must be in 0..{count - 1}, not {index}")
