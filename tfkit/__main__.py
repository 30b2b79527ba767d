"""`python -m tfkit` is `tfkit`."""

import sys

from tfkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
