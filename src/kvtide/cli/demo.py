# SPDX-License-Identifier: Apache-2.0
"""`kvtide demo`: the node service with two tenants, in half a minute, with every claim checked while you watch.

No model yet: the KV bytes are a pattern that follows from each block's key, so that every byte that comes
back can be compared with what it must be.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from kvtide.client import Client
from kvtide.config import CallSettings
from kvtide.errors import KvtideError
from kvtide.keys import Address, Key, Namespace, Shelf, chain
from kvtide.layout import Layout, kv_token_bytes
from kvtide.testing.blocks import pattern
from kvtide.testing.node import ServedNode
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
_WAIT_S = 10.0
_CONFIG = """\
dram: {bytes_max: 1GiB}
disk: {bytes_max: 4GiB, spill_queue_bytes_max: 256MiB}
admin: {is_on: false}
tenants:
  acme: {clients: [{token_sha256: %s}]}
  rival: {clients: [{token_sha256: %s}]}
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("demo", help="watch the node service keep, share, survive and refuse blocks")
    parser.add_argument("--folder", type=Path, help="where the demo's service goes (default: a temporary folder)")
    parser.add_argument("--engine", metavar="SOCKET", help=argparse.SUPPRESS)  # a second engine


def run(args: argparse.Namespace) -> int:
    logging.getLogger("kvtide").addHandler(logging.NullHandler())  # that the service goes is part of the show
    if args.engine:
        return _second_engine(Path(args.engine))
    if args.folder is not None:
        return _Demo(args.folder).run()
    with TemporaryDirectory(prefix="kvtide-demo-") as folder:
        return _Demo(Path(folder)).run()


def _tokens(seed: int, count: int = _PROMPT_TOKENS) -> list[int]:
    numbers: list[int] = np.random.Generator(np.random.PCG64(seed)).integers(0, 49_152, count).tolist()
    return numbers


class _Engine:
    """What an engine does with the cache, and nothing else."""

    def __init__(self, socket: Path, tenant: str) -> None:
        calls = CallSettings(match_s=_WAIT_S, control_s=_WAIT_S, connect_s=_WAIT_S)
        self.cache = Client(socket, token=f"the token of {tenant}", calls=calls)
        ticket = self.cache.open_scope(_NAMESPACE)
        self.cache.wait(ticket)
        if ticket.result is None:
            raise KvtideError("the service does not answer: its log is in the demo's folder")
        self.shelf: Shelf = ticket.result.shelf()
        self._root = ticket.result.root
        self.cache.wait_populated()

    def keys(self, tokens: list[int]) -> list[Key]:
        return chain(self._root, tokens, _LAYOUT.block_tokens)

    def save(self, tokens: list[int]) -> int:
        """After prefill: reserve slots, copy KV into them, publish."""
        keys = self.keys(tokens)
        reserving = self.cache.reserve(self.shelf, keys, _LAYOUT)
        self.cache.wait(reserving)
        for key, slot in zip(keys, reserving.result.payloads, strict=True):
            if slot is not None:
                np.copyto(slot, pattern(Address(self.shelf, key), _LAYOUT.payload_bytes))
        self.cache.wait(self.cache.publish(reserving.result))
        return sum(slot is not None for slot in reserving.result.payloads)

    def load(self, tokens: list[int]) -> tuple[int, float]:
        """Before prefill: match, lease, copy out. Returns blocks and seconds; checks every byte."""
        keys = self.keys(tokens)
        pages = np.empty((len(keys), _LAYOUT.payload_bytes), np.uint8)
        pages[:] = 0  # an engine's memory is warm
        start_s = time.perf_counter()
        ticket = self.cache.match_and_lease([self.shelf], keys)
        self.cache.wait(ticket)
        [fetched] = ticket.result.fetched
        for page, payload in zip(pages, fetched.payloads, strict=False):
            np.copyto(page, payload)
        self.cache.release(fetched)
        elapsed_s = time.perf_counter() - start_s
        for page, key in zip(pages[: fetched.blocks], keys, strict=False):
            if not np.array_equal(page, pattern(Address(self.shelf, key), _LAYOUT.payload_bytes)):
                raise KvtideError("a block came back with wrong bytes: please report this")
        return fetched.blocks, elapsed_s

    def wait_for_the_service(self) -> None:
        self.cache.poll()  # notices that the old one is gone
        _wait_until(lambda: self.cache.is_connected)
        self.cache.wait_populated()

    def wait_for_the_disk(self) -> None:
        _wait_until(lambda: self.cache.stats()["spill"]["disk"]["queued_bytes"] == 0)


def _wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.01)


def _second_engine(socket: Path) -> int:
    """In a process of its own: find what another engine saved."""
    engine = _Engine(socket, "acme")
    print(*engine.load(_tokens(1)))
    engine.cache.close()
    return 0


