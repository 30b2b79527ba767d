"""Families with recurrent layers: padding, steps of any size, prompts of different lengths, scripted, ejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, fx

import tfkit
from tfkit.building.builder import graph_of
from tfkit.tools.eject.proof import check
from tfkit.tools.import_.importing import export_config, import_config

from ..sampling import chosen
from .case import BATCH, Trial, logits_of
from .recurrent import LENGTH, RECURRENT

QUICK_CASES = {"lfm2"}
SIZES = {"tokens": [1] * LENGTH, "short": [7, 1, 5, LENGTH - 13], "last": [LENGTH - 1, 1]}


def mask_of(side: str) -> Tensor:
    """Return which positions of three rows are tokens, with padding on the left, on the right, or between them."""
    counts = torch.tensor([[LENGTH - 2], [LENGTH], [3]])
    positions = torch.arange(LENGTH)
    if side == "right":
        return positions < counts
    if side == "left":
        return positions >= LENGTH - counts
    mask = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[1] = True
    return mask


@pytest.mark.parametrize("name", chosen(RECURRENT, set()))
@torch.no_grad()
def test_a_padded_row_is_the_row_alone(name: str, tmp_path: Path) -> None:
    trial = Trial.of(RECURRENT[name], tmp_path)
    ids = torch.randint(3, 61, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    for side in ("left", "right", "between"):
        mask = mask_of(side)
        expected = [logits_of(trial.theirs(input_ids=row[real][None]))[0] for row, real in zip(ids, mask, strict=True)]
        if side == "between" and rotates(trial.ours):
            with pytest.raises(ValueError, match="padding must not be between tokens"):
                trial.ours(ids, mask)
        else:
            check_rows(trial.ours(ids, mask), mask, expected)
        for chunks in SIZES.values():
            decoder = tfkit.CachedModel(trial.ours, length=LENGTH)
            cuts = zip(ids.split(chunks, dim=1), mask.split(chunks, dim=1), strict=True)
            check_rows(torch.cat([decoder(*piece) for piece in cuts], dim=1), mask, expected)


def rotates(model: fx.GraphModule) -> bool:
    """True if some layer has rotary positions; a stack may have a default for none of its layers."""
    steps = [step for layer in graph_of(model).node("decoder").stack.layers for step in layer.steps]  # type: ignore[union-attr]
    return any(getattr(step.config, "position", None) is not None for step in steps)


def check_rows(logits: Tensor, mask: Tensor, expected: list[Tensor]) -> None:
    for row, real, alone in zip(logits, mask, expected, strict=True):
        largest = max(1.0, alone.abs().max().item())
        torch.testing.assert_close(row[real], alone, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("name", chosen(RECURRENT, set()))
def test_exported_and_ejected_models_are_the_model(name: str, tmp_path: Path) -> None:
    trial = Trial.of(RECURRENT[name], tmp_path)
    exported = tfkit.export(trial.ours, tmp_path / "model.ts")
    assert exported.difference <= 1e-5
    assert sum("by cached decoding" in case.case for case in exported.checks) == 3
    graph = trial.ours.meta["graph"]
    assert check(graph, tfkit.eject(graph)).ran


@pytest.mark.parametrize("name", chosen(RECURRENT, QUICK_CASES))
def test_a_ragged_batch_generates_what_each_prompt_does_alone(name: str, tmp_path: Path) -> None:
    model, prompts = Trial.of(RECURRENT[name], tmp_path).ours, [[5, 9, 3, 17, 20, 8], [11], [7, 30, 4]]
    batch = tfkit.generate(model, prompts, max_new_tokens=6).tokens.tolist()
    assert batch == [tfkit.generate(model, [prompt], max_new_tokens=6).tokens[0].tolist() for prompt in prompts]


def imported_graph(folder: Path, **config: object) -> tfkit.Graph:
    (folder / "config.json").write_text(json.dumps(config))
    return import_config(folder).graph


@torch.no_grad()
def test_a_halved_stream_only_changes_the_weight_of_eps(tmp_path: Path) -> None:
    config = {"model_type": "rwkv", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 5}
    streams: list[Tensor] = []
    for interval in (0, 2):
        graph = imported_graph(tmp_path, **config, layer_norm_epsilon=1e-12, rescale_every=interval)
        assert export_config(graph)["rescale_every"] == (
            interval or 6
        )  # the default, which halves no stream of 5 layers
        model = tfkit.build(graph, seed=1).eval()
        model.decoder.final_norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        model(torch.arange(11)[None])
    torch.testing.assert_close(streams[1], streams[0] / 4)


def test_widths_of_xlstm_are_rounded(tmp_path: Path) -> None:
    config = {"model_type": "xlstm", "hidden_size": 36, "num_hidden_layers": 1, "num_heads": 3, "qk_dim_factor": 0.34}
    graph = imported_graph(tmp_path, **config, ffn_proj_factor=2.3, ffn_round_up_to_multiple_of=8)
    stack = graph.spec.model.graph["decoder"]
    assert (stack.mixer.d_key, stack.mixer.d_value, stack.ffn.d_ff) == (4, 12, 88)
    with torch.device("meta"):
        block = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**export_config(graph))
        ).backbone.blocks[0]
    assert (block.mlstm_layer.q.out_features, block.ffn.proj_up.out_features) == (12, 88)
