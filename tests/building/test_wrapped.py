"""Models inside wrappers of torch: equal numbers, or an error that names the module to wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import tfkit
from tfkit.building.model import unwrapped_model
from tfkit.tools.save.save import save

from ..sampling import some

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*CUDA.*:UserWarning"
)
SIZES = ["d_model=16", "vocab_size=23", "max_len=16", "dropout=0"]
LAYERS = ["decoder.n_layers=2", "decoder.attention.n_heads=2", "decoder.ffn.d_ff=24"]
TOKENS = torch.randint(23, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A group of one process, in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built() -> torch.fx.GraphModule:
    return tfkit.build("gpt2", sets=[*SIZES, *LAYERS], seed=1)


def sharded(model: Any, **options: Any) -> Any:
    for layer in model.decoder.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


WRAPPERS: dict[str, Callable[[torch.fx.GraphModule], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "an average": AveragedModel,
    "the loss": tfkit.Loss,
    "several": lambda model: torch.compile(DistributedDataParallel(tfkit.Loss(model)), backend="eager"),
}
SHARDED = {"sharded": sharded, "sharded at the root": fully_shard}


@pytest.mark.parametrize("name", some(WRAPPERS | SHARDED, 4))
def test_a_wrapped_model_generates_what_it_generates_alone(name: str) -> None:
    wrapped, model = (WRAPPERS | SHARDED)[name](built()), built()
    expected = tfkit.generate(model, TOKENS, max_new_tokens=5).tokens
    assert torch.equal(tfkit.generate(wrapped, TOKENS, max_new_tokens=5).tokens, expected)
    with torch.no_grad():
        actual = tfkit.CachedModel(wrapped.eval())(TOKENS)
        torch.testing.assert_close(actual, model(TOKENS))
        if name in SHARDED:  # and it still runs as a whole
            torch.testing.assert_close(wrapped(TOKENS), model(TOKENS))


def test_a_sharded_encoder_decoder_reads_its_source() -> None:
    stack = ["n_layers=1", "attention.n_heads=2", "attention.d_head=8", "ffn.d_ff=24"]
    sets = ["d_model=16", "vocab_size=23", *[f"graph.{name}.{key}" for name in ("encoder", "decoder") for key in stack]]
    model, other = (tfkit.build("t5_small", sets=sets, seed=1) for _ in range(2))
    options: dict[str, Any] = {"source": TOKENS, "max_new_tokens": 4}
    expected = tfkit.generate(model, [[0], [0]], **options).tokens
    assert torch.equal(tfkit.generate(fully_shard(other), [[0], [0]], **options).tokens, expected)


def test_a_model_sharded_in_mixed_precision_keeps_what_it_has_read() -> None:
    model = sharded(built().eval(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    cached = tfkit.CachedModel(model)
    with torch.no_grad():
        actual = torch.cat([cached(piece) for piece in TOKENS.split([3, 1, 2], dim=1)], dim=1)
        torch.testing.assert_close(actual, model(TOKENS), atol=0.02, rtol=0)


def test_what_peft_puts_into_a_model_is_part_of_it() -> None:
    model, tuner, wrapped = built(), _of_peft("BaseTuner"), _of_peft("PeftModel")
    tuner.model, wrapped.base_model = model, tuner
    with torch.no_grad():
        model.decoder.layers[0].ffn.up.weight.mul_(2)  # as an adapter does
    assert unwrapped_model(wrapped) is model
    assert tfkit.Loss(wrapped)(TOKENS) == tfkit.Loss(model)(TOKENS)
    wrapped.active_peft_config = type("Config", (), {"is_prompt_learning": True})
    with pytest.raises(ValueError, match="the prompts that PEFT has learned are not in the model"):
        tfkit.generate(wrapped, TOKENS, max_new_tokens=1)


def _of_peft(name: str) -> Any:
    return type(name, (nn.Module,), {"__module__": "peft.made"})()


# ---- torch.func and torch.ao ----


def test_the_loss_says_that_torch_func_cannot_follow_it() -> None:
    loss = tfkit.Loss(built())
    parameters = dict(loss.named_parameters())
    with pytest.raises(ValueError, match=r"torch\.func cannot follow this loss: use"):
        torch.func.grad(lambda options: torch.func.functional_call(loss, options, (TOKENS,)))(parameters)


@pytest.mark.filterwarnings("ignore:.*are deprecated:UserWarning")
def test_layers_that_are_called_what_they_are_can_be_quantized() -> None:
    model = built().eval()
    for module in model.modules():
        if type(module) is tfkit.Linear:
            module.__class__ = nn.Linear
    quantized = torch.ao.quantization.quantize_dynamic(model)
    names = [type(module).__module__ for module in quantized.modules()]
    assert sum(name.startswith("torch.ao.") and name.endswith(".dynamic.modules.linear") for name in names) == 8
    assert 0 < (quantized(TOKENS) - model(TOKENS)).abs().max() < 0.05
    assert tfkit.generate(quantized, TOKENS, max_new_tokens=2).tokens.shape == (2, 2)


# ---- the loss ----


def full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def layers_then_loss(model: Any) -> Any:
    for layer in model.decoder.layers:
        fully_shard(layer)
    return fully_shard(tfkit.Loss(model))


LOSSES: dict[str, Callable[[torch.fx.GraphModule], nn.Module]] = {
    "of a sharded model": lambda model: tfkit.Loss(sharded(model)),
    "of a model that is sharded later": lambda model: (tfkit.Loss(model), fully_shard(model))[0],
    "sharded": lambda model: fully_shard(tfkit.Loss(model)),
    "of sharded layers, sharded": layers_then_loss,
    "in DDP": lambda model: DistributedDataParallel(tfkit.Loss(model)),
    "of an average": lambda model: tfkit.Loss(AveragedModel(model)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_value_and_the_gradients_of_the_model_alone(name: str) -> None:
    model, other = built(), built()
    loss, reference = LOSSES[name](model), tfkit.Loss(other)
    for _ in range(2):  # the second step begins where the first has left it
        actual, expected = loss(TOKENS), reference(TOKENS)
        actual.backward()
        expected.backward()
        torch.testing.assert_close(actual, expected)
    theirs = dict(other.named_parameters())
    gradients = {name: full(first.grad) for name, first in unwrapped_model(loss).named_parameters()}
    assert gradients.keys() == theirs.keys()
    for path, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[path].grad)


@pytest.mark.parametrize("name", ["compiled", "DDP", "DataParallel", "the loss"])
def test_a_loss_says_what_to_wrap(name: str) -> None:
    wrapped = WRAPPERS[name](built())
    kind = type(wrapped).__name__
    help = "pass the model to it" if name == "the loss" else f"pass the model to it, and the loss to `{kind}`"
    with pytest.raises(ValueError, match=f"^a loss must wrap .*; got {kind}: {help}$"):
        tfkit.Loss(wrapped)


def test_a_head_that_is_sharded_by_itself() -> None:
    model = tfkit.build("llama_7b", sets=[*SIZES[:3], *LAYERS])
    fully_shard(model.logits)
    with pytest.raises(ValueError, match="`logits` must not be sharded separately: shard it with the root"):
        tfkit.Loss(sharded(model))(TOKENS)


# ---- what is not the model ----


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"lm": built()})

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner["lm"](x)


USES: dict[str, Callable[[Any, Path], object]] = {
    "generate": lambda model, path: tfkit.generate(model, TOKENS, max_new_tokens=1),
    "CachedModel": lambda model, path: tfkit.CachedModel(model),
    "Loss": lambda model, path: tfkit.Loss(model),
    "attention_weights": lambda model, path: tfkit.attention_weights(model, TOKENS),
    "load_weights": tfkit.load_weights,
    "export": lambda model, path: tfkit.export(model, path / "model.pt2"),
    "save": lambda model, path: save(model, path / "out"),
}


@pytest.mark.parametrize("use", USES)
def test_a_module_that_computes_something_else_is_refused(use: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it is Own; pass .*, which it has as `inner\.lm`$"):
        USES[use](Own(), tmp_path)
    with pytest.raises(ValueError, match=r"it is Linear; pass the model itself$"):
        USES[use](nn.Linear(2, 2), tmp_path)
    for other in ("gpt2", None):
        with pytest.raises(TypeError, match=r"must be a model that `tfkit.build` returned"):
            USES[use](other, tmp_path)


@pytest.mark.parametrize("use", ["attention_weights", "load_weights", "export", "save"])
def test_parameters_that_are_sharded_are_not_read_as_if_they_were_whole(use: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the parameters of this model are sharded: gather them"):
        USES[use](sharded(built()), tmp_path)


def test_parameters_that_fsdp_has_flattened() -> None:
    flat = type("FullyShardedDataParallel", (nn.Module,), {"__module__": "torch.distributed.fsdp"})()
    with pytest.raises(ValueError, match=r"flattens the parameters of a model: use `torch\."):
        tfkit.generate(flat, TOKENS, max_new_tokens=1)


def test_policies_that_differ() -> None:
    model = built().eval()
    fully_shard(model.decoder.layers[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="must use the same `MixedPrecisionPolicy`: a cache has a single dtype"):
        tfkit.CachedModel(fully_shard(model))(TOKENS)


def test_compile_beside_sharding() -> None:
    with pytest.raises(ValueError, match="compile cannot be combined with `fully_shard`"):
        tfkit.CachedModel(sharded(built().eval()), compile=True)


def test_the_attention_of_a_wrapped_model() -> None:
    expected = tfkit.attention_weights(built(), TOKENS)
    for wrap in WRAPPERS.values():
        actual = tfkit.attention_weights(wrap(built()), TOKENS)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_what_is_saved_has_no_names_of_the_wrapper(tmp_path: Path) -> None:
    model = built()
    save(DistributedDataParallel(model), tmp_path / "out")
    other = torch.compile(tfkit.build("gpt2", sets=[*SIZES, *LAYERS], seed=2), backend="eager")
    tfkit.load_weights(other, tmp_path / "out")
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_a_model_with_other_modules_is_not_saved(tmp_path: Path) -> None:
    model = built()
    model.decoder.layers[0].ffn.up = nn.Sequential(model.decoder.layers[0].ffn.up)
    with pytest.raises(tfkit.SpecError, match="the model must have the tensors of `gpt2`; its modules were changed"):
        save(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
