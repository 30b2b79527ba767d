"""The built-in layouts, registered as a plugin of tfkit."""

from __future__ import annotations

import tfkit


@tfkit.hookimpl
def tfkit_save_layouts() -> list[type[tfkit.Layout]]:
    """Return the built-in layouts."""
    from tfkit.tools.save.built_in_layouts import HuggingfaceLayout, TfkitLayout
    from tfkit.tools.save.peft import PeftLayout

    return [TfkitLayout, HuggingfaceLayout, PeftLayout]
