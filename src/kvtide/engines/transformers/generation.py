# SPDX-License-Identifier: Apache-2.0
"""One request: what was asked, what became of it so far, and how to follow or end it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtide.errors import Rejected

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and when the answer ends."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()  # one of them ends the answer and is no part of it
    ignores_end: bool = False  # the model's own end token does not end the answer: for benchmarks

    def check(self) -> None:
        """Raise Rejected for what cannot be meant."""
        if self.max_tokens < 1:
            raise Rejected(f"max_tokens is {self.max_tokens}: ask for 1 or more")
        if not 0 <= self.temperature <= 100:
            raise Rejected(f"temperature is {self.temperature}: give 0 to 100")
        if not 0 < self.top_p <= 1:
            raise Rejected(f"top_p is {self.top_p}: give more than 0 and at most 1")
        if self.top_k < 0:
            raise Rejected(f"top_k is {self.top_k}: give 0 (all tokens) or more")


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of the prompt that were not computed, and the tiers that had them."""

    tokens: int = 0
    by_tier: Mapping[str, int] = field(default_factory=dict)


class Generation:
    """Written by the engine's thread, readable from any."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        scope: str,
        on_change: Callable[[Generation], None] | None,
    ) -> None:
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.scope = scope
        self.tokens: list[int] = []
        self.reused = Reuse()
        self.passes: list[tuple[int, int]] = []  # first token and end of each pass through the model
        self.finish: Finish | None = None
        self.error = ""
        self.submitted_at_s = time.monotonic()
        self.first_token_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.is_aborted = False
        self._on_change = on_change
        self._ended = threading.Event()
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request to its first token."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self.submitted_at_s

    def abort(self) -> None:
        """Ask for the end. It comes with the engine's next step."""
        self.is_aborted = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended."""
        return self._ended.wait(timeout_s)

    def __iter__(self) -> Iterator[int]:
        """Each token, as it comes. For one reader."""
        while (token := self._news.get()) is not None:
            yield token

    # The engine's side ---------------------------------------------------------------------------------------

    def add(self, token: int) -> None:
        if self.first_token_at_s is None:
            self.first_token_at_s = time.monotonic()
        self.tokens.append(token)
        self._news.put(token)
        self._tell()

    def end(self, finish: Finish, error: str = "") -> None:
        assert self.finish is None
        self.ended_at_s = time.monotonic()
        self.error = error or self.error
        self.finish = finish
        self._ended.set()
        self._news.put(None)
        self._tell()

    def _tell(self) -> None:
        """A listener that fails is not asked again, and its request is aborted: nobody hears the rest."""
        listener, self._on_change = self._on_change, None
        if listener is None:
            return
        try:
            listener(self)
        except Exception as error:
            log.exception("engine.listener_failed")
            self.is_aborted = True
            self.error = self.error or f"the listener failed: {type(error).__name__}: {error}"
        else:
            self._on_change = listener
