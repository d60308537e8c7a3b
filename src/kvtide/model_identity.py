# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine runs, as a short string that is equal exactly where the KV is interchangeable.

    id:<text>                 the operator says so
    hub:<org/name>@<commit>   a commit of a model hub: its files cannot change, so none is read
    files:<sha256>            a folder: configuration, file names and sizes, tensor tables, samples of the data
    full:<sha256>             a folder: configuration, file names and sizes, and every byte

Folder path, file times and file order do not matter. Nothing is unpickled and no code of the model is run.

`files` reads some 256 KiB of each file, spread over it, and the head of each vector in it. Training touches
nearly all of a model, or only its vectors (norms, biases, scales), and both show. An edit of a few matrices
by hand may not: use `full`, or an explicit id, for such models.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from kvtide.errors import ConfigError

Progress: TypeAlias = Callable[[int, int], None]
Piece: TypeAlias = tuple[int, int]

WEIGHT_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
PIECES: Final = 64
PIECE_BYTES: Final = 4096
EXPLICIT_CHARS_MAX: Final = 256
CONFIG_BYTES_MAX: Final = 16 * 2**20
# What the safetensors library itself accepts.
HEADER_BYTES_MAX: Final = 100_000_000
FULL_READ_BYTES: Final = 8 * 2**20

# Written by whoever saved the model, without meaning for its numbers: where it lay, from which commit it was
# loaded, which library wrote it. Every copy of a model would get its own identity. All else stays: a field
# too many costs hits, a field too few serves wrong bytes.
CONFIG_FIELDS_IGNORED: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_HUB_FOLDER_PREFIX: Final = "models--"


