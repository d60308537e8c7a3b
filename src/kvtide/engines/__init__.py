# SPDX-License-Identifier: Apache-2.0
"""Adapters that run inside an engine's process, a room for each engine."""
