# SPDX-License-Identifier: Apache-2.0
"""One cache over an ordered list of tiers. `open_store` builds it from settings: the composition root."""

from __future__ import annotations

from pathlib import Path

from kvtide.config import Settings
from kvtide.store.store import Lower, Store, StoreStats
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Ticket
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.dram import DramTier

__all__ = ["Fetched", "Leased", "Lower", "Match", "Plan", "Reservation", "Store", "StoreStats", "Ticket", "open_store"]


def open_store(settings: Settings | None = None) -> Store:
    """Build and open a store, or raise ConfigError that names the setting and the mend."""
    settings = settings or Settings()
    settings.check()
    dram = DramTier(settings.dram.bytes_max, huge_pages=settings.dram.huge_pages)
    lower = []
    if (disk := settings.disk) is not None:
        tier = DiskTier(
            Path(disk.folder).expanduser(),
            disk.bytes_max,
            io_threads=disk.io_threads,
            bytes_written_daily_max=disk.bytes_written_daily_max,
        )
        lower.append(Lower(tier, disk.spill_when, disk.spill_queue_bytes_max))
    return Store(dram, lower, leases=settings.leases)
