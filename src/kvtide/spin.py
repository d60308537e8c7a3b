# SPDX-License-Identifier: Apache-2.0
"""Looking again and again for a moment, instead of going to sleep, where that pays.

Waking a process takes longer than many answers do. Whoever waits for something that came quickly the last time
looks for it a few times first; when it does not come soon, he sleeps as he should, and sleeps at once the next
time. So an idle process costs nothing, and a crowded machine is not crowded further.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SPIN_S = 0.0001  # about what two switches between processes cost


class Spin:
    """Of one who waits. No locks: its owner is the only one."""

    def __init__(self) -> None:
        self._pays = False

    def wait(self, poll: Callable[[float], T], timeout_s: float) -> T:
        """What `poll(timeout_s)` gives, sooner. `poll(0)` does not block; what it gives is false when nothing came."""
        began_s = time.perf_counter()
        if self._pays and timeout_s > 0:
            while time.perf_counter() - began_s < _SPIN_S:
                if found := poll(0.0):
                    return found
                os.sched_yield()
        found = poll(timeout_s)
        self._pays = bool(found) and time.perf_counter() - began_s < 2 * _SPIN_S
        return found
