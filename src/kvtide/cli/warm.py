# SPDX-License-Identifier: Apache-2.0
"""`kvtide warm`: bring blocks up into DRAM before somebody asks for them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, add_api_flags, add_key_flags, blocks_of

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("warm", description="Bring blocks up into DRAM. Returns when that has begun.")
    add_key_flags(parser)
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    body = blocks_of(args)
    answer = AdminApi(args).call("POST", "/v1/warm", body)
    print(f"{answer['blocks']:,} of {len(body['keys']):,} blocks are in DRAM or on their way")
    return 0
