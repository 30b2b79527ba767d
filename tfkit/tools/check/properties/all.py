"""All properties of tfkit, in the order in which they are checked, and the properties of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfkit.errors import Diagnostic, SpecError, closest, quoted
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.measure import Level, Property
from tfkit.tools.check.properties import (
    attention,
    basics,
    choices,
    costs,
    forms,
    numbers,
    reading,
    steps,
    trained,
    training,
    values,
)
from tfkit.tools.check.properties.of_runs import data, optimizer, options, record, schedule, step


def _of_tfkit() -> tuple[Property, ...]:
    return (
        *(basics.building, basics.weights, basics.forward, basics.eval_mode),
        *(trained.in_places, values.fields_read),
        *(reading.alone, numbers.types, reading.look_ahead, reading.look_ahead_gradient),
        *(attention.extents, attention.nothing_to_read, reading.padding, reading.neighbours, reading.documents),
        *(attention.memory_order, reading.token_order, attention.head_order),
        *(steps.cached_steps, steps.cached_types, steps.state, steps.cached_step),
        *(numbers.meaning, choices.equal_scores, attention.backends, numbers.silent, values.values, values.neutral),
        *(numbers.rounding, numbers.large, numbers.inputs_kept),
        *(training.gradients, training.gradients_beside_padding, training.every_row, training.finite_differences),
        *(training.ties, training.recompute, training.train_mode, training.dropout),
        *(basics.init, basics.first_loss),
        *(forms.state, forms.copies, forms.saved, forms.publish, forms.in_transformers),
        *(costs.counts, costs.flops, costs.kept_bytes, costs.cache_bytes),
        *(forms.scripted, forms.captured, forms.exported, forms.ejected),
        *(step.steps, step.sums, step.loss, step.noise, step.clipping),
        *(schedule.schedule, schedule.rates, optimizer.groups, optimizer.decay, optimizer.formula),
        *(options.options, data.examples, data.passes, data.metrics),
        *(record.evaluation, record.callbacks, record.resume, record.digest),
    )


# A function's body is checked after all modules, so mypy knows the types that decorators return.
PROPERTIES = _of_tfkit()


@dataclass(frozen=True)
class PropertySet:
    """Properties, and a warning for each plugin whose hook failed."""

    properties: tuple[Property, ...]
    faults: tuple[Diagnostic, ...] = ()

    def chosen(self, names: Sequence[str] = (), level: Level = "full") -> tuple[Property, ...]:
        """Return the properties with these names, or all of a level; raise SpecError for an unknown name."""
        by_name = {prop.name: prop for prop in self.properties}
        for name in names:
            if name not in by_name:
                near = closest(name, by_name)
                help = f"one with a similar name exists: `{near}`" if near else f"they are: {', '.join(by_name)}"
                raise SpecError(Diagnostic(f"there is no property {quoted(name)}", help=help))
        if names:
            return tuple(prop for prop in self.properties if prop.name in names)
        return tuple(prop for prop in self.properties if level == "full" or prop.level == "quick")


def properties_of(plugins: Plugins) -> PropertySet:
    """Return the properties of models and runs, of tfkit and of plugins; raise SpecError if two share a name."""
    answers = plugins.hooks.call("tfkit_properties", _properties)
    owners = {prop.name: "tfkit" for prop in PROPERTIES}
    properties = [*PROPERTIES]
    for plugin, returned in answers.values:
        for prop in returned:
            if prop.name in owners:
                notes = (f"from {owners[prop.name]}", f"from {plugin}")
                raise SpecError(Diagnostic(f"two properties have the name `{prop.name}`", notes=notes))
            owners[prop.name] = plugin
            properties.append(prop)
    return PropertySet(tuple(properties), answers.faults)


def _properties(returned: object) -> list[Property]:
    """Return the properties that a hook returned; raise TypeError if it returned anything else."""
    properties = []
    for item in returned if isinstance(returned, Iterable) else [returned]:
        if not isinstance(item, Property):
            raise TypeError(f"returned {type(item).__name__}, not a list of tfkit.Property")
        properties.append(item)
    return properties
