# SPDX-License-Identifier: Apache-2.0
"""`kvtide status`: what the service of this machine does at this moment."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, Answer, add_api_flags, add_format_flag, print_json
from kvtide.cli.table import as_table, duration, size

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("status", description="Show sessions, tiers, queues and leases of the service.")
    add_format_flag(parser)
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    status = AdminApi(args).get("/v1/status")
    if args.format == "json":
        print_json(status)
    else:
        print(text(status))
    return 0


def text(status: Answer) -> str:
    serving = "serves" if status["is_serving"] else "does not serve"
    pieces = [
        f"kvtide {status['version']} {serving} {status['socket']} for {duration(status['uptime_s'])}",
        as_table(
            ("tier", "blocks", "used", "of", "evicted", "state"),
            [
                (
                    tier["name"],
                    tier["blocks"],
                    size(tier["bytes_used"]),
                    size(tier["bytes_max"]),
                    tier["evicted_blocks"],
                    "bypassed" if tier["is_bypassed"] else "in use",
                )
                for tier in status["tiers"]
            ],
        ),
        as_table(
            ("tenant", "blocks", "used", "of", "leases", "pinned", "quarantined", "to spill"),
            [
                (
                    store["tenant"],
                    store["blocks"],
                    size(store["bytes_used"]),
                    size(store["bytes_max"]),
                    store["leases"],
                    size(store["pinned_bytes"]),
                    size(store["quarantined_bytes"]),
                    size(sum(spill["queued_bytes"] for spill in store["spill"])),
                )
                for store in status["stores"]
            ],
        ),
    ]
    sessions = [(each["tenant"], each["role"], each["sessions"]) for each in status["sessions"]]
    pieces.append(as_table(("tenant", "role", "sessions"), sessions) if sessions else "no sessions")
    if status["sessions_lingering"]:
        pieces.append(f"{status['sessions_lingering']} sessions are over, but their processes may still copy")
    return "\n\n".join(pieces)
