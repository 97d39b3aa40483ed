"""`python -m reefknot`: the command line."""

import sys

from reefknot.console.cli import main

if __name__ == "__main__":
    sys.exit(main())
