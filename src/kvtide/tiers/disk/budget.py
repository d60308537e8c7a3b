# SPDX-License-Identifier: Apache-2.0
"""How many bytes a day may be written: SSDs wear. Days are UTC; the count outlives the process."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtide.tiers.disk.index import IndexFile


def utc_day() -> int:
    return int(time.time() // 86_400)


class DailyBudget:
    """Counts what is written, and says no when the day's share is spent. No lock: its tier has one."""

    def __init__(self, bytes_max: int | None, index: IndexFile, today: Callable[[], int]) -> None:
        self._bytes_max = bytes_max  # None: count, and never say no
        self._index = index
        self._today = today
        self._day, self._spent_bytes = index.read_day()

    def allows(self, size_bytes: int) -> bool:
        if (today := self._today()) != self._day:
            self._day, self._spent_bytes = today, 0
        return self._bytes_max is None or self._spent_bytes + size_bytes <= self._bytes_max

    def spend(self, size_bytes: int) -> None:
        self._spent_bytes += size_bytes

    def refund(self, size_bytes: int) -> None:
        """It was not written after all."""
        self._spent_bytes = max(0, self._spent_bytes - size_bytes)  # it may have been spent before midnight

    def write_down(self) -> None:
        self._index.write_day(self._day, self._spent_bytes)
