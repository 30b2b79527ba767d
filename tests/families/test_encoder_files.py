"""Published encoder files, which differ from the files that transformers writes today."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tfkit
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.import_.importing import import_config

from ..sampling import slow
from .case import AUTO, Trial
from .cases import CASES
from .changed_fields import quiet
from .encoders import ENCODERS


def published(name: str) -> str:
    """A name as the file of bert-base-uncased has it, with the LayerNorms in the words of TensorFlow."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@torch.no_grad()
def test_older_names_of_norms_and_the_parts_of_pretraining(tmp_path: Path) -> None:
    trial = Trial.of(ENCODERS["bert"], tmp_path)
    tensors = {published(name): tensor for name, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items()}
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors |= {"bert.pooler.dense.weight": torch.ones(32, 32), "cls.seq_relationship.weight": torch.ones(2, 32)}
    tensors["bert.embeddings.position_ids"] = torch.arange(24)[None]
    save_file(tensors, tmp_path / "published.safetensors")
    graph = tfkit.loads(import_config(tmp_path / "theirs").text)
    with pytest.warns(tfkit.LeftOutWarning, match="omits 2 tensors") as caught:
        model = build_with_weights(graph, tmp_path / "published.safetensors").eval()
    assert "the head for the next sentence: cls.seq_relationship.weight" in str(caught[0].message)
    ids = torch.randint(3, 61, (2, 9))
    torch.testing.assert_close(model(ids), trial.ours(ids), rtol=0, atol=0)


def test_a_name_of_both_spellings_is_one_too_many(tmp_path: Path) -> None:
    trial = Trial.of(ENCODERS["bert"], tmp_path)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.gamma"] = torch.ones(32)
    save_file(tensors, tmp_path / "both.safetensors")
    with pytest.raises(tfkit.SpecError, match=r"bert\.embeddings\.LayerNorm\.gamma"):
        build_with_weights(trial.imported.graph, tmp_path / "both.safetensors")


@pytest.mark.slow
@torch.no_grad()
def test_frequencies_in_every_layer_and_newer_names_of_norms(tmp_path: Path) -> None:
    """Published files of ESM: transformers itself writes the older names and the frequencies once."""
    trial = Trial.of(ENCODERS["esm_rotary"], tmp_path)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    (shared,) = [name for name in tensors if name.endswith("inv_freq")]
    frequencies = tensors.pop(shared)
    newer = {n.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias"): t for n, t in tensors.items()}
    layers = [f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq" for i in range(2)]
    save_file({**newer, **{name: frequencies.clone() for name in layers}}, tmp_path / "published.safetensors")
    with pytest.warns(tfkit.LeftOutWarning, match="the head for contacts"):
        model = build_with_weights(trial.imported.graph, tmp_path / "published.safetensors").eval()
    ids = torch.randint(3, 61, (2, 9))
    torch.testing.assert_close(model(ids), trial.ours(ids), rtol=0, atol=0)
    save_file({**newer, layers[1]: 0.5 * frequencies}, tmp_path / "other.safetensors")
    with pytest.raises(tfkit.SpecError, match=r"layer\.1.*differs from the values that the model computes"):
        build_with_weights(trial.imported.graph, tmp_path / "other.safetensors")


@pytest.mark.parametrize("name", ["roformer", slow("pegasus"), slow("fsmt")])
def test_tables_that_a_class_stores_are_written(name: str, tmp_path: Path) -> None:
    """Tables of positions have no parameters in tfkit; a file without them makes transformers warn."""
    trial = Trial.of(CASES[name], tmp_path)
    tfkit.save(trial.ours, tmp_path / "back", layout="huggingface")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert before.keys() - trial.ours.meta["graph"].spec.family.zeros.keys() == after.keys()
    with quiet():
        again, loaded = AUTO[trial.case.kind].from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not loaded["missing_keys"]
    ids = torch.randint(3, 53, (2, 9))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if trial.has_target else {})}
    with torch.no_grad():
        expected, logits = (model(**inputs, use_cache=False).logits for model in (trial.theirs, again.eval()))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
