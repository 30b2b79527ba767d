"""Random changes of a config.json: the result is a spec with the meaning of the file, or an error.

The spec of a file with a change is not that of the file without it, unless a reason is known (`meaningless`), and
the config.json that is written for it says the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import transformers

import tfkit
from tfkit.checkpoint.config_json import INERT_VALUES, ROTARY, SILENT, FieldWriting
from tfkit.component import ABSENT, FieldConfig
from tfkit.components.fields.layer_variants import CountConfig
from tfkit.components.fields.value import OnlyConfig, UnusedConfig
from tfkit.errors import SpecError
from tfkit.spec.families import FamilyConfig
from tfkit.tools.import_.importing import export_config, import_config

from .cases import CASES
from .changed_fields import NOT_THE_MODEL, others

PLUGINS = tfkit.load_plugins()
ODD: list[Any] = [None, True, False, 0, -1, 3, 1.5, 1e300, -1e-9, 10**30, "", "gelu", "é\n", "x" * 300]
ODD += [[], {}, [1, "a"], {"a": 1}, [0] * 40, [[1]] * 40, ["full_attention"], [["global", "local"], 2]]
ODD += [{"rope_type": "yarn"}, {"type": "dynamic", "factor": "two"}]
UNKNOWN = ["n_experts", "hidden_sizes", "attention", "rope.theta", "é"]
ROPE = ["rope_parameters", "rope_scaling"]
ROPE_DEFAULTS: dict[str, Any] = {"rope_type": "default", "partial_rotary_factor": 1.0}
ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "su", "ntk", "mrope"]
ROPE_KEYS = """
    rope_theta rope_type type factor alpha original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow attention_factor mscale mscale_all_dim truncate short_factor long_factor partial_rotary_factor
    full_attention mrope_section
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Mutation:
    """Another value at a location of a config.json, or none."""

    location: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        text = "nothing" if self.value is ABSENT else repr(self.value)
        return f"{'.'.join(self.location)}={text if len(text) < 60 else text[:60] + '...'}"

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with it."""
        key, *rest = self.location
        if rest:
            inner = config.get(key)
            return {**config, key: Mutation(tuple(rest), self.value).of(inner if isinstance(inner, dict) else {})}
        return {name: value for name, value in config.items() if name != key} | (
            {} if self.value is ABSENT else {key: self.value}
        )


@cache
def config_of(name: str) -> dict[str, Any]:
    """The config.json of a case, as transformers writes it."""
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, **deepcopy(dict(case.config)))
    fields = {key: value for key, value in config.to_dict().items() if key not in NOT_THE_MODEL}
    return json.loads(json.dumps({"model_type": case.model_type, **fields}))


def mutations(name: str, random: Random) -> list[Mutation]:
    """One or two changes of a case."""
    config = config_of(name)
    return [random.choice(KINDS)(config, random) for _ in range(random.randint(1, 2))]


def similar(config: Mapping[str, Any], random: Random) -> Mutation:
    """Another value of the same type."""
    field = random.choice(sorted(config))
    actual = list(others(field, config[field]))
    return Mutation((field,), random.choice(actual)) if actual else odd(config, random)


def odd(config: Mapping[str, Any], random: Random) -> Mutation:
    """A value of any type, or none."""
    field = random.choice(sorted(config))
    return Mutation((field,), random.choice([ABSENT, *invalid_values(config[field]), *ODD]))


def inside(config: Mapping[str, Any], random: Random) -> Mutation:
    """A value in a mapping."""
    field = random.choice([key for key, value in config.items() if isinstance(value, dict) and value] or ROPE)
    inner = config.get(field) or {"factor": 2.0}
    key = random.choice(sorted(inner))
    return Mutation((field, key), random.choice([ABSENT, *invalid_values(inner[key]), *ODD]))


def unknown(config: Mapping[str, Any], random: Random) -> Mutation:
    """A key that no family knows."""
    return Mutation((random.choice(UNKNOWN),), random.choice(ODD))


def foreign(config: Mapping[str, Any], random: Random) -> Mutation:
    """A key of another family."""
    other = config_of(random.choice(sorted(CASES)))
    key = random.choice(sorted(other))
    return Mutation((key,), other[key])


def rope(config: Mapping[str, Any], random: Random) -> Mutation:
    """A rotary position with another entry, or of another type."""
    key = random.choice(ROPE_KEYS)
    values = ROPE_TYPES if key in ("rope_type", "type") else [2.0, 8, 1.5, [1.0] * 4, ABSENT, *ODD]
    return Mutation((random.choice(ROPE), key), random.choice(values))


def invalid_values(value: Any) -> list[Any]:
    """Values of another type, or beyond every bound, that are made from this one."""
    number = [-value, value * 10**9, value + 0.5] if isinstance(value, int | float) else []
    return [str(value), [value], {"a": value}, *number]


KINDS = [similar, odd, odd, inside, unknown, foreign, rope]


def findings(name: str, changes: Sequence[Mutation], folder: Path) -> Iterator[str]:
    """What is wrong with the outcome of these changes."""
    config = mutated(name, changes)
    try:
        graph = imported(name, config, folder)
    except SpecError as error:
        yield from faults(error, folder)
        return
    for change in changes:
        without = mutated(name, [other for other in changes if other is not change])
        silent = without == config or meaningless(change, without, config, graph)
        if not silent and gives(name, without, graph, folder):
            yield f"{change} is passed over"
    try:
        again = export_config(graph, PLUGINS)
    except SpecError as error:
        yield f"not written: {error}"
        return
    for change in changes:
        there = at(again, change.location)
        written = Mutation(change.location, there).of(config)
        if there is not None and written != config and not gives(name, written, graph, folder):
            yield f"{change} is written as {there!r}"


def mutated(name: str, changes: Sequence[Mutation]) -> dict[str, Any]:
    """The config.json of a case with changes."""
    config = config_of(name)
    for change in changes:
        config = change.of(config)
    return config


def at(config: Any, location: tuple[str, ...]) -> Any:
    """The value at a location of a config.json; None without one."""
    for key in location:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def gives(name: str, config: Mapping[str, Any], graph: tfkit.Graph, folder: Path) -> bool:
    """True if a config.json is that of this model."""
    try:
        return bool(imported(name, config, folder).spec.model.graph == graph.spec.model.graph)
    except SpecError:
        return False


def imported(name: str, config: Mapping[str, Any], folder: Path) -> tfkit.Graph:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return import_config(path, family=CASES[name].family, plugins=PLUGINS).graph


def faults(error: SpecError, folder: Path) -> Iterator[str]:
    """What is wrong with an error."""
    if not all(line.isprintable() for line in str(error).split("\n")):
        yield f"not printable: {str(error)!r}"
    for diagnostic in error.diagnostics:
        if (
            not diagnostic.message
            or diagnostic.span is None
            or diagnostic.span.source.name != str(folder / "config.json")
        ):
            yield f"without a location in the file: {diagnostic.message!r}"


def meaningless(change: Mutation, before: Mapping[str, Any], after: Mapping[str, Any], graph: tfkit.Graph) -> bool:
    """True if the family says that a change makes no difference."""
    family = graph.spec.family
    assert family is not None
    old, new = at(before, change.location), at(after, change.location)
    if isinstance(old, dict) and isinstance(new, dict) and old and new:
        pairs = {key: (old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**old, **new}}
        inner = [Mutation((*change.location, key), now) for key, (then, now) in pairs.items() if now != then]
        return all(meaningless(value, before, after, graph) for value in inner)
    name, leaf = ".".join(change.location), change.location[-1]
    names = {value: family.fields[value] for value in (name, change.location[0]) if value in family.fields}
    if change.location[0] == "rope_scaling" and _is_off("rope_parameters", after, family):  # two names of one field
        return True
    if not names:  # its class ignores such a field, which is a warning, or an error if some class does not
        if leaf in INERT_VALUES:
            return change.value in (None, [], {}, ABSENT, INERT_VALUES[leaf])
        return not ROTARY.search(name) or leaf in SILENT or change.value in (None, [], {}, ABSENT)
    return (
        any(_is_unread(rule, after, graph, family) for rule in names.values())
        or any(_is_off(field, after, family) for field in names)
        or alike(value_at(before, change.location, family), value_at(after, change.location, family))
    )


def _is_off(name: str, after: Mapping[str, Any], family: FamilyConfig) -> bool:
    """True if a field has a meaning only with other values of other fields."""
    return any(value_at(after, (key,), family) != value for key, value in family.when.get(name, {}).items())


def _is_unread(rule: FieldConfig, after: Mapping[str, Any], graph: tfkit.Graph, family: FamilyConfig) -> bool:
    """True if no value of a field changes the model."""
    if isinstance(rule, CountConfig):
        return bool(after.get(family.listing(rule.at) or ""))  # a list gives each layer
    values = FieldWriting(graph.spec, family).values(rule.expressions).values()
    nowhere = bool(values) and all(value is ABSENT for value in values)
    return nowhere or isinstance(rule, UnusedConfig | OnlyConfig)  # `only` refuses every value that means another thing


def alike(old: Any, new: Any) -> bool:
    """True if two values are equal; of two lists, the shorter one repeats."""
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and old and new:
        short, long = sorted((old, new), key=len)
        return [short[i % len(short)] for i in range(len(long))] == long
    return bool(old == new)


def value_at(config: Mapping[str, Any], location: tuple[str, ...], family: FamilyConfig) -> Any:
    """The value at a location of a config.json, or the default of the field."""
    value = at(config, location)
    if value is None and location[0] in ROPE and location[-1] == "type":  # the older name of `rope_type`
        value = at(config, (*location[:-1], "rope_type"))
    usual = family.defaults.get(location[0])
    if location[0] == "rope_parameters" and isinstance(usual, Mapping) and "rope_theta" in usual:
        usual = ROPE_DEFAULTS | usual
        value = ROPE_DEFAULTS | value if isinstance(value, dict) and value and len(location) == 1 else value
    for key in location[1:]:
        usual = usual.get(key) if isinstance(usual, Mapping) else None
    return usual if value in (None, {}) else value
