# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a real model, a real service, the same answers, sooner. What `kvtide demo` runs."""
