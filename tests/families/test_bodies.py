"""Folders without a head, such as published embedding models, become models that return hidden states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import tfkit
from tfkit.tools.compare.comparison import compare
from tfkit.tools.import_.importing import import_config

from ..sampling import chosen
from .case import AUTO, Case, Trial, check_cached, check_count, check_logits, check_saved, reference
from .cases import CASES

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
WITHOUT = {
    "bert_generation": "its class without a head has another name",
    "bert_generation_both_ways": "its class without a head has another name",
    **dict.fromkeys(("exaone", "sarvam_moe", "sarvam_moe_bare"), "its class without a head has other names of tensors"),
    "fsmt": "its class without a head returns logits",
    "flaubert_pre_norm": "the test repairs a defect of its class with a head",
}
"""Cases that are not tested as bodies, each with the reason."""
UNREAD = ("pooler", "contact_head", "entity_embeddings")
"""Modules of their classes that the hidden states do not depend on."""
QUICK_CASES = {"bert", "qwen3"}
BODIES = {n: case for n, case in CASES.items() if case.kind in ("causal", "masked", "seq2seq") and n not in WITHOUT}


def body_of(case: Case) -> Case:
    """The case with their class without a head, whose names lack the prefix."""
    uncounted = dict(case.uncounted)
    uncounted |= {short: why for name, why in uncounted.items() if (short := name.partition(".")[2]) != "*"}
    buffers = {name.partition(".")[2]: why for name, why in case.buffers.items() if "." in name}
    prepare = None if case.kind == "seq2seq" else case.prepare  # `untie` needs the head
    return replace(case, kind="body", prepare=prepare, buffers=buffers, uncounted=uncounted)


@pytest.mark.parametrize("name", chosen(sorted(BODIES), QUICK_CASES))
def test_hidden_states_are_exactly_theirs(name: str, tmp_path: Path) -> None:
    case = body_of(BODIES[name])
    theirs = reference(case)
    unread = {name: "not read" for name, _ in theirs.named_parameters() if name.startswith(UNREAD)}
    case = replace(case, leaves_out=case.leaves_out or bool(unread), uncounted={**case.uncounted, **unread})
    trial = Trial.read(case, theirs, tmp_path)
    assert "logits" not in trial.ours.meta["graph"].spec.model.graph
    for side in case.sides:
        check_logits(trial, side)
    check_count(trial)
    check_saved(trial)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == [MODEL_MAPPING_NAMES[case.model_type]]


def test_a_file_with_a_head_keeps_it(tmp_path: Path) -> None:
    """Older folders name the class without a head, and have the tensors of one."""
    trial = Trial.of(CASES["qwen3"], tmp_path)
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["Qwen3Model"], "tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    model = tfkit.build(import_config(tmp_path / "theirs").graph)
    assert torch.equal(model.logits.output.weight, stored["lm_head.weight"])
    assert trial.ours.logits


def test_tools_take_a_body(tmp_path: Path) -> None:
    case = body_of(BODIES["qwen3"])
    trial = Trial.read(case, reference(case), tmp_path)
    assert compare(trial.imported.graph, tmp_path / "theirs").equal
    check_cached(trial)
    with pytest.raises(ValueError, match="returns a sequence of width 32, but tokens are chosen from logits"):
        tfkit.generate(trial.ours, [[1, 2]], max_new_tokens=1)


@torch.no_grad()
def test_a_class_without_a_head_that_returns_logits(tmp_path: Path) -> None:
    theirs = reference(body_of(CASES["fsmt"]))
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    source, target = torch.randint(3, 53, (2, 7)), torch.randint(3, 53, (2, 5))
    expected = theirs(input_ids=source, decoder_input_ids=target).last_hidden_state
    ours = tfkit.build(import_config(tmp_path).graph).eval()(source, target)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [transformers.T5EncoderModel, transformers.UMT5EncoderModel])
def test_an_encoder_alone(cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AUTO, "body", cls)
    monkeypatch.setattr(cls, "from_config", lambda config, **_: cls(config), raising=False)
    case = replace(body_of(CASES[cls.config_class.model_type]), repair=None)
    trial = Trial.of(case, tmp_path)
    assert [*trial.ours.meta["graph"].inputs] == ["tokens"]
    check_logits(trial, "none")
    check_logits(trial, "right")
    check_count(trial)
    check_saved(trial)
    assert trial.imported.notes == ()


def test_a_class_that_is_not_served_is_an_error(tmp_path: Path) -> None:
    config = transformers.GPT2Config().to_dict() | {"architectures": ["GPT2DoubleHeadsModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(tfkit.SpecError, match="class GPT2DoubleHeadsModel is not supported by the family gpt2"):
        import_config(tmp_path)
