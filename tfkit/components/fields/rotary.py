"""Rotary positions in a config.json and in a spec.

Older files have the fields `rope_theta` and `rope_scaling`. Newer files have `rope_parameters`, with an entry for each
layer type if these differ. tfkit reads both forms, and writes the newer form.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field

from tfkit.component import ABSENT, FieldConfig, Reading, Writing, case_of
from tfkit.errors import Invalid, listing, quoted

THETA, SHARE = "rope_theta", "partial_rotary_factor"
OLDER = "rope_scaling"
WIDTH = "rotary_dim"
ORIGINAL = "original_max_position_embeddings"
LENGTH = "max_position_embeddings"
TEMPERATURE = "attention_factor"

SECTION = "mrope_section"
PLANES = {SECTION, "mrope_interleaved"}
"""Parameters of positions in several planes, such as the time, height and width of an image. A spec with `sections` has
them; a text model alone does not need them."""

SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "ntk": {"alpha": "factor"},
    "dynamic": {"factor": "factor", ORIGINAL: "original_max_len"},
    "llama3": {
        "factor": "factor",
        ORIGINAL: "original_max_len",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        ORIGINAL: "original_max_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        TEMPERATURE: "temperature",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
    "longrope": {
        "factor": "factor",
        ORIGINAL: "original_max_len",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        TEMPERATURE: "temperature",
    },
    "proportional": {SHARE: "width"},
}
"""Names in config.json and in specs of the fields of each scaling. In config.json, the width of `proportional` is a
fraction of a head."""


OTHER_NAMES = {"su": "longrope", "deepseek_yarn": "yarn"}
"""Names of scalings in older files, and in files for code of the model's authors."""


