"""The smallest model in which a property is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tfkit
from tfkit.cli import main
from tfkit.tools.check.measure import Deviation, Property, outcome_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.all import properties_of
from tfkit.tools.check.shrink import shrink

from .models import PLUGINS, measured, subject
from .planted import BUGS, Bug

SPEC = """
tfkit: 1
name: small
d_model: 24
vocab_size: 11
max_len: 40
graph:
  embedding: {block: embedding, position: learned, dropout: 0.1}
  decoder:
    block: decoder
    n_layers: 6
    norm: {kind: rmsnorm, eps: 1e-4}
    attention: {kind: gqa, n_heads: 6, n_kv_heads: 3, mask: {left: 9, right: 0}}
    ffn: {kind: swiglu, d_ff: 31}
  logits: {block: lm_head, bias: true}
"""
SHRUNK = """\
tfkit: 1
name: small
d_model: 2
vocab_size: 1
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 3, attention: {kind: gqa, n_heads: 2, n_kv_heads: 1}}
"""


def model() -> ModelUnderTest:
    return ModelUnderTest(tfkit.loads(SPEC), PLUGINS)


def broken_groups(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Break the third layer of each stack whose heads share keys, by 0.1 for each head."""
    layer = "decoder.layers.2.attention"
    heads = {attention.path: attention.config for attention in subject.attentions}
    if layer in heads and heads[layer].kv_heads < heads[layer].n_heads:
        yield Deviation(0.1 * heads[layer].n_heads, "a fault", where=layer)


def test_only_what_breaks_the_property_is_left() -> None:
    prop = Property("groups", "has no groups", broken_groups)
    numbers: list[tuple[int, int]] = []
    shrunk = shrink(model(), prop, outcome_of(prop, model()), on_progress=lambda *counts: numbers.append(counts))
    assert shrunk.text == SHRUNK
    assert (shrunk.n_values, shrunk.n_values_before) == (10, numbers[0][1])
    assert [left for left, _ in numbers] == sorted((left for left, _ in numbers), reverse=True)
    assert (shrunk.outcome.worst, shrunk.outcome.component) == (0.2, "decoder.layers.2.attention")


def test_another_fault_is_not_the_same_fault() -> None:
    """A deviation in another component, a much smaller deviation, and an error with another text do not count."""

    def fault(subject: ModelUnderTest) -> Iterator[Deviation]:
        stack = subject.graph.spec.model.graph["decoder"]
        if stack.n_layers < 4:  # type: ignore[attr-defined]
            yield Deviation(1.0, "a fault", where="embedding")
        elif subject.graph.spec.model.graph["embedding"].vocab_size < 5:  # type: ignore[attr-defined]
            yield Deviation(1e-4, "a fault", where="decoder")
        elif stack.d_model < 8:  # type: ignore[attr-defined]
            raise ValueError("no such width")
        else:
            yield Deviation(1.0, "a fault", where="decoder")

    prop = Property("fault", "has no fault", fault)
    graph = tfkit.loads(shrink(model(), prop, outcome_of(prop, model())).text)
    stack, embedding = (graph.spec.model.graph[name] for name in ("decoder", "embedding"))
    assert (stack.n_layers, stack.d_model, embedding.vocab_size) == (4, 8, 5)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.model != "trained"][::9], ids=lambda bug: bug.bug)
def test_a_planted_bug_breaks_its_property_in_the_smallest_model(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, instead in bug.patches:
        monkeypatch.setattr(owner, name, instead)
    (broken,) = properties_of(PLUGINS).chosen([bug.red])
    shrunk = shrink(subject(bug.model), broken, measured(subject(bug.model), bug.red))
    assert shrunk.n_values < shrunk.n_values_before
    again = outcome_of(broken, ModelUnderTest(tfkit.loads(shrunk.text, plugins=PLUGINS), PLUGINS))
    assert (again.status, again.worst, again.detail) == ("failed", shrunk.outcome.worst, shrunk.outcome.detail)


def test_nothing_is_written_if_no_property_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.yaml").write_text(SPEC)
    file = tmp_path / "smallest.yaml"
    assert main(["check", str(tmp_path / "model.yaml"), "--only=position-wise", f"--shrink={file}"]) == 0
    assert capsys.readouterr().err == f"{file} is not written: no property is broken\n"
    assert not file.exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--mutate", "--shrink cannot be combined with --mutate"),
        ("--weights=w.safetensors", "--shrink cannot be combined with trained weights: smaller models do not fit them"),
    ],
)
def test_options_that_exclude_each_other(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "gpt2", option, "--shrink=smallest.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_the_spec_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.yaml").write_text(SPEC)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "model.yaml")
    assert main(["check", str(tmp_path / "model.yaml"), f"--shrink={tmp_path / 'link.yaml'}"]) == 2
    assert "--shrink must not replace SPEC; got" in capsys.readouterr().err
    assert (tmp_path / "model.yaml").read_text() == SPEC
