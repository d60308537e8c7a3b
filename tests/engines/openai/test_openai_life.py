# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, engines that fail, servers that end: whoever is there is told, and nothing goes on for nobody."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine import TOKENIZER, FakeServer, echo, fails, fake_server, forever
from prometheus_client.parser import text_string_to_metric_families
from test_openai_refusals import refused

from kvtide.engines.openai import app as app_module
from kvtide.engines.openai import server as server_module
from kvtide.errors import ConfigError
from kvtide.observe.catalogue import CATALOGUE, ENGINE_CATALOGUE

WAIT_S = 20.0


def request_bytes(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def dial(server: FakeServer) -> socket.socket:
    dialled = socket.create_connection((server.http.base_url.host, server.http.base_url.port or 0))
    dialled.settimeout(WAIT_S)
    return dialled


def wait_for_requests(server: FakeServer, number: int) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if len(server.engine.asked) >= number:
            return
        pause.wait(0.01)
    raise AssertionError("the engine was not asked")


def metric(server: FakeServer, line: str) -> float:
    return next(
        (
            float(each.rsplit(" ", 1)[1])
            for each in server.http.get("/metrics").text.splitlines()
            if each.startswith(line)
        ),
        0.0,
    )


# Clients that leave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_the_engines_work(is_stream: bool) -> None:
    with fake_server(forever, context_tokens=1 << 30) as server:
        body = {"prompt": ["a", "b"], "max_tokens": 1 << 29, "stream": is_stream}
        with dial(server) as client:
            client.sendall(request_bytes(body))
            if is_stream:
                assert b"200 OK" in client.recv(1000)
            wait_for_requests(server, 2)
            assert server.engine.running == 2
        server.engine.wait_idle()
        assert metric(server, 'kvtide_engine_requests_total{finish="abort"}') == 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_ends_the_engines_work(is_stream: bool) -> None:
    with fake_server(forever) as server:
        server.engine.steps = threading.Semaphore(0)
        with dial(server) as client:
            client.sendall(request_bytes({"prompt": "a", "max_tokens": 99, "stream": is_stream}))
            wait_for_requests(server, 1)
        server.engine.wait_idle()


def test_a_client_that_leaves_while_it_sends_is_forgotten() -> None:
    with fake_server() as server:
        with dial(server) as client:
            client.sendall(request_bytes({"prompt": "a" * 1000})[:-500])
        assert server.complete("p").status_code == 200
        assert len(server.engine.asked) == 1


def test_a_client_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_STUCK_MS", 300)
    with fake_server(forever, context_tokens=1 << 30) as server, dial(server) as client:
        client.sendall(request_bytes({"prompt": "a", "max_tokens": 1 << 29, "stream": True}))
        assert client.recv(100)
        server.engine.wait_idle(60)


# Engines that fail ----------------------------------------------------------------------------------------


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    with fake_server(forever, waiting_max=2) as server:
        response = server.complete(["a", "b", "c"], max_tokens=4000)
        assert "try again" in refused(response, 429, "rate_limit_exceeded")
        assert response.headers["retry-after"] == "1"
        server.engine.wait_idle()  # those of the three that were taken are not left behind
        assert metric(server, 'kvtide_engine_refused_total{status="429"}') == 1


def test_more_calls_than_the_bound_are_429_while_health_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_CALLS_MAX", 1)
    with fake_server(forever) as server, dial(server) as client:
        client.sendall(request_bytes({"prompt": "a", "max_tokens": 4000, "stream": True}))
        assert b"200 OK" in client.recv(1000)
        server.engine.steps = threading.Semaphore(0)
        refused(server.complete("p"), 429, "rate_limit_exceeded")
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_before_the_first_token_is_500(is_stream: bool) -> None:
    with fake_server(fails(after=0)) as server:
        message = refused(server.complete("p", stream=is_stream), 500, "internal_error")
        assert "the model caught fire" in message
        assert metric(server, 'kvtide_engine_requests_total{finish="error"}') == 1
        assert server.http.get("/health").status_code == 200


def test_an_error_in_a_stream_is_its_last_event_and_no_reason_to_finish() -> None:
    with fake_server(fails(after=2)) as server:
        server.engine.steps = threading.Semaphore(1)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "a"
            server.engine.steps.release(9)
            rest = [line.removeprefix("data: ") for line in lines if line]
        *pieces, error, done = rest
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "internal_error"
        assert all(json.loads(piece)["choices"][0]["finish_reason"] is None for piece in pieces)


@pytest.mark.parametrize("is_stream", [False, True])
def test_requests_of_an_engine_that_died_are_told_and_health_says_no(is_stream: bool) -> None:
    with fake_server(forever) as server, ThreadPoolExecutor(1) as pool:
        server.engine.steps = threading.Semaphore(0)
        waiting = pool.submit(server.complete, "p", stream=is_stream)
        wait_for_requests(server, 1)
        server.engine.die()
        refused(waiting.result(WAIT_S), 503, "unavailable")
        refused(server.http.get("/health"), 503, "unavailable")
        refused(server.complete("p"), 503, "unavailable")


def test_an_engine_that_was_closed_is_503() -> None:
    with fake_server() as server:
        server.engine.close()
        refused(server.complete("p"), 503, "unavailable")


def test_a_mistake_of_the_server_is_500_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server() as server:

        def submit(*_args: object, **_options: object) -> None:
            raise ZeroDivisionError("secret detail")

        server.engine.submit = submit  # type: ignore[method-assign, assignment]
        assert "secret" not in refused(server.complete("p"), 500, "internal_error")
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_mistake_while_an_answer_is_read_ends_it_with_an_error(
    caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    def script(prompt: Sequence[int]) -> Iterator[int]:
        yield prompt[0]
        assert pace.acquire(timeout=WAIT_S)
        yield -1  # no tokenizer has it

    pace = threading.Semaphore(0)
    with fake_server(script) as server, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(server.complete, "abc", stream=is_stream)
        wait_for_requests(server, 1)
        pace.release()
        response = asking.result(WAIT_S)
        if is_stream and response.status_code == 200:
            assert '"code":"internal_error"' in response.text
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            refused(response, 500, "internal_error")
        server.engine.wait_idle()
    assert "engine.reply_failed" in caplog.text


# Waiting and threads --------------------------------------------------------------------------------------


class SlowTokenizer:
    """Tokenises long texts when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Event()

    def __call__(self, text: str, **options: Any) -> Any:
        if len(text) > 10:
            self.begun.release()
            assert self.may_go_on.wait(WAIT_S)
        return TOKENIZER(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def test_tokenising_a_long_prompt_keeps_nobody_from_the_loop() -> None:
    tokenizer = SlowTokenizer()
    with fake_server(tokenizer=tokenizer) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.complete, "a long prompt that takes its time")
        assert tokenizer.begun.acquire(timeout=WAIT_S)
        assert server.http.get("/health").status_code == 200
        assert server.complete("short").json()["choices"][0]["text"] == "short"
        tokenizer.may_go_on.set()
        assert slow.result(WAIT_S).status_code == 200


def test_prompts_that_wait_to_be_tokenised_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_TOKENISING_MAX", 0)
    tokenizer = SlowTokenizer()
    with fake_server(tokenizer=tokenizer) as server, ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(server.complete, "a long prompt that takes its time") for _ in range(2)]
        for _ in slow:
            assert tokenizer.begun.acquire(timeout=WAIT_S)
        refused(server.complete("one more"), 429, "rate_limit_exceeded")
        tokenizer.may_go_on.set()
        assert [each.result(WAIT_S).status_code for each in slow] == [200, 200]


def test_many_clients_at_a_time_each_get_their_own_answer() -> None:
    with fake_server() as server, ThreadPoolExecutor(16) as pool:
        prompts = [f"answer number {number} 😀 " * 5 for number in range(60)]
        responses = list(pool.map(lambda prompt: server.complete(prompt, temperature=0), prompts))
        assert [each.json()["choices"][0]["text"] for each in responses] == prompts
        assert server.engine.running == 0


# Servers that end -----------------------------------------------------------------------------------------


def paced(pace: threading.Semaphore) -> Any:
    def script(prompt: Sequence[int]) -> Iterator[int]:
        for token in prompt:
            assert pace.acquire(timeout=WAIT_S)
            yield token

    return script


def test_a_server_that_ends_lets_requests_end_and_takes_no_new_ones() -> None:
    pace = threading.Semaphore(1)
    with ThreadPoolExecutor(2) as pool:
        with fake_server(paced(pace)) as server:
            url = server.url
            running = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "abc"}, timeout=WAIT_S)
            wait_for_requests(server, 1)
            server.app.stop_admitting()
            refused(server.http.get("/health"), 503, "unavailable")
            refused(server.complete("p"), 503, "unavailable")
            pace.release(9)
        assert running.result(WAIT_S).json()["choices"][0]["text"] == "abc"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_takes_longer_than_the_server_waits_is_aborted_and_told(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(server_module, "_END_S", 0.2)
    got = b""
    with fake_server(forever, context_tokens=1 << 30) as server:
        client = dial(server)
        body = {"prompt": "abc", "max_tokens": 1 << 29, "stream": is_stream}
        client.sendall(request_bytes(body))
        wait_for_requests(server, 1)

        def drain() -> None:
            nonlocal got
            while piece := client.recv(1 << 20):
                got = (got + piece)[-100_000:]

        reader = threading.Thread(target=drain)
        reader.start()
    reader.join(WAIT_S)
    client.close()
    assert b'"code":"unavailable"' in got
    assert (b"data: [DONE]" if is_stream else b"503 Service Unavailable") in got


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} is in use on 127.0.0.1"),
            server_module.taken_port("127.0.0.1", port),
        ):
            pass


def test_a_taken_port_refuses_clients_until_the_model_is_there() -> None:
    with server_module.taken_port("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname()).close()


def test_of_two_servers_that_took_one_port_at_the_same_time_the_second_is_told() -> None:
    with (
        fake_server() as server,
        server_module.taken_port("127.0.0.1", 0) as first,
        server_module.taken_port("127.0.0.1", first.getsockname()[1]) as second,
    ):
        first.listen()
        with pytest.raises(ConfigError, match="is in use"), server_module.serving(server.app, second):
            pass


# Metrics --------------------------------------------------------------------------------------------------


def test_a_used_server_exports_every_series_of_its_catalogue_and_nothing_else() -> None:
    with fake_server(echo) as server:
        server.complete("abc")
        server.complete("")
        text = server.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exported = {
        f"{name}_total" if family.type == "counter" else name for name, family in families.items() if family.samples
    }
    assert exported == set(ENGINE_CATALOGUE)
    assert not exported & set(CATALOGUE)
    assert 'kvtide_engine_info{dtype="none",model="fake",' in text
    assert 'kvtide_engine_requests_total{finish="stop"} 1.0' in text
    assert 'kvtide_engine_refused_total{status="400"} 1.0' in text
    assert 'kvtide_engine_reused_tokens_total{tier="dram"} 3.0' in text
    assert "kvtide_engine_first_token_seconds_count 1.0" in text
    assert "kvtide_engine_token_gap_seconds_count 2.0" in text


def test_names_of_the_engines_series_say_unit_and_kind() -> None:
    for series in ENGINE_CATALOGUE.values():
        assert series.name.startswith("kvtide_engine_")
        assert series.name.endswith("_total") == (series.kind == "counter")
        assert series.name.endswith("_seconds") == (series.kind == "histogram" or "time" in series.name)
        assert series.help.endswith(".")


def test_what_is_no_http_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server() as server:
        for _ in range(20):
            with dial(server) as client:
                client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 400")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["engine.http_refused why=Invalid HTTP request received."]
