# SPDX-License-Identifier: Apache-2.0
"""How long hypothesis looks for counterexamples: `HYPOTHESIS_PROFILE=campaign` for a long search."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A shared runner must not fail for what it found by chance in an unrelated change, nor for being slow.
settings.register_profile("default", max_examples=100, deadline=None, derandomize="CI" in os.environ)
settings.register_profile(
    "campaign", max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