class RopeFieldConfig(FieldConfig):
    """A rotary position, with its base and its scaling: `{rope: decoder.attention.position}`."""

    kind: Literal["rope"] = "rope"
    rope: str | dict[str, str | tuple[str, ...]]
    """The path of the position; or, for each type of layer, one path or several."""
    beside: dict[str, str] = Field(default_factory=dict)
    """Fields that hold an entry in older files: `{rotary_pct: partial_rotary_factor}`, for types of layers
    `{local_rope_theta: sliding_attention.rope_theta}`. One type for all has both entries under their own names."""
    scaled: tuple[str, ...] = ()
    """The types of layers that `rope_scaling` is for, in older files."""
    temperatures: tuple[str, ...] = ()
    """Entries that hold the factor of cos and sin of LongRoPE, the only scaling of such a class:
    `[short_mscale, long_mscale]`. They must be equal."""
    unread: tuple[str, ...] = ()
    """Entries that the class ignores next to entries of layer types, or fields that it ignores next to this entry."""

    def check(self) -> None:
        """Raise `Invalid` for an entry that no type of layer has."""
        super().check()
        allowed = [f"{kind}.{entry}".removeprefix(".") for kind in self.paths for entry in (THETA, SHARE)]
        if unknown := [entry for entry in self.beside.values() if entry not in allowed]:
            raise Invalid("beside", f"there is no entry {quoted(unknown[0])}", notes=[f"allowed: {listing(allowed)}"])

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The paths of each layer type. The name is empty if there is one entry for all types."""
        types = {"": self.rope} if isinstance(self.rope, str) else self.rope
        return {kind: (paths,) if isinstance(paths, str) else paths for kind, paths in types.items()}

    def older(self, kind: str) -> dict[str, str]:
        """Return the entries of a layer type that older files have outside of the mapping, each with its field."""
        if not kind:
            return {THETA: THETA, SHARE: SHARE} | {entry: field for field, entry in self.beside.items()}
        locations = {field: entry.rpartition(".") for field, entry in self.beside.items()}
        return {entry: field for field, (of, _, entry) in locations.items() if of == kind}

    def mappings(self, name: str, kind: str) -> list[str]:
        """Return the fields with a mapping that may hold entries of a layer type."""
        return [name] if kind and kind not in self.scaled else [OLDER, name]

    def pass_over(self, name: str, file: Reading) -> None:
        for kind in self.paths:
            file.used([f"{_around(name)}{field}" for field in (*self.mappings(name, kind), *self.older(kind).values())])

    def read(self, name: str, file: Reading) -> None:
        self.pass_over(name, file)
        _check_one_form(file, name)
        _check_width(file, name)
        _check_entries(file, name, self.paths, self.unread)
        default = file.default(name) or {}
        for kind, paths in self.paths.items():
            if _is_unrotated(file, name, kind):
                for path in filter(file.reaches, paths):
                    file.put(path, None)
                continue
            parameters = self._parameters(file, name, kind)
            _check_numbers(parameters)
            self._read_temperature(parameters)
            if THETA not in parameters:
                raise Invalid("", f"{quoted(THETA)}{f' of {quoted(kind)}' if kind else ''} is missing")
            outside = not kind and not file.knows(f"{name}.{ORIGINAL}")
            file.used([ORIGINAL] * outside)
            if parameters.get("rope_type") == "proportional":
                _count_turned(parameters)
            patch = {"theta": parameters.pop(THETA), "scaling": _scaling(file, parameters, outside)}
            section = parameters.pop(SECTION, default.get(SECTION))
            if file.at(f"{paths[0]}.sections") is not None and section is not None:
                patch["sections"] = section
            _extend_max_len(file, patch["scaling"])
            partial = file.knows(f"{name}.{SHARE}")  # true if the family can rotate only a part of a head
            share = 1.0 if partial else parameters.pop(SHARE, 1.0)
            usual = default.get(kind, default) or {}
            if share != 1 and (SHARE not in usual or usual.get("rope_type") == "proportional"):
                message = f"{file.model_type} rotates entire heads, but this file rotates {share} of them"
                help = "use a family with partial rotation, which has a default for `partial_rotary_factor`"
                raise Invalid("", message, help=help)
            patch |= _partial(share, patch, _head_width(file, next(iter(self.paths.values()))[0]))
            if unknown := [word for word in parameters if not file.knows(f"{name}.{word}")]:
                raise _unknown(unknown[0])
            for path in filter(file.reaches, paths):
                file.put(path, {"scaling": None})  # removes the scaling of the family's first spec
                file.put(path, patch)

    def _parameters(self, file: Reading, name: str, kind: str) -> dict[str, Any]:
        """Return all parameters of a file for the rotation of one layer type, under the newer names."""
        around, fields = _around(name), self.older(kind)
        values, default, name = file.present(around), file.default(name) or {}, name.removeprefix(around)
        parameters = dict(default.get(kind) or {} if kind else default)
        inside = {quoted(field): _mapping(values, field) for field in self.mappings(name, kind)}
        if any(inside.values()):  # without its scaling, a default has no effect
            names = () if "rope_type" in parameters else (THETA, SHARE)
            parameters = {key: value for key, value in parameters.items() if key in names}
        elif "rope_type" in parameters:
            inside[f"{quoted(name)}, which is left out,"] = parameters
        if kind:
            parameters |= {THETA: default[THETA]} if kind in inside[quoted(name)] and THETA in default else {}
            inside[quoted(name)] = _mapping(inside[quoted(name)], kind)
        unread = {field for field in self.unread for entries in inside.values() if field in entries}
        outside = {entry: values[field] for entry, field in fields.items() if field in values and field not in unread}
        _check_beside(fields, outside, inside)
        for entries in (outside, *inside.values()):
            parameters |= entries
        parameters |= {"rope_type": parameters.pop("type")} if "type" in parameters else {}
        # The positions of text are equal in all of the planes between which M-RoPE divides the pairs of channels.
        _check_planes(parameters)
        plane = {"rope_type": "default"} if parameters.get("rope_type") == "mrope" else {}
        return {key: value for key, value in parameters.items() if key not in PLANES or key == SECTION} | plane

    def _read_temperature(self, parameters: dict[str, Any]) -> None:
        """Replace the entries of `temperatures`, which must be equal, by the usual entry."""
        if not self.temperatures or parameters.get("rope_type", "default") == "default":
            return
        if parameters["rope_type"] not in ("longrope", "su"):
            raise Invalid("", f"{quoted('rope_type')} must be `longrope`; got {quoted(str(parameters['rope_type']))}")
        if TEMPERATURE in parameters:
            raise _unknown(TEMPERATURE)
        values = [parameters.pop(entry, None) for entry in self.temperatures]
        if any(type(value) not in (int, float) or value != values[0] for value in values):
            raise Invalid("", f"{listing(self.temperatures)} must be equal numbers; got {listing(map(str, values))}")
        parameters[TEMPERATURE] = values[0]

    def write(self, name: str, file: Writing) -> None:
        present = {
            kind: [path for path in candidates if file.value(path) not in (None, ABSENT)]
            for kind, candidates in self.paths.items()
        }
        first = {kind: paths[0] for kind, paths in present.items() if paths}
        default = file.default(name) or {}
        null: dict[str, Any] = {
            kind: None for kind in self.paths if kind not in first and default.get(kind, {}) is None
        }
        if not first and not null:
            return
        types = {
            kind: _written(
                file.value(path.rpartition(".")[0]).head_width, file.value(path), default.get(kind, default) or {}
            )
            for kind, path in first.items()
        }
        by_kind = {
            kind: entries for kind, entries in default.items() if kind in self.paths and "rope_type" in (entries or {})
        }
        written: dict[str, Any] = types.get("", {**by_kind, **null, **types})
        if written.get("rope_type") == "longrope":
            file.put(ORIGINAL, written[ORIGINAL])  # the place of it in these files
            if self.temperatures:
                written |= dict.fromkeys(self.temperatures, written.pop(TEMPERATURE, None))
        for scaled in (entries for entries in (written, *types.values()) if entries.get("rope_type") == "dynamic"):
            if ORIGINAL in scaled:  # the class takes the training length only from this field
                file.put(LENGTH, scaled[ORIGINAL])
        file.put(name, written)


def _around(name: str) -> str:
    """Return the prefix that a field shares with its neighbours: a file may have them in a mapping."""
    return name[: name.rfind(".") + 1]


def _check_one_form(file: Reading, name: str) -> None:
    """Raise `Invalid` if a file has the older and the newer form of a scaling, and they differ."""
    values, name = file.present(_around(name)), name.removeprefix(_around(name))
    older, newer = values.get("rope_scaling"), values.get(name)
    if older and newer and older != newer:
        message = f"{quoted(name)} and `rope_scaling` both describe the rotary positions, and must be equal"
        raise Invalid("", message, help="remove one of the two; `rope_scaling` is the older form")


def _check_beside(
    fields: Mapping[str, str], outside: Mapping[str, Any], inside: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise `Invalid` if a field outside of the mappings and a mapping have different values for an entry."""
    for mapping, entries in inside.items():
        for entry, value in outside.items():
            if entries.get(entry, value) != value:
                conflict = f"but {mapping} gives {quoted(str(entries[entry]))}"
                message = f"{quoted(fields[entry])} is {quoted(str(value))}, {conflict}"
                raise Invalid("", message, help="remove the wrong field: transformers uses the second")


