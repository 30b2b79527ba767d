"""Redraw the pictures in docs/pictures, and draw every spec that comes with tfkit in out/pictures.

`python tools/draw_all.py`, or `make pictures`. out/pictures has a page that shows them by model type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tfkit.graph.expand import load
from tfkit.plugin.manager import load_plugins
from tfkit.tools.common.units import count_text
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import write_picture
from tfkit.tools.list_.gallery import Shipped, shipped_specs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "pictures"
PICTURES = ROOT / "out" / "pictures"
HEAD = """# Pictures of all specs

One picture of each model, as `tfkit draw NAME -o NAME.svg` draws it. Data flows from the bottom to the top. The number
at the right of a box is its parameters, those of one layer if a stack repeats it; lines at the sides are residuals,
dashed ones tied tables. Only the first model of each type is shown.
"""


def main() -> None:
    """Write the pictures of the docs, the pictures of all specs, and the page that shows all specs."""
    plugins = load_plugins()
    for path in DOCS.glob("*.svg"):
        write_picture(draw(*(load(name, plugins=plugins) for name in specs_of(path))), path)
    PICTURES.mkdir(parents=True, exist_ok=True)
    specs = shipped_specs()
    for spec in specs:
        write_picture(draw(load(spec.name, plugins=plugins)), PICTURES / f"{spec.name}.svg")
    (PICTURES / "README.md").write_text(page(specs), encoding="utf-8")


def specs_of(path: Path) -> list[str]:
    """Return the names of the one or two specs that a picture shows: `gpt2-llama3_8b.svg` shows two."""
    return path.stem.split("-")


def page(specs: Sequence[Shipped]) -> str:
    """Build the page that shows the pictures, by kind and model type."""
    parts = [HEAD]
    kinds = {"decoder": "Decoders", "encoder": "Encoders", "encoder-decoder": "Encoders with decoders"}
    for kind, title in kinds.items():
        parts.append(f"## {title}\n")
        parts += _families([spec for spec in specs if spec.kind == kind])
    return "\n".join(parts)


def _families(specs: Sequence[Shipped]) -> Iterator[str]:
    """Yield the first spec of each model type as a picture, and its remaining specs as links."""
    families: dict[str, list[Shipped]] = {}
    for spec in specs:
        families.setdefault(spec.model_type or spec.name, []).append(spec)
    for name, (first, *rest) in families.items():
        yield f"### {name}\n"
        links = [f"[{spec.name}]({spec.name}.svg)" for spec in rest]
        if links:
            yield f"Also: {', '.join(links)}\n"
        size = f", {count_text(first.parameters)}" if first.parameters else ""
        yield f'<img src="{first.name}.svg" alt="{first.name}{size}">\n'


if __name__ == "__main__":
    main()
