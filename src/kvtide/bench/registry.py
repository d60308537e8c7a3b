# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name. They are imported when they run, not when their names are listed."""

from __future__ import annotations

from importlib import import_module

from kvtide.bench.case import Benchmark

BENCHMARKS: dict[str, str] = {
    "store": "kvtide.bench.store:BENCHMARK",
    "node": "kvtide.bench.node:BENCHMARK",
    "engine": "kvtide.bench.engine:BENCHMARK",
}


def load_benchmark(name: str) -> Benchmark:
    """Import a benchmark; MissingExtra where it needs a package that is not installed."""
    module, _, attribute = BENCHMARKS[name].partition(":")
    benchmark = getattr(import_module(module), attribute)
    assert isinstance(benchmark, Benchmark), f"{BENCHMARKS[name]} is no Benchmark"
    return benchmark
