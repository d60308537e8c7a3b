# SPDX-License-Identifier: Apache-2.0
"""Answers of the server over an engine without a model: their text, their shape, and where they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeServer, byte_tokenizer, fake_server, forever, tokens_of

EMOJI = "naïve 😀👍🏽 日本 x"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """All but the last, which says that it is the last."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def choice(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def test_an_answer_has_the_shape_of_openai_and_the_word_of_the_cache(server: FakeServer) -> None:
    body = server.complete("hello").json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body["kvtide"].pop("ttft_s") >= 0
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "hello", "finish_reason": "stop", "logprobs": None}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "kvtide": {"tokens_by_tier": {"dram": 2}},
    }


def test_streamed_pieces_are_whole_characters_and_make_the_whole_text(server: FakeServer) -> None:
    pieces = [event["choices"][0]["text"] for event in events(server.complete(EMOJI, stream=True))]
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(("max_tokens", "reason"), [(9, "stop"), (2, "length")])
def test_the_last_piece_has_the_reason_and_no_other_has(server: FakeServer, max_tokens: int, reason: str) -> None:
    found = events(server.complete("abc", stream=True, max_tokens=max_tokens))
    reasons = [event["choices"][0]["finish_reason"] for event in found]
    assert (set(reasons[:-1]), reasons[-1]) == ({None}, reason)


def test_usage_is_streamed_when_asked_for_and_only_then(server: FakeServer) -> None:
    *pieces, last = events(server.complete("abc", stream=True, stream_options={"include_usage": True}))
    assert all(piece["usage"] is None and "kvtide" not in piece for piece in pieces)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["kvtide"]["tokens_by_tier"] == {"dram": 2}
    assert all("usage" not in event for event in events(server.complete("abc", stream=True)))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_that_spans_tokens_is_cut_out_exactly(server: FakeServer, is_stream: bool) -> None:
    response = server.complete("one two 日本 three", stop=["本 th", "nothing"], stream=is_stream)
    text = "".join(event["choices"][0]["text"] for event in events(response)) if is_stream else choice(response)["text"]
    assert text == "one two 日"
    if not is_stream:
        assert choice(response)["finish_reason"] == "stop"
        assert response.json()["usage"]["completion_tokens"] == len(tokens_of("one two 日本 th"))
    server.engine.wait_idle()


def test_what_only_looked_like_a_stop_string_is_shown(server: FakeServer) -> None:
    assert choice(server.complete("abcabd", stop="abd!"))["text"] == "abcabd"


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(server: FakeServer) -> None:
    assert choice(server.complete("abc", stop_token_ids=tokens_of("c")))["text"] == "ab"


def test_length_is_the_reason_at_max_tokens(server: FakeServer) -> None:
    answer = choice(server.complete("abcdef", max_tokens=3))
    assert (answer["text"], answer["finish_reason"]) == ("abc", "length")


def test_half_a_character_at_max_tokens_is_one_replacement_mark(server: FakeServer) -> None:
    assert choice(server.complete("😀", max_tokens=3))["text"] == "\ufffd"


def test_a_stop_string_is_found_in_the_very_last_piece(server: FakeServer) -> None:
    assert choice(server.complete("😀", max_tokens=3, stop="\ufffd"))["finish_reason"] == "stop"


def test_a_prompt_may_be_tokens(server: FakeServer) -> None:
    assert choice(server.complete(tokens_of("tokens")))["text"] == "tokens"


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_prompts_have_an_answer_each_in_their_order(server: FakeServer, is_stream: bool) -> None:
    response = server.complete(["first", tokens_of("the second"), "3"], stream=is_stream)
    texts = ["", "", ""]
    if is_stream:
        for event in events(response):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = [each["text"] for each in response.json()["choices"]]
        assert response.json()["usage"]["total_tokens"] == 2 * (5 + 10 + 1)
    assert texts == ["first", "the second", "3"]


