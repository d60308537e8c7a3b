# SPDX-License-Identifier: Apache-2.0
"""`kvtide share`: give a tenant's blocks of a prompt to all who read a share group."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvtide.cli.admin_api import AdminApi, Answer, add_api_flags, add_place_flags, part_of, word
from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_EXIT_INCOMPLETE = 1
_FILE_CHARS_MAX = 4 << 20


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("share", description="Fill share groups.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    publish = actions.add_parser(
        "publish",
        help="copy a tenant's blocks of a prompt into a share group",
        description="Copy a tenant's blocks of a prompt into a share group. Exits with 1 when some are missing or "
        "have no room. Readers of the group trust the engines that wrote these blocks.",
    )
    publish.add_argument("group", metavar="GROUP")
    add_place_flags(publish)
    publish.add_argument("--block-tokens", type=int, required=True, metavar="N", help="tokens in a block")
    publish.add_argument(
        "--tokens", required=True, metavar="FILE", help="token ids of the prompt, with spaces between; - reads stdin"
    )
    publish.add_argument(
        "--part",
        type=part_of,
        action="append",
        metavar="NAME=N[,...]",
        help="which piece: group, rank, ranks, layer_first, layer_count; once for each (default: the whole)",
    )
    add_api_flags(publish)


def run(args: argparse.Namespace) -> int:
    body: Answer = {
        "tenant": args.tenant,
        "namespace": args.namespace,
        "scope": args.scope,
        "tokens": _read(args.tokens),
        "block_tokens": args.block_tokens,
    }
    if args.part:
        body["parts"] = args.part
    answer = AdminApi(args).call("POST", f"/v1/share-groups/{word(args.group)}/publish", body, 600.0)
    print(
        f"{args.group}: {answer['copied']:,} blocks copied, {answer['present']:,} there already, "
        f"{answer['missing']:,} missing, {answer['rejected']:,} without room"
    )
    return _EXIT_INCOMPLETE if answer["missing"] or answer["rejected"] else 0


def _read(path: str) -> str:
    try:
        if path == "-":
            text = sys.stdin.read(_FILE_CHARS_MAX + 1)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(_FILE_CHARS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tokens {path}: cannot be read: {error}") from error
    if len(text) > _FILE_CHARS_MAX:
        raise ConfigError(f"--tokens {path}: is longer than {_FILE_CHARS_MAX:,} characters, so no prompt")
    return text
