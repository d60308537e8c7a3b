# SPDX-License-Identifier: Apache-2.0
"""Generate with a transformers model, through the cache: find, copy in, compute the rest, save beside it.

One thread runs the model. Requests take turns: each turn is one pass, a piece of a prompt or one token of an
answer, so a long prompt does not silence the others. Sequences are not batched: an answer does not depend on what
else runs at the time, and that is what an engine to test a cache with must promise first.

The cache is asked in steps that return at once; while one request waits for its blocks, the others compute.
Whatever the cache does not give, slow or gone, is computed.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtide.cache import Cache
from kvtide.deadline import Deadline
from kvtide.engines.transformers.buffer import Buffers, KvBuffer
from kvtide.engines.transformers.generation import Finish, Generation, Sampling
from kvtide.engines.transformers.lookup import Lookup
from kvtide.engines.transformers.sampler import Sampler
from kvtide.engines.transformers.saver import Blocks, Saver
from kvtide.engines.transformers.shape import KvShape, context_tokens
from kvtide.errors import Busy, Closed, ConfigError, Rejected, TooLarge
from kvtide.keys import NO_PARENT, Key, chain
from kvtide.observe.fault_log import FaultLog

log = logging.getLogger(__name__)
faults = FaultLog(log)

_DRAIN_S = 5.0  # for blocks that wait to be saved, at the end
_LOOK_S = 0.005  # when everybody waits for blocks: somebody new may come
_FETCH_S_MIN, _FETCH_S_UNKNOWN, _FETCH_S_MAX = 0.25, 2.0, 10.0
_LOOK_S = 0.005  # how long a new request may wait while all others wait for the cache
_PREPARED_TOKENS_MAX = 8192  # a sequence of so many has its memory ready from the start
_SPEED_TOKENS_MIN = 64  # a shorter pass says little of how long many tokens take


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Bounds of an engine, with defaults for a model of any size."""

    chunk_tokens: int = 512  # of a prompt in one pass
    running_max: int = 8  # requests that have memory and take turns
    waiting_max: int = 256  # requests before those; more are turned away
    context_tokens: int | None = None  # None: what the model was made for
    block_tokens: int | None = None  # None: by the size of the model's KV
    buffer_bytes_max: int = 1 << 30  # of KV memory that is kept for the next requests
    save_blocks_max: int = 4096  # that wait to be saved; more are dropped

    def check(self) -> None:
        for name in ("chunk_tokens", "running_max", "waiting_max", "save_blocks_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine: {name} is {getattr(self, name)}: give 1 or more", field=name)
        if self.context_tokens is not None and self.context_tokens < 2:
            why = "give 2 or more, for a prompt and its answer"
            raise ConfigError(f"engine: context_tokens is {self.context_tokens}: {why}", field="context_tokens")
        if self.buffer_bytes_max < 0:
            raise ConfigError(
                f"engine: buffer_bytes_max is {self.buffer_bytes_max}: give 0 or more", field="buffer_bytes_max"
            )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Now, and since the engine started."""

    waiting: int
    running: int
    requests_by_finish: Mapping[str, int]
    prompt_tokens: int
    computed_tokens: int  # of prompts
    reused_tokens_by_tier: Mapping[str, int]
    generated_tokens: int
    saved_blocks: int
    dropped_blocks: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that takes turns."""

    generation: Generation
    buffer: KvBuffer
    lookup: Lookup
    sampler: Sampler
    tokens_max: int  # of the answer
    tokens: list[int]  # the prompt and the answer so far
    keys: list[Key] = field(default_factory=list)  # of the whole blocks of `tokens`, as far as they were needed
    saved: int = 0  # blocks that are in the cache or on their way
    is_loaded: bool = False
    prefill_s: float = 0.0


