"""The value of an unquoted word by the YAML 1.2 core schema: https://yaml.org/spec/1.2.2/#103-core-schema.

`yes`, `on` and `1_000` are text. Numbers that mean different things in different YAML versions are rejected, as are
numbers that no model can have.
"""

from __future__ import annotations

import math
import re

from tfkit.errors import Invalid, quoted

MAX_DIGITS = 18

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(?P<decimal>[0-9]+)|0o(?P<octal>[0-7]+)|0x(?P<hexadecimal>[0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(?P<mantissa>\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def word_value(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted word. Raise Invalid for numbers that are almost certainly a mistake."""
    if text in _WORDS:
        return _WORDS[text]
    if match := _INTEGER.fullmatch(text):
        return _integer_value(text, match)
    if match := _FLOAT.fullmatch(text):
        return _float_value(text, match["mantissa"])
    if _NOT_FINITE.fullmatch(text):
        help = "write a finite number, or quote it if it is text"
        raise Invalid("", f"a number must be finite; got {quoted(text)}", help=help)
    return text


def _integer_value(text: str, match: re.Match[str]) -> int:
    digits = match["decimal"] or match["octal"] or match["hexadecimal"]
    if len(digits) > MAX_DIGITS:
        help = "write fewer digits, or quote it if it is text"
        raise Invalid("", f"an integer must have at most {MAX_DIGITS} digits; got {len(digits)}", help=help)
    if match["octal"] or match["hexadecimal"]:
        return int(digits, 8 if match["octal"] else 16)
    if digits != "0" and digits.startswith("0"):
        old = f"the octal number {int(text, 8)}" if re.fullmatch("[-+]?[0-7]+", text) else "text"
        note = f"YAML 1.1 reads {old}, YAML 1.2 the number {int(text)}"
        message = f"a number must not have a leading zero; got {quoted(text)}"
        raise Invalid("", message, notes=[note], help=f"write {int(text)}, or quote it if it is text")
    return int(text)


def _float_value(text: str, mantissa: str) -> float:
    value = float(text) if len(text) <= 2 * MAX_DIGITS else math.inf  # a longer number is a mistake
    if math.isinf(value) or (value == 0 and mantissa.strip("0.")):
        help = "write a number within the range of float64, or quote it if it is text"
        raise Invalid("", f"a number must fit into a float64; got {quoted(text)}", help=help)
    return value
