# SPDX-License-Identifier: Apache-2.0
"""A folder with a million blocks: how long a fresh process takes to have them all back, and what each costs.

Opening happens in a process of its own, so that nothing of this one's memory hides what the index needs.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import numpy as np

from kvtide.bench.case import SECONDS, Case, Measured, Setting, Trial, Unit
from kvtide.frame import HEADER_BYTES, Frame, Header
from kvtide.keys import NO_PARENT, Key, Shelf
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys, shelf
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.files import aligned_memory

_BLOCKS = 1_000_000
_CHAIN = 64
_PAYLOAD_BYTES = 4096
_BATCH = 4096
_FOLDER_BYTES = 10 << 30  # 8 GiB of frames, and their index


def _fill(folder: Path) -> None:
    tier = DiskTier(folder, _FOLDER_BYTES)
    tier.open()
    place = shelf("bench")
    memory = aligned_memory(_BATCH * (HEADER_BYTES + _PAYLOAD_BYTES)).reshape(_BATCH, -1)
    for first in range(0, _BLOCKS, _BATCH):
        frames = [
            Frame(header, memory[i]) for i, header in enumerate(_headers(place, first, min(_BATCH, _BLOCKS - first)))
        ]
        assert set(tier.write(frames)) == {Outcome.HIT}
    tier.close()


def _headers(place: Shelf, first: int, count: int) -> Iterator[Header]:
    shape = (1, 1, _PAYLOAD_BYTES)
    for chain in range(first // _CHAIN, -(-(first + count) // _CHAIN)):
        parent = NO_PARENT
        for position, key in enumerate(chain_keys(chain, _CHAIN)):
            if first <= chain * _CHAIN + position < first + count:
                yield Header(place, key, parent, position, 16, shape, _PAYLOAD_BYTES)
            parent = Key(key)


class _Reopened:
    """The filled folder, shared by the rows below and gone with the last of them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._figures: list[dict[str, float]] = []

    def trial(self, setting: Setting, *, figure: str, is_last: bool) -> Iterator[Trial]:
        if self._folder is None:
            self._folder = Path(mkdtemp(dir=setting.folder.parent, prefix="case-reopen-"))
            _fill(self._folder)
        folder = self._folder
        try:
            yield Trial(lambda: Measured(_open_elsewhere(folder)[figure]), note="4 KiB payloads, page cache warm")
        finally:
            if is_last:
                rmtree(folder)
                self._folder = None


def _open_elsewhere(folder: Path) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-m", "kvtide.bench.store.reopen", str(folder)], check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(run.stdout)
    assert figures["blocks"] == _BLOCKS, "the index came back incomplete"
    return figures


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """What the process of its own does: open, measure, report."""
    np.zeros(1)
    before = _resident_bytes()
    start_s = time.perf_counter()
    tier = DiskTier(Path(sys.argv[1]), _FOLDER_BYTES)
    tier.open()
    elapsed_s = time.perf_counter() - start_s
    grown = _resident_bytes() - before
    blocks = tier.stats().blocks
    print(json.dumps({"blocks": blocks, "seconds": elapsed_s, "bytes_per_block": grown / max(blocks, 1)}))
    tier.close()


_reopened = _Reopened()
CASES = (
    Case(
        "reopen-1m-blocks",
        SECONDS,
        partial(_reopened.trial, figure="seconds", is_last=False),
        runs=5,
        is_long=True,
    ),
    Case(
        "memory-per-block",
        Unit("bytes"),
        partial(_reopened.trial, figure="bytes_per_block", is_last=True),
        runs=3,
        warmups=0,
        is_long=True,
    ),
)

if __name__ == "__main__":
    main()
