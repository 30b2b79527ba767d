"""A picture as a self-contained page: pointing at a box shows its purpose and all its values."""

from __future__ import annotations

from html import escape

from tfkit.tools.draw.style import FONTS, INKS, Theme
from tfkit.tools.draw.svg import Picture, to_svg

_SCRIPT = """
const tip = document.getElementById("tip");
function tell(box) {
  const head = document.createElement("b"), about = document.createElement("p"), rows = document.createElement("table");
  head.textContent = box.dataset.title;
  tip.replaceChildren(head, about, rows);
  for (const line of box.dataset.tip.split("\\n")) {
    const [name, value] = line.split("\\t");
    if (!name) {
      about.textContent = value;
      continue;
    }
    const row = rows.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = value;
  }
  tip.hidden = false;
  const at = box.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const beside = at.right + 10 + size.width < innerWidth ? at.right + 10 : Math.max(4, at.left - size.width - 10);
  tip.style.left = `${beside + scrollX}px`;
  tip.style.top = `${Math.max(4, Math.min(at.top, innerHeight - size.height - 4)) + scrollY}px`;
}
for (const box of document.querySelectorAll(".tipped")) {
  for (const event of ["pointerenter", "focus"]) box.addEventListener(event, () => tell(box));
  for (const event of ["pointerleave", "blur"]) box.addEventListener(event, () => { tip.hidden = true; });
}
"""


def to_html(picture: Picture, theme: Theme = "auto") -> str:
    """Render a page that needs no other file."""
    light, dark = (_rules(which) for which in (0, 1))
    rules = f"{light}@media(prefers-color-scheme:dark){{{dark}}}" if theme == "auto" else (light, dark)[theme == "dark"]
    svg = to_svg(picture, theme, tips=True)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(picture.title)}</title>
<style>
body{{margin:24px;font:13px {FONTS}}}
svg{{display:block;margin:auto;max-width:100%;height:auto}}
.tipped{{outline:none}}.tipped:hover>rect:first-of-type,.tipped:focus>rect:first-of-type{{stroke-width:2.4}}
#tip{{position:absolute;max-width:280px;font-size:12px;padding:10px 12px;border:1px solid;border-radius:8px}}
#tip{{pointer-events:none}}#tip p{{margin:2px 0 6px}}
#tip td{{padding:0 12px 0 0;vertical-align:top;overflow-wrap:anywhere}}
{rules}
</style>
<body>
{svg}<div id="tip" hidden></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _rules(which: int) -> str:
    ink = {name: pair[which] for name, pair in INKS.items()}
    return (
        f"body{{background:{ink['frame']};color:{ink['text']}}}"
        f"#tip{{background:{ink['page']};border-color:{ink['edge']}}}#tip td:first-child{{color:{ink['muted']}}}"
    )
