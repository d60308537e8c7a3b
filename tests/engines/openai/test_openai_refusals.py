# SPDX-License-Identifier: Apache-2.0
"""What the server refuses, in which words: the right status, OpenAI's body, and the field that is to blame."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeServer, fake_server
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engines.openai import Gate
from kvtide.engines.openai import app as app_module
from kvtide.engines.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read,
)
from kvtide.engines.openai.refusal import Refusal

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(context_tokens=100) as server:
        yield server


def refused(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """Check an error body, and give its sentence."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    kind = {429: "rate_limit_error"}.get(status, "server_error" if status >= 500 else "invalid_request_error")
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    message: str = error["message"]
    assert message
    return message


# Fields ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": "many"}, "max_tokens", "max_tokens: expected `int | null`, got `str`"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.01}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"seed": 1 << 64}, "seed", "seed"),
        ({"seed": "x"}, "seed", "got `str`"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 1,024 characters"),
        ({"stop": ["a", ""]}, "stop", "1 to 1,024 characters"),
        ({"stop": ["a" * 1025]}, "stop", "1 to 1,024 characters"),
        ({"stop": {"a": 1}}, "stop", "got `object`"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"stream": 1}, "stream", "got `int`"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage", "got `int`"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        ({"cache_salt": "a" * 129}, "cache_salt", "length <= 128"),
        ({"cache_salt": "a/b"}, "cache_salt", "matching"),
        ({"model": 7}, "model", "got `int`"),
        ({"prompt": None}, "prompt", "got `null`"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty entry"),
        ({"prompt": [1, "a"]}, "prompt", "one kind"),
        ({"prompt": [[1], 2]}, "prompt", "one kind"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "got `str`"),
        ({"prompt": [1, -1]}, "prompt[1]", ">= 0"),
        ({"prompt": ["a"] * 17}, "prompt", "at most 16"),
        ({"prompt": {"text": "a"}}, "prompt", "got `object`"),
    ],
)
def test_a_field_that_cannot_be_meant_is_named(
    server: FakeServer, fields: dict[str, object], param: str, words: str
) -> None:
    response = server.complete(**{"prompt": "p", "max_tokens": 4, **fields})  # type: ignore[arg-type]
    assert words in refused(response, 400, "invalid_value", param)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"logprobs": 0},
        {"logprobs": 5},
        {"suffix": "end"},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"min_p": 0.1},
        {"min_tokens": 3},
        {"use_beam_search": True},
        {"guided_json": {"type": "object"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 1000}}},
        {"prompt_embeds": "AAAA"},
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_and_not_ignored(
    server: FakeServer, fields: dict[str, object]
) -> None:
    (name,) = fields
    message = refused(server.complete("p", **fields), 400, "unsupported_parameter", name)
    assert name in message
    assert "leave it out" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"logprobs": True},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "high"},
        {"chat_template": "{{ messages }}"},
        {"continue_final_message": True},
    ],
)
def test_the_same_holds_for_chats(server: FakeServer, fields: dict[str, object]) -> None:
    body = {"messages": [{"role": "user", "content": "p"}], **fields}
    (name,) = fields
    refused(server.http.post("/v1/chat/completions", json=body), 400, "unsupported_parameter", name)


