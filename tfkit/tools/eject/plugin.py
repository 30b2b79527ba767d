"""The layouts of `tfkit save` with the code of a model, and the property `eject`, registered as a plugin of tfkit."""

from __future__ import annotations

import tfkit


@tfkit.hookimpl
def tfkit_save_layouts() -> list[type[tfkit.Layout]]:
    """Return the layouts with the code of a model for transformers."""
    from tfkit.tools.eject.remote_code.folder import TransformersLayout
    from tfkit.tools.eject.remote_code.sentence_transformers import SentenceTransformersLayout

    return [TransformersLayout, SentenceTransformersLayout]


@tfkit.hookimpl
def tfkit_properties() -> list[tfkit.Property]:
    """Return the property of ejected files."""
    from tfkit.tools.eject.property import ejected

    return [ejected]
