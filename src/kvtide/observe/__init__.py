# SPDX-License-Identifier: Apache-2.0
"""What operators see: so far, logs of faults that repeat."""
