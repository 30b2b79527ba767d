"""SVG files: well-formed, without scripts, reproducible, and readable in light and dark mode."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import tfkit
from tfkit.tools.draw.canvas import FILLS, INKS, Theme, css_rules
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.picture import draw, picture_of
from tfkit.tools.draw.svg import SVG, to_html, to_png, to_svg, write_picture

HOSTILE = '<script>alert("x")</script> & <b>"quoted"</b> \' --> ]]>'
ABOUT = 'source: https://example.org/?a=1&b=<2>\ndescription: "{}"\n'


@pytest.fixture
def hostile() -> tfkit.Graph:
    """A spec whose texts look like markup."""
    text = """\
tfkit: 1
name: a.b-c
d_model: 16
vocab_size: 50
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head, tie: embedding}
"""
    quoted = HOSTILE.replace("\\", "\\\\").replace('"', '\\"')
    return tfkit.loads(text.replace("d_model", ABOUT.format(quoted) + "d_model", 1))


def test_an_svg_asks_for_nothing() -> None:
    for names in (["gpt2"], ["t5_small", "deepseek_v3"]):
        text = to_svg(draw(*map(tfkit.load, names)))
        root = ET.fromstring(text)
        assert root.tag == f"{{{SVG}}}svg"
        tags = {element.tag.partition("}")[2] for element in root.iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "circle", "path", "text", "tspan", "g"}
        assert not {key for element in root.iter() for key in element.attrib if "href" in key or key.startswith("on")}
        assert not re.search(r"@import|url\(|@font-face|xlink|javascript", text)
        style = root.findtext(f"{{{SVG}}}style") or ""
        assert style.count("{") == style.count("}")
        assert "prefers-color-scheme:dark" in style


@pytest.mark.slow
def test_every_class_has_its_rule() -> None:
    root = ET.fromstring(to_svg(draw(tfkit.load("trinity_mini"), tfkit.load("t5_small"))))
    style = root.findtext(f"{{{SVG}}}style") or ""
    used = {name for element in root.iter() for name in element.get("class", "").split()}
    silent = {"side", "outer"}
    assert {name for name in used - silent if f".{name}" not in style} == set()


def test_markup_in_texts_stays_text(hostile: tfkit.Graph) -> None:
    picture = draw(hostile)
    svg, page = to_svg(picture), to_html(picture)
    assert "<script" not in svg
    assert page.count("<script>") == 1
    assert "alert" in "".join(ET.fromstring(svg).itertext())
    assert "<b>" not in page
    root = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert "alert" in "".join(root.itertext())


def test_the_page_says_more_of_each_box() -> None:
    page = to_html(draw(tfkit.load("llama3_8b")))
    root = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    tips = {group.get("data-title"): group.get("data-tip") or "" for group in root.iter(f"{{{SVG}}}g")}
    attention = dict(line.split("\t") for line in tips["causal self-attention"].splitlines())
    assert attention[""] == "Groups of query heads share one head of keys and values."
    assert (attention["n_heads"], attention["n_kv_heads"], attention["position"]) == ("32", "8", "rope")
    assert attention["position.theta"] == "500000.0"
    assert not re.search(r"(src|href)=", page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_png_is_twice_as_large_and_in_its_colours(theme: Theme) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("resvg_py")
    from io import BytesIO

    picture = draw(tfkit.load("gpt2"))
    png = image.open(BytesIO(to_png(picture, theme))).convert("RGB")
    assert abs(png.width - 2 * picture.width) <= 2
    assert abs(png.height - 2 * picture.height) <= 2
    page = INKS["page"][theme == "dark"]
    assert "#{:02x}{:02x}{:02x}".format(*png.getpixel((30, png.height // 3))) == page
    attention = FILLS["attention"][2 * (theme == "dark")]
    colours = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in png.getcolors(png.width * png.height)}
    assert attention in colours


def test_a_png_has_letters_without_the_fonts_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    resvg_py = pytest.importorskip("resvg_py")
    calls = {}
    real = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda **options: calls.update(options) or real(**options))
    with_letters = to_png(draw(tfkit.load("gpt2")))
    assert calls["skip_system_fonts"]
    assert all(Path(file).is_file() for file in calls["font_files"])
    assert len(with_letters) > 1.5 * len(real(**(calls | {"font_files": []})))


def luminance(colour: str) -> float:
    """Relative luminance, https://www.w3.org/TR/WCAG21/#dfn-relative-luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours; text should have 4.5."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("which", [0, 1])
def test_texts_can_be_read(which: int) -> None:
    grounds = [fill[2 * which] for fill in FILLS.values()] + [INKS[name][which] for name in ("page", "frame", "band")]
    for ink, ground in product(("text", "muted", "cause"), grounds):
        minimum = 3.5 if ink == "cause" else 4.5
        assert contrast(INKS[ink][which], ground) >= minimum, (ink, ground)
    for ink, ground in product(("line", "memory", "tie"), ("page", "frame")):
        assert contrast(INKS[ink][which], INKS[ground][which]) >= 3, (ink, ground)


def test_themes() -> None:
    used = {"r-norm"}
    assert "@media" not in css_rules("light", used) + css_rules("dark", used)
    assert INKS["page"][0] in css_rules("light", used)
    assert INKS["page"][0] not in css_rules("dark", used)
    assert "r-norm" in css_rules("auto", used)
    assert "r-ffn" not in css_rules("auto", used)


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = picture_of([scene_of(tfkit.load("gpt2"))])
    for ending in (".svg", ".html"):
        write_picture(picture, tmp_path / f"a{ending}")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.html; got \.pdf"):
        write_picture(picture, tmp_path / "a.pdf")
    with pytest.raises(tfkit.SpecError, match=r"cannot write .*its folder does not exist"):
        write_picture(picture, tmp_path / "nowhere" / "a.svg")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = (tmp_path / "a.svg").read_text()
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_picture(picture, tmp_path / "a.svg", "dark")
    assert (tmp_path / "a.svg").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.svg"]


def test_one_or_two() -> None:
    graph = tfkit.load("gpt2")
    for graphs in ((), (graph,) * 3):
        with pytest.raises(ValueError, match="one or two models"):
            draw(*graphs)


def test_what_a_png_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(tfkit.SpecError, match=r"`resvg_py`, which(.|\n)*pip install \"tfkit\[draw\]\""):
        to_png(draw(tfkit.load("gpt2")))
