# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a benchmark runs. Never on stdout: that is for results."""

from __future__ import annotations

import time
from typing import TextIO

from kvtide.deadline import Clock

# Back to the start of the line, and clear it: a shorter line leaves nothing of a longer one.
_CLEAR_LINE = "\r\x1b[K"


# In a log: often enough to see that it goes on, seldom enough to find the results again.
_LOG_S = 30.0


class Progress:
    """One line that is rewritten on a terminal; in a log a line for each new topic (what stands before the colon),
    and now and then one of a topic that takes long."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._log_again_at_s = 0.0
        self._is_terminal = stream.isatty()
        self._topic = ""

    def update(self, text: str) -> None:
        """Show what is happening now; the next update replaces it."""
        topic = text.partition(":")[0]
        if self._is_terminal:
            self._write(text)
        elif topic != self._topic or self._clock() >= self._log_again_at_s:
            self._write(f"{text}\n")
            self._log_again_at_s = self._clock() + _LOG_S
        self._topic = topic

    def say(self, text: str) -> None:
        """Show something that stays."""
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Leave a clean line to whoever writes next."""
        self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(_CLEAR_LINE + text if self._is_terminal else text)
        self._stream.flush()
