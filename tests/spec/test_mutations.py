"""Valid specs with a random mistake: rejected with a SpecError, or still valid.

A mutant that is accepted must say nothing in vain: every key and every value of its text is found again in the model,
which is compared with the text here, apart from the resolver. And it must be really right: it builds, and its forward
gives the shapes that its graph promises.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfkit
import tfkit.errors
from tfkit.component import Config, Signal
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.spec.source import parse, plain_data

from ..known import KNOWN
from ..sampling import some
from ..small_specs import SHIPPED

PLUGINS = tfkit.load_plugins(entry_points=False)
KINDS = sorted({kind for slot in PLUGINS.registry.slots() for kind in PLUGINS.registry.kinds(slot)})
FIELDS = sorted({name for slot in PLUGINS.registry.slots() for kind in PLUGINS.registry.kinds(slot).values()
                 for name in kind.config.model_fields})  # fmt: skip
SHARED = sorted(PLUGINS.registry.shared_names())
LENGTH = 5
MAX_LAYERS = 12

VALUES = """
    0 1 -1 3 7 1.5 1e-5 1e300 2.0 1000000000 007 .inf true false yes null ~ none text "2" 'a:b' 'a [] [1] {} {kind:mha}
    d_model n_layers*2 d_model/0 9**9**9 &a *a !t
""".split()  # noqa: SIM905
LETTERS = "abdehiklnorsuxz_-01 "
MARKS = "{}[]:,-?!&*#|>'\"%@` \n\t\\.0aé"


def small(name: str) -> str:
    """The text of a shipped spec, with few layers and so without the number of its parameters."""
    text = KNOWN.files[name].path.read_text(encoding="utf-8")
    text = re.sub(r"^parameters: .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"n_layers: (\d+)", lambda match: f"n_layers: {min(2, int(match[1]))}", text)


RICH = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[1].glob("good/*.yaml"))]
"""What the shipped specs do not use."""
SPECS = [*map(small, SHIPPED), *RICH]


# ---- mutations ----


Mutation = Callable[[st.DrawFn, str], str]


@st.composite
def mutants_of(draw: st.DrawFn, texts: st.SearchStrategy[str], changes: Sequence[Mutation]) -> str:
    """A text with one or two changes."""
    text = draw(texts)
    for _ in range(draw(st.integers(1, 2))):
        text = draw(st.sampled_from(changes))(draw, text)
    return text


def misplaced_key(fields: Sequence[str], values: Sequence[str]) -> Mutation:
    """A key of a run or a sweep where it may not belong: in a mapping in braces, or at the top."""

    def change(draw: st.DrawFn, text: str) -> str:
        entry = f"{draw(st.sampled_from(fields))}: {draw(st.sampled_from(values))}"
        if draw(st.booleans()):
            return replaced(text, pick(draw, text, r"(?<=\{)"), f"{entry}, ")
        return replaced(text, pick(draw, text, r"^(?=\w)"), f"{entry}\n")

    return change


def pick(draw: st.DrawFn, text: str, pattern: str) -> re.Match[str] | None:
    body = text.index("tfkit:") if "tfkit:" in text else 0
    actual = list(re.compile(pattern, re.MULTILINE).finditer(text, body))
    return actual[draw(st.integers(0, len(actual) - 1))] if actual else None


def replaced(text: str, match: re.Match[str] | None, by: str, group: int = 0) -> str:
    return text if match is None else text[: match.start(group)] + by + text[match.end(group) :]


def rename_key(draw: st.DrawFn, text: str) -> str:
    """A key with one letter more, less or exchanged; or another key's name."""
    key = pick(draw, text, r"[\w-]+(?=:)")
    if key is None:
        return text
    word, at = key[0], draw(st.integers(0, len(key[0]) - 1))
    letter = draw(st.sampled_from(LETTERS))
    names = [word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :]]
    return replaced(text, key, draw(st.sampled_from([*names, draw(st.sampled_from(FIELDS))])))


def drop(draw: st.DrawFn, text: str) -> str:
    """A line less, or an entry of a mapping in braces."""
    return replaced(
        text, pick(draw, text, draw(st.sampled_from([r"^.*\n", r", [\w-]+: [^,{}\[\]\n]+", r"\w+: [^,{}\n]+, "]))), ""
    )


def duplicate(draw: st.DrawFn, text: str) -> str:
    line = pick(draw, text, r"^.*\n")
    return text if line is None else replaced(text, line, line[0] * 2)


