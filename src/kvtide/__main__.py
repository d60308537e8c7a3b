# SPDX-License-Identifier: Apache-2.0
"""`python -m kvtide` is the command `kvtide`."""

import sys

from kvtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
