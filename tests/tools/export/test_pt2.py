"""Archives of torch.export: equal to their models, with the weights stored once, and readable without tfkit."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.export.pt2_archive._package import load_pt2

import tfkit
from tfkit.tools.export.export import check_format, export
from tfkit.tools.export.pt2 import Pt2

from ...small_specs import PROGRAMS, reduced
from ..conftest import CAPTIONS
from .odd import one_layer


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, "bert_base"])
def test_a_spec(name: str, tmp_path: Path) -> None:
    exported = export(tfkit.build(reduced(name, layers=1)), tmp_path / "model.pt2")
    assert exported.difference <= 1e-5
    decodes = {"prefill", "decode"} <= load_pt2(exported.files[0]).exported_programs.keys()
    assert decodes == any("cached" in check.case for check in exported.checks)


READER = """\
import sys
import torch
from torch.export.pt2_archive._package import load_pt2
assert "tfkit" not in sys.modules
archive = load_pt2(sys.argv[1])
tokens, mask = torch.tensor([[3, 1, 4]]), torch.ones(1, 3, dtype=torch.bool)
whole = torch.export.load(sys.argv[1]).module()(tokens=tokens, tokens_mask=mask)
cache = {"stack": [[torch.zeros(1, 2, 11, 8), torch.zeros(1, 2, 11, 8)]]}
prefill, decode = (archive.exported_programs[name].module() for name in ("prefill", "decode"))
prefill(tokens=tokens[:, :2], tokens_mask=mask[:, :2], cache=cache)
last = decode(tokens=tokens[:, 2:], tokens_mask=mask[:, 2:], cache=cache, past=torch.tensor([2]))
torch.testing.assert_close(last, whole[:, 2:])
print(archive.extra_files["name"], *whole.flatten()[:3].tolist())
"""


def read_too_much(path: Path, model: fx.GraphModule) -> None:
    reader = Pt2().open(path, model).cached(6)
    assert reader is not None
    reader(torch.ones(1, 5, dtype=torch.long))
    reader(torch.ones(1, 2, dtype=torch.long))


@pytest.mark.slow
def test_torch_alone_reads_it_and_the_weights_are_in_it_once(tmp_path: Path) -> None:
    model = one_layer(vocab_size=20_000).eval()
    exported = export(model, tmp_path / "model.pt2")
    command = [sys.executable, "-W", "ignore", "-c", READER, exported.files[0]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    assert printed[0] == "small"
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, 4]])).flatten()[:3]
    assert [float(word) for word in printed[1:]] == pytest.approx(expected.tolist(), abs=1e-6)
    assert exported.bytes < sum(tensor.nbytes for tensor in model.state_dict().values()) + 500_000
    with pytest.raises(ValueError, match="2 more tokens do not fit: 5 of 6 have been read"):
        read_too_much(Path(exported.files[0]), model)
    with zipfile.ZipFile(exported.files[0]) as archive:
        text = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".json"))
    assert str(Path(tfkit.__file__).parent).encode() not in text


@pytest.mark.slow
def test_a_component_that_cannot_be_exported_is_named_beforehand(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = one_layer("looking", block="encoder")
    expected = r"ffn `looking` cannot be exported by torch\.export: .*data-dependent"
    with pytest.raises(tfkit.SpecError, match=expected) as refused:
        check_format(model.meta["graph"], Pt2())
    assert refused.value.diagnostics[0].path == "graph.stack.layers.0.ffn"
    with pytest.raises(tfkit.SpecError, match=expected):
        export(model, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_difference_is_caught_and_named(tmp_path: Path) -> None:
    expected = r"the pt2 file differs from `small`: the first component that differs is FFN `stack\.layers\.0\.ffn`"
    with pytest.raises(tfkit.SpecError, match=expected):
        export(one_layer("sly", block="encoder"), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_inputs_of_every_type(tmp_path: Path) -> None:
    assert export(tfkit.build(tfkit.loads(CAPTIONS)), tmp_path / "model.pt2").difference <= 1e-5


def with_images(wire: str) -> tfkit.Graph:
    spec = {
        "tfkit": 1,
        "name": "images",
        "d_model": 16,
        "vocab_size": 13,
        "inputs": {"tokens": "tokens", "images": {"type": "positions", "optional": True}},
        "graph": {
            "embedding": {"block": "embedding", "input": "tokens"},
            "decoder": {
                "block": "decoder",
                wire: "images",
                "n_layers": 1,
                "attention": {"kind": "mha", "n_heads": 2, "position": "rope"},
                "ffn": {"kind": "relu", "d_ff": 24},
            },
            "logits": {"block": "lm_head"},
        },
    }
    return tfkit.load(spec)


def test_positions_of_a_program_are_required() -> None:
    with pytest.raises(tfkit.SpecError, match="input `images` cannot be optional in a program"):
        check_format(with_images("positions"), Pt2())


@pytest.mark.slow
def test_blocks_are_in_the_first_call_of_a_program(tmp_path: Path) -> None:
    model = tfkit.build(with_images("blocks")).eval()
    assert export(model, tmp_path / "model.pt2").difference <= 1e-5
    reader = Pt2().open(tmp_path / "model.pt2", model).cached(9)
    assert reader is not None
    tokens, images = torch.randint(13, (1, 9)), torch.tensor([[0, 1, 1, 0, 0, 0, 2, 2, 0]])
    first = reader(tokens[:, :6], images=images[:, :6])
    torch.testing.assert_close(first, model(tokens, images=images)[:, :6])
    with pytest.raises(ValueError, match="`images` must have all blocks in the first call; got a block in a later"):
        reader(tokens[:, 6:], images=images[:, 6:])
