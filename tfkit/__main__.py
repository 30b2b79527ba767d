"""`python -m tfkit` is `tfkit`."""

from tfkit.cli import main

if __name__ == "__main__":
    main()
