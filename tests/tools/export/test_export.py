"""Properties of all formats: a file that differs, cannot be written, or is interrupted does not exist."""

from __future__ import annotations

import errno
import math
import os
import resource
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

import tfkit
from tfkit.decoding.cached import CachedModel
from tfkit.graph.decode_split import split_if_decodable
from tfkit.tools.common.model_inputs import cached_cases
from tfkit.tools.export import exported_programs, script_state, torchscript_format
from tfkit.tools.export.export import export
from tfkit.tools.export.exported_programs import DECODE, PREFILL, IncrementalReader, caches_of
from tfkit.tools.export.formats import Inputs, Safetensors, formats_of
from tfkit.tools.export.verification import _check_cached, _output_difference, _recorded_calls
from tfkit.tools.export.verification import _relative_difference as gap

from ...sampling import slow
from ..conftest import CAPTIONS, DECODER


@pytest.fixture
def model() -> fx.GraphModule:
    return tfkit.build(tfkit.loads(DECODER), seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that must hold afterwards what it held before."""
    (tmp_path / "model.ts").write_bytes(b"an older one")
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["model.ts"]
    assert (tmp_path / "model.ts").read_bytes() == b"an older one"


def test_what_was_there_is_replaced(model: fx.GraphModule, tmp_path: Path) -> None:
    (tmp_path / "model.ts").write_bytes(b"an older one")
    exported = export(model.train(), tmp_path / "model.ts")
    assert exported.files == (str(tmp_path / "model.ts"),)
    assert exported.bytes == (tmp_path / "model.ts").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["model.ts"]
    assert model.training
    assert not torch.jit.load(exported.files[0]).training


def test_safetensors_build_the_model_again(model: fx.GraphModule, tmp_path: Path) -> None:
    export(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        graph = tfkit.loads(file.metadata()["spec"])
    again = tfkit.build(graph)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    tokens = torch.arange(8)[None]
    assert torch.equal(again.eval()(tokens), model.eval()(tokens))


@pytest.mark.parametrize("format", ["torchscript", "safetensors"])
def test_inputs_of_every_type(tmp_path: Path, format: str) -> None:
    exported = export(tfkit.build(tfkit.loads(CAPTIONS)), tmp_path / "file", format=format)
    assert exported.difference <= 1e-5
    assert any("optional" in check.case for check in exported.checks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float64)])
def test_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tfkit.build(tfkit.loads(DECODER), dtype=dtype)
    assert export(model, tmp_path / "model.ts").difference == 0


TRANSLATION = """\
tfkit: 1
name: translation
d_model: 16
vocab_size: 40
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  target_embedding: {block: embedding, input: target}
  decoder:
    block: decoder
    memory: encoder
    n_layers: 3
    attention: {n_heads: 4}
    layers:
      variants: {local: {attention: {mask: {left: 3, right: 0}}}}
      pattern: [local, base, local]
  logits: {block: lm_head}
"""


def test_a_step_fixes_no_length_of_a_cache_except_those_of_windows() -> None:
    """The program itself is exported by slow tests, with a memory of one length only."""
    caches = caches_of(tfkit.loads(TRANSLATION))
    assert caches is not None
    cache = caches.make(2, 11, 7, torch.empty(0))
    expected = {"decoder": [[4, 4], [11, 11], [4, 4]], "decoder.memory": [[7, 7]] * 3}
    slots = {name: [[tensor.size(2) for tensor in layer] for layer in layers] for name, layers in cache.items()}
    assert slots == {
        name: [[n if name.endswith("memory") else n + 1 for n in layer] for layer in layers]  # one slot for padding
        for name, layers in expected.items()
    }
    free = {
        name: [[sorted(sizes) for sizes in layer] for layer in layers] for name, layers in caches.free(cache).items()
    }
    assert free == {
        name: [[[0] if n == 4 else [0, 2] for n in layer] for layer in layers] for name, layers in expected.items()
    }
    assert caches.room(cache) == 11


class Recorded:
    """Programs of a decoder that only record their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def takes(self, name: str) -> list[str]:
        return ["tokens", "tokens_mask", "cache", *["past"] * (name == DECODE)]

    def run(self, name: str, arguments: dict[str, Any]) -> list[Tensor]:
        self.calls.append((name, arguments))
        return [arguments["tokens"] + 100]


def test_each_token_is_read_after_all_tokens_before_it_without_padding() -> None:
    graph = tfkit.loads(DECODER)
    caches, programs = caches_of(graph), Recorded()
    assert caches is not None
    reader = IncrementalReader(graph, caches, cast(Any, programs), length=7, like=torch.empty(0))
    prompt = torch.tensor([[0, 11, 12], [13, 14, 15]])
    tokens = torch.tensor([[16, 17, 18], [19, 20, 21]])
    reader(prompt, torch.tensor([[0, 1, 1], [1, 1, 1]]).bool())
    outputs = reader(tokens, torch.tensor([[1, 0, 1], [1, 1, 0]]).bool())
    assert torch.equal(outputs, tokens + 100)
    (first, arguments), *steps = programs.calls
    assert (first, [name for name, _ in steps]) == (PREFILL, [DECODE] * 3)
    assert torch.equal(arguments["tokens"], prompt)
    assert [step["tokens"].flatten().tolist() for _, step in steps] == [[16, 19], [17, 20], [18, 21]]
    assert [step["past"].tolist() for _, step in steps] == [[2, 3], [3, 4], [3, 5]]
    with pytest.raises(ValueError, match="2 more tokens do not fit: 6 of 7 have been read"):
        reader(torch.ones(2, 2, dtype=torch.long))
    reader(torch.ones(2, 1, dtype=torch.long))
    assert programs.calls[-1][1]["past"].tolist() == [4, 5]


def test_a_difference_is_the_largest_of_all_outputs_outside_padding() -> None:
    model = tfkit.build(tfkit.loads(DECODER + "outputs: [decoder, logits]\n"))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    expected = [torch.zeros(2, 3, 16), torch.zeros(2, 3, 50)]
    results = [tensor.clone() for tensor in expected]
    results[0][1, 2, 3], results[0][0, 2, 4], results[1][0, 1, 5] = 0.25, 0.5, 0.125
    assert _output_difference(model, {"tokens_mask": mask}, results, expected) == 0.25
    assert _output_difference(model, {}, results, expected) == 0.5


class Noisy(CachedModel):
    """A model whose first step differs, and no later one."""

    def start(self, *args: Any, **inputs: Any) -> None:
        super().start(*args, **inputs)
        self.steps = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.steps += 1
        return super().__call__(*args, **options) + (2.0**-18 if self.steps == 1 else 0.0)


def test_a_difference_of_steps_is_the_largest_of_all_steps(model: fx.GraphModule) -> None:
    opened: Any = SimpleNamespace(cached=lambda length: Noisy(model, length=length))
    parts = split_if_decodable(model.meta["graph"])
    assert parts is not None
    for sequences in cached_cases(model.eval(), parts):
        compared = _check_cached(model, opened, Safetensors(), sequences, 1e-4)
        assert compared.difference == pytest.approx(2.0**-18, rel=0.1)


# ---- planted differences ----


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None]) -> None:
    """The file gets another model than the one that is compared."""
    script = torchscript_format.scripted_model

    def other(model: fx.GraphModule) -> Any:
        changed = tfkit.build(tfkit.loads(DECODER), seed=3).eval()
        change(changed)
        return script(changed)

    monkeypatch.setattr(torchscript_format, "scripted_model", other)


