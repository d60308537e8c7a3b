# SPDX-License-Identifier: Apache-2.0
"""Cut an answer at the first stop string, wherever the pieces of its text begin and end.

The first is the one that is complete first, and of those that are complete at once the longest: so the cut does not
depend on how the text was divided. What may be the beginning of a stop string is held back until that is known.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Of one answer. The strings are not empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """What can be shown now. Nothing more comes once one is found."""
        if self.is_found:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.is_found = True
            self._held = ""
            return text[: min(found)[1]]
        border = len(text) - self._beginning(text)
        self._held = text[border:]
        return text[:border]

    def end(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
