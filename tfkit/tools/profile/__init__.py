"""The time and the memory of a step, by the spec's own names: `profile` and `profile_models`."""

from tfkit.tools.profile.models import profile, profile_models
from tfkit.tools.profile.result import ComponentTime, KernelTime, Limits, Memory, Profile, rows

__all__ = ["ComponentTime", "KernelTime", "Limits", "Memory", "Profile", "profile", "profile_models", "rows"]
