# SPDX-License-Identifier: Apache-2.0
"""The facts that make a cache a cache, as tests to inherit: for a store, a client of one, or what wraps either.

    class TestMyCache(StoreSuite):
        def make_cache(self, folder: Path) -> ClearableCache: ...

Owns no cache and knows none: what differs between them is said in the class variables of `CacheFacts`, and a
fact that a cache does not claim is skipped with the reason. Content is `blocks.pattern`, so every byte that
comes back can be told right from wrong. Caches of several tests may be of one service: each test has a namespace
of its own, and clears what others left.
"""

from kvtide.testing.store_suite.finding import FindingFacts
from kvtide.testing.store_suite.leasing import LeasingFacts
from kvtide.testing.store_suite.living import LivingFacts
from kvtide.testing.store_suite.reading import ReadingFacts
from kvtide.testing.store_suite.tools import ClearableCache
from kvtide.testing.store_suite.writing import WritingFacts

__all__ = ["ClearableCache", "StoreSuite"]


class StoreSuite(FindingFacts, ReadingFacts, LeasingFacts, WritingFacts, LivingFacts):
    """Inherit, supply `make_cache`, receive the facts. Set the class variables where the cache differs."""
