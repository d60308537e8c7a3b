# SPDX-License-Identifier: Apache-2.0
"""Whatever the cache does, every request is answered, and with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_cache import MAY_BE_CLOSED, FaultyCache
from tiny import BLOCK, PATIENCE_S, ask, assert_same, greedy, kv_bytes, pass_gate, prompt_of, tiny_model
from transformers import DynamicCache

from kvtide.config import DiskSettings, DramSettings, Settings
from kvtide.engines.transformers import Engine, Finish, Reuse, Sampling
from kvtide.store import Store, open_store
from kvtide.testing.store_suite.tools import eventually
from kvtide.tiers.disk.folder import DATA

EngineOf = Callable[..., Engine]
PROMPT = prompt_of("a", 100)
CALLS = (*MAY_BE_CLOSED, "plan", "release", "abort", "poll", "wait")


def with_disk(folder: Path, dram_bytes: int = 8 << 20) -> Store:
    disk = DiskSettings(folder=str(folder), bytes_max=64 << 20)
    return open_store(Settings(dram=DramSettings(bytes_max=dram_bytes, huge_pages=False), disk=disk))


def assert_well(engine: Engine, store: Store, past: DynamicCache | None, reused: int | None = None) -> DynamicCache:
    """A request is answered as by transformers alone, whatever it reused of `past`."""
    asked = ask(engine, tiny_model(), PROMPT, 6)
    assert reused is None or asked.generation.reused.tokens == reused
    eventually(lambda: store.stats().leases == 0, "no lease is left")
    return assert_same(tiny_model(), asked, past)


@pytest.mark.parametrize("fault", ["nothing", "late", "closed", "error"])
@pytest.mark.parametrize("call", [call for call in CALLS if call != "wait"])
def test_a_call_that_fails_costs_time_and_nothing_else(
    engine_of: EngineOf, store: Store, call: str, fault: Any
) -> None:
    """Before anything is saved, after it was, and when the cache is well again."""
    cache = FaultyCache(store)
    engine = engine_of(cache, chunk_tokens=40)
    cache.faults[call] = fault
    past = assert_well(engine, store, None, 0)
    cache.faults.clear()
    past = assert_well(engine, store, past)
    cache.faults[call] = fault
    past = assert_well(engine, store, past)
    cache.faults.clear()
    assert_well(engine, store, past, 96)


@pytest.mark.parametrize("fault", ["nothing", "late", "closed", "error"])
def test_a_cache_that_fails_in_everything_is_no_cache(engine_of: EngineOf, store: Store, fault: Any) -> None:
    cache = FaultyCache(store)
    engine = engine_of(cache)
    past = assert_well(engine, store, None, 0)
    cache.faults = dict.fromkeys(CALLS, fault)
    for _ in range(2):
        assert_well(engine, store, None, 0)
    generations = [engine.submit(prompt_of(number, 40), Sampling(max_tokens=5)) for number in range(10)]
    for number, generation in enumerate(generations):
        assert generation.wait(PATIENCE_S)
        assert generation.tokens == greedy(tiny_model(), prompt_of(number, 40), 5)
    cache.faults.clear()
    assert_well(engine, store, past, 96)


def test_a_store_that_is_closed_beside_the_engine_is_no_cache(engine_of: EngineOf) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=8 << 20, huge_pages=False))) as store:
        engine = engine_of(store)
        past = assert_well(engine, store, None, 0)
        assert_well(engine, store, past, 96)
        running = engine.submit(PROMPT, Sampling(max_tokens=200))
        eventually(lambda: len(running.tokens) > 1, "it answers")
        store.close()
        assert running.wait(PATIENCE_S)
        assert running.finish is Finish.LENGTH
        assert_well(engine, store, None, 0)


# Damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_damaged_block_is_computed_and_so_are_those_behind_it(
    engine_of: EngineOf, tmp_path: Path, block: int
) -> None:
    with with_disk(tmp_path) as store:
        past = assert_well(engine_of(store), store, None, 0)
    # Keys of the block's first layer and head stand in one piece on the disk.
    keys = past.layers[0].keys[0, 0, block * BLOCK : (block + 1) * BLOCK].contiguous().numpy().tobytes()
    data = bytearray((tmp_path / DATA).read_bytes())
    place = data.find(keys)
    assert place > 0
    data[place + 100] ^= 1
    (tmp_path / DATA).write_bytes(data)
    with with_disk(tmp_path) as store:
        asked = ask(engine_of(store), tiny_model(), PROMPT, 6)
        assert asked.generation.reused.tokens <= block * BLOCK
        past = assert_same(tiny_model(), asked, past)
        again = ask(engine_of(store), tiny_model(), PROMPT, 6)
        assert again.generation.reused.tokens == 96, "it was saved anew"
        assert_same(tiny_model(), again, past)


def test_a_disk_of_nonsense_is_no_cache(engine_of: EngineOf, tmp_path: Path) -> None:
    with with_disk(tmp_path) as store:
        past = assert_well(engine_of(store), store, None, 0)
    data = (tmp_path / DATA).stat().st_size
    (tmp_path / DATA).write_bytes(b"\xa5" * data)
    with with_disk(tmp_path) as store:
        past = assert_well(engine_of(store), store, None, 0)
        assert_well(engine_of(store), store, past, 96)


# Bounds -------------------------------------------------------------------------------------------------------


def test_a_store_too_small_for_a_block_is_no_cache(engine_of: EngineOf) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=16 << 10, huge_pages=False))) as store:
        engine = engine_of(store)
        for _ in range(2):
            assert_well(engine, store, None, 0)
        assert (engine.stats().saved_blocks, engine.stats().dropped_blocks) == (0, 12)


def test_a_store_too_small_for_a_prompt_has_its_beginning(engine_of: EngineOf) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=8 * (16 << 10), huge_pages=False))) as store:
        engine = engine_of(store)
        past = assert_well(engine, store, None, 0)
        assert_well(engine, store, past, 4 * BLOCK)
        assert engine.stats().dropped_blocks > 0


def test_where_blocks_come_and_go_answers_are_the_same(engine_of: EngineOf) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=24 * (16 << 10), huge_pages=False))) as store:
        engine = engine_of(store, running_max=4)
        prompts = [prompt_of(number % 10, 60) for number in range(60)]
        generations = [engine.submit(prompt, Sampling(max_tokens=4)) for prompt in prompts]
        expected = [greedy(tiny_model(), prompt, 4) for prompt in prompts[:10]]
        for number, generation in enumerate(generations):
            assert generation.wait(PATIENCE_S)
            assert generation.tokens == expected[number % 10]
        assert engine.wait_saved(PATIENCE_S)
        eventually(lambda: store.stats().leases == 0, "no lease is left")


def test_what_cannot_be_saved_in_time_is_dropped_and_counted(engine_of: EngineOf, store: Store) -> None:
    cache = FaultyCache(store)
    engine = engine_of(cache, save_blocks_max=8, chunk_tokens=48)
    with cache.gate("reserve") as gate:
        generations = [engine.submit(prompt_of(number, 48), Sampling(max_tokens=1)) for number in range(6)]
        for number, generation in enumerate(generations):
            assert generation.wait(PATIENCE_S)
            assert generation.tokens == greedy(tiny_model(), prompt_of(number, 48), 1)
        gate.wait_reached()
        assert (engine.stats().saved_blocks, engine.stats().dropped_blocks) == (0, 12)
        assert not engine.wait_saved(0.0)
    assert engine.wait_saved(PATIENCE_S)
    assert (engine.stats().saved_blocks, engine.stats().dropped_blocks) == (6, 12)
    reused = [engine.generate(prompt_of(number, 48), Sampling(max_tokens=1)).reused.tokens for number in range(6)]
    assert reused == [32, 32, 0, 0, 0, 0]


def test_a_gap_in_what_was_saved_is_closed_by_the_next_request(engine_of: EngineOf, store: Store) -> None:
    """Blocks 0 and 1 are dropped, those behind them saved: of no use until somebody brings the first ones."""
    cache, model = FaultyCache(store), tiny_model()
    engine = engine_of(cache, chunk_tokens=32)
    cache.faults["reserve"] = "nothing"
    with pass_gate(model, 2) as gate:
        generation = engine.submit(PROMPT, Sampling(max_tokens=1))
        gate.wait_reached()
        assert engine.wait_saved(PATIENCE_S)
        cache.faults.clear()
    assert generation.wait(PATIENCE_S)
    assert engine.wait_saved(PATIENCE_S)
    assert (engine.stats().saved_blocks, engine.stats().dropped_blocks) == (4, 2)
    assert ask(engine, model, PROMPT, 1).generation.reused == Reuse()
    assert ask(engine, model, PROMPT, 1).generation.reused.tokens == 96


def test_kv_of_a_block_is_where_it_was_found(engine_of: EngineOf, tmp_path: Path) -> None:
    """Blocks of one prompt from two tiers: each is told by its own, and all of them are right."""
    model = tiny_model()
    with with_disk(tmp_path) as store:
        short = ask(engine_of(store), model, PROMPT[:64], 1)
        past = assert_same(model, short)
    with with_disk(tmp_path) as store:
        engine = engine_of(store)
        first = ask(engine, model, PROMPT[:40], 1)
        assert first.generation.reused == Reuse(32, {"disk": 32})
        assert first.watch.kv_reused == kv_bytes(past, 32)
        second = ask(engine, model, PROMPT, 1)
        assert second.generation.reused == Reuse(64, {"dram": 32, "disk": 32})
        assert_same(model, second, past)
        assert engine.stats().reused_tokens_by_tier == {"dram": 32, "disk": 64}
