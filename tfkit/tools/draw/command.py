"""Draw a model, or two side by side, as SVG, PNG or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option, output_option
from tfkit.console.output import print_json, print_tables, with_titles
from tfkit.errors import printable_text

if TYPE_CHECKING:
    from tfkit.tools.draw.canvas import Theme

ENDINGS = (".svg", ".png", ".html")


@command(
    "draw",
    section="Tools",
    order=430,
    notes="""
    Data flows from the bottom to the top. Numbers at the right of boxes are
    parameters, of one layer if a stack repeats it. For two specs, the values that
    differ in the specs are blue; sizes and counts that follow from them are in
    grey italics, and boxes with only such differences have a dashed outline.

    An SVG and a page follow the light or dark colours of their reader's system;
    a PNG is light unless --theme says otherwise.
    """,
    examples="""
    tfkit draw gpt2 -o gpt2.svg
    tfkit draw llama2_7b llama3_8b -o llamas.png --theme dark
    tfkit draw my_model.yaml -o my_model.html
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC [SPEC]", shell_complete=complete_spec)
@output_option("FILE", "The file: a name that ends in .svg, .png or .html.", required=True, dir_okay=False)
@click.option(
    "--theme",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "light", "dark"]),
    metavar="COLOURS",
    help="Colours: auto, light or dark.",
)
@json_option
def draw(reader: Reader, specs: tuple[str, ...], output: Path, theme: Theme, json: bool) -> None:
    if len(specs) > 2:
        raise click.BadParameter(f"a picture must show one or two models; got {len(specs)}", param_hint="SPEC")
    if output.suffix not in ENDINGS:
        message = f"`{output.name}` must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise click.BadParameter(message, param_hint="--output")
    from tfkit.tools.common.atomic_files import check_file

    check_file(output)
    graphs = with_titles([reader.load(spec) for spec in specs], specs)
    from tfkit.tools.draw.picture import draw as paint
    from tfkit.tools.draw.svg import write_picture

    picture = paint(*graphs)
    write_picture(picture, output, theme)
    size = [round(picture.width), round(picture.height)]
    if json:
        print_json({"file": str(output), "size": size, "models": [graph.name for graph in graphs]})
    else:
        print_tables(f"wrote {printable_text(str(output))}, {size[0]} x {size[1]}")
