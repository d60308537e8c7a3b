# SPDX-License-Identifier: Apache-2.0
"""One cache over an ordered list of tiers. `open_store` builds it from settings: the composition root."""

from __future__ import annotations

from pathlib import Path

from kvtide.config import Settings
from kvtide.config.defaults import resolve_tiers
from kvtide.store.store import Lower, Store, StoreStats
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Ticket
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.dram import DramTier

__all__ = ["Fetched", "Leased", "Lower", "Match", "Plan", "Reservation", "Store", "StoreStats", "Ticket", "open_store"]


def open_store(settings: Settings | None = None) -> Store:
    """Build and open a store, or raise ConfigError that names the setting and the mend."""
    settings = resolve_tiers(settings or Settings())
    settings.check()
    assert settings.dram.bytes_max is not None, "resolved"
    dram = DramTier(settings.dram.bytes_max, huge_pages=settings.dram.huge_pages)
    lower = []
    if (disk := settings.disk) is not None:
        assert disk.folder is not None and disk.bytes_max is not None, "resolved"
        tier = DiskTier(
            Path(disk.folder),
            disk.bytes_max,
            io_threads=disk.io_threads,
            bytes_written_daily_max=disk.bytes_written_daily_max,
        )
        lower.append(Lower(tier, disk.spill_when, disk.spill_queue_bytes_max))
    return Store(dram, lower, leases=settings.leases)
