# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one preallocated data file, one index file, one owner."""

from kvtide.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
