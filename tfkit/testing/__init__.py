"""Checks for authors of components: each function proves one promise of a built model.

    def test_additive():
        tfkit.testing.check_component("additive", slot="attention", fields={"n_heads": 2})

`check_component` builds small models around one component and runs every check on them. The checks can be called one by
one too, on any model that `tfkit.build` returned. A failing check raises AssertionError with the broken promise, the
place, and the size of the error; `check_component` and `check_model` report all broken promises.
"""

from tfkit.testing.cached import check_cached, check_cached_step
from tfkit.testing.checks import (
    check_capture,
    check_causal,
    check_dtype,
    check_filled,
    check_gradients,
    check_padding,
    check_script,
    check_state_dict,
)
from tfkit.testing.component import Layout, check_component, check_model, small_spec
from tfkit.testing.inputs import call, example_inputs
from tfkit.testing.parts import check_alone, check_fields, check_repeatable

__all__ = [
    "Layout",
    "call",
    "check_alone",
    "check_cached",
    "check_cached_step",
    "check_capture",
    "check_causal",
    "check_component",
    "check_dtype",
    "check_fields",
    "check_filled",
    "check_gradients",
    "check_model",
    "check_padding",
    "check_repeatable",
    "check_script",
    "check_state_dict",
    "example_inputs",
    "small_spec",
]
