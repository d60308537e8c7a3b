# SPDX-License-Identifier: Apache-2.0
"""From the body of a call to what the engine is asked for. Tokenises, so it belongs into a thread."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.engines.openai.bodies import ChatRequest, CompletionRequest, Sampled
from kvtide.engines.openai.refusal import Refusal, invalid
from kvtide.engines.openai.translator import Translator
from kvtide.engines.transformers.generation import Sampling

_COMPLETION_TOKENS = 16  # OpenAI's default; that of a chat is all that the context has left


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call: a prompt for each answer it wants."""

    is_chat: bool
    prompts: list[list[int]]
    samplings: list[Sampling]  # one for each prompt
    stops: list[str]
    scope: str
    is_stream: bool
    has_usage: bool  # also when it is a stream
    has_token_ids: bool = False


def task_of(asked: Sampled, translator: Translator, context_tokens: int) -> Task:
    """Raises Refusal for a prompt that has no tokens, or too many."""
    assert isinstance(asked, CompletionRequest | ChatRequest)
    if isinstance(asked, ChatRequest):
        is_open = asked.add_generation_prompt is not False
        prompts = [translator.encode_chat(asked.messages, add_generation_prompt=is_open)]
    else:
        prompts = _encoded(asked, translator)
    options = asked.stream_options
    return Task(
        is_chat=isinstance(asked, ChatRequest),
        prompts=prompts,
        samplings=[_sampling(asked, len(prompt), context_tokens) for prompt in prompts],
        stops=asked.stops,
        scope=asked.cache_salt or "",
        is_stream=bool(asked.stream),
        has_usage=not asked.stream or bool(options and options.include_usage),
        has_token_ids=bool(asked.return_token_ids),
    )


def _encoded(asked: CompletionRequest, translator: Translator) -> list[list[int]]:
    prompt = asked.prompt
    several: list[str | list[int]]
    if isinstance(prompt, str):
        several = [prompt]
    elif isinstance(prompt[0], int):
        several = [[token for token in prompt if isinstance(token, int)]]
    else:
        several = [each for each in prompt if not isinstance(each, int)]
    adds = asked.add_special_tokens is not False
    encoded = [translator.encode(each, add_special_tokens=adds) if isinstance(each, str) else each for each in several]
    if not all(encoded):
        raise invalid("the prompt has no tokens: send a longer one", "prompt")
    return encoded


def _sampling(asked: Sampled, prompt_tokens: int, context_tokens: int) -> Sampling:
    room = context_tokens - prompt_tokens
    wanted, field = asked.max_tokens, "max_tokens"
    if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
        wanted, field = asked.max_completion_tokens, "max_completion_tokens"
    if room < 1 or (wanted or 0) > room:
        raise _too_long(asked, field, wanted or 0, prompt_tokens, context_tokens)
    if wanted is None:
        wanted = room if isinstance(asked, ChatRequest) else min(_COMPLETION_TOKENS, room)
    return Sampling(
        max_tokens=wanted,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(asked.top_k or 0, 0),  # vLLM's -1 and 0 both mean all
        seed=asked.seed,
        stop_tokens=frozenset(asked.stop_token_ids or ()),
        ignores_end=bool(asked.ignore_eos),
    )


def _too_long(asked: Sampled, field: str, wanted: int, prompt_tokens: int, context_tokens: int) -> Refusal:
    """In the words by which clients know this error."""
    sentence = f"This model's maximum context length is {context_tokens} tokens, but the prompt has {prompt_tokens}"
    if (room := context_tokens - prompt_tokens) < 1:
        field = "messages" if isinstance(asked, ChatRequest) else "prompt"
        sentence += ", which leaves none for an answer: shorten it."
    else:
        sentence += f" and {field} asks for {wanted} more: ask for at most {room}."
    return invalid(sentence, field, "context_length_exceeded")
