"""Training starts near ln V: the default for any spec, what ships, and a warning where a spec is far from it."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tfkit
from tests.small_specs import covering_first, reductions
from tfkit.cli import main
from tfkit.first_loss import first_losses
from tfkit.tools.common.inputs import random_inputs

from .sampling import some

ROOT = Path(__file__).parents[1]
VOCAB = 997

SPEC = f"""
tfkit: 1
name: start
d_model: 256
vocab_size: {VOCAB}
max_len: 64
graph:
  embedding: {{block: embedding}}
  decoder: {{block: decoder, n_layers: 2, attention: {{kind: mha, n_heads: 4}}, ffn: {{kind: swiglu, d_ff: 256}}}}
  logits: {{block: lm_head}}
"""
TIED = "logits.tie=embedding"
SCALED = "embedding.scale=sqrt_d_model"


def measured(graph: tfkit.Graph) -> float:
    """The loss of a model that was just built, of random tokens, above ln V."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfkit.FirstLossWarning)
        model = tfkit.build(graph).eval()
    with torch.no_grad():
        out = model(**random_inputs(graph, batch=4, length=16))
    logits = (out if isinstance(out, torch.Tensor) else out[0]).flatten(0, -2).float()
    targets = torch.randint(logits.size(-1), logits.shape[:1], generator=torch.Generator().manual_seed(99))
    return float(F.cross_entropy(logits, targets)) - math.log(logits.size(-1))


def graph_of(*sets: str) -> tfkit.Graph:
    return tfkit.loads(SPEC, sets=sets)


# ---- the default ----


def test_the_first_spec_of_the_readme() -> None:
    text = re.search(r"```yaml\n(tfkit: 1\nname: tiny_llama.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert text is not None
    assert abs(measured(tfkit.loads(text[1]))) < 1


LAYOUTS = {
    "a final norm or none": ["decoder.final_norm=false"],
    "a norm of the embedding": ["embedding.norm=layernorm", "decoder.placement=post"],
    "a narrow table": ["embedding.d_embed=32", "logits.d_embed=32"],
    "positions": ["embedding.position=learned"],
    "a masked-LM transform": ["logits.transform={norm: layernorm}"],
    "a soft-cap": ["logits.softcap=30.0"],
    **{
        name: [f"decoder.placement={name}"] for name in ("post", "sandwich", "output", "parallel", "parallel_two_norms")
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_starts_near_even_guesses(layout: str) -> None:
    for more in ((), (TIED, SCALED)):
        assert abs(measured(graph_of(*LAYOUTS[layout], *more))) < 0.5


@pytest.mark.parametrize("d_model", [16, 1024])
def test_at_any_width(d_model: int) -> None:
    sets = [f"d_model={d_model}", f"decoder.ffn.d_ff={d_model}"]
    assert abs(measured(graph_of(*sets, TIED, SCALED))) < 0.5
    assert abs(measured(graph_of(*sets))) < 0.5


# ---- what ships ----


def small(name: str) -> tfkit.Graph:
    """A shipped spec, wide enough for its start to be seen; what scales its logits is that of the whole."""
    graph = tfkit.load(name)
    sizes = {"d_model=16": "d_model=128", "vocab_size=13": f"vocab_size={VOCAB}", "max_len=8": "max_len=32"}
    sizes[f"_factor={[1.5] * 4}"] = f"_factor={[1.5] * 32}"  # of the pairs of a head, which are eight times as many
    sets = [*reductions(graph)]
    for old, new in sizes.items():
        sets = [f"{one.removesuffix(old)}{new}" if one.endswith(old) else one for one in sets]
    scales = {node.name: getattr(node.config, "scale", None) for node in graph.nodes if node.output.type == "logits"}
    return tfkit.load(name, sets=[*sets, *(f"{node}.scale={scale}" for node, scale in scales.items() if scale)])


@pytest.mark.parametrize("name", covering_first(8))
def test_what_ships_starts_near_even_guesses(name: str) -> None:
    kinds = {node.config.kind_name() for node in tfkit.load(name).nodes}
    if {"decoder", "lm_head"} <= kinds:
        assert abs(measured(small(name))) < 1


# ---- the estimate, and the warning ----

TRIED = [
    (kind, sets) for kind in ("torch", "gpt2", "normal", "xavier", "small") for sets in ([TIED], [TIED, SCALED], [])
]


@pytest.mark.parametrize(
    ("placement", "kind", "sets"), some([(one, *tried) for one in ("pre", "post", "sandwich") for tried in TRIED], 8)
)
def test_the_estimate_is_what_a_run_shows(placement: str, kind: str, sets: list[str]) -> None:
    graph = graph_of(f"init={kind}", f"decoder.placement={placement}", *sets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfkit.FirstLossWarning)
        (found,) = first_losses(tfkit.build(graph), graph)
    shown = measured(graph)
    assert found.even == math.log(VOCAB)
    assert shown / 2.5 - 0.5 < found.loss - found.even < shown * 2.5 + 0.5


BAD = {
    "a table that is too large": (["init=torch", TIED], "repeat the token just read"),
    "large logits": (["init={kind: normal, std: 0.3}"], "the logits of the head are large"),
    "a scale of the logits": (["logits.scale=50.0"], "check `scale`"),
    "a scaled embedding": (["init={kind: normal, std: 0.06}", TIED, SCALED], "repeat the token"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_start_far_from_even_guesses_is_warned_of(case: str) -> None:
    sets, words = BAD[case]
    assert measured(graph_of(*sets)) > 1
    with pytest.warns(tfkit.FirstLossWarning, match=words):
        tfkit.build(graph_of(*sets))


@pytest.mark.parametrize("sets", [[], [TIED], ["init=gpt2", TIED], ["init=torch"], ["init=small"]])
def test_and_no_other(sets: list[str]) -> None:
    tfkit.build(graph_of(*sets))


def test_no_warning_where_published_weights_come() -> None:
    sets = [*reductions(tfkit.load("llama_7b")), "d_model=64", "max_len=32", "init.std=0.5"]
    assert measured(tfkit.load("llama_7b", sets=sets)) > 1
    tfkit.build("llama_7b", sets=sets)


def test_the_command_line_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(SPEC, encoding="utf-8")
    assert main(["build", str(path), "--set", "init=torch", "--set", TIED]) == 0
    assert capsys.readouterr().err.startswith("warning: `logits` starts at a loss of about 2")
    assert main(["build", str(path)]) == 0
    assert capsys.readouterr().err == ""