def test_values_that_change_nothing_and_unknown_fields_are_let_through(server: FakeServer) -> None:
    harmless = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "suffix": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "response_format": {"type": "text"},
        "user": "somebody",
        "metadata": {"a": [1, {"b": 2}]},
        "service_tier": "auto",
        "no_such_field": 1,
    }
    assert server.complete("p", max_tokens=4, **harmless).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "length >= 1"),
        (None, "messages", "got `null`"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"content": "p"}], "messages[0].role", "is missing"),
        ([{"role": "king", "content": "p"}], "messages[0].role", "king"),
        ([{"role": "tool", "content": "p"}], "messages[0].role", "tool"),
        ([{"role": "user", "content": 5}], "messages[0].content", "got `int`"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "has no text"),
        (
            [{"role": "user", "content": "p"}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content[0]",
            "is no text",
        ),
    ],
)
def test_a_message_that_is_none_is_named(server: FakeServer, messages: object, param: str, words: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize") if messages is not None else ("/v1/chat/completions",):
        response = server.http.post(path, json={"messages": messages})
        assert words in refused(response, 400, "invalid_value", param)


def test_tool_calls_in_a_message_are_refused(server: FakeServer) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    refused(response, 400, "unsupported_parameter", "messages[0].tool_calls")


def test_a_missing_field_is_named(server: FakeServer) -> None:
    message = refused(server.http.post("/v1/completions", json={}), 400, "invalid_value", "prompt")
    assert message == "prompt is missing: send it"
    refused(server.http.post("/v1/chat/completions", json={}), 400, "invalid_value", "messages")
    refused(server.http.post("/detokenize", json={}), 400, "invalid_value", "tokens")
    refused(server.http.post("/tokenize", json={}), 400, "invalid_value", "prompt")


def test_detokenize_names_the_tokens_there_are(server: FakeServer) -> None:
    response = server.http.post("/detokenize", json={"tokens": [99999]})
    assert "0 to 256" in refused(response, 400, "invalid_value", "tokens")


# The context and the model --------------------------------------------------------------------------------


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(server: FakeServer) -> None:
    message = refused(server.complete("x" * 120, max_tokens=4), 400, "context_length_exceeded", "prompt")
    assert message == (
        "This model's maximum context length is 100 tokens, but the prompt has 120, which leaves none for an answer: "
        "shorten it."
    )
    refused(server.complete("x" * 100, max_tokens=4), 400, "context_length_exceeded", "prompt")
    chat = {"messages": [{"role": "user", "content": "x" * 100}]}
    refused(server.http.post("/v1/chat/completions", json=chat), 400, "context_length_exceeded", "messages")


def test_an_answer_that_does_not_fit_is_refused_with_what_would(server: FakeServer) -> None:
    message = refused(server.complete("x" * 90, max_tokens=11), 400, "context_length_exceeded", "max_tokens")
    assert message == (
        "This model's maximum context length is 100 tokens, but the prompt has 90 and max_tokens asks for 11 more: "
        "ask for at most 10."
    )
    assert server.complete("x" * 90, max_tokens=10).status_code == 200
    short = server.http.post("/v1/completions", json={"prompt": "x" * 95})
    assert short.json()["usage"]["completion_tokens"] == 5  # the default takes what there is


def test_another_model_is_not_found(server: FakeServer) -> None:
    for response in (
        server.complete("p", model="gpt-5", max_tokens=4),
        server.http.get("/v1/models/gpt-5"),
        server.http.post("/tokenize", json={"model": "gpt-5", "prompt": "p"}),
    ):
        assert "'fake'" in refused(response, 404, "model_not_found", "model")
    assert server.complete("p", model="fake", max_tokens=4).status_code == 200


# Bodies that are none -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nul",
        b"{",
        b'{"prompt": "a"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"metadata": ' + b"[" * 100_000,
        b'{"metadata": ' + b'{"a":' * 100_000,
    ],
)
def test_what_is_no_json_is_refused(server: FakeServer, body: bytes) -> None:
    refused(server.http.post("/v1/completions", content=body, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null", b"[" * 100_000])
def test_json_that_is_no_object_is_refused(server: FakeServer, body: bytes) -> None:
    refused(server.http.post("/v1/completions", content=body, headers=JSON), 400, "invalid_value")


def test_numbers_too_large_for_anything_are_refused(server: FakeServer) -> None:
    for number in ("1e999", "9" * 5000, "-" + "9" * 400):
        body = f'{{"prompt": "p", "max_tokens": {number}}}'
        refused(server.http.post("/v1/completions", content=body, headers=JSON), 400, "invalid_value", "max_tokens")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(
    ["prompt", "messages", "max_tokens", "stop", "n", "logprobs", "stream", "stream_options", "tools", "tokens", "seed"]
)


@given(
    body=st.binary(max_size=50)
    | st.dictionaries(names, anything, max_size=5).map(lambda fields: json.dumps(fields).encode()),
    kind=st.sampled_from([CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest]),
)
def test_any_body_is_read_or_refused(body: bytes, kind: type) -> None:
    try:
        status = 200 if isinstance(read(kind, body), kind) else 500
    except Refusal as refusal:
        status = refusal.status
    assert status in (200, 400)


def test_a_body_over_the_bound_is_refused_and_told_so(server: FakeServer) -> None:
    for size in ((1 << 20) + 1, 20 << 20):
        body = json.dumps({"prompt": "x" * size})
        message = refused(server.http.post("/v1/completions", content=body, headers=JSON), 413, "request_too_large")
        assert "1,048,576" in message


def test_a_body_that_does_not_say_json_is_refused(server: FakeServer) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = server.http.post("/v1/completions", content=b'{"prompt": "p"}', headers=headers)
        refused(response, 415, "unsupported_media_type")
    with_charset = {"Content-Type": "application/json; charset=utf-8"}
    response = server.http.post("/v1/completions", content=b'{"prompt": "p"}', headers=with_charset)
    assert response.status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_BODY_S", 0.05)
    host, port = server.http.base_url.host, server.http.base_url.port
    with socket.create_connection((host, port or 0)) as slow:
        slow.settimeout(30)
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert b"408 Request Timeout" in slow.recv(4096)


# The door -------------------------------------------------------------------------------------------------


def test_unknown_paths_and_methods_are_told_in_json(server: FakeServer) -> None:
    refused(server.http.get("/"), 404, "unknown_url")
    refused(server.http.post("/v1/embeddings", json={}), 404, "unknown_url")
    refused(server.http.get("/v1/completions/"), 404, "unknown_url")
    refused(server.http.get("/v1/completions"), 405, "method_not_supported")
    refused(server.http.post("/v1/models", json={}), 405, "method_not_supported")


def test_a_browsers_question_before_a_call_gets_no_leave(server: FakeServer) -> None:
    response = server.http.options(
        "/v1/completions", headers={"Origin": "http://evil", "Access-Control-Request-Method": "POST"}
    )
    refused(response, 405, "method_not_supported")
    assert not any(name.startswith("access-control") for name in response.headers)


def test_a_strangers_name_for_this_address_is_refused(server: FakeServer) -> None:
    refused(server.http.get("/v1/models", headers={"Host": "evil.example:80"}), 421, "wrong_host")
    for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):
        assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_beyond_loopback_any_name_may_lead_here() -> None:
    Gate("127.0.0.1", None).check("/v1/models", "localhost:80", "")
    with pytest.raises(Refusal):
        Gate("localhost", None).check("/v1/models", "evil.example", "")
    for host in ("0.0.0.0", "10.0.0.7", "engine-3.fleet"):
        Gate(host, None).check("/v1/models", "any.name:80", "")


def test_with_a_key_only_its_owner_comes_in_and_health_and_metrics_stay_open() -> None:
    with fake_server(key="sesame-0123456789") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sesame-0123456789"},
            {"Authorization": "Bearer"},
            {"Authorization": b"Bearer \xff\xfe"},
        ):
            response = server.http.get("/v1/models", headers=headers)
            assert "sesame" not in refused(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        refused(server.http.post("/tokenize", json={"prompt": "p"}), 401, "invalid_api_key")
        good = {"Authorization": "Bearer sesame-0123456789", "Host": "any.name"}
        assert server.http.get("/v1/models", headers=good).status_code == 200
        assert server.http.get("/health").status_code == 200
        assert 'kvtide_engine_refused_total{status="401"} 6.0' in server.http.get("/metrics").text
