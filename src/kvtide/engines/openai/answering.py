# SPDX-License-Identifier: Apache-2.0
"""One call while the engine works on it: from tokens on the engine's thread to text on the event loop.

The engine rings a bell for each token and goes on; the loop looks at what there is when it gets to it. Neither waits
for the other, and a client that leaves ends the engine's work at its next step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import UNSET

from kvtide.engines.openai.answers import FinishReason, Kvtide, PromptTokensDetails, Usage
from kvtide.engines.openai.detokenizer import Detokenizer
from kvtide.engines.openai.meter import Meter
from kvtide.engines.openai.refusal import Refusal
from kvtide.engines.openai.stop_strings import StopStrings
from kvtide.engines.openai.task import Task
from kvtide.engines.openai.translator import Translator
from kvtide.engines.transformers.generation import Finish, Generation

if TYPE_CHECKING:
    from kvtide.engines.transformers.engine import Engine

_LOOK_S = 1.0  # an engine that died rings no bell
_TOKENS_AT_ONCE = 64  # then it is somebody else's turn


class Reader:
    """Reads one answer. `finish` is set when all of its text was read."""

    def __init__(self, index: int, generation: Generation, detokenizer: Detokenizer, stops: list[str]) -> None:
        self.index = index
        self.generation = generation
        self.tokens = 0  # read so far; the engine may be ahead
        self.finish: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    @property
    def is_behind(self) -> bool:
        return self.tokens < len(self.generation.tokens)

    def read(self) -> str:
        """The text of the next few tokens. Raises Refusal where the engine gave up."""
        finish = self.generation.finish  # before the tokens: once it is set, no more come
        end = len(self.generation.tokens)
        text = ""
        # Token by token, so that what a stop string cuts off does not depend on how far ahead the engine is.
        for token in self.generation.tokens[self.tokens : min(end, self.tokens + _TOKENS_AT_ONCE)]:
            self.tokens += 1
            text += self._stops.add(self._detokenizer.add(token))
            if self._stops.is_found:
                return text + self._stopped()
        if finish is None or self.tokens < end:
            return text
        if finish is Finish.ABORT:
            raise Refusal(503, "unavailable", "the engine is ending, and ended this request with it: send it again")
        if finish is Finish.ERROR:
            raise Refusal(500, "internal_error", f"the engine could not do this request: {self.generation.error}")
        text += self._stops.add(self._detokenizer.end())
        if self._stops.is_found:
            return text + self._stopped()
        self.finish = "length" if finish is Finish.LENGTH else "stop"
        return text + self._stops.end()

    def _stopped(self) -> str:
        self.finish = "stop"
        self.generation.abort()
        return ""


class Answering:
    """Submits a task's prompts when it is made. `close` it, however it ends."""

    def __init__(self, task: Task, engine: Engine, translator: Translator, meter: Meter) -> None:
        """Raises what the engine does, and then nothing was submitted. On the event loop."""
        self.task = task
        self._engine = engine
        self._meter = meter
        self._has_news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._readers: list[Reader] = []
        try:
            for index, (prompt, sampling) in enumerate(zip(task.prompts, task.samplings, strict=True)):
                bell = _Bell(self._loop, self._has_news, meter)
                generation = engine.submit(prompt, sampling, scope=task.scope, on_change=bell.ring)
                reader = Reader(index, generation, translator.detokenizer(prompt), task.stops)
                self._readers.append(reader)
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[tuple[Reader, str]]:
        """Text as it comes, with whose it is; the last piece of each has its `finish` set. Raises Refusal."""
        while True:
            self._has_news.clear()
            is_alive = self._engine.is_alive  # asked first: what it still did before it died is not lost
            for reader in self._readers:
                if reader.finish is None and ((text := self._read(reader)) or reader.finish):
                    yield reader, text
            reading = [reader for reader in self._readers if reader.finish is None]
            if not reading:
                return
            if any(reader.is_behind for reader in reading):
                await asyncio.sleep(0)
            elif is_alive:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._has_news.wait()
            else:
                raise Refusal(503, "unavailable", "the engine has stopped working: restart it; its log says why")

    def _read(self, reader: Reader) -> str:
        text = reader.read()
        if reader.finish is not None:
            self._meter.finished[reader.finish] += 1
        return text

    def usage(self) -> Usage:
        prompt = sum(len(reader.generation.prompt) for reader in self._readers)
        answer = sum(reader.tokens for reader in self._readers)
        reused = sum(reader.generation.reused.tokens for reader in self._readers)
        return Usage(prompt, answer, prompt + answer, PromptTokensDetails(reused))

    def kvtide(self) -> Kvtide:
        by_tier: Counter[str] = Counter()
        for reader in self._readers:
            by_tier.update(reader.generation.reused.by_tier)
        waits_s = [reader.generation.ttft_s for reader in self._readers]
        token_ids = [reader.generation.tokens[: reader.tokens] for reader in self._readers]
        return Kvtide(
            min((each for each in waits_s if each is not None), default=None),
            by_tier,
            token_ids if self.task.has_token_ids else UNSET,
        )

    def abort(self) -> None:
        """End the engine's work on it. From any thread; whoever reads is told."""
        for reader in self._readers:
            reader.generation.abort()

    def close(self) -> None:
        """Nobody reads any more. Twice is once."""
        for reader in self._readers:
            if reader.finish is None:
                failed = reader.generation.finish is Finish.ERROR
                self._meter.finished["error" if failed else "abort"] += 1
                reader.generation.abort()
        self._readers = []


class _Bell:
    """Of one generation."""

    def __init__(self, loop: asyncio.AbstractEventLoop, has_news: asyncio.Event, meter: Meter) -> None:
        self._loop = loop
        self._has_news = has_news
        self._meter = meter
        self._tokens = 0
        self._rung_at_s = 0.0

    def ring(self, generation: Generation) -> None:
        """On the engine's thread."""
        if len(generation.tokens) > self._tokens:
            now_s = time.monotonic()
            if not self._tokens and generation.ttft_s is not None:
                self._meter.first_token.add(generation.ttft_s)
            elif self._tokens:
                self._meter.token_gap.add(now_s - self._rung_at_s)
            self._tokens, self._rung_at_s = len(generation.tokens), now_s
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._has_news.set)
