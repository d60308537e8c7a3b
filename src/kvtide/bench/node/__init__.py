# SPDX-License-Identifier: Apache-2.0
"""`kvtide bench node`: a real service and its clients, against the same work without a service between."""

from kvtide.bench.bars import Bar
from kvtide.bench.case import Benchmark
from kvtide.bench.node import copies, rpc

BENCHMARK = Benchmark(
    name="node",
    cases=(*rpc.CASES, *copies.CASES),
    bars=(
        Bar("rpc-one", "difference", "<=", 0.5),
        Bar("rpc-eight-p50", "difference", "<=", 1.0),
        Bar("rpc-eight-p99", "value", "<=", 5.0),
        Bar("rpc-beside-disk", "ratio", "<=", 2.0),
        Bar("rpc-open-loop", "ratio", "<=", 3.0),
        Bar("client-read-1", "ratio", ">=", 0.90),
        Bar("client-read-4", "ratio", ">=", 0.90),
        Bar("client-write-1", "ratio", ">=", 0.90),
        Bar("client-write-4", "ratio", ">=", 0.90),
        Bar("client-read-single", "ratio", ">=", 0.75),
        Bar("client-write-single", "ratio", ">=", 0.75),
    ),
    quick_budget_s=150.0,
)
