# SPDX-License-Identifier: Apache-2.0
"""What clients receive: OpenAI's shapes, and beside them what the cache did for the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Kvtide(Struct, frozen=True):
    """Seconds from taking up the request to its first token; tokens of the prompt by the tier that had them.

    `token_ids`: of each answer, for those who ask for them (`return_token_ids`).
    """

    ttft_s: float | None
    tokens_by_tier: Mapping[str, int]
    token_ids: list[list[int]] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    finish_reason: FinishReason | None
    logprobs: None = None


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: None = None


Choice = CompletionChoice | ChatChoice | ChatDelta


class Answer(Struct, frozen=True, kw_only=True):
    """A whole answer, or a piece of one. `usage` is null in the pieces before the one that has it."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    kvtide: Kvtide | UnsetType = UNSET


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvtide"
    max_model_len: int


class Models(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Struct, frozen=True, kw_only=True):
    prompt: str


class Health(Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
