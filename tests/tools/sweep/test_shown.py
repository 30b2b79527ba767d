"""The results of a finished sweep: a different metric, a different baseline, a margin, and all output formats."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tfkit.tools.sweep.result_tables import _in_lines

from ...sampling import some
from ..common.moments import state_of
from .small import MEMORY, SWEEP, TUNE, drawn, result, sweep, write

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.usefixtures("tuned")
def test_more_is_better_where_the_sweep_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP.replace("val.loss", "val.loss, better: higher") + TUNE)
    assert result(capsys)["arms"][0]["tuned"]["values"] == {"optimizer.lr": 1e-6}


@pytest.mark.usefixtures("tuned")
def test_another_number_is_shown_of_the_same_runs(capsys: pytest.CaptureFixture[str], new_folders: list[str]) -> None:
    """What was tuned stays, for it was chosen on the sweep's own number."""
    actual = result(capsys)
    for better in ("higher", "lower"):
        other = result(capsys, "--on", "val.accuracy", "--better", better)
        assert (other["on"], other["lower"]) == ("val.accuracy", better == "lower")
        assert other["trials"] == actual["trials"]
        assert {trial["on"] for trial in other["trials"]} == {"val.loss"}
        assert [trial["tuned"] for trial in other["arms"]] == [trial["tuned"] for trial in actual["arms"]]
        for arm, value in zip(other["arms"], actual["arms"], strict=True):
            assert arm["mean"] != value["mean"]
            for curve in arm["curves"]:
                lines = Path(curve["folder"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                assert curve["values"][-1] == json.loads(lines[-1])["val.accuracy"]
    assert new_folders == []
    assert sweep("--so-far", "--on", "val.accuracy", "--better", "higher") == 0
    assert "tried   val.loss" in capsys.readouterr().out


def test_a_wide_number_has_several_lines_in_a_head() -> None:
    lines = ["val.accuracy", "test.\nexact_match", "test.\ndecoded_\naccuracy"]
    assert [_in_lines(line.replace("\n", "")) for line in lines] == lines


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--on", "val.perplexity", "--better", "lower"), 1, "relu does not report the metric `val.perplexity`"),
        (("--on", "val.accuracy"), 2, "`val.accuracy` has no known direction: add --better lower or --better higher"),
        (("--on", ""), 2, "`` has no known direction"),
        (("--better", "higher"), 2, "--better is the direction of a metric: add --on"),
        (("--margin", "0.1"), 2, "--margin is a difference of a metric: add --on"),
        (("--margin", "0", "--on", "val.loss"), 2, "`--margin` must be a number above 0; got 0.0"),
        (("--plan", "--on", "val.loss"), 2, "--plan cannot be combined with --on"),
    ],
)
def test_a_number_that_cannot_be_shown(
    options: tuple[str, ...], status: int, words: str, capsys: pytest.CaptureFixture[str], new_folders: list[str]
) -> None:
    assert sweep(*options) == status
    assert capsys.readouterr().err.startswith(f"error: {words}")
    assert new_folders == []


def test_a_margin_of_one_variant(capsys: pytest.CaptureFixture[str], new_folders: list[str]) -> None:
    write("tfkit: 1\nbase: small.yaml\nseeds: [0]\ncompare: {on: val.loss}\n")
    assert sweep("--on", "val.loss", "--margin", "0.1") == 1
    assert capsys.readouterr().err.startswith("error: `margin` has no effect: there is one variant\n")
    assert new_folders == []


@pytest.mark.usefixtures("new_folders")
def test_variants_that_are_evaluated_differently_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP.replace("again: ", "part: {eval.splits.val: 3}\n  mixed: {data.order: sampled}\n  again: "))
    (note,) = [note for note in result(capsys, "--so-far")["notes"] if "differently" in note]
    assert note == "part is evaluated differently from relu: eval.splits.val.batches: 2 -> 3"