def _check_width(file: Reading, name: str) -> None:
    """Raise `Invalid` if a file sets the fraction of a head to rotate and a contradicting number of dimensions."""
    values = file.present(_around(name))
    share = _mapping(values, name.removeprefix(_around(name))).get(SHARE, values.get(SHARE))
    width = file.present(WIDTH).get("") if file.knows(WIDTH) else None
    if width is not None and share is not None and width != file.compute(f"head_dim * {share}"):
        message = (
            f"`partial_rotary_factor` is {quoted(str(share))} of a head, but {quoted(WIDTH)} is {quoted(str(width))}"
        )
        raise Invalid("", message, help="remove the wrong field: transformers uses the first")


def _is_unrotated(file: Reading, name: str, kind: str) -> bool:
    """Return True if a file has null for a layer type. Only a class with null as the default supports it."""
    entries = file.present(_around(name)).get(name.removeprefix(_around(name)), {})
    return entries.get(kind, {}) is None and (file.default(name) or {}).get(kind, {}) is None


def _check_entries(file: Reading, name: str, kinds: Collection[str], unread: Collection[str]) -> None:
    """Raise `Invalid` if a mapping with an entry for each layer type has any other entry."""
    values, name = file.present(_around(name)), name.removeprefix(_around(name))
    entries = _mapping(values, name)
    ignored = unread if any(kind in values.get(name, {}) for kind in kinds) else ()
    unknown = [] if "" in kinds else [key for key in entries if key not in kinds and key not in ignored]
    if unknown:
        raise Invalid("", f"{quoted(unknown[0])} is not a type of layer", notes=[f"types of layers: {listing(kinds)}"])