def swap_word(draw: st.DrawFn, text: str) -> str:
    """Another kind, node or other word of the same text in the place of a word."""
    words = sorted(set(re.findall(r"\w+", text)))
    return replaced(
        text, pick(draw, text, r"(?<=[:\[,] )[A-Za-z_]\w*"), draw(st.sampled_from(words) | st.sampled_from(KINDS))
    )


def new_value(draw: st.DrawFn, text: str) -> str:
    return replaced(text, pick(draw, text, r": ([^\s,{}\[\]]+)"), draw(st.sampled_from(VALUES)), 1)


def new_key(draw: st.DrawFn, text: str) -> str:
    """A key of the language where it may not belong: in a mapping in braces, or at the top."""
    entry = f"{draw(st.sampled_from(FIELDS))}: {draw(st.sampled_from([*VALUES, *KINDS]))}"
    if draw(st.booleans()):
        return replaced(text, pick(draw, text, r"(?<=\{)"), f"{entry}, ")
    shared = f"{draw(st.sampled_from(SHARED))}: {draw(st.sampled_from(['8', 'false', '0.1', 'rmsnorm']))}"
    return replaced(text, pick(draw, text, r"^(?=graph:)"), f"{draw(st.sampled_from([entry, shared]))}\n")


def null_at_the_top(draw: st.DrawFn, text: str) -> str:
    """Null in the place of a value at the top, or for a shared key that may not be there."""
    if draw(st.booleans()):
        return replaced(text, pick(draw, text, r"(?<=^)(\w+:) .*"), f"{draw(st.sampled_from(SHARED))}: null")
    return replaced(text, pick(draw, text, r"^\w+:( .*)"), " null", 1)


def damage(draw: st.DrawFn, text: str) -> str:
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.sampled_from([*MARKS, ""])) + text[at + draw(st.integers(0, 2)) :]


MUTATIONS: list[Mutation] = [rename_key, drop, duplicate, swap_word, new_value, new_key, null_at_the_top, damage]
MUTANTS = mutants_of(st.sampled_from(RICH) | st.sampled_from(SPECS), MUTATIONS)


# ---- the oracle ----


def compare(data: Any, value: Any, path: str) -> None:
    """Everything that the text says at this place is what the model holds there."""
    if isinstance(value, Config):
        if not isinstance(data, Mapping):
            assert data == getattr(value, str(value.word_key)), path
            return
        for key, part in data.items():
            assert key in type(value).model_fields, f"{path}.{key} is no field"
            compare_field(part, value, key, path)
    elif isinstance(data, Mapping):
        assert isinstance(value, Mapping), path
        assert list(data) == list(value), path
        for key, part in data.items():
            compare(part, value[key], f"{path}.{key}")
    elif isinstance(data, list):
        assert isinstance(value, tuple), path
        assert len(data) == len(value), path
        for index, part in enumerate(data):
            compare(part, value[index], f"{path}.{index}")
    elif isinstance(data, str) and not isinstance(value, str):
        computed = isinstance(value, int | float) and not isinstance(value, bool)
        assert computed or (value is None and data == "none"), f"{path}: {data!r} became {value!r}"
    else:
        empty = value is None and data is False
        assert empty or (data == value and isinstance(data, bool) == isinstance(value, bool)), f"{path}: {data!r}"


def compare_field(data: Any, config: Config, key: str, path: str) -> None:
    value = getattr(config, key)
    if key == "variants" and isinstance(data, Mapping):
        for name, patch in data.items():
            compare(patch, value[name], f"{path}.variants.{name}")
    else:
        compare(data, value, f"{path}.{key}")


def without_like(node: Any) -> Any:
    """The keys that a node says itself."""
    return {key: value for key, value in node.items() if key != "like"} if isinstance(node, Mapping) else node


def check_text(text: str, graph: Graph) -> None:
    data = plain_data(parse(text, "spec"))
    if "extends" in data:
        return  # what it says is merged with another text
    model, inherited = graph.spec.model, set(graph.spec.provenance.inherited.values())
    if isinstance(data.get("inputs"), list):
        data["inputs"] = dict.fromkeys(data["inputs"], "tokens")
    data["graph"] = {name: without_like(node) for name, node in data["graph"].items()}
    for key, part in data.items():
        if key in type(model).model_fields:
            compare_field(part, model, key, "")
        else:
            assert (key,) in inherited, f"{key} is taken by nobody"


