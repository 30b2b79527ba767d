"""The names of all specs, runs and sweeps: of tfkit, and of the plugins in this repository."""

from __future__ import annotations

from tfkit.plugin.manager import available_plugins

KNOWN = available_plugins().specs
NAMES = list(KNOWN.files)
RUNS, SWEEPS = (list(KNOWN.documents[sort].files) for sort in ("run", "sweep"))
