# SPDX-License-Identifier: Apache-2.0
"""The node service: one cache for all engines of a machine, with tenants kept apart."""
