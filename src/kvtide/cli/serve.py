# SPDX-License-Identifier: Apache-2.0
"""`kvtide serve`: the node service in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtide import __version__
from kvtide.cli.table import size
from kvtide.config import DiskSettings, Settings
from kvtide.config.sources import add_flags, load_settings
from kvtide.node.serve import Node, open_node

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


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
    if settings.admin.is_on:
        import kvtide.node.admin  # noqa: F401  # before open_node, which tells the collector to leave alone what is there
    with open_node(settings, on_drain=_say_drain) as node, _admin(node) as admin_url:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.service.stop())
        print(summary(node, admin_url), flush=True)
        node.service.run()
    print("kvtide: ended cleanly", flush=True)
    return 0


@contextmanager
def _admin(node: Node) -> Iterator[str | None]:
    """The HTTP side. Gone before DRAM is spilled: from then on there is nothing to ask."""
    if not node.settings.admin.is_on:
        yield None
        return
    from kvtide.node.admin import open_admin

    with open_admin(node) as url:
        yield url


def _say_drain(drain_s: float) -> None:
    print(f"kvtide: writing what is in DRAM to disk, for at most {drain_s:g} s", flush=True)


def summary(node: Node, admin_url: str | None) -> str:
    """What was started, and what to paste where."""
    settings = node.settings
    arenas = {domain.name: domain.store.dram.bytes_max for domain in node.domains}
    disk = settings.disk
    lines = [
        f"kvtide {__version__} serves {settings.node.socket}",
        f"  dram   {size(sum(arenas.values()))} in {len(arenas)} arena{'s' * (len(arenas) > 1)}"
        + (f": {', '.join(f'{name} {size(room)}' for name, room in arenas.items())}" if settings.tenants else ""),
    ]
    if disk is not None and disk.bytes_max is not None:
        blocks = node.domains.disk_blocks()
        lines.append(f"  disk   {size(disk.bytes_max)} in {disk.folder}, {blocks:,} blocks there already")
    else:
        lines.append("  disk   none")
    if admin_url is not None:
        lines.append(f"  admin  {admin_url}, with the token in {settings.folder}/admin.token")
    lines += [
        "",
        "A model of transformers behind an OpenAI-compatible server:",
        f"  kvtide engine --model smollm2 --cache unix:{settings.node.socket}",
        "In your own process:",
        "  from kvtide.client import connect",
        "  from kvtide.engines.transformers import load",
        f'  loaded = load(folder, cache=connect("unix:{settings.node.socket}"))',
        "",
    ]
    return "\n".join(lines)
