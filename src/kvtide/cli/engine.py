# SPDX-License-Identifier: Apache-2.0
"""`kvtide engine`: a model behind OpenAI's HTTP API, with kvtide as its cache, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide import __version__
from kvtide.cache import Cache
from kvtide.cli.table import size
from kvtide.client.client import DEFAULT_SOCKET, connect
from kvtide.config import DramSettings, Settings
from kvtide.engines.openai import App, Gate, Served, Translator, is_loopback, serving, taken_port
from kvtide.errors import ConfigError, MissingExtra, Unavailable
from kvtide.node.secrets import given_secret

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers
    from kvtide.engines.transformers.loading import Loaded

log = logging.getLogger(__name__)

KEY_ENV = "KVTIDE_API_KEY"
_EMBEDDED_BYTES = 512 << 20
_LOOK_S = 1.0


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "engine",
        help="run a model behind OpenAI's API, with kvtide as its cache",
        description="Run a model by transformers behind OpenAI's HTTP API, in the foreground. It finds this user's "
        "node service by itself (`kvtide serve`), also when that starts later. SIGTERM lets requests end, for some "
        "seconds.",
    )
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a folder with a model, or a name on the hub; default: smollm2"
    )
    parser.add_argument("--name", help="what clients call it; default: the last word of --model, or its hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on, 0: any; default: 8000")
    parser.add_argument(
        "--cache",
        default="auto",
        metavar="{auto,none,embedded,unix:PATH}",
        help="auto: this user's node service; none; embedded: some DRAM of this process; unix:PATH: the service there",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="auto: the model's own, or float32 on a CPU that cannot multiply in that",
    )
    parser.add_argument("--context", type=_count, metavar="TOKENS", help="longest prompt and answer; default: model's")
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads of the model; default: all cores")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"file with the key that calls must bring; or set {KEY_ENV}"
    )
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info", help="default: info"
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each file that the hub is asked for
    key = _api_key(args.api_key_file)
    with taken_port(args.host, args.port) as listener, ExitStack() as stack:
        if key is None and not is_loopback(args.host):
            log.warning("engine.open host=%s: whoever reaches this address can use it; --api-key-file", args.host)
        cache, cache_line = _open_cache(args.cache, stack)
        loaded = _load(args, cache)
        stack.callback(loaded.engine.close)
        served = Served(
            name=args.name or _name(args.model),
            engine=loaded.engine,
            translator=Translator(loaded.tokenizer),
            dtype=loaded.dtype,
            created_s=int(time.time()),
        )
        with serving(App(served, Gate(args.host, key)), listener) as server:
            must_end = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: must_end.set())
            print(summary(served, loaded, cache_line, server.url, _key_words(args, key)), flush=True)
            while not must_end.wait(_LOOK_S):
                if not server.is_alive:
                    raise Unavailable("the HTTP server has ended by itself; the log says more")
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one is for the impatient
            print("kvtide: letting requests end, for a few seconds", flush=True)
    print("kvtide: ended cleanly", flush=True)
    return 0


def summary(served: Served, loaded: Loaded, cache_line: str, url: str, key_words: str) -> str:
    """What was started, and what to paste where."""
    can_chat = bool(loaded.tokenizer.chat_template)
    body = (
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
        if can_chat
        else '{"prompt": "The sky is blue because", "max_tokens": 64}'
    )
    path = "chat/completions" if can_chat else "completions"
    lines = [
        f"kvtide {__version__} serves {served.name} at {url}/v1",
        f"  model  {loaded.folder}, a context of {served.engine.context_tokens:,} tokens",
        f"  dtype  {loaded.dtype}",
        f"  cache  {cache_line}",
        "",
        "Ask it something:",
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' {key_words}-d {shlex.quote(body)}",
        "",
    ]
    return "\n".join(lines)


def _open_cache(wanted: str, stack: ExitStack) -> tuple[Cache | None, str]:
    """The cache, closed by `stack`, and its line of the summary."""
    if wanted == "none":
        return None, "none"
    if wanted == "embedded":
        try:
            from kvtide.store import open_store
        except ImportError as error:
            raise MissingExtra("an embedded cache needs xxhash: pip install 'kvtide[serve]'") from error
        store = open_store(Settings(dram=DramSettings(bytes_max=_EMBEDDED_BYTES)))
        stack.callback(store.close)
        return store, f"{size(_EMBEDDED_BYTES)} of DRAM in this process, gone when it ends"
    if wanted != "auto" and not wanted.startswith("unix:"):
        raise ConfigError(f"--cache {wanted} is nothing kvtide knows: write auto, none, embedded or unix:/path/to.sock")
    where = os.environ.get("KVTIDE_SOCKET") or DEFAULT_SOCKET if wanted == "auto" else wanted
    client = connect(where, must_answer=False)
    stack.callback(client.close)
    place = where.removeprefix("unix:")
    if client.is_connected:
        return client, f"the node service at {place}"
    return client, f"none yet: nobody answers at {place}, and it goes on looking (`kvtide serve` starts one)"


def _load(args: argparse.Namespace, cache: Cache | None) -> Loaded:
    from kvtide.engines.transformers.model_folder import model_folder

    told = ""

    def tell(what: str, _done: float = 0.0) -> None:
        nonlocal told
        if what != told:
            print(f"kvtide: {what}", file=sys.stderr, flush=True)
        told = what

    tell("loading transformers")
    try:
        import torch
        from transformers.utils.logging import disable_progress_bar

        from kvtide.engines.transformers.engine import EngineSettings
        from kvtide.engines.transformers.loading import load
    except ImportError as error:
        raise MissingExtra("running models needs torch and transformers: pip install 'kvtide[engine]'") from error
    disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = model_folder(args.model, progress=tell)
    tell(f"loading {folder}")
    try:
        return load(folder, dtype=args.dtype, cache=cache, settings=EngineSettings(context_tokens=args.context))
    except (OSError, ValueError) as error:  # what transformers makes of files that are not what they should be
        reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise ConfigError(f"model: {folder} cannot be loaded: {reason}") from error


def _name(model: str) -> str:
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _api_key(path: Path | None) -> str | None:
    if path is None and not os.environ.get(KEY_ENV):
        return None
    source = KEY_ENV if path is None else str(path)
    key = os.environ[KEY_ENV] if path is None else given_secret(path).decode("utf-8", "replace")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"the key in {source} cannot stand in a header: give it letters and digits only")
    return key


def _key_words(args: argparse.Namespace, key: str | None) -> str:
    """For the shell, without the key."""
    if key is None:
        return ""
    source = f"${KEY_ENV}" if args.api_key_file is None else f"$(cat {shlex.quote(str(args.api_key_file))})"
    return f'-H "Authorization: Bearer {source}" '


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is no port: give 0 to 65535")
    return port


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is too little: give 1 or more")
    return count
