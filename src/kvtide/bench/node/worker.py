# SPDX-License-Identifier: Apache-2.0
"""`python -m kvtide.bench.node.worker module:class`: a process of a crew."""

import sys

from kvtide.bench.node.crew import work

if __name__ == "__main__":
    work(sys.argv[1])
