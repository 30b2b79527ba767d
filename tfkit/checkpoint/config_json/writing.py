"""From a spec to the config.json of its family, by the rules that read one."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from tfkit.checkpoint.config_json import layer_types, per_layer, rope
from tfkit.checkpoint.config_json.reading import case_of
from tfkit.component import BlockConfig, Component, Config, SharedMarker, marker
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.spec.arithmetic import Number, evaluate
from tfkit.spec.checkpoint import CheckpointConfig, FieldConfig
from tfkit.spec.load import Spec
from tfkit.spec.model_spec import ModelSpec

MISSING = object()


def write_fields(spec: Spec, section: CheckpointConfig) -> dict[str, Any]:
    """The fields of the config.json that describes this model; a later reading finds values that no field covers.

    Raises:
        SpecError: no value of a field expresses a value of the spec.
    """
    writing = _Writing(spec, section.fields)
    errors = []
    for name, rule in section.fields.items():
        try:
            writing.field(name, rule)
        except Invalid as wrong:
            errors.append(Diagnostic(str(wrong), None, f"config.json: {name}", tuple(wrong.notes), wrong.help))
    if errors:
        raise SpecError(*errors)
    architecture = {"architectures": [section.architecture], "model_type": section.model_type}
    only = {name: value for name, value in (section.only or {}).items() if value is not None}
    return architecture | _unflattened({**(section.written or {}), **writing.fields, **only})


class _Writing:
    def __init__(self, spec: Spec, rules: Mapping[str, FieldConfig]) -> None:
        self.spec = spec
        self.rules = rules
        self.started: set[str] = set()
        self.fields: dict[str, Any] = {}

    def value(self, path: str) -> Any:
        """The model's value at a path; for a shared value, that of the components that share it."""
        found = value_at(self.spec.model, path)
        shared, _, rest = path.partition(".")
        if found is not MISSING or shared in ModelSpec.model_fields:
            return found
        for here, source in self.spec.provenance.inherited.items():
            if source == (shared,) and (value := value_at(self.spec.model, ".".join(here[1:]))) is not MISSING:
                return value_at(value, rest) if rest else value
        own = {one for rule in self.rules.values() for one in rule.paths}
        return _shared(self.spec.model.graph, path, "", own)

    def field(self, name: str, rule: FieldConfig) -> None:
        """Write one field, unless its value follows from others, or another field requested it before."""
        if name in self.started:
            return
        self.started.add(name)
        for other in (one for one in rule.when or () if one in self.rules):
            self.field(other, self.rules[other])
        if any(self.fields.get(other) != wanted for other, wanted in (rule.when or {}).items()):
            return
        if rule.rope is not None:
            self._rope(name, rule)
        elif rule.cases is not None:
            self._case(name, rule, rule.cases)
        elif rule.layers or rule.first or rule.every:
            if rule.layers is None and layer_types.listing_of(self.rules, str(rule.set)):
                return
            said = layer_types.write(self._variants(str(rule.set)), rule)
            if not isinstance(said, list) or said != layer_types.cycled(rule.default, len(said)):
                self.fields[name] = said
        elif rule.each is not None:
            self.fields[name] = per_layer.write(self._variants(str(rule.set)), rule, self.value)
        elif rule.read is None or rule.write is not None:
            self._copy(name, rule)

    def _variants(self, path: str) -> list[str]:
        """The variant of each layer of a stack."""
        block = self.value(path)
        stack = block.stack() if isinstance(block, BlockConfig) else None
        if stack is None:
            raise Invalid("", f"{quoted(path)} is not a stack of layers")
        return [layer.name for layer in stack.layers]

    def _copy(self, name: str, rule: FieldConfig) -> None:
        found = {path: self.value(path) for path in rule.paths}
        values = [value for value in found.values() if value is not MISSING]
        implied = rule.if_null is not None or ("default" in rule.model_fields_set and rule.default is None)
        if not values and rule.null_if is not None:
            values = [None]  # the component that the value belongs to does not exist
        if not values or (values[0] is None and implied):
            return
        if any(value != values[0] for value in values):
            said = ", ".join(f"{quoted(path)} {value}" for path, value in found.items())
            raise Invalid("", f"one field stands for several values of the spec, but they differ: {said}")
        value = values[0]
        if value is None and rule.null_if is not None:
            value = evaluate(rule.null_if, self._number)
        if rule.write is not None and value is not None:
            value = evaluate(rule.write, lambda word: value if word == "value" else self._number(word))
            value = round(value) if abs(value - round(value)) <= 1e-9 * abs(value) else value
            short = float(f"{value:.12g}")
            value = short if isinstance(value, float) and abs(value - short) <= 1e-14 * abs(value) else value
        self.fields[name] = list(value) if isinstance(value, tuple) else value

    def _number(self, name: str) -> Number:
        if name in self.rules:
            self.field(name, self.rules[name])
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Invalid("", f"{quoted(name)} is not a number, or follows from this field")
        return value

    def _case(self, name: str, rule: FieldConfig, cases: Mapping[str, Mapping[str, Any]]) -> None:
        for word, changed in cases.items():
            if all(says(self.value(path), value) for path, value in changed.items()):
                value = {"true": True, "false": False, "null": None}.get(word, int(word) if word.isdecimal() else word)
                self.fields[name] = value
                return
        if rule.set is None:
            message = f"no value of {quoted(name)} expresses the value of the spec"
            raise Invalid("", message, notes=[f"it has {', '.join(cases)}"])
        self._copy(name, rule)

    def _rope(self, name: str, rule: FieldConfig) -> None:
        paths = rope.paths_of(rule)
        found = {kind: [self.value(path) for path in several] for kind, several in paths.items()}
        every = {kind: [one for one in some if one not in (None, MISSING)] for kind, some in found.items()}
        there = {kind: positions[0] for kind, positions in every.items() if positions}
        if there:
            path = next(iter(paths.values()))[0].rpartition(".")[0]
            said = rope.write(there, self.value(path).head_width, rule)
            if said.get("rope_type") == "longrope":
                self.fields[rope.ORIGINAL] = said[rope.ORIGINAL]  # the place of it in these files
            self.fields[name] = said


