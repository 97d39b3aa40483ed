"""`python -m reefknot`: the command line."""

import sys

from reefknot.cli import main

if __name__ == "__main__":
    sys.exit(main())
