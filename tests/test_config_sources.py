# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: one name in a file, the environment and flags; nothing unknown or unfit gets through."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtide.config import (
    GIB,
    MIB,
    AdminClientSettings,
    AdminSettings,
    ArenaSettings,
    CallSettings,
    ClientSettings,
    DiskSettings,
    DramSettings,
    LeaseSettings,
    NodeSettings,
    QuotaSettings,
    Role,
    ScopeSettings,
    Settings,
    ShareGroupSettings,
    SpillWhen,
    TenantSettings,
)
from kvtide.config.catalogue import list_settings, value_text
from kvtide.config.reference import example, reference
from kvtide.config.sources import FILE_BYTES_MAX, add_flags, load_settings
from kvtide.errors import ConfigError, MissingExtra

ROOT = Path(__file__).parent.parent
SHA = "0123456789abcdef" * 4
Load = Callable[..., Settings]


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Settings from a file, an environment and flags, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes = "", env: dict[str, str] | None = None, *flags: str) -> Settings:
        Path("kvtide.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_settings(parse(*flags), env or {})

    return load


# Which one wins -------------------------------------------------------------------------------------------


def test_without_any_source_there_is_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = Settings(folder="/x", disk=DiskSettings(io_threads=7))
    assert load_settings(environ={}) == Settings()
    assert load_settings(parse(), {"HOME": "/", "PATH": ""}, base) == base


def test_the_environment_wins_over_the_file_and_flags_win_over_both(load: Load) -> None:
    file = "disk: {bytes_max: 1GiB, io_threads: 2, folder: /file}\nnode: {requests_max: 1}\n"
    env = {"KVTIDE_DISK__BYTES_MAX": "2GiB", "KVTIDE_DISK__IO_THREADS": "3"}
    settings = load(file, env, "--disk-bytes-max", "3GiB")
    assert settings.disk == DiskSettings(folder="/file", bytes_max=3 * GIB, io_threads=3)
    assert settings.node == NodeSettings(requests_max=1)


def test_a_source_changes_only_what_it_names(load: Load) -> None:
    base = Settings(disk=DiskSettings(io_threads=7), dram=DramSettings(bytes_max=5))
    settings = load_settings(parse("--dram-huge-pages=no"), {"KVTIDE_DISK__FOLDER": "/y"}, base)
    assert settings.disk == DiskSettings(io_threads=7, folder="/y")
    assert settings.dram == DramSettings(bytes_max=5, huge_pages=False)


def test_a_file_is_found_by_flag_then_by_environment_then_here(load: Load, tmp_path: Path) -> None:
    for name in ("flag", "env"):
        (tmp_path / f"{name}.yaml").write_text(f"folder: /{name}")
    env = {"KVTIDE_CONFIG": "env.yaml"}
    assert load("folder: /here", env, "--config", "flag.yaml").folder == "/flag"
    assert load("folder: /here", env).folder == "/env"
    assert load("folder: /here", {"KVTIDE_CONFIG": ""}).folder == "/here"


def test_the_home_folder_may_be_written_as_a_tilde(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("folder: /mine")
    assert load("", {}, "--config=~/mine.yaml").folder == "/mine"


@pytest.mark.parametrize(("env", "flags"), [({"KVTIDE_CONFIG": "none.yaml"}, ()), ({}, ("--config=none.yaml",))])
def test_a_named_file_that_is_missing_is_an_error(load: Load, env: dict[str, str], flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file.*name a file"):
        load("", env, *flags)


# Names that are not known ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk: {byte_max: 1}", "kvtide.yaml: disk.byte_max is no setting; did you mean disk.bytes_max?"),
        ("dsik: {bytes_max: 1}", "kvtide.yaml: dsik is no setting; did you mean disk?"),
        ("lease_s: 5", "kvtide.yaml: lease_s is no setting; did you mean leases.lease_s?"),
        ("disk: {requests_max: 5}", "kvtide.yaml: disk.requests_max is no setting; did you mean node.requests_max?"),
        ("dram: {zzz: 5}", "kvtide.yaml: dram.zzz is no setting; there are dram.bytes_max, dram.huge_pages"),
        ("1: 5", "kvtide.yaml: 1 is no setting; there are folder, dram,"),
        ("dram: {2001-01-01: 5}", "kvtide.yaml: dram.date is no setting; there are dram.bytes_max"),
        (
            "tenants: {a: {disk: {byte_max: 1}}}",
            "kvtide.yaml: tenants.a.disk.byte_max is no setting; did you mean tenants.a.disk.bytes_max?",
        ),
        (
            "admin: {clients: [{name: a, token: swordfish}]}",
            "kvtide.yaml: admin.clients[0].token is no setting; did you mean admin.clients[0].token_sha256?",
        ),
        ("tenants: {12: {}}", "kvtide.yaml: tenants has the key 12, which is no text; put it in quotes"),
    ],
)
def test_an_unknown_key_of_the_file_is_answered_with_the_nearest(load: Load, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(text)
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("KVTIDE_DISK__BYTE_MAX", "did you mean KVTIDE_DISK__BYTES_MAX?"),
        ("KVTIDE_DISK_BYTES_MAX", "did you mean KVTIDE_DISK__BYTES_MAX?"),
        ("KVTIDE_XYZ", "all of them stand in docs/configuration.md"),
        ("KVTIDE_PORT", "environment: KVTIDE_PORT is no setting"),
    ],
)
def test_an_unknown_name_of_the_environment_is_answered_with_the_nearest(load: Load, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("", {name: "9733"})


@pytest.mark.parametrize("name", ["KVTIDE_TENANTS", "KVTIDE_TENANTS__A__DISK__BYTES_MAX", "KVTIDE_ADMIN__CLIENTS"])
def test_what_stands_in_the_file_only_is_refused_in_the_environment(load: Load, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment: {name}: .* is set in kvtide\.yaml only"):
        load("", {name: "x"})


def test_names_that_are_no_settings_are_left_alone(load: Load) -> None:
    names = ["SOCKET", "TOKEN", "TENANT", "ADMIN_URL", "ADMIN_TOKEN", "TRACES"]
    env = {f"KVTIDE_{name}": "x" for name in names} | {"OTHER": "x", "kvtide_disk": "x"}
    assert load("", env) == Settings()


def test_what_kubernetes_says_of_a_service_called_kvtide_is_left_alone(load: Load) -> None:
    env = {
        "KVTIDE_SERVICE_HOST": "10.0.0.1",
        "KVTIDE_SERVICE_PORT": "9733",
        "KVTIDE_SERVICE_PORT_ADMIN": "9733",
        "KVTIDE_PORT": "tcp://10.0.0.1:9733",
        "KVTIDE_PORT_9733_TCP": "tcp://10.0.0.1:9733",
        "KVTIDE_PORT_9733_TCP_ADDR": "10.0.0.1",
        "KVTIDE_ADMIN_SERVICE_HOST": "10.0.0.1",
        "KVTIDE_ADMIN_PORT": "tcp://10.0.0.1:9733",
    }
    assert load("", env) == Settings()


def test_a_flag_may_not_be_cut_short() -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--disk-bytes", "5")


# Values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("16GiB", 16 * GIB),
        ("512 MiB", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * GIB // 2),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("2tib", 2 << 40),
        ("1PB", 10**15),
        ("7B", 7),
        ("0.0015kB", 1),
    ],
)
def test_sizes_may_have_units(load: Load, text: str, size: int) -> None:
    env = {"KVTIDE_DISK__BYTES_MAX": text}
    for settings in (load(f"disk: {{bytes_max: {text}}}"), load("", env), load("", {}, "--disk-bytes-max", text)):
        assert settings.disk is not None
        assert settings.disk.bytes_max == size


@pytest.mark.parametrize("text", ["16G", "16Gi", "1.5", "-1", "ten", "1e9", "GiB", "1 2", "true", "[1]", "1.5.2GB"])
def test_what_is_no_size_is_refused_by_its_name(load: Load, text: str) -> None:
    expected = r"dram\.bytes_max is .*; it takes a size in bytes, such as 4096, 512MiB or 1\.5GB"
    with pytest.raises(ConfigError, match=rf"kvtide\.yaml: {expected}"):
        load(f"dram: {{bytes_max: {text}}}")
    with pytest.raises(ConfigError, match=rf"environment: KVTIDE_DRAM__BYTES_MAX: {expected}"):
        load("", {"KVTIDE_DRAM__BYTES_MAX": text})
    with pytest.raises(ConfigError, match=rf"flag --dram-bytes-max: {expected}"):
        load("", {}, f"--dram-bytes-max={text}")


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("30", 30.0), ("0.5", 0.5), ("30s", 30.0), ("5m", 300.0), ("200ms", 0.2), ("1.5 h", 5400.0), ("1e-3", 0.001)],
)
def test_times_may_have_units(load: Load, text: str, time_s: float) -> None:
    env = {"KVTIDE_CALLS__RECONNECT_S_MAX": text}
    assert load(f"leases: {{lease_s: {text}}}", env).leases.lease_s == time_s
    assert load("", env).calls.reconnect_s_max == time_s


