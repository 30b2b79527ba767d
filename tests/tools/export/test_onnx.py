"""ONNX graphs: equal to their models in ONNX Runtime, with the weights stored once."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

import tfkit
from tfkit.tools.export import onnx as onnx_format
from tfkit.tools.export.export import check_format, export
from tfkit.tools.export.onnx import Onnx

from ...sampling import slow
from ...small_specs import OPERATIONS, reduced
from ..conftest import CAPTIONS
from .odd import one_layer


@pytest.mark.parametrize("name", [slow(name) for name in ("bert_tiny", *OPERATIONS)])
def test_a_spec(name: str, tmp_path: Path) -> None:
    """What is translated are the programs of `test_pt2.py`, which has more of them."""
    exported = export(tfkit.build(reduced(name, layers=1)), tmp_path / "model.onnx")
    assert exported.difference <= 1e-5
    decodes = any(file.endswith("/decode.onnx") for file in exported.files)
    assert decodes == any("cached" in check.case for check in exported.checks)
    for file in exported.files:
        if file.endswith(".onnx"):
            onnx.checker.check_model(file, full_check=True)


@pytest.mark.slow
def test_a_decoder_is_several_graphs_with_one_file_of_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = one_layer(vocab_size=5_000).eval()
    exported = export(model, tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    parts = (
        tmp_path
        / {get_input.key: get_input.value for get_input in onnx.load(exported.files[0]).metadata_props}["parts"]
    )
    assert exported.files == (
        str(tmp_path / "model.onnx"),
        *(str(parts / name) for name in ("decode.onnx", "prefill.onnx", "weights.data")),
    )
    assert exported.bytes < sum(tensor.nbytes for tensor in model.state_dict().values()) + 150_000
    session = onnxruntime.InferenceSession(exported.files[0])
    assert [(get_input.name, get_input.shape) for get_input in session.get_inputs()] == [
        ("tokens", ["batch", "tokens_length"]),
        ("tokens_mask", ["batch", "tokens_length"]),
    ]
    assert [get_input.name for get_input in session.get_outputs()] == ["logits"]
    decode = onnxruntime.InferenceSession(parts / "decode.onnx")
    inputs = ["tokens", "cache_stack_0_0", "cache_stack_0_1", "past", "tokens_mask"]
    assert [get_input.name for get_input in decode.get_inputs()] == inputs
    assert [get_input.name for get_input in decode.get_outputs()] == [
        "logits",
        "new_cache_stack_0_0",
        "new_cache_stack_0_1",
    ]
    for file in tmp_path.rglob("*.onnx"):
        assert str(Path(tfkit.__file__).parent).encode() not in file.read_bytes()


@pytest.mark.slow
def test_an_operation_without_a_counterpart_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(tfkit.SpecError, match="ffn `rare` cannot be exported by torch's exporter to ONNX") as refused:
        export(one_layer("rare", block="encoder"), tmp_path / "model.onnx")
    assert refused.value.diagnostics[0].path == "graph.stack.layers.0.ffn"
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_format, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(tfkit.SpecError, match=r"onnx needs onnxscript(.|\n)*pip install \"tfkit\[export\]\""):
        check_format(one_layer(block="encoder").meta["graph"], Onnx())


@pytest.mark.slow
def test_a_difference_is_caught_and_named(tmp_path: Path) -> None:
    expected = r"the onnx file differs from `small`: the first component that differs is FFN `stack\.layers\.0\.ffn`"
    with pytest.raises(tfkit.SpecError, match=expected):
        export(one_layer("sly", block="encoder"), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_is_refused() -> None:
    model = one_layer(block="encoder").to(torch.bfloat16)
    (only,) = onnx_format.Onnx().refusals(model)
    assert "bfloat16" in only.message


@pytest.mark.slow
def test_inputs_of_every_type(tmp_path: Path) -> None:
    assert export(tfkit.build(tfkit.loads(CAPTIONS)), tmp_path / "model.onnx").difference <= 1e-5
