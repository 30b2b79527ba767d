"""The language of runs as JSON Schema, for completion and checks in editors."""

from __future__ import annotations

from tfkit.plugin.manager import Plugins
from tfkit.run.run_spec import LISTS, MODEL, RunSpec
from tfkit.spec.schema import CHANGES, Schema, SchemaWriter, about_of, any_of, ref


def run_schema(plugins: Plugins) -> Schema:
    """Return the schema of a run, as `json_schema` does for a spec."""
    writer = SchemaWriter(plugins)
    whole, changes = _document(writer, partial=False), _document(writer, partial=True)
    arithmetic = writer.arithmetic("data")  # of `data.vocab_size`
    return writer.schema("run", "A run as tfkit reads it", whole, changes, arithmetic)


def _document(writer: SchemaWriter, *, partial: bool) -> Schema:
    """Return the schema of the top level of a run: its fields and its model, which may omit name and version."""
    writer.defs.setdefault(f"{CHANGES}spec", writer.document(partial=True))
    whole = writer.mapping(RunSpec, partial=partial)
    properties = whole["properties"]
    about = "The model: the name or path of a spec, or a spec in place."
    properties[MODEL] = {"description": about, **any_of([{"type": "string"}, ref(f"{CHANGES}spec")])}
    for name in LISTS:
        items = properties[name].pop("items")
        properties[name] = {**about_of(properties[name]), **any_of([items, {"type": "array", "items": items}])}
    properties["extends"] = {"type": "string", "description": "The run, by path or name, that this one changes."}
    if not partial:
        whole["required"] = [*whole["required"], MODEL]
    return whole
