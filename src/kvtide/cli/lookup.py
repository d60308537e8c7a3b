# SPDX-License-Identifier: Apache-2.0
"""`kvtide lookup`: on which tiers blocks are. Exits with 1 where none of them is anywhere."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, add_api_flags, add_format_flag, add_key_flags, blocks_of, print_json
from kvtide.cli.table import as_table, size

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_EXIT_NOTHING = 1


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("lookup", description="Show on which tiers blocks are.")
    add_key_flags(parser)
    add_format_flag(parser)
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    body = blocks_of(args)
    answer = AdminApi(args).call("POST", "/v1/lookup", body)
    if args.format == "json":
        print_json(answer)
    else:
        rows = [
            (key[:8], ", ".join(block["tiers"]) or "nowhere", size(block["frame_bytes"]))
            for key, block in zip(body["keys"], answer["blocks"], strict=True)
        ]
        print(as_table(("block", "tiers", "size"), rows))
        print(f"\n{answer['prefix_blocks']:,} of {len(rows):,} are there without a gap")
    return 0 if any(block["tiers"] for block in answer["blocks"]) else _EXIT_NOTHING
