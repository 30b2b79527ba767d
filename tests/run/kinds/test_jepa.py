"""JEPA: the loss from layers of torch, the hidden blocks, the average, and runs with a teacher."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tfkit
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.kinds.jepa import JepaConfig, hidden_blocks
from tfkit.run.kinds.representation import LinearProbeConfig, RankMeConfig, Vectors
from tfkit.run.training.noise import Noise

from ..training.runs import WITH_PLUGINS, Memory, same, trained

ROWS, COLUMNS, D, FF, HEADS = 3, 4, 16, 24, 2
T = ROWS * COLUMNS
MODEL = f"""
tfkit: 1
name: small
d_model: {D}
inputs: {{patches: {{type: features, width: 5}}}}
outputs: [prediction, encoder]
graph:
  embedded: {{block: linear, input: patches}}
  positions: {{block: latents, input: patches, n_latents: {T}}}
  placed: {{block: add, inputs: [embedded, positions]}}
  encoder: {{block: encoder, n_layers: 2, attention: {{kind: mha, n_heads: {HEADS}}}, ffn: {{kind: gelu, d_ff: {FF}}}}}
  queries: {{block: latents, input: patches, n_latents: {T}}}
  predictor:
    {{block: layer, memory: encoder, attention: {{kind: mha, n_heads: {HEADS}}}, ffn: {{kind: gelu, d_ff: {FF}}}}}
  prediction: {{block: linear}}
"""
CONFIG = JepaConfig(grid=(ROWS, COLUMNS), blocks=2, area=(0.15, 0.3))


class PublishedForm(nn.Module):
    """I-JEPA of torch's layers: the encoder reads the visible patches alone, in place of a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.embedded, self.prediction = nn.Linear(5, D), nn.Linear(D, D)
        self.positions, self.queries = (nn.Parameter(torch.randn(T, D) * 0.5) for _ in range(2))
        layers = [nn.TransformerEncoderLayer(D, HEADS, FF, **options) for _ in range(2)]
        self.encoder, self.norm = nn.Sequential(*layers), nn.LayerNorm(D)
        self.predictor = nn.TransformerDecoderLayer(D, HEADS, FF, **options)

    def encode(self, patches: Tensor, visible: Tensor) -> Tensor:
        """The vectors of the visible patches of an image, [1, v, d]."""
        vectors: Tensor = self.norm(self.encoder((self.embedded(patches) + self.positions)[visible][None]))
        return vectors

    def loss(self, teacher: PublishedForm, patches: Tensor, hidden: Tensor) -> Tensor:
        total = torch.zeros((), dtype=patches.dtype)
        for image, of_image in zip(patches, hidden, strict=True):
            predicted = self.prediction(self.predictor(self.queries[None], self.encode(image, ~of_image)))[0]
            with torch.no_grad():
                vectors = F.layer_norm(teacher.encode(image, torch.ones_like(of_image))[0], (D,))
            total = total + F.smooth_l1_loss(predicted[of_image], vectors[of_image], reduction="sum") / D
        return total

    def renamed(self) -> dict[str, Tensor]:
        """The parameters under the names of tfkit."""
        theirs, result = dict(self.named_parameters()), dict[str, Tensor]()
        roles = {"attention_norm_in": "norm1", "attention.output": "self_attn.out_proj"}
        roles |= {"attention.project.qkv": "self_attn.in_proj", "ffn.up": "linear1", "ffn.down": "linear2"}
        encoder = roles | {"ffn_norm_in": "norm2"}
        crossed = {"cross_attention_norm_in": "norm2", "cross_attention.output": "multihead_attn.out_proj"}
        names = {
            f"encoder.layers.{i}.{ours}": f"encoder.{i}.{name}" for i in range(2) for ours, name in encoder.items()
        }
        names |= {f"predictor.layers.0.{ours}": f"predictor.{name}" for ours, name in (roles | crossed).items()}
        names |= {"predictor.layers.0.ffn_norm_in": "predictor.norm3", "encoder.final_norm": "norm"}
        names |= {"embedded": "embedded", "prediction": "prediction"}
        for leaf in ("weight", "bias"):
            for ours, name in names.items():
                separator = "_" if name.endswith("in_proj") else "."
                result[f"{ours}.{leaf}"] = theirs.pop(f"{name}{separator}{leaf}")
            parts = theirs.pop(f"predictor.multihead_attn.in_proj_{leaf}").chunk(3)
            cross = "predictor.layers.0.cross_attention.project"
            result |= {f"{cross}.{x}.{leaf}": part for x, part in zip("qkv", parts, strict=True)}
        result |= {f"{name}.weight": theirs.pop(name) for name in ("positions", "queries")}
        assert not theirs
        return result


