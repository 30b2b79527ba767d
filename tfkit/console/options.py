"""Options that commands share: for reading a spec, its weights, and the form of the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from tfkit.arguments import DTYPES

if TYPE_CHECKING:
    import torch


Decorator: TypeAlias = Callable[[Any], Any]
"""A decorator that adds options to a command."""


class FiniteRange(click.FloatRange):
    """A number within bounds that is neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


def device_of(name: str) -> torch.device:
    """Return the device with a name; a device that is not available is a usage error."""
    from tfkit.building import placement

    try:
        return placement.device_of(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from None


def weights_option(what: str = "Safetensors", *, otherwise: str | None = None) -> Decorator:
    """Declare the option `--weights`; `otherwise` describes its default."""
    default = f"; {otherwise} by default" if otherwise else ""
    help = f"{what}: a file, an index, their folder or a run folder{default}."
    return click.option("--weights", metavar="PATH", type=click.Path(path_type=Path), help=help)


def dtype_option(help: str, *, default: str | None = None) -> Decorator:
    """Return the option `--dtype`."""
    kinds = click.Choice(DTYPES)
    return click.option("--dtype", type=kinds, default=default, show_default=True, metavar="TYPE", help=help)


def count_option(name: str, help: str, *, default: int | None = None, minimum: int = 1, **further: Any) -> Decorator:
    """Declare an option that takes an integer; `further` contains additional arguments of `click.option`."""
    kind = click.IntRange(minimum)
    return click.option(name, default=default, show_default=True, type=kind, metavar="N", help=help, **further)


def seed_option(help: str) -> Decorator:
    """Return the option `--seed`."""
    return count_option("--seed", help, default=0, minimum=0, callback=_of_64_bits)


def _of_64_bits(context: click.Context, option: click.Parameter, seed: int) -> int:
    if seed >= 2**63:
        raise click.BadParameter(f"a seed must have at most 64 bits; got {seed.bit_length()}")
    return seed


def device_option(help: str) -> Decorator:
    """Declare the option `--device`, by default the CPU."""
    return click.option("--device", default="cpu", show_default=True, metavar="NAME", help=help)


def output_option(metavar: str, help: str, *, required: bool = False, dir_okay: bool = True) -> Decorator:
    """Return the option `--output`."""
    kind = click.Path(file_okay=metavar != "DIR", dir_okay=dir_okay, path_type=Path)
    return click.option("-o", "--output", required=required, metavar=metavar, type=kind, help=help)


def forms_option(function: Any) -> Any:
    """Return the options `--markdown` and `--latex`."""
    for name, words in (("latex", "LaTeX"), ("markdown", "Markdown")):
        function = click.option(f"--{name}", "form", flag_value=name, help=f"Print the result as {words}.")(function)
    return function


batch_option = count_option("--batch", "Sequences.", default=1)
"""The option `--batch`."""
by_option = click.option(
    "--by",
    default="component",
    show_default=True,
    type=click.Choice(["component", "node", "layer"]),
    metavar="PART",
    help="Rows: component, node or layer.",
)
"""The option `--by`, for tables of components, nodes or layers."""
allow_change_option = click.option(
    "--allow-change", is_flag=True, help="Accept weights saved with other values of the spec."
)
"""The option `--allow-change`, next to `--weights`."""
json_option = click.option("--json", is_flag=True, help="Print the result as JSON.")
"""The option `--json`. With it, `tfkit.command` prints errors as JSON, too."""
_FOLDER = click.Path(exists=True, path_type=Path)
SETS = [
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="PATH=VALUE",
        help="Change a value by its path; repeatable.",
    ),
]
PLUGINS = [
    click.option(
        "--plugin-dir", multiple=True, type=_FOLDER, metavar="DIR", help="Load the plugins in a folder; repeatable."
    ),
    click.option("--no-plugins", is_flag=True, help="Omit plugins installed or in TFKIT_PLUGIN_DIR."),
]
