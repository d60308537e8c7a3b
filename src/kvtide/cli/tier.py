# SPDX-License-Identifier: Apache-2.0
"""`kvtide tier`: take a tier out of use and back, or wait until it has what it shall have."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, add_api_flags, word
from kvtide.cli.table import size

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_EXIT_NOT_DRAINED = 1


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("tier", description="Take a tier out of use, or wait for what goes down to it.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    for name, about in (
        ("bypass", "take a tier out of use: nothing is found there or written there"),
        ("resume", "take it back into use, with what it held"),
        ("drain", "wait until what is queued for it is written; exits with 1 when the time was too short"),
    ):
        action = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        action.add_argument("name", metavar="NAME", help="such as disk")
        if name == "drain":
            action.add_argument("--timeout-s", type=float, default=30.0, metavar="N", help="default: 30")
        add_api_flags(action)


def run(args: argparse.Namespace) -> int:
    api, path = AdminApi(args), f"/v1/tiers/{word(args.name)}"
    if args.action == "drain":
        body = {"timeout_s": args.timeout_s}
        answer = api.call("POST", f"{path}/drain", body, args.timeout_s + 10)
        if not answer["is_drained"]:
            print(f"{args.name}: {size(answer['queued_bytes'])} still wait to be written")
            return _EXIT_NOT_DRAINED
        print(f"{args.name}: nothing waits to be written")
        return 0
    is_off = args.action == "bypass"
    api.call("POST", f"{path}/bypass", {"on": is_off})
    print(f"{args.name} is {'out of use: `kvtide tier resume` takes it back' if is_off else 'in use'}")
    return 0
