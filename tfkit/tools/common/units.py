"""Numbers in three or four digits with a unit, for tables and pictures."""

from __future__ import annotations


def scaled_amount(amount: float, prefixes: str, maximum: float = 999.95) -> tuple[float, str]:
    """Divide an amount by a power of 1000 until it is below `maximum`; return it with the prefix of the power."""
    prefix, larger = "", iter(prefixes)
    while amount >= maximum and (following := next(larger, None)):
        amount, prefix = amount / 1000, following
    return amount, prefix


def count_text(count: int) -> str:
    """Format a count: `124.4M`."""
    amount, prefix = scaled_amount(count, "KMBT")
    return f"{amount:,.1f}{prefix}" if prefix else str(count)


def bytes_text(count: int) -> str:
    """Format a number of bytes: `497.8 MB`."""
    amount, prefix = scaled_amount(count, "kMGT")
    return f"{amount:,.1f} {prefix}B" if prefix else f"{count} B"


def time_text(seconds: float | None) -> str:
    """Format a duration: `12 s`, `3.5 min`, `2.1 h`; a dash if it is unknown."""
    if seconds is None:
        return "-"
    units = [(86_400, "d"), (3600, "h"), (60, "min")]
    return next(
        (f"{seconds / length:.1f} {unit}" for length, unit in units if seconds >= 1.5 * length), f"{seconds:.2g} s"
    )


def flops_text(count: int) -> str:
    """Format a number of operations: `583.3G`; a dash for 0."""
    amount, prefix = scaled_amount(count, "kMGTPEZ")
    return (f"{amount:,.1f}{prefix}" if prefix else str(count)) if count else "-"
