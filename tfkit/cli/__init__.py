"""The command line: arguments here, work in `tfkit.tools`, one module for each family of commands."""

from tfkit.cli.app import main as main
