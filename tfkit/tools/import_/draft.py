"""The most similar family for a published model of an unknown type, and a draft of a new family for the model.

Layers that are neither attention nor FFN are detected by words in the config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tfkit.checkpoint.config_json import SILENT
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.tensor_names import name_and_numbers, with_nameless_holes
from tfkit.errors import Diagnostic, Span, listing, quoted
from tfkit.plugin.known_specs import NamedSpecs
from tfkit.spec import source, tree
from tfkit.spec.families import expanded_names, family_of
from tfkit.spec.folder import has_weights
from tfkit.spec.source import plain_data
from tfkit.spec.tree import node_of
from tfkit.tools.show.resolved_values import text_of


@dataclass(frozen=True)
class NearestFamily:
    """The family that covers most fields and tensors of a model.

    Attributes:
        name: the name of the family.
        fields, tensors: the fields, and the modules of tensors (`{}` for numbers), that the family lacks.
        of_fields, of_tensors: the total numbers of fields and of modules in the model.
        unsaid: the fields of the family that the model's config.json omits.
        head: the end of the name of the architecture, such as `CausalLM`.
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


def nearest_family(content: Mapping[str, Any], folder: Path, specs: NamedSpecs, span: Span) -> NearestFamily:
    """Return the family that is most similar to a config.json, and to the weights in its folder, if any."""
    fields, tensors = [name for name in content if name not in SILENT], list(_modules_in(folder))
    read = cache(source.read)  # many families extend the same files
    families = {name: plain_data(family_of(node_of(name, span), specs, read)) for name in specs.families}
    candidates = [_family_coverage(name, family, fields, tensors) for name, family in families.items()]
    head = _head_suffix(_architecture_name(content))
    return min(
        candidates,
        key=lambda candidate: (
            candidate.head != head,
            len(candidate.fields) + len(candidate.tensors),
            len(candidate.unsaid),
        ),
    )


def _architecture_name(content: Mapping[str, Any]) -> str:
    """Return the class that config.json names; `?` if it names none."""
    classes = content.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else "?"


def _head_suffix(architecture: str) -> str:
    return architecture.rpartition("For")[2]


def _modules_in(folder: Path) -> Iterator[str]:
    """Yield the modules that hold the tensors of a folder's weights, with `{}` for numbers."""
    if has_weights(folder):
        with TensorFiles.open(folder) as opened:
            yield from dict.fromkeys(name_and_numbers(name)[0].rpartition(".")[0] for name in opened.names)


def _family_coverage(
    name: str, family: Mapping[str, Any], fields: Sequence[str], tensors: Sequence[str]
) -> NearestFamily:
    rules = family.get("fields") or {}
    tops = {field.partition(".")[0] for field in rules}
    files = [
        next(iter(entry)) if isinstance(entry, dict) else entry for entry in (family.get("tensors") or {}).values()
    ]
    prefix = family.get("prefix", "")
    names = {
        with_nameless_holes(prefix + name[1:] if name.startswith(".") else name)
        for text in files
        for name in expanded_names(text)
    }
    copies = {with_nameless_holes(copy).rpartition(".")[0] for copy in family.get("extra") or {}}
    return NearestFamily(
        name=name,
        fields=tuple(field for field in fields if field not in tops),
        tensors=tuple(module for module in tensors if module not in names | copies),
        of_fields=len(fields),
        of_tensors=len(tensors),
        unsaid=tuple(field for field, rule in rules.items() if rule != "unused" and field not in fields),
        head=_head_suffix(str(family.get("architecture"))),
    )


def draft_text(content: Mapping[str, Any], near: NearestFamily) -> str:
    """Return the text of a family that extends the most similar family. Lines with `?` must be completed by hand."""
    lines = [
        f"# A draft: the nearest family is {near}. Complete the lines with ?; specs/README.md lists their values.",
        f"extends: {near.name}",
        f"model_type: {json.dumps(content.get('model_type'))}",
        f"architecture: {json.dumps(_architecture_name(content))}",
    ]
    if near.tensors:
        lines += ["tensors:", *(f'  "?": {_quoted_name(module)}' for module in near.tensors[:1])]
        lines += [f'  # "?": {_quoted_name(module)}' for module in near.tensors[1:]]
    if near.fields or near.unsaid:
        lines += [
            "fields:",
            *(f'  {_quoted_name(field)}: "?"  # {text_of(content[field])} here' for field in near.fields),
        ]
        lines += [f"  # {field}: null  # ? omitted here" for field in near.unsaid]
    return "\n".join(lines) + "\n"


def _quoted_name(name: str) -> str:
    """Quote a name of a file as YAML; `{i}` counts layers."""
    return json.dumps(name.replace("{}", "{i}", 1).replace("{}", "{e}"), ensure_ascii=False)


WORDS = re.compile(r"mamba|rwkv|lstm|recurrent|linear_att|ssm|lru|d_state|state_(size|dim)|(^|_)conv")
HELP = "write a plugin whose `attention` computes these layers: docs/attention.md"


def other_layers(root: tree.Mapping) -> Diagnostic | None:
    """Return a warning if a config.json has layers that no kind of tfkit describes.

    Return None if no word in it indicates such layers.
    """
    content = plain_data(root)
    matches = [word for word in dict.fromkeys(_config_words(content)) if WORDS.search(word)]
    if not matches:
        return None
    name, node = quoted(str(content.get("model_type"))), root.items.get("model_type", root)
    note = f"words for layers with a state of constant size, or with convolutions: {listing(map(quoted, matches), 6)}"
    message = f"the model type {name} is unknown, and has layers that are neither attention nor FFN"
    return Diagnostic(message, node.span, "model_type", notes=(note,), help=HELP)


def _config_words(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model type, the fields, and the names of layers."""
    yield str(content.get("model_type"))
    yield from content
    for name, value in content.items():
        if name != "architectures" and isinstance(value, list):
            yield from (item for item in value if isinstance(item, str))
