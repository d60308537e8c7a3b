# SPDX-License-Identifier: Apache-2.0
"""`kvtide bench node`: a real service and its clients, against the same work without a service between."""

from kvtide.bench.bars import Bar
from kvtide.bench.case import Benchmark
from kvtide.bench.node import copies, kill, load, rpc, timing

BENCHMARK = Benchmark(
    name="node",
    cases=(*rpc.CASES, *copies.CASES, *timing.CASES, *kill.CASES, *load.CASES),
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
        # Five hundred probes have a standard error of 0.026: they find a hole, not a crack.
        Bar("timing-attack", "value", "<=", 0.02, quick_limit=0.1),
        Bar("timing-control", "value", ">=", 0.99),
        Bar("timing-flood-attack", "value", "<=", 0.02, quick_limit=0.1),
        Bar("kill-worst-lateness", "value", "<=", 50.0),
        Bar("kill-hits-again", "value", "<=", 2.0),
        Bar("kill-wrong-bytes", "value", "==", 0),
        Bar("load-wrong-bytes", "value", "==", 0),
        Bar("load-compared", "value", ">=", 10_000, quick_limit=100),
        Bar("load-lost-clients", "value", "==", 0),
        Bar("load-leaked-leases", "value", "==", 0),
        Bar("load-leaked-files", "value", "==", 0),
        Bar("load-blocks", "value", ">=", 200_000, quick_limit=20_000),
        Bar("load-memory", "value", "<=", 300),
        # In twenty seconds a service is still warming up.
        Bar("load-memory-growth", "value", "<=", 5.0, quick_limit=25.0),
    ),
    quick_budget_s=150.0,
)
