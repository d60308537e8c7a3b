# SPDX-License-Identifier: Apache-2.0
"""What the server did, in numbers, and the series that come of them and of the engine's own."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtide import __version__
from kvtide.observe.catalogue import ENGINE_CATALOGUE, TIERS
from kvtide.observe.metrics import Distribution, Sample

if TYPE_CHECKING:
    from kvtide.engines.transformers.engine import Engine

_FIRST_TOKEN = "kvtide_engine_first_token_seconds"
_TOKEN_GAP = "kvtide_engine_token_gap_seconds"


class Histogram:
    """Of a series of the catalogue. Written by one thread; others may read it a moment later."""

    def __init__(self, series: str) -> None:
        self._series = series
        self._bounds = ENGINE_CATALOGUE[series].buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def sample(self) -> Sample:
        return Sample(self._series, Distribution(self._bounds, list(self._counts), self._sum))


class Meter:
    """Of one server. `first_token` and `token_gap` belong to the engine's thread, the rest to the event loop."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model = model
        self._dtype = dtype
        self._start_time_s = time.time()
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.first_token = Histogram(_FIRST_TOKEN)
        self.token_gap = Histogram(_TOKEN_GAP)

    def samples(self, engine: Engine) -> Iterator[Sample]:
        stats = engine.stats()
        yield Sample("kvtide_engine_info", 1, (__version__, self._model, self._dtype))
        yield Sample("kvtide_engine_start_time_seconds", self._start_time_s)
        for finish, count in dict(self.finished).items():
            yield Sample("kvtide_engine_requests_total", count, (finish,))
        for status, count in dict(self.refused).items():
            yield Sample("kvtide_engine_refused_total", count, (status,))
        yield Sample("kvtide_engine_running", stats.running)
        yield Sample("kvtide_engine_waiting", stats.waiting)
        yield Sample("kvtide_engine_prompt_tokens_total", stats.prompt_tokens)
        yield Sample("kvtide_engine_computed_tokens_total", stats.computed_tokens)
        for tier in TIERS:
            yield Sample("kvtide_engine_reused_tokens_total", stats.reused_tokens_by_tier.get(tier, 0), (tier,))
        yield Sample("kvtide_engine_generated_tokens_total", stats.generated_tokens)
        yield Sample("kvtide_engine_saved_blocks_total", stats.saved_blocks)
        yield Sample("kvtide_engine_dropped_blocks_total", stats.dropped_blocks)
        yield self.first_token.sample()
        yield self.token_gap.sample()
