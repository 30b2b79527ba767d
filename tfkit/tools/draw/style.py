"""The colours of pictures. Every text and line has a colour for light and one for dark surroundings."""

from __future__ import annotations

from typing import Literal

Theme = Literal["auto", "light", "dark"]
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'

FILLS = {
    # role: light fill, light outline, dark fill, dark outline
    "attention": ("#ffe1bd", "#d9964a", "#5c3f1b", "#b9813f"),
    "cross_attention": ("#ffd3cc", "#d97766", "#5f2f2a", "#c06a5e"),
    "ffn": ("#cfe6fb", "#6ca4d4", "#1f4263", "#5590c4"),
    "norm": ("#f8f2bd", "#c4b545", "#4b4716", "#a0963b"),
    "embedding": ("#fcd7e3", "#d6829f", "#5b2a3d", "#b9668a"),
    "position": ("#d5f1d6", "#72b577", "#20482a", "#559c5f"),
    "head": ("#e0d9f8", "#9683d6", "#3c3068", "#8675c4"),
    "step": ("#eceff2", "#a3abb4", "#31383f", "#757f8a"),
    "block": ("#e3edec", "#82a8a4", "#23403e", "#5f908b"),
}
PLAIN = "step"
"""The colours of every other role."""
CELLS = (("#7b8794", "#8b96a3"), ("#d9964a", "#b9813f"), ("#6ca4d4", "#5590c4"), ("#9683d6", "#8675c4"))
"""The colours of layers that differ, light and dark."""
INKS = {
    # name: light, dark
    "text": ("#1c2127", "#edf1f5"),
    "muted": ("#4a525b", "#b8c1cb"),
    "line": ("#4f5963", "#a3adb8"),
    "memory": ("#b4432f", "#f0907f"),
    "tie": ("#7a4fc0", "#b79af0"),
    "accent": ("#c4161c", "#ff7b72"),
    "page": ("#ffffff", "#12161c"),
    "edge": ("#d5dae0", "#323a43"),
    "frame": ("#f5f7f9", "#1a2027"),
    "band": ("#e6eaee", "#2a323b"),
    "inside": ("#ffffff", "#12161c"),
}


def role(slot: str) -> str:
    """Return the class of a box in the colours of a slot."""
    return f"r-{slot if slot in FILLS else PLAIN}"


def css(theme: Theme, used: set[str]) -> str:
    """Return the rules for the classes in `used`. With `auto`, a picture follows the reader's system preference."""
    shape = (
        f"text{{font-family:{FONTS}}}.bold{{font-weight:700}}"
        ".line{fill:none;stroke-width:1.4}.residual{stroke-width:1.8}.tie{stroke-dasharray:5 4}"
        ".box,.chip,.frame,.band,.page{stroke-width:1}.differs{stroke-width:2.6}.plus{stroke-width:1.4}"
    )
    light, dark = _colours(0, used), _colours(1, used)
    if theme == "auto":
        return f"{shape}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    return shape + (light if theme == "light" else dark)


def _colours(which: int, used: set[str]) -> str:
    ink = {name: pair[which] for name, pair in INKS.items()}
    rules = [
        f"text{{fill:{ink['text']}}}.muted{{fill:{ink['muted']}}}.line,.plus{{stroke:{ink['line']}}}",
        f".tip,.dot{{fill:{ink['line']}}}.plus{{fill:{ink['page']}}}",
        f".page{{fill:{ink['page']};stroke:{ink['edge']}}}.frame{{fill:{ink['frame']};stroke:{ink['edge']}}}",
        f".band{{fill:{ink['band']};stroke:{ink['edge']}}}",
    ]
    for way in ("memory", "tie"):
        rules.append(f".{way}{{stroke:{ink[way]}}}.tip.{way}{{fill:{ink[way]};stroke:none}}")
    for name in sorted(FILLS):
        fill, outline = FILLS[name][2 * which : 2 * which + 2]
        if role(name) in used:
            rules.append(f".{role(name)}{{fill:{fill};stroke:{outline}}}")
    rules.append(f".part{{fill:{ink['inside']};fill-opacity:.55}}")
    for number, pair in enumerate(CELLS):
        if f"cell{number}" in used:
            rules.append(f".cell{number}{{fill:{pair[which]}}}")
    rules.append(f".accent{{fill:{ink['accent']}}}.differs{{stroke:{ink['accent']}}}")
    return "".join(rules)