def noise_of(rows: range = range(5)) -> Noise:
    return Noise.of(torch.device("cpu"), 5, "loss", 2, rows)


def test_loss_and_gradients_equal_layers_of_torch() -> None:
    """Both in float64. The teacher has other weights than the model."""
    torch.manual_seed(1)
    student, teacher = PublishedForm().double(), PublishedForm().double()
    model = tfkit.build(tfkit.loads(MODEL)).double()
    loss = CONFIG.build(model)
    model.load_state_dict({name: tensor.detach() for name, tensor in student.renamed().items()})
    loss.teacher.load_state_dict({name: tensor.detach() for name, tensor in teacher.renamed().items()})
    patches = torch.randn(5, T, 5, dtype=torch.float64)
    hidden = hidden_blocks(noise_of(), CONFIG)
    result = loss({"patches": patches}, None, noise_of())
    expected = student.loss(teacher, patches, hidden)
    assert result.count == hidden.sum() > 5
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-9)
    result.total.backward()
    expected.backward()
    student_gradients = PublishedForm().double()
    for parameter, source in zip(student_gradients.parameters(), student.parameters(), strict=True):
        parameter.data = source.grad
    of_torch = student_gradients.renamed()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, of_torch[name].detach(), rtol=1e-6, atol=1e-9, msg=name)
    assert all(parameter.grad is None for parameter in loss.teacher.parameters())
    parts = [loss({"patches": patches[i : i + 1]}, None, noise_of(range(i, i + 1))) for i in range(5)]
    assert sum(part.total.item() for part in parts) == pytest.approx(result.total.item(), rel=1e-9)
    vectors = torch.stack([F.layer_norm(teacher.encode(x, torch.ones(T, dtype=torch.bool))[0], (D,)) for x in patches])
    assert result.numbers["spread"].total.item() == pytest.approx(vectors.var(1, correction=0).mean(1).sum().item())


def test_collapsed_vectors_have_no_spread() -> None:
    model = tfkit.build(tfkit.loads(MODEL), seed=1)
    loss = CONFIG.build(model)
    with torch.no_grad():
        loss.teacher.get_submodule("encoder.final_norm").weight.zero_()
        loss.teacher.get_submodule("encoder.final_norm").bias.normal_()
    result = loss({"patches": torch.randn(5, T, 5)}, None, noise_of())
    assert result.numbers["spread"].total.item() == pytest.approx(0, abs=1e-6)


def test_padding_is_neither_visible_nor_hidden() -> None:
    model = tfkit.build(tfkit.loads(MODEL), seed=1)
    loss, patches = CONFIG.build(model), torch.randn(5, T, 5)
    present = torch.arange(T) < torch.tensor([12, 9, 12, 7, 10])[:, None]
    results = [
        loss({"patches": patches.masked_fill(~present[..., None], fill), "patches_mask": present}, None, noise_of())
        for fill in (0.0, 9.0)
    ]
    assert results[0].total.item() == results[1].total.item() > 0
    assert results[0].count == (hidden_blocks(noise_of(), CONFIG) & present).sum()
    assert results[0].numbers["spread"].total.item() == results[1].numbers["spread"].total.item()


