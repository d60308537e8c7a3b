# SPDX-License-Identifier: Apache-2.0
"""Two hundred kills of a process that writes to the disk tier, and what the next one finds."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from functools import partial

from kvtide.bench.case import Case, Measured, Setting, Trial, Unit
from kvtide.testing.crash import CampaignResult, run_campaign

_KILLS = 200


class _Campaign:
    """One campaign, shared by the rows below. Its seed is drawn anew each time, and told."""

    def __init__(self) -> None:
        self._result: CampaignResult | None = None

    def trial(self, setting: Setting, *, count: Callable[[CampaignResult], int]) -> Iterator[Trial]:
        if self._result is None:
            self._result = run_campaign(setting.folder, _KILLS, secrets.randbelow(1 << 31), progress=_tell)
        result = self._result
        for failure in result.failures:
            print(failure, file=sys.stderr)
        note = f"{result.kills} kills, {result.blocks_checked:,} blocks compared, seed {result.seed}"
        yield Trial(lambda: Measured(count(result)), note=note)


def _tell(done: int, total: int) -> None:
    if done % 20 == 0:
        print(f"crash campaign: kill {done}/{total}", file=sys.stderr)


def _case(name: str, count: Callable[[CampaignResult], int]) -> Case:
    setup = partial(_campaign.trial, count=count)
    return Case(name, Unit("count"), setup, runs=1, warmups=0, is_long=True)


_campaign = _Campaign()
CASES = (
    _case("crash-wrong-blocks", lambda result: result.wrong_bytes + result.blocks_unknown),
    _case("crash-failed-reopens", lambda result: result.failures_to_reopen),
    _case("crash-bound-exceeded", lambda result: result.bytes_max_exceeded),
    _case("crash-lost-blocks", lambda result: result.lost_but_acknowledged),
    _case("crash-blocks-back", lambda result: result.deleted_but_back),
)
