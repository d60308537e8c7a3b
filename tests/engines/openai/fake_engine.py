# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, for what a real one does too slowly or never: it answers as its test tells it to.

The tokenizer is a real one, of one token for each byte: characters and stop strings span tokens.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtide.engines.openai import App, Gate, Served, Translator, serving, taken_port
from kvtide.engines.transformers.generation import Finish, Generation, Reuse, Sampling
from kvtide.errors import Busy, Closed

Script = Callable[[Sequence[int]], Iterator[int]]

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'refuse' %}{{ raise_exception('not that') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = _TEMPLATE
    return fast


TOKENIZER = byte_tokenizer()


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return tokens


def echo(prompt: Sequence[int]) -> Iterator[int]:
    """The prompt is the answer."""
    yield from prompt


def forever(_prompt: Sequence[int]) -> Iterator[int]:
    token = tokens_of("x")[0]
    while True:
        yield token


def fails(after: int) -> Script:
    def script(prompt: Sequence[int]) -> Iterator[int]:
        yield from prompt[:after]
        raise ValueError("the model caught fire")

    return script


class FakeEngine:
    """One thread and one token of each request in turn, as the real one. `steps`: how many turns it may take."""

    def __init__(self, script: Script = echo, *, context_tokens: int = 4096, waiting_max: int = 64) -> None:
        self.script = script
        self.context_tokens = context_tokens
        self.waiting_max = waiting_max
        self.asked: list[Generation] = []
        self.steps: threading.Semaphore | None = None
        self._changed = threading.Condition()
        self._running: deque[tuple[Generation, Iterator[int]]] = deque()
        self._finished: Counter[str] = Counter()
        self._is_closed = self._is_dead = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        scope: str = "",
        on_change: Callable[[Generation], None] | None = None,
    ) -> Generation:
        generation = Generation(prompt, sampling, scope, on_change)
        with self._changed:
            if self._is_closed:
                raise Closed("the engine is closed")
            if len(self._running) >= self.waiting_max:
                raise Busy("too many requests wait already: try again later")
            self.asked.append(generation)
            self._running.append((generation, self.script(prompt)))
            self._changed.notify_all()
        return generation

    @property
    def running(self) -> int:
        return len(self._running)

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._running, timeout_s), f"{self.running} requests go on"

    def die(self) -> None:
        """As a thread does that raised: nobody is told."""
        with self._changed:
            self._is_dead = True
            self._changed.notify_all()
        self._thread.join()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            waiting=0,
            running=self.running,
            requests_by_finish=dict(self._finished),
            prompt_tokens=sum(len(each.prompt) for each in self.asked),
            computed_tokens=0,
            reused_tokens_by_tier={"dram": 3, "attic": 5},
            generated_tokens=sum(len(each.tokens) for each in self.asked),
            saved_blocks=0,
            dropped_blocks=0,
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._is_closed or self._is_dead)
                if self._is_dead:
                    return
                if self._is_closed:
                    break
                generation, tokens = self._running[0]
            if self.steps is not None and not generation.is_aborted and not self.steps.acquire(timeout=0.01):
                continue
            is_over = self._turn(generation, tokens)
            with self._changed:
                self._running.rotate(-1)
                if is_over:
                    self._running.remove((generation, tokens))
                    self._changed.notify_all()
        for generation, _ in self._running:
            generation.end(Finish.ABORT, "the engine was closed")
        self._running.clear()

    def _turn(self, generation: Generation, tokens: Iterator[int]) -> bool:
        if generation.is_aborted:
            generation.end(Finish.ABORT)
            return True
        try:
            token = next(tokens, None)
        except ValueError as error:
            generation.end(Finish.ERROR, str(error))
            return True
        if token is None or token in generation.sampling.stop_tokens:
            generation.end(Finish.STOP)
            return True
        generation.reused = Reuse(2, {"dram": 2})
        generation.add(token)
        if len(generation.tokens) >= generation.sampling.max_tokens:
            generation.end(Finish.LENGTH)
            return True
        return False


class FakeServer:
    """A fake engine behind the real server, and a client of it."""

    def __init__(self, engine: FakeEngine, app: App, url: str) -> None:
        self.engine = engine
        self.app = app
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30)

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1000, **fields})


@contextmanager
def fake_server(
    script: Script = echo, *, key: str | None = None, tokenizer: Any = TOKENIZER, **settings: int
) -> Iterator[FakeServer]:
    engine = FakeEngine(script, **settings)
    served = Served(name="fake", engine=engine, translator=Translator(tokenizer), dtype="none", created_s=1)  # type: ignore[arg-type]
    app = App(served, Gate("127.0.0.1", key))
    try:
        with taken_port("127.0.0.1", 0) as listener, serving(app, listener) as server:
            running = FakeServer(engine, app, server.url)
            with running.http:
                yield running
    finally:
        engine.close()
