# SPDX-License-Identifier: Apache-2.0
"""A moment after which nobody waits for the answer any more. Made once per call and passed down, so that
hops share one budget instead of each having a fresh timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on a monotonic clock, in seconds."""

    at_s: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.clock())

    @property
    def has_passed(self) -> bool:
        return self.clock() >= self.at_s


NEVER = Deadline(math.inf)
