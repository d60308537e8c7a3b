# SPDX-License-Identifier: Apache-2.0
"""What docs/engines.md shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvtide.testing.node import served

DOC = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def test_the_example_runs_with_a_service_and_without(tmp_path: Path, smollm2_folder: Path) -> None:
    del smollm2_folder  # it is converted now
    (example,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    with served(tmp_path) as node:
        texts = [_run(example, str(node.socket)), _run(example, str(tmp_path / "nobody.sock"))]
    assert texts[0] == texts[1]
    assert texts[0].endswith("Reuse(tokens=0, by_tier={})\n")
    assert len(texts[0].split()) > 10


def _run(example: str, socket: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", example],
        env={**os.environ, "KVTIDE_SOCKET": socket},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