class _Demo:
    """The scenes in order; each prints what it did and stops the demo if its claim does not hold."""

    def __init__(self, folder: Path) -> None:
        hashes = (sha256(f"the token of {tenant}".encode()).hexdigest() for tenant in ("acme", "rival"))
        self._node = ServedNode(folder, config=_CONFIG % tuple(hashes))
        self._blocks = _PROMPT_TOKENS // _LAYOUT.block_tokens
        self._prompt = _tokens(1)

    def run(self) -> int:
        size = self._blocks * _LAYOUT.payload_bytes
        print(
            f"A prompt of {_PROMPT_TOKENS:,} tokens is {self._blocks} blocks of {_LAYOUT.block_tokens} tokens, "
            f"{size / 1e6:.0f} MB of KV in the shape of SmolLM2-135M.\n"
            f"One service (`kvtide serve`) keeps them for two tenants, acme and rival.\n"
        )
        with self._node:
            engine = _Engine(self._node.socket, "acme")
            self._first_and_second_time(engine)
            self._others(engine)
            self._after_a_restart(engine)
            self._after_a_kill(engine)
            self._damaged(engine)
            engine.cache.close()
            self._node.stop()
        print("\nEvery byte was compared with what it must be. Next: kvtide serve, make test, make bench.")
        return 0

    def _first_and_second_time(self, engine: _Engine) -> None:
        self._show("a new prompt", *engine.load(self._prompt), expected=0)
        saved = engine.save(self._prompt)
        print(f"  saved {saved} blocks; they go down to disk in the background")
        self._show("the same prompt again, from DRAM", *engine.load(self._prompt), expected=self._blocks)

    def _others(self, engine: _Engine) -> None:
        half = _PROMPT_TOKENS // 2
        shared = self._prompt[:half] + _tokens(2, half)
        self._show("another prompt with the same first half", *engine.load(shared), expected=self._blocks // 2)
        command = [sys.executable, "-m", "kvtide", "demo", "--engine", str(self._node.socket)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
        if ended.returncode:
            raise KvtideError("the second engine failed: its message stands above")
        blocks, elapsed_s = ended.stdout.split()
        self._show("the same prompt in another engine", int(blocks), float(elapsed_s), expected=self._blocks)
        rival = _Engine(self._node.socket, "rival")
        self._show("the same prompt of another tenant", *rival.load(self._prompt), expected=0)
        rival.cache.close()

    def _after_a_restart(self, engine: _Engine) -> None:
        self._node.stop()
        self._show("the service is stopped; the engine goes on", *engine.load(self._prompt), expected=0)
        start_s = time.perf_counter()
        self._node.start()
        engine.wait_for_the_service()
        print(f"  started again in {time.perf_counter() - start_s:.1f} s; DRAM is empty, the disk is not")
        self._show("the same prompt, from disk", *engine.load(self._prompt), expected=self._blocks)

    def _after_a_kill(self, engine: _Engine) -> None:
        tokens = _tokens(3)
        engine.save(tokens)
        engine.wait_for_the_disk()
        engine.cache.wait(engine.cache.reserve(engine.shelf, engine.keys(_tokens(4)), _LAYOUT))
        self._node.kill()
        self._node.start()
        engine.wait_for_the_service()
        print("  the service was killed (kill -9) with one prompt saved and another half written")
        self._show("the first one, from disk", *engine.load(tokens), expected=self._blocks)
        self._show("the other one", *engine.load(_tokens(4)), expected=0)

    def _damaged(self, engine: _Engine) -> None:
        tokens = _tokens(5)
        engine.save(tokens)
        wanted = pattern(Address(engine.shelf, engine.keys(tokens)[5]), _LAYOUT.payload_bytes)[:512].tobytes()
        self._node.stop()
        _flip_a_byte(self._node.folder / "blocks" / DATA, wanted)
        self._node.start()
        engine.wait_for_the_service()
        print("  one byte of block 5 of a prompt was changed on disk")
        self._show("that prompt: all before the damage", *engine.load(tokens), expected=5)

    def _show(self, what: str, blocks: int, elapsed_s: float, expected: int) -> None:
        if blocks != expected:
            raise KvtideError(f"{what}: {blocks} blocks came back, {expected} were expected")
        speed = f"{blocks * _LAYOUT.payload_bytes / elapsed_s / 1e9:5.1f} GB/s" if blocks else "          "
        bar = ("#" * (20 * blocks // self._blocks)).ljust(20, ".")
        print(f"{what:44} {bar} {blocks:3}/{self._blocks} blocks  {elapsed_s * 1e3:7.1f} ms {speed}", flush=True)


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
