# SPDX-License-Identifier: Apache-2.0
"""The disk tier."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvtide.keys import Address
from kvtide.testing.tier_suite import TierSuite
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.folder import DATA, INDEX
from kvtide.tiers.disk.index import BLOCK, BLOCK_RECORD, RECORDS_AT, SHELF, SHELF_RECORD

class TestDiskTier(TierSuite):
    def make_tier(self, folder: Path, bytes_max: int) -> DiskTier:
        self.folder_ = folder
        return DiskTier(folder, bytes_max)

    def where(self, address):
        raw = (self.folder_ / INDEX).read_bytes()[RECORDS_AT:]
        its = np.frombuffer(raw, BLOCK_RECORD)
        shelves = np.frombuffer(raw, SHELF_RECORD)
        number = next(int(s["number"]) for s in shelves if s["kind"]==SHELF and s["shelf"].tobytes()==address.shelf.pack())
        for r in its[its["kind"]==BLOCK]:
            if r["key"].tobytes()==address.key and r["shelf"]==number:
                return int(r["offset"]), int(r["frame_bytes"])

    def raw_get(self, tier, address: Address) -> bytes | None:
        w = self.where(address)
        if not w: return None
        with open(self.folder_/DATA,'rb') as f:
            return os.pread(f.fileno(), w[1], w[0])

    def raw_set(self, tier, address, raw) -> None:
        w = self.where(address)
        with open(self.folder_/DATA,'r+b') as f:
            os.pwrite(f.fileno(), raw, w[0])
            os.fsync(f.fileno())
