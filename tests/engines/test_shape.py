# SPDX-License-Identifier: Apache-2.0
"""Which models can be cached, and what their KV looks like."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import BLOCK, KINDS, PATIENCE_S, VOCABULARY, make_model, prompt_of, tiny_model
from transformers import AutoModelForSeq2SeqLM, T5Config

from kvtide.engines.transformers import Engine, Sampling
from kvtide.engines.transformers.shape import KvShape, context_tokens
from kvtide.errors import ConfigError, TooLarge

_SMALL = KINDS["llama"][1] | {"num_hidden_layers": 2}


def no_kv(**settings: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2} | settings


def t5() -> Any:
    config = T5Config(vocab_size=VOCABULARY, d_model=64, d_ff=64, d_kv=16, num_layers=2, num_heads=4)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def with_adapters() -> Any:
    model = make_model("LlamaConfig", **_SMALL)
    model.peft_config = {"default": object()}
    return model


def with_other_kv(change: Callable[[Any], None]) -> Any:
    """A model that puts something else into the last layer of its cache."""
    model = make_model("LlamaConfig", **_SMALL)
    forward = model.forward

    def changed(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        change(options["past_key_values"].layers[-1])
        return output

    model.forward = changed
    return model


def halve(layer: Any) -> None:
    layer.keys, layer.values = layer.keys[..., :8], layer.values[..., :8]


def that_fails() -> Any:
    model = make_model("LlamaConfig", **_SMALL)

    def fail(*_args: Any, **_options: Any) -> None:
        raise TypeError("no cache, please")

    model.forward = fail
    return model


REFUSED: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "a window in every layer": ("mistral", "sliding", lambda: make_model("MistralConfig", **_SMALL)),
    "a window in some layers": (
        "gemma2",
        "sliding",
        lambda: make_model("Gemma2Config", **_SMALL | {"head_dim": 16, "pad_token_id": 0}),
    ),
    "a window in most layers": (
        "gemma3_text",
        "sliding",
        lambda: make_model("Gemma3TextConfig", **_SMALL | {"head_dim": 16, "pad_token_id": 0}),
    ),
    "a state in place of KV": (
        "mamba",
        "recurrent",
        lambda: make_model("MambaConfig", **no_kv(state_size=8)),
    ),
    "a state in some layers": (
        "bamba",
        "recurrent",
        lambda: make_model("BambaConfig", **_SMALL | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}),
    ),
    "a state that transformers' caches do not know": (
        "rwkv",
        "no KV",
        lambda: make_model("RwkvConfig", **no_kv(context_length=64)),
    ),
    "an encoder": ("t5", "encoder", t5),
    "half of an encoder and decoder": (
        "bart",
        "after it",
        lambda: make_model("BartConfig", vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=2),
    ),
    "layers without KV of their own": (
        "llama",
        "use the KV of others",
        lambda: with_other_kv(lambda layer: layer.reset()),
    ),
    "layers of two shapes": ("llama", "differ in shape", lambda: with_other_kv(halve)),
    "a cache that it cannot use": ("llama", "it failed (no cache, please)", that_fails),
    "tokens that see those after them": (
        "bert",
        "after it",
        lambda: make_model("BertConfig", **no_kv(num_attention_heads=4, intermediate_size=64)),
    ),
    "keys and values of two shapes": (
        "deepseek_v3",
        "shape",
        lambda: make_model(
            "DeepseekV3Config",
            **_SMALL
            | {
                "num_key_value_heads": 4,
                "first_k_dense_replace": 2,
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
        ),
    ),
    "adapters": ("llama", "merge", with_adapters),
    "a type of number that no namespace knows": (
        "llama",
        "float64",
        lambda: make_model("LlamaConfig", dtype=torch.float64, **_SMALL),
    ),
}


@pytest.mark.parametrize(("kind", "why", "make"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_whose_kv_cannot_be_cut_into_blocks_is_refused(kind: str, why: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        Engine(make(), identity="x")
    message = str(refused.value)
    assert f"model type {kind} " in message
    assert why in message
    assert "Run it without kvtide, or choose a model" in message
    assert refused.value.context["model_type"] == kind


@pytest.mark.parametrize(
    "thing", [object(), None, "gpt2", torch.nn.Linear(2, 2), SimpleNamespace(config=None)], ids=lambda x: str(type(x))
)
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigError, match=f"{type(thing).__name__} is no model.*AutoModelForCausalLM"):
        Engine(thing, identity="x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_says_what_its_kv_looks_like(kind: str) -> None:
    shape = KvShape.of(tiny_model(kind))
    heads = {"llama-mha": 4, "llama-mqa": 1, "gpt2": 4, "gpt-neox": 4}.get(kind, 2)
    layers = {"llama-mha": 2, "llama-mqa": 2, "gpt2": 2}.get(kind, 3)
    head_size = {"qwen3": 32}.get(kind, 16)
    assert (shape.layers, shape.kv_heads, shape.head_size) == (layers, heads, head_size)
    assert shape.dtype is torch.float32
    assert shape.token_bytes == layers * heads * head_size * 2 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kv_has_the_models_own_type_of_numbers(dtype: torch.dtype) -> None:
    shape = KvShape.of(tiny_model("llama", dtype))
    assert shape.dtype is dtype
    assert shape.token_bytes == 3 * 2 * 16 * 2 * 2


# Blocks and namespaces ----------------------------------------------------------------------------------------


def test_a_block_is_of_pages_and_of_64_tokens_at_most() -> None:
    shape = KvShape.of(tiny_model())
    assert shape.layout().block_tokens == 64
    assert shape.layout(48).block_tokens == 48
    assert shape.layout(48).payload_bytes == 48 * shape.token_bytes
    large = KvShape(80, 64, 128, torch.float32, torch.device("cpu"))
    assert large.layout().block_tokens == 16


@pytest.mark.parametrize("tokens", [-16, 0, 1, 15, 17, 63])
def test_blocks_of_no_whole_pages_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="multiple of the page, 16"):
        KvShape.of(tiny_model()).layout(tokens)


def test_whatever_changes_the_kv_changes_the_namespace() -> None:
    def namespace(identity: str = "x", tokens: int = BLOCK, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        model = make_model("LlamaConfig", dtype=dtype, **_SMALL | settings)
        shape = KvShape.of(model)
        return shape.namespace(identity, model.config, shape.layout(tokens)).digest()

    digests = [
        namespace(),
        namespace("y"),
        namespace(tokens=32),
        namespace(dtype=torch.bfloat16),
        namespace(num_hidden_layers=3),
        namespace(num_key_value_heads=4),
        namespace(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        namespace(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    ]
    assert len({*digests}) == len(digests)
    assert namespace() == digests[0], "and nothing else does"


def test_rotations_without_a_limit_have_a_namespace_too() -> None:
    model = make_model("LlamaConfig", **_SMALL)
    shape = KvShape.of(model)
    plain = shape.namespace("x", model.config, shape.layout(BLOCK)).digest()
    model.config.rope_parameters = model.config.rope_parameters | {"beta": math.inf, "many": [1.0, 2.0], "none": None}
    other = shape.namespace("x", model.config, shape.layout(BLOCK)).digest()
    assert other != plain


# The context --------------------------------------------------------------------------------------------------


def test_the_context_is_what_the_model_was_made_for() -> None:
    assert context_tokens(tiny_model("llama")) == 2048
    assert context_tokens(tiny_model("gpt2")) == 2048
    bloom = make_model("BloomConfig", vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)
    assert context_tokens(bloom) == 1 << 20


def test_rotations_that_change_with_the_length_of_a_prompt_are_never_reached(
    engine_of: Callable[..., Engine], store: Any
) -> None:
    """Beyond 64 tokens this model rotates all keys by other angles: KV of a long prompt is wrong in a short one."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 32.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = make_model("LlamaConfig", **_SMALL | {"rope_parameters": rope})
    assert context_tokens(model) == 64
    engine = engine_of(store, model)
    with pytest.raises(TooLarge):
        engine.submit(prompt_of("long", 64))
    generation = engine.submit(prompt_of("long", 60), Sampling(max_tokens=100))
    assert generation.wait(PATIENCE_S)
    assert len(generation.tokens) == 4


def test_rotations_that_change_beyond_the_context_are_never_reached() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = make_model("LlamaConfig", **_SMALL | {"rope_parameters": rope, "max_position_embeddings": 64})
    assert context_tokens(model) == 64
