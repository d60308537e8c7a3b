# SPDX-License-Identifier: Apache-2.0
"""`kvtide demo`: the store alone, in half a minute, with every claim checked while you watch.

No model yet: the KV bytes are a pattern that follows from each block's key, so that every byte that comes
back can be compared with what it must be.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from kvtide.config import DiskSettings, DramSettings, Settings
from kvtide.errors import KvtideError
from kvtide.keys import (
    PUBLIC_SECRET,
    Address,
    Key,
    Namespace,
    Part,
    Shelf,
    chain,
    derive_root,
    scope_digest,
    tenant_digest,
)
from kvtide.layout import Layout, kv_token_bytes
from kvtide.store import Store, open_store
from kvtide.testing.blocks import pattern
from kvtide.tiers.disk.folder import DATA

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

# The shape of SmolLM2-135M in bf16: 30 layers, 3 KV heads of 64.
_LAYERS, _PAGE_TOKENS = 30, 16
_LAYOUT = Layout.for_part(_LAYERS, _PAGE_TOKENS, kv_token_bytes(kv_heads=3, head_size=64, dtype_bytes=2))
_NAMESPACE = Namespace(
    model="id:demo",
    kv_dtype="bfloat16",
    layers=_LAYERS,
    kv_heads=3,
    head_size=64,
    page_tokens=_PAGE_TOKENS,
    block_tokens=_LAYOUT.block_tokens,
    layout="pattern",
).digest()
_PROMPT_TOKENS = 8192


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("demo", help="watch the store keep, share, lose and refuse blocks")
    parser.add_argument("--folder", type=Path, help="where the demo's disk tier goes (default: a temporary folder)")
    parser.add_argument("--writer", action="store_true", help=argparse.SUPPRESS)  # the process that gets killed


def run(args: argparse.Namespace) -> int:
    if args.writer:
        return _write_until_killed(args.folder)
    if args.folder is not None:
        return _Demo(args.folder).run()
    with TemporaryDirectory(prefix="kvtide-demo-") as folder:
        return _Demo(Path(folder)).run()


def _settings(folder: Path) -> Settings:
    disk = DiskSettings(folder=str(folder / "cache"), bytes_max=4 << 30, spill_queue_bytes_max=256 << 20)
    return Settings(dram=DramSettings(bytes_max=512 << 20), disk=disk)


def _shelf(tenant: str) -> Shelf:
    return Shelf(_NAMESPACE, tenant_digest(tenant), scope_digest(""), Part())


def _keys(tenant: str, tokens: list[int]) -> list[Key]:
    # A real service gives each tenant a secret of its own; here the name stands in for one.
    secret = PUBLIC_SECRET + tenant.encode()
    return chain(derive_root(secret, _NAMESPACE, scope_digest("")), tokens, _LAYOUT.block_tokens)


def _tokens(seed: int, count: int) -> list[int]:
    numbers: list[int] = np.random.Generator(np.random.PCG64(seed)).integers(0, 49_152, count).tolist()
    return numbers


def _save(store: Store, tenant: str, tokens: list[int]) -> int:
    """What an engine does after prefill: reserve slots, copy KV into them, publish."""
    shelf, keys = _shelf(tenant), _keys(tenant, tokens)
    reservation = store.reserve(shelf, keys, _LAYOUT).result
    for key, slot in zip(keys, reservation.payloads, strict=True):
        if slot is not None:
            np.copyto(slot, pattern(Address(shelf, key), _LAYOUT.payload_bytes))
    store.publish(reservation)
    return sum(slot is not None for slot in reservation.payloads)


def _load(store: Store, tenant: str, tokens: list[int]) -> tuple[int, float]:
    """What an engine does before prefill: match, fetch, copy out. Returns blocks and seconds; checks every byte."""
    shelf, keys = _shelf(tenant), _keys(tenant, tokens)
    pages = np.empty((len(keys), _LAYOUT.payload_bytes), np.uint8)
    pages[:] = 0  # an engine's memory is warm
    start_s = time.perf_counter()
    ticket = store.fetch(store.plan(store.match([shelf], keys).result))
    store.wait(ticket)
    fetched = ticket.result
    for page, payload in zip(pages, fetched.payloads, strict=False):
        np.copyto(page, payload)
    store.release(fetched)
    elapsed_s = time.perf_counter() - start_s
    for page, key in zip(pages[: fetched.blocks], keys, strict=False):
        if not np.array_equal(page, pattern(Address(shelf, key), _LAYOUT.payload_bytes)):
            raise KvtideError("a block came back with wrong bytes: please report this")
    return fetched.blocks, elapsed_s


def _write_until_killed(folder: Path) -> int:
    store = open_store(_settings(folder))
    _save(store, "acme", _tokens(3, _PROMPT_TOKENS))
    store.drain()
    print("on disk", flush=True)
    for seed in range(100, 1_000_000):  # and on, so that the end comes in the middle of writing
        _save(store, "acme", _tokens(seed, _PROMPT_TOKENS))
    return 1


class _Demo:
    """The scenes in order; each prints what it did and stops the demo if its claim does not hold."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks = _PROMPT_TOKENS // _LAYOUT.block_tokens
        self._prompt = _tokens(1, _PROMPT_TOKENS)

    def run(self) -> int:
        size = self._blocks * _LAYOUT.payload_bytes
        print(
            f"A prompt of {_PROMPT_TOKENS:,} tokens is {self._blocks} blocks of {_LAYOUT.block_tokens} tokens, "
            f"{size / 1e6:.0f} MB of KV in the shape of SmolLM2-135M.\n"
        )
        store = open_store(_settings(self._folder))
        store.dram.arena.wait_touched()
        self._first_and_second_time(store)
        self._others(store)
        store = self._after_a_restart(store)
        self._after_a_kill(store)
        self._damaged()
        print("\nEvery byte was compared with what it must be. Next: make test, make bench.")
        return 0

    def _first_and_second_time(self, store: Store) -> None:
        self._show("a new prompt", *_load(store, "acme", self._prompt), expected=0)
        saved = _save(store, "acme", self._prompt)
        print(f"  saved {saved} blocks; they go down to disk in the background")
        self._show("the same prompt again, from DRAM", *_load(store, "acme", self._prompt), expected=self._blocks)

    def _others(self, store: Store) -> None:
        half = _PROMPT_TOKENS // 2
        shared = self._prompt[:half] + _tokens(2, half)
        self._show("another prompt with the same first half", *_load(store, "acme", shared), expected=self._blocks // 2)
        self._show("the same prompt of another tenant", *_load(store, "rival", self._prompt), expected=0)

    def _after_a_restart(self, store: Store) -> Store:
        store.close()
        start_s = time.perf_counter()
        store = open_store(_settings(self._folder))
        print(f"  restarted in {time.perf_counter() - start_s:.2f} s; DRAM is empty, the disk is not")
        store.dram.arena.wait_touched()
        self._show("the same prompt, from disk", *_load(store, "acme", self._prompt), expected=self._blocks)
        return store

    def _after_a_kill(self, store: Store) -> None:
        store.close()
        command = [sys.executable, "-m", "kvtide", "demo", "--writer", "--folder", str(self._folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            if writer.stdout.readline() != "on disk\n":
                raise KvtideError("the process that was to be killed ended by itself: its message stands above")
            time.sleep(0.3)  # let it get into the middle of the next ones
            os.kill(writer.pid, signal.SIGKILL)
        print("  another process saved a prompt and was killed (kill -9) while it wrote more")
        with open_store(_settings(self._folder)) as store:
            self._show("its prompt, from disk", *_load(store, "acme", _tokens(3, _PROMPT_TOKENS)), self._blocks)

    def _damaged(self) -> None:
        data = self._folder / "cache" / DATA
        tokens = _tokens(4, _PROMPT_TOKENS)
        with open_store(_settings(self._folder)) as store:
            _save(store, "acme", tokens)
        keys = _keys("acme", tokens)
        _flip_a_byte(data, pattern(Address(_shelf("acme"), keys[5]), _LAYOUT.payload_bytes)[:512].tobytes())
        print("  one byte of block 5 of a prompt was changed on disk")
        with open_store(_settings(self._folder)) as store:
            self._show("that prompt: all before the damage", *_load(store, "acme", tokens), expected=5)

    def _show(self, what: str, blocks: int, elapsed_s: float, expected: int) -> None:
        if blocks != expected:
            raise KvtideError(f"{what}: {blocks} blocks came back, {expected} were expected")
        speed = f"{blocks * _LAYOUT.payload_bytes / elapsed_s / 1e9:5.1f} GB/s" if blocks else "          "
        bar = ("#" * (20 * blocks // self._blocks)).ljust(20, ".")
        print(f"{what:42} {bar} {blocks:3}/{self._blocks} blocks  {elapsed_s * 1e3:7.1f} ms {speed}")


def _flip_a_byte(file: Path, wanted: bytes) -> None:
    """Find these bytes in a file and change the first of them."""
    with file.open("r+b") as data:
        at, step = 0, 64 << 20
        while piece := data.read(step):
            found = piece.find(wanted)
            if found >= 0:
                data.seek(at + found)
                data.write(bytes([wanted[0] ^ 1]))
                return
            at += len(piece)
    raise KvtideError("the block to damage is not on disk")
