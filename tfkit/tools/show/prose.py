"""The prose of a spec: the purpose and the papers of each component, and of each value that the spec sets.

The text of a component is the first sentence of its docstring. A paper belongs to a component if it is in the docstring
of its class, or in the docstring of its module after a label that is its kind, its class or a field
(`Grouped-query: https://...`), or without a label. A plugin's component is therefore described like a built-in
component, in its author's words.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tfkit.component import Component, Config
from tfkit.graph.expand import Graph
from tfkit.plugin.registry import field_docs
from tfkit.tools.show.resolved_values import ResolvedValue, values_of

_LINK = re.compile(r"(?:([\w-]+(?:,?(?: |\n(?!\s))[\w-]+)*):\s+)?(https?://[^\s,;)]*[^\s,;:).])")
_END = re.compile(r"(?<=[\w)\]`]\.)\s|(?<=\w\.\))\s|\n\s*\n")


@dataclass(frozen=True)
class DescribedValue(ResolvedValue):
    """A value with its purpose and its papers; both are empty if an earlier value has the same."""

    text: str = ""
    papers: tuple[str, ...] = ()


def prose_of(graph: Graph) -> list[DescribedValue]:
    """Describe the components of a spec and the values that it sets, in its order.

    A value that components inherit, such as `d_model`, is described where it is inherited first.
    """
    listed: list[DescribedValue] = []
    descriptions = set()
    for value in values_of(graph):
        if value.path[0] not in ("graph", "init") or value.path == ("graph",):
            continue
        holder = _content_at(graph.spec.model, value.path[:-1])
        content = _content_at(holder, value.path[-1:])
        description = _field_description(holder, value.name, content)
        is_new = description not in descriptions
        if value.how == "given" or isinstance(content, Component) or (value.how == "inherited" and is_new):
            descriptions.add(description)
            text, papers = (description.text, description.papers) if is_new else ("", ())
            listed.append(DescribedValue(**vars(value), text=text, papers=papers))
    return listed


def _content_at(content: Any, path: Iterable[str]) -> Any:
    for key in path:
        if isinstance(content, Config):
            content = getattr(content, key)
        else:
            content = content[key] if isinstance(content, Mapping) else content[int(key)]
    return content


class _Description(NamedTuple):
    text: str
    papers: tuple[str, ...]


def _field_description(holder: Any, name: str, content: Any) -> _Description:
    """Describe a field and the config in it; a field that has the name of its slot needs no text."""
    texts, papers = list[str](), list[str]()
    of_field = not isinstance(content, Config) or (isinstance(content, Component) and not content.slot.endswith(name))
    if of_field and isinstance(holder, Config):
        texts.append(first_sentence(field_docs(type(holder)).get(name, "")))
        papers += field_papers(holder, name, content)
    if isinstance(content, Config):
        texts.append(doc_of(content))
        papers += papers_of(content)
    return _Description(" ".join(f"{text.rstrip('.')}." for text in texts if text), tuple(papers))


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, on one line and without links."""
    first = _END.split(inspect.cleandoc(text), maxsplit=1)[0]
    bare = re.sub(r"\(\s*\)", "", _LINK.sub("", first))
    return re.sub(r"[\s,:;]+(\.?)$", r"\1", " ".join(bare.split()))


def doc_of(config: Config | type[Config]) -> str:
    """Return the description of a component: `in_words()`, else the first sentence of its class, else `""`."""
    if isinstance(config, Config) and (text := config.in_words()) is not None:
        return text
    cls = config if isinstance(config, type) else type(config)
    return first_sentence(vars(cls).get("__doc__") or "")


def papers_of(config: Config | type[Config]) -> tuple[str, ...]:
    """Return the papers of a component."""
    cls = config if isinstance(config, type) else type(config)
    links = [link for _, link in _labelled_links(cls.__doc__ or "")]
    if links:
        return tuple(links)
    word = str(cls.model_fields[cls.word_key].default) if cls.word_key in cls.model_fields else ""
    module_links = _labelled_links(_module_doc(cls))
    stem, slot = re.sub(r"Config$", "", cls.__name__), re.escape(cls.slot if issubclass(cls, Component) else "-")
    names = (word, stem, re.sub(f"{slot}$", "", stem, flags=re.IGNORECASE))
    named = [link for label, link in module_links if _is_label_of(label, names)]
    unlabelled = [link for label, link in module_links if not label] if issubclass(cls, Component) else []
    return tuple(named or unlabelled[:1])


def field_papers(config: Config, name: str, value: object) -> tuple[str, ...]:
    """Return the papers of a field's value: links in the text of the field, else in the text of the module."""
    links = [link for _, link in _labelled_links(field_docs(type(config)).get(name, ""))]
    words = (name, value if isinstance(value, str) else "")
    for cls in [] if links else type(config).__mro__:
        if issubclass(cls, Config) and name in inspect.get_annotations(cls):
            links = [link for label, link in _labelled_links(_module_doc(cls)) if _is_label_of(label, words)]
            break
    return tuple(links)


def _module_doc(cls: type) -> str:
    module = sys.modules.get(cls.__module__)  # a module can leave `sys.modules` while its classes are in use
    return (module and module.__doc__) or ""


@cache
def _labelled_links(text: str) -> tuple[tuple[str, str], ...]:
    """Return the links of a text, each with the label before it or an empty string."""
    return tuple((match[1] or "", match[2]) for match in _LINK.finditer(text))


def _is_label_of(label: str, words: Iterable[str]) -> bool:
    """Return True if a label (`YaRN and NTK`) names one of the words, ignoring case and punctuation."""
    labels = set(_folded_words(re.split(r",| and | or ", label)))
    return any(word in labels for word in _folded_words(words))


def _folded_words(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        if folded := re.sub(r"[\W_]+", "", word).lower():
            yield folded
