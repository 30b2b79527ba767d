"""Draw every spec that comes with tfkit to docs/pictures, and the page that shows them: `python tools/draw_all.py`.

With names of specs, draw only those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfkit.graph.expand import load
from tfkit.plugin.manager import load_plugins
from tfkit.tools.draw import draw, write
from tfkit.tools.gallery import Shipped, shipped
from tfkit.tools.units import short

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PAIRS = (("gpt2", "llama3_8b"), ("llama2_7b", "llama3_8b"))
HEAD = """# Pictures of all specs

One picture a model, as `tfkit draw NAME -o NAME.svg` draws it; `python tools/draw_all.py` renews them. Data flows from
the bottom to the top. The number at the right of a box is its parameters, those of one layer if a stack repeats it;
lines at the sides are residuals, dashed ones tied tables. Only the first model of each type is shown.
"""


def main(names: Sequence[str]) -> None:
    """Write the pictures of these specs, or of all with the page that shows them."""
    plugins = load_plugins()
    FOLDER.mkdir(parents=True, exist_ok=True)
    specs = [one for one in shipped() if not names or one.name in names]
    for spec in specs:
        write(draw(load(spec.name, plugins=plugins)), FOLDER / f"{spec.name}.svg")
    if names:
        return
    for pair in PAIRS:
        write(draw(*(load(name, plugins=plugins) for name in pair)), FOLDER / f"{'-'.join(pair)}.svg")
    wanted = {f"{spec.name}.svg" for spec in specs} | {f"{'-'.join(pair)}.svg" for pair in PAIRS}
    for old in FOLDER.glob("*.svg"):
        if old.name not in wanted:
            old.unlink()
    (FOLDER / "README.md").write_text(page(specs), encoding="utf-8")


def page(specs: Sequence[Shipped]) -> str:
    """The page that shows the pictures, by kind and model type."""
    parts = [HEAD, "## Two side by side\n\n`tfkit draw A B -o FILE` marks the differences.\n"]
    parts += [f'<img src="{"-".join(pair)}.svg" alt="{" and ".join(pair)}">\n' for pair in PAIRS]
    kinds = {"decoder": "Decoders", "encoder": "Encoders", "encoder-decoder": "Encoders with decoders"}
    for kind, title in kinds.items():
        parts.append(f"## {title}\n")
        parts += _families([spec for spec in specs if spec.kind == kind])
    return "\n".join(parts)


def _families(specs: Sequence[Shipped]) -> Iterator[str]:
    """The first spec of each model type as a picture, the others as links."""
    families: dict[str, list[Shipped]] = {}
    for spec in specs:
        families.setdefault(spec.model_type or spec.name, []).append(spec)
    for name, (first, *others) in families.items():
        yield f"### {name}\n"
        links = [f"[{one.name}]({one.name}.svg)" for one in others]
        if links:
            yield f"Also: {', '.join(links)}\n"
        size = f", {short(first.parameters)}" if first.parameters else ""
        yield f'<img src="{first.name}.svg" alt="{first.name}{size}">\n'


if __name__ == "__main__":
    main(sys.argv[1:])
