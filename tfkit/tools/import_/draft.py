"""The family nearest to a published model of an unknown type, and a draft of the model's own family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tfkit.checkpoint.config_json.reading import SILENT
from tfkit.checkpoint.files import Checkpoint
from tfkit.checkpoint.names import nameless, numbered
from tfkit.errors import Span
from tfkit.plugin.known_specs import KnownSpecs
from tfkit.spec import source
from tfkit.spec.brackets import expanded
from tfkit.spec.folder import has_weights
from tfkit.spec.read_family import family_of
from tfkit.spec.source import plain
from tfkit.spec.tree import node_of
from tfkit.tools.show.values import text_of


@dataclass(frozen=True)
class Nearest:
    """The family that knows the most of a model's fields and tensors.

    Attributes:
        name: its name.
        fields, tensors: those of the model that it lacks; of tensors the modules that hold them, `{}` for numbers.
        of_fields, of_tensors: how many the model has.
        unsaid: the fields of the family that the model's config.json omits.
        head: the end of its architecture, such as `CausalLM`.
    """

    name: str
    fields: tuple[str, ...]
    tensors: tuple[str, ...]
    of_fields: int
    of_tensors: int
    unsaid: tuple[str, ...]
    head: str

    def __str__(self) -> str:
        fields = f"{self.of_fields - len(self.fields)} of {self.of_fields} fields"
        tensors = f" and {self.of_tensors - len(self.tensors)} of {self.of_tensors} tensors" if self.of_tensors else ""
        return f"{self.name}, with {fields}{tensors}"


def nearest(given: Mapping[str, Any], folder: Path, known: KnownSpecs, span: Span) -> Nearest:
    """The family nearest to a config.json, and to the weights beside it if there are some."""
    fields, tensors = [name for name in given if name not in SILENT], list(_modules_in(folder))
    read = cache(source.read)  # the families that others extend
    families = {name: plain(family_of(node_of(name, span), known, read)) for name in known.families}
    found = [_compared(name, family, fields, tensors) for name, family in families.items()]
    head = _head(_architecture(given))
    return min(found, key=lambda one: (one.head != head, len(one.fields) + len(one.tensors), len(one.unsaid)))


def _architecture(given: Mapping[str, Any]) -> str:
    """The class that config.json names; `?` if it names none."""
    classes = given.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else "?"


def _head(architecture: str) -> str:
    return architecture.rpartition("For")[2]


def _modules_in(folder: Path) -> Iterator[str]:
    """The modules that hold the tensors of a folder's weights, with `{}` for numbers."""
    if has_weights(folder):
        with Checkpoint.open(folder) as opened:
            yield from dict.fromkeys(numbered(name)[0].rpartition(".")[0] for name in opened.names)


def _compared(name: str, family: Mapping[str, Any], fields: Sequence[str], tensors: Sequence[str]) -> Nearest:
    own = family.get("fields") or {}
    tops = {field.partition(".")[0] for field in own}
    files = [next(iter(one)) if isinstance(one, dict) else one for one in (family.get("tensors") or {}).values()]
    prefix = family.get("prefix", "")
    names = {nameless(prefix + one[1:] if one.startswith(".") else one) for text in files for one in expanded(text)}
    copies = {nameless(one).rpartition(".")[0] for one in family.get("extra") or {}}
    return Nearest(
        name=name,
        fields=tuple(one for one in fields if one not in tops),
        tensors=tuple(one for one in tensors if one not in names | copies),
        of_fields=len(fields),
        of_tensors=len(tensors),
        unsaid=tuple(one for one, rule in own.items() if rule != "unused" and one not in fields),
        head=_head(str(family.get("architecture"))),
    )


def draft(given: Mapping[str, Any], near: Nearest) -> str:
    """The text of a family that begins with the nearest; lines with `?` are open."""
    lines = [
        f"# A draft: the nearest family is {near}. Lines with ? are open; specs/README.md says what they can be.",
        f"extends: {near.name}",
        f"model_type: {json.dumps(given.get('model_type'))}",
        f"architecture: {json.dumps(_architecture(given))}",
    ]
    if near.tensors:
        lines += ["tensors:", *(f'  "?": {_quoted(one)}' for one in near.tensors[:1])]
        lines += [f'  # "?": {_quoted(one)}' for one in near.tensors[1:]]
    if near.fields or near.unsaid:
        lines += ["fields:", *(f'  {_quoted(one)}: "?"  # {text_of(given[one])} here' for one in near.fields)]
        lines += [f"  # {one}: null  # ? omitted here" for one in near.unsaid]
    return "\n".join(lines) + "\n"


def _quoted(name: str) -> str:
    """A name of a file as YAML; `{i}` counts layers."""
    return json.dumps(name.replace("{}", "{i}", 1).replace("{}", "{e}"), ensure_ascii=False)
