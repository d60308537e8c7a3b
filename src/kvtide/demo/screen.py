# SPDX-License-Identifier: Apache-2.0
"""What the demonstration looks like: lines that fill while something runs, then a table. Plain text in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from kvtide.demo.rows import Row

_BAR = 16
_SPIN = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR_LINE = "\r\x1b[K"
_DRAW_S = 0.1
_LOG_S = 20.0  # how often a log hears that something is still going on


class Step:
    """Something that takes a while. `done` of `total`, where that is known."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self.began_s = time.monotonic()

    def update(self, done: int) -> None:
        self.done = min(done, self.total)

    def text(self) -> str:
        seconds = f"{time.monotonic() - self.began_s:5.1f} s"
        if not self.total:
            return f"{self.what:50} {seconds}"
        return f"{self.what:50} {seconds}  {bar(self.done / self.total)} {self.done:,} of {self.total:,} tokens"


class Screen:
    """A terminal, or a log."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()

    def say(self, text: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def strong(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._is_terminal else text

    @contextmanager
    def step(self, what: str, total: int = 0) -> Iterator[Step]:
        """Show that something runs until it has ended; then one line stays."""
        step = Step(what, total)
        ended = threading.Event()
        drawing = threading.Thread(target=self._draw, args=(step, ended), name="kvtide-demo-screen")
        drawing.start()
        mark = "✗"
        try:
            yield step
            mark = "✓"
        finally:
            ended.set()
            drawing.join()
            start = _CLEAR_LINE if self._is_terminal else ""
            self.say(f"{start}{mark} {step.what:50} {time.monotonic() - step.began_s:5.1f} s")

    def _draw(self, step: Step, ended: threading.Event) -> None:
        turn = 0
        while not ended.wait(_DRAW_S if self._is_terminal else _LOG_S):
            if self._is_terminal:
                self._stream.write(f"{_CLEAR_LINE}{_SPIN[turn % len(_SPIN)]} {step.text()}")
                self._stream.flush()
                turn += 1
            else:
                self.say(f"  {step.text()}")

    def table(self, rows: Sequence[Row]) -> None:
        """Time to first token, where the KV came from, and whether the answer is the same."""
        longest_s = max(row.ttft_s for row in rows)
        heads = f"{'first token':>11}  {'':{_BAR}} {'faster':>6}  {'tokens reused':>14}  {'from':4}  same"
        self.say(self.strong(f"{'':32} {heads}"))
        for row in rows:
            faster = f"{row.speedup:.0f}x" if row.speedup >= 9.5 else f"{row.speedup:.1f}x"
            reused = f"{row.tokens_reused:,} of {row.prompt_tokens:,}"
            self.say(
                f"{row.name:32} {seconds_text(row.ttft_s):>11}  {bar(row.ttft_s / longest_s, ' ')} {faster:>6}  "
                f"{reused:>14}  {row.tier or '-':4}  {'yes' if row.identical else 'NO'}"
            )


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 9.95 else f"{seconds:.2f} s"


def bar(share: float, empty: str = "░") -> str:
    """To an eighth of a character, and never nothing at all for something."""
    eighths = round(max(0.0, min(share, 1.0)) * _BAR * 8) or (1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return drawn + empty * (_BAR - len(drawn))
