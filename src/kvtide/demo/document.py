# SPDX-License-Identifier: Apache-2.0
"""The text that the demonstration asks about: the part of Python's own reference on format strings, which every
Python brings along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TITLE = "Python's reference on format strings"
TOKENS = 6000  # by default: much of a small model's context, and a minute of computing on two cores

QUESTIONS = (
    "What does the '%' presentation type do?",
    "What is the 'x' presentation type for?",
    "Which characters enclose a replacement field?",
    "How are numbers padded with zeros?",
)
CHAT = (
    "In one sentence: what is this text about?",
    "And which method of strings uses it?",
    "Thank you. Is there a shorter way to write it?",
)


def document(tokenizer: Any, tokens_max: int = TOKENS) -> str:
    """About so many tokens, cut at the end of a paragraph."""
    from pydoc_data.topics import topics

    text = str(topics["formatstrings"])
    paragraphs: list[str] = []
    count = 0
    for paragraph in text.split("\n\n"):
        count += len(tokenizer(paragraph + "\n\n")["input_ids"])
        if count > tokens_max:
            break
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def prompt(tokenizer: Any, text: str, turns: Sequence[str]) -> list[int]:
    """The tokens of a chat about the text: a question, its answer, the next question, and so on."""
    messages = [{"role": "system", "content": f"Answer questions about this text in one or two sentences.\n\n{text}"}]
    for number, turn in enumerate(turns):
        messages.append({"role": "assistant" if number % 2 else "user", "content": turn})
    tokens: list[int] = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return tokens