@pytest.mark.parametrize("grid", [(8, 8), (3, 5), (1, 40)])
def test_blocks_have_the_sizes_of_the_config_and_leave_a_context(grid: tuple[int, int]) -> None:
    (rows, columns), single = grid, JepaConfig(grid=grid, blocks=1, area=(0.1, 0.3), aspect=(0.5, 2.0))
    hidden = hidden_blocks(noise_of(range(2000)), single).view(-1, rows, columns)
    sizes = set()
    for block in hidden:
        height, width = int(block.any(1).sum()), int(block.any(0).sum())
        assert block.sum() == height * width  # a single rectangle
        (first, last), (left, right) = (block.any(axis).nonzero().flatten()[[0, -1]].tolist() for axis in (1, 0))
        assert (last - first + 1, right - left + 1) == (height, width)
        sizes.add((height, width))
    expected = {
        tuple(
            min(max(round(side), 1), limit)
            for side, limit in ((math.sqrt(a * rows * columns * r), rows), (math.sqrt(a * rows * columns / r), columns))
        )
        for a in np.linspace(0.1, 0.3, 200)
        for r in np.geomspace(0.5, 2.0, 200)
    }
    assert sizes == expected
    frequencies = hidden.double().mean(0)
    assert (frequencies > 0.01).all()
    torch.testing.assert_close(frequencies, frequencies.flip(0, 1), rtol=0, atol=0.06)
    many = hidden_blocks(noise_of(range(200)), JepaConfig(grid=grid, blocks=30, area=(0.1, 0.3)))
    assert not many.all(1).any()
    union = hidden_blocks(noise_of(range(200)), JepaConfig(grid=grid, blocks=2, area=(0.1, 0.3)))
    assert union.sum() > 1.2 * hidden[:200].sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("outputs: [prediction, encoder]", "outputs: [prediction]"), "needs a model that returns a prediction and a"),
        (
            ("prediction: {block: linear}", "prediction: {block: linear, d_model: 8}"),
            "must have the width .* got 8 and",
        ),
        (("width: 5", "width: 5, length: 12"), "a sequence with a padding mask; got patches"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error(change: tuple[str, str], message: str) -> None:
    with pytest.raises(tfkit.Invalid, match=message):
        CONFIG.build(tfkit.build(tfkit.loads(MODEL.replace(*change))))


def test_positions_that_are_not_the_grid_are_an_error() -> None:
    model = tfkit.build(tfkit.loads(MODEL))
    with pytest.raises(SpecError, match="`grid` must have the positions of the data, 12; got 3 x 3"):
        JepaConfig(grid=(3, 3)).build(model)({"patches": torch.randn(5, T, 5)}, None, noise_of())


def test_rows_with_several_documents_are_an_error() -> None:
    loss, pairs = CONFIG.build(tfkit.build(tfkit.loads(MODEL))), torch.ones(T, T, T, dtype=torch.bool)
    with pytest.raises(SpecError, match="needs rows with a single example"):
        loss({"patches": torch.randn(T, T, 5), "patches_mask": pairs}, None, noise_of(range(T)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"area": (0.3, 0.2)}, "`area` must be the smallest"),
        ({"grid": (1, 1)}, "`grid` must have at least 2 positions"),
    ],
)
def test_fields_that_hide_nothing_are_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JepaConfig(**{"grid": (3, 4), **fields})


# ---- metrics of vectors ----


def test_linear_probe_equals_a_ridge_regression_for_each_example() -> None:
    generator = np.random.default_rng(3)
    classes = generator.integers(3, size=60)
    vectors = generator.normal(size=(60, 5)) * [1, 2, 3, 4, 5] + 1.1 * classes[:, None] + 7
    correct = 0
    x = (vectors - vectors.mean(0)) / vectors.std(0)
    for i in range(60):
        fitted = np.arange(60) != i
        mean_x, y = x[fitted].mean(0), np.eye(3)[classes[fitted]]
        a = np.concatenate([x[fitted] - mean_x, np.sqrt(4.0) * np.eye(5)])
        b = np.concatenate([y - y.mean(0), np.zeros((5, 3))])
        weights = np.linalg.lstsq(a, b, rcond=None)[0]
        correct += ((x[i] - mean_x) @ weights + y.mean(0)).argmax() == classes[i]
    metric = LinearProbeConfig(ridge=4.0).build(load_run("jepa_shapes", WITH_PLUGINS, sets=REDUCED).data)
    parts = [
        Vectors(torch.from_numpy(vectors[part]), torch.from_numpy(classes[part])) for part in (slice(25), slice(25, 60))
    ]
    assert 20 < correct < 60
    assert metric.compute(parts[0] + parts[1]) == correct / 60


def test_linear_probe_of_a_single_example_is_an_error() -> None:
    metric = LinearProbeConfig().build(load_run("jepa_shapes", WITH_PLUGINS, sets=REDUCED).data)
    single = Vectors(torch.ones(1, 4, dtype=torch.float64), torch.tensor([2]))
    with pytest.raises(tfkit.Invalid, match="needs at least 2 examples of a split; got 1"):
        metric.compute(single)
    assert metric.compute(single + single) == 1


