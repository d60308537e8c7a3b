# SPDX-License-Identifier: Apache-2.0
"""Places that hold frames. `tier` is the interface; each medium is a file or a folder of its own."""
