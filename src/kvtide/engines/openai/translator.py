# SPDX-License-Identifier: Apache-2.0
"""From text to tokens and back, by the model's own tokenizer and chat template. Calls take long for long texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from kvtide.engines.openai.bodies import Message
from kvtide.engines.openai.detokenizer import Detokenizer
from kvtide.engines.openai.refusal import invalid


class Translator:
    """Any thread may use it. `tokenizer` is one of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The first call turns off what a tokenizer's file may say about cutting texts short; that is a change, during
        # which no other thread may use it.
        self.encode("", add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, truncation=False, verbose=False)
        tokens: list[int] = encoded["input_ids"]
        return tokens

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Raises Refusal when the model has no template, or its template does not take these messages."""
        if not self._tokenizer.chat_template:
            raise invalid("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
        plain = [{"role": _role(message), "content": _content(message)} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise invalid(f"the model's chat template does not take these messages: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)  # the template has put them in already

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_all(self, tokens: Sequence[int]) -> str:
        """With special tokens. Raises Refusal for tokens that the tokenizer does not have."""
        if max(tokens, default=0) >= len(self._tokenizer):
            raise invalid(f"tokens: this model has the tokens 0 to {len(self._tokenizer) - 1:,}", "tokens")
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.decode, prompt)


def _role(message: Message) -> str:
    # OpenAI's newer name for the same; no template knows it.
    return "system" if message.role == "developer" else message.role


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text or "" for part in message.content)
