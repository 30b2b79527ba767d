"""Quantities as people read them: three digits and a unit."""

from __future__ import annotations

from tfkit.tools.common.units import bytes_text, scaled

_PREFIXES = "kMGTPE"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
NONE = "–"
"""The text for a missing value."""


def time_text(seconds: float | None) -> str:
    """Format a time: `12.3 ms`."""
    if seconds is None:
        return NONE
    scale, unit = next((pair for pair in _TIMES if abs(seconds) >= 0.9995 * pair[0]), _TIMES[-1])
    return f"{_digits(seconds / scale)} {unit}"


def amount_text(amount: float | None, unit: str) -> str:
    """Format `412 TFLOP/s` for 4.12e14 and `FLOP/s`; `412T` without a unit, and `7` for a small integer."""
    if amount is None:
        return NONE
    if amount < 1000 and amount == int(amount):
        return f"{amount:.0f} {unit}".rstrip()
    amount, prefix = scaled(amount, _PREFIXES, most=999.5)
    return f"{_digits(amount)}{' ' if unit else ''}{prefix}{unit}"


def decade_text(power: int) -> str:
    """Format a power of ten: `100T` for 14, `0.01` for -2."""
    amount, prefix = scaled(10.0**power, _PREFIXES)
    return f"{amount:g}{prefix}"


def memory_text(count: float | None) -> str:
    """Format bytes in powers of 1000: `3.2 GB`."""
    return NONE if count is None else bytes_text(round(count))


def share_text(part: float | None, whole: float | None) -> str:
    """Format a fraction: `68.3%`."""
    return NONE if part is None or not whole else f"{100 * part / whole:.1f}%"


def ratio_text(value: float | None, base: float | None) -> str:
    """Format the ratio of two values, as in `1.42×`."""
    return NONE if value is None or not base else f"{_digits(value / base)}×"


def _digits(number: float) -> str:
    """Format a number with three significant digits."""
    size = abs(number)
    if size >= 99.95 or not number:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"
