# SPDX-License-Identifier: Apache-2.0
"""`kvtide doctor`: look at this machine with the eyes of the service, and say what to mend.

Findings go to stdout, progress to stderr and only to a terminal. Takes the same settings as `kvtide serve`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtide.bench.progress import Progress
from kvtide.config import DiskSettings, Settings
from kvtide.config.defaults import resolve
from kvtide.config.sources import add_flags, load_settings
from kvtide.node.doctor import Finding, examine

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_DESCRIPTION = """\
Check this machine for what would slow kvtide down or stop it, with the settings of `kvtide serve`.
Changes nothing. Writes and reads 256 MiB in the disk folder, unless --quick. Exits with 1 where something is bad."""

_EXIT_BAD = 1


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="do not measure the disk")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="default: table")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    settings = resolve(load_settings(args, base=Settings(disk=DiskSettings())))
    settings.check()
    progress = Progress(sys.stderr) if sys.stderr.isatty() else None
    findings = list(examine(settings, is_quick=args.quick, progress=progress.update if progress else _be_silent))
    if progress is not None:
        progress.clear()
    if args.format == "json":
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(as_table(findings))
    return _EXIT_BAD if any(finding.state == "bad" for finding in findings) else 0


def as_table(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:4}  {finding.name:{width}}  {finding.what}")
        if finding.mend:
            lines.append(f"{'':{width + 8}}{finding.mend}")
    return "\n".join(lines)


def _be_silent(_text: str) -> None:
    """Nobody watches."""
