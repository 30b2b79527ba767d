"""stub"""

from tfkit.tools.sweep.arms import Arms
from tfkit.tools.sweep.results import Results


def page(arms: Arms, found: Results) -> str:
    """Stub."""
    return ""
