"""Initial losses near ln V: for default initialization and shipped specs, and the warning for other specs."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfkit
from tests.models import MODELS
from tests.sampling import chosen, slow, some, spread
from tests.small_specs import COVERING, reductions
from tfkit.building.first_loss import first_losses
from tfkit.cli import main
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.eject.runner import build_model, loaded_module

ROOT = Path(__file__).parents[2]
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


def built(graph: tfkit.Graph) -> nn.Module:
    """Build a model without warnings about its first loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfkit.FirstLossWarning)
        return tfkit.build(graph)


def measured(graph: tfkit.Graph, model: nn.Module | None = None) -> float:
    """Return the loss of a new model for random tokens, minus ln V."""
    model = (built(graph) if model is None else model).eval()
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


@pytest.mark.parametrize("d_model", [16, 272, slow(1024)])
def test_at_any_width(d_model: int) -> None:
    sets = [f"d_model={d_model}", f"decoder.ffn.d_ff={d_model}"]
    assert abs(measured(graph_of(*sets, TIED, SCALED))) < 0.5
    assert abs(measured(graph_of(*sets))) < 0.5


# ---- what ships ----


def small(name: str) -> tfkit.Graph:
    """A shipped spec, wide enough for its start to be seen; what scales its logits is unchanged."""
    graph = tfkit.load(name)
    sizes = {"d_model=16": "d_model=128", "d_embed=16": "d_embed=128", "max_len=8": "max_len=32"}
    sizes["vocab_size=13"] = f"vocab_size={VOCAB}"
    sizes["width=16"] = "width=128"
    sizes["sections=[2, 1, 1]"] = "sections=[8, 12, 12]"
    sizes[f"_factor={[1.5] * 4}"] = f"_factor={[1.5] * 32}"  # of the pairs of a head, which are eight times as many
    sets = [*reductions(graph)]
    for old, new in sizes.items():
        sets = [f"{value.removesuffix(old)}{new}" if value.endswith(old) else value for value in sets]
    scales = {node.name: getattr(node.config, "scale", None) for node in graph.nodes if node.output.type == "logits"}
    sets += [f"{node}.scale={scale}" for node, scale in scales.items() if scale]
    origins = graph.spec.provenance.origins  # a table may have a vocabulary that no other node has
    tables = [path for path, origin in origins.items() if path[2:] == ("vocab_size",) and origin.how == "given"]
    return tfkit.load(name, sets=[*sets, *(f"{node}.vocab_size={VOCAB}" for _, node, _ in tables)])


@pytest.mark.parametrize("name", chosen(MODELS, spread(COVERING, 8)))
def test_what_ships_starts_near_even_guesses(name: str) -> None:
    kinds = {node.config.kind_name() for node in tfkit.load(name).nodes}
    if {"decoder", "lm_head"} <= kinds:
        assert abs(measured(small(name))) < 1


def check_statistics(ejected: nn.Module, model: nn.Module) -> None:
    """Compare the mean and the standard deviation of each parameter, to within six standard errors."""
    ours = dict(model.named_parameters())
    assert [name for name, _ in ejected.named_parameters()] == [*ours]
    for name, parameter in ejected.named_parameters():
        pair = parameter.detach(), ours[name].detach()
        assert pair[0].isfinite().all(), name
        means, deviations = ([float(statistic) for statistic in (f(pair[0]), f(pair[1]))] for f in (torch.mean, _std))
        error = 6 * max(deviations) / math.sqrt(parameter.numel())
        assert deviations[0] == pytest.approx(deviations[1], abs=error), name
        assert means[0] == pytest.approx(means[1], abs=1.5 * error + 1e-6), name


def _std(weight: torch.Tensor) -> torch.Tensor:
    return weight.std(correction=0)


SEVERAL_WIDTHS = {"dinov2_base", "dinov2_with_registers_base", "dit_small", "siglip_base_16", "siglip_vision_base_16"}
"""Specs whose other widths do not follow from `d_model`, so that `small` cannot change it."""
EJECTED = ("gpt2", "vaswani_base")
"""Biases and residual scaling, and matrices whose parts are filled one by one."""


@pytest.mark.parametrize("name", chosen([name for name in MODELS if name not in SEVERAL_WIDTHS], EJECTED))
def test_an_ejected_model_starts_as_the_built_one(name: str) -> None:
    graph = small(name)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # new memory is then filled with NaN
    try:
        with loaded_module(tfkit.eject(graph)) as module:
            ejected = build_model(module)
    finally:
        torch.use_deterministic_algorithms(False)
    check_statistics(ejected, built(graph))
    if {"decoder", "lm_head"} <= {node.config.kind_name() for node in graph.nodes}:
        assert abs(measured(graph, ejected)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(["fan_in", "gpt2", "normal", "small", "torch", "xavier"], ["small"]))
def test_each_initialization_is_ejected(kind: str) -> None:
    graph = graph_of(f"init={kind}", "decoder.ffn.bias=true", TIED)
    torch.manual_seed(0)
    with loaded_module(tfkit.eject(graph)) as module:
        check_statistics(build_model(module), built(graph))


@pytest.mark.slow
def test_the_gpt2_of_the_docs_starts_near_even_guesses() -> None:
    torch.manual_seed(0)
    with loaded_module((ROOT / "docs/examples/gpt2.py").read_text("utf-8")) as module:
        assert abs(measured(tfkit.load("gpt2"), build_model(module))) < 1


# ---- the estimate, and the warning ----

TRIED = [
    (kind, sets) for kind in ("torch", "gpt2", "normal", "xavier", "small") for sets in ([TIED], [TIED, SCALED], [])
]


@pytest.mark.parametrize(
    ("placement", "kind", "sets"),
    some([(value, *tried) for value in ("pre", "post", "sandwich") for tried in TRIED], 5),
)
def test_the_estimate_is_what_a_run_shows(placement: str, kind: str, sets: list[str]) -> None:
    graph = graph_of(f"init={kind}", f"decoder.placement={placement}", *sets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfkit.FirstLossWarning)
        (actual,) = first_losses(tfkit.build(graph), graph)
    values = measured(graph)
    assert actual.even == math.log(VOCAB)
    assert values / 2.5 - 0.5 < actual.loss - actual.even < values * 2.5 + 0.5


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
