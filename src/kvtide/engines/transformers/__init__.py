# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, through the cache: `load` a folder, `generate` with its engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.engines.transformers.engine import Engine, EngineSettings, EngineStats
    from kvtide.engines.transformers.generation import Finish, Generation, Reuse, Sampling
    from kvtide.engines.transformers.loading import Loaded, load

__all__ = [
    "Engine",
    "EngineSettings",
    "EngineStats",
    "Finish",
    "Generation",
    "Loaded",
    "Reuse",
    "Sampling",
    "load",
]

_PLACES = {
    "Engine": "engine",
    "EngineSettings": "engine",
    "EngineStats": "engine",
    "Finish": "generation",
    "Generation": "generation",
    "Loaded": "loading",
    "Reuse": "generation",
    "Sampling": "generation",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    """When first asked for: torch and transformers take seconds to import, and a model's wrong name needs neither."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
