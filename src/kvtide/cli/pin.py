# SPDX-License-Identifier: Apache-2.0
"""`kvtide pin`: keep blocks in DRAM for a time, whatever else wants the room."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, add_api_flags, add_format_flag, add_key_flags, blocks_of, print_json, word
from kvtide.cli.table import as_table, duration, size

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("pin", description="Keep blocks in DRAM for a time. A restart ends all pins.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    add = actions.add_parser("add", help="pin blocks", description="Pin blocks, bringing up what is lower.")
    add.add_argument("--ttl-s", type=float, required=True, metavar="N", help="for how many seconds")
    add_key_flags(add)
    add_api_flags(add)
    shown = actions.add_parser("list", help="show the pins that are set", description="Show the pins that are set.")
    add_format_flag(shown)
    add_api_flags(shown)
    remove = actions.add_parser("remove", help="end a pin", description="End a pin before its time.")
    remove.add_argument("id", metavar="ID", help="as `kvtide pin list` shows it")
    add_api_flags(remove)


def run(args: argparse.Namespace) -> int:
    if args.action == "add":
        body = blocks_of(args) | {"ttl_s": args.ttl_s}
        pin = AdminApi(args).call("POST", "/v1/pins", body)
        print(f"{pin['id']}: {pin['blocks']:,} of {len(body['keys']):,} blocks, {size(pin['bytes'])}")
    elif args.action == "remove":
        answer = AdminApi(args).call("DELETE", f"/v1/pins/{word(args.id)}")
        print(f"{answer['blocks']:,} blocks may leave again")
    else:
        answer = AdminApi(args).get("/v1/pins")
        if args.format == "json":
            print_json(answer)
            return 0
        rows = [
            (pin["id"], pin["tenant"], pin["blocks"], size(pin["bytes"]), duration(pin["expires_s"]))
            for pin in answer["pins"]
        ]
        print(as_table(("id", "tenant", "blocks", "size", "ends in"), rows) if rows else "no pins")
    return 0