def test_tokens_of_an_answer_come_with_it_when_asked_for(server: FakeServer) -> None:
    asked = {"prompt": ["ab", "cde"], "max_tokens": 9, "return_token_ids": True, "stop": "d"}
    whole = server.http.post("/v1/completions", json=asked).json()
    assert whole["kvtide"]["token_ids"] == [tokens_of("ab"), tokens_of("cd")]
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = events(server.http.post("/v1/completions", json=streamed))
    assert last["kvtide"]["token_ids"] == whole["kvtide"]["token_ids"]
    assert "token_ids" not in server.complete("ab").json()["kvtide"]


def test_defaults_are_those_of_openai(server: FakeServer) -> None:
    server.http.post("/v1/completions", json={"prompt": "p"})
    sampling = server.engine.asked[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "p"}]})
    asked = server.engine.asked[-1]
    assert asked.sampling.max_tokens == server.engine.context_tokens - len(asked.prompt)


def test_sampling_reaches_the_engine(server: FakeServer) -> None:
    server.complete("p", temperature=0.5, top_p=0.25, top_k=7, seed=-3)
    sampling = server.engine.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, -3)
    server.complete("p", temperature=None, top_p=None, top_k=-1, seed=None, stop=None, stream=None)
    assert (server.engine.asked[-1].sampling.temperature, server.engine.asked[-1].sampling.top_k) == (1.0, 0)


def test_a_cache_salt_is_the_scope_of_the_request(server: FakeServer) -> None:
    server.complete("p", cache_salt="tenant-7")
    assert server.engine.asked[-1].scope == "tenant-7"
    server.complete("p")
    assert server.engine.asked[-1].scope == ""


# Chats ----------------------------------------------------------------------------------------------------


def chat(server: FakeServer, *messages: tuple[str, object], **fields: object) -> httpx.Response:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **fields}
    return server.http.post("/v1/chat/completions", json=body)


def test_a_chat_is_rendered_by_the_models_template(server: FakeServer) -> None:
    response = chat(
        server, ("developer", "be brief"), ("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    )
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<|system|>be brief<|user|>a\nb<|assistant|>"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(tokens_of("<|system|>be brief<|user|>a\nb<|assistant|>"))


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(server: FakeServer) -> None:
    found = events(chat(server, ("user", "é"), stream=True, stop=["assistant"]))
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[:-1]) == "<|user|>é<|"
    assert [event["choices"][0]["finish_reason"] for event in found[-2:]] == [None, "stop"]


def test_max_completion_tokens_goes_before_max_tokens(server: FakeServer) -> None:
    chat(server, ("user", "p"), max_tokens=7, max_completion_tokens=9)
    assert server.engine.asked[-1].sampling.max_tokens == 9


def test_what_the_template_does_not_take_is_an_error_of_the_client(server: FakeServer) -> None:
    response = chat(server, ("user", "refuse"))
    assert response.status_code == 400
    assert "not that" in response.json()["error"]["message"]


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with fake_server(tokenizer=tokenizer) as server:
        response = chat(server, ("user", "p"))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert server.complete("p").status_code == 200


# Beside answers -------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_each_others_inverse(server: FakeServer) -> None:
    tokenized = server.http.post("/tokenize", json={"prompt": EMOJI}).json()
    assert tokenized == {"count": len(tokens_of(EMOJI)), "max_model_len": 4096, "tokens": tokens_of(EMOJI)}
    assert server.http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": EMOJI}
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenized_messages_are_the_prompt_of_the_same_chat(server: FakeServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    chat(server, ("user", "hi"))
    assert tokens == list(server.engine.asked[-1].prompt)
    closed = server.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert closed == tokens_of("<|user|>hi")


def test_the_model_is_listed_and_found_by_its_name(server: FakeServer) -> None:
    model = {"id": "fake", "object": "model", "created": 1, "owned_by": "kvtide", "max_model_len": 4096}
    assert server.http.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert server.http.get("/v1/models/fake").json() == model
    assert server.http.get("/v1/models/other/one").status_code == 404


def test_a_long_answer_does_not_keep_others_from_the_loop() -> None:
    with fake_server(forever, context_tokens=200_000) as server:
        body = {"prompt": "p", "max_tokens": 150_000}
        with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert next(response.iter_lines()).startswith("data: ")
            assert server.http.get("/health").status_code == 200
        server.engine.wait_idle()
