# SPDX-License-Identifier: Apache-2.0
"""The command `kvtide`: `main.py` finds the verb, and each verb has a file of its own."""
