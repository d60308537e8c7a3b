# SPDX-License-Identifier: Apache-2.0
"""`kvtide clear`: forget blocks on every tier. Asks first, where somebody can answer."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, Answer, add_api_flags
from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_EXIT_NO = 1


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "clear", description="Forget blocks on every tier, for good: after it returned no crash brings them back."
    )
    parser.add_argument("--tenant", required=True, metavar="NAME", help='whose; group:NAME, or "*" for all')
    parser.add_argument("--namespace", metavar="HEX", help="only of this model and KV format")
    parser.add_argument("--prefix", metavar="KEY", help="only this block, and those that follow it in their chains")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    body: Answer = {"tenant": args.tenant}
    body |= {name: text.lower() for name in ("namespace", "prefix") if (text := getattr(args, name)) is not None}
    api = AdminApi(args)
    if not args.yes and not _is_sure(body):
        print("nothing was cleared", file=sys.stderr)
        return _EXIT_NO
    answer = api.call("POST", "/v1/clear", body, 120.0)
    print(f"{answer['blocks']:,} blocks are forgotten, copies on several tiers counted each")
    return 0


def _is_sure(body: Answer) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask whether to clear: say so with --yes")
    whose = "all tenants" if body["tenant"] == "*" else f"tenant {body['tenant']}"
    which = "some" if len(body) > 1 else "ALL"
    answer = input(f"Forget {which} blocks of {whose} on every tier? [y/N] ")
    return answer.strip().lower() in ("y", "yes")
