# SPDX-License-Identifier: Apache-2.0
"""The same model without kvtide: transformers and its own cache in one process, and nothing of ours.

Numbers that a model computes depend a little on how a prompt is cut into passes, with or without a cache. So the
reference makes the same passes as the engine did: it keeps the KV of its last request, crops it to what the engine
took from the cache, and goes on from there. Whatever came back from the cache other than it went in would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache


class Reference:
    """One conversation at a time, greedy."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._cache = DynamicCache(config=model.config)
        self._tokens: list[int] = []  # whose KV is in the cache
        known = model.generation_config.eos_token_id
        self._ends = {known} if isinstance(known, int) else set(known or ())

    def answer(
        self,
        prompt: Sequence[int],
        reused: int,
        tokens_max: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[list[int], float]:
        """The answer and the seconds to its first token, if the first `reused` tokens need not be computed."""
        began_s = time.monotonic()
        assert self._tokens[:reused] == list(prompt[:reused]), "the reference has not computed what the engine reused"
        if len(self._tokens) > reused:
            self._cache.crop(reused - len(self._tokens))
        self._tokens = list(prompt[:reused])
        with torch.inference_mode():
            while len(self._tokens) < len(prompt):
                token = self._pass(prompt[len(self._tokens) : len(self._tokens) + self._chunk_tokens])
                progress(len(self._tokens))
            ttft_s = time.monotonic() - began_s
            answer: list[int] = []
            while token not in self._ends:
                answer.append(token)
                if len(answer) == tokens_max:
                    break
                token = self._pass([token])
        return answer, ttft_s

    def _pass(self, tokens: Sequence[int]) -> int:
        """The token after these."""
        ids = torch.tensor([list(tokens)], device=self._model.device)
        output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._tokens += tokens
        return int(output.logits[0, -1].argmax())
