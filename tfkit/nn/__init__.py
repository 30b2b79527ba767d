"""The torch side of the contract: what every component's module is built from or called with."""

from tfkit.nn.checked import can_look, is_token, within
from tfkit.nn.context import Cache, Context, Past, count_positions, later, own, remember
from tfkit.nn.layers import Linear, Softmax, StackedLinear, Table, is_scripting, is_untouched, linear
from tfkit.nn.program import Program, Value, Written, recomputed, written_class, written_forward
from tfkit.nn.rearrange import Rearrange

__all__ = [
    "Cache",
    "Context",
    "Linear",
    "Past",
    "Program",
    "Rearrange",
    "Softmax",
    "StackedLinear",
    "Table",
    "Value",
    "Written",
    "can_look",
    "count_positions",
    "is_scripting",
    "is_token",
    "is_untouched",
    "later",
    "linear",
    "own",
    "recomputed",
    "remember",
    "within",
    "written_class",
    "written_forward",
]