@pytest.mark.usefixtures("new_folders")
@pytest.mark.parametrize(("more", "remarks"), [("", 1), ("equal: {params: 0%}\n", 1), ("equal: {flops: 70%}\n", 0)])
def test_a_note_says_which_variants_have_other_lengths(
    more: str, remarks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(SWEEP.replace("  gelu: ", "  short: {steps: 3}\n  gelu: ") + more)
    notes = [note for note in result(capsys, "--so-far")["notes"] if "tokens" in note]
    expected = "short has 216 tokens, 62.50% fewer than the 576 of relu; `equal: {tokens: 0%}` would reject it"
    assert notes == [expected] * remarks


@pytest.mark.usefixtures("finished")
def test_each_variant_is_compared_to_the_one_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    to_first = {arm["name"]: arm["difference"] for arm in result(capsys)["arms"]}
    write(SWEEP.replace("to: relu", "to: previous"))
    actual = result(capsys)
    assert actual["notes"][0] == "each variant is compared to the one before it"
    first, again, gelu = actual["arms"]
    assert [arm["base"] for arm in (first, again, gelu)] == ["relu", "relu", "again"]
    assert first["difference"] is None
    assert again["difference"] == to_first["again"]
    assert gelu["difference"]["mean"] == to_first["gelu"]["mean"]  # the two before it are equal
    assert "<h3>again and gelu</h3>" in Path(actual["page"]).read_text(encoding="utf-8")


@pytest.mark.usefixtures("finished")
def test_a_margin_of_the_file_or_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP.replace("val.loss}", "val.loss, margin: 0.5}"))
    report = result(capsys)
    assert report["margin"] == 0.5
    assert [arm["verdict"] for arm in report["arms"]] == [None, "open", "open"]  # three seeds show nothing
    page = Path(report["page"]).read_text(encoding="utf-8")
    assert page.count('class="margin"') == 1
    assert "The band is ± 0.5, the margin" in page
    report = result(capsys, "--on", "val.loss", "--margin", "1e-9")
    assert [arm["verdict"] for arm in report["arms"]] == [None, "open", "open"]
    (note,) = [note for note in report["notes"] if note.startswith("gelu is open: ")]
    assert note.endswith(" seeds would show it to be the same within 1e-09, in 4 of 5 cases, if it is")
    report = result(capsys, "--on", "val.loss")
    assert (report["margin"], [arm["verdict"] for arm in report["arms"]]) == (None, [None, "open", "open"])
    assert 'class="margin"' not in Path(report["page"]).read_text(encoding="utf-8")


