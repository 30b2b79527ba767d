"""TorchScript files: equal to their models, with the weights stored once, and usable without Python."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import tfkit
from tfkit.building.builder import graph_of
from tfkit.spec.render import render_spec
from tfkit.tools.export.export import Exported, check_format, export
from tfkit.tools.export.script_state import add_caches, empty_state
from tfkit.tools.export.torchscript_format import TorchScript, reason_of

from ...small_specs import PROGRAMS, reduced


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, "bloom_560m"])
def test_a_spec(name: str, tmp_path: Path) -> None:
    """Every option of a component is scripted in `components/test_matrix.py`."""
    model = tfkit.build(reduced(name))
    exported = export(model, tmp_path / "model.ts")
    assert exported.difference <= 1e-5
    words = " ".join(check.case for check in exported.checks)
    assert "1 x" in words
    assert "3 x" in words
    assert ("cached" in words) == hasattr(torch.jit.load(exported.files[0]), "step")


def small(**changes: object) -> tfkit.Graph:
    return tfkit.load("gpt2", sets=[*SMALL_SIZES, *(f"{key}={value}" for key, value in changes.items())])


SMALL_SIZES = (
    "d_model=16",
    "vocab_size=40",
    "max_len=24",
    "decoder.n_layers=2",
    "decoder.attention.n_heads=2",
    "decoder.ffn.d_ff=24",
)


@pytest.fixture(scope="module")
def model() -> fx.GraphModule:
    """A model whose tokens are larger than all else in its file."""
    return tfkit.build(small(vocab_size=20_000)).eval()


@pytest.fixture(scope="module")
def exported(model: fx.GraphModule, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody is warned
        return export(model, tmp_path_factory.mktemp("exported") / "model.pt")


def test_a_weight_is_in_the_file_once_and_by_its_name(model: fx.GraphModule, exported: Exported) -> None:
    loaded = torch.jit.load(exported.files[0])
    assert dict(loaded.state_dict()).keys() == dict(model.state_dict()).keys()
    assert exported.bytes < sum(tensor.nbytes for tensor in model.state_dict().values()) + 120_000


def test_the_file_says_what_it_is(model: fx.GraphModule, exported: Exported) -> None:
    graph = graph_of(model)
    text = {"spec": "", "inputs": "", "outputs": "", "name": "", "tfkit": ""}
    torch.jit.load(exported.files[0], _extra_files=text)
    assert text["inputs"] == b"tokens tokens_mask"
    assert text["outputs"] == b"logits"
    assert text["spec"].decode() == render_spec(graph.spec.model)  # type: ignore[attr-defined]
    assert tfkit.loads(text["spec"].decode()).nodes == graph.nodes  # type: ignore[attr-defined]


def test_the_state_is_the_callers(model: fx.GraphModule, exported: Exported) -> None:
    """Two states of one file do not know of each other, and a copied one goes on alone."""
    loaded = torch.jit.load(exported.files[0])
    tokens = torch.arange(20).view(2, 10)
    first, other = loaded.start(2, 12), loaded.start(2, 12)
    loaded.step(first, tokens[:, :5])
    loaded.step(other, tokens.flip(1)[:, :4])
    copied = copy.deepcopy(first)
    for state in (first, copied):
        actual = loaded.step(state, tokens[:, 5:], keep=2)
        torch.testing.assert_close(actual, model(tokens)[:, -2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "why"),
    [
        (2, 5, "5 more tokens do not fit: 0 of 4 columns"),
        (3, 1, "got 3"),
        (2, 0, "at least one token"),
    ],
)
def test_wrong_pieces_are_refused(exported: Exported, rows: int, columns: int, why: str) -> None:
    loaded = torch.jit.load(exported.files[0])
    with pytest.raises(torch.jit.Error, match=why):
        loaded.step(loaded.start(2, 4), torch.zeros(rows, columns, dtype=torch.long))


@pytest.mark.slow
def test_what_begins_a_sequence_has_its_rows(tmp_path: Path) -> None:
    export(tfkit.build(reduced("t5_small")), tmp_path / "model.ts")
    loaded = torch.jit.load(str(tmp_path / "model.ts"))
    with pytest.raises(torch.jit.Error, match="must have 2 rows, as the batch; got 3"):
        loaded.start(2, 4, torch.zeros(3, 5, dtype=torch.long))


PLUGIN = """\
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit


class Free(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + {"a": lambda: 1.0}["a"]()


class FreeConfig(tfkit.ActivationConfig):
    "What TorchScript does not take."

    kind: Literal["free"] = "free"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Free()


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(FreeConfig)
"""


def test_a_component_that_cannot_be_scripted_is_named_before_and_while_writing(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "free_words.py").write_text(PLUGIN)
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path / "plugins"], entry_points=False)
    sets = [*SMALL_SIZES, "decoder.ffn={kind: mlp, d_ff: 24, activation: free}"]
    graph = tfkit.load("gpt2", sets=sets, plugins=plugins)
    expected = r"activation kind `free` cannot be scripted(.|\n)*\(graph\.decoder\.layers\.0\.ffn(.|\n)*free_words"
    with pytest.raises(tfkit.SpecError, match=expected):
        check_format(graph, TorchScript())
    with pytest.raises(tfkit.SpecError, match=expected):
        export(tfkit.build(graph), tmp_path / "model.ts")
    assert [path.name for path in tmp_path.iterdir()] == ["plugins"]
    export(tfkit.build(small()), tmp_path / "model.ts")  # and the next model does not suffer


class WrongArgument(nn.Module):
    def scaled(self, x: Tensor, n: int) -> Tensor:
        return x * n

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, "two")  # type: ignore[arg-type]


def test_a_refusal_contains_the_cause_and_not_only_a_signature() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.jit.script(WrongArgument())
    expected = r"int n\) -> Tensor: Expected a value of type 'int' for argument 'n' .* type 'str'\. \(.*\.py:\d+\)\Z"
    assert re.search(expected, reason_of(raised.value))


def test_nothing_is_refused_that_can_be_written() -> None:
    assert not TorchScript().refusals(tfkit.build(small(), device="meta").eval())


def test_each_group_of_layers_adds_its_caches() -> None:
    state = empty_state(2, 9, torch.empty(0, dtype=torch.bfloat16))
    add_caches(state, "decoder", 2, [(4, 9, 3, False), (4, 9, 5, True)], torch.empty(0, dtype=torch.bfloat16))
    add_caches(state, "decoder", 1, [(6, 7, 8, False)], torch.empty(0, dtype=torch.bfloat16))
    shapes = [[(list(cache.shape), cache.dtype) for cache in layer] for layer in state["decoder"]]
    keys, values = ([2, 4, 9, 3], torch.bfloat16), ([2, 4, 9, 5], torch.float32)
    assert shapes == [[keys, values], [keys, values], [([2, 6, 7, 8], torch.bfloat16)]]
