# SPDX-License-Identifier: Apache-2.0
"""Who leaves when a tier is full: pure data structures without I/O, clock or locks."""
