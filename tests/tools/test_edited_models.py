"""Tools that take a built model report the modules that it has now, and name what differs from its spec."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

import tfkit
from tfkit.building.edits import as_model, copied_model, model_edits
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.all import PROPERTIES
from tfkit.tools.export.formats import model_metadata
from tfkit.tools.profile import measurement
from tools.edits import SETS, Layer, ffn, fx_edit

from ..sampling import chosen

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [9, 2, 6, 5, 3, 5]])


class Adapter(nn.Module):
    """A linear layer with an adapter of low rank, with the names of PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(base.in_features, 5), nn.Linear(5, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def built() -> Any:
    return tfkit.build(tfkit.load("gpt2", sets=SETS), seed=1).eval()


def edited(edit: Callable[[Any], object]) -> Any:
    model = built()
    edit(model)
    return model


def activation(model: Any) -> None:
    ffn(model).activation = nn.ReLU()


def replace_forward(model: Any) -> None:
    model.forward = MethodType(lambda self, tokens: self.embedding(tokens), model)


def mix(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Add to the output of an FFN a product that costs FLOPs."""
    x = inputs[0]
    return output + x @ x.mT @ x


EDITS: dict[str, Callable[[Any], object]] = {
    "activation": activation,
    "adapter": lambda m: setattr(ffn(m), "up", Adapter(ffn(m).up)),
    "forward": lambda m: setattr(ffn(m), "forward", MethodType(lambda self, x: -self.down(self.up(x)), ffn(m))),
    "hook": lambda m: ffn(m).register_forward_hook(mix),
    "graph": fx_edit,
    "forward of the model": replace_forward,
    "layer": lambda m: m.decoder.layers.__setitem__(1, Layer()),
    "layer deleted": lambda m: m.decoder.layers.__delitem__(1),
    "layer added": lambda m: m.decoder.layers.append(copy.deepcopy(m.decoder.layers[0])),
    "pruned": lambda m: prune.random_unstructured(ffn(m).up, "weight", 0.3),
    "parametrization": lambda m: parametrizations.weight_norm(ffn(m).up),
    "added to the model": lambda m: m.add_module("probe", nn.Linear(7, 5)),
}
warned = pytest.warns(tfkit.EditedModelWarning, match="the modules of `gpt2` differ from its spec: ")


@pytest.mark.parametrize("edit", chosen(EDITS, ["adapter", "hook", "pruned"]))
def test_parameters_and_costs_are_those_of_the_modules(edit: str) -> None:
    model = edited(EDITS[edit])
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    with warned:
        params = tfkit.count_params(model)
    assert params.total == sum(row.parameters for row in params.rows) == n_parameters
    assert any(note.startswith("changed: ") for note in params.notes)
    with warned:
        cost = tfkit.cost(model, batch=2, length=6)
    with FlopCounterMode(display=False) as counter:
        copied_model(model, device="meta").train()(TOKENS.to("meta"))
    assert (cost.total.flops_forward, cost.total.parameters) == (counter.get_total_flops(), n_parameters)
    assert cost.dtype == "float32"


def test_an_adapter_has_a_row_and_its_matrix_stays_in_its_component() -> None:
    model = edited(EDITS["adapter"])
    with warned:
        rows = {row.name: row.parameters for row in tfkit.count_params(model).rows}
    expected = {row.name: row.parameters for row in tfkit.count_params(built()).rows}
    assert rows == expected | {"not in the spec": 5 * 12 + 5 + 20 * 5 + 20}


def test_a_wrapped_table_still_counts_as_an_embedding() -> None:
    model = edited(lambda m: parametrizations.weight_norm(m.embedding.tokens))
    with warned:
        params = tfkit.count_params(model)
    assert params.non_embedding == tfkit.count_params(built()).non_embedding + 23
    assert "tied: logits uses the table of embedding, 276 counted once" in params.notes


def test_a_model_is_costed_in_its_dtype_with_its_frozen_weights() -> None:
    model = built().half()
    model.decoder.requires_grad_(False)
    cost = tfkit.cost(model, length=6)
    assert cost.dtype == "float16"
    n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert cost.memory.gradients == 2 * n_trained < cost.memory.weights
    assert tfkit.count_params(model).trainable == n_trained


@pytest.mark.parametrize(
    "edit",
    chosen(
        ["activation", "adapter", "forward", "hook", "pruned", "forward of the model"], ["activation", "hook", "pruned"]
    ),
)
def test_a_model_is_compared_with_its_spec_on_its_weights(edit: str) -> None:
    model, plain = edited(EDITS[edit]), built()
    with torch.no_grad():
        plain.decoder.layers[0].ffn.down.weight[3] += 0.3
        model.decoder.layers[0].ffn.down.weight[3] += 0.3
    with warned:
        comparison = tfkit.compare(model, model.meta["graph"], length=6)
    assert not comparison.equal
    assert tfkit.compare(plain, plain.meta["graph"], length=6).equal
    with warned:
        reverse = tfkit.compare(plain, model, length=6)
    assert reverse.difference == comparison.difference


def test_the_component_that_was_changed_is_found() -> None:
    with warned:
        first = tfkit.compare(edited(activation), built()).first
    assert first is not None
    assert first.name == "decoder.layers.1.ffn.activation"


def test_a_spec_needs_all_weights_of_the_model() -> None:
    model = edited(EDITS["layer"])
    with (
        warned,
        pytest.raises(tfkit.SpecError, match=r"must have all weights of `gpt2`; it lacks decoder\.layers\.1\."),
    ):
        tfkit.compare(model, model.meta["graph"])


def test_a_built_model_keeps_its_weights_next_to_a_folder_with_weights(tmp_path: Path) -> None:
    model, trained = built(), built()
    with torch.no_grad():
        trained.decoder.layers[0].ffn.down.weight[3] += 0.3
    tfkit.save(trained, tmp_path / "trained")
    assert tfkit.compare(trained, tmp_path / "trained").equal
    for pair in ((model, tmp_path / "trained"), (tmp_path / "trained", model)):
        comparison = tfkit.compare(*pair)
        assert comparison.first is not None
        assert comparison.first.name == "decoder.layers.0.ffn.down"


def test_weights_have_no_effect_on_a_built_model() -> None:
    for options in ({"weights": "out"}, {"other_weights": "out"}):
        with pytest.raises(ValueError, match="weights have no effect on a built model, which has weights"):
            tfkit.compare(built(), built(), **options)
    with pytest.raises(ValueError, match="weights have no effect on a built model, which has weights"):
        tfkit.profile(built(), weights="out", length=6)


def test_a_picture_describes_the_spec_and_says_so() -> None:
    model = edited(activation)
    with warned:
        picture = tfkit.draw(model)
    assert "the spec of a model whose modules were changed" in picture._repr_svg_()
    assert tfkit.draw(built())._repr_svg_() == tfkit.draw(built().meta["graph"])._repr_svg_()


@pytest.mark.parametrize("edit", ["adapter", pytest.param("forward of the model", marks=pytest.mark.slow)])
def test_a_profile_measures_a_copy(edit: str) -> None:
    model = edited(EDITS[edit])
    before = copy.deepcopy(model.state_dict())
    with warned as caught:
        profile = tfkit.profile(model, steps=2, warmup=0, length=6)
    assert sum(warning.category is tfkit.EditedModelWarning for warning in caught) == 1
    flops = {part.path: part.flops for part in profile.parts}
    assert edit != "adapter" or flops["decoder.layers.1.ffn"] > flops["decoder.layers.2.ffn"] > 0
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert any(note.startswith("changed: ") for note in profile.notes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training


def test_the_edits_of_a_profiled_model_follow_its_other_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "predict_cost", lambda *_: None)
    monkeypatch.setattr(measurement, "_run_steps", lambda *_: None)
    monkeypatch.setattr(measurement, "assemble_profile", lambda *_: Noted(("a note",)))
    settings: Any = SimpleNamespace(dtype=None, allow_change=False, weights=None, device="cpu", mode="train")
    limits: Any = None
    for model, edits in ((built(), ()), (edited(activation), ("changed: decoder.layers.1.ffn.activation: ReLU",))):
        with warnings.catch_warnings(action="ignore"):
            measured = as_model(model, "measured")
        notes = measurement.measure_model(measured, settings, limits, None, lambda: None).notes
        assert [note.partition(", and")[0] for note in notes] == ["a note", *edits]


@dataclass(frozen=True)
class Noted:
    """A profile of which only the notes matter."""

    notes: tuple[str, ...]


def subject_of(model: Any) -> ModelUnderTest:
    measured = as_model(model, "measured")
    return ModelUnderTest(measured.graph, tfkit.load_plugins(), module=measured.module, edits=measured.edits)


def test_a_check_measures_the_modules_and_builds_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the spec was built")

    with warned:
        subject = subject_of(edited(lambda m: setattr(m.decoder.layers[0].attention.core, "causal", False)))
    monkeypatch.setattr("tfkit.tools.check.model_under_test.build", fail)
    names = {
        "building",
        "types",
        "values",
        "flops",
        "save",
        "look-ahead",
        "unchanged-inputs",
        "meaning",
        "backends",
        "locations",
    }
    chosen = [prop for prop in PROPERTIES if prop.name in names]
    results = {outcome.name: outcome.status for outcome in outcomes_of(subject, chosen)}
    measured = {"look-ahead": "failed", "unchanged-inputs": "ok", "meaning": "failed"}
    assert results == dict.fromkeys(names, "does not apply") | measured


def test_a_check_of_an_unchanged_model_has_its_weights() -> None:
    from tfkit.testing import check_model

    model = built()
    check_model(model, only=["building", "meaning", "cached", "counts", "padding"])
    with warned, pytest.raises(AssertionError, match=r"meaning: decoder\.layers\.1\.ffn: `logits` differs"):
        check_model(edited(activation), only=["building", "meaning", "padding"])


@pytest.mark.parametrize("edit", ["graph", "forward of the model", "layer deleted", "layer added"])
def test_a_model_whose_steps_would_compute_something_else_is_not_decoded(edit: str) -> None:
    with pytest.raises(ValueError, match="cannot be decoded in steps: "):
        tfkit.generate(edited(EDITS[edit]), TOKENS, max_new_tokens=2)


def test_a_loss_does_not_skip_a_replaced_forward() -> None:
    with pytest.raises(ValueError, match="the `forward` of the model was replaced"):
        tfkit.Loss(edited(replace_forward))


def test_a_model_on_the_meta_device_is_counted_but_not_run() -> None:
    model = tfkit.build(tfkit.load("gpt2", sets=SETS), device="meta")
    assert tfkit.count_params(model).total == tfkit.count_params(built()).total
    assert tfkit.cost(model, length=6).total == tfkit.cost(built(), length=6).total
    for tool in (lambda m: tfkit.profile(m, device="cpu", length=6), lambda m: tfkit.compare(m, m)):
        with pytest.raises(ValueError, match="the model is on the meta device, where weights have no values"):
            tool(model)


def test_a_model_that_cannot_be_copied_is_an_error() -> None:
    class Open:
        def __deepcopy__(self, memo: Any) -> None:
            raise TypeError("cannot pickle 'TextIOWrapper' instances")

        def hook(self, module: Any, inputs: Any, output: Any) -> None: ...

    model = edited(lambda m: ffn(m).register_forward_hook(Open().hook))
    with warned, pytest.raises(tfkit.SpecError, match=r"the model `gpt2` cannot be copied: TypeError: cannot pickle"):
        tfkit.compare(model, model)


def test_a_copy_has_every_edit() -> None:
    for name, edit in EDITS.items():
        model = edited(edit)
        assert model_edits(copied_model(model)) == model_edits(model), name
        with torch.no_grad():
            assert torch.equal(copied_model(model)(TOKENS), model(TOKENS))


def test_an_unchanged_model_gives_no_warning() -> None:
    model = AveragedModel(built())  # a wrapper that keeps the computation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tfkit.count_params(model) == tfkit.count_params(built().meta["graph"])
        tfkit.draw(model)


def test_a_file_of_an_edited_model_has_no_spec() -> None:
    assert "changed" not in model_metadata(built())
    texts = model_metadata(edited(activation))
    assert texts["changed"] == "decoder.layers.1.ffn.activation: ReLU, and GELU by the spec"
    assert "spec" not in texts


class Packed(nn.Linear):
    """A layer whose state dict holds a tuple instead of a tensor, as the quantized layers of torch.ao do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"], destination[f"{prefix}bias"] = ("packed", 0.3), self.bias


def test_a_model_whose_state_is_no_tensor_is_rejected_and_counted(tmp_path: Path) -> None:
    model = edited(lambda m: setattr(ffn(m), "up", Packed(12, 20)))
    with pytest.raises(tfkit.SpecError, match=r"decoder\.layers\.1\.ffn\.up\.weight: tuple, and a tensor by the spec"):
        tfkit.export(model, tmp_path / "model.safetensors")
    with warned:
        assert tfkit.count_params(model).total == tfkit.count_params(built()).total


def test_what_writes_the_spec_rejects_an_edited_model(tmp_path: Any) -> None:
    model = edited(activation)
    rejected = pytest.raises(tfkit.SpecError, match=r"decoder\.layers\.1\.ffn\.activation: ReLU, and GELU by the spec")
    with rejected:
        tfkit.export(model, tmp_path / "model.safetensors")
    with rejected:
        tfkit.eject(model)
    assert not list(tmp_path.iterdir())
