# SPDX-License-Identifier: Apache-2.0
"""How long hypothesis looks for counterexamples (`HYPOTHESIS_PROFILE=campaign`: long), and whose asserts explain."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The suites are imported, not collected: without this a failing assert of theirs would not show its values.
pytest.register_assert_rewrite("kvtide.testing.tier_suite", "kvtide.testing.policy_suite", "kvtide.testing.store_suite")

# A shared runner must not fail for what it found by chance in an unrelated change, nor for being slow.
settings.register_profile("default", max_examples=100, deadline=None, derandomize="CI" in os.environ)
settings.register_profile(
    "campaign", max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
