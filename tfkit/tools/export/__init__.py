"""Models in formats that run without tfkit: `export`."""

from tfkit.tools.export.export import Exported, export

__all__ = ["Exported", "export"]
