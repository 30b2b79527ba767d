"""Errors for unknown and missing keys of a spec."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tfkit.component import Component, Config, SharedMarker, marker
from tfkit.errors import Diagnostic, Span, closest_name, listing, quoted
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import field_docs
from tfkit.spec.annotations import joined_with_or
from tfkit.spec.document import Document
from tfkit.spec.like import SAME_KEY
from tfkit.spec.messages import kind_of, value_label
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import Path, Provenance


@dataclass(frozen=True)
class UnknownKey:
    """A key that a config does not have. `meant` is the missing key that the author probably meant."""

    key: str
    cls: type[Config]
    path: Path
    span: Span
    meant: str | None


@dataclass(frozen=True)
class MissingKey:
    """A required key that is missing."""

    name: str
    cls: type[Config]
    path: Path

    @property
    def shared(self) -> bool:
        """True if the key may also be set in an enclosing config."""
        return marker(self.cls.model_fields[self.name], SharedMarker) is not None


def of_keys(
    unknown: Sequence[UnknownKey], missing: Sequence[MissingKey], plugins: Plugins, provenance: Provenance
) -> Iterator[Diagnostic]:
    """Yield an error for each unknown or missing key.

    A misspelt or misplaced key is unknown in one place and missing in another: it gets a single error.
    """
    shared: dict[str, list[MissingKey]] = defaultdict(list)
    alone = []
    for key in missing:
        if any(_is_cause_of(misplaced, key) for misplaced in unknown):
            continue
        if key.shared:
            shared[key.name].append(key)
        else:
            alone.append(key)
    for misplaced in unknown:
        yield _unknown_key(misplaced, missing, plugins)
    for group in [*([key] for key in alone), *shared.values()]:
        yield _missing_key(group, provenance)


def _is_cause_of(unknown: UnknownKey, missing: MissingKey) -> bool:
    """Return True if a key is missing because it was written, or misspelt, in an enclosing config."""
    around = missing.path[: len(unknown.path)] == unknown.path
    if unknown.path == missing.path:
        return not unknown.path and closest_name(unknown.key, ["extends"]) is not None
    return around and (
        unknown.key == missing.name or (missing.shared and closest_name(unknown.key, [missing.name]) is not None)
    )


def _unknown_key(unknown: UnknownKey, missing: Iterable[MissingKey], plugins: Plugins) -> Diagnostic:
    key, cls = unknown.key, unknown.cls
    word_key = cls.word_key if issubclass(cls, Component) else None
    further = cls.further_keys if issubclass(cls, Document) else ()
    names = [*further, *(name for name in cls.model_fields if name not in (word_key, SAME_KEY))]
    path, notes = ".".join((*unknown.path, key)), [f"keys of {owner_name(cls, unknown.path)}: {listing(names, 24)}"]
    if not names:
        notes = [f"{owner_name(cls, unknown.path)} has no keys"]
    shared = sorted(plugins.registry.shared_names()) if issubclass(cls, ModelSpec) else []
    if shared:
        notes.append(f"keys that its components share: {listing(shared, 24)}")
    if unknown.meant:
        return Diagnostic(f"unknown key {quoted(key)}; `{unknown.meant}` is missing", unknown.span, path, tuple(notes))
    near = closest_name(key, [*names, *shared, *(["extends"] if not unknown.path else [])])
    inside = next(
        (key_missing for key_missing in missing if key_missing.name == key and _is_cause_of(unknown, key_missing)), None
    )
    of_others = _owners_note(key, cls, plugins)
    if inside is not None:
        help: str | None = f"it belongs in {value_label(inside.path)}, which needs it"
    elif of_others and issubclass(cls, Component) and f" {kind_of(cls)}" in of_others:
        help = of_others
    elif near:
        help = f"a key with a similar name exists: `{near}`"
    else:
        help = of_others
    return Diagnostic(f"unknown key {quoted(key)}", unknown.span, path, tuple(notes), help)


def _owners_note(key: str, cls: type[Config], plugins: Plugins) -> str | None:
    """Return a note on the kinds or slots that have a key; None if none has it."""
    slots = {
        slot: [
            kind for kind, registered in plugins.registry.kinds(slot).items() if key in registered.config.model_fields
        ]
        for slot in plugins.registry.slots()
    }
    slots = {slot: kinds for slot, kinds in slots.items() if kinds}
    if issubclass(cls, Component) and cls.slot in slots:
        slots = {cls.slot: slots[cls.slot]}
    if not slots or len(slots) > 2:
        return None
    words = []
    for slot, kinds in slots.items():
        noun = slot if slot == "block" else f"{slot.replace('_', ' ')} kind"
        words.append(f"{noun}{'s' if len(kinds) > 1 else ''} {listing([f'`{kind}`' for kind in kinds], 6)}")
    return f"{quoted(key)} is a key of the {joined_with_or(words)}"


def _missing_key(group: Sequence[MissingKey], provenance: Provenance) -> Diagnostic:
    """Return one error for a key that one or several configs need."""
    first = group[0]
    span = provenance.span(first.path)
    path = ".".join((*first.path, first.name))
    about = _one_line(field_docs(first.cls).get(first.name))
    notes = [f"`{first.name}`: {about}"] if about and len(group) == 1 else []
    if len(group) > 1:
        notes = [f"needed by {listing('.'.join(key.path) for key in group)}"]
    help = f"write `{first.name}: ...` here, or once at the top for the entire spec" if first.shared else None
    return Diagnostic(
        f"missing key `{first.name}`: {owner_name(first.cls, first.path)} needs it", span, path, tuple(notes), help
    )


def owner_name(cls: type[Config], path: Path) -> str:
    """Name the owner of a config's keys: `attention kind mha`, `a spec`, `a run`, `an input`, or its key."""
    if issubclass(cls, Component):
        return f"{kind_of(cls)} `{cls.kind_name()}`"
    if not path:
        return f"a {cls.sort}" if issubclass(cls, Document) and cls is not ModelSpec else "a spec"
    if len(path) == 2 and path[0] == "inputs":
        return "an input"
    return f"a {cls.word_key or 'mapping'}" if path[-1].isdigit() else f"`{path[-1]}`"


def _one_line(text: str | None) -> str | None:
    words = " ".join((text or "").split()).rstrip(".")
    return f"{words[0].lower()}{words[1:]}" if words else None
