# SPDX-License-Identifier: Apache-2.0
"""What the demonstration found: one row for each question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One question. `tier`: where most of the reused tokens were; empty: none were."""

    name: str
    question: str
    answer: str
    ttft_s: float
    ttft_without_s: float  # cold, without kvtide; measured once, with the first question
    prompt_tokens: int
    tokens_reused: int
    tier: str
    identical: bool

    @property
    def speedup(self) -> float:
        return self.ttft_without_s / self.ttft_s


def write_json(path: Path, about: dict[str, object], rows: Sequence[Row]) -> None:
    content = {**about, "rows": [{**asdict(row), "speedup": round(row.speedup, 2)} for row in rows]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
