# SPDX-License-Identifier: Apache-2.0
"""From a prompt to a match: against the bare hash of the same bytes, and against a bare dict."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256

import numpy as np

from kvtide.bench.case import MILLISECONDS, Case, Setting, Trial
from kvtide.config import DramSettings, Settings
from kvtide.keys import NO_PARENT, Key, chain
from kvtide.layout import Layout
from kvtide.store import Store, open_store
from kvtide.testing.blocks import chain_keys, shelf

_TOKENS, _BLOCK_TOKENS = 131_072, 256
_REPEATS = 20  # a call takes about a millisecond: too short to be timed alone
_SHELF = shelf("bench")
_LAYOUT = Layout(layers=1, pages=16, page_tokens=16, page_bytes=256)  # the smallest slot: 4 KiB of payload


def _hold(store: Store, keys: list[Key]) -> None:
    for first in range(0, len(keys), 256):
        parent = keys[first - 1] if first else NO_PARENT
        reservation = store.reserve(_SHELF, keys[first : first + 256], _LAYOUT, position=first, parent=parent).result
        store.publish(reservation)
    match = store.match([_SHELF], keys).result
    assert match.blocks == len(keys), "the benchmark's blocks are not all there"


def _prompt(setting: Setting, *, as_list: bool) -> Iterator[Trial]:
    del setting
    root = Key(bytes(range(32)))
    array = np.random.Generator(np.random.PCG64(1)).integers(0, 150_000, _TOKENS, np.int32)
    tokens = array.tolist() if as_list else array
    view = memoryview(array).cast("B")
    step = 4 * _BLOCK_TOKENS
    with open_store(Settings(dram=DramSettings(bytes_max=64 << 20))) as store:
        _hold(store, chain(root, array, _BLOCK_TOKENS))

        def baseline() -> None:
            for _ in range(_REPEATS):
                parent = bytes(root)
                for at in range(0, len(view), step):
                    block = sha256(parent)
                    block.update(view[at : at + step])
                    parent = block.digest()

        def subject() -> None:
            for _ in range(_REPEATS):
                store.match([_SHELF], chain(root, tokens, _BLOCK_TOKENS))

        yield Trial(subject, baseline, work=_REPEATS, note="512 blocks, all in DRAM; baseline: bare SHA-256 loop")


def _ready_keys(setting: Setting) -> Iterator[Trial]:
    del setting
    keys = chain_keys("bench", 4096)
    plain = {key: row for row, key in enumerate(keys)}
    with open_store(Settings(dram=DramSettings(bytes_max=64 << 20))) as store:
        _hold(store, keys)

        def baseline() -> None:
            for _ in range(_REPEATS):
                for key in keys:
                    if key not in plain:
                        break

        def subject() -> None:
            for _ in range(_REPEATS):
                store.match([_SHELF], keys)

        yield Trial(subject, baseline, work=_REPEATS, note="all in DRAM; baseline: bare dict probe loop")


CASES = (
    Case("match-128k-array", MILLISECONDS, partial(_prompt, as_list=False), runs=21, quick_runs=7),
    Case("match-128k-list", MILLISECONDS, partial(_prompt, as_list=True), runs=21, quick_runs=7),
    Case("match-4096-keys", MILLISECONDS, _ready_keys, runs=21, quick_runs=7),
)
