"""Make `python -m labcore.exercises grade` do the same as `python -m labcore grade`."""

import sys

from labcore.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
