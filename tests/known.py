"""The names of all specs: of tfkit, and of the plugins in this repository."""

from __future__ import annotations

from tfkit.plugin.manager import available

KNOWN = available().specs
NAMES = list(KNOWN.files)
