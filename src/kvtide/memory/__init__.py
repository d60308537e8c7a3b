# SPDX-License-Identifier: Apache-2.0
"""Memory that frames live in: the shared arena, and who has which piece of it."""
