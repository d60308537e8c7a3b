# SPDX-License-Identifier: Apache-2.0
"""`kvtide bench store`: the core against the hardware under it, and the bars it has to meet."""

from kvtide.bench.bars import Bar
from kvtide.bench.case import Benchmark
from kvtide.bench.store import crash, disk, dram, keys, reopen

BENCHMARK = Benchmark(
    name="store",
    cases=(*keys.CASES, *dram.CASES, *disk.CASES, *reopen.CASES, *crash.CASES),
    bars=(
        Bar("match-128k-array", "ratio", "<=", 1.3),
        Bar("match-128k-list", "ratio", "<=", 3.0),
        Bar("match-4096-keys", "ratio", "<=", 3.0),
        Bar("dram-write-4mib", "ratio", ">=", 0.95),
        Bar("dram-read-4mib", "ratio", ">=", 0.95),
        Bar("disk-write-4mib", "ratio", ">=", 0.90),
        Bar("disk-read-4mib", "ratio", ">=", 0.95),
        Bar("reopen-1m-blocks", "value", "<=", 2.0),
        Bar("memory-per-block", "value", "<=", 300),
        Bar("crash-wrong-blocks", "value", "==", 0),
        Bar("crash-failed-reopens", "value", "==", 0),
        Bar("crash-bound-exceeded", "value", "==", 0),
        Bar("crash-lost-blocks", "value", "==", 0),
        Bar("crash-blocks-back", "value", "==", 0),
    ),
)
