# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier: what every tier promises, and what holding memory for others adds to it."""

from __future__ import annotations

from pathlib import Path

from kvtide.keys import Address
from kvtide.testing.tier_suite import TierSuite
from kvtide.tiers.dram import DramTier


class TestDramTier(TierSuite):
    def make_tier(self, folder: Path, bytes_max: int) -> DramTier:
        return DramTier(bytes_max)

    def raw_get(self, tier: DramTier, address: Address) -> bytes | None:
        row = tier.table.row(address)
        return None if row < 0 else tier.memory(row).tobytes()
