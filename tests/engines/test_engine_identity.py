# SPDX-License-Identifier: Apache-2.0
"""Answers through the cache are, bit by bit, those of transformers alone in the same passes.

KV of a token depends a little on how many tokens were computed beside it: matrices of other sizes are multiplied in
another order. So the reference replays the passes that the engine says it made, with a cache of transformers' own:
those of the request that saved, cut to what was reused, then those of the request that reused.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import (
    BLOCK,
    IGNORE_NO_BF16,
    KINDS,
    PATIENCE_S,
    VOCABULARY,
    ask,
    assert_same,
    make_model,
    poisoned_buffers,
    prompt_of,
    round_trip,
    tiny_model,
)
from transformers import DynamicCache

from kvtide.config import DiskSettings, DramSettings, Settings
from kvtide.engines.transformers import Engine, EngineSettings, Reuse, Sampling
from kvtide.model_identity import model_identity
from kvtide.store import Store, open_store

pytestmark = pytest.mark.filterwarnings(IGNORE_NO_BF16)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OFTEN = {"float32": "llama", "bfloat16": "llama-mqa"}  # the smaller one where numbers are slow
CHUNKS = (11, 16, 50, 512)


class Known:
    """Blocks of KV as transformers computed them, by all the tokens up to their end: who saves first, saves."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def beginning(self, model: Any, prompt: list[int]) -> DynamicCache:
        """What of a prompt is known, but for its last token."""
        cache = DynamicCache(config=model.config)
        for end in range(BLOCK, len(prompt), BLOCK):
            if (block := self._blocks.get(tuple(prompt[:end]))) is None:
                break
            for number, (keys, values) in enumerate(block):
                cache.update(keys, values, number)
        return cache

    def add(self, tokens: list[int], cache: DynamicCache) -> None:
        for start in range(0, cache.get_seq_length() - BLOCK + 1, BLOCK):
            piece = slice(start, start + BLOCK)
            block = [(layer.keys[:, :, piece], layer.values[:, :, piece]) for layer in cache.layers]
            self._blocks.setdefault(tuple(tokens[: start + BLOCK]), block)


# Any prompts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big_store() -> Iterator[Store]:
    with open_store(Settings(dram=DramSettings(bytes_max=256 << 20, huge_pages=False))) as store:
        yield store


@pytest.fixture(scope="module")
def engines(one_torch_thread: None, big_store: Store) -> Iterator[dict[tuple[str, int], Engine]]:
    with poisoned_buffers(), ExitStack() as stack:
        yield {
            (name, chunk): stack.enter_context(
                Engine(
                    tiny_model(OFTEN[name], dtype),
                    identity="tiny",
                    cache=big_store,
                    settings=EngineSettings(chunk_tokens=chunk, block_tokens=BLOCK),
                )
            )
            for name, dtype in DTYPES.items()
            for chunk in CHUNKS
        }


