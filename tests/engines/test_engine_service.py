# SPDX-License-Identifier: Apache-2.0
"""Engines in front of the node service: warm while it is there, right whatever becomes of it.

Streams at once reuse what others of them happen to have saved, so their passes differ from run to run. Their prompts
are such that no rounding can change the answer (`greedy` looks at that), and answers are compared with those of
transformers alone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tiny import BLOCK, IGNORE_NO_BF16, PATIENCE_S, ask, assert_same, greedy, prompt_of, round_trip, tiny_model

from kvtide.client import Client, connect
from kvtide.engines.transformers import Engine, Finish, Generation, Reuse, Sampling
from kvtide.testing.node import ServedNode, served
from kvtide.testing.store_suite.tools import eventually

EngineOf = Callable[..., Engine]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedNode]:
    with served(tmp_path / "node") as node:
        yield node
        if node.process is not None:
            os.kill(node.pid, signal.SIGCONT)


@contextmanager
def client_of(node: ServedNode) -> Iterator[Client]:
    """With the deadlines that engines have by default."""
    with connect(f"unix:{node.socket}") as client:
        yield client


def settle(node: ServedNode) -> None:
    """Everything is on the disk."""
    with node.connect() as client:
        eventually(
            lambda: not any(each["queued_bytes"] for each in client.stats()["spill"].values()), "everything is spilled"
        )


# Round trips --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(IGNORE_NO_BF16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_through_the_service_and_its_disk(
    engine_of: EngineOf, node: ServedNode, dtype: torch.dtype, ending: str
) -> None:
    """One engine saves, another one finds it in DRAM, and a third one on the disk of a service that was restarted."""

    def clients() -> Iterator[Client]:
        for number in range(4):
            with node.connect(control_s=30.0) as client:
                yield client
            if number == 1:
                if ending == "stopped":
                    assert node.stop() == 0
                else:
                    settle(node)
                    node.kill()
                node.start()

    round_trip(engine_of, tiny_model("llama", dtype), clients(), ["dram", "disk", "dram"])


def test_engines_of_one_machine_share_and_leave_nothing_leased(engine_of: EngineOf, node: ServedNode) -> None:
    model, prompt = tiny_model(), prompt_of("a", 100)
    with node.connect(control_s=30.0) as one, node.connect(control_s=30.0) as other:
        past = assert_same(model, ask(engine_of(one), model, prompt))
        again = ask(engine_of(other), model, prompt)
        assert again.generation.reused == Reuse(96, {"dram": 96})
        assert_same(model, again, past)
        assert ask(engine_of(other), model, prompt, scope="somebody").generation.reused == Reuse()
        assert ask(engine_of(other, identity="other"), model, prompt).generation.reused == Reuse()
        eventually(lambda: one.stats()["leases"] == 0, "no lease is left")
        engine_of(other).close()


def test_an_engine_may_be_there_before_the_service(engine_of: EngineOf, tmp_path: Path) -> None:
    model, prompt = tiny_model(), prompt_of("a", 100)
    node = served(tmp_path / "node")
    with connect(f"unix:{node.socket}", must_answer=False) as client:
        engine = engine_of(client)
        assert_same(model, ask(engine, model, prompt))
        with node:
            eventually(lambda: client.is_connected, "the client has found it")
            first = ask(engine, model, prompt)
            assert first.generation.reused == Reuse()
            past = assert_same(model, first)
            assert_same(model, ask(engine, model, prompt), past)
            eventually(lambda: engine.generate(prompt).reused.tokens == 96, "a request is warm")


def test_a_client_that_was_closed_is_no_cache(engine_of: EngineOf, node: ServedNode) -> None:
    model, prompt = tiny_model(), prompt_of("a", 100)
    with node.connect(control_s=30.0) as client:
        engine = engine_of(client)
        assert_same(model, ask(engine, model, prompt))
    asked = ask(engine, model, prompt)
    assert asked.generation.reused == Reuse()
    assert_same(model, asked)


def test_a_lost_request_is_aborted_without_the_service(engine_of: EngineOf, node: ServedNode) -> None:
    """Looking for its blocks at a service that stands still, it ends at once; what came too late is given back."""
    model, prompt = tiny_model(), prompt_of("a", 100)
    with node.connect(control_s=30.0) as client:
        engine = engine_of(client)
        ask(engine, model, prompt)
        os.kill(node.pid, signal.SIGSTOP)
        generation = engine.submit(prompt)
        other = engine.submit(prompt_of("b", 3), Sampling(max_tokens=2))
        assert other.wait(PATIENCE_S)
        assert generation.finish is None
        generation.abort()
        assert generation.wait(PATIENCE_S)
        assert (generation.finish, generation.passes) == (Finish.ABORT, [])
        os.kill(node.pid, signal.SIGCONT)
        eventually(lambda: client.stats()["leases"] == 0, "no lease is left")
        eventually(lambda: engine.generate(prompt).reused.tokens == 96, "a request is warm again")


# Twenty streams -----------------------------------------------------------------------------------------------

SHARED = prompt_of("what everybody says first", 4 * BLOCK)
PROMPTS = [[*(SHARED if number % 2 else []), *prompt_of((0, number), 20 + 7 * number % 60)] for number in range(20)]
ANSWER = 12


def killed(node: ServedNode) -> Iterator[None]:
    node.kill()
    yield
    node.start()


def standing_still(node: ServedNode) -> Iterator[None]:
    os.kill(node.pid, signal.SIGSTOP)
    yield
    os.kill(node.pid, signal.SIGCONT)


def restarted(node: ServedNode) -> Iterator[None]:
    assert node.stop() == 0
    node.start()
    yield


def killed_and_restarted(node: ServedNode) -> Iterator[None]:
    node.kill()
    node.start()
    yield


FAULTS = [killed, standing_still, restarted, killed_and_restarted]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_streams_go_on_whatever_becomes_of_the_service(
    engine_of: EngineOf, node: ServedNode, fault: Callable[[ServedNode], Iterator[None]]
) -> None:
    model = tiny_model()
    expected = [greedy(model, prompt, ANSWER) for prompt in PROMPTS]
    is_midway = threading.Event()
    told = [0]

    def hear(_generation: Generation) -> None:
        told[0] += 1
        if told[0] == 30:
            is_midway.set()

    with client_of(node) as client:
        engine = engine_of(client, running_max=6, chunk_tokens=32)
        sampling = Sampling(max_tokens=ANSWER)
        streams = [engine.submit(prompt, sampling, on_change=hear) for prompt in PROMPTS]
        assert is_midway.wait(PATIENCE_S)
        steps = fault(node)
        next(steps)
        for number, stream in enumerate(streams):
            assert stream.wait(PATIENCE_S), f"stream {number} does not end"
            assert (stream.finish, stream.error) == (Finish.LENGTH, "")
            assert stream.tokens == expected[number], f"stream {number} says something else"
        for prompt, tokens in zip(PROMPTS[:3], expected, strict=False):  # and while it is away
            assert engine.generate(prompt, sampling).tokens == tokens
        next(steps, None)

        def is_warm() -> bool:
            generation = engine.generate(PROMPTS[0], sampling)
            assert generation.tokens == expected[0]
            assert engine.wait_saved(PATIENCE_S)
            return generation.reused.tokens == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK

        eventually(is_warm, "a request is warm again")
        eventually(lambda: client.is_connected and client.stats()["leases"] == 0, "no lease is left")
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.requests_by_finish["length"] == sum(stats.requests_by_finish.values())


def test_an_engine_that_may_only_read_finds_what_others_saved(engine_of: EngineOf, tmp_path: Path) -> None:
    """It maps the arena to read only, and what it would save is refused."""
    tokens = {role: f"a token of {role}" for role in ("engine", "reader")}
    clients = "".join(
        f"    - {{role: {role}, token_sha256: {sha256(token.encode()).hexdigest()}}}\n"
        for role, token in tokens.items()
    )
    config = f"dram: {{bytes_max: 32MiB}}\ntenants:\n  ada:\n    clients:\n{clients}"
    model, prompt = tiny_model(), prompt_of("a", 100)
    with (
        ServedNode(tmp_path / "ada", "--admin-port", "0", "--disk-bytes-max", "64MiB", config=config) as node,
        node.connect(token=tokens["engine"], control_s=30.0) as writer,
        node.connect(token=tokens["reader"], control_s=30.0) as reader,
    ):
        past = assert_same(model, ask(engine_of(writer), model, prompt))
        engine = engine_of(reader)
        asked = ask(engine, model, [*prompt, *prompt_of("more", 50)])
        assert asked.generation.reused == Reuse(96, {"dram": 96})
        assert_same(model, asked, past)
        assert (engine.stats().saved_blocks, engine.stats().dropped_blocks) == (0, 3)
