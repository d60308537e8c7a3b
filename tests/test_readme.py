# SPDX-License-Identifier: Apache-2.0
"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvtide.cli.main import VERBS
from kvtide.testing.node import served

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_prints_what_it_should(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with served(tmp_path, ["--dram-bytes-max", "256MiB"]) as node:
        ended = subprocess.run(
            [sys.executable, "-c", example],
            env={**os.environ, "KVTIDE_SOCKET": str(node.socket)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ended.returncode, ended.stdout) == (0, "23 of 23 blocks are here, without a copy\n"), ended.stderr


def test_every_verb_of_the_readme_exists() -> None:
    named = set(re.findall(r"bin/kvtide ([a-z]+)", README))
    assert {"serve", "status", "doctor"} <= named <= set(VERBS)


def test_every_command_of_the_readme_is_a_make_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