def check_model(graph: Graph) -> None:
    """It builds, and a forward on the meta device gives the shapes that the graph says."""
    model = tfkit.build(graph, device="meta")
    length = min(LENGTH, max_len(graph) or LENGTH)
    options = {name: value_of(signal, length) for name, signal in graph.inputs.items() if not signal.optional}
    actual = model(**options)
    for name, value in zip(graph.outputs, actual if len(graph.outputs) > 1 else [actual], strict=True):
        signal = graph.node(name).output
        assert value.shape[-1] == signal.width, name
        assert value.dim() == {"sequence": 3, "vector": 2}.get(signal.type, value.dim()), name
        assert value.shape[0] == 2, name


def value_of(signal: Signal, length: int) -> torch.Tensor:
    if signal.type == "lengths":
        return torch.ones(2, dtype=torch.long, device="meta")
    if signal.type == "vector":
        return torch.zeros(2, signal.width or 1, device="meta")
    if signal.type == "tokens":
        return torch.zeros(2, signal.length or length, dtype=torch.long, device="meta")
    return torch.zeros(2, signal.length or length, signal.width or 1, device="meta")


def layers_of(graph: Graph) -> int:
    return sum(getattr(node.config, "n_layers", 0) for node in graph.nodes)


def check(text: str) -> bool:
    """Whether the text is accepted; fails if it is neither refused properly nor right."""
    refusal: tfkit.SpecError | None = None
    try:
        graph = tfkit.loads(text, plugins=PLUGINS)
    except tfkit.SpecError as error:
        refusal = error
    if refusal is not None:
        assert all(line.isprintable() for line in str(refusal).split("\n"))
        assert all(diagnostic.message and diagnostic.span for diagnostic in refusal.diagnostics)
        return False
    check_text(text, graph)
    if layers_of(graph) <= MAX_LAYERS:
        check_model(graph)
    return True


@pytest.mark.parametrize("text", some(SPECS, 4), ids=lambda text: re.search(r"name: (\S+)", text)[1])  # type: ignore[index]
def test_what_the_mutants_are_made_from_is_right(text: str) -> None:
    assert check(text)


TOP = [*SHARED, "init", "outputs", "source", "description", "checkpoint", "name"]


def check_null(text: str, key: str) -> None:
    """`--set key=null` means what the text without the key means."""
    data = data_of(text)
    if key not in data or data[key] is None or "extends" in data:
        return
    rest = re.sub(rf"^{key}:.*\n(?:[ \t]+.*\n)*", "", text, flags=re.MULTILINE)
    if data_of(rest) == {name: value for name, value in data.items() if name != key}:
        assert outcome(text, f"{key}=null") in (outcome(rest), WARNED)


def data_of(text: str) -> dict[str, Any]:
    """What the text says; nothing if it is not YAML."""
    try:
        return plain_data(parse(text, "spec"))
    except tfkit.SpecError:
        return {}


WARNED = "accepted with a warning: another key lost its last reader"


def outcome(text: str, *sets: str) -> object:
    """The model of a text; that it is refused; or that it was warned of."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", tfkit.errors.SpecWarning)
            return tfkit.loads(text, sets=sets, plugins=PLUGINS).spec.model
    except tfkit.SpecError:
        return "refused"
    except tfkit.errors.SpecWarning:
        return WARNED


# A mutant may take away what a shared key of its parent was for.
pytestmark = pytest.mark.filterwarnings("ignore::tfkit.errors.SpecWarning")

SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(SETTINGS, max_examples=30, derandomize=True)
@given(MUTANTS)
def test_mutants(text: str) -> None:
    check(text)


@settings(SETTINGS, max_examples=20, derandomize=True)
@given(st.sampled_from(SPECS) | MUTANTS, st.sampled_from(TOP))
def test_null_takes_away(text: str, key: str) -> None:
    check_null(text, key)


@pytest.mark.slow
@settings(SETTINGS, max_examples=500)
@given(st.sampled_from(SPECS) | MUTANTS, st.sampled_from(TOP))
def test_null_takes_away_in_many(text: str, key: str) -> None:
    check_null(text, key)


@pytest.mark.slow
@settings(SETTINGS, max_examples=1_500)
@given(MUTANTS)
def test_many_mutants(text: str) -> None:
    check(text)
