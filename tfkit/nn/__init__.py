"""The torch side of the contract: what every component's module is built from or called with."""

from tfkit.nn.checked import can_look, is_token, within
from tfkit.nn.context import Cache, Context, Past, count_positions, later, own, remember
from tfkit.nn.forward_text import Value
from tfkit.nn.layers import Linear, Softmax, StackedLinear, Table, is_scripting, is_untouched, linear
from tfkit.nn.program import Program, Written, WrittenGraph, recomputed, variable_of, written_forward

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
    "WrittenGraph",
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
    "variable_of",
    "within",
    "written_forward",
]
