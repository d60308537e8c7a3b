# SPDX-License-Identifier: Apache-2.0
"""`kvtide tenant`: who shares the service, what each may take, and what each took and saved."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, Answer, add_api_flags, add_format_flag, print_json, word
from kvtide.cli.table import as_table, size
from kvtide.config import values

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("tenant", description="Tenants and share groups, their quotas and their usage.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    for name, about in (
        ("list", "show tenants and share groups, with what they may take and use"),
        ("usage", "show what tenants took of the tiers, and what it saved them"),
    ):
        action = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        add_format_flag(action)
        add_api_flags(action)
    quota = actions.add_parser(
        "quota",
        help="change what a tenant may take, until the next restart",
        description="Change what a tenant may take of a tier, until the next restart. What shall stay stands in "
        "kvtide.yaml.",
    )
    quota.add_argument("name", metavar="NAME", help="of a tenant, or group:NAME")
    quota.add_argument("--tier", choices=["disk", "dram"], required=True)
    quota.add_argument("--scope", metavar="NAME", help="of a customer that has a share of its own")
    quota.add_argument(
        "--bytes-reserved", type=_size, default=0, metavar="SIZE", help="what nobody else can take (default: 0)"
    )
    quota.add_argument("--bytes-max", type=_size, metavar="SIZE", help="the most it can take (default: all)")
    add_api_flags(quota)


def run(args: argparse.Namespace) -> int:
    api = AdminApi(args)
    if args.action == "quota":
        body = {"tier": args.tier, "bytes_reserved": args.bytes_reserved, "bytes_max": args.bytes_max}
        body |= {"scope": args.scope} if args.scope is not None else {}
        answer = api.call("PUT", f"/v1/tenants/{word(args.name)}/quota", body)
        print(
            f"{answer['tenant']}: {size(answer['bytes_reserved'])} reserved, at most {size(answer['bytes_max'])} of "
            f"{answer['tier']}, until the next {answer['until']}"
        )
        return 0
    answer = api.get("/v1/tenants" if args.action == "list" else "/v1/usage")
    if args.format == "json":
        print_json(answer)
    else:
        print(_list(answer) if args.action == "list" else _usage(answer))
    return 0


def _list(answer: Answer) -> str:
    rows = [
        (
            tenant["name"],
            quota["scope"] or "",
            quota["tier"],
            size(quota["bytes_used"]),
            size(quota["bytes_reserved"]),
            size(quota["bytes_max"]),
            ", ".join(tenant["reads"]),
            sum(tenant["sessions"].values()),
        )
        for tenant in answer["tenants"]
        for quota in tenant["quotas"]
    ]
    return as_table(("tenant", "scope", "tier", "used", "reserved", "at most", "reads", "sessions"), rows)


def _usage(answer: Answer) -> str:
    tiers = sorted({tier for tenant in answer["tenants"] for tier in tenant["byte_seconds"]}, reverse=True)
    rows = [
        (
            tenant["tenant"],
            *(tenant["byte_seconds"].get(tier, 0.0) / (1 << 30) / 3600 for tier in tiers),
            tenant["blocks_served"],
            tenant["tokens_served"],
            "unknown" if tenant["compute_seconds_saved"] is None else f"{tenant['compute_seconds_saved']:,.1f} s",
        )
        for tenant in answer["tenants"]
    ]
    head = ("tenant", *(f"{tier} GiB h" for tier in tiers), "blocks served", "tokens served", "compute saved")
    return as_table(head, rows)


def _size(text: str) -> int:
    try:
        return values.size(text)
    except values.Unfit as error:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes {error}") from None
