# SPDX-License-Identifier: Apache-2.0
"""What became of one address of a batch: the same closed set on every tier, in the store and on the wire."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """What became of one address of a batch. The set is closed."""

    HIT = "hit"  # read: the frame is in the caller's memory, verified; write: it is on the medium
    MISS = "miss"
    PENDING = "pending"  # somebody else is writing it just now
    REJECTED = "rejected"  # no room, or larger than the medium takes
    THROTTLED = "throttled"  # a budget is spent
    CORRUPT = "corrupt"  # it was there and damaged; it is gone now
    TIMEOUT = "timeout"  # the deadline passed before the medium was asked
    ERROR = "error"  # the medium failed
