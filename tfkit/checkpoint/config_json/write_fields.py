"""From a spec to the config.json of its family, by the rules that read one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from tfkit.component import ABSENT, BlockConfig, Component, Config, SharedMarker, case_of, marker
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.spec.arithmetic import Expression, Number, evaluate
from tfkit.spec.families import FamilyConfig
from tfkit.spec.load import Spec
from tfkit.spec.model_spec import ModelSpec


def write_fields(spec: Spec, family: FamilyConfig) -> dict[str, Any]:
    """Return the fields of the config.json for this model. Reading them detects values that no field covers.

    Raises:
        SpecError: no value of a field expresses a value of the spec.
    """
    writing = FieldWriting(spec, family)
    errors = []
    for name in family.fields:
        try:
            writing.write(name)
        except Invalid as error:
            errors.append(Diagnostic(str(error), None, f"config.json: {name}", tuple(error.notes), error.help))
    if errors:
        raise SpecError(*errors)
    architecture = {"architectures": [family.architecture], "model_type": family.model_type}
    return architecture | _unflattened(writing.fields)


class FieldWriting:
    """The `Writing` of the rules: a spec, and the `fields` of its config.json so far."""

    def __init__(self, spec: Spec, family: FamilyConfig) -> None:
        self.fields: dict[str, Any] = {}
        self._spec = spec
        self._family = family
        self._started: set[str] = set()

    def write(self, name: str) -> None:
        """Write one field, unless others leave it without a meaning, or another one requested it before."""
        if name in self._started:
            return
        self._started.add(name)
        when = self._family.when.get(name, {})
        for other in when:
            self.write(other)
        rule = self._family.fields[name]
        means = all(self.fields.get(other) == expected for other, expected in when.items())
        (rule.write if means else rule.write_unread)(name, self)

    def default(self, name: str) -> Any:
        return self._family.defaults.get(name)

    def omits(self, name: str) -> bool:
        rule = self._family.fields[name]
        return rule.null is not None or self._family.defaults.get(name, ABSENT) is None

    def knows(self, name: str) -> bool:
        return name in self._family.fields

    def value(self, path: str) -> Any:
        direct = value_at(self._spec.model, path)
        shared, _, rest = path.partition(".")
        if direct is not ABSENT or shared in ModelSpec.model_fields:
            return direct
        for here, source in self._spec.provenance.inherited.items():
            if source == (shared,) and (value := value_at(self._spec.model, ".".join(here[1:]))) is not ABSENT:
                return value_at(value, rest) if rest else value
        expressions = [text for rule in self._family.fields.values() for text in rule.expressions]
        covered = {Expression.parse(text, self._family.fields).path for text in expressions}
        return _shared(self._spec.model.graph, path, "", covered)

    def values(self, expressions: Sequence[str]) -> dict[str, Any]:
        paths = [Expression.parse(text, self._family.fields).path for text in expressions]
        return {path: self.value(path) for path in paths}

    def evaluate(self, expression: str, value: Any) -> Any:
        solved = Expression.parse(expression, self._family.fields)
        return value if value is None or solved.is_path else _short(solved.forward(value, self._number))

    def compute(self, text: str) -> Number:
        return evaluate(text, self._number)

    def _number(self, name: str) -> Number:
        if name in self._family.fields:
            self.write(name)
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Invalid("", f"{quoted(name)} is not a number, or follows from this field")
        return value

    def says(self, path: str, expected: Any) -> bool:
        return self._family.removes(path) or says(self.value(path), expected)

    def layers(self, stack: str) -> list[str]:
        block = self.value(stack)
        structure = block.stack() if isinstance(block, BlockConfig) else None
        if structure is None:
            raise Invalid("", f"{quoted(stack)} is not a stack of layers")
        return [layer.name for layer in structure.layers]

    def listed(self, stack: str) -> bool:
        return self._family.listing(stack) is not None

    def put(self, name: str, value: Any) -> None:
        self.fields[name] = list(value) if isinstance(value, tuple) else value


def _short(value: Number) -> Number:
    """Remove the rounding error of arithmetic from a number."""
    value = round(value) if abs(value - round(value)) <= 1e-9 * abs(value) else value
    short = float(f"{value:.12g}")
    return short if isinstance(value, float) and abs(value - short) <= 1e-14 * abs(value) else value


def value_at(config: Any, path: str) -> Any:
    """Return the value of a resolved spec at a path from its top or its graph; ABSENT if the path does not exist."""
    value: Any = config
    keys = path.split(".")
    if isinstance(config, ModelSpec) and keys[0] in config.graph:
        value = config.graph
    for key in keys:
        value = value.get(key, ABSENT) if isinstance(value, Mapping) else getattr(value, key, ABSENT)
        if value is ABSENT:
            return ABSENT
    return value


def _shared(config: Any, path: str, place: str, covered: Set[str]) -> Any:
    """Return the value of the first component that inherits it at a path that no field of `covered` sets."""
    key, _, rest = path.partition(".")
    if isinstance(config, Mapping):
        values = (_shared(value, path, f"{place}.{name}".lstrip("."), covered) for name, value in config.items())
        return next((value for value in values if value is not ABSENT), ABSENT)
    if not isinstance(config, Config):
        return ABSENT
    fields = type(config).model_fields
    if key in fields and marker(fields[key], SharedMarker) is not None and f"{place}.{path}" not in covered:
        return value_at(getattr(config, key), rest) if rest else getattr(config, key)
    return _shared({name: getattr(config, name) for name in fields}, path, place, covered)


def says(value: Any, expected: Any) -> bool:
    """Return True if a resolved value equals a value in the text of a spec."""
    if isinstance(expected, Mapping):
        return value is not None and all(says(_item(value, key), entry) for key, entry in expected.items())
    if isinstance(value, Component) and isinstance(expected, str):
        return value.kind_name() == expected
    if isinstance(value, Config):
        return value.word_key is not None and says(getattr(value, value.word_key, ABSENT), expected)
    return case_of(value) == case_of(expected)


def _item(value: Any, key: str) -> Any:
    """Return a value of a mapping, whose keys may have dots, or of a config."""
    return value.get(key, ABSENT) if isinstance(value, Mapping) else value_at(value, key)


def _unflattened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn fields with a dot in their names into nested mappings."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *around, last = name.split(".")
        place = nested
        for key in around:
            place = place.setdefault(key, {})
        place[last] = value
    return nested
