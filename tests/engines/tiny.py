# SPDX-License-Identifier: Apache-2.0
"""Tiny models of random numbers, and what transformers alone computes with them: the answers to compare with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from kvtide.cache import Cache
from kvtide.engines.transformers.buffer import Buffers, KvBuffer
from kvtide.engines.transformers.engine import Engine
from kvtide.engines.transformers.generation import Finish, Generation, Reuse, Sampling
from kvtide.testing.faults import Gate

VOCABULARY = 512
BLOCK = 16
PATIENCE_S = 60.0  # for what certainly comes: a slow machine is no failure

# A CPU without instructions for bfloat16 says so once, and multiplies in another way.
IGNORE_NO_BF16 = "ignore:.*mkldnn_matmul failed.*:UserWarning"

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # so large that a wrong number anywhere makes another token the likeliest
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Those that can be cached: keys for groups of heads or for each, biases, norms, rotated wholly, partly, not at all.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama-mha": ("LlamaConfig", _LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "llama-mqa": (  # the smallest: for tests that compute much
        "LlamaConfig",
        _LLAMA
        | {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", _LLAMA | {"head_dim": 32}),
    "mistral": ("MistralConfig", _LLAMA | {"sliding_window": None}),
    "mixtral": ("MixtralConfig", _LLAMA | {"sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt-neox": ("GPTNeoXConfig", {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}),
    "gpt2": ("GPT2Config", _GPT2),
}


def make_model(config: str, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A causal language model with weights that follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
    return model.to(dtype).eval()


@cache
def tiny_model(kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Made once for all tests of a process: nobody changes it."""
    config, settings = KINDS[kind]
    return make_model(config, seed, dtype, **settings)


def prompt_of(name: object, tokens: int) -> list[int]:
    """Tokens that follow from a name."""
    draw = torch.Generator().manual_seed(crc32(repr(name).encode()))
    return torch.randint(0, VOCABULARY, (tokens,), generator=draw).tolist()


# What transformers alone says ---------------------------------------------------------------------------------


def replay(
    model: Any, tokens: Sequence[int], passes: Sequence[tuple[int, int]], cache: DynamicCache | None = None
) -> tuple[list[torch.Tensor], DynamicCache]:
    """The last position's logits of each pass, and the cache after them."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    seen = []
    with torch.inference_mode():
        for start, end in passes:
            assert cache.get_seq_length() == start, "the passes do not follow each other"
            ids = torch.tensor([list(tokens[start:end])])
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            seen.append(output.logits[0, -1])
    return seen, cache


def cropped(cache: DynamicCache, tokens: int) -> DynamicCache:
    """The same cache, with so many tokens left."""
    cache.crop(tokens - cache.get_seq_length())
    return cache


def greedy(model: Any, prompt: Sequence[int], max_tokens: int, chunk_tokens: int = 512) -> list[int]:
    """An answer without any cache of ours, the prompt in pieces of `chunk_tokens`.

    Fails where two tokens are so close that other pieces, and so another rounding, could have changed the answer.
    """
    cache = DynamicCache(config=model.config)
    tokens, answer = list(prompt), []
    with torch.inference_mode():
        while len(answer) < max_tokens:
            start = cache.get_seq_length()
            end = min(start + chunk_tokens, len(tokens))
            ids = torch.tensor([tokens[start:end]])
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            if end == len(tokens):
                best, second = logits.topk(2).values.tolist()
                assert best - second > 3e-4, "choose another prompt"
                answer.append(int(logits.argmax()))
                tokens.append(answer[-1])
    return answer


def kv_bytes(cache: DynamicCache, tokens: int) -> list[bytes]:
    """Keys and values of the first tokens, each layer's, as they stand in memory."""
    return [
        part[:, :, :tokens].contiguous().view(torch.uint8).numpy().tobytes()
        for layer in cache.layers
        for part in (layer.keys, layer.values)
    ]


# What the engine's model saw ----------------------------------------------------------------------------------


@dataclass
class Watch:
    """Of each pass: how many tokens' KV was there before it, and the logits that came out; the KV before the first."""

    kv_tokens: list[int] = field(default_factory=list)
    kv_reused: list[bytes] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@contextlib.contextmanager
