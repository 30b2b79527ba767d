"""Adapters of runs and PEFT: equal losses and merged models, and folders that both open.

PEFT comes with `pip install --group around -e .`, in an environment of its own. The loop of the oracle has the model of
transformers, the adapters of PEFT and the optimizer of torch; only the batches come from the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import tfkit
from tfkit.run.training.loop import FINISHED
from tfkit.tools.check.reduced import reduced_model

from .runs import TEXT

STEPS = 20
LR, RANK, ALPHA = 1e-2, 3, 7
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="pip install --group around -e .")
TEXTS = {"kind": "text", "files": "sheep.txt"}
MASKED = {"kind": "masked", "of": TEXTS}
CASES: dict[str, tuple[str, list[str], Mapping[str, Any]]] = {
    "llama": ("llama3_8b", ["q_proj", "v_proj", "down_proj"], TEXTS),
    "fused": ("modernbert_base", ["Wqkv", "Wo"], MASKED),
    "transposed": ("gpt2", ["c_attn", "c_fc"], TEXTS),
    "plugin": ("youtu_2b", ["q_b_proj", "kv_b_proj", "o_proj"], TEXTS),
}
"""The spec, the targets by their published names, and the data."""


def base_folder(spec: str, folder: Path) -> Path:
    """Write a reduced model in the layout of transformers."""
    plugins = tfkit.load_plugins()
    model = tfkit.build(reduced_model(tfkit.load(spec, sets=NO_DROPOUT.get(spec, [])), plugins).graph, seed=2)
    tfkit.save(model, folder / "base", layout="huggingface")
    return folder / "base"


NO_DROPOUT = {"gpt2": ["dropout=0"]}


def run_of(folder: Path, targets: Sequence[str], data: Mapping[str, Any]) -> dict[str, Any]:
    """A run of adapters that starts from the adapter in `start`."""
    (folder / "sheep.txt").write_text(TEXT, encoding="utf-8")
    return {
        "tfkit": 1,
        "name": "adapted",
        "model": str(folder / "base" / "spec.yaml"),
        "weights": str(folder / "base"),
        "adapters": {"targets": list(targets), "rank": RANK, "alpha": ALPHA, "start": str(folder / "start")},
        "data": located(data, folder),
        "batch": {"sequences": 4, "length": 11},
        "steps": STEPS,
        "optimizer": {"kind": "adamw", "lr": LR},
    }


def located(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {
        key: located(value, folder) if isinstance(value, dict) else str(folder / value) if key == "files" else value
        for key, value in data.items()
    }


def peft_model(folder: Path, targets: Sequence[str]) -> Any:
    """Write an adapter whose product is not zero, and return the model of transformers with it."""
    from peft import LoraConfig, get_peft_model

    (architecture,) = transformers.AutoConfig.from_pretrained(folder / "base").architectures
    model = getattr(transformers, architecture).from_pretrained(folder / "base", dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder / "start")
    return adapted


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def loss_of(logits: Tensor, tokens: Tensor) -> float:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


@needs_peft
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers, at their own use of torch
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_adapters_equals_peft(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    spec, targets, data = CASES[case]
    base_folder(spec, tmp_path)
    theirs, run = peft_model(tmp_path, targets).train(), run_of(tmp_path, targets, data)
    batches = tfkit.data(run).train
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=LR, weight_decay=0)
    losses = []
    for _, batch in batches.batches():
        logits = logits_of(theirs, batch.inputs["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    done = tfkit.train(run, output=tmp_path / "run", quiet=True)
    assert done.ended == FINISHED
    ours = [loss for _, loss in done.history.curves["loss"]]
    assert max(abs(ours[0] - loss) for loss in losses[1:]) > 1e-2  # the losses change
    assert ours == pytest.approx(losses, abs=1e-6)

    theirs.eval()
    tokens = next(iter(batches.batches(3)))[1].inputs["tokens"]
    with torch.no_grad():
        expected = logits_of(theirs, tokens)
        merged = tfkit.build(tmp_path / "run").eval()
        assert loss_of(merged(tokens), tokens) == pytest.approx(loss_of(expected, tokens), abs=1e-6)
        torch.testing.assert_close(merged(tokens), expected, atol=1e-5, rtol=1e-5)

        # PEFT opens what tfkit writes, on the model of transformers.
        tfkit.save(merged, tmp_path / "peft", layout="peft")
        config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tmp_path / "base")
        base = type(theirs.get_base_model()).from_pretrained(tmp_path / "base", dtype=torch.float32)
        opened = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        torch.testing.assert_close(logits_of(opened, tokens), expected, atol=1e-5, rtol=1e-5)
        with_peft = logits_of(opened.merge_and_unload(), tokens)
        assert loss_of(merged(tokens), tokens) == pytest.approx(loss_of(with_peft, tokens), abs=1e-6)

        # tfkit opens what PEFT writes, with a spec from the base.
        theirs.save_pretrained(tmp_path / "theirs")
        imported = tfkit.import_config(tmp_path / "theirs")
        torch.testing.assert_close(tfkit.build(imported.graph).eval()(tokens), expected, atol=1e-5, rtol=1e-5)


@needs_peft
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_opens_an_adapter_of_a_model_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of a plugin, which no class of transformers has: the base is a folder with code."""
    from peft import PeftModel

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "code"))
    spec = {
        "tfkit": 1,
        "name": "additive",
        "d_model": 16,
        "vocab_size": 40,
        "graph": {
            "embedding": {"block": "embedding", "position": {"kind": "learned", "max_len": 16}},
            "decoder": {
                "block": "decoder",
                "n_layers": 2,
                "ffn": {"kind": "swiglu", "d_ff": 24},
                "attention": {"kind": "additive", "n_heads": 2},
            },
            "logits": "lm_head",
        },
    }
    tfkit.save(tfkit.build(spec, seed=2), tmp_path / "base", layout="transformers")
    run = run_of(tmp_path, ["qkv", "up", "logits"], TEXTS)
    run["adapters"].pop("start")
    tfkit.train(run, output=tmp_path / "run", quiet=True)
    merged = tfkit.build(tmp_path / "run").eval()
    tfkit.save(merged, tmp_path / "peft", layout="peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", trust_remote_code=True).eval()
    tokens = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = base(tokens).logits
        after = PeftModel.from_pretrained(base, tmp_path / "peft").eval()(tokens).logits
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(merged(tokens), after, atol=1e-6, rtol=1e-5)
