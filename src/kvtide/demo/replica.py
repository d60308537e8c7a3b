# SPDX-License-Identifier: Apache-2.0
"""An engine as its users meet it: a process, an address, an answer that streams."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.errors import KvtideError
from kvtide.testing.engine import ServedEngine

_ANSWER_S = 900.0
_LOOK_S = 0.25
_COMPUTED = re.compile(r"^kvtide_engine_computed_tokens_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and when the first of it did."""

    text: str
    tokens: Sequence[int]
    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    by_tier: Mapping[str, int]


def ask(
    engine: ServedEngine, prompt: Sequence[int], tokens_max: int, progress: Callable[[int], None] = lambda _: None
) -> Answer:
    """Ask for a completion, greedy. `progress` hears how many tokens of the prompt are computed."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(engine, progress, ended), name="kvtide-demo-watch")
    watch.start()
    try:
        return _ask(engine, prompt, tokens_max)
    finally:
        ended.set()
        watch.join()


def _ask(engine: ServedEngine, prompt: Sequence[int], tokens_max: int) -> Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens_max,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=_ANSWER_S)
    try:
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise KvtideError(f"the engine refused a question: {response.read(2000).decode(errors='replace')}")
        text, first_s = "", None
        usage: dict[str, Any] = {}
        details: dict[str, Any] = {}
        for event in _events(response):
            for choice in event["choices"]:
                if first_s is None:
                    first_s = time.monotonic() - began_s
                text += choice["text"]
            usage = event.get("usage") or usage
            details = event.get("kvtide") or details
    except OSError as error:
        raise KvtideError(f"the engine went away in the middle of an answer ({error}): see {engine.log}") from error
    finally:
        connection.close()
    return Answer(
        text,
        details["token_ids"][0],
        first_s if first_s is not None else time.monotonic() - began_s,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        details["tokens_by_tier"],
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events, as OpenAI's API sends them."""
    for line in response:
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                return
            yield json.loads(line[6:])


def _watch(engine: ServedEngine, progress: Callable[[int], None], ended: threading.Event) -> None:
    before = _computed(engine)
    while not ended.wait(_LOOK_S):
        now = _computed(engine)
        if before is not None and now is not None:
            progress(int(now - before))


def _computed(engine: ServedEngine) -> float | None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5.0)
    try:
        connection.request("GET", "/metrics")
        found = _COMPUTED.search(connection.getresponse().read().decode())
        return float(found.group(1)) if found else None
    except OSError:
        return None  # it is busy; there is a next time
    finally:
        connection.close()
