# SPDX-License-Identifier: Apache-2.0
"""The scenes in order. Each claim is checked; the first that does not hold ends the demonstration.

a service and an engine       a question about a long document: cold
the same engine               another question: warm, from DRAM
both started again            DRAM is empty: warm, from NVMe
a second replica              has never seen the document: warm
a chat                        every turn starts warm, with the answers before it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvtide.demo.document import CHAT, QUESTIONS, TITLE, document, prompt
from kvtide.demo.reference import Reference
from kvtide.demo.replica import Answer, ask
from kvtide.demo.rows import Row
from kvtide.demo.screen import Screen
from kvtide.engines.transformers import EngineSettings
from kvtide.engines.transformers.shape import BLOCK_TOKENS_MAX
from kvtide.errors import KvtideError
from kvtide.testing.engine import ServedEngine
from kvtide.testing.node import ServedNode

_ANSWER_TOKENS = 24
_DRAM, _DISK = "1GiB", "2GiB"


class Demo:
    """One run, in a folder of its own."""

    def __init__(
        self, folder: Path, model_folder: Path, model: Any, tokenizer: Any, screen: Screen, document_tokens: int
    ) -> None:
        self._screen = screen
        self._tokenizer = tokenizer
        self._model_folder = model_folder
        self._text = document(tokenizer, document_tokens)
        self._document_tokens = len(tokenizer(self._text)["input_ids"])
        self._reference = Reference(model, EngineSettings().chunk_tokens)
        self._node = ServedNode(
            folder / "node", "--dram-bytes-max", _DRAM, "--disk-bytes-max", _DISK, "--admin-port", "0"
        )
        self._engines = [self._engine(folder / f"engine-{name}.log") for name in ("a", "b")]
        self._without_s = 0.0
        self.rows: list[Row] = []
        self.about: dict[str, object] = {
            "model": "SmolLM2-135M-Instruct",
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "document": TITLE,
            "document_tokens": self._document_tokens,
        }

    def _engine(self, log: Path) -> ServedEngine:
        return ServedEngine(log, str(self._model_folder), "--cache", f"unix:{self._node.socket}")

    def run(self) -> None:
        """Play all scenes. Raises KvtideError when a claim does not hold."""
        first, second = self._engines
        try:
            self._start_service("kvtide serve")
            self._start(first, "kvtide engine --model smollm2")
            self._cold(first)
            self._warm(first, 1, "another question, same document", "dram")
            self._restart(first)
            self._warm(first, 2, "after a restart of both", "disk")
            self._start(second, "kvtide engine: a second replica")
            self._warm(second, 3, "in a second replica", "dram")
            self._chat(second)
        finally:
            for engine in self._engines:
                engine.kill()
            self._node.kill()

    def _start_service(self, what: str) -> None:
        with self._screen.step(what):
            self._node.start()

    def _start(self, engine: ServedEngine, what: str) -> None:
        with self._screen.step(what):
            engine.start()

    def _cold(self, engine: ServedEngine) -> None:
        tokens = prompt(self._tokenizer, self._text, QUESTIONS[:1])
        with self._screen.step("a question; the document is new", len(tokens)) as step:
            answer = ask(engine, tokens, _ANSWER_TOKENS, step.update)
        if answer.reused_tokens:
            raise KvtideError(f"{answer.reused_tokens} tokens of a new document came from an empty cache")
        with self._screen.step("the same without kvtide, for comparison", len(tokens)) as step:
            expected, self._without_s = self._reference.answer(tokens, 0, _ANSWER_TOKENS, step.update)
        self._add("a question; the document is new", QUESTIONS[0], answer, expected)

    def _warm(self, engine: ServedEngine, number: int, name: str, tier: str) -> None:
        self._ask(engine, name, prompt(self._tokenizer, self._text, [QUESTIONS[number]]), QUESTIONS[number], tier)

    def _ask(self, engine: ServedEngine, name: str, tokens: Sequence[int], question: str, tier: str) -> Answer:
        with self._screen.step(name):
            answer = ask(engine, tokens, _ANSWER_TOKENS)
        expected, _ = self._reference.answer(tokens, answer.reused_tokens, _ANSWER_TOKENS)
        row = self._add(name, question, answer, expected)
        if row.tier != tier or row.tokens_reused < self._document_tokens - BLOCK_TOKENS_MAX:
            raise KvtideError(
                f"{name}: {row.tokens_reused} tokens came from {row.tier or 'nowhere'}, and nearly all should have "
                f"come from {tier}"
            )
        return answer

    def _restart(self, engine: ServedEngine) -> None:
        with self._screen.step("engine and service are stopped; DRAM is gone"):
            engine.stop()
            self._node.stop()
        self._start_service("kvtide serve, again")
        self._start(engine, "kvtide engine, again")

    def _chat(self, engine: ServedEngine) -> None:
        turns: list[str] = []
        for number, question in enumerate(CHAT, 1):
            turns.append(question)
            tokens = prompt(self._tokenizer, self._text, turns)
            answer = self._ask(engine, f"a chat, turn {number}", tokens, question, "dram")
            turns.append(answer.text)

    def _add(self, name: str, question: str, answer: Answer, expected: Sequence[int]) -> Row:
        tier = max(answer.by_tier, key=lambda tier: answer.by_tier[tier], default="")
        row = Row(
            name,
            question,
            answer.text.strip(),
            answer.ttft_s,
            self._without_s,
            answer.prompt_tokens,
            answer.reused_tokens,
            tier,
            list(answer.tokens) == list(expected),
        )
        self.rows.append(row)
        if not row.identical:
            raise KvtideError(
                f"{name}: the answer differs from the one without kvtide: {answer.tokens} and {list(expected)}. Please"
                " report this"
            )
        return row


def title(about: dict[str, object]) -> str:
    """What was run, in one line."""
    return (
        f"{about['model']} in {about['dtype']} on {about['threads']} threads, a document of "
        f"{about['document_tokens']:,} tokens"
    )
