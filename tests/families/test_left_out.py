"""Tensors of a file that a model omits: reported, rejected by default, and ignored only if outputs are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import tfkit
from tfkit.cli import main
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.import_.importing import import_config

from ..sampling import some
from .case import reference
from .cases import CASES

transformers.utils.logging.disable_progress_bar()


def saved(name: str, folder: Path) -> tuple[tfkit.Graph, dict[str, Tensor]]:
    """The graph of a case, saved by transformers, and the tensors of its file."""
    reference(CASES[name]).save_pretrained(folder)  # type: ignore[operator]
    return import_config(folder).graph, load_file(folder / "model.safetensors")


def mask(window: int) -> Tensor:
    """A causal mask of `window` positions, as files have it."""
    return torch.ones(24, 24, dtype=torch.bool).tril().triu(1 - window)[None, None]


def frequencies(theta: float) -> Tensor:
    return theta ** -(torch.arange(6) / 6)


COMPUTED: list[tuple[str, str, Callable[[], Tensor] | None]] = [
    ("roformer", "roformer.encoder.embed_positions.weight", None),
    ("fsmt", "model.decoder.embed_positions.weight", None),
    ("pegasus", "model.encoder.embed_positions.weight", None),
    ("gpt2", "transformer.h.1.attn.bias", lambda: mask(24)),
    ("gpt2", "transformer.h.1.attn.masked_bias", lambda: torch.tensor(-1e4)),
    ("gpt_neo", "transformer.h.0.attn.attention.bias", lambda: mask(24)),
    ("gpt_neo", "transformer.h.1.attn.attention.bias", lambda: mask(4)),
    ("bert", "bert.embeddings.position_ids", lambda: torch.arange(24)[None]),
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", lambda: frequencies(1000.0)),
]


@pytest.mark.parametrize(
    ("name", "tensor", "value"), some([pytest.param(*item, id=f"{item[0]} {item[1]}") for item in COMPUTED], 3)
)
def test_a_tensor_is_ignored_if_it_is_what_the_model_computes(
    name: str, tensor: str, value: Callable[[], Tensor] | None, tmp_path: Path
) -> None:
    graph, tensors = saved(name, tmp_path)
    stored = tensors[tensor] if value is None else value()
    file = tmp_path / "model.safetensors"
    save_file({**tensors, tensor: stored}, file)
    build_with_weights(graph, file)
    stored.view(-1)[-1] = 1 - stored.view(-1)[-1].float()
    save_file({**tensors, tensor: stored}, file)
    with pytest.raises(tfkit.SpecError, match=f"`{tensor}` differs from the values that the model computes"):
        build_with_weights(graph, file)


@pytest.mark.parametrize(("name", "count"), [("luke", 25), pytest.param("ibert", 143, marks=pytest.mark.slow)])
def test_what_is_left_out_is_said_and_asked_for(
    name: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "theirs", tmp_path / "back"
    saved(name, folder)
    spec = str(tmp_path / "spec.yaml")
    text = f"warning: the model omits {count} tensors of"
    assert main(["import", str(folder), "-o", spec]) == 0
    assert text in capsys.readouterr().err
    assert main(["build", spec, "--weights", str(folder)]) == 0
    assert text in capsys.readouterr().err
    save = ["save", spec, "--weights", str(folder), "--layout", "huggingface", "-o", str(out)]
    assert main(save) != 0
    assert f"error: {count} tensors of the file that filled the model would be missing" in capsys.readouterr().err
    assert not out.exists()
    assert main([*save, "--allow-drop"]) == 0
    assert text in capsys.readouterr().err
    assert len(load_file(folder / "model.safetensors")) == len(load_file(out / "model.safetensors")) + count


def test_a_model_filled_later_is_one_too(tmp_path: Path) -> None:
    saved("luke", tmp_path)
    model = tfkit.build(import_config(tmp_path / "config.json").graph)
    with pytest.warns(tfkit.LeftOutWarning, match="omits 25 tensors"):
        tfkit.load_weights(model, tmp_path)
    with pytest.raises(tfkit.SpecError, match="25 tensors"):
        tfkit.save(model, tmp_path / "back", layout="huggingface")


def test_what_the_class_computes_otherwise_is_said(tmp_path: Path) -> None:
    reference(CASES["minimax"]).config.save_pretrained(tmp_path)
    (note,) = import_config(tmp_path).notes
    assert "MiniMaxForCausalLM of transformers does not compute the same" in note.message
    reference(CASES["mt5"]).config.save_pretrained(tmp_path)
    assert import_config(tmp_path).notes == ()


def test_a_family_names_a_function_that_there_is(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    spec = {"tfkit": 1, "extends": "gpt2", "parameters": None, "d_model": 32, "vocab_size": 61, "max_len": 24}
    graph = {"decoder": {"n_layers": 2, "attention": {"n_heads": 4}, "ffn": {"d_ff": 80}}}
    family = {"extends": "gpt2", "extra": {"*.attn.bias": "= a_mask(decoder)"}}
    with pytest.raises(tfkit.SpecError, match=r"`a_mask\(decoder\)` is not a function of the model(.|\n)*causal_mask"):
        tfkit.build({**spec, "graph": graph, "checkpoint": family}, weights=tmp_path)
