# SPDX-License-Identifier: Apache-2.0
"""What the service did, in numbers that cost next to nothing to keep: one addition for each request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# From a tenth of a millisecond, where a request in DRAM should be, to where an operator should look.
BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, the last one for everything above, and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class Meter:
    """Written by the service's loop; read by others, who may see a request a moment later."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by op and result: "ok" or the kind of the error
        self.seconds: dict[str, Histogram] = {}  # by op
        self.cut_off: Counter[str] = Counter()  # sessions, by reason
        self.sessions_total = 0

    def answered(self, op: str, result: str, seconds: float) -> None:
        self.requests[op, result] += 1
        histogram = self.seconds.get(op)
        if histogram is None:
            histogram = self.seconds[op] = Histogram()
        histogram.add(seconds)
