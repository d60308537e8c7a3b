# SPDX-License-Identifier: Apache-2.0
"""From tokens to text, as they come: nothing that a later token could still change is given out.

A token is no piece of text. It may be a part of a character, and its space depends on what stands before it. So each
new token is decoded together with those before it, and only what this adds to the text is new:

    tokens   … │ given out a moment ago │ held back, and the new one
    decoded    └────────── known ───────┴────── fresh ─────────────▶ given out, unless it ends in half a character
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_HALF = "\ufffd"  # what decoders make of bytes that are no character, or not yet
_PROMPT_TOKENS = 5  # enough for the space before the first word of an answer
_HELD_MAX = 8  # four bytes are the longest character: what is held longer is no half of one
_CHARACTER_TOKENS_MAX = 4


class Detokenizer:
    """Of one answer. `decode` turns tokens into text without their special tokens, and changes no spaces."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_PROMPT_TOKENS:])
        self._given = len(self._tokens)  # how many of them are out
        # A prompt may end in half a character; then the answer's first token makes it whole, and it belongs there.
        self._known = decode(self._tokens).rstrip(_HALF)

    def add(self, token: int) -> str:
        """What this token adds to the text: nothing, while it ends in half a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_HALF):
            return self._give_broken(text) if len(self._tokens) - self._given > _HELD_MAX else ""
        fresh = self._give(text, len(self._tokens))
        if not fresh:
            self._tokens.pop()  # a special token; many of them would only make the next ones slow
        return fresh

    def end(self) -> str:
        """What is held back, whole or not."""
        return self._give(self._decode(self._tokens), len(self._tokens))

    def _give(self, text: str, end: int) -> str:
        """Hand out the text of all tokens before `end`."""
        fresh = text[len(self._known) :]
        if fresh:
            self._tokens = self._tokens[self._given :]
            end -= self._given
            self._given = end
            self._known = self._decode(self._tokens[:end])
        return fresh

    def _give_broken(self, text: str) -> str:
        """Bytes that will never be a character: hand out all but the last few, which may be the first half of one."""
        for tail in range(1, _CHARACTER_TOKENS_MAX + 1):
            head = self._decode(self._tokens[:-tail])
            if head + self._decode(self._tokens[-tail:]) == text:  # no character crosses this border
                return self._give(head, len(self._tokens) - tail)
        return ""
