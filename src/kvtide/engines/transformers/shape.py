# SPDX-License-Identifier: Apache-2.0
"""What the KV of a transformers model looks like, found by asking the model itself, and which models are refused.

A block of a prompt can be given back only where a token's KV depends on the tokens before it and on nothing else,
and where all of it is kept: plain attention in every layer. Layers that forget (sliding windows) or that fold
the past into a state (recurrent ones) have no KV to cut into blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtide.errors import ConfigError
from kvtide.keys import Namespace, rope_params
from kvtide.layout import Layout, kv_token_bytes

PAGE_TOKENS = 16
# A prompt's tail that is shorter than a block is computed again each time. Small models would fill the layout's
# usual target with hundreds of tokens; 64 of them move as well, and cost less where they end.
BLOCK_TOKENS_MAX = 64
# Inside a page: keys then values, head by head, in each head token by token.
PAGE_ORDER = "KHTD"

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class KvShape:
    """Of one token in every layer of a model."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Any) -> KvShape:
        """Ask the model for the KV of one token. Raises ConfigError for models whose KV cannot be cut into blocks."""
        _check_kind(model)
        cache = DynamicCache(config=model.config)
        _check_layers(model, cache)
        device = next(model.parameters()).device
        try:
            with torch.inference_mode():
                model(torch.zeros((1, 1), dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
        except Exception as error:
            raise _refusal(model, f"asked for the KV of one token, it failed ({error})") from error
        if not any(layer.is_initialized for layer in cache.layers):
            raise _refusal(model, "it puts no KV into a cache")
        shapes = set()
        for layer in cache.layers:
            if not layer.is_initialized or layer.keys is None or layer.values is None:
                raise _refusal(model, "some of its layers use the KV of others")
            if layer.keys.shape != layer.values.shape or layer.keys.dtype != layer.values.dtype:
                raise _refusal(model, "its keys and values differ in shape")
            shapes.add((layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype))
        if len(shapes) != 1:
            raise _refusal(model, "its layers differ in shape")
        kv_heads, head_size, dtype = shapes.pop()
        if dtype not in _DTYPES:
            raise _refusal(model, f"its KV is {dtype}")
        return cls(len(cache.layers), kv_heads, head_size, dtype, device)

    @property
    def token_bytes(self) -> int:
        return self.layers * kv_token_bytes(self.kv_heads, self.head_size, self.dtype.itemsize)

    def layout(self, block_tokens: int | None = None) -> Layout:
        """The shape of a block; by default of as many tokens as the layout's target holds, 64 at most."""
        per_layer = kv_token_bytes(self.kv_heads, self.head_size, self.dtype.itemsize)
        if block_tokens is None:
            block_tokens = min(Layout.for_part(self.layers, PAGE_TOKENS, per_layer).block_tokens, BLOCK_TOKENS_MAX)
        if block_tokens < PAGE_TOKENS or block_tokens % PAGE_TOKENS:
            raise ConfigError(f"block_tokens {block_tokens} is no multiple of the page, {PAGE_TOKENS} tokens")
        return Layout(self.layers, block_tokens // PAGE_TOKENS, PAGE_TOKENS, PAGE_TOKENS * per_layer)

    def namespace(self, identity: str, config: Any, layout: Layout) -> Namespace:
        """`identity`: of the weights, from `kvtide.model_identity`."""
        return Namespace(
            model=identity,
            kv_dtype=_DTYPES[self.dtype],
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            rope=rope_params(_rope(config.get_text_config(decoder=True))),
            page_tokens=layout.page_tokens,
            block_tokens=layout.block_tokens,
            layout=PAGE_ORDER,
        )


def context_tokens(model: Any) -> int:
    """How many tokens the model was made for, and as far as the length of a prompt does not change its KV."""
    text = model.config.get_text_config(decoder=True)
    known = getattr(text, "max_position_embeddings", None) or 1 << 20
    rope = getattr(text, "rope_parameters", None) or {}
    # Beyond its original context, longrope rotates all keys by other angles: those of short prompts are no use to long
    # ones then, nor the other way round. (So does "dynamic", but only beyond max_position_embeddings.)
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if each.get("rope_type") == "longrope":
            known = min(known, each.get("original_max_position_embeddings") or known)
    return int(known)


def _rope(config: Any) -> dict[str, object]:
    settings: dict[str, object] = {}
    for name in ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"):
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = _plain(value)
    return settings


def _plain(value: Any) -> object:
    """As `rope_params` takes it: lists are tuples, and infinities (no limit) are words."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _check_kind(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise ConfigError(f"{type(model).__name__} is no model of transformers: pass an AutoModelForCausalLM")
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(model, "it has an encoder, whose states are no KV of a prefix")
    if getattr(model, "peft_config", None):
        raise _refusal(model, "it carries adapters: merge them into the weights first (merge_and_unload)")
    # Of an encoder's kind, without `is_decoder`. Attention that has no number keeps no KV: an image tower's, say.
    if any(getattr(part, "is_causal", True) is False and hasattr(part, "layer_idx") for part in model.modules()):
        raise _refusal(model, "the KV of a token depends on those after it")


def _check_layers(model: Any, cache: DynamicCache) -> None:
    text = model.config.get_text_config(decoder=True)
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    if any("sliding" in kind or "chunked" in kind for kind in kinds) or any(
        getattr(layer, "is_sliding", False) for layer in cache.layers
    ):
        raise _refusal(model, "it has sliding-window layers, which forget the start of a prompt")
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise _refusal(model, "it has recurrent layers, whose state cannot be cut into blocks")


def _refusal(model: Any, why: str) -> ConfigError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return ConfigError(
        f"model type {kind} cannot be cached: {why}. Run it without kvtide, or choose a model with full attention"
        " in every layer",
        model_type=str(kind),
    )
