# SPDX-License-Identifier: Apache-2.0
"""The KV memory of one sequence, which the model sees as its DynamicCache and kvtide as blocks.

    tensor[layer, key or value, head, token, dimension]

One tensor for all layers, as long as the sequence may become: the model writes new tokens in place (its own cache
would copy everything for each of them), and a block moves to or from a slot in one strided copy.
Buffers are used again and again: memory that was never touched costs more to fill than to copy.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtide.engines.transformers.shape import KvShape
from kvtide.layout import Layout, Memory


class BufferLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer of a buffer, in the form that the model's attention expects."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._all_keys, self._all_values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.set_length(0)

    def set_length(self, tokens: int) -> None:
        self.length = tokens
        self.keys, self.values = self._all_keys[:, :, :tokens], self._all_values[:, :, :tokens]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.length, self.length + key_states.shape[-2]
        assert end <= self._all_keys.shape[2], f"token {end} of a sequence of {self._all_keys.shape[2]} at most"
        self._all_keys[:, :, start:end] = key_states
        self._all_values[:, :, start:end] = value_states
        self.set_length(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.set_length(0)

    def crop(self, tokens_to_remove: int) -> None:
        assert tokens_to_remove <= 0
        self.set_length(max(0, self.length + tokens_to_remove))


class KvBuffer:
    """Of one sequence at a time. Whoever may still copy from it holds it; `Buffers` has the free ones."""

    def __init__(self, shape: KvShape, layout: Layout, tokens_max: int, config: Any) -> None:
        self.tokens_max = tokens_max
        self.holders = 0
        self._layout = layout
        self._tensor = torch.empty(
            (shape.layers, 2, 1, shape.kv_heads, tokens_max, shape.head_size), dtype=shape.dtype, device=shape.device
        )
        self.cache = DynamicCache(config=config)
        self.cache.layers = [BufferLayer(keys, values) for keys, values in self._tensor]
        # Seen as bytes, because numpy knows no bfloat16; None where the memory is a device's.
        self._bytes = self._tensor.view(torch.uint8).numpy()[:, :, 0] if shape.device.type == "cpu" else None

    @property
    def size_bytes(self) -> int:
        return self._tensor.nbytes

    @property
    def length(self) -> int:
        """Tokens whose KV is here."""
        return int(self.cache.layers[0].length)

    @length.setter
    def length(self, tokens: int) -> None:
        for layer in self.cache.layers:
            layer.set_length(tokens)

    def touch(self) -> None:
        """Write to all of it once: the first write to a page costs ten times a copy to it."""
        self._tensor.zero_()

    def fill(self, block: int, payload: Memory) -> None:
        """Copy a block in, at its place in the prompt. `length` is the caller's."""
        source = self._pages(payload)
        if self._bytes is not None:
            np.copyto(self._place(self._bytes, block), source)
        else:
            # Copied first: torch takes no array that may only be read, as those of a reader of the service are.
            self._device_place(block).copy_(torch.from_numpy(np.array(source, order="C")))

    def save(self, block: int, payload: Memory) -> None:
        """Copy a block out."""
        target = self._pages(payload)
        if self._bytes is not None:
            np.copyto(target, self._place(self._bytes, block))
        else:
            np.copyto(target, self._device_place(block).cpu().numpy())

    def _pages(self, payload: Memory) -> npt.NDArray[np.uint8]:
        """A payload, with its pages where a sequence has them: (layer, key or value, head, page, token, bytes)."""
        layout, heads = self._layout, self._tensor.shape[3]
        shape = layout.layers, layout.pages, 2, heads, layout.page_tokens, -1
        return payload.reshape(shape).transpose(0, 2, 3, 1, 4, 5)

    def _place(self, whole: npt.NDArray[np.uint8], block: int) -> npt.NDArray[np.uint8]:
        """A block of the sequence, in the same order. Splitting an axis copies nothing."""
        start, layout = block * self._layout.block_tokens, self._layout
        piece = whole[:, :, :, start : start + layout.block_tokens]
        return piece.reshape(*piece.shape[:3], layout.pages, layout.page_tokens, -1)

    def _device_place(self, block: int) -> torch.Tensor:
        start, layout = block * self._layout.block_tokens, self._layout
        piece = self._tensor.view(torch.uint8)[:, :, 0, :, start : start + layout.block_tokens]
        return piece.view(*piece.shape[:3], layout.pages, layout.page_tokens, -1)


def _capacity(tokens: int) -> int:
    """Few sizes, so that the next request finds a buffer that fits."""
    return max(256, 1 << (tokens - 1).bit_length())


class Buffers:
    """Buffers to use again, within a bound of bytes. Any thread."""

    def __init__(self, shape: KvShape, layout: Layout, config: Any, free_bytes_max: int) -> None:
        self._shape, self._layout, self._config = shape, layout, config
        self._free_bytes_max = free_bytes_max
        self._free: list[KvBuffer] = []
        self._lock = threading.Lock()

    def take(self, tokens: int) -> KvBuffer:
        """An empty buffer for at least so many tokens, held once."""
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.tokens_max >= tokens]
            if fitting:
                buffer = min(fitting, key=lambda each: each.tokens_max)
                self._free.remove(buffer)
                buffer.length = 0
                buffer.holders = 1
                return buffer
        buffer = KvBuffer(self._shape, self._layout, _capacity(tokens), self._config)
        buffer.holders = 1
        return buffer

    def prepare(self, tokens: int) -> None:
        """Have one ready for so many tokens, or for as many as may be kept, with memory that was touched."""
        while tokens > 1 and _capacity(tokens) * self._shape.token_bytes > self._free_bytes_max:
            tokens //= 2
        buffer = self.take(tokens)
        buffer.touch()
        self.release(buffer)

    def hold(self, buffer: KvBuffer) -> None:
        with self._lock:
            buffer.holders += 1

    def release(self, buffer: KvBuffer) -> None:
        with self._lock:
            buffer.holders -= 1
            assert buffer.holders >= 0, "a buffer was let go by one who did not hold it"
            if buffer.holders == 0:
                self._free.append(buffer)
                while sum(each.size_bytes for each in self._free) > self._free_bytes_max:
                    self._free.pop(0)
