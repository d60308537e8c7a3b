# SPDX-License-Identifier: Apache-2.0
"""The command `kvtide`. Imports only the verb that was asked for: `kvtide --help` stays fast, and a verb
whose packages are not installed stands in nobody's way.

Exit codes: 0 done, 1 the verb's own "no" (a bar was missed), 2 an error that the message explains,
130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from kvtide import __version__
from kvtide.errors import ConfigError, KvtideError

if TYPE_CHECKING:  # argparse has no public name for what add_subparsers() returns
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb lives, and its line in `kvtide --help`, which must not need the import."""

    module: str
    summary: str


VERBS: dict[str, Verb] = {
    "bench": Verb("kvtide.cli.bench", "measure kvtide on this machine, and hold it to its bars"),
    "demo": Verb("kvtide.cli.demo", "see blocks saved, found and fetched"),
    "serve": Verb("kvtide.cli.serve", "run the node service: one cache for all engines of this machine"),
    "engine": Verb("kvtide.cli.engine", "run a model behind OpenAI's API, with kvtide as its cache"),
    "doctor": Verb("kvtide.cli.doctor", "check this machine for what would slow kvtide down or stop it"),
    "status": Verb("kvtide.cli.status", "see what the service does at this moment"),
    "tier": Verb("kvtide.cli.tier", "take a tier out of use and back, or wait until it is written"),
    "lookup": Verb("kvtide.cli.lookup", "see on which tiers blocks are"),
    "warm": Verb("kvtide.cli.warm", "bring blocks up into DRAM"),
    "pin": Verb("kvtide.cli.pin", "keep blocks in DRAM for a time"),
    "clear": Verb("kvtide.cli.clear", "forget blocks on every tier"),
    "tenant": Verb("kvtide.cli.tenant", "see tenants, their quotas and their usage"),
    "share": Verb("kvtide.cli.share", "give a tenant's blocks to all who read a share group"),
    "token": Verb("kvtide.cli.token", "make a token, and the line that lets its owner in"),
}


class VerbModule(Protocol):
    """What the module of a verb offers."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the verb's own parser, under the verb's name."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code. KvtideError is for what the user can mend."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            # Here and not at the interpreter's exit, where a broken pipe could no longer be caught.
            sys.stdout.flush()
    except KvtideError as error:
        print(f"kvtide: error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would be flushed at exit, and complain again: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE


def _dispatch(argv: Sequence[str]) -> int:
    # The options before a verb all end the program, so a verb that is to run is the first word.
    chosen = argv[0] if argv and argv[0] in VERBS else None
    module = cast(VerbModule, import_module(VERBS[chosen].module)) if chosen else None
    args, unknown = _make_parser(chosen, module).parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        verb = f"kvtide {chosen}" if chosen else "kvtide"
        raise ConfigError(f"{word} is nothing that {verb} takes; {_nearest_flag(word, args)}")
    assert module is not None, "the parser lets nothing else pass"
    return module.run(args)


def _nearest_flag(unknown: str, args: argparse.Namespace) -> str:
    flags = [f"--{name.replace('_', '-')}" for name in vars(args)]
    near = get_close_matches(unknown, flags, 1)
    return f"did you mean {near[0]}?" if near else "see its --help"


def _make_parser(chosen: str | None, module: VerbModule | None) -> argparse.ArgumentParser:
    """Build the parser with all verbs; those that were not asked for are names with a summary only."""
    parser = argparse.ArgumentParser(prog="kvtide", description="The KV cache of LLM engines.")
    parser.add_argument("--version", action="version", version=f"kvtide {__version__}")
    subparsers = parser.add_subparsers(metavar="verb", required=True)
    for name, verb in VERBS.items():
        if module is not None and name == chosen:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=verb.summary)
    return parser