class Engine:
    """`submit`, `stats` and `close` may be called from any thread. The cache stays its owner's to close."""

    def __init__(
        self,
        model: Any,
        *,
        identity: str,
        cache: Cache | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        """`identity` names the weights (`kvtide.model_identity`): blocks of other weights are never used.

        Raises ConfigError for a model whose KV cannot be cut into blocks.
        """
        self._settings = settings or EngineSettings()
        self._settings.check()
        self._cache = cache
        self.shape = KvShape.of(model)  # first: it refuses what is no model
        self._model = model.eval()
        self.layout = self.shape.layout(self._settings.block_tokens)
        self.namespace = self.shape.namespace(identity, model.config, self.layout)
        self._digest = self.namespace.digest()
        self.context_tokens = min(context_tokens(model), self._settings.context_tokens or (1 << 62))
        self._end_tokens = _end_tokens(model)
        # Of a prompt only the last position's logits matter; most models can leave the others out.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._pass_options = {"logits_to_keep": 1} if keeps else {}
        self._buffers = Buffers(self.shape, self.layout, model.config, self._settings.buffer_bytes_max)
        self._buffers.prepare(min(self.context_tokens, _PREPARED_TOKENS_MAX))
        self._saver: Saver | None = None
        if cache is not None:
            blocks_max, sequences_max = self._settings.save_blocks_max, 2 * self._settings.running_max
            self._saver = Saver(cache, self.layout, self._buffers, blocks_max, sequences_max)
        self._token_s = 0.0  # to compute one token of a prompt; 0: not known yet
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._running: list[_Sequence] = []
        self._leaving: list[Lookup] = []  # of requests that ended before their blocks came
        self._is_closed = False
        self._finished: Counter[str] = Counter()
        self._reused: Counter[str] = Counter()
        self._prompt_tokens = self._computed_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._run, name="kvtide-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closed

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        scope: str = "",
        on_change: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Ask for an answer. `on_change` is called on the engine's thread after each token and at the end.

        `scope`: whose blocks these are (a `cache_salt`); requests of different scopes share nothing.
        Raises TooLarge for a prompt that leaves no room for an answer, Busy when too many wait, Rejected, Closed.
        """
        sampling = sampling or Sampling()
        sampling.check()
        if not prompt:
            raise Rejected("the prompt is empty: give at least one token")
        if len(prompt) >= self.context_tokens:
            raise TooLarge(
                f"the prompt has {len(prompt):,} tokens, and the context of {self.context_tokens:,} must hold it"
                " and an answer: shorten it",
                prompt_tokens=len(prompt),
                context_tokens=self.context_tokens,
            )
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise Rejected(f"a token of the prompt is out of the model's vocabulary of {vocabulary:,}")
        generation = Generation(prompt, sampling, scope, on_change)
        with self._changed:
            if self._is_closed:
                raise Closed("the engine is closed")
            if len(self._waiting) >= self._settings.waiting_max:
                raise Busy(f"{len(self._waiting)} requests wait already: try again later")
            self._waiting.append(generation)
            self._changed.notify_all()
        return generation

    def generate(self, prompt: Sequence[int], sampling: Sampling | None = None, *, scope: str = "") -> Generation:
        """`submit`, and wait for the end."""
        generation = self.submit(prompt, sampling, scope=scope)
        generation.wait()
        return generation

    def wait_saved(self, timeout_s: float = _DRAIN_S) -> bool:
        """Block until every block computed so far is in the cache, or was dropped."""
        return self._saver is None or self._saver.flush(timeout_s)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            requests_by_finish={finish.value: self._finished[finish.value] for finish in Finish},
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            reused_tokens_by_tier=dict(self._reused),
            generated_tokens=self._generated_tokens,
            saved_blocks=self._saver.saved if self._saver else 0,
            dropped_blocks=self._saver.dropped if self._saver else 0,
        )

    def close(self) -> None:
        """End every request, save what was computed, let go of the model. Blocks, for a bounded time. Twice is once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._saver is not None:
            self._saver.close(_DRAIN_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        finish, why = Finish.ABORT, "the engine was closed"
        try:
            with torch.inference_mode():
                while self._admit():
                    self._round()
        except BaseException as error:  # no request is to blame, and all of them wait for this thread
            log.exception("engine.failed")
            finish, why = Finish.ERROR, f"the engine failed: {type(error).__name__}: {error}"
        with self._changed:
            self._is_closed = True
        for sequence in list(self._running):
            self._end(sequence, finish, why)
        while self._waiting:
            self._ended(self._waiting.popleft(), finish, why)
        deadline = Deadline.after(_DRAIN_S)
        for lookup in self._leaving:
            while not _let_go(lookup) and not deadline.has_passed:
                lookup.wait(0.1)

    def _round(self) -> None:
        """A turn for everybody."""
        has_progressed = False
        for sequence in list(self._running):
            has_progressed |= self._turn(sequence)
            self._look()
        self._leaving = [lookup for lookup in self._leaving if not _let_go(lookup)]
        looking = [*(sequence.lookup for sequence in self._running), *self._leaving]
        if not has_progressed and looking:
            looking[0].wait(_LOOK_S)

    def _look(self) -> None:
        """After each pass: a lookup takes several steps, and a round of long passes takes seconds."""
        for sequence in self._running:
            if not sequence.is_loaded:
                sequence.lookup.poll()

    def _admit(self) -> bool:
        """Let requests in, wait while there are none. False when the engine is closed."""
        with self._changed:
            while not self._is_closed and not self._running and not self._waiting and not self._leaving:
                self._changed.wait()
            if self._is_closed:
                return False
            leaving = [generation for generation in self._waiting if generation.is_aborted]
            for generation in leaving:
                self._waiting.remove(generation)
            room = self._settings.running_max - len(self._running)
            entering = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        for generation in leaving:
            self._ended(generation, Finish.ABORT)
        for generation in entering:
            try:
                self._running.append(self._begin(generation))
            except Exception as error:  # there is no memory for it, say
                log.exception("engine.request_failed")
                self._ended(generation, Finish.ERROR, f"{type(error).__name__}: {error}")
        return True

    def _begin(self, generation: Generation) -> _Sequence:
        prompt = list(generation.prompt)
        tokens_max = min(generation.sampling.max_tokens, self.context_tokens - len(prompt))
        sampler = Sampler(generation.sampling, self.shape.device)
        buffer = self._buffers.take(len(prompt) + tokens_max)
        # Last: whatever failed before it leaves nothing under way.
        lookup = Lookup(self._cache, self._digest, generation.scope, prompt, self.layout, self._recompute_s)
        self._prompt_tokens += len(prompt)
        return _Sequence(generation, buffer, lookup, sampler, tokens_max, prompt)

    def _recompute_s(self, tokens: int) -> float:
        if not self._token_s:
            return _FETCH_S_UNKNOWN
        return min(max(tokens * self._token_s, _FETCH_S_MIN), _FETCH_S_MAX)

    def _turn(self, sequence: _Sequence) -> bool:
        """One step of a request. False: it waits for its blocks."""
        if sequence.generation.is_aborted:
            self._end(sequence, Finish.ABORT)
            return True
        try:
            if not sequence.is_loaded:
                if not sequence.lookup.poll():
                    return False
                self._load(sequence)
            else:
                self._compute(sequence)
        except Exception as error:  # one request's end, not the engine's
            log.exception("engine.request_failed")
            self._end(sequence, Finish.ERROR, f"{type(error).__name__}: {error}")
        return True

    def _load(self, sequence: _Sequence) -> None:
        """Copy what the cache gave."""
        lookup, generation = sequence.lookup, sequence.generation
        for number, payload in enumerate(lookup.payloads):
            sequence.buffer.fill(number, payload)
        generation.reused = lookup.reuse()
        sequence.buffer.length = generation.reused.tokens
        sequence.saved = lookup.blocks
        sequence.keys = lookup.keys
        lookup.release()
        self._reused.update(generation.reused.by_tier)
        sequence.is_loaded = True

    def _compute(self, sequence: _Sequence) -> None:
        """One pass: a piece of the prompt, or the last token of the answer."""
        generation, start = sequence.generation, sequence.buffer.length
        prompt_tokens = len(generation.prompt)
        end = min(start + self._settings.chunk_tokens, len(sequence.tokens))
        began_s = time.monotonic()
        ids = torch.tensor([sequence.tokens[start:end]], device=self.shape.device)
        output = self._model(ids, past_key_values=sequence.buffer.cache, use_cache=True, **self._pass_options)
        assert sequence.buffer.length == end, "the model did not put its KV into the cache that it was given"
        generation.passes.append((start, end))
        if self.shape.device.type == "cuda":
            torch.cuda.synchronize()  # or the time below would be that of the launches
        if start < prompt_tokens:
            self._computed(sequence, end - start, time.monotonic() - began_s, is_last=end == prompt_tokens)
        self._save(sequence)  # first: who hears of the end may ask whether all is saved
        if end == len(sequence.tokens):
            self._answer(sequence, sequence.sampler.choose(output.logits[0, -1]))
        if generation.finish is not None:
            self._leave(sequence)

    def _computed(self, sequence: _Sequence, tokens: int, seconds: float, *, is_last: bool) -> None:
        self._computed_tokens += tokens
        sequence.prefill_s += seconds
        if tokens >= _SPEED_TOKENS_MIN:
            measured_s = seconds / tokens
            self._token_s = measured_s if not self._token_s else 0.8 * self._token_s + 0.2 * measured_s
        if is_last and self._cache is not None:
            computed = len(sequence.generation.prompt) - sequence.generation.reused.tokens
            try:
                self._cache.report_prefill(self._digest, computed, sequence.prefill_s)
            except Closed:
                log.debug("engine.report_after_close")
            except Exception as error:  # never the request's fault
                faults.warn("engine.report_failed", kind=type(error).__name__, error=error)

    def _answer(self, sequence: _Sequence, token: int) -> None:
        generation = sequence.generation
        sampling = generation.sampling
        if token in sampling.stop_tokens or (token in self._end_tokens and not sampling.ignores_end):
            self._ended(generation, Finish.STOP)
            return
        self._generated_tokens += 1
        sequence.tokens.append(token)
        generation.add(token)
        if len(generation.tokens) >= sequence.tokens_max:
            self._ended(generation, Finish.LENGTH)

    def _save(self, sequence: _Sequence) -> None:
        """Hand over the blocks that have become whole."""
        lookup, size = sequence.lookup, self.layout.block_tokens
        whole = sequence.buffer.length // size
        if self._saver is None or lookup.shelf is None or lookup.root is None or whole == sequence.saved:
            return
        if (known := len(sequence.keys)) < whole:
            parent = sequence.keys[-1] if known else lookup.root
            fresh = sequence.tokens[known * size : whole * size]
            sequence.keys += chain(parent, fresh, size, position=known * size)
        first = sequence.saved
        parent = sequence.keys[first - 1] if first else NO_PARENT
        self._saver.submit(Blocks(sequence.buffer, lookup.shelf, sequence.keys[first:whole], first, parent))
        sequence.saved = whole

    def _end(self, sequence: _Sequence, finish: Finish, error: str = "") -> None:
        if sequence.generation.finish is None:
            self._ended(sequence.generation, finish, error)
        self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        if not _let_go(sequence.lookup):
            self._leaving.append(sequence.lookup)
        self._buffers.release(sequence.buffer)

    def _ended(self, generation: Generation, finish: Finish, error: str = "") -> None:
        self._finished[finish.value] += 1
        generation.end(finish, error)


def _let_go(lookup: Lookup) -> bool:
    """Give back what a lookup leased. False: it is still under way."""
    if not lookup.poll():
        return False
    lookup.release()
    return True


def _end_tokens(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        known = getattr(config, "eos_token_id", None)
        if known is not None:
            return frozenset([known] if isinstance(known, int) else known)
    return frozenset()
