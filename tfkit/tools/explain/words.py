"""Components in their own words: the first sentence of their docstrings, and the papers cited there.

A paper belongs to a component if it is in the docstring of its class, or in the docstring of its module after a label
that is its kind, its class or a field (`Grouped-query: https://...`), or without a label. A plugin's component is
therefore explained like a built-in component, in its author's words.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache

from tfkit.component import Component, Config
from tfkit.plugin.docs import field_docs

_LINK = re.compile(r"(?:([\w-]+(?:,?(?: |\n(?!\s))[\w-]+)*):\s+)?(https?://[^\s,;)]*[^\s,;).])")
_END = re.compile(r"(?<=\w[.)])\s|\n\s*\n")


def sentence(text: str) -> str:
    """Return the first sentence of a text, on one line and without links."""
    first = _END.split(inspect.cleandoc(text), maxsplit=1)[0]
    bare = re.sub(r"\(\s*\)", "", _LINK.sub("", first))
    return re.sub(r"[\s,:;]+(\.?)$", r"\1", " ".join(bare.split()))


def doc_of(config: Config | type[Config]) -> str:
    """Return the description of a component: its own sentence, else the sentence of its class, else an empty string."""
    if isinstance(config, Config) and (text := config.in_words()) is not None:
        return text
    cls = config if isinstance(config, type) else type(config)
    return sentence(vars(cls).get("__doc__") or "")


def papers_of(config: Config) -> tuple[str, ...]:
    """Return the papers of a component."""
    cls = type(config)
    links = [link for _, link in _links(cls.__doc__ or "")]
    if links:
        return tuple(links)
    word = str(cls.model_fields[cls.word_key].default) if cls.word_key in cls.model_fields else ""
    module_links = _links(_module_doc(cls))
    stem, slot = re.sub(r"Config$", "", cls.__name__), re.escape(cls.slot if issubclass(cls, Component) else "-")
    names = (word, stem, re.sub(f"{slot}$", "", stem, flags=re.IGNORECASE))
    named = [link for label, link in module_links if _names(label, names)]
    whole = [link for label, link in module_links if not label] if isinstance(config, Component) else []
    return tuple(named or whole[:1])


def field_words(config: Config, name: str) -> str:
    """Return the purpose of a field, in one sentence."""
    return sentence(field_docs(type(config)).get(name, ""))


def field_papers(config: Config, name: str, value: object) -> tuple[str, ...]:
    """Return the papers of a field's value: links in its own text, else at its name or value in a module's text."""
    links = [link for _, link in _links(field_docs(type(config)).get(name, ""))]
    words = (name, value if isinstance(value, str) else "")
    for cls in [] if links else type(config).__mro__:
        if issubclass(cls, Config) and name in vars(cls).get("__annotations__", {}):
            links = [link for label, link in _links(_module_doc(cls)) if _names(label, words)]
            break
    return tuple(links)


def _module_doc(cls: type) -> str:
    return sys.modules[cls.__module__].__doc__ or ""


@cache
def _links(text: str) -> tuple[tuple[str, str], ...]:
    """Return the links of a text, each with the label before it or an empty string."""
    return tuple((match[1] or "", match[2]) for match in _LINK.finditer(text))


def _names(label: str, words: Iterable[str]) -> bool:
    """Return True if a label (`YaRN and NTK`) names one of the words, ignoring case and punctuation."""
    labels = set(_folded(re.split(r",| and | or ", label)))
    return any(word in labels for word in _folded(words))


def _folded(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        if folded := re.sub(r"[\W_]+", "", word).lower():
            yield folded
