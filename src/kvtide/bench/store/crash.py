# SPDX-License-Identifier: Apache-2.0
"""Two hundred kills of a process that writes to the disk tier, and what the next one finds."""

from __future__ import annotations

from kvtide.bench.case import Case

CASES: tuple[Case, ...] = ()
