# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a long prompt: cold, warm from DRAM, warm from disk.

The floor is what no cache can beat: the tokens that must be computed in any case (a fresh suffix, and the tail of the
prefix that is shorter than a block), computed by the same model on KV that is in its memory already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvtide.bench.case import SECONDS, Case, Measured, Setting, Trial
from kvtide.bench.node.common import open_client, open_node
from kvtide.client import Client
from kvtide.engines.transformers import Engine, Generation, Sampling
from kvtide.engines.transformers.buffer import KvBuffer
from kvtide.engines.transformers.loading import load_model
from kvtide.engines.transformers.model_folder import model_folder
from kvtide.model_identity import model_identity
from kvtide.testing.node import ServedNode

_MIB = 1 << 20
_ONE = Sampling(max_tokens=1)
_SAVE_S = 60.0
_RECONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    prefix_tokens: int = 6000
    suffix_tokens: int = 32
    dram_bytes: int = 3072 * _MIB
    disk_bytes: int = 8192 * _MIB


FULL = Size()
QUICK = Size(prefix_tokens=1000, dram_bytes=1024 * _MIB, disk_bytes=2048 * _MIB)


class World:
    """A model, a service, an engine on both, and one on the model alone."""

    def __init__(self, stack: ExitStack, setting: Setting, size: Size) -> None:
        setting.tell("loading the model")
        folder = model_folder("smollm2")
        self.size = size
        self.model: Any = load_model(folder)
        identity = model_identity(folder)
        node = open_node(setting.folder / "node", dram_bytes=size.dram_bytes, disk_bytes=size.disk_bytes)
        self.node: ServedNode = stack.enter_context(node)
        self.client: Client = stack.enter_context(open_client(self.node.socket))
        self.client.wait_populated()
        self.engine = stack.enter_context(Engine(self.model, identity=identity, cache=self.client))
        self.plain = stack.enter_context(Engine(self.model, identity=identity))
        self.blocks_tokens = size.prefix_tokens // self.engine.layout.block_tokens * self.engine.layout.block_tokens
        self._random = np.random.Generator(np.random.PCG64(7))
        self.prefix = self.tokens(size.prefix_tokens)
        self.note = (
            f"SmolLM2-135M in {str(self.model.dtype).removeprefix('torch.')} on {torch.get_num_threads()} threads,"
            f" a prompt of {size.prefix_tokens:,} + {size.suffix_tokens} tokens"
        )
        for engine in (self.engine, self.plain):  # whatever happens only once
            engine.generate(self.tokens(100), _ONE)

    def tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(1000, 40_000, count).tolist()
        return tokens

    def suffixed(self) -> list[int]:
        """The prefix, and something that nobody has seen."""
        return self.prefix + self.tokens(self.size.suffix_tokens)

    def warm_up(self, setting: Setting) -> None:
        setting.tell("computing the prefix")
        _first_token(self.engine, self.suffixed())
        assert self.engine.wait_saved(_SAVE_S), "the blocks of the benchmark were not saved in time"

    def warm(self, tier: str) -> Measured:
        generation = _generate(self.engine, self.suffixed())
        reused = dict(generation.reused.by_tier)
        assert reused == {tier: self.blocks_tokens}, f"{reused} came from the cache, not {self.blocks_tokens} of {tier}"
        assert generation.ttft_s is not None
        self.engine.wait_saved(_SAVE_S)
        return Measured(generation.ttft_s)

    def restart(self) -> None:
        """Empty DRAM."""
        self.node.stop()
        self._wait_connected(False)  # it has noticed
        self.node.start()
        self._wait_connected(True)
        self.client.wait_populated()

    def _wait_connected(self, is_connected: bool) -> None:
        end_s = time.monotonic() + _RECONNECT_S
        while self.client.is_connected != is_connected:
            assert time.monotonic() < end_s, "the client did not notice that the service went and came"
            self.client.poll()
            time.sleep(0.01)


@contextmanager
def _world(setting: Setting, fixed: Size | None) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, setting, fixed or (QUICK if setting.is_quick else FULL))


def _generate(engine: Engine, prompt: Sequence[int]) -> Generation:
    generation = engine.generate(prompt, _ONE)
    assert not generation.error, generation.error
    return generation


def _first_token(engine: Engine, prompt: Sequence[int]) -> Measured:
    generation = _generate(engine, prompt)
    assert generation.ttft_s is not None and not generation.reused.tokens, "this prompt was meant to be new"
    engine.wait_saved(_SAVE_S)
    return Measured(generation.ttft_s)


class Floor:
    """The least that a warm request takes."""

    def __init__(self, world: World) -> None:
        self._world = world
        engine = world.engine
        total = world.size.prefix_tokens + world.size.suffix_tokens
        self._buffer = KvBuffer(engine.shape, engine.layout, total, world.model.config)
        self._start = world.blocks_tokens
        with torch.inference_mode():
            for start in range(0, self._start, 512):
                self._pass(world.prefix[start : min(start + 512, self._start)])

    def measure(self) -> Measured:
        tokens = self._world.suffixed()[self._start :]
        self._buffer.length = self._start
        began_s = time.perf_counter()
        with torch.inference_mode():
            int(self._pass(tokens).logits[0, -1].argmax())
        return Measured(time.perf_counter() - began_s)

    def _pass(self, tokens: Sequence[int]) -> Any:
        ids = torch.tensor([list(tokens)])
        return self._world.model(ids, past_key_values=self._buffer.cache, use_cache=True, logits_to_keep=1)


def _warm(setting: Setting, *, fixed: Size | None, tier: str) -> Iterator[Trial]:
    with _world(setting, fixed) as world:
        world.warm_up(setting)
        floor = Floor(world)

        def subject() -> Measured:
            if tier == "disk":
                world.restart()
            return world.warm(tier)

        yield Trial(subject, floor.measure, note=f"{world.note}, from {tier}; baseline: the floor")


def _cold(setting: Setting, *, fixed: Size | None) -> Iterator[Trial]:
    with _world(setting, fixed) as world:

        def cold(engine: Engine) -> Measured:
            return _first_token(engine, world.tokens(len(world.prefix) + world.size.suffix_tokens))

        yield Trial(
            partial(cold, world.engine),
            partial(cold, world.plain),
            note=f"{world.note}, never seen and saved; baseline: without kvtide",
        )


def _warm_against_cold(setting: Setting, *, fixed: Size | None) -> Iterator[Trial]:
    with _world(setting, fixed) as world:
        world.warm_up(setting)
        yield Trial(
            partial(world.warm, "dram"),
            lambda: _first_token(world.plain, world.suffixed()),
            note=f"{world.note}, from DRAM; baseline: cold, without kvtide",
        )


def make_cases(size: Size | None = None) -> tuple[Case, ...]:
    """All of them; `size` instead of what they have in a full and in a quick run."""
    return (
        Case("warm-dram", SECONDS, partial(_warm, fixed=size, tier="dram"), runs=11),
        Case("warm-disk", SECONDS, partial(_warm, fixed=size, tier="disk"), runs=11),
        Case("cold", SECONDS, partial(_cold, fixed=size), runs=5, quick_runs=5, warmups=0),
        Case("warm-against-cold", SECONDS, partial(_warm_against_cold, fixed=size), runs=3, quick_runs=3, warmups=0),
    )


CASES = make_cases()
