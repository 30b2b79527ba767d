"""The torch side of the contract: what every component's module is built from or called with."""

from tfkit.nn.checked import can_look, is_token, within
from tfkit.nn.context import Cache, Context, Past, cache_of_layer, cache_of_next, count_positions, update_cache
from tfkit.nn.layers import Linear, Softmax, StackedLinear, Table, is_scripting, is_untouched, linear
from tfkit.nn.program import Program, Value, Written, recomputed, written_class, written_forward
from tfkit.nn.settings import named, settings

__all__ = [
    "Cache",
    "Context",
    "Linear",
    "Past",
    "Program",
    "Softmax",
    "StackedLinear",
    "Table",
    "Value",
    "Written",
    "cache_of_layer",
    "cache_of_next",
    "can_look",
    "count_positions",
    "is_scripting",
    "is_token",
    "is_untouched",
    "linear",
    "named",
    "recomputed",
    "settings",
    "update_cache",
    "within",
    "written_class",
    "written_forward",
]
