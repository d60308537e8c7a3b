# SPDX-License-Identifier: Apache-2.0
"""Which token comes next."""

from __future__ import annotations

import torch

from kvtide.engines.transformers.generation import Sampling

_TEMPERATURE_MIN = 1e-6  # colder makes no difference, and might divide by what is 0 in 32 bits


class Sampler:
    """Of one request: with a seed, the same logits give the same tokens, whatever else the engine does."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._random = torch.Generator(device)
        if sampling.seed is not None:
            self._random.manual_seed(sampling.seed % (1 << 63))
        else:
            self._random.seed()

    def choose(self, logits: torch.Tensor) -> int:
        """From the logits of one position."""
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        scores = logits.float()
        scores = (scores - scores.max()) / max(sampling.temperature, _TEMPERATURE_MIN)
        if not sampling.top_k and sampling.top_p == 1:
            return self._draw(scores.softmax(-1))
        # Equals keep their order, so that of one choice it is the token that temperature 0 would choose.
        scores, order = scores.sort(descending=True, stable=True)
        if sampling.top_k:
            scores = scores[: sampling.top_k]
        probabilities = scores.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        before[0] = -1.0  # the likeliest one always stays
        return int(order[self._draw(probabilities.masked_fill(before >= sampling.top_p, 0))])

    def _draw(self, probabilities: torch.Tensor) -> int:
        return int(torch.multinomial(probabilities, 1, generator=self._random))