def _check_numbers(parameters: Mapping[str, Any]) -> None:
    """Raise `Invalid` for text instead of a number, which would be read as arithmetic, and for true instead of 1."""
    for key, value in parameters.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, str) and key != "rope_type":
                raise Invalid("", f"{quoted(key)} must be a number; got the text {quoted(number)}")
            if isinstance(number, bool) and key != "truncate":
                raise Invalid("", f"{quoted(key)} must be a number; got {quoted(case_of(number))}")


def _check_planes(parameters: Mapping[str, Any]) -> None:
    section = parameters.get(SECTION, [1])
    counts = section if isinstance(section, list) else []
    if not counts or not all(type(number) is int and number > 0 for number in counts):
        raise Invalid("", f"`mrope_section` must be a list of positive integers; got {quoted(str(section))}")
    interleaved = parameters.get("mrope_interleaved", False)
    if not isinstance(interleaved, bool):
        raise Invalid("", f"`mrope_interleaved` must be true or false; got {quoted(str(interleaved))}")


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the value of a mapping field without its null entries; empty if the field is missing."""
    mapping = values.get(name, {})
    if not isinstance(mapping, dict):
        raise Invalid("", f"{quoted(name)} must be a mapping; got {quoted(str(mapping))}")
    return {key: value for key, value in mapping.items() if value is not None}


def _scaling(file: Reading, parameters: dict[str, Any], outside: bool) -> dict[str, Any] | None:
    """Return the scaling that the parameters describe, and remove its parameters from them."""
    kind = parameters.pop("rope_type", "default")
    kind = "ntk" if kind == "dynamic" and "alpha" in parameters else OTHER_NAMES.get(str(kind), kind)
    if kind == "default":
        parameters.pop(ORIGINAL, None)
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise Invalid(
            "", f"unknown scaling of rotary positions: {quoted(str(kind))}", notes=[f"known: {listing(SCALINGS)}"]
        )
    names = SCALINGS[kind]
    if ORIGINAL in names and kind != "dynamic":
        original = parameters[ORIGINAL] = _original(file, parameters.get(ORIGINAL), outside)
        if isinstance(original, bool) or not isinstance(original, int | float) or original <= 0:
            raise Invalid("", f"{quoted(ORIGINAL)} must be a number of positions; got {quoted(str(original))}")
        if kind != "llama3":
            parameters.setdefault("factor", file.compute(LENGTH) / original)
    elif kind == "dynamic":
        parameters[ORIGINAL] = file.compute(LENGTH)
    _remove_idle(kind, parameters)
    return {"kind": kind, **{ours: parameters.pop(theirs) for theirs, ours in names.items() if theirs in parameters}}


def _remove_idle(kind: str, parameters: dict[str, Any]) -> None:
    """Remove the parameters that have no effect on a scaling."""
    if kind == "yarn" and not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        for field in ("mscale", "mscale_all_dim"):  # either has an effect only with the other
            parameters.pop(field, None)
    if kind == "longrope" and TEMPERATURE in parameters:
        parameters.pop("factor")  # it only decides the temperature
    if kind == "ntk":  # with `alpha`, the other fields have no effect
        for field in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            parameters.pop(field, None)


def _head_width(file: Reading, path: str) -> int | None:
    """Return the width of a head in the attention with that position; None if earlier fields do not set it."""
    attention = path.rpartition(".")[0]
    d_head, d_model, n_heads = map(file.at, (f"{attention}.d_head", "d_model", f"{attention}.n_heads"))
    if type(d_head) is not int and type(d_model) is int and type(n_heads) is int and n_heads > 0:
        d_head = d_model // n_heads
    return d_head if type(d_head) is int else None


def _count_turned(parameters: dict[str, Any]) -> None:
    """Replace the fraction of a head that a proportional rotation rotates by an even number of channels."""
    share, factor = parameters.pop(SHARE, 1.0), parameters.pop("factor", 1.0)
    if factor != 1:
        raise Invalid("", f"the `factor` of a proportional rotation must be 1; got {quoted(str(factor))}")
    parameters |= {"rope_type": "default"} if share == 1 else {SHARE: f"2 * (d_head * {share} // 2)"}


def _partial(share: Any, position: Mapping[str, Any], d_head: int | None) -> dict[str, Any]:
    """Return the width of a rotation of a fraction of a head, and the base if the width is odd.

    transformers rounds the width down, and rotates one channel more than an odd width, at the frequencies of the odd
    width: theta ** (-2 i / width) for i < (width + 1) / 2.
    """
    text = None if share == 1 else f"d_head * {share}"
    if text is None or d_head is None or isinstance(share, bool) or not isinstance(share, int | float):
        return {"width": text}
    if not 0 < share < 1 or d_head * share % 2 == 0:
        return {"width": text}
    if d_head * share < 2:  # classes of transformers give different results
        raise Invalid("", f"`partial_rotary_factor` rotates no pair of channels of a head of width {d_head}")
    width, theta, scaling = int(d_head * share), position["theta"], position["scaling"]
    if width % 2 == 0 or isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        return {"width": width}
    if scaling is not None and scaling["kind"] not in ("linear", "llama3"):
        message = f"an odd number of rotated channels ({width}) cannot have the scaling {scaling['kind']}"
        raise Invalid("", f"{message}: `partial_rotary_factor` is {share}")
    return {"width": None if width + 1 == d_head else width + 1, "theta": theta ** ((width + 1) / width)}


def _extend_max_len(file: Reading, scaling: Mapping[str, Any] | None) -> None:
    """Set `max_len` to the scaled length if the file only has the length before the scaling."""
    original, factor = ((scaling or {}).get(name) for name in ("original_max_len", "factor"))
    beyond = isinstance(factor, int | float) and 1 < factor < math.inf
    if original is not None and original == file.at("max_len") and beyond:
        file.put("max_len", math.floor(original * factor))


def _original(file: Reading, inside: Any, outside: bool) -> Any:
    """Return the training length of a scaling. A field outside of the mapping takes precedence, if the class has it."""
    top = file.present(ORIGINAL).get("") if outside else None
    if top is not None and inside not in (None, top):
        message = f"{quoted(ORIGINAL)} is {quoted(str(inside))} among the rotary parameters, but {quoted(str(top))}"
        raise Invalid("", f"{message} outside of them", help="remove the wrong field: transformers uses the second")
    top = file.value(ORIGINAL) if file.knows(ORIGINAL) else top
    length = inside if top is None else top
    return file.compute(LENGTH) if length is None else length


def _unknown(field: str) -> Invalid:
    """Return the error for a field that the scaling does not have, or that needs a scaling."""
    kinds = [kind for kind, names in SCALINGS.items() if field in names]
    notes = [f"`rope_type` names the scaling; this is a field of {listing(kinds)}"] if kinds else []
    return Invalid("", f"unknown field of a rotary position: {quoted(field)}", notes=notes)


def _written(d_head: int, position: Any, default: Mapping[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_theta": position.theta, "rope_type": "default"}
    if position.width not in (None, d_head):
        written["partial_rotary_factor"] = _share(position.width, d_head)
    elif "partial_rotary_factor" in default:
        written["partial_rotary_factor"] = 1.0
    if position.sections is not None:
        written[SECTION] = list(position.sections)
    scaling = position.scaling
    if scaling is not None:
        kind = scaling.kind_name()
        if kind not in SCALINGS:
            raise Invalid("", f"a config.json cannot express a scaling of the kind {quoted(kind)}")
        values = {theirs: getattr(scaling, ours) for theirs, ours in SCALINGS[kind].items()}
        written |= {theirs: list(v) if isinstance(v, tuple) else v for theirs, v in values.items() if v is not None}
        written |= {"rope_type": "dynamic", "factor": 1.0} if kind == "ntk" else {"rope_type": kind}
        written |= {SHARE: _share(scaling.width, d_head)} if kind == "proportional" else {}
    return written


def _share(width: int, d_head: int) -> float:
    """Return a fraction of a head for which transformers, which rounds down, computes this width."""
    share = width / d_head
    return share if int(d_head * share) == width else math.nextafter(share, 1.0)