def watching(model: Any) -> Iterator[Watch]:
    """For one request at a time, of one engine."""
    watch = Watch()

    def before(_model: Any, _args: Any, options: dict[str, Any]) -> None:
        past = options["past_key_values"]
        tokens = past.get_seq_length()
        if not watch.kv_tokens:
            watch.kv_reused = kv_bytes(past, tokens)
        watch.kv_tokens.append(tokens)

    def after(_model: Any, _args: Any, output: Any) -> None:
        watch.logits.append(output.logits[0, -1].clone())

    hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Asked:
    """A request, and what the model saw of it."""

    generation: Generation
    watch: Watch


def ask(engine: Engine, model: Any, prompt: list[int], max_tokens: int = 8, scope: str = "") -> Asked:
    with watching(model) as watch:
        generation = engine.submit(prompt, Sampling(max_tokens=max_tokens), scope=scope)
        assert generation.wait(PATIENCE_S)
    assert (generation.finish, generation.error) == (Finish.LENGTH, "")
    assert len(generation.tokens) == max_tokens
    assert engine.wait_saved(PATIENCE_S)
    return Asked(generation, watch)


def assert_same(model: Any, asked: Asked, past: DynamicCache | None = None) -> DynamicCache:
    """As transformers does it, after as much of `past` as was reused. Returns its cache at the end."""
    generation, watch = asked.generation, asked.watch
    reused = generation.reused.tokens
    past = DynamicCache(config=model.config) if past is None else cropped(past, reused)
    assert watch.kv_tokens == [start for start, _ in generation.passes]
    assert watch.kv_tokens[0] == past.get_seq_length() == reused
    if reused:
        assert watch.kv_reused == kv_bytes(past, reused)
    logits, cache = replay(model, [*generation.prompt, *generation.tokens], generation.passes, past)
    for number, (ours, theirs) in enumerate(zip(watch.logits, logits, strict=True)):
        assert torch.equal(ours, theirs), f"other logits in pass {number} of {generation.passes}"
    answers = [each for each, (_, end) in zip(logits, generation.passes, strict=True) if end >= len(generation.prompt)]
    assert generation.tokens == [int(each.argmax()) for each in answers]
    return cache


def round_trip(engine_of: Callable[..., Engine], model: Any, opened: Iterator[Cache], tiers: Sequence[str]) -> None:
    """One engine for each cache that `opened` gives: the first saves, the others find it in their tiers."""
    prompt = prompt_of("a", 150)
    first = ask(engine_of(next(opened), model, chunk_tokens=40), model, prompt, 12)
    longer = [*prompt, *first.generation.tokens, 1, 2, 3]
    past = assert_same(model, first)
    for tier in tiers:
        engine = engine_of(next(opened), model, chunk_tokens=512)
        again = ask(engine, model, longer, 12)
        assert again.generation.reused == Reuse(160, {tier: 160})
        past = assert_same(model, again, past)
        assert engine.stats().reused_tokens_by_tier == {tier: 160}


@contextlib.contextmanager
def poisoned_buffers() -> Iterator[None]:
    """No request finds in its buffer what the one before it left there, which may well be what it needs."""
    take = Buffers.take

    def take_poisoned(self: Buffers, tokens: int) -> KvBuffer:
        buffer = take(self, tokens)
        buffer.length = buffer.tokens_max
        with torch.inference_mode():
            for layer in buffer.cache.layers:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
        buffer.length = 0
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffers, "take", take_poisoned)
        yield


# What the engine's model does when told to ---------------------------------------------------------------------


@contextlib.contextmanager
def pass_gate(model: Any, number: int = 1) -> Iterator[Gate]:
    """Stop the engine in front of its pass of that number, counted from now, until the gate or the block ends."""
    gate, numbers = Gate(), itertools.count(1)

    def before(*_arguments: Any) -> None:
        if next(numbers) == number:
            gate.enter()

    hook = model.register_forward_pre_hook(before)
    try:
        yield gate
    finally:
        hook.remove()
        gate.open()


@contextlib.contextmanager
def failing_pass(model: Any, error: BaseException, number: int = 1) -> Iterator[None]:
    """The engine's pass of that number, counted from now, raises: in its last layer, with KV of the others written."""
    numbers = itertools.count(1)

    def before(*_arguments: Any) -> None:
        if next(numbers) == number:
            raise error

    hook = model.model.layers[-1].register_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
