# SPDX-License-Identifier: Apache-2.0
"""The verbs that talk to a running service: how they find it, what they print, with which code they end."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvtide.cli.main import main
from kvtide.cli.table import as_table, duration, size
from kvtide.testing.node import ServedNode
from test_admin import CONFIG, LAYOUT, NAMESPACE, Engine, tokens


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("cli"), config=CONFIG) as node:
        yield node
        assert node.stop() == 0


@pytest.fixture(scope="module")
def engine(node: ServedNode) -> Iterator[Engine]:
    with node.connect() as client:
        yield Engine(client)


class Command:
    """`kvtide` in this process, against one folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it printed. Verbs that ask a service get its folder."""
        flags = [] if words[0] == "token" or "--url" in words else ["--folder", str(self.folder)]
        assert main([*words, *flags]) == code, self._capsys.readouterr().err
        out, self.err = self._capsys.readouterr()
        return out


@pytest.fixture
def kvtide(
    node: ServedNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    for name in list(os.environ):
        if name.startswith("KVTIDE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)  # where no kvtide.yaml lies
    return Command(node.folder, capsys)


def place(*words: str) -> list[str]:
    return ["--namespace", NAMESPACE.hex(), *words]


# What they do ----------------------------------------------------------------------------------------------


def test_status_is_a_table_or_json(kvtide: Command, engine: Engine) -> None:
    engine.save("status", 2)
    text = kvtide("status")
    assert re.search(r"kvtide \S+ serves \S+/kvtide.sock for \d", text)
    assert re.search(r"^dram +\d+ .*MiB", text, re.MULTILINE)
    assert re.search(r"^default +operator +1$", text, re.MULTILINE)
    assert json.loads(kvtide("status", "--format", "json"))["is_serving"] is True


def test_a_tier_is_bypassed_resumed_and_drained(kvtide: Command, engine: Engine) -> None:
    assert "out of use" in kvtide("tier", "bypass", "disk")
    assert "bypassed" in kvtide("status")
    assert "disk is in use" in kvtide("tier", "resume", "disk")
    assert "nothing waits" in kvtide("tier", "drain", "disk")
    kvtide("tier", "bypass", "tape", code=2)
    assert "kvtide: error:" in kvtide.err
    assert "disk" in kvtide.err


def test_blocks_are_looked_up_warmed_and_pinned(
    kvtide: Command, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key.hex() for key in engine.save("blocks", 3)]
    kvtide("tier", "drain", "disk")
    text = kvtide("lookup", *place(*keys))
    assert text.count("dram, disk") == 3
    assert "3 of 3 are there without a gap" in text
    assert keys[0] not in text
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*keys, "0" * 64])))
    assert json.loads(kvtide("lookup", "--format", "json", *place("-")))["prefix_blocks"] == 3
    assert "nowhere" in kvtide("lookup", "--scope", "another", *place(keys[0]), code=1)
    assert "nowhere" in kvtide("lookup", "--part", "rank=1,ranks=2", *place(keys[0]), code=1)
    assert "3 of 3 blocks" in kvtide("warm", *place(*keys))
    id, _, said = kvtide("pin", "add", "--ttl-s", "60", *place(*keys)).partition(":")
    assert "3 of 3 blocks" in said
    assert re.search(rf"^{id} +default +3 ", kvtide("pin", "list"), re.MULTILINE)
    assert json.loads(kvtide("pin", "list", "--format", "json"))["pins"][0]["id"] == id
    assert "3 blocks may leave" in kvtide("pin", "remove", id)
    assert kvtide("pin", "list") == "no pins\n"


def test_words_that_are_no_keys_or_parts_are_refused(kvtide: Command) -> None:
    kvtide("lookup", *place("abc"), code=2)
    assert "64 hex digits" in kvtide.err
    for words in (["--part", "rank"], ["--namespace", "abc"]):
        with pytest.raises(SystemExit, match="2"):
            kvtide("lookup", *words, *place("0" * 64)[2 * ("--namespace" in words) :])


def test_tenants_their_quotas_and_usage_are_shown(kvtide: Command) -> None:
    text = kvtide("tenant", "list")
    assert re.search(r"^default +dram ", text, re.MULTILINE)
    assert re.search(r"^group:prompts +disk ", text, re.MULTILINE)
    said = kvtide("tenant", "quota", "default", "--tier", "disk", "--bytes-reserved", "1MiB", "--bytes-max", "32MiB")
    assert said == "default: 1 MiB reserved, at most 32 MiB of disk, until the next restart\n"
    assert re.search(r"^default +disk .* 32 MiB +prompts", kvtide("tenant", "list"), re.MULTILINE)
    assert "at most all of disk" in kvtide("tenant", "quota", "default", "--tier", "disk")
    assert "compute saved" in kvtide("tenant", "usage")
    assert json.loads(kvtide("tenant", "usage", "--format", "json"))["tenants"][0]["tenant"] == "default"
    kvtide("tenant", "quota", "defualt", "--tier", "disk", code=2)
    assert "did you mean default?" in kvtide.err


def test_a_prompt_is_published_from_a_file(kvtide: Command, engine: Engine, tmp_path: Path) -> None:
    engine.save("shared", 3)
    file = tmp_path / "prompt.tokens"
    file.write_text(" ".join(map(str, tokens("shared", 3))))
    words = ["share", "publish", "prompts", *place("--block-tokens", str(LAYOUT.block_tokens), "--tokens", str(file))]
    assert "3 blocks copied, 0 there already, 0 missing" in kvtide(*words)
    assert "0 blocks copied, 3 there already, 0 missing" in kvtide(*words)
    assert "3 missing" in kvtide(*words, "--part", "rank=0,ranks=2", code=1)
    kvtide(*words[:-1], str(tmp_path / "none"), code=2)
    assert "cannot be read" in kvtide.err


def test_clear_asks_first_and_takes_no_for_an_answer(
    kvtide: Command, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key.hex() for key in engine.save("cleared", 2)]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    kvtide("clear", "--tenant", "default", code=1)
    assert "nothing was cleared" in kvtide.err
    kvtide("lookup", *place(*keys))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "yes")
    kvtide("clear", "--tenant", "default", "--prefix", keys[1])
    assert asked == ["Forget some blocks of tenant default on every tier? [y/N] "]
    assert "1 of 2" in kvtide("lookup", *place(*keys))
    assert "blocks are forgotten" in kvtide("clear", "--tenant", "*", "--yes")
    kvtide("lookup", *place(*keys), code=1)


def test_clear_without_anybody_to_ask_wants_yes(kvtide: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    kvtide("clear", "--tenant", "default", code=2)
    assert "--yes" in kvtide.err


def test_a_token_comes_with_the_line_that_lets_it_in(kvtide: Command) -> None:
    token, line = kvtide("token").splitlines()
    assert line == f"token_sha256: {sha256(token.encode()).hexdigest()}"
    assert len(token) == 64
    assert kvtide("token").splitlines()[0] != token


# How they find the service ---------------------------------------------------------------------------------


def test_the_environment_names_another_service_and_token(kvtide: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (kvtide.folder / "admin.url").read_text().strip()
    monkeypatch.setenv("KVTIDE_ADMIN_URL", url)
    monkeypatch.setenv("KVTIDE_ADMIN_TOKEN", "wrong")
    kvtide("status", "--url", url, code=2)
    assert "nobody who may come in has this token" in kvtide.err
    monkeypatch.setenv("KVTIDE_ADMIN_TOKEN", (kvtide.folder / "admin.token").read_text().strip())
    assert main(["status"]) == 0


def test_a_proxy_never_sees_the_token(kvtide: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    kvtide("status")


def test_a_redirect_is_not_followed_with_the_token(kvtide: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server asks for
            seen.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/taken")  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    monkeypatch.setenv("KVTIDE_ADMIN_TOKEN", "a token")
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        kvtide("status", "--url", f"http://127.0.0.1:{server.server_port}", code=2)
        server.shutdown()
        thread.join()
    assert seen == ["/v1/status"]
    assert "is it a kvtide?" in kvtide.err


def test_the_folders_token_goes_to_no_other_machine(kvtide: Command) -> None:
    kvtide("status", "--url", "http://192.0.2.1:9733", code=2)
    assert "KVTIDE_ADMIN_TOKEN" in kvtide.err


def test_a_folder_without_a_service_says_how_to_start_one(kvtide: Command, tmp_path: Path) -> None:
    kvtide.folder = tmp_path
    kvtide("status", code=2)
    assert "kvtide serve" in kvtide.err


def test_an_address_that_a_killed_service_left_behind_is_not_believed(
    kvtide: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Somebody else may have the port by now, and would be given the token."""
    flags = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "0", "--admin-port", "0"]
    kvtide.folder = tmp_path_factory.mktemp("killed")
    with ServedNode(kvtide.folder, *flags) as node:
        kvtide("status")
        node.kill()
    assert (kvtide.folder / "admin.url").exists()
    kvtide("status", code=2)
    assert "no service with an admin side runs" in kvtide.err


def test_a_port_where_nobody_listens_is_an_error_in_words(kvtide: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_ADMIN_TOKEN", "a token")
    kvtide("status", "--url", "http://127.0.0.1:1", code=2)
    assert "is `kvtide serve` running?" in kvtide.err
    kvtide("status", "--url", "unix:/tmp/kvtide.sock", code=2)
    assert "write http://127.0.0.1:9733" in kvtide.err


# Tables ----------------------------------------------------------------------------------------------------


def test_numbers_stand_right_and_words_left() -> None:
    assert (
        as_table(("name", "blocks"), [("a", 1234), ("longer", 5)]) == "name    blocks\na        1,234\nlonger       5"
    )


def test_sizes_and_times_are_short() -> None:
    assert [size(each) for each in (None, 0, 1023, 1536, 1 << 40)] == [
        "all",
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "1 TiB",
    ]
    assert [duration(each) for each in (1, 119, 120, 7200, 10**6)] == ["1 s", "119 s", "2.0 min", "2.0 h", "11.6 d"]