def value_at(config: Any, path: str) -> Any:
    """The value of a resolved spec at a path from its top or its graph; MISSING if there is no such place."""
    found: Any = config
    keys = path.split(".")
    if isinstance(config, ModelSpec) and keys[0] in config.graph:
        found = config.graph
    for key in keys:
        found = found.get(key, MISSING) if isinstance(found, Mapping) else getattr(found, key, MISSING)
        if found is MISSING:
            return MISSING
    return found


def _shared(config: Any, path: str, place: str, own: Set[str]) -> Any:
    """The value of the first component that inherits it, where no field sets its `own`."""
    key, _, rest = path.partition(".")
    if isinstance(config, Mapping):
        found = (_shared(value, path, f"{place}.{name}".lstrip("."), own) for name, value in config.items())
        return next((value for value in found if value is not MISSING), MISSING)
    if not isinstance(config, Config):
        return MISSING
    fields = type(config).model_fields
    if key in fields and marker(fields[key], SharedMarker) is not None and f"{place}.{path}" not in own:
        return value_at(getattr(config, key), rest) if rest else getattr(config, key)
    return _shared({name: getattr(config, name) for name in fields}, path, place, own)


def says(value: Any, wanted: Any) -> bool:
    """True if a resolved value equals that of a spec's text."""
    if isinstance(wanted, Mapping):
        return value is not None and all(says(_item(value, key), one) for key, one in wanted.items())
    if isinstance(value, Component) and isinstance(wanted, str):
        return value.kind_name() == wanted
    if isinstance(value, Config):
        return value.word_key is not None and says(getattr(value, value.word_key, MISSING), wanted)
    return case_of(value) == case_of(wanted)


def _item(value: Any, key: str) -> Any:
    """A value of a mapping, whose keys may have dots, or of a config."""
    return value.get(key, MISSING) if isinstance(value, Mapping) else value_at(value, key)


def _unflattened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with a dot in their names as mappings of mappings."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        *around, last = name.split(".")
        place = found
        for key in around:
            place = place.setdefault(key, {})
        place[last] = value
    return found
