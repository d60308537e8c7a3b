# SPDX-License-Identifier: Apache-2.0
"""Requests: what is asked, who gets a turn, how they end, and that nothing is left of them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from faulty_cache import FaultyCache
from tiny import (
    BLOCK,
    KINDS,
    PATIENCE_S,
    VOCABULARY,
    ask,
    assert_same,
    failing_pass,
    greedy,
    make_model,
    pass_gate,
    prompt_of,
    tiny_model,
)

from kvtide.engines.transformers import Engine, EngineSettings, Finish, Generation, Reuse, Sampling
from kvtide.engines.transformers.buffer import Buffers, KvBuffer
from kvtide.errors import Busy, Closed, ConfigError, Rejected, TooLarge
from kvtide.keys import chain
from kvtide.store import Store
from kvtide.testing.store_suite.tools import eventually

EngineOf = Callable[..., Engine]


@pytest.fixture(autouse=True)
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[KvBuffer]:
    """Every buffer that was taken."""
    taken: list[KvBuffer] = []
    take = Buffers.take

    def noting(self: Buffers, tokens: int) -> KvBuffer:
        taken.append(take(self, tokens))
        return taken[-1]

    monkeypatch.setattr(Buffers, "take", noting)
    return taken


def assert_all_is_back(engine: Engine, store: Store, buffers: list[KvBuffer]) -> None:
    """The engine has nothing to do, and holds nothing."""
    eventually(lambda: (engine.stats().waiting, engine.stats().running) == (0, 0), "every request has ended")
    assert engine.wait_saved(PATIENCE_S)
    eventually(lambda: store.stats().leases == 0, "no lease is left")
    eventually(lambda: {buffer.holders for buffer in buffers} <= {0}, "nobody holds a buffer")


def ended(generation: Generation) -> Finish:
    assert generation.wait(PATIENCE_S), "a request without an end"
    assert generation.finish is not None
    return generation.finish


# What is asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_of_whole_blocks_the_last_one_is_computed(engine_of: EngineOf, store: Store, blocks: int) -> None:
    model, engine = tiny_model(), engine_of(store)
    prompt = prompt_of("a", blocks * BLOCK)
    past = assert_same(model, ask(engine, model, prompt, 3))
    again = ask(engine, model, prompt, 3)
    assert again.generation.reused.tokens == (blocks - 1) * BLOCK
    assert again.generation.passes[0] == ((blocks - 1) * BLOCK, blocks * BLOCK)
    assert_same(model, again, past)


def test_one_token_is_a_prompt(engine_of: EngineOf, store: Store) -> None:
    model, engine = tiny_model(), engine_of(store)
    asked = ask(engine, model, [7], 40)
    assert asked.generation.passes == [(i, i + 1) for i in range(40)]
    past = assert_same(model, asked)
    again = ask(engine, model, [7, *asked.generation.tokens], 2)
    assert again.generation.reused.tokens == 32, "an answer alone is worth saving"
    assert_same(model, again, past)


def test_the_next_turn_of_a_chat_reuses_prompt_and_answer(engine_of: EngineOf, store: Store) -> None:
    model, engine = tiny_model(), engine_of(store, chunk_tokens=33)
    said, past, before = prompt_of("hello", 20), None, 1
    for turn in range(4):
        asked = ask(engine, model, said, 30)
        # The last token of an answer was never an input, so there is no KV of it.
        assert asked.generation.reused.tokens == (before - 1) // BLOCK * BLOCK
        past = assert_same(model, asked, past)
        said = [*said, *asked.generation.tokens]
        before = len(said)
        said += prompt_of(turn, 9)


def test_a_block_is_saved_as_the_child_of_the_one_before_it(engine_of: EngineOf, store: Store) -> None:
    """Saved one by one, of prompt and answer: who clears a block clears those that follow, and no others."""
    engine = engine_of(store, chunk_tokens=BLOCK)
    prompt = prompt_of("a", 5 * BLOCK)
    generation = engine.generate(prompt, Sampling(max_tokens=2 * BLOCK + 1))
    assert engine.wait_saved(PATIENCE_S)
    scope = store.open_scope(engine.namespace.digest()).result
    assert scope is not None
    keys = chain(scope.root, [*prompt, *generation.tokens], BLOCK)
    assert store.match([scope.shelf()], keys).result.blocks == 7
    assert store.clear(prefix=keys[6]) == 1
    assert store.match([scope.shelf()], keys).result.blocks == 6
    assert store.clear(prefix=keys[2]) == 4
    assert store.match([scope.shelf()], keys).result.blocks == 2


def test_a_lease_is_back_before_the_answer_begins(engine_of: EngineOf, store: Store) -> None:
    engine = engine_of(store)
    prompt = prompt_of("a", 100)
    engine.generate(prompt, Sampling(max_tokens=1))
    assert engine.wait_saved(PATIENCE_S)
    leases: list[int] = []
    generation = engine.submit(prompt, Sampling(max_tokens=3), on_change=lambda _: leases.append(store.stats().leases))
    assert ended(generation) is Finish.LENGTH
    assert generation.reused.tokens == 96
    assert leases[:3] == [0, 0, 0]


def test_an_answer_ends_with_the_context(engine_of: EngineOf) -> None:
    engine = engine_of(context_tokens=64)
    assert engine.context_tokens == 64
    for tokens in (1, 60, 63):
        generation = engine.generate(prompt_of("a", tokens), Sampling(max_tokens=1000))
        assert (generation.finish, len(generation.tokens)) == (Finish.LENGTH, 64 - tokens)
    assert engine_of(context_tokens=10**9).context_tokens == 2048


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(engine_of: EngineOf, store: Store) -> None:
    model = tiny_model()
    prompt = prompt_of("a", 40)
    answer = greedy(model, prompt, 30)
    stop = answer[12]
    expected = answer[: answer.index(stop)]
    generation = engine_of(store).generate(prompt, Sampling(max_tokens=30, stop_tokens=frozenset({stop, 511})))
    assert (generation.finish, generation.tokens) == (Finish.STOP, expected)


@pytest.mark.parametrize("is_list", [False, True])
def test_the_models_own_end_ends_the_answer(engine_of: EngineOf, is_list: bool) -> None:
    prompt = prompt_of("a", 40)
    answer = greedy(tiny_model(), prompt, 30)
    stop = answer[7]
    settings = KINDS["llama"][1] | {"eos_token_id": [stop, 511] if is_list else stop}
    engine = engine_of(None, make_model("LlamaConfig", **settings))
    generation = engine.generate(prompt, Sampling(max_tokens=30))
    assert (generation.finish, generation.tokens) == (Finish.STOP, answer[: answer.index(stop)])
    going_on = engine.generate(prompt, Sampling(max_tokens=len(answer), ignores_end=True))
    assert (going_on.finish, going_on.tokens) == (Finish.LENGTH, answer)


def test_an_answer_may_end_before_it_begins(engine_of: EngineOf) -> None:
    prompt = prompt_of("a", 40)
    (first,) = greedy(tiny_model(), prompt, 1)
    generation = engine_of().generate(prompt, Sampling(stop_tokens=frozenset({first})))
    assert (generation.finish, generation.tokens, [*generation]) == (Finish.STOP, [], [])
    assert generation.ttft_s is None
    assert generation.ended_at_s is not None


def test_tokens_are_told_one_by_one_on_the_engines_thread(engine_of: EngineOf) -> None:
    heard: list[tuple[int, Finish | None, str]] = []

    def hear(generation: Generation) -> None:
        heard.append((len(generation.tokens), generation.finish, threading.current_thread().name))

    generation = engine_of().submit(prompt_of("a", 5), Sampling(max_tokens=3), on_change=hear)
    assert [*generation] == generation.tokens
    assert ended(generation) is Finish.LENGTH
    eventually(lambda: len(heard) == 4, "the end is told")
    name = "kvtide-engine"
    assert heard == [(1, None, name), (2, None, name), (3, None, name), (3, Finish.LENGTH, name)]
    assert generation.ttft_s is not None
    assert generation.submitted_at_s < generation.first_token_at_s < generation.ended_at_s  # type: ignore[operator]


@pytest.mark.parametrize("chunk_tokens", [1, 15, 16, 17, 512])
def test_a_prompt_is_computed_in_pieces(engine_of: EngineOf, chunk_tokens: int) -> None:
    model = tiny_model()
    prompt = prompt_of("a", 50)
    asked = ask(engine_of(chunk_tokens=chunk_tokens), model, prompt, 4)
    pieces = [(start, min(start + chunk_tokens, 50)) for start in range(0, 50, chunk_tokens)]
    assert asked.generation.passes == [*pieces, (50, 51), (51, 52), (52, 53)]
    assert_same(model, asked)
    assert asked.generation.tokens == greedy(model, prompt, 4, chunk_tokens)


def test_a_model_that_gives_all_logits_is_no_worse(engine_of: EngineOf) -> None:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "eos_token_id": None}
    model = make_model("BloomConfig", **settings)
    forward = model.forward

    def without_the_option(input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
        return forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)

    model.forward = without_the_option
    generation = engine_of(None, model).generate(prompt_of("a", 20), Sampling(max_tokens=5))
    model.forward = forward
    assert generation.tokens == greedy(model, prompt_of("a", 20), 5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt": []}, Rejected, "empty"),
        ({"prompt": [0, VOCABULARY]}, Rejected, "vocabulary of 512"),
        ({"prompt": [-1, 3]}, Rejected, "vocabulary of 512"),
        ({"prompt": [1] * 100}, TooLarge, "100 tokens.*context of 100"),
        ({"prompt": [1] * 5000}, TooLarge, "5,000 tokens.*context of 100"),
        ({"prompt": [1], "sampling": Sampling(max_tokens=0)}, Rejected, "max_tokens"),
        ({"prompt": [1], "sampling": Sampling(temperature=-1)}, Rejected, "temperature"),
        ({"prompt": [1], "sampling": Sampling(temperature=float("nan"))}, Rejected, "temperature"),
        ({"prompt": [1], "sampling": Sampling(top_p=0)}, Rejected, "top_p"),
        ({"prompt": [1], "sampling": Sampling(top_k=-1)}, Rejected, "top_k"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_at_once(
    engine_of: EngineOf, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    engine = engine_of(context_tokens=100)
    with pytest.raises(error, match=words):
        engine.submit(**arguments)
    assert engine.generate([1] * 99).finish is Finish.LENGTH


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_tokens": 0},
        {"running_max": 0},
        {"waiting_max": 0},
        {"save_blocks_max": 0},
        {"context_tokens": 1},
        {"context_tokens": 0},
        {"context_tokens": -5},
        {"buffer_bytes_max": -1},
        {"block_tokens": 17},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}"):
        Engine(tiny_model(), identity="x", settings=EngineSettings(**wrong))


def test_too_many_that_wait_are_turned_away(engine_of: EngineOf, store: Store, buffers: list[KvBuffer]) -> None:
    model, engine = tiny_model(), engine_of(store, running_max=1, waiting_max=2)
    with pass_gate(model) as gate:
        running = engine.submit([1, 2, 3], Sampling(max_tokens=2))
        gate.wait_reached()
        waiting = [engine.submit([4, 5, number], Sampling(max_tokens=2)) for number in range(2)]
        with pytest.raises(Busy, match="2 requests wait"):
            engine.submit([1])
        assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    assert [ended(each) for each in (running, *waiting)] == [Finish.LENGTH] * 3
    assert engine.generate([1], Sampling(max_tokens=1)).finish is Finish.LENGTH
    assert_all_is_back(engine, store, buffers)


# Chance -------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_whatever_else_runs(engine_of: EngineOf, store: Store) -> None:
    engine = engine_of(store, chunk_tokens=8)
    sampling = Sampling(max_tokens=20, temperature=1.0, top_p=0.9, top_k=100, seed=11)
    prompt = prompt_of("a", 20)
    alone = engine.generate(prompt, sampling, scope="one")
    others = [engine.submit(prompt_of(i, 40), Sampling(max_tokens=30, temperature=1.0)) for i in range(5)]
    beside = engine.generate(prompt, sampling, scope="two")
    assert [ended(other) for other in others] == [Finish.LENGTH] * 5
    assert beside.tokens == alone.tokens
    different = engine.generate(prompt, Sampling(max_tokens=20, temperature=1.0, seed=12), scope="three")
    assert different.tokens != alone.tokens


def test_one_choice_is_no_choice(engine_of: EngineOf) -> None:
    engine, prompt = engine_of(), prompt_of("a", 20)
    expected = greedy(tiny_model(), prompt, 12)
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-40}):
        sampling = Sampling(**{"max_tokens": 12, "temperature": 1.0, "seed": 3} | narrow)  # type: ignore[arg-type]
        assert engine.generate(prompt, sampling).tokens == expected


# Turns --------------------------------------------------------------------------------------------------------


def test_requests_at_once_are_answered_as_alone(engine_of: EngineOf, store: Store, buffers: list[KvBuffer]) -> None:
    model = tiny_model()
    prompts = [prompt_of(number, 5 + 23 * number % 90) for number in range(12)]
    expected = [greedy(model, prompt, 15, 24) for prompt in prompts]
    engine = engine_of(store, chunk_tokens=24, running_max=5)
    with ThreadPoolExecutor(len(prompts)) as pool:
        generations = [*pool.map(lambda prompt: engine.generate(prompt, Sampling(max_tokens=15)), prompts)]
    assert [each.tokens for each in generations] == expected
    assert_all_is_back(engine, store, buffers)


def test_the_same_request_at_once_is_answered_alike(engine_of: EngineOf, store: Store, buffers: list[KvBuffer]) -> None:
    """They race for the same slots: one fills a block, the others are told that it is being filled."""
    engine = engine_of(store, chunk_tokens=16)
    prompt = prompt_of("a", 100)
    generations = [engine.submit(prompt, Sampling(max_tokens=20)) for _ in range(8)]
    assert [ended(each) for each in generations] == [Finish.LENGTH] * 8
    assert {tuple(each.tokens) for each in generations} == {tuple(greedy(tiny_model(), prompt, 20, 16))}
    assert_all_is_back(engine, store, buffers)
    reused = sum(each.reused.tokens // BLOCK for each in generations)  # by those that came late
    assert (engine.stats().saved_blocks, engine.stats().dropped_blocks) == (8 * 7 - reused, 0)


def test_a_long_prompt_does_not_silence_a_short_answer(engine_of: EngineOf) -> None:
    model, engine = tiny_model(), engine_of(chunk_tokens=16)
    long_passes: list[int] = []
    with pass_gate(model) as gate:
        long = engine.submit(prompt_of("long", 40 * 16), Sampling(max_tokens=1))
        gate.wait_reached()
        short = engine.submit(
            prompt_of("short", 10), Sampling(max_tokens=8), on_change=lambda _: long_passes.append(len(long.passes))
        )
    assert ended(short) is Finish.LENGTH
    assert not long.tokens, "the short one came first"
    assert all(after - before <= 1 for before, after in itertools.pairwise(long_passes))
    assert ended(long) is Finish.LENGTH


def test_no_more_run_than_may_and_the_first_come_first(engine_of: EngineOf) -> None:
    engine = engine_of(running_max=2)
    order: list[int] = []
    seen: list[int] = []

    def listener(number: int) -> Callable[[Generation], None]:
        def hear(generation: Generation) -> None:
            seen.append(engine.stats().running)
            if len(generation.tokens) == 1 and generation.finish is None:
                order.append(number)

        return hear

    generations = [
        engine.submit(prompt_of(number, 10), Sampling(max_tokens=4), on_change=listener(number)) for number in range(6)
    ]
    assert [ended(each) for each in generations] == [Finish.LENGTH] * 6
    assert order == [*range(6)]
    assert max(seen) == 2


def test_others_compute_while_one_waits_for_its_blocks(engine_of: EngineOf, store: Store) -> None:
    cache = FaultyCache(store)
    engine = engine_of(cache)
    prompt = prompt_of("a", 100)
    engine.generate(prompt, Sampling(max_tokens=2))
    assert engine.wait_saved(PATIENCE_S)
    cache.withhold("fetch")
    waits = engine.submit(prompt, Sampling(max_tokens=2))
    other = engine.submit(prompt_of("b", 100), Sampling(max_tokens=5))
    assert ended(other) is Finish.LENGTH
    assert (waits.finish, waits.passes) == (None, [])
    cache.give()
    assert ended(waits) is Finish.LENGTH
    assert waits.reused.tokens == 96


# Ends ---------------------------------------------------------------------------------------------------------


def test_a_request_that_waits_is_aborted_though_nobody_makes_room(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer]
) -> None:
    model, engine = tiny_model(), engine_of(store, running_max=1, waiting_max=1)
    is_first_over: list[bool] = []
    taken = len(buffers)
    with pass_gate(model) as gate:
        first = engine.submit(prompt_of("a", 100), Sampling(max_tokens=50))
        gate.wait_reached()
        second = engine.submit(prompt_of("b", 100), on_change=lambda _: is_first_over.append(first.finish is not None))
        second.abort()
    assert ended(second) is Finish.ABORT
    assert is_first_over == [False]
    assert (second.tokens, second.passes, len(buffers)) == ([], [], taken + 1)
    third = engine.submit([1, 2, 3], Sampling(max_tokens=1))
    assert [ended(first), ended(third)] == [Finish.LENGTH] * 2
    assert_all_is_back(engine, store, buffers)


@pytest.mark.parametrize("call", ["open_scope", "match", "fetch"])
def test_a_request_is_aborted_while_its_blocks_are_looked_for(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer], call: str
) -> None:
    cache = FaultyCache(store)
    engine = engine_of(cache)
    prompt = prompt_of("a", 100)
    engine.generate(prompt, Sampling(max_tokens=2))
    assert engine.wait_saved(PATIENCE_S)
    calls = cache.calls[call]
    cache.withhold(call)
    generation = engine.submit(prompt)
    eventually(lambda: cache.calls[call] > calls, "it looks for its blocks")
    generation.abort()
    assert ended(generation) is Finish.ABORT
    assert not generation.passes
    assert {buffer.holders for buffer in buffers} == {0}
    waits = cache.calls["wait"]
    eventually(lambda: cache.calls["wait"] > waits + 3, "the engine waits for the answer, and does not spin")
    cache.give()
    assert_all_is_back(engine, store, buffers)
    assert engine.generate(prompt, Sampling(max_tokens=2)).reused.tokens == 96


def test_a_request_is_aborted_in_the_middle_of_its_prompt(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer]
) -> None:
    model, engine = tiny_model(), engine_of(store, chunk_tokens=20)
    prompt = prompt_of("a", 100)
    with pass_gate(model, 3) as gate:
        generation = engine.submit(prompt)
        gate.wait_reached()
        generation.abort()
    assert ended(generation) is Finish.ABORT
    assert (generation.tokens, generation.passes, generation.error) == ([], [(0, 20), (20, 40), (40, 60)], "")
    assert_all_is_back(engine, store, buffers)
    again = ask(engine, model, prompt, 2)
    assert again.generation.reused.tokens == 48, "what was computed is not lost"


def test_a_request_is_aborted_in_the_middle_of_its_answer(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer]
) -> None:
    engine = engine_of(store)

    def enough(generation: Generation) -> None:
        if len(generation.tokens) == 3:
            generation.abort()

    generation = engine.submit(prompt_of("a", 100), Sampling(max_tokens=100), on_change=enough)
    assert ended(generation) is Finish.ABORT
    assert len(generation.tokens) == 3
    assert [*generation] == generation.tokens
    generation.abort()
    assert_all_is_back(engine, store, buffers)
    assert engine.stats().requests_by_finish == {"stop": 0, "length": 0, "abort": 1, "error": 0}


@pytest.mark.parametrize("at", ["first token", "end"])
def test_a_listener_that_fails_ends_its_own_request_only(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer], at: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(store, chunk_tokens=10)
    calls: list[Finish | None] = []

    def fail(generation: Generation) -> None:
        calls.append(generation.finish)
        if at == "first token" or generation.finish is not None:
            raise RuntimeError("nobody is at home")

    with caplog.at_level(logging.ERROR):
        other = engine.submit(prompt_of("b", 60), Sampling(max_tokens=20))
        generation = engine.submit(prompt_of("a", 5), Sampling(max_tokens=6), on_change=fail)
        assert ended(other) is Finish.LENGTH
        assert ended(generation) is (Finish.ABORT if at == "first token" else Finish.LENGTH)
    assert other.tokens == greedy(tiny_model(), prompt_of("b", 60), 20, 10)
    assert "nobody is at home" in caplog.text
    if at == "first token":
        assert "RuntimeError: nobody is at home" in generation.error
        assert calls == [None], "who failed once is not asked again"
        assert len(generation.tokens) == 1
    assert engine.is_alive
    assert_all_is_back(engine, store, buffers)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_model_that_fails_ends_that_request_and_the_next_one_works(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    engine = engine_of(store, chunk_tokens=40)
    prompt = prompt_of("a", 100)
    with failing_pass(model, ValueError("a matrix is ill"), number):
        generation = engine.submit(prompt, Sampling(max_tokens=10))
        assert ended(generation) is Finish.ERROR
    assert generation.error == "ValueError: a matrix is ill"
    assert len(generation.passes) == number - 1
    assert "engine.request_failed" in caplog.text
    assert_all_is_back(engine, store, buffers)
    again = ask(engine, model, prompt, 10)
    assert again.generation.reused.tokens == min((number - 1) * 40, 96) // BLOCK * BLOCK
    assert again.generation.tokens == greedy(model, prompt, 10, 40)


def test_a_request_without_memory_for_it_ends_and_the_next_one_works(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()

    def none(_self: Buffers, _tokens: int) -> KvBuffer:
        raise torch.OutOfMemoryError("try a smaller model")

    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "take", none)
        generation = engine.submit([1, 2, 3])
        assert ended(generation) is Finish.ERROR
    assert "try a smaller model" in generation.error
    assert engine.generate([1, 2, 3], Sampling(max_tokens=2)).finish is Finish.LENGTH
    assert engine.stats().running == 0


def test_an_engine_that_cannot_go_on_tells_everybody(
    engine_of: EngineOf, caplog: pytest.LogCaptureFixture, store: Store, buffers: list[KvBuffer]
) -> None:
    """What no request is to blame for, such as a listener that asks the interpreter to end."""

    def leave(_generation: Generation) -> None:
        raise SystemExit(3)

    model, engine = tiny_model(), engine_of(store, running_max=2)
    with pass_gate(model) as gate:
        generations = [engine.submit(prompt_of("a", 30))]
        gate.wait_reached()
        generations += [engine.submit([1, 2], on_change=leave), engine.submit([3])]
    for generation in generations:
        assert ended(generation) is Finish.ERROR
        assert "SystemExit" in generation.error
    assert not engine.is_alive
    with pytest.raises(Closed):
        engine.submit([1])
    assert "engine.failed" in caplog.text
    assert_all_is_back(engine, store, buffers)


# The end of all -----------------------------------------------------------------------------------------------


def test_closing_ends_every_request_and_saves_what_was_computed(
    engine_of: EngineOf, store: Store, buffers: list[KvBuffer]
) -> None:
    model = tiny_model()
    cache = FaultyCache(store)
    engine = engine_of(cache, running_max=3, chunk_tokens=16)
    prompt = prompt_of("a", 100)
    engine.generate(prompt, Sampling(max_tokens=2), scope="other")
    cache.withhold("fetch")
    looking = [engine.submit(prompt, scope="other")]
    eventually(lambda: cache.calls["fetch"] == 1, "it looks for its blocks")
    looking.append(engine.submit(prompt, scope="other"))
    eventually(lambda: cache.calls["fetch"] == 2, "so does another")
    looking[1].abort()
    assert ended(looking[1]) is Finish.ABORT
    with pass_gate(model, 3) as gate:
        running = [engine.submit(prompt), engine.submit([1])]
        waiting = [engine.submit([number]) for number in range(4)]
        gate.wait_reached()
        closing = threading.Thread(target=engine.close)
        closing.start()
        eventually(lambda: not engine.is_alive, "it is being closed")
    for generation in (looking[0], *running, *waiting):
        assert (ended(generation), generation.error) == (Finish.ABORT, "the engine was closed")
    cache.give()  # what both looked for is waited for a little, and given back
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert_all_is_back(engine, store, buffers)
    assert engine_of(store).generate(prompt, Sampling(max_tokens=2)).reused.tokens >= 16
    assert store.open_scope(engine.namespace.digest()).result is not None, "the cache is its owner's"


def test_after_the_end_requests_are_refused(engine_of: EngineOf, store: Store) -> None:
    engine = engine_of(store)
    assert engine.is_alive
    for _ in range(2):
        engine.close()
    assert not engine.is_alive
    with pytest.raises(Closed, match="the engine is closed"):
        engine.submit([1, 2, 3])
    assert engine.stats().requests_by_finish == {"stop": 0, "length": 0, "abort": 0, "error": 0}


# Figures ------------------------------------------------------------------------------------------------------


def test_figures_add_up(engine_of: EngineOf, store: Store) -> None:
    engine = engine_of(store, chunk_tokens=30)
    generations = []
    for tokens in (1, 16, 40, 100, 64, 100, 33):
        generations.append(engine.generate(prompt_of("a", tokens), Sampling(max_tokens=tokens % 7 + 1)))
        assert engine.wait_saved(PATIENCE_S)
    stats = engine.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.requests_by_finish == {"stop": 0, "length": 7, "abort": 0, "error": 0}
    assert stats.prompt_tokens == sum(len(each.prompt) for each in generations)
    assert stats.generated_tokens == sum(len(each.tokens) for each in generations)
    assert stats.reused_tokens_by_tier == {"dram": sum(each.reused.tokens for each in generations)}
    assert stats.computed_tokens == stats.prompt_tokens - stats.reused_tokens_by_tier["dram"]
    in_pieces = [min(end, len(each.prompt)) - start for each in generations for start, end in each.passes]
    assert stats.computed_tokens == sum(size for size in in_pieces if size > 0)
    whole = [(len(each.prompt) + len(each.tokens) - 1) // BLOCK - each.reused.tokens // BLOCK for each in generations]
    assert (stats.saved_blocks, stats.dropped_blocks) == (sum(whole), 0)


def test_without_a_cache_everything_is_computed(engine_of: EngineOf) -> None:
    engine = engine_of()
    prompt = prompt_of("a", 100)
    for _ in range(2):
        generation = engine.generate(prompt, Sampling(max_tokens=3))
        assert (generation.reused, generation.passes[0]) == (Reuse(), (0, 100))
    stats = engine.stats()
    assert (stats.computed_tokens, stats.saved_blocks, stats.dropped_blocks) == (200, 0, 0)
    assert stats.reused_tokens_by_tier == {}
    assert engine.wait_saved(0.0)


def test_what_computing_took_is_reported_once_for_each_prompt(engine_of: EngineOf, store: Store) -> None:
    reports: list[tuple[bytes, int]] = []

    class Noting(FaultyCache):
        def report_prefill(self, namespace: Any, tokens: int, seconds: float) -> None:
            assert seconds > 0
            reports.append((namespace, tokens))

    engine = engine_of(Noting(store), chunk_tokens=16)
    for tokens in (100, 100, 16, 1):
        engine.generate(prompt_of("a", tokens), Sampling(max_tokens=3))
        assert engine.wait_saved(PATIENCE_S)
    assert reports == [(engine.namespace.digest(), tokens) for tokens in (100, 4, 16, 1)]
