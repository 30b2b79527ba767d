"""Checks for authors of components: each measures a property of a built model.

    def test_additive():
        tfkit.testing.check_component("additive", slot="attention", fields={"n_heads": 2})

`check_component` builds small models around one component and measures every property of `tfkit check` on them. Some
properties can also be measured one by one, on any model that `tfkit.build` returned. A failing check raises
AssertionError with the broken property, the component, and the size of the error; `check_component` and `check_model`
report all broken properties.
"""

from tfkit.testing.component import check_component, check_model, parametrize_with_checks
from tfkit.testing.one_by_one import (
    check_alone,
    check_cached,
    check_cached_step,
    check_capture,
    check_causal,
    check_dtype,
    check_filled,
    check_gradients,
    check_padding,
    check_script,
    check_state_dict,
)
from tfkit.tools.check.components import Layout, all_pairs, small_spec
from tfkit.tools.check.runs import call, example_inputs

__all__ = [
    "Layout",
    "all_pairs",
    "call",
    "check_alone",
    "check_cached",
    "check_cached_step",
    "check_capture",
    "check_causal",
    "check_component",
    "check_dtype",
    "check_filled",
    "check_gradients",
    "check_model",
    "check_padding",
    "check_script",
    "check_state_dict",
    "example_inputs",
    "parametrize_with_checks",
    "small_spec",
]
