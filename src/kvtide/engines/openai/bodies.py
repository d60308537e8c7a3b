# SPDX-License-Identifier: Apache-2.0
"""What clients send, and how it is read: strictly where it matters, with the name of the field that is wrong.

Fields that would change the answer and that this engine cannot honour are refused; all others that are not known are
ignored, as clients send many.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from kvtide.engines.openai.refusal import invalid

T = TypeVar("T")

PROMPTS_MAX = 16
MESSAGES_MAX = 4096
STOPS_MAX = 4
STOP_CHARS_MAX = 1024

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tokens = list[Token]
Text = str | None
# What a scope may be called, by vLLM's rules: others of the fleet must be able to use the same one.
CacheSalt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]

# Fields that would change the answer, and the values with which they do not (null never does).
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_HARMLESS_BYTES_MAX = 64  # no harmless value is longer
_NOT_THERE = Raw(b"null")
_Unsupported = msgspec.defstruct("_Unsupported", [(name, Raw, _NOT_THERE) for name in _UNSUPPORTED])
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(.*?)`")


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class Sampled(Struct, frozen=True, kw_only=True):
    """What both ways to ask for an answer have in common."""

    model: Text = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[Tokens, Meta(max_length=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(Sampled, frozen=True, kw_only=True):
    """`prompt`: a text or its tokens, or several of these."""

    prompt: str | list[Token | str | Tokens]
    add_special_tokens: bool | None = None


class Part(Struct, frozen=True):
    type: str
    text: Text = None


class Message(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    tool_calls: Raw = _NOT_THERE


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]


class ChatRequest(Sampled, frozen=True, kw_only=True):
    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """A text as /v1/completions takes it, or messages as /v1/chat/completions does."""

    model: Text = None
    prompt: Text = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: Text = None
    tokens: Tokens


def read(request: type[T], body: bytes) -> T:
    """The body of a call. Raises Refusal (400) that names the field."""
    try:
        asked = msgspec.json.decode(body, type=request)
        if issubclass(request, Sampled):
            _check_supported(msgspec.json.decode(body, type=_Unsupported))
    except msgspec.ValidationError as error:
        raise invalid(*_explained(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply: send a flat object", code="invalid_json") from None
    if isinstance(asked, Sampled):
        _check(asked)
    return asked


def _explained(message: str) -> tuple[str, str | None]:
    """msgspec's sentence with the field in front, and that field."""
    place = _PLACE.search(message)
    missing = _MISSING.search(message)
    what = message[: place.start()] if place else message
    where = place[1] if place else ""
    if missing:
        where = f"{where}.{missing[1]}".lstrip(".")
        return f"{where} is missing: send it", where
    what = what[:1].lower() + what[1:]
    return (f"{where}: {what}", where) if where else (f"the body: {what}", None)


def _check_supported(fields: Any) -> None:
    for name, harmless in _UNSUPPORTED.items():
        raw: Raw = getattr(fields, name)
        if not _is_harmless(raw, harmless):
            allowed = "" if not harmless else f", or send {msgspec.json.encode(harmless[0]).decode()}"
            raise invalid(f"{name} is nothing this engine can do: leave it out{allowed}", name, "unsupported_parameter")


def _is_harmless(raw: Raw, harmless: tuple[object, ...] = ()) -> bool:
    if len(bytes(raw)) > _HARMLESS_BYTES_MAX:
        return False
    value = msgspec.json.decode(raw)
    # 0 is equal to false, and asks for something else.
    return value is None or any(type(value) is type(each) and value == each for each in harmless)


def _check(asked: Sampled) -> None:
    if len(asked.stops) > STOPS_MAX:
        raise invalid(f"stop has {len(asked.stops)} strings: send at most {STOPS_MAX}", "stop")
    if not all(0 < len(stop) <= STOP_CHARS_MAX for stop in asked.stops):
        raise invalid(f"stop: each string has 1 to {STOP_CHARS_MAX:,} characters", "stop")
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options goes with stream: true only: leave it out", "stream_options")
    if isinstance(asked, CompletionRequest):
        _check_prompt(asked.prompt)
    if isinstance(asked, ChatRequest):
        check_messages(asked.messages)


def _check_prompt(prompt: str | list[int | str | list[int]]) -> None:
    if isinstance(prompt, str) or all(isinstance(each, int) for each in prompt):
        if not prompt:
            raise invalid("prompt is empty: send a text, or at least one token", "prompt")
        return
    if any(isinstance(each, int) for each in prompt):
        raise invalid("prompt mixes tokens with texts or lists: send one kind", "prompt")
    if len(prompt) > PROMPTS_MAX:
        raise invalid(f"prompt has {len(prompt):,} entries: send at most {PROMPTS_MAX} at a time", "prompt")
    if not all(prompt):
        raise invalid("prompt has an empty entry: send a text, or at least one token", "prompt")


def check_messages(messages: list[Message]) -> None:
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not _is_harmless(message.tool_calls, ([],)):
            raise invalid(
                f"{where}.tool_calls is nothing this engine can do: leave it out",
                f"{where}.tool_calls",
                "unsupported_parameter",
            )
        if isinstance(message.content, str):
            continue
        for part, each in enumerate(message.content):
            if each.type != "text" or each.text is None:
                place = f"{where}.content[{part}]"
                kind = "has no text" if each.type == "text" else "is no text"
                raise invalid(f'{place} {kind}: this engine reads {{"type": "text", "text": "…"}} only', place)
