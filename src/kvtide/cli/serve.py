# SPDX-License-Identifier: Apache-2.0
"""`kvtide serve`: the node service in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from typing import TYPE_CHECKING

from kvtide import __version__
from kvtide.config import DiskSettings, Settings
from kvtide.config.sources import add_flags, load_settings
from kvtide.node.serve import Node, open_node

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the node service: one cache for all engines of this machine",
        description="Run the node service in the foreground. Without any setting it works: sizes by what the machine "
        "has, everything in ~/.cache/kvtide. SIGTERM ends it cleanly: what is in DRAM goes to disk first.",
    )
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info", help="default: info"
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    settings = load_settings(args, base=Settings(disk=DiskSettings()))
    with open_node(settings, on_drain=_say_drain) as node:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.service.stop())
        print(summary(node), flush=True)
        node.service.run()
    print("kvtide: ended cleanly", flush=True)
    return 0


def _say_drain(drain_s: float) -> None:
    print(f"kvtide: writing what is in DRAM to disk, for at most {drain_s:g} s", flush=True)


def summary(node: Node) -> str:
    """What was started, and what to paste where."""
    settings = node.settings
    arenas = {domain.name: domain.store.dram.bytes_max for domain in node.domains}
    disk = settings.disk
    lines = [
        f"kvtide {__version__} serves {settings.node.socket}",
        f"  dram   {_size(sum(arenas.values()))} in {len(arenas)} arena{'s' * (len(arenas) > 1)}"
        + (f": {', '.join(f'{name} {_size(size)}' for name, size in arenas.items())}" if settings.tenants else ""),
    ]
    if disk is not None and disk.bytes_max is not None:
        blocks = node.domains.disk_blocks()
        lines.append(f"  disk   {_size(disk.bytes_max)} in {disk.folder}, {blocks:,} blocks there already")
    else:
        lines.append("  disk   none")
    lines += [
        "",
        "An engine of yours, in Python:",
        "  from kvtide.client import connect",
        f'  cache = connect("unix:{settings.node.socket}")',
        "",
    ]
    return "\n".join(lines)


def _size(size_bytes: int) -> str:
    for unit, factor in _UNITS:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} bytes"
