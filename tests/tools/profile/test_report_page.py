import dataclasses
import re
import shutil
import subprocess

import pytest

from tfkit.tools.profile.bars import LETTERS, BarSegment, labelled_bar
from tfkit.tools.profile.page import profile_report
from tfkit.tools.profile.result import KernelTime, undecided_notes

from .report_page import SECTIONS, Page, having, made_up, words

SCRIPT = "<script>alert(1)</script>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ALONE = [  # a browser that shows one page and asks nobody for anything
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--enable-logging=stderr", "--virtual-time-budget=2000"),
]


def test_every_colour_that_is_used_is_defined():
    local = tuple(dataclasses.replace(word, component=f"{word.component}_of_a_plugin") for word in made_up().parts)
    page = Page(profile_report([made_up(), made_up("other", parts=local)]))
    used = {word for element in page.root.iter() for word in element.get("class", "").split() if word.startswith("c-")}
    style = words(next(page.root.iter("style")))
    assert len(used) > 10
    assert used <= set(re.findall(r"\.(c-\w+) \{", style))


def test_the_page_asks_for_nothing_and_runs_nothing():
    text = profile_report([made_up(SCRIPT), made_up("other")])
    page = Page(text)
    names = {element.tag for element in page.root.iter()}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "image", "use"}
    attributes = {key for element in page.root.iter() for key in element.attrib}
    assert not attributes & {"src", "href", "xlink:href", "srcset", "action", "data"}
    assert not [key for key in attributes if key.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", words(next(page.root.iter("style"))))
    policy = next(meta.get("content") for meta in page.root.iter("meta") if meta.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_comes_from_a_spec_stays_text():
    parts = tuple(
        dataclasses.replace(
            part,
            path=f'{part.path}{SCRIPT}"',
            label=SCRIPT,
            component=f'x" onclick="{SCRIPT}',
            node=SCRIPT,
            layer=SCRIPT,
        )
        for part in made_up().parts
    )
    kernels = (KernelTime("void f<a & b>\x00\udcff", "ffn", SCRIPT, "forward", 1, 1e-3),)
    text = profile_report([made_up(SCRIPT, parts=parts, kernels=kernels, notes=(SCRIPT,))])
    page = Page(text)
    assert not list(page.root.iter("script"))
    assert SCRIPT not in text
    assert not [part for part in page.root.iter() if part.get("onclick") is not None]
    assert words(next(page.root.iter("h1"))) == SCRIPT
    assert "void f<a & b>" in words(page.section("kernels"))


def test_a_report_needs_a_profile():
    with pytest.raises(ValueError, match="at least one"):
        profile_report([])


@pytest.fixture(scope="module")
def browser():
    actual = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not actual:
        pytest.skip("no browser to open the report in: install chromium (apt-get install chromium)")
    return actual


def opened(browser, path, folder):
    """The elements of a page as a browser has them, and what it writes to its console."""
    command = [browser, *ALONE, f"--user-data-dir={folder}", "--dump-dom", path.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, [line for line in run.stderr.splitlines() if ":CONSOLE" in line]


def test_a_browser_opens_it(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(profile_report([made_up(SCRIPT), made_up("other")]))
    text, console = opened(browser, path, tmp_path / "browser")
    assert console == []
    page = Page(text)
    assert [section.get("id") for section in page.root.iter("section")] == list(SECTIONS)
    assert words(next(page.root.iter("h1"))) == f"{SCRIPT} and other"
    assert len(having(page.section("roofline"), "point")) == 10
    assert [line for line in page.rows("components") if line[0] == "FFN"]


@pytest.mark.slow
def test_a_page_that_asks_for_something_is_seen(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(profile_report([made_up()]).replace("</main>", '<img src="https://localhost/x.png"></main>'))
    _, console = opened(browser, path, tmp_path / "browser")
    assert any("Content Security Policy" in line for line in console)


def test_measurements_that_disagree_show_no_difference() -> None:
    """Slower without the profiler and faster with it, or within the deviations."""
    first = made_up("first")
    reversed_ = made_up("reversed", plain_steps=(70e-3, 70e-3, 70e-3), steps=(60e-3, 62e-3))
    noisy = made_up("noisy", plain_steps=(40e-3, 52e-3, 64e-3), steps=(80e-3, 80e-3))
    slower = made_up("slower", plain_steps=(70e-3, 70e-3, 70e-3), steps=(90e-3, 90e-3))
    assert list(undecided_notes([first, slower])) == []
    assert list(undecided_notes([first, reversed_])) == [
        "reversed and first: no difference shown; "
        "the ratio of their steps is 1.40× ± 0.00, and 0.87× under the profiler"
    ]
    assert [text.partition(":")[0] for text in undecided_notes([first, noisy, slower])] == ["noisy and first"]
    assert "no difference shown" in profile_report([first, noisy])


@pytest.mark.parametrize(
    ("letters", "text"), [(15.0, "ten letter 5%"), (14.9, "ten letter"), (12.0, "ten letter"), (11.9, "")]
)
def test_a_text_in_a_bar_has_a_margin_of_a_letter_at_each_side(letters, text):
    bar = labelled_bar("time", [BarSegment("ffn", letters, "ten letter", "5%", "hint")], LETTERS, "")
    assert ["".join(span.itertext()) for span in bar.iter("span")] == [text]
