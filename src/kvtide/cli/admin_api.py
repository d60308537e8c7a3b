# SPDX-License-Identifier: Apache-2.0
"""The admin API from the command line: where the service is, with which token, and what its answers mean.

A token goes to the service alone: not through a proxy, not along a redirect, and not to an address that a service
left behind when it was killed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import sys
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from kvtide.config.sources import load_settings
from kvtide.errors import ConfigError, Denied, Rejected, Unavailable

URL_ENV, TOKEN_ENV = "KVTIDE_ADMIN_URL", "KVTIDE_ADMIN_TOKEN"
_TIMEOUT_S = 60.0
_ANSWER_BYTES_MAX = 64 << 20
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Answer = dict[str, Any]


def add_api_flags(parser: argparse.ArgumentParser) -> None:
    """How to find the service. By default: that of this user."""
    group = parser.add_argument_group("the service")
    group.add_argument("--folder", metavar="DIR", help="its folder (default: as for `kvtide serve`)")
    group.add_argument("--config", metavar="FILE", help="its settings in YAML, which name the folder")
    group.add_argument("--url", metavar="URL", help=f"its admin side (default: {URL_ENV}, or admin.url in the folder)")


def add_format_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=["table", "json"], default="table", help="default: table")


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """Whose blocks."""
    parser.add_argument("--tenant", default="default", metavar="NAME", help="or group:NAME (default: default)")
    parser.add_argument("--namespace", required=True, type=_hex, metavar="HEX", help="digest of model and KV format")
    parser.add_argument("--scope", default="", metavar="NAME", help="customer inside the tenant (default: none)")


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Which blocks."""
    add_place_flags(parser)
    parser.add_argument(
        "--part",
        type=part_of,
        default={},
        metavar="NAME=N[,...]",
        help="which piece: group, rank, ranks, layer_first, layer_count (default: the whole)",
    )
    parser.add_argument("keys", nargs="+", metavar="KEY", help="in hex, in the order of the chain; - reads stdin")


def blocks_of(args: argparse.Namespace) -> Answer:
    """The body of a call about blocks."""
    words = [word for given in args.keys for word in (sys.stdin.read().split() if given == "-" else [given])]
    for word in words:
        if not _KEY.fullmatch(word):
            raise ConfigError(f"{word[:16]!r} is no key: a key has 64 hex digits")
    body: Answer = {"tenant": args.tenant, "namespace": args.namespace, "scope": args.scope}
    return body | {"keys": [word.lower() for word in words]} | ({"part": args.part} if args.part else {})


def part_of(text: str) -> dict[str, int]:
    part: dict[str, int] = {}
    for piece in text.split(","):
        name, _, number = piece.partition("=")
        if not number.isdigit():
            raise argparse.ArgumentTypeError(f"{piece!r} is not NAME=N, as in rank=1,ranks=8")
        part[name.strip()] = int(number)
    return part


def _hex(text: str) -> str:
    if not _KEY.fullmatch(text):
        raise argparse.ArgumentTypeError("a digest has 64 hex digits")
    return text.lower()


def word(name: str) -> str:
    """A name as it stands in a path."""
    return quote(name, safe=":")


class AdminApi:
    """Calls to one service."""

    def __init__(self, args: argparse.Namespace) -> None:
        url: str | None = args.url or os.environ.get(URL_ENV)
        token = os.environ.get(TOKEN_ENV)
        if url is None:
            folder = _folder(args)
            url = _running_url(folder)
            token = token or _local_token(folder)
        elif token is None:
            if urlsplit(url).hostname not in _LOOPBACK:
                raise ConfigError(f"{url} is no address of this machine: set {TOKEN_ENV} to a token of its own")
            token = _local_token(_folder(args))
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"{url} is no address of an admin side: write http://127.0.0.1:9733")
        self._url = url.rstrip("/")
        self._token = token
        self._opener = build_opener(ProxyHandler({}), _NoRedirect())

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Answer | None = None, timeout_s: float = _TIMEOUT_S) -> Answer:
        """The answer. Raises KvtideError in the words of the service, or Unavailable when there is none."""
        request = Request(f"{self._url}{path}", method=method, headers={"Authorization": f"Bearer {self._token}"})
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                answer: Answer = json.loads(response.read(_ANSWER_BYTES_MAX))
                return answer
        except HTTPError as error:
            with error:
                _refuse(error.code, error.read(1 << 20))
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Unavailable(f"nobody answers at {self._url}: {reason}; is `kvtide serve` running?") from error
        except ValueError as error:
            raise Unavailable(f"{self._url} is no kvtide: its answer is no JSON") from error
        raise AssertionError("_refuse raises")


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _refuse(status: int, body: bytes) -> None:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise Unavailable(f"the service answered with status {status} and no reason; is it a kvtide?") from None
    raise (Denied if status in (401, 403) else Unavailable if status >= 500 else Rejected)(message)


def _folder(args: argparse.Namespace) -> Path:
    return Path(load_settings(args).folder).expanduser()


def _running_url(folder: Path) -> str:
    try:
        with (folder / "admin.url").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(4096).strip()  # its service holds the lock, so it lives
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Denied(
            f"{folder}/admin.url cannot be read: {error.strerror}; be the user of the service, or set {URL_ENV} and "
            f"{TOKEN_ENV}"
        ) from error
    raise Unavailable(
        f"no service with an admin side runs in {folder}: start `kvtide serve`, or name another one (--folder, --url)"
    )


def _local_token(folder: Path) -> str:
    try:
        return (folder / "admin.token").read_text().strip()
    except OSError as error:
        raise Denied(
            f"{folder}/admin.token cannot be read: {error.strerror}; be the user of the service, or set {TOKEN_ENV}"
        ) from error


def print_json(answer: object) -> None:
    print(json.dumps(answer, indent=2))