def test_another_weight_is_named(model: fx.GraphModule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of a row that no token of the comparison needs."""

    def change(other: nn.Module) -> None:
        with torch.no_grad():
            other.get_parameter("decoder.layers.1.ffn.up.weight")[3, 5] *= 1 + 2**-23

    planted(monkeypatch, change)
    expected = r"the torchscript file differs from `small`.* differs is FFN `decoder\.layers\.1\.ffn\.up`(.|\n)*weight"
    with pytest.raises(tfkit.SpecError, match=expected):
        export(model, folder / "model.ts")


def _tanh(other: nn.Module) -> None:
    other.get_submodule("decoder.layers.1.ffn").activation = nn.Tanh()


def _scale(other: nn.Module) -> None:
    other.get_submodule("decoder.layers.0.attention.core").scale = 0.9


def _eps(other: nn.Module) -> None:
    other.get_submodule("decoder.layers.1.attention_norm_in").eps = 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        slow((_tanh, r"FFN `decoder\.layers\.1\.ffn\.activation`")),
        slow((_scale, r"attention `decoder\.layers\.0\.attention\.core`")),
        (_eps, r"LayerNorm `decoder\.layers\.1\.attention_norm_in`"),
    ],
)
def test_another_component_is_named(
    model: fx.GraphModule,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[nn.Module], None],
    named: str,
) -> None:
    planted(monkeypatch, change)
    with pytest.raises(tfkit.SpecError, match=f"torchscript file differs.*: the first .* differs is {named}"):
        export(model, folder / "model.ts")


def test_recorded_arguments_and_results_are_of_the_first_call() -> None:
    """A layer may run several times, and a later module may change its input in place."""
    model = tfkit.build(tfkit.loads(DECODER, sets=["decoder.layers={groups: 1, order: looped}"]), seed=3).eval()

    def double(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].mul_(2.0)

    model.get_submodule("decoder.layers.0.ffn").register_forward_pre_hook(double)
    with torch.no_grad():
        calls, results = _recorded_calls(model, lambda: model(torch.arange(8)[None]))
        for path in ("decoder.layers.0.attention_norm_in", "decoder.layers.0.ffn_norm_in"):
            again = model.get_submodule(path)(*calls[path].args, **calls[path].kwargs)
            assert torch.equal(again, results[path]), path


def test_every_program_has_the_fixed_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = "n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}"
    nodes = (
        "source_embedding: {block: embedding, input: source}",
        f"encoder: {{block: encoder, {layers}}}",
        "target_embedding: {block: embedding, input: target}",
        f"decoder: {{block: decoder, memory: encoder, {layers}}}",
        "logits: lm_head",
    )
    inputs = "{source: {type: tokens, length: 5}, target: tokens}"
    graph = f"{{{', '.join(nodes)}}}"
    text = f"tfkit: 1\nname: pair\nd_model: 16\nvocab_size: 13\ninputs: {inputs}\ngraph: {graph}\n"
    lengths: list[set[str]] = []

    def record(*_arguments: object, fixed: Collection[str] = ()) -> None:
        lengths.append(set(fixed))
        if len(lengths) == 2:
            raise InterruptedError

    monkeypatch.setattr(exported_programs, "export_module", record)
    tokens = {"source": torch.arange(10).view(2, 5), "target": torch.arange(6).view(2, 3)}
    with pytest.raises(InterruptedError):
        exported_programs._export_programs(tfkit.build(tfkit.loads(text)).eval(), tokens, in_place=False)
    assert lengths == [{"source"}, {"source"}]


def _late(state: dict[str, list[list[Tensor]]], tokens: Tensor, mask: Tensor | None) -> None:
    state[".columns"][0][0][0] += tokens.size(1) + 1
    state[".lengths"][0][0] += tokens.size(1) + 1


@pytest.mark.slow
def test_cached_decoding_alone_may_differ(model: fx.GraphModule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_state, "move_on", _late)
    with pytest.raises(tfkit.SpecError, match=r"torchscript file differs(.|\n)*cached decoding(.|\n)*differ by"):
        export(model, folder / "model.ts")


def test_every_format_is_compared(model: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Safetensors, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensors["decoder.layers.0.attention.output.weight"][0, 0] += 1
        save_file(tensors, path)

    monkeypatch.setattr(Safetensors, "write", write)
    with pytest.raises(tfkit.SpecError, match=r"safetensors file differs.* attention `decoder.layers.0.attention.o"):
        export(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


# ---- what cannot be written ----


@pytest.mark.parametrize("when", ["while it is written", "while it is compared"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), slow(KeyboardInterrupt())])
def test_a_failure_in_the_middle_leaves_nothing(
    model: fx.GraphModule, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, when: str
) -> None:
    def half(self: object, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(torchscript_format.TorchScript, *(("write", half) if "written" in when else ("open", fail)))
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else tfkit.SpecError
    with pytest.raises(expected, match=None if expected is KeyboardInterrupt else "No space left on device"):
        export(model, folder / "model.ts")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.ts", "model.safetensors"])
def test_weights_that_are_not_finite_are_refused(model: fx.GraphModule, folder: Path, name: str, value: float) -> None:
    next(model.parameters()).data[0] = value
    with pytest.raises(tfkit.SpecError, match=r"the model has values that are infinite or NaN\n   = in `"):
        export(model, folder / name)


@pytest.mark.parametrize("format", ["torchscript", "safetensors"])
def test_a_disk_that_takes_only_some_of_it(model: fx.GraphModule, folder: Path, format: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(tfkit.SpecError) as caught:
            export(model, folder / "model.ts", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caught.value.diagnostics) == 1
    assert f"cannot be written as {format}: File too large" in str(caught.value)


def test_a_full_disk_is_seen_before(model: fx.GraphModule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(tfkit.SpecError, match=r"cannot be written as torchscript: No space left on device; it takes"):
        export(model, folder / "model.ts")


def test_where_it_cannot_write(model: fx.GraphModule, folder: Path) -> None:
    with pytest.raises(tfkit.SpecError, match="is a folder"):
        export(model, folder, format="torchscript")
    with pytest.raises(tfkit.SpecError, match="its folder does not exist"):
        export(model, folder / "nowhere" / "model.ts")
    with pytest.raises(tfkit.SpecError, match=r"the suffix of `model.bin` does not name a format"):
        export(model, folder / "model.bin")
    with pytest.raises(tfkit.SpecError, match=r"`/dev/null` is not a file, but a device"):
        export(model, "/dev/null", format="torchscript")


@pytest.mark.slow
def test_a_link_stays_and_its_file_is_replaced(model: fx.GraphModule, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "model.ts", tmp_path / "link.ts"
    link.symlink_to(target)
    export(model, link)
    assert link.is_symlink()
    assert target.stat().st_size > 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link.ts", "model.ts", "there"]


def test_suffixes() -> None:
    formats = formats_of(tfkit.load_plugins(entry_points=False))
    actual = {
        suffix: formats.choose(Path(f"a{suffix}")).name for value in formats.named.values() for suffix in value.suffixes
    }
    assert set(actual.values()) == {*formats.named} - {"aoti"}  # which is a .pt2, too
    assert actual[".pt"] == "torchscript"


@pytest.mark.parametrize("actual", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_on_one_side_is_a_difference(actual: float) -> None:
    numbers, rest = torch.tensor([1.0, actual]), torch.tensor([1.0, 2.0])
    assert gap(numbers, rest) == gap(rest, numbers) == math.inf
    assert gap(numbers, numbers) == 0.0
