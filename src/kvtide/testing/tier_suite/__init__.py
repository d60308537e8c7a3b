# SPDX-License-Identifier: Apache-2.0
"""The facts that make a tier a tier, as tests to inherit.

    class TestMyTier(TierSuite):
        def make_tier(self, folder: Path, bytes_max: int) -> Tier: ...
        def raw_get(self, tier: Tier, address: Address) -> bytes | None: ...
        def raw_set(self, tier: Tier, address: Address, raw: bytes) -> None: ...

Owns no tier and knows no medium: what differs between media is read from `Traits`, and a fact that a
medium does not claim is skipped with the reason. Content is `blocks.pattern`, so every byte that comes
back can be told right from wrong.
"""

from kvtide.testing.tier_suite.damage import DamageFacts
from kvtide.testing.tier_suite.keeping import KeepingFacts
from kvtide.testing.tier_suite.living import LivingFacts
from kvtide.testing.tier_suite.sharing import SharingFacts

__all__ = ["TierSuite"]


class TierSuite(KeepingFacts, SharingFacts, LivingFacts, DamageFacts):
    """Inherit, supply the three methods, receive the facts. Override `bytes_max` if the medium needs more."""
