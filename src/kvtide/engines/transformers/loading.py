# SPDX-License-Identifier: Apache-2.0
"""From a model folder to an engine that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvtide.cache import Cache
from kvtide.engines.transformers.engine import Engine, EngineSettings
from kvtide.errors import ConfigError
from kvtide.model_identity import model_identity

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what belongs to its model."""

    engine: Engine
    tokenizer: Any
    dtype: str
    folder: Path


def load(
    folder: Path,
    *,
    dtype: str = "auto",
    cache: Cache | None = None,
    settings: EngineSettings | None = None,
    identity: str | None = None,
) -> Loaded:
    """Load a causal language model of transformers. `identity`: of the weights, where their digest is not wanted.

    `dtype` "auto" is the model's own, or float32 on a CPU that cannot multiply in it. Raises ConfigError.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is not known: choose {', '.join(DTYPES)}", field="dtype")
    named = identity or model_identity(folder)
    model = load_model(folder, dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    engine = Engine(model, identity=named, cache=cache, settings=settings)
    return Loaded(engine, tokenizer, str(model.dtype).removeprefix("torch."), folder)


def load_model(folder: Path, dtype: str = "auto") -> Any:
    """The model alone, on the GPU where there is one. No code of the model's folder is run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
        with _without_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=chosen, local_files_only=True, use_safetensors=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {error}") from error
    if dtype == "auto" and device == "cpu" and not _can_multiply(model.dtype):
        model = model.to(torch.float32)
    return model.to(device).eval()


def _can_multiply(dtype: torch.dtype) -> bool:
    """Without instructions for it, a CPU multiplies matrices of 16-bit floats a hundred times slower."""
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported())


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws a bar for each file; whoever loads an engine shows his own progress."""
    is_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_on:
            transformers_logging.enable_progress_bar()