def model_identity(
    model: str | Path,
    *,
    revision: str | None = None,
    explicit: str | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> str:
    """Name the weights of `model`: a folder, a hub's snapshot folder, or a hub name with its commit.

    `explicit` wins over everything. `revision` is for hub names: a folder is what it is. `full` reads every
    byte of a folder and tells `progress` the bytes done and the bytes in all.
    """
    if explicit is not None:
        return f"id:{_checked_explicit(explicit)}"
    folder = Path(model)
    snapshot = _snapshot_identity(folder)
    if snapshot is not None and not full:
        return snapshot
    if folder.is_dir():
        try:
            return _full_identity(folder, progress) if full else _files_identity(folder)
        except OSError as error:
            raise ConfigError(f"model: cannot read {folder}: {error}; mend it or set an explicit id") from error
    if full or folder.exists():
        raise ConfigError(f"model: {model} is no folder; pass the folder that holds it or set an explicit id")
    return _hub_identity(str(model), revision)


def _checked_explicit(explicit: str) -> str:
    if not 1 <= len(explicit) <= EXPLICIT_CHARS_MAX or not explicit.isprintable():
        raise ConfigError(f"model: an explicit id has 1..{EXPLICIT_CHARS_MAX} printable characters")
    return explicit


def _snapshot_identity(folder: Path) -> str | None:
    """Read name and commit off a path like models--org--name/snapshots/<commit>, a hub cache's way to store."""
    # Absolute, since "." may be such a folder; links stay as they are, since hub caches do not link folders.
    parts = folder.absolute().parts
    if len(parts) < 3:
        return None
    repository, marker, commit = parts[-3:]
    if not repository.startswith(_HUB_FOLDER_PREFIX) or marker != "snapshots" or not _COMMIT.fullmatch(commit):
        return None
    name = repository.removeprefix(_HUB_FOLDER_PREFIX).replace("--", "/")
    return f"hub:{name}@{commit}"


def _hub_identity(name: str, revision: str | None) -> str:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model: {name} is neither a folder nor a hub name; check the path")
    commit = (revision or "").lower()
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(
            f"model: {name} at revision {revision or 'unset'} can change under our feet; set revision to a"
            " commit of 40 hex digits, or pass the snapshot folder, or set an explicit id",
            revision=revision,
        )
    return f"hub:{name}@{commit}"


def _files_identity(folder: Path) -> str:
    digest = hashlib.sha256(b"kvtide model files 1")
    digest.update(_framed(_canonical_config(folder)))
    for path in _weight_files(folder):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(_framed(path.name.encode(), str(size).encode()))
            if path.suffix == ".safetensors":
                header, pieces = _safetensors_sample(file, path, size)
            else:
                header, pieces = b"", _spread(0, size)
            digest.update(_framed(header, *(_read(file, path, *piece) for piece in pieces)))
    return f"files:{digest.hexdigest()}"


def _full_identity(folder: Path, progress: Progress | None) -> str:
    digest = hashlib.sha256(b"kvtide model full 1")
    digest.update(_framed(_canonical_config(folder)))
    paths = _weight_files(folder)
    total_bytes = sum(path.stat().st_size for path in paths)
    done_bytes = 0
    buffer = memoryview(bytearray(FULL_READ_BYTES))
    for path in paths:
        content = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                content.update(buffer[:count])
                done_bytes += count
                if progress is not None:
                    progress(done_bytes, total_bytes)
        digest.update(_framed(path.name.encode(), content.digest()))
    return f"full:{digest.hexdigest()}"


def _canonical_config(folder: Path) -> bytes:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model: {folder} has no config.json; pass a model's folder or set an explicit id")
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ConfigError(f"model: {path} is over {CONFIG_BYTES_MAX} bytes, so no model's configuration")
    try:
        config = json.loads(path.read_bytes())
        return json.dumps(_without_ignored(config), sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} is not JSON ({error}); download it again") from error


def _without_ignored(config: object) -> object:
    """Drop the ignored fields at every depth: multi-modal models nest one configuration in another."""
    if isinstance(config, dict):
        return {name: _without_ignored(value) for name, value in config.items() if name not in CONFIG_FIELDS_IGNORED}
    if isinstance(config, list):
        return [_without_ignored(value) for value in config]
    return config


def _weight_files(folder: Path) -> list[Path]:
    paths = sorted(
        (path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file()),
        key=lambda path: path.name,
    )
    if not paths:
        raise ConfigError(
            f"model: {folder} has no weights ({', '.join(WEIGHT_SUFFIXES)}); pass a model's folder or set an"
            " explicit id"
        )
    return paths


def _safetensors_sample(file: BinaryIO, path: Path, size: int) -> tuple[bytes, list[Piece]]:
    """Read the table of tensors, and choose the pieces of the data to read: spread ones, and all vectors."""
    if size < 8:
        raise _damaged(path, f"it has {size} bytes, and the length of its header alone takes 8")
    header_bytes = int.from_bytes(_read(file, path, 0, 8), "little")
    if header_bytes > min(HEADER_BYTES_MAX, size - 8):
        raise _damaged(path, f"a header of {header_bytes} bytes does not fit")
    header = _read(file, path, 8, header_bytes)
    data_start = 8 + header_bytes
    tensors = _tensor_table(header, path)
    if max((end for _, _, end in tensors), default=0) != size - data_start:
        raise _damaged(path, "its tensors do not end where the file ends")
    # A norm or a bias is too small for a spread piece to fall on, yet it may be all that a tuning changed.
    vectors = [(data_start + begin, min(end - begin, PIECE_BYTES)) for rank, begin, end in tensors if rank <= 1]
    return header, [*_spread(data_start, size), *sorted(vectors)]


def _tensor_table(header: bytes, path: Path) -> list[tuple[int, int, int]]:
    """Take number of dimensions, begin and end of each tensor from a safetensors header."""
    try:
        table = json.loads(header)
        tensors = []
        for name, tensor in table.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                tensors.append((len(tensor["shape"]), int(begin), int(end)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is no table of tensors ({error!r})") from error
    if any(not 0 <= begin <= end for _, begin, end in tensors):
        raise _damaged(path, "a tensor ends before it begins")
    return tensors


def _spread(start: int, end: int) -> list[Piece]:
    """Choose PIECES pieces of [start, end), evenly, the first at its start and the last at its end."""
    if end - start <= PIECES * PIECE_BYTES:
        return [(start, end - start)]
    last = end - start - PIECE_BYTES
    return [(start + last * index // (PIECES - 1), PIECE_BYTES) for index in range(PIECES)]


def _read(file: BinaryIO, path: Path, offset: int, count: int) -> bytes:
    file.seek(offset)
    piece = file.read(count)
    if len(piece) != count:
        raise _damaged(path, f"it ends before byte {offset + count}")
    return piece


def _framed(*pieces: bytes) -> bytes:
    """Put each piece behind its length, so that bytes cannot move from one piece to the next unseen."""
    return b"".join(len(piece).to_bytes(8, "little") + piece for piece in pieces)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"model: {path} is damaged: {why}; download it again", path=str(path))
