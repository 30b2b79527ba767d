"""A description of a component: its purpose, its sizes as sentences, its papers, and the components inside it.

A paper belongs to a component if it is in the docstring of its class, or in the docstring of its module after a label
that is its kind, its class or a field (`Grouped-query: https://...`), or without a label. A plugin's component is
therefore explained like a built-in component, in its author's words.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tfkit.component import (
    AttentionConfig,
    Cached,
    Component,
    Config,
    FFNConfig,
    MaskConfig,
    MixerConfig,
    PositionConfig,
    SharedMarker,
    State,
    SublayerConfig,
    WireMarker,
    marker,
)
from tfkit.plugin.docs import field_docs
from tfkit.tools.show.values import number

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


SAID = frozenset({"d_model", "n_heads", "n_kv_heads", "d_head", "mask", "dropout", "bias", "max_len", "n_layers"})
"""Fields that have sentences of their own, or that all components share."""


@dataclass(frozen=True)
class Explanation:
    """A component of a model, for a person who sees it for the first time.

    Attributes:
        name: its name in the spec: a node, or a slot.
        kind: its kind; None if it has none.
        where: the layers that have it, if not all do; of a node, its sources.
        layers: the numbers of those layers, if not all do.
        says: its description, a sentence of its docstring.
        papers: its sources.
        facts: its sizes and settings, a sentence each.
        steps: the steps of a layer, in order; only of a stack.
        parameters: its parameters, without the components inside it.
        flops: its own FLOPs of one forward.
        parts: the components inside it, in the order in which they run.
    """

    name: str
    kind: str | None = None
    where: str = ""
    layers: tuple[int, ...] = ()
    says: str = ""
    papers: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    parameters: int = 0
    flops: int = 0
    parts: tuple[Explanation, ...] = ()

    def walk(self) -> Iterator[Explanation]:
        """Yield the component and everything inside it."""
        yield self
        for part in self.parts:
            yield from part.walk()


def explain_component(
    name: str, config: Config, *, facts: tuple[str, ...] = (), leave_out: frozenset[str] = frozenset()
) -> Explanation:
    """Describe a component, its settings, and the components in its slots."""
    kind = config.kind_name() if isinstance(config, Component) else None
    texts, inside = list(facts), []
    for field, value in _given(config, leave_out):
        if isinstance(value, Config):
            inside.append(_inside(config, field, value))
        else:
            texts.append(_fact(config, field, value))
    return Explanation(
        name, kind, says=doc_of(config), papers=papers_of(config), facts=tuple(texts), parts=tuple(inside)
    )


def _inside(config: Config, field: str, value: Config) -> Explanation:
    """Describe the contents of a field. Its purpose is omitted if the field is named after its slot."""
    part, role = explain_component(field, value), field_words(config, field)
    if not isinstance(value, Component) or value.slot.endswith(field) or not role:
        return part
    return replace(
        part,
        says=f"{role.rstrip('.')}. {part.says}".strip(),
        papers=(*field_papers(config, field, value), *part.papers),
    )


def _given(config: Config, leave_out: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields worth a mention: required sizes, and values that differ from the defaults."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        hidden = name in leave_out or name in SAID or name == config.word_key
        wire = marker(info, WireMarker) is not None and not isinstance(value, Mapping)
        if hidden or wire or (marker(info, SharedMarker) is not None and not info.is_required()):
            continue
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if value is not None and (value != default or (isinstance(config, PositionConfig) and _is_size(value))):
            yield name, value


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _fact(config: Config, name: str, value: Any) -> str:
    """Describe a setting and its purpose: `theta 500,000: Base of the geometric series of frequencies`."""
    words = field_words(config, name)
    if isinstance(value, bool):
        shown = name if value else f"no {name}"
    else:
        text = number(value)
        shown = f"{name} {text if len(text) <= 60 else f'{text[:56]} ...'}"
        if name == "d_ff" and isinstance(config, FFNConfig):
            shown += f", {value / config.d_model:.3g} x d_model"
    return " ".join([f"{shown}: {words}" if words else shown, *field_papers(config, name, value)])


def explain_attention(name: str, config: AttentionConfig, mask: MaskConfig | None) -> Explanation:
    """Describe an attention: its heads, the tensors that it keeps, and the tokens that a query attends to."""
    facts = [_heads(config)]
    if mask is not None:
        facts.append(_reads(mask))
    if mask is not None and mask.causal and config.cached is not None:
        numbers = sum(entry.heads * entry.width for entry in config.cached if isinstance(entry, Cached))
        facts.append(f"a cache keeps {numbers:,} numbers of each token in each layer")
    return explain_component(name, config, facts=(*facts, *_states(config)))


def explain_mixer(name: str, config: MixerConfig) -> Explanation:
    """Describe a mixer: the positions that it mixes, and its states."""
    reads = "each token reads itself and all before it" if config.causal else "each token reads the whole sequence"
    return explain_component(name, config, facts=(reads, *_states(config)))


def _states(config: SublayerConfig) -> Iterator[str]:
    """Describe the states of a sublayer, of which there may be none."""
    states = [entry for entry in config.cached or () if isinstance(entry, State)]
    numbers = sum(math.prod(state.shape(0)) for state in states)
    if numbers:
        shapes = " and ".join(dict.fromkeys(" x ".join(map(str, state.shape(0))) for state in states))
        yield f"a state keeps {numbers:,} numbers of a sequence of any length in each layer, {shapes}"


def _heads(config: AttentionConfig) -> str:
    heads, kv_heads = config.n_heads, config.kv_heads
    width = f" of width {config.head_width:,}" if "d_head" in type(config).model_fields else ""
    if kv_heads == heads:
        return f"{many(heads, 'head')}{width}"
    share = f"{heads} query heads{width} share {many(kv_heads, 'key-value head')}"
    return f"{share}: the cache is {heads / kv_heads:.3g} times smaller"


def many(count: int, what: str) -> str:
    """Format a count: `1 layer`, `12 layers`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _reads(mask: MaskConfig) -> str:
    """Describe the tokens that a query may attend to."""
    if mask.left is None and mask.right is None:
        return "each token reads all tokens"
    if mask.right == 0:
        before = "all before it" if mask.left is None else f"the {mask.left:,} before it"
        return f"each token reads itself and {before}"
    left, right = ("all" if side is None else f"{side:,}" for side in (mask.left, mask.right))
    return f"each token reads itself, {left} before it and {right} after it"


def differing(part: Explanation, first: Explanation) -> Explanation:
    """Reduce the description of a component to its differences from the first layers."""
    if part.kind != first.kind:
        return part
    counterparts: Mapping[tuple[str, str | None], Explanation] = {
        (component.name, component.kind): component for component in first.parts
    }
    parts = [
        differing(component, counterparts[component.name, component.kind])
        if (component.name, component.kind) in counterparts
        else component
        for component in part.parts
    ]
    facts = tuple(fact for fact in part.facts if fact not in first.facts)
    kept = tuple(component for component in parts if component.facts or component.parts or component.says)
    gone = [component.name for component in first.parts if component.name not in {other.name for other in part.parts}]
    facts += tuple(f"without {name}" for name in gone)
    return replace(part, says="", papers=(), facts=facts, parts=kept)
