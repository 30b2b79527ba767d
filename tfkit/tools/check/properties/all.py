"""The properties of models, in the order in which they are checked, and the properties and subjects of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfkit.errors import Diagnostic, SpecError, listing, quoted, similar_name_help
from tfkit.plugin.discover import DISABLE
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.components import SLOTS
from tfkit.tools.check.measure import Level, Property, SubjectType
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


def _of_tfkit() -> tuple[Property, ...]:
    return (
        *(basics.model_building, basics.seeded_weights, basics.forward_pass, basics.eval_mode),
        *(trained.tensor_locations, values.fields_read),
        *(reading.position_independence, numbers.bfloat16_outputs, attention.memory_effect),
        *(reading.look_ahead, reading.look_ahead_gradient),
        *(attention.mask_extents, attention.nothing_to_read),
        *(reading.padding_independence, reading.row_independence, reading.document_independence),
        *(attention.memory_order, reading.token_order, attention.head_order),
        *(steps.cached_steps, steps.cached_types, steps.chunks_as_steps),
        *(steps.states_without_padding, steps.cached_step),
        *(numbers.reference_agreement, choices.equal_scores, attention.backend_agreement),
        *(numbers.silent_sublayers, values.value_effects, values.neutral_values),
        *(numbers.rounding_errors, numbers.large_inputs, numbers.inputs_unchanged),
        *(training.finite_gradients, training.gradients_beside_padding),
        *(training.every_row, training.finite_differences),
        *(training.tied_gradients, training.shared_modules, training.recomputed_layers),
        *(training.train_mode, training.dropout_rates),
        *(basics.declared_init, basics.first_loss),
        *(forms.state_dict_copy, forms.model_copies, forms.saved_model, forms.published_model, forms.in_transformers),
        *(costs.parameter_counts, costs.forward_flops, costs.saved_bytes, costs.cache_bytes),
        *(forms.scripted_model, forms.captured_model, forms.exported_files),
    )


# A function's body is checked after all modules, so mypy knows the types that decorators return.
PROPERTIES = _of_tfkit()
SWITCH_OFF = f"switch one plugin off by its name: {DISABLE}=<name>"


@dataclass(frozen=True)
class PropertySet:
    """Properties, the types of their subjects by name, and a warning for each plugin whose hook failed.

    A model has no `SubjectType`.
    """

    properties: tuple[Property, ...]
    types: Mapping[str, SubjectType] = field(default_factory=dict)
    faults: tuple[Diagnostic, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots whose kinds can be checked alone."""
        return (*SLOTS, *(slot for subject_type in self.types.values() for slot in subject_type.slots))

    def type_of(self, slot: str) -> SubjectType | None:
        """Return the type of the subjects in which the kinds of a slot are checked; None for models."""
        return next((subject_type for subject_type in self.types.values() if slot in subject_type.slots), None)

    def chosen(self, names: Sequence[str] = (), level: Level = "full") -> tuple[Property, ...]:
        """Return the properties with these names, or all of a level; raise SpecError for an unknown name."""
        by_name = {prop.name: prop for prop in self.properties}
        for name in names:
            if name not in by_name:
                help = similar_name_help("a property", name, by_name, f"choose from: {', '.join(by_name)}")
                raise SpecError(Diagnostic(f"there is no property {quoted(name)}", help=help))
        if names:
            return tuple(prop for prop in self.properties if prop.name in names)
        return tuple(prop for prop in self.properties if level == "full" or prop.level == "quick")


def properties_of(plugins: Plugins) -> PropertySet:
    """Return the properties of models, and the properties of plugins with their types of subjects.

    Raise SpecError if two properties or subjects share a name, or two subjects a slot. A property whose subject no
    plugin has is omitted, with a warning.
    """
    answers = plugins.hooks.call("tfkit_properties", _returned_properties)
    names = [*(name for prop in PROPERTIES for name in _unique_names(prop)), "subjects have the name `model`"]
    owners = dict.fromkeys([*names, *(f"subjects have the slot `{slot}`" for slot in SLOTS)], "tfkit")
    properties, types = [(prop, "tfkit") for prop in PROPERTIES], dict[str, SubjectType]()
    for plugin, returned in reversed(answers.values):  # the built-in properties first
        for item in returned:
            for name in _unique_names(item):
                if name in owners:
                    notes = (f"from {owners[name]}", f"from {plugin}")
                    raise SpecError(Diagnostic(f"two {name}", notes=notes, help=SWITCH_OFF))
                owners[name] = plugin
            if isinstance(item, Property):
                properties.append((item, plugin))
            else:
                types[item.name] = item
    subjects = ["model", *types]
    faults = [_unknown_subject(prop, plugin, subjects) for prop, plugin in properties if prop.of not in subjects]
    usable = tuple(prop for prop, _ in properties if prop.of in subjects)
    return PropertySet(usable, types, (*answers.faults, *faults))


def _unique_names(item: Property | SubjectType) -> Iterator[str]:
    """Yield, as the end of an error, the names that only one property or type of subject may have."""
    if isinstance(item, Property):
        yield f"properties have the name `{item.name}`"
    else:
        yield f"subjects have the name `{item.name}`"
        yield from (f"subjects have the slot `{slot}`" for slot in item.slots)


def _unknown_subject(prop: Property, plugin: str, names: Sequence[str]) -> Diagnostic:
    message = f"property `{prop.name}` of plugin {plugin} is omitted: no plugin has the subject {quoted(prop.of)}"
    return Diagnostic(message, notes=(f"known: {listing(names)}",), help=similar_name_help("a subject", prop.of, names))


def _returned_properties(returned: object) -> list[Property | SubjectType]:
    """Return the properties and types of subjects that a hook returned; raise TypeError for anything else."""
    properties = []
    for item in returned if isinstance(returned, Iterable) else [returned]:
        if not isinstance(item, Property | SubjectType):
            name = f"the class {item.__name__}" if isinstance(item, type) else type(item).__name__
            raise TypeError(f"must return objects of tfkit.Property and tfkit.SubjectType; got {name}")
        properties.append(item)
    return properties