@pytest.mark.usefixtures("finished")
def test_seeds_and_metrics_that_are_added_after_results_are_said(
    capsys: pytest.CaptureFixture[str], new_folders: list[str]
) -> None:
    """The first results are the plan, whatever is shown of it later."""

    def warnings(*options: str) -> list[str]:
        return [note for note in result(capsys, "--so-far", *options)["notes"] if "false alarms" in note]

    for name in ("out/shown.json", "out/report.html"):
        Path(name).unlink()
    write(SWEEP.replace("[0, 1, 2]", "[0, 1]"))
    assert warnings() == []
    assert warnings() == []
    write(SWEEP)
    (note,) = warnings()
    assert note.startswith("the seeds were 0-1 when results were first shown, and are 0-2 now: changing the seeds")
    accuracy = ("--on", "val.accuracy", "--better", "higher")
    note, second = warnings(*accuracy)
    assert second == "val.loss was shown first: the best of 2 metrics gives more false alarms than 5%"
    write(SWEEP.replace("[0, 1, 2]", "[0, 1]"))
    assert warnings() == []
    write(SWEEP.replace("gelu:", "other:").replace("kind: gelu", "kind: silu").replace("[0, 1, 2]", "[0, 1, 2, 3]"))
    assert warnings()[0].startswith("the seeds were 0-1 ")  # of `again`, which shares its runs with the baseline
    assert new_folders == []


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(
    "text", some(["{", "3", "[3]", "{}", '[{"on": "val.loss"}]', '[{"on": 1, "seeds": [0], "runs": []}]'], 2)
)
def test_a_damaged_list_of_what_was_shown_is_one_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/shown.json").write_text(text, encoding="utf-8")
    assert sweep("--so-far") == 1
    assert capsys.readouterr().err.count("error: cannot read `out/shown.json`: ") == 1
    assert Path("out/shown.json").read_text(encoding="utf-8") == text


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("name", some(["report.html", "shown.json"], 1))
def test_results_are_not_written_through_a_link(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outside").write_text("[]", encoding="utf-8")
    Path("out", name).unlink()
    Path("out", name).symlink_to("../outside")
    assert sweep("--so-far") == 1
    expected = f"error: `out/{name}` must be a file or a folder that tfkit wrote; got a link to `../outside`"
    assert expected in capsys.readouterr().err
    assert Path("outside").read_text(encoding="utf-8") == "[]"


@pytest.mark.parametrize("name", some(["runs", "runs/RUN", "runs/RUN/run.yaml"], 1))
def test_runs_are_not_written_through_a_link(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--commands") == 0
    path = Path(next(iter(capsys.readouterr().out.split("\n"))).split()[2])
    path = {"runs": path.parent, "runs/RUN": path}.get(name, path / "run.yaml")
    path.rename("outside")
    path.symlink_to(os.path.relpath("outside", path.parent))
    before = state_of(Path())
    assert sweep("--commands") == 1
    assert f"error: `{path}` must be a file or a folder that tfkit wrote; got a link to" in capsys.readouterr().err
    assert {file: content for file, content in state_of(Path()).items() if file in before} == before


def test_a_plan_and_a_start_say_how_many_seeds_a_verdict_needs(
    capsys: pytest.CaptureFixture[str], new_folders: list[str]
) -> None:
    assert sweep("--plan") == 0
    assert capsys.readouterr().out.endswith("\n3 seeds, but a verdict needs at least 6\n")
    write(SWEEP.replace("[0, 1, 2]", "[0, 1, 2, 3, 4, 5]"))
    assert sweep("--plan") == 0
    assert "a verdict needs" not in capsys.readouterr().out
    write(SWEEP.replace("[0, 1, 2]", "[0]"))
    assert sweep() == 0
    out, err = capsys.readouterr()
    assert err == "1 seed, but a verdict needs at least 6\n"
    assert "\n1 seed, but a verdict needs at least 6\n" in out
    write(SWEEP.replace("[0, 1, 2]", "[0, 1]"))
    assert "1 of 2 seeds are complete: a verdict counts only with all seeds" in result(capsys, "--so-far")["notes"]
    assert len(new_folders) == 2


@pytest.mark.usefixtures("finished")
def test_note_when_runs_used_different_devices(capsys: pytest.CaptureFixture[str]) -> None:
    record = sorted(Path("out").glob("runs/*/run.json"))[0]
    facts = json.loads(record.read_text(encoding="utf-8"))
    here, other = facts["bits"]["device"], "NVIDIA H200"
    assert not [note for note in result(capsys)["notes"] if "machine" in note]
    facts["bits"]["device"] = other
    session = facts["sessions"][-1]
    facts["sessions"] = [session, {**session, "memory": 3 * MEMORY}, {**session, "memory": 2 * MEMORY}]
    record.write_text(json.dumps(facts), encoding="utf-8")
    actual = result(capsys)
    memory = {Path(curve["folder"]).name: curve["memory"] for arm in actual["arms"] for curve in arm["curves"]}
    assert memory == dict.fromkeys(memory, MEMORY) | {record.parent.name: 3 * MEMORY}
    (note,) = [note for note in actual["notes"] if "machine" in note]
    words = {f"device is `{value}` or `{two}`" for value, two in ((here, other), (other, here))}
    assert note.removeprefix("the runs are from different machines, so their speeds are not comparable: ") in words
    text = Path(actual["page"]).read_text(encoding="utf-8")
    assert f"{here}; {other}" in text or f"{other}; {here}" in text


@pytest.mark.usefixtures("finished")
def test_what_is_printed(run: Callable[..., str], golden: Callable[[str, str], None]) -> None:
    plan = run("sweep", "sweep.yaml", "-o", "nowhere", "--plan")
    text = run("sweep", "sweep.yaml", "-o", "out")
    golden("sweeps/printed", re.sub(r" *[-+]?\d[\d.,]*", " #", f"{plan}\n{text}"))


@pytest.mark.usefixtures("finished")
def test_forms_for_papers(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP.replace("again", "a_b").replace("[0, 1, 2]", "[0]"))
    assert sweep("--latex") == 0
    out, err = capsys.readouterr()
    assert r"a\_b & " in out
    assert "1 seed, but a verdict needs at least 6" in err
    assert sweep("--markdown") == 0
    assert "| a_b | " in capsys.readouterr().out
    assert sweep("--latex", "--json") == 2


class Addresses(HTMLParser):
    """What a page would fetch."""

    addresses: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            f"{tag} {name} {value}" for name, value in attrs if name in ("src", "href", "data", "srcset")
        ]
        self.addresses += ["script"] if tag in ("script", "iframe", "object") else []


@pytest.mark.usefixtures("finished")
def test_the_page_is_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP.replace("again", '"<b>again"').replace("tfkit: 1", "tfkit: 1\ndescription: a & b <script>"))
    record = Path(result(capsys)["page"])
    text = record.read_text(encoding="utf-8")
    reader = Addresses()
    reader.addresses = []
    reader.feed(text)
    assert reader.addresses == ["script"]  # the curves: a page with other scripts does not run them
    assert "script-src 'sha256-" in text
    assert "url(" not in text
    assert "@import" not in text
    assert "<b>" not in text
    assert drawn(text) == (["differences", "curves", "differences over the steps"], 1)
    assert "prefers-color-scheme" in text
    assert len(text) < 2_000_000
