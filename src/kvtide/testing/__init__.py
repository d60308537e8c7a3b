# SPDX-License-Identifier: Apache-2.0
"""Tests that ship: conformance suites to inherit, a state machine, a crash campaign, and blocks to run them with."""