def test_rankme_is_the_exponential_of_the_entropy_of_singular_values() -> None:
    metric = RankMeConfig().build(load_run("jepa_shapes", WITH_PLUGINS, sets=REDUCED).data)
    classes = torch.zeros(20, dtype=torch.int64)
    orthogonal = torch.linalg.qr(torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    assert metric.compute(Vectors(orthogonal, classes)) == pytest.approx(4, rel=1e-4)
    scaled = orthogonal * torch.tensor([6.0, 2.0, 1.0, 1.0])
    entropy = -sum(p * math.log(p) for p in (0.6, 0.2, 0.1, 0.1))
    assert metric.compute(Vectors(scaled, classes)) == pytest.approx(math.exp(entropy), rel=1e-4)
    assert metric.compute(Vectors(torch.ones(20, 4, dtype=torch.float64), classes)) == pytest.approx(1, rel=1e-4)


def test_vectors_are_means_over_the_positions_of_an_output() -> None:
    model = tfkit.build(tfkit.loads(MODEL), seed=2).eval()
    patches, classes = torch.randn(2, T, 5), torch.tensor([1, 0])
    prediction, encoder = model(patches)
    for output, expected in ((None, encoder), ("prediction", prediction)):
        metric: Any = RankMeConfig(output=output).build(load_run("jepa_shapes", WITH_PLUGINS, sets=REDUCED).data)
        actual = metric.values(model, {"patches": patches}, classes, seed=0, first=0)
        torch.testing.assert_close(actual, expected.double().mean(1))


# ---- runs ----

REDUCED = (
    "data.count=60",
    "model.d_model=16",
    "model.encoder.n_layers=1",
    "model.encoder.ffn.d_ff=24",
    "model.predictor.ffn.d_ff=24",
    "batch.sequences=6",
    "steps=4",
    "schedule.warmup=1",
    "eval={every: 2, splits: {val: all}, metrics: [objective, linear_probe, rankme]}",
)


def shapes_run(*sets: str) -> Run:
    return load_run("jepa_shapes", WITH_PLUGINS, sets=[*REDUCED, *sets])


class Averages(tfkit.Callback):
    """A callback with torch's average of the weights after each step."""

    def __init__(self) -> None:
        self.average: AveragedModel | None = None

    def on_start(self, training: Any) -> None:
        self.average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(training.model)  # the first call copies

    def on_step(self, training: Any, numbers: Any) -> None:
        assert self.average is not None
        self.average.update_parameters(training.model)


def test_the_teacher_equals_the_average_of_torch() -> None:
    averages, memory = Averages(), Memory()
    _, weights = trained(shapes_run("loss.momentum=0.9"), memory, watchers=[averages])
    assert averages.average is not None
    assert memory.saved is not None
    for name, expected in averages.average.module.state_dict().items():
        torch.testing.assert_close(memory.saved.tensors[f"loss/teacher.{name}"], expected, rtol=1e-6, atol=1e-7)
    assert not same(weights, averages.average.module.state_dict())


def test_a_run_resumes_with_its_teacher_and_does_not_depend_on_micro_batches() -> None:
    by_step = "by_step={loss.momentum: {from: 0.5, to: 0.9, over: 4}}"
    full, weights = trained(shapes_run(by_step), Memory())
    split, _ = trained(shapes_run(by_step, "machine.micro_batch=1"), Memory())
    for ours, theirs in zip(split.lines, full.lines, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    parts = Memory()
    trained(shapes_run(by_step, "checkpoint={every: 1}"), parts, until=2)
    assert any(name.startswith("loss/teacher.") for name in parts.saved.tensors)
    resumed, restored = trained(shapes_run(by_step, "checkpoint={every: 1}"), Memory(parts.saved))
    assert resumed.lines == full.lines[-len(resumed.lines) :]
    assert same(restored, weights)
    constant, _ = trained(shapes_run("loss.momentum=0.5"), Memory())
    assert constant.losses[:2] == full.losses[:2]
    assert constant.losses[3] != full.losses[3]


def test_a_metric_of_logits_is_an_error() -> None:
    with pytest.raises(SpecError, match="`accuracy` needs logits of ids, which `prediction` does not return"):
        trained(shapes_run("eval.metrics=[accuracy]"))
