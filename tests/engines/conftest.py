# SPDX-License-Identifier: Apache-2.0
"""Models for the tests of engines: a real one, converted once on each machine, and tiny ones of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtide.cache import Cache
from kvtide.config import DramSettings, Settings
from kvtide.engines.transformers.model_folder import model_folder
from kvtide.store import Store, open_store

# torch and transformers are imported by the fixtures that need them: not every test here does, and they take seconds.
if TYPE_CHECKING:
    from kvtide.engines.transformers import Engine


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, from the user's own cache: the first run on a machine takes half a minute longer.

    Workers of one run wait for the one that converts.
    """
    return model_folder("smollm2")


# For the engine that runs tiny models -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def one_torch_thread() -> Iterator[None]:
    """Tiny models gain nothing by more of them, and other tests run beside these."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store() -> Iterator[Store]:
    """Embedded, of DRAM alone."""
    with open_store(Settings(dram=DramSettings(bytes_max=32 << 20, huge_pages=False))) as store:
        yield store


@pytest.fixture
def engine_of(one_torch_thread: None) -> Iterator[Callable[..., Engine]]:
    """Makes engines in front of a cache, with blocks of one page; closes them."""
    from tiny import BLOCK, poisoned_buffers, tiny_model

    from kvtide.engines.transformers import Engine, EngineSettings

    with poisoned_buffers(), ExitStack() as stack:

        def make(cache: Cache | None = None, model: Any = None, *, identity: str = "tiny", **settings: Any) -> Engine:
            settings = {"block_tokens": BLOCK} | settings
            model = tiny_model() if model is None else model
            return stack.enter_context(
                Engine(model, identity=identity, cache=cache, settings=EngineSettings(**settings))
            )

        yield make
