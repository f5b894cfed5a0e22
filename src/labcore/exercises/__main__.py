"""`python -m labcore.exercises grade`: the command `python -m labcore grade` by another name."""

import sys

from labcore.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
