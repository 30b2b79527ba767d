"""A config in a few words for a box and in full for a tip, without naming any kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfkit.component import (
    AttentionConfig,
    Component,
    Config,
    MaskConfig,
    NormConfig,
    PatchMarker,
    SharedMarker,
    WireMarker,
    marker,
)
from tfkit.plugin.docs import first_paragraph
from tfkit.tools.draw.scene import Chip, Note
from tfkit.tools.show.values import number, text_of

LONGEST = 40
"""Longest value, in characters, that is shown in a picture."""
USUAL = ("dropout", "eps")
"""Fields that do not affect the architecture."""
Tip = tuple[tuple[str, str], ...]


def notes_of(config: Config) -> Iterator[Note]:
    """Yield the notes in the box of a config: its sizes, and all unusual values."""
    for name, value in sorted(_telling(config), key=lambda field: not field[0].startswith("n_")):
        if isinstance(value, MaskConfig):
            yield from window_of(value)
        elif not isinstance(value, Config):
            yield Note(name, fact(name, value))
    if isinstance(config, AttentionConfig) and "d_head" in type(config).model_fields and config.d_head is None:
        yield Note("d_head", f"d_head {config.head_width}")


def chips_of(config: Config) -> Iterator[Chip]:
    """Yield the components and mappings inside a config."""
    for name, value in _telling(config):
        if isinstance(value, Config) and not isinstance(value, MaskConfig):
            role = value.slot if isinstance(value, Component) else "step"
            yield Chip(name, role, _described(name, value))


def window_of(mask: MaskConfig) -> Iterator[Note]:
    """Yield the extent of attention; nothing if it covers all tokens, or all earlier tokens."""
    if mask.left is not None and mask.causal:
        yield Note("window", f"window {mask.left + 1:,}")
    elif mask.left is not None or mask.right:
        sides = ("all" if side is None else f"{side:,}" for side in (mask.left, mask.right))
        yield Note("window", f"window {' + '.join(sides)}")


def fact(name: str, value: Any) -> str:
    """Format a field: `32 heads`, `d_ff 3,072`, `sinks`."""
    words = name if name.startswith("d_") else name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, int) and name.startswith("n_"):
        words = words.removeprefix("n ").removesuffix("s" if value == 1 else "")
        return f"{value:,} {words}"
    return f"{words} {number(value)}"


def tip_of(config: Config) -> Tip:
    """Return the purpose of a config, followed by all of its values."""
    return (("", first_paragraph(type(config).__doc__ or "")), *_values(config, ""))


def _telling(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the fields that distinguish this config from other configs of its kind."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(config, Component) and name == config.word_key:
            continue
        # Values shared by a whole model, or taken from another node, are shown there.
        if any(marker(info, kind) for kind in (SharedMarker, WireMarker, PatchMarker)) or name in USUAL:
            continue
        if value is None or (not info.is_required() and value == info.get_default(call_default_factory=True)):
            continue
        if isinstance(value, Config) or len(text_of(value)) <= LONGEST:
            yield name, value


def _described(name: str, config: Config) -> str:
    """Format a config: `rope: theta 10,000, linear`. The field's name appears only if the slot's name is ambiguous."""
    words = name.replace("_", " ")
    if isinstance(config, Component):
        words = config.kind_name() if name == config.slot else f"{words} {config.kind_name()}"
    facts = []
    for key, value in _telling(config):
        if not isinstance(value, Config):
            facts.append(fact(key, value))
        elif isinstance(value, Component):
            facts.append(f"{value.kind_name()} {key.replace('_', ' ')}")
        else:
            facts.append(_described(key, value))
    if isinstance(config, NormConfig):
        return words
    return f"{words}: {', '.join(facts)}" if facts else words


def _values(config: Config, prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        is_named = prefix and isinstance(config, Component) and name == config.word_key
        if is_named or any(marker(info, kind) for kind in (PatchMarker, WireMarker)):
            continue
        yield from _value(f"{prefix}{name}", value)


def _value(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Config):
        if isinstance(value, Component):
            yield name, value.kind_name()
        yield from _values(value, f"{name}.")
    elif any(isinstance(item, Config) for item in _items(value)):
        return
    elif value is not None:
        text = text_of(value)
        yield name, text if len(text) <= 2 * LONGEST else f"{text[: 2 * LONGEST]}..."


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
