# SPDX-License-Identifier: Apache-2.0
"""Identities of models: equal for equal weights wherever they lie, different for others, cheap to take."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.model_identity import EXPLICIT_CHARS_MAX, HEADER_BYTES_MAX, model_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rope_theta": 10000.0,
    "text_config": {"num_hidden_layers": 2, "_name_or_path": "/somewhere"},
    "_name_or_path": "/home/somebody/model",
    "transformers_version": "4.50.0",
}
TENSORS = {"norm.weight": ((256,), 1), "layers.0.weight": ((64, 64), 2)}


def write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], int]]) -> None:
    """Write float32 tensors, each filled with one number, given as name -> (shape, number)."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (shape, number) in tensors.items():
        content = np.full(shape, number, dtype=np.float32).tobytes()
        table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def write_sparse_safetensors(path: Path, matrix_bytes: int) -> int:
    """Write a matrix of holes between two norms, and give the offset where the data begins."""
    norm_bytes = 8192
    ends = {"first.norm": norm_bytes, "matrix": norm_bytes + matrix_bytes, "last.norm": 2 * norm_bytes + matrix_bytes}
    shapes = {"first.norm": [norm_bytes], "matrix": [1, matrix_bytes], "last.norm": [norm_bytes]}
    begin, table = 0, {}
    for name, end in ends.items():
        table[name] = {"dtype": "U8", "shape": shapes[name], "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + begin)
    return 8 + len(header)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def bytes_read_by_this_process() -> int:
    """What the kernel counted: a side channel that no buffering or wrapping can hide from."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model-00001-of-00002.safetensors", TENSORS)
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"lm_head.weight": ((64, 8), 3)})
    return folder


def test_an_explicit_id_wins_over_everything(folder: Path) -> None:
    assert model_identity(folder, revision="main", explicit="our model, v3", full=True) == "id:our model, v3"


@pytest.mark.parametrize("explicit", ["", "two\nlines", "x" * (EXPLICIT_CHARS_MAX + 1)])
def test_an_explicit_id_is_short_printable_text(explicit: str) -> None:
    with pytest.raises(ConfigError, match="explicit id"):
        model_identity("anything", explicit=explicit)


@pytest.mark.parametrize(
    ("folder_name", "hub_name"),
    [("models--org--name", "org/name"), ("models--gpt2", "gpt2"), ("models--org--na-me.v1", "org/na-me.v1")],
)
def test_a_hub_snapshot_is_named_without_reading_it(folder_name: str, hub_name: str) -> None:
    # The folder does not exist, so nothing of it can have been read.
    snapshot = Path("/cache") / folder_name / "snapshots" / COMMIT
    assert model_identity(snapshot) == f"hub:{hub_name}@{COMMIT}"
    assert model_identity(f"{snapshot}/") == f"hub:{hub_name}@{COMMIT}"


def test_a_hub_name_with_its_commit_equals_its_snapshot() -> None:
    snapshot = f"/cache/models--org--name/snapshots/{COMMIT}"
    assert model_identity("org/name", revision=COMMIT.upper()) == model_identity(snapshot)


@pytest.mark.parametrize("revision", [None, "", "main", "v1.0", COMMIT[:39], COMMIT + "0", "g" * 40])
def test_a_revision_that_can_move_is_refused_with_the_mend(revision: str | None) -> None:
    with pytest.raises(ConfigError, match="commit of 40 hex digits"):
        model_identity("org/name", revision=revision)


@pytest.mark.parametrize("model", ["/no/such/folder", "org/name/more", "a b"])
def test_what_is_neither_folder_nor_hub_name_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        model_identity(model, revision=COMMIT)


def test_a_single_file_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        model_identity(folder / "model-00001-of-00002.safetensors")


def test_full_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        model_identity("org/name", revision=COMMIT, full=True)


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_has_a_stable_short_identity(folder: Path, full: bool) -> None:
    identity = model_identity(folder, full=full)
    assert re.fullmatch(r"full:[0-9a-f]{64}" if full else r"files:[0-9a-f]{64}", identity)
    assert identity == model_identity(str(folder), full=full)


def test_golden_identities(folder: Path) -> None:
    assert model_identity(folder) == "files:8ee7a11e444a5b1bcde4ce33102b9c5c8342164e184516d01642b745d8407c41"
    assert model_identity(folder, full=True) == "full:44086c190f352b0d6b97ada5eca9af944b89b235112f105c2b1697846247f269"


@pytest.mark.parametrize("full", [False, True])
def test_path_times_order_and_bystanders_do_not_matter(folder: Path, tmp_path: Path, full: bool) -> None:
    copy = tmp_path / "elsewhere" / "under another name"
    copy.mkdir(parents=True)
    for path in sorted(folder.iterdir(), reverse=True):
        shutil.copy(path, copy / path.name)
        os.utime(copy / path.name, (1, 1))
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (copy / "README.md").write_text("words")
    (copy / "nested.bin").mkdir()
    assert model_identity(copy, full=full) == model_identity(folder, full=full)


def test_links_into_a_blob_store_are_followed(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert model_identity(linked) == model_identity(folder)


def test_configuration_fields_without_meaning_do_not_matter(folder: Path) -> None:
    before = model_identity(folder)
    config = CONFIG | {"_name_or_path": "x", "transformers_version": "5", "_commit_hash": COMMIT}
    config["text_config"] = {"_name_or_path": "y", "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert model_identity(folder) == before


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("change", [{"rope_theta": 500000.0}, {"text_config": {"num_hidden_layers": 3}}, {"new": 1}])
def test_configuration_fields_with_meaning_matter(folder: Path, change: dict[str, object], full: bool) -> None:
    before = model_identity(folder, full=full)
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    assert model_identity(folder, full=full) != before


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(TENSORS | {"layers.0.weight": ((64, 64), 9)}, id="other numbers"),
        pytest.param(TENSORS | {"layers.0.weight": ((32, 128), 2)}, id="other shape, same bytes"),
        pytest.param(TENSORS | {"layers.1.weight": ((8, 8), 2)}, id="one tensor more"),
    ],
)
def test_other_weights_matter(folder: Path, tensors: dict[str, tuple[tuple[int, ...], int]], full: bool) -> None:
    before = model_identity(folder, full=full)
    write_safetensors(folder / "model-00001-of-00002.safetensors", tensors)
    assert model_identity(folder, full=full) != before


@pytest.mark.parametrize("full", [False, True])
def test_file_names_matter(folder: Path, full: bool) -> None:
    before = model_identity(folder, full=full)
    (folder / "model-00002-of-00002.safetensors").rename(folder / "other.safetensors")
    assert model_identity(folder, full=full) != before


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ".pt", ".pth"])
def test_other_formats_are_sampled_and_never_interpreted(folder: Path, suffix: str) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    weights = folder / f"weights{suffix}"
    # A pickle that would end the process, were it ever loaded.
    weights.write_bytes(b"cos\n_exit\n(I1\ntR." + bytes(1_000_000))
    before = model_identity(folder)
    overwrite(weights, weights.stat().st_size - 1, b"\x01")
    assert model_identity(folder) != before


@pytest.mark.parametrize("where", ["first.norm", "last.norm"])
def test_a_change_of_one_norm_in_a_huge_file_shows(folder: Path, where: str) -> None:
    path = folder / "huge.safetensors"
    matrix_bytes = 4 * 2**30
    data_start = write_sparse_safetensors(path, matrix_bytes)
    before = model_identity(folder)
    overwrite(path, data_start + (0 if where == "first.norm" else 8192 + matrix_bytes) + 4000, b"\x01")
    assert model_identity(folder) != before


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count reads")
def test_little_is_read_of_a_huge_file(folder: Path) -> None:
    write_sparse_safetensors(folder / "huge.safetensors", matrix_bytes=8 * 2**30)
    before = bytes_read_by_this_process()
    model_identity(folder)
    assert bytes_read_by_this_process() - before < 2 * 2**20


def test_full_sees_what_samples_cannot(folder: Path) -> None:
    path = folder / "large.safetensors"
    data_start = write_sparse_safetensors(path, matrix_bytes=32 * 2**20)
    sampled, full = model_identity(folder), model_identity(folder, full=True)
    overwrite(path, data_start + 8192 + 100_000, b"\x01")
    assert model_identity(folder) == sampled
    assert model_identity(folder, full=True) != full


def test_full_reads_a_snapshot_rather_than_believe_its_name(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    assert model_identity(snapshot, full=True) == model_identity(folder, full=True)


def test_full_tells_its_progress(folder: Path) -> None:
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    calls: list[tuple[int, int]] = []
    model_identity(folder, full=True, progress=lambda done, in_all: calls.append((done, in_all)))
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
    assert {in_all for _, in_all in calls} == {total}


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json; .*explicit id"):
        model_identity(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"no weights .*explicit id"):
        model_identity(folder)


@pytest.mark.parametrize("config", [b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000])
def test_a_config_that_is_no_json_is_refused(folder: Path, config: bytes) -> None:
    (folder / "config.json").write_bytes(config)
    with pytest.raises(ConfigError, match="download it again"):
        model_identity(folder)


def test_a_config_of_absurd_size_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 2**34)
    with pytest.raises(ConfigError, match="no model's configuration"):
        model_identity(folder)


def test_a_safetensors_file_cut_anywhere_is_refused(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"damaged: .*download it again"):
            model_identity(folder)


@pytest.mark.parametrize(
    "table",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"shape": [1]}}',
        b'{"a": {"shape": [1], "data_offsets": [0]}}',
        b'{"a": {"shape": 1, "data_offsets": [0, 0]}}',
        b'{"a": {"shape": [1], "data_offsets": ["x", 0]}}',
        b'{"a": {"shape": [1], "data_offsets": [-1, 0]}}',
        b'{"a": {"shape": [1], "data_offsets": [1, 0]}}',
        b'{"a": {"shape": [1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_a_table_that_lies_is_refused(folder: Path, table: bytes) -> None:
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(table)) + table)
    with pytest.raises(ConfigError, match="damaged"):
        model_identity(folder)


def test_a_header_over_the_bound_is_not_read(folder: Path) -> None:
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", HEADER_BYTES_MAX + 1))
    os.truncate(path, 2**34)
    with pytest.raises(ConfigError, match="does not fit"):
        model_identity(folder)


def test_a_file_that_cannot_be_read_is_a_config_error(folder: Path) -> None:
    path = folder / "config.json"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # opens, and fails at the first read, for root too
    with pytest.raises(ConfigError, match="cannot read"):
        model_identity(folder)