@pytest.mark.parametrize("text", ["soon", "5 weeks", "-1", ".nan", ".inf", "true", "9" * 31, "1e400", "1e308d", "{}"])
def test_what_is_no_time_is_refused(load: Load, text: str) -> None:
    if text != "-1":  # a number, which `check` refuses
        with pytest.raises(ConfigError, match=r"leases\.lease_s is .*; it takes a time, such as 30, 30s, 5m or 200ms"):
            load(f"leases: {{lease_s: '{text}'}}" if text[0] == "9" else f"leases: {{lease_s: {text}}}")
    with pytest.raises(ConfigError, match=r"leases\.lease_s is .*; it takes a time"):
        load("", {"KVTIDE_LEASES__LEASE_S": text})


@pytest.mark.parametrize(("text", "mode"), [("0600", 0o600), ("0o660", 0o660), ('"0660"', 0o660)])
def test_permissions_are_octal(load: Load, text: str, mode: int) -> None:
    assert load(f"node: {{socket_mode: {text}}}").node.socket_mode == mode
    assert load("", {"KVTIDE_NODE__SOCKET_MODE": text.strip('"')}).node.socket_mode == mode
    assert load("", {}, "--node-socket-mode=777").node.socket_mode == 0o777


@pytest.mark.parametrize("text", ["0888", "rw", "true", "6.0", "-1x"])
def test_what_is_no_permission_is_refused(load: Load, text: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.socket_mode is .*; it takes permissions in octal"):
        load(f"node: {{socket_mode: {text}}}")


@pytest.mark.parametrize(
    ("text", "is_on"), [("true", True), ("YES", True), ("1", True), ("false", False), ("no", False), ("0", False)]
)
def test_yes_and_no_have_several_words(load: Load, text: str, is_on: bool) -> None:
    assert load("", {"KVTIDE_ADMIN__IS_ON": text}).admin.is_on is is_on
    assert load("", {}, "--admin-is-on", text).admin.is_on is is_on


def test_none_unsets_what_may_be_none_and_nothing_else(load: Load) -> None:
    file = "disk: {bytes_max: 5, folder: /x}\nadmin: {is_metrics_open: true}"
    assert load(file, {"KVTIDE_DISK__BYTES_MAX": "None"}, "--disk-folder=null").disk == DiskSettings()
    assert load(file, {"KVTIDE_ADMIN__IS_METRICS_OPEN": "none"}).admin == AdminSettings()
    assert load("disk: {bytes_max: null}").disk == DiskSettings()
    assert load("disk: null").disk is None
    with pytest.raises(ConfigError, match=r"disk\.io_threads is 'none'; it takes a whole number"):
        load("", {"KVTIDE_DISK__IO_THREADS": "none"})
    with pytest.raises(ConfigError, match=r"disk\.io_threads is empty; it takes a whole number"):
        load("disk: {io_threads: }")


@pytest.mark.parametrize("text", ["4.0", "true", "'4'", "four", "[4]", "1e3", "{a: 1}"])
def test_a_whole_number_is_nothing_else(load: Load, text: str) -> None:
    with pytest.raises(ConfigError, match=r"disk\.io_threads is .*; it takes a whole number"):
        load(f"disk: {{io_threads: {text}}}")
    with pytest.raises(ConfigError, match=r"disk\.io_threads is .*; it takes a whole number"):
        load("", {"KVTIDE_DISK__IO_THREADS": text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dram: {huge_pages: 1}", "dram.huge_pages is 1; it takes true or false"),
        ("dram: {huge_pages: 'yes'}", "dram.huge_pages is 'yes'; it takes true or false"),
        ("disk: {spill_when: never}", "disk.spill_when is 'never'; it takes one of evict, publish, second_use"),
        ("folder: 5", "folder is 5; it takes text; put it in quotes"),
        ("folder: [x]", "folder is a list; it takes text"),
        ("leases: {request_share: half}", "leases.request_share is 'half'; it takes a number"),
        ("leases: {request_share: true}", "leases.request_share is True; it takes a number"),
        ("disk: 5", "disk is 5; it takes a mapping of settings"),
        ("tenants: [a]", "tenants is a list; it takes a mapping by name"),
        ("tenants: {a: {reads: docs}}", "tenants.a.reads is 'docs'; it takes a list"),
        ("tenants: {a: {reads: [5]}}", "tenants.a.reads[0] is 5; it takes text"),
        ("tenants: {a: {clients: [{uid: root}]}}", "tenants.a.clients[0].uid is 'root'; it takes a whole number"),
        ("tenants: {a: {disk: {bytes_max: lots}}}", "tenants.a.disk.bytes_max is 'lots'; it takes a size"),
        ("admin: {clients: [{name: a}]}", "admin.clients[0] has no token_sha256; give it one"),
        ("folder: " + "x" * 5 + "\ndisk: {io_threads: " + "y" * 99 + "}", "disk.io_threads is 'yyyyyyyyy"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_it_takes(load: Load, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kvtide.yaml: {message}")) as caught:
        load(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {a: {clients: [{token_sha256: 99887766}]}}",
        "tenants: {a: {clients: [99887766]}}",
        "tenants: {a: {clients: '99887766'}}",
        "admin: {clients: [{name: a, token_sha256: [99887766]}]}",
        "admin: {clients: [{name: a, token_sha256: '99887766",
        "admin: {clients: [{name: a, token_sha256: @99887766}]}",
    ],
)
def test_a_secret_is_never_shown(load: Load, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert "99887766" not in str(caught.value)
    assert "99887766" not in repr(caught.value.__cause__)


# Files that are no settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "dram:\nnode:\n"])
def test_a_file_that_says_nothing_changes_nothing(load: Load, text: str) -> None:
    assert load(text) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk: [", "line 1, column 8: not YAML: "),
        ("folder: a\n\tdram: b", "line 2, column 1: not YAML: "),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not YAML: but found another document"),
        ("folder: !!python/object:os.system x", "line 1, column 9: not YAML: could not determine a constructor"),
        ("- a\n- b\n", "the file is a list; it takes a mapping of settings"),
        ("hello", "the file is 'hello'; it takes a mapping of settings"),
        ("folder: a\nfolder: b\n", "line 2: folder stands there twice; keep one"),
        ("disk: {io_threads: 1, io_threads: 2}", "line 1: io_threads stands there twice"),
        ("tenants:\n  a:\n    clients:\n      - uid: 1\n        uid: 2\n", "line 5: uid stands there twice"),
        ("folder: 2001-99-99", "has a value that cannot be read; put dates and long numbers in quotes"),
        ("disk: {bytes_max: " + "9" * 5000 + "}", "has a value that cannot be read"),
        ("folder: " + "[" * 5000, "is nested too deeply"),
        ("folder: \x07", "has characters that YAML does not allow"),
        (b"folder: \xff\xfe", "is not UTF-8 text; save it as that"),
        (b"#" * (FILE_BYTES_MAX + 1), f"is larger than {FILE_BYTES_MAX} bytes, so no settings"),
    ],
)
def test_a_file_that_cannot_be_settings_is_refused(load: Load, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kvtide.yaml: {message}")):
        load(text)


def test_a_folder_is_no_file(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory; name a file"):
        load("", {}, f"--config={tmp_path}")


def test_anchors_and_merges_of_yaml_work(load: Load) -> None:
    text = """
    tenants:
      a: &usual
        disk: {bytes_max: 1GiB}
        clients: [{uid: 1}]
      b:
        <<: *usual
        clients: [{uid: 2}]
    """
    tenants = load(text).tenants
    assert tenants["b"].disk == tenants["a"].disk == QuotaSettings(bytes_max=GIB)
    assert [client.uid for client in tenants["b"].clients] == [2]


def test_a_file_that_blows_itself_up_is_refused_in_a_short_message(load: Load) -> None:
    lines = ["a: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    with pytest.raises(ConfigError, match=r"a is no setting"):
        load("\n".join(lines))
    text = "tenants: {" + lines[0] + "}\nfolder: &f [*a0, *a0]\ndisk: {folder: *f}"
    with pytest.raises(ConfigError, match=r"is a list; it takes") as caught:
        load(text)
    assert len(str(caught.value)) < 200


def test_without_yaml_a_file_is_refused_with_its_pip_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtra, match=r"PyYAML: pip install 'kvtide\[serve\]'"):
        load("folder: /x")


def test_settings_need_no_extra_unless_there_is_a_file(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['xxhash', 'yaml', 'starlette', 'uvicorn', 'prometheus_client']))\n"
        "import argparse, kvtide.config, kvtide.config.defaults, kvtide.config.reference\n"
        "from kvtide.config.sources import add_flags, load_settings\n"
        "parser = argparse.ArgumentParser()\n"
        "add_flags(parser)\n"
        "settings = load_settings(parser.parse_args(['--node-requests-max=5']), {})\n"
        "settings.check()\n"
        "print(settings.node.requests_max)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stdout) == (0, "5\n"), ended.stderr


# All settings ---------------------------------------------------------------------------------------------


def test_every_setting_has_a_flag_with_its_default_or_stands_in_the_file_only() -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, 0, 80, 999))
    add_flags(parser)
    text = parser.format_help()
    for setting in list_settings():
        if setting.is_scalar:
            assert re.search(rf"{setting.flag} .*\(default: {re.escape(setting.default_text())}\)", text)
        else:
            assert setting.flag not in text
            assert re.search(rf"file only:\n.*\b{re.escape(setting.name)}\b", text)


sizes = st.integers(0, 1 << 60)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: text.strip().lower() not in ("none", "null")
)
times = st.floats(0, 1e300, allow_nan=False)
shares = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(-(10**20), 10**20)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)


def of(struct: type[msgspec.Struct], **fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Any value of a class of settings. A field without a strategy is a mistake: a new setting belongs here, too."""
    assert set(fields) == set(struct.__struct_fields__)
    return st.builds(struct, **fields)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


def by_name(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.dictionaries(texts, strategy, max_size=2)


def listed(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(strategy, max_size=2).map(tuple)


quotas = of(QuotaSettings, bytes_reserved=sizes, bytes_max=maybe(sizes))
own_arena = of(ArenaSettings, bytes_max=maybe(sizes))
tenants = of(
    TenantSettings,
    secret_file=maybe(texts),
    clients=listed(
        of(ClientSettings, role=st.sampled_from(get_args(Role)), uid=maybe(counts), token_sha256=maybe(hashes))
    ),
    dram=own_arena,
    disk=quotas,
    scopes=by_name(of(ScopeSettings, dram=quotas, disk=quotas)),
    reads=listed(texts),
)
admin_clients = of(AdminClientSettings, name=texts, token_sha256=hashes, role=st.sampled_from(["reader", "operator"]))


def any_settings(*, has_lists: bool) -> st.SearchStrategy[object]:
    nothing: st.SearchStrategy[object] = st.just({})
    return of(
        Settings,
        folder=texts,
        dram=of(DramSettings, bytes_max=maybe(sizes), huge_pages=st.booleans()),
        disk=maybe(
            of(
                DiskSettings,
                folder=maybe(texts),
                bytes_max=maybe(sizes),
                io_threads=counts,
                spill_when=st.sampled_from(get_args(SpillWhen)),
                spill_queue_bytes_max=maybe(sizes),
                bytes_written_daily_max=maybe(sizes),
            )
        ),
        leases=of(
            LeaseSettings,
            lease_s=times,
            fetch_s=times,
            request_share=shares,
            pinned_share=shares,
            quarantine_share=shares,
        ),
        calls=of(CallSettings, match_s=times, control_s=times, connect_s=times, reconnect_s_max=times),
        node=of(
            NodeSettings,
            socket=maybe(texts),
            socket_mode=st.integers(0, 0o777),
            sessions_max=counts,
            requests_max=counts,
            drain_s=times,
        ),
        admin=of(
            AdminSettings,
            host=texts,
            port=counts,
            is_on=st.booleans(),
            is_metrics_open=maybe(st.booleans()),
            clients=listed(admin_clients) if has_lists else st.just(()),
        ),
        tenants=by_name(tenants) if has_lists else nothing,
        share_groups=by_name(of(ShareGroupSettings, secret_file=maybe(texts), dram=own_arena, disk=quotas))
        if has_lists
        else nothing,
    )


def scalars(settings: Settings) -> dict[str, str]:
    """Each setting that is there, as text."""
    found = {}
    for setting in list_settings():
        section = getattr(settings, setting.section) if setting.section else settings
        if setting.is_scalar and section is not None:
            found[setting.name] = value_text(setting.name, getattr(section, setting.name.rpartition(".")[2]))
    return found


@given(settings=any_settings(has_lists=True))
def test_any_settings_come_back_from_a_file(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(settings)))
    assert load_settings(argparse.Namespace(config=str(file)), {}) == settings


@given(settings=any_settings(has_lists=False))
def test_any_settings_come_back_from_the_environment_and_from_flags(settings: Settings) -> None:
    written = scalars(settings)
    names = {setting.name: setting for setting in list_settings()}
    env = {names[name].env: text for name, text in written.items()}
    assert load_settings(None, env) == settings
    assert load_settings(parse(*(f"{names[name].flag}={text}" for name, text in written.items())), {}) == settings


# The reference --------------------------------------------------------------------------------------------


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), (
        "docs/configuration.md is made from the settings; make it again: .venv/bin/python -c "
        "'from kvtide.config.reference import reference; print(reference(), end=\"\")' > docs/configuration.md"
    )


def test_the_example_of_the_reference_works_and_names_every_setting(load: Load) -> None:
    assert example() in reference()
    settings = load(example())
    settings.check()
    assert (len(settings.tenants), len(settings.share_groups), len(settings.admin.clients)) == (2, 1, 1)
    data = yaml.safe_load(example())
    for setting in list_settings():
        section = data[setting.section] if setting.section else data
        assert setting.name.rpartition(".")[2] in section
