# SPDX-License-Identifier: Apache-2.0
"""`kvtide bench engine`: a real model on a real service, against the same model without."""

from kvtide.bench.bars import Bar
from kvtide.bench.case import Benchmark
from kvtide.bench.engine import first_token

BENCHMARK = Benchmark(
    name="engine",
    cases=first_token.CASES,
    bars=(
        Bar("warm-dram", "ratio", "<=", 1.3),
        Bar("warm-disk", "ratio", "<=", 2.0),
        # A short prompt takes seconds, in which a noisy machine moves by more than two parts of a hundred.
        Bar("cold", "ratio", "<=", 1.02, quick_limit=1.15),
        # A short prompt leaves less to save.
        Bar("warm-against-cold", "ratio", "<=", 1 / 20, quick_limit=1 / 4),
    ),
    quick_budget_s=120.0,
)
