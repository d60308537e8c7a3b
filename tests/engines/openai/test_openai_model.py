# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against `kvtide engine` with a real model and a cache in its process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from transformers import AutoTokenizer

from kvtide.engines.openai import Translator
from kvtide.testing.engine import ServedEngine

KEY = "a-key-that-nobody-guesses"
# A piece of a prompt with fewer than sixteen tokens takes a CPU seconds: prompts have a few more than that.
BEGINNING = "Here is a sentence that somebody began to write a long time ago, and then left unfinished. "
ENDLESS = "Count on and on, one number after the other: 1, 2, 3, 4, 5, 6, 7,"
STORY = "The old lighthouse keeper counted the ships that passed in the night, one by one. "
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="session")
def engine(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    folder = tmp_path_factory.mktemp("engine")
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    with ServedEngine(folder / "log", "smollm2", "--cache", "embedded", "--api-key-file", str(key)) as engine:
        yield engine
        assert engine.stop() == 0
    output = engine.log.read_text()
    assert output.endswith("kvtide: ended cleanly\n")
    assert KEY not in output


@pytest.fixture(scope="session")
def client(engine: ServedEngine) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def http(engine: ServedEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as http:
        yield http


@pytest.fixture(scope="session")
def translator(smollm2_folder: Path) -> Translator:
    return Translator(AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True))


def metric(http: httpx.Client, name: str) -> float:
    return next(
        float(line.split()[1]) for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name} ")
    )


def test_the_client_lists_and_finds_the_model(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "kvtide"
    with pytest.raises(openai.NotFoundError, match="'smollm2'"):
        client.models.retrieve("gpt-5")


def test_a_chat_answers_the_question(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["kvtide"]["ttft_s"] > 0


def test_text_and_its_tokens_are_the_same_prompt(client: OpenAI, http: httpx.Client) -> None:
    text = BEGINNING + "Once upon a time, there was a"
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    answers = [
        client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=8)
        for prompt in (text, tokens)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].choices[0].text.startswith(" ")
    assert answers[0].choices[0].finish_reason == "length"
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_the_tokens_of_a_chat_are_counted_before_it_is_asked(client: OpenAI, http: httpx.Client) -> None:
    tokenized = http.post("/tokenize", json={"messages": QUESTION}).json()
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=1)
    assert answer.usage is not None
    assert tokenized["count"] == len(tokenized["tokens"]) == answer.usage.prompt_tokens
    assert tokenized["max_model_len"] == 8192


def test_a_stop_string_cuts_the_answer(client: OpenAI) -> None:
    prompt = BEGINNING + "Counting: one, two, three,"
    whole = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=12).choices[0].text
    stop = whole[4:7]  # wherever that is: it need not be a token
    cut = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=12, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_makes_sampling_repeatable(client: OpenAI) -> None:
    texts = [
        client.completions.create(
            model="smollm2", prompt=BEGINNING + "My favourite", temperature=1.5, max_tokens=10, seed=seed
        )
        .choices[0]
        .text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_second_request_of_a_prompt_reports_what_the_cache_had(client: OpenAI) -> None:
    def ask(salt: str) -> Any:
        return client.completions.create(
            model="smollm2", prompt=STORY * 12, temperature=0, max_tokens=4, extra_body={"cache_salt": salt}
        )

    first, other, second = ask("a"), ask("b"), ask("a")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert other.usage.prompt_tokens_details.cached_tokens == 0  # of another salt: nothing is shared
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < second.usage.prompt_tokens
    assert second.kvtide["tokens_by_tier"] == {"dram": cached}
    assert second.kvtide["ttft_s"] > 0
    assert first.choices[0].text == other.choices[0].text == second.choices[0].text


def test_answers_given_at_the_same_time_are_those_given_alone(client: OpenAI) -> None:
    prompts = [f"{BEGINNING}The number {number} is" for number in range(3)]

    def ask(prompt: str) -> str:
        return client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=4).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, prompts)) == alone
    together = client.completions.create(model="smollm2", prompt=prompts, temperature=0, max_tokens=4)
    assert [choice.text for choice in together.choices] == alone


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_the_engines_work(http: httpx.Client, is_stream: bool) -> None:
    body = {"prompt": ENDLESS, "max_tokens": 8000, "temperature": 0, "stream": is_stream}
    with httpx.Client(base_url=http.base_url, headers=http.headers) as leaving:
        if is_stream:
            with leaving.stream("POST", "/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()  # kept: without it, httpx would close the connection by itself
                next(lines)
                assert metric(http, "kvtide_engine_running") == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.5)
    end_s = time.monotonic() + 30
    while metric(http, "kvtide_engine_running") + metric(http, "kvtide_engine_waiting"):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_errors_are_those_the_client_knows(client: OpenAI, engine: ServedEngine) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="gpt-5", prompt="p")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="smollm2", prompt=[5] * 9000)
    assert too_long.value.code == "context_length_exceeded"
    assert "8192 tokens, but the prompt has 9000" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.completions.create(model="smollm2", prompt="p", n=2)
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "n")
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="smollm2", prompt=[10**6])
    with (
        OpenAI(base_url=f"{engine.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_what_was_done_is_counted(client: OpenAI, http: httpx.Client) -> None:
    before = (
        metric(http, "kvtide_engine_generated_tokens_total"),
        metric(http, "kvtide_engine_first_token_seconds_count"),
    )
    client.completions.create(model="smollm2", prompt=ENDLESS, max_tokens=3, temperature=0)
    after = (
        metric(http, "kvtide_engine_generated_tokens_total"),
        metric(http, "kvtide_engine_first_token_seconds_count"),
    )
    assert (after[0] - before[0], after[1] - before[1]) == (3, 1)


@given(st.text(max_size=60))
@example("  two  spaces, 👩‍👩‍👧 and\n\ttabs, 12345 ﷽")
@settings(max_examples=60)
def test_text_that_the_models_tokenizer_cuts_comes_back_in_whole_characters(translator: Translator, text: str) -> None:
    tokens = translator.encode(text, add_special_tokens=False)
    detokenizer = translator.detokenizer(translator.encode("Some words before", add_special_tokens=False))
    pieces = [*(detokenizer.add(token) for token in tokens), detokenizer.end()]
    assert "".join(pieces) == translator.decode(tokens)
    if "\ufffd" not in translator.decode(tokens):  # it lacks tokens for some bytes
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_give_the_text_of_all_of_them(translator: Translator, tokens: list[int]) -> None:
    detokenizer = translator.detokenizer([])
    pieces = [*(detokenizer.add(token) for token in tokens), detokenizer.end()]
    assert "".join(pieces) == translator.decode(tokens)
