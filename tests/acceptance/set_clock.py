"""
The command line under a wall clock that somebody sets while it runs.

    python set_clock.py FILE WORD ...

FILE holds the seconds by which the wall clock is wrong, and may be written at any time. The steady clocks are right, as
they are on a machine whose wall clock is set.
"""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    wrong_by, true_time = Path(sys.argv.pop(1)), time.time
    time.time = lambda: true_time() + float(wrong_by.read_text())
    from reefknot.console.cli import main  # only now: modules take the function when they are imported

    sys.exit(main())
