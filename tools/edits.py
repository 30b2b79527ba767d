"""Edit a built model, and print whether each tool reports the model as it is then: `python tools/edits.py [EDIT ...]`.

A cell is `true` if the tool measured the edited modules, and its numbers were confirmed independently; `spec` if it
described the spec and named the edit; `same` if there is nothing to name; `broken` if a check named a broken property;
`refused` if the tool raised an error of tfkit; `none` if the edit does not apply. Anything else is a fault, and the
exit status is 1.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import tfkit
from tests.plugin.test_faults import plugins
from tests.run.training.runs import Memory, write_run
from tfkit.building.edits import copied_model, model_edits, tensor_origins
from tfkit.building.model import unwrapped_model
from tfkit.run.checked_run import load_run
from tfkit.run.contract import Callback, CallbackConfig
from tfkit.run.training.loop import Trainer
from tfkit.testing import check_model

SETS = ["d_model=12", "vocab_size=23", "decoder.n_layers=3", "decoder.attention.n_heads=3", "decoder.ffn.d_ff=20"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [9, 2, 6, 5, 3, 5, 8, 9]])
TOLERANCE = 1e-5


class Adapter(nn.Module):
    """A linear layer with an adapter of low rank, with the names of PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 5, bias=False)
        self.lora_B = nn.Linear(5, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Layer(nn.Module):
    """A layer that ignores its context."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return x + self.inner(x)


def fx_edit(model: Any) -> None:
    """Negate the output of the decoder in the graph of the model."""
    (decoder,) = (node for node in model.graph.nodes if node.target == "decoder")
    with model.graph.inserting_after(decoder):
        negative = model.graph.call_function(torch.neg, (decoder,))
    decoder.replace_all_uses_with(negative, delete_user_cb=lambda user: user is not negative)
    model.recompile()


def ffn(model: Any, layer: int = 1) -> Any:
    """Return the FFN of a layer."""
    return model.decoder.layers[layer].ffn


def prune_head(model: Any) -> None:
    """Prune the queries of the second head of the first layer."""
    matrix = model.decoder.layers[0].attention.project.qkv
    mask = torch.ones_like(matrix.weight)
    mask[4:8] = 0
    prune.custom_from_mask(matrix, "weight", mask)


def quantize(model: Any) -> Any:
    """Return a copy of the model with dynamically quantized linear layers."""
    for module in model.modules():
        if type(module) is tfkit.Linear:
            module.__class__ = nn.Linear
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(model)


def add_lora(model: Any) -> Any:
    """Return the model in the wrapper of PEFT, with adapters whose products are not 0."""
    import peft

    config = peft.LoraConfig(r=5, target_modules=["qkv", "down"], lora_dropout=0.1, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def swap(model: Any) -> None:
    """Exchange two layers, as an assignment of their weights would."""
    layers = model.decoder.layers
    layers[0], layers[2] = layers[2], layers[0]


def tie(model: Any) -> None:
    """Share a matrix between two layers."""
    ffn(model, 0).up.weight = ffn(model, 2).up.weight


def grow(model: Any) -> None:
    """Add rows to the embedding table."""
    table = model.embedding.tokens
    table.weight = nn.Parameter(torch.cat([table.weight, table.weight[:6]]))


def set_dropout(model: Any) -> None:
    """Set the probability of every dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.37


EDITS: dict[str, Callable[[Any], Any]] = {
    "no edit": lambda m: None,
    "values of weights": lambda m: m.decoder.layers[1].ffn.down.weight.data.mul_(1.7),
    "activation": lambda m: setattr(ffn(m), "activation", nn.ReLU()),
    "scale of scores": lambda m: setattr(m.decoder.layers[0].attention.core, "scale", 0.7),
    "epsilon": lambda m: setattr(m.decoder.final_norm, "eps", 0.1),
    "causal = False": lambda m: setattr(m.decoder.layers[0].attention.core, "causal", False),
    "new forward": lambda m: setattr(ffn(m), "forward", MethodType(lambda self, x: -x, ffn(m))),
    "forward of the model": lambda m: setattr(m, "forward", MethodType(lambda self, tokens: self.embedding(tokens), m)),
    "hook returns a value": lambda m: ffn(m).register_forward_hook(lambda module, inputs, output: 2 * output),
    "fx edit": fx_edit,
    "adapter": lambda m: setattr(ffn(m), "up", Adapter(ffn(m).up)),
    "LoRA by PEFT": add_lora,
    "pruned head": prune_head,
    "layer replaced": lambda m: m.decoder.layers.__setitem__(1, Layer()),
    "quantized": quantize,
    "torch.compile(model)": lambda m: torch.compile(m, backend="eager"),
    "module.compile()": lambda m: ffn(m).compile(backend="eager"),
    "compiled submodule": lambda m: setattr(m.decoder.layers[1], "ffn", torch.compile(ffn(m), backend="eager")),
    "weight_norm": lambda m: parametrizations.weight_norm(ffn(m).up),
    "orthogonal": lambda m: parametrizations.orthogonal(ffn(m).up),
    "tied weights": tie,
    "requires_grad": lambda m: m.decoder.requires_grad_(False),
    "half": lambda m: m.half(),
    "in nn.Sequential": lambda m: setattr(m.decoder.layers[1], "ffn", nn.Sequential(ffn(m))),
    "layer deleted": lambda m: m.decoder.layers.__delitem__(1),
    "layer appended": lambda m: m.decoder.layers.append(copy.deepcopy(m.decoder.layers[0])),
    "layer inserted": lambda m: m.decoder.layers.insert(1, copy.deepcopy(m.decoder.layers[2])),
    "layer used twice": lambda m: m.decoder.layers.__setitem__(1, m.decoder.layers[0]),
    "layers swapped": swap,
    "dropout": set_dropout,
    "train mode": lambda m: m.train(),
    "buffer added": lambda m: ffn(m).register_buffer("mean", torch.zeros(7)),
    "larger parameter": grow,
}
if find_spec("peft") is None:
    del EDITS["LoRA by PEFT"]
RETURNED = ("quantized", "torch.compile(model)", "LoRA by PEFT")
"""Edits that return the edited model."""


def built() -> Any:
    """Build the model that is edited."""
    return tfkit.build(tfkit.load("gpt2", sets=SETS), seed=1).eval()


def output(model: Any) -> Tensor:
    """Return the output of a copy in float32."""
    with torch.no_grad():
        return copied_model(unwrapped_model(model), dtype=torch.float32).eval()(TOKENS).double()


def differ(a: Tensor, b: Tensor) -> bool:
    """Return True if two outputs differ."""
    return a.shape != b.shape or float((a - b).abs().max()) > TOLERANCE


def called(tool: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the result of a tool, and whether it issued a warning about edits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = tool()
    return result, any(issubclass(item.category, tfkit.EditedModelWarning) for item in caught)


def counted(model: Any, inner: Any, edited: bool) -> str:
    """Compare the count with the parameters of the modules."""
    params, warned = called(lambda: tfkit.count_params(model))
    total, rows = sum(p.numel() for p in inner.parameters()), sum(row.parameters for row in params.rows)
    assert params.total == rows == total, (params.total, rows, total)
    assert params.trainable == sum(p.numel() for p in inner.parameters() if p.requires_grad)
    assert warned == edited
    return "true"


def costed(model: Any, inner: Any, edited: bool) -> str:
    """Compare the costs with the operations that torch counts on the meta device."""
    cost, warned = called(lambda: tfkit.cost(model, batch=2, length=8))
    assert cost.total.parameters == sum(p.numel() for p in inner.parameters())
    with FlopCounterMode(display=False) as counter:
        copied_model(inner, device="meta").train()(TOKENS.to("meta"))
    assert cost.total.flops_forward == counter.get_total_flops(), (cost.total.flops_forward, counter.get_total_flops())
    assert cost.memory.weights == sum(t.nbytes for t in (*inner.parameters(), *inner.buffers()))
    assert warned == edited
    return "true"


def drawn(model: Any, inner: Any, edited: bool) -> str:
    """Compare the warning and the picture with the edits."""
    picture, warned = called(lambda: tfkit.draw(model))
    assert warned == edited == ("whose modules were changed" in picture._repr_svg_())
    return "spec" if warned else "same"


def compared(model: Any, inner: Any, edited: bool) -> str:
    """Compare the verdict with the outputs of the model and of its spec on the same weights."""
    comparison, warned = called(lambda: tfkit.compare(model, inner.meta["graph"], length=8))
    changed = differ(output(model), output(reference(inner)))
    assert warned == edited
    assert comparison.equal != changed, (comparison.difference, changed)
    return "true"


def reference(inner: Any) -> Any:
    """Return the model of the spec with the weights that the edited model has under the names of the spec."""
    model, weights = built(), inner.state_dict()
    names = {origin: name for name, origin in tensor_origins(inner).items() if origin}
    model.load_state_dict({name: weights[names[name]].float() for name in model.state_dict()})
    return model


def checked(model: Any, inner: Any, edited: bool) -> str:
    """Compare broken properties with the outputs."""
    only = ["forward", "look-ahead", "padding", "cached", "meaning", "counts"]

    def run() -> str:
        try:
            check_model(model, only=only)
        except AssertionError as error:
            return str(error)
        return ""

    broken, warned = called(run)
    assert warned == edited
    try:
        changed = differ(output(model), output(reference(inner)))
    except (KeyError, RuntimeError):
        changed = True
    assert bool(broken) == changed or (broken and edited), (broken, changed)
    return "broken" if broken else "true"


def profiled(model: Any, inner: Any, edited: bool) -> str:
    """Compare the profile with the modules, which must not change."""
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items() if isinstance(tensor, Tensor)}
    profile, warned = called(lambda: tfkit.profile(model, steps=2, warmup=0, length=8, batch=2))
    assert profile.parameters == sum(p.numel() for p in inner.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items() if name in before)
    assert warned == edited == any(note.startswith("changed: ") for note in profile.notes)
    return "true"


def saved(model: Any, inner: Any, edited: bool) -> str:
    """Compare the saved model with the edited model."""
    with tempfile.TemporaryDirectory() as folder:
        tfkit.save(model, Path(folder) / "model")
        assert not differ(output(tfkit.build(Path(folder) / "model")), output(model))
    return "true"


def exported(format: str) -> Callable[..., str]:
    """Return the comparison for a format."""

    def run(model: Any, inner: Any, edited: bool) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model.{format}"
            tfkit.export(model, path)
            if format != "safetensors":
                program = torch.export.load(path).module() if format == "pt2" else torch.jit.load(path)
                inputs = {"tokens": TOKENS, "tokens_mask": torch.ones_like(TOKENS, dtype=torch.bool)}
                with torch.no_grad():
                    assert not differ(program(**inputs).double(), copied_model(inner).eval()(**inputs).double())
        return "true"

    return run


def ejected(model: Any, inner: Any, edited: bool) -> str:
    """Eject the model, which must not be edited."""
    tfkit.eject(model)
    assert not edited
    return "true"


class Editing(Callback):
    """A callback that edits the model of a run."""

    def __init__(self, edit: str) -> None:
        self.edit = edit

    def on_start(self, training: Any) -> None:
        EDITS[self.edit](training.model)


class EditingConfig(CallbackConfig):
    """Edits the model of a run when training starts."""

    kind: Literal["editing"] = "editing"
    edit: str

    def build(self) -> Callback:
        return Editing(self.edit)


RUN = """\
tfkit: 1
name: edited
model: gpt2
data: {kind: text, files: sheep.txt}
batch: {sequences: 2, length: 6}
steps: 2
optimizer: {kind: adamw, lr: 1e-2}
"""


def trained(edit: str) -> str:
    """Train a run whose callback edits the model, and compare the model of its checkpoint with the trained model."""
    if edit in RETURNED:
        return "none"
    with tempfile.TemporaryDirectory() as folder:
        sets = [*(f"model.{text}" for text in SETS), "model.vocab_size=data.vocab_size"]
        sets.append(f"callbacks={{kind: editing, edit: {edit!r}}}")
        run, memory = load_run(write_run(Path(folder), RUN), plugins(EditingConfig), sets=sets), Memory()
        trainer = Trainer(run, memory)
        trainer.train()
    model = tfkit.build(run.graph)
    assert memory.saved is not None
    model.load_state_dict(memory.saved.weights)
    assert not differ(output(model), output(trainer.model))
    return "true"


def generated(model: Any, inner: Any, edited: bool) -> str:
    """Compare the first generated token with the token of the forward."""
    with torch.no_grad():
        tokens = tfkit.generate(model, TOKENS, max_new_tokens=3).tokens
        full = inner(TOKENS).argmax(-1)[:, -1]
    assert torch.equal(tokens[:, 0] if tokens.size(1) == 3 else tokens[:, 8], full)
    return "true"


TOOLS: dict[str, Callable[..., str]] = {
    "count": counted,
    "cost": costed,
    "draw": drawn,
    "compare": compared,
    "check": checked,
    "profile": profiled,
    "save": saved,
    "train": trained,
    "weights": exported("safetensors"),
    "pt2": exported("pt2"),
    "ts": exported("ts"),
    "eject": ejected,
    "decode": generated,
}
LETTERS = {"true": "t", "spec": "s", "same": "=", "broken": "b", "refused": "r", "none": "-", "FAULT": "F"}


def cell(tool: str, edit: str) -> str:
    """Return the result of a tool for an edit."""
    model, function = built(), EDITS[edit]
    model = function(model) if edit in RETURNED else (function(model), model)[1]
    inner: Any = unwrapped_model(model)
    try:
        return trained(edit) if tool == "train" else TOOLS[tool](model, inner, bool(model_edits(inner)))
    except (tfkit.SpecError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0].removeprefix('error: ')}"
    except Exception as error:
        return f"FAULT: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main(arguments: list[str]) -> int:
    """Print the table, and return the exit status. Arguments are the names of edits and tools."""
    warnings.simplefilter("ignore")
    rows, tools = ([name for name in names if name in arguments] or list(names) for names in (EDITS, TOOLS))
    for first in (0, 1):  # names in turns, so that a column has 4 characters
        names = (f"{tool:8}" for tool in tools[first::2])
        print(f"{'edit' * first:{22 + 4 * first}}" + "".join(names).rstrip())
    notes: dict[str, list[str]] = {}
    for edit in rows:
        cells = {tool: cell(tool, edit) for tool in tools}
        print(f"{edit:22}" + "".join(f"{LETTERS[text.partition(':')[0]]:4}" for text in cells.values()), flush=True)
        for tool, text in cells.items():
            if ":" in text:
                notes.setdefault(text, []).append(f"{edit}/{tool}")
    print("", ", ".join(f"{letter} {word}" for word, letter in LETTERS.items()), sep="\n")
    for text, names in notes.items():
        print(f"{text}\n    {', '.join(names)}")
    return int(any(text.startswith("FAULT") for text in notes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
