# SPDX-License-Identifier: Apache-2.0
"""All settings, with defaults that work. The words here are the words everywhere: files, flags, messages."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtide.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
SpillWhen = Literal["publish", "evict", "second_use"]


class DramSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The arena: shared memory that holds the blocks in use."""

    bytes_max: int = GIB
    huge_pages: bool = True  # use them where the machine has them


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A local folder. `bytes_max` bounds everything in it."""

    folder: str
    bytes_max: int = 16 * GIB
    io_threads: int = 4
    spill_when: SpillWhen = "publish"
    spill_queue_bytes_max: int | None = None  # None: a quarter of the arena
    bytes_written_daily_max: int | None = None  # None: no budget; SSDs wear


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take, in seconds, and how much one request may hold."""

    lease_s: float = 30.0  # then a lease or reservation that was not returned is quarantined
    fetch_s: float = 10.0  # then a fetch gives what has arrived
    request_share: float = 0.5  # of the arena, for one request
    pinned_share: float = 0.5  # of the arena, for all pins together
    quarantine_share: float = 0.125  # of the arena, for one holder; beyond it the holder gets nothing new


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a store is built from."""

    dram: DramSettings = DramSettings()
    disk: DiskSettings | None = None
    leases: LeaseSettings = LeaseSettings()

    def check(self) -> None:
        """Raise ConfigError for values that no machine could make work."""
        if self.disk is not None:
            if self.disk.io_threads < 1:
                raise ConfigError(f"disk.io_threads is {self.disk.io_threads}: give it 1 or more")
            queue = self.disk.spill_queue_bytes_max
            if queue is not None and not 0 < queue <= self.dram.bytes_max // 2:
                raise ConfigError(
                    f"disk.spill_queue_bytes_max is {queue}: what waits to be written stays in DRAM, "
                    f"so give it at most half of dram.bytes_max ({self.dram.bytes_max // 2})"
                )
        for name in ("lease_s", "fetch_s"):
            if getattr(self.leases, name) <= 0:
                raise ConfigError(f"leases.{name} is {getattr(self.leases, name)}: give it more than 0 seconds")
        for name in ("request_share", "pinned_share", "quarantine_share"):
            if not 0 < getattr(self.leases, name) <= 1:
                raise ConfigError(f"leases.{name} is {getattr(self.leases, name)}: give it a share between 0 and 1")
