# SPDX-License-Identifier: Apache-2.0
"""Processes that work beside the benchmark's own: started once, told what to do line by line, ended by id.

A worker runs a *job*, a class whose methods are the orders it takes. Orders and answers are lines of JSON on its
stdin and stdout. When its stdin ends, so does it: nothing outlives the benchmark, however that ends.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ANSWER_S = 120.0  # for an order that does not say how long it takes
_TOGETHER_S = 0.1  # from an order to all to their start: every one of them has read it by then
_END_S = 5.0


class Worker:
    """One process, seen from the benchmark. `job` is `module:class`, its options go to the constructor."""

    def __init__(self, job: str, **options: object) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtide.bench.node.worker", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._job = job
        self._heard = b""
        self._send(options)

    def tell(self, order: str, **arguments: object) -> None:
        """Give an order; `hear` its answer. The next order ends one that goes on until it is told otherwise."""
        self._send({"order": order, **arguments})

    def hear(self, timeout_s: float = ANSWER_S) -> Any:
        """The next answer. AssertionError when the worker is dead or does not answer in time."""
        assert self._process.stdout is not None
        end_s = time.monotonic() + timeout_s
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._heard:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"a worker ({self._job}) has not answered for {timeout_s:g} s"
            if poll.poll(1000 * left_s):
                data = os.read(fd, 1 << 20)
                assert data, f"a worker ({self._job}) has died"
                self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def ask(self, order: str, timeout_s: float = ANSWER_S, **arguments: object) -> Any:
        self.tell(order, **arguments)
        return self.hear(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """As a crash does. Twice is once."""
        self._process.kill()
        self._let_go()

    def end(self) -> None:
        """Let it end by itself, within a bounded time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._let_go()

    def _let_go(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, what: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"a worker ({self._job}) has died") from None


@contextmanager
def crew(job: str, options: Sequence[dict[str, object]]) -> Iterator[list[Worker]]:
    """Workers, one for each set of options, that are ready when this begins and gone when it ends."""
    workers: list[Worker] = []
    try:
        for each in options:
            workers.append(Worker(job, **each))
        for worker in workers:
            worker.hear()
        yield workers
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    else:
        for worker in workers:
            worker.end()


def together(workers: Sequence[Worker], order: str, **arguments: object) -> tuple[float, list[Any]]:
    """Give all the same order, to be begun at the same moment, `start_s` of time.monotonic: processes share that
    clock. Returns the moment and the answers."""
    start_s = time.monotonic() + _TOGETHER_S
    for worker in workers:
        worker.tell(order, start_s=start_s, **arguments)
    return start_s, [worker.hear() for worker in workers]


def wait_until(at_s: float) -> None:
    """Sleep to a moment of time.monotonic."""
    time.sleep(max(0.0, at_s - time.monotonic()))


class Tally:
    """Counts that outlive whoever counts: numbers in a file that he and his reader map. One writer at a time."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._place = {name: i for i, name in enumerate(names)}
        self._numbers = np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(len(names),))

    def __getitem__(self, name: str) -> int:
        return int(self._numbers[self._place[name]])

    def __setitem__(self, name: str, number: int) -> None:
        self._numbers[self._place[name]] = number

    def add(self, name: str, more: int = 1) -> None:
        self._numbers[self._place[name]] += more


# What the process of a worker does ---------------------------------------------------------------------------


class Orders:
    """The orders that come in on stdin, one a line. Unbuffered, so that `are_waiting` sees all there are."""

    def __init__(self) -> None:
        self._heard = b""
        self._is_over = False
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)

    @property
    def are_waiting(self) -> bool:
        """Whether there is another order, or no more to come."""
        return b"\n" in self._heard or bool(self._poll.poll(0))

    def next(self) -> dict[str, Any] | None:
        while b"\n" not in self._heard:
            data = os.read(0, 1 << 16)
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order


class Job:
    """What a worker does: each public method is an order. `orders` tells one that goes on when to stop."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def close(self) -> None:
        """The end; not after a kill."""


def work(name: str) -> None:
    """Be a worker until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever started us decides
    logging.basicConfig(level=logging.ERROR)  # that a service is gone is no news where it is killed on purpose
    module, _, kind = name.partition(":")
    orders = Orders()
    job: Job = getattr(import_module(module), kind)(orders, **(orders.next() or {}))
    try:
        _answer(None)
        while (order := orders.next()) is not None:
            gc.collect()
            _answer(getattr(job, order.pop("order"))(**order))
    finally:
        job.close()


def _answer(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