_scopes = itertools.count()
tokens_lists = st.builds(prompt_of, st.integers(0, 1000), st.integers(1, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shared=st.builds(prompt_of, st.integers(0, 1000), st.integers(0, 80)),
    tails=st.lists(tokens_lists, min_size=2, max_size=3),
    chunks=st.lists(st.sampled_from(CHUNKS), min_size=3, max_size=3),
    lengths=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    is_chat=st.booleans(),
)
def test_any_prompts_are_answered_as_by_transformers_alone(
    engines: dict[tuple[str, int], Engine],
    dtype: str,
    shared: list[int],
    tails: list[list[int]],
    chunks: list[int],
    lengths: list[int],
    is_chat: bool,
) -> None:
    model, scope, known = tiny_model(OFTEN[dtype], DTYPES[dtype]), f"{next(_scopes)}", Known()
    said: list[int] = []
    for tail, chunk, length in zip(tails, chunks, lengths, strict=False):
        prompt = [*(said if is_chat and said else shared), *tail]
        asked = ask(engines[dtype, chunk], model, prompt, length, scope)
        past = known.beginning(model, prompt)
        assert asked.generation.reused.tokens == past.get_seq_length()
        cache = assert_same(model, asked, past)
        said = [*prompt, *asked.generation.tokens]
        known.add(said, cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_models_of_any_kind_answer_as_by_transformers_alone(
    engine_of: Callable[..., Engine], store: Store, kind: str, dtype: str
) -> None:
    model = tiny_model(kind, DTYPES[dtype])
    engine = engine_of(store, model, chunk_tokens=24)
    prompt = prompt_of("a", 100)
    first = ask(engine, model, prompt, 10)
    past = assert_same(model, first)
    second = ask(engine, model, [*prompt, *first.generation.tokens, *prompt_of("b", 30)], 10)
    assert second.generation.reused == Reuse(96, {"dram": 96})
    assert_same(model, second, past)


# Through every tier -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_through_dram(engine_of: Callable[..., Engine], store: Store, dtype: str) -> None:
    round_trip(engine_of, tiny_model("llama", DTYPES[dtype]), itertools.repeat(store), ["dram", "dram"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_through_a_disk_that_was_opened_again(engine_of: Callable[..., Engine], tmp_path: Path, dtype: str) -> None:
    disk = DiskSettings(folder=str(tmp_path), bytes_max=64 << 20)

    def stores() -> Iterator[Store]:
        for _ in range(3):
            with open_store(Settings(dram=DramSettings(bytes_max=8 << 20, huge_pages=False), disk=disk)) as store:
                yield store

    round_trip(engine_of, tiny_model("llama", DTYPES[dtype]), stores(), ["disk", "disk"])


# Whose blocks -------------------------------------------------------------------------------------------------


def test_scopes_share_nothing_and_equal_scopes_do(engine_of: Callable[..., Engine], store: Store) -> None:
    model, engine = tiny_model(), engine_of(store)
    prompt = prompt_of("a", 100)
    ask(engine, model, prompt, scope="ada")
    for scope in ("bob", "", "ada ", "Ada"):
        assert ask(engine, model, prompt, scope=scope).generation.reused == Reuse()
    for scope in ("ada", "bob"):
        assert ask(engine, model, prompt, scope=scope).generation.reused.tokens == 96


def test_models_of_other_weights_share_nothing_and_copies_do(
    engine_of: Callable[..., Engine], store: Store, tmp_path: Path
) -> None:
    """Of one shape, one configuration, one cache."""
    prompt = prompt_of("a", 100)
    answers = {}
    for name, seed in (("one", 1), ("other", 2)):
        model = tiny_model("llama", seed=seed)
        model.save_pretrained(tmp_path / name)
        engine = engine_of(store, model, identity=model_identity(tmp_path / name))
        asked = ask(engine, model, prompt)
        assert asked.generation.reused == Reuse(), name
        assert_same(model, asked)
        answers[name] = asked.generation.tokens
    assert answers["one"] != answers["other"]
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    engine = engine_of(store, tiny_model("llama", seed=1), identity=model_identity(tmp_path / "copy"))
    again = engine.generate(prompt, Sampling(max_tokens=8))
    assert again.reused.tokens == 96
    assert again.tokens == answers["one"]


def test_numbers_of_another_type_and_blocks_of_another_size_share_nothing(
    engine_of: Callable[..., Engine], store: Store
) -> None:
    prompt = prompt_of("a", 100)
    engines = [
        engine_of(store),
        engine_of(store, block_tokens=2 * BLOCK),
        engine_of(store, tiny_model("llama", torch.bfloat16)),
        engine_of(store, make_model("LlamaConfig", **KINDS["llama"][1] | {"num_hidden_layers": 2})),
    ]
    for engine in engines:
        assert engine.generate(prompt, Sampling(max_tokens=2)).reused == Reuse()
        assert engine.wait_saved(PATIENCE_S)
    for engine in engines:
        assert engine.generate(prompt, Sampling(max_tokens=2)).reused.tokens == 96


def test_the_vocabulary_is_all_of_it(engine_of: Callable[..., Engine], store: Store) -> None:
    model, engine = tiny_model(), engine_of(store)
    prompt = [0, VOCABULARY - 1] * 20
    past = assert_same(model, ask(engine, model, prompt))
    assert_same(model, ask(engine, model, prompt), past)
