# SPDX-License-Identifier: Apache-2.0
"""`kvtide token`: make a random token, and the line of kvtide.yaml that lets its owner in. Needs no service."""

from __future__ import annotations

import argparse
import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "token",
        description="Make a random token. The token goes to its owner, the line goes into kvtide.yaml, under an entry "
        "of tenants.NAME.clients or admin.clients. It is kept nowhere.",
    )


def run(_args: argparse.Namespace) -> int:
    token = secrets.token_hex(32)
    print(token)
    print(f"token_sha256: {sha256(token.encode()).hexdigest()}")
    return 0
