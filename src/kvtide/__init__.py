# SPDX-License-Identifier: Apache-2.0
"""kvtide: the KV cache of LLM engines as content-addressed blocks in a ladder of tiers."""

__version__ = "0.1.0"
