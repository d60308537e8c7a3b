# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a benchmark runs. Never on stdout: that is for results."""

from __future__ import annotations

from typing import TextIO

# Back to the start of the line, and clear it: a shorter line leaves nothing of a longer one.
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """One line that is rewritten on a terminal; in a log a line for each new topic (what stands before the colon)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._topic = ""

    def update(self, text: str) -> None:
        """Show what is happening now; the next update replaces it."""
        topic = text.partition(":")[0]
        if self._is_terminal:
            self._write(text)
        elif topic != self._topic:
            self._write(f"{text}\n")
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
