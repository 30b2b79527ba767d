"""From a spec to the config.json of its family, by the rules that read one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from tfkit.component import ABSENT, BlockConfig, Component, Config, SharedMarker, case_of, marker
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.spec.arithmetic import Number, evaluate
from tfkit.spec.family import FamilyConfig
from tfkit.spec.inverse import Expression
from tfkit.spec.load import Spec
from tfkit.spec.model_spec import ModelSpec


def write_fields(spec: Spec, family: FamilyConfig) -> dict[str, Any]:
    """The fields of the config.json that describes this model; a later reading finds values that no field covers.

    Raises:
        SpecError: no value of a field expresses a value of the spec.
    """
    writing = FieldWriting(spec, family)
    errors = []
    for name in family.fields:
        try:
            writing.write(name)
        except Invalid as wrong:
            errors.append(Diagnostic(str(wrong), None, f"config.json: {name}", tuple(wrong.notes), wrong.help))
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
        means = all(self.fields.get(other) == wanted for other, wanted in when.items())
        (rule.write if means else rule.write_unread)(name, self)

    def default(self, name: str) -> Any:
        return self._family.defaults.get(name)

    def omits(self, name: str) -> bool:
        rule = self._family.fields[name]
        return rule.null is not None or self._family.defaults.get(name, ABSENT) is None

    def knows(self, name: str) -> bool:
        return name in self._family.fields

    def value(self, path: str) -> Any:
        found = value_at(self._spec.model, path)
        shared, _, rest = path.partition(".")
        if found is not ABSENT or shared in ModelSpec.model_fields:
            return found
        for here, source in self._spec.provenance.inherited.items():
            if source == (shared,) and (value := value_at(self._spec.model, ".".join(here[1:]))) is not ABSENT:
                return value_at(value, rest) if rest else value
        expressions = [text for rule in self._family.fields.values() for text in rule.expressions]
        own = {Expression.parse(text, self._family.fields).path for text in expressions}
        return _shared(self._spec.model.graph, path, "", own)

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

    def says(self, path: str, wanted: Any) -> bool:
        return self._family.removes(path) or says(self.value(path), wanted)

    def layers(self, stack: str) -> list[str]:
        block = self.value(stack)
        found = block.stack() if isinstance(block, BlockConfig) else None
        if found is None:
            raise Invalid("", f"{quoted(stack)} is not a stack of layers")
        return [layer.name for layer in found.layers]

    def listed(self, stack: str) -> bool:
        return self._family.listing(stack) is not None

    def put(self, name: str, value: Any) -> None:
        self.fields[name] = list(value) if isinstance(value, tuple) else value


def _short(value: Number) -> Number:
    """A number without the error of rounding that arithmetic left."""
    value = round(value) if abs(value - round(value)) <= 1e-9 * abs(value) else value
    short = float(f"{value:.12g}")
    return short if isinstance(value, float) and abs(value - short) <= 1e-14 * abs(value) else value


def value_at(config: Any, path: str) -> Any:
    """The value of a resolved spec at a path from its top or its graph; ABSENT if there is no such place."""
    found: Any = config
    keys = path.split(".")
    if isinstance(config, ModelSpec) and keys[0] in config.graph:
        found = config.graph
    for key in keys:
        found = found.get(key, ABSENT) if isinstance(found, Mapping) else getattr(found, key, ABSENT)
        if found is ABSENT:
            return ABSENT
    return found


def _shared(config: Any, path: str, place: str, own: Set[str]) -> Any:
    """The value of the first component that inherits it, where no field sets its `own`."""
    key, _, rest = path.partition(".")
    if isinstance(config, Mapping):
        found = (_shared(value, path, f"{place}.{name}".lstrip("."), own) for name, value in config.items())
        return next((value for value in found if value is not ABSENT), ABSENT)
    if not isinstance(config, Config):
        return ABSENT
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
        return value.word_key is not None and says(getattr(value, value.word_key, ABSENT), wanted)
    return case_of(value) == case_of(wanted)


def _item(value: Any, key: str) -> Any:
    """A value of a mapping, whose keys may have dots, or of a config."""
    return value.get(key, ABSENT) if isinstance(value, Mapping) else value_at(value, key)


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
