"""Invalid calls of the Python API: each works, or raises an error with a message of tfkit.

Made from the signatures: for each public function, every argument in turn is one of the values of `WRONG`, is missing,
or has a name that nearly is one. By hand: inputs of the wrong shape, type and vocabulary for all that takes tensors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfkit
from tests.decoding.test_flow import SPEC as FLOW_SPEC
from tests.learning.models import SPECS
from tfkit import reference
from tfkit.decoding.foreign import FOREIGN
from tfkit.plugin.manager import load_plugins
from tfkit.tools.profile.models import profile_models

from .sampling import chosen

PACKAGE = Path(tfkit.__file__).parent
PLUGINS = load_plugins(entry_points=False)
Call = tuple[str, Callable[[], Any]]

WRONG: dict[str, Any] = {
    "a number": 5,
    "a negative number": -3,
    "a fraction": 2.5,
    "no number": float("nan"),
    "a large number": 2**80,
    "a string": "nonsense",
    "an empty string": "",
    "bytes": b"gpt2",
    "None": None,
    "True": True,
    "a list": [1, "a"],
    "a mapping": {"a": 1},
    "an object": object(),
    "a class": int,
    "a tensor": torch.zeros(2, 3),
    "a module": nn.Linear(2, 2),
}


def _graph_and_model(name: str) -> tuple[tfkit.Graph, Any]:
    spec, sets = SPECS[name]
    graph = tfkit.load(spec, sets=sets, plugins=PLUGINS)
    return graph, tfkit.build(graph).eval()


GRAPH, MODEL = _graph_and_model("gpt2")
SEQ2SEQ = _graph_and_model("t5_small")[1]
TOKENS = torch.zeros(2, 3, dtype=torch.long)
WEIGHTS = {name: tensor.numpy() for name, tensor in MODEL.state_dict().items()}
STREAM = "decoder.layers.*.stream.out"
FLOW = tfkit.FlowModel(tfkit.build(FLOW_SPEC), label="label")
BUDGET = tfkit.Budget("params", 10_000)

FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Budget": (tfkit.Budget, {"of": "active", "amount": 10**9}),
    "CachedModel": (tfkit.CachedModel, {"model": MODEL}),
    "FlowModel": (tfkit.FlowModel, {"model": FLOW.model, "label": "label"}),
    "Loss": (tfkit.Loss, {"model": MODEL}),
    "ablate": (tfkit.ablate, {"model": MODEL, "names": STREAM}),
    "adamw": (tfkit.adamw, {"model": MODEL, "lr": -1.0, "weight_decay": -1.0}),
    "attribution": (
        tfkit.attribution,
        {"model": MODEL, "names": STREAM, "inputs": TOKENS, "source": TOKENS, "metric": lambda logits: logits.sum()},
    ),
    "build": (tfkit.build, {"spec": GRAPH, "device": "meta"}),
    "command": (tfkit.command, {"name": "mine", "examples": "tfkit mine"}),
    "compare": (tfkit.compare, {"a": GRAPH, "b": GRAPH, "weights": "nowhere.safetensors"}),
    "cost": (tfkit.cost, {"graph": GRAPH, "length": 4}),
    "count_params": (tfkit.count_params, {"graph": GRAPH}),
    "data": (tfkit.data, {"run": "nowhere.yaml"}),
    "eject": (tfkit.eject, {"graph": GRAPH}),
    "evaluate": (tfkit.evaluate, {"run": "nowhere.yaml"}),
    "export": (tfkit.export, {"model": MODEL, "path": "nowhere/model.safetensors"}),
    "generate": (tfkit.generate, {"model": MODEL, "tokens": TOKENS, "max_new_tokens": 2}),
    "import_config": (tfkit.import_config, {"path": "nowhere/config.json"}),
    "load": (tfkit.load, {"spec": "gpt2"}),
    "load_plugins": (tfkit.load_plugins, {"entry_points": False}),
    "load_weights": (tfkit.load_weights, {"model": MODEL, "path": "nowhere.safetensors"}),
    "loads": (tfkit.loads, {"text": "tfkit: 1"}),
    "loss": (tfkit.loss, {"model": MODEL, "inputs": TOKENS}),
    "node": (GRAPH.node, {"name": "decoder"}),
    "parameter_groups": (tfkit.parameter_groups, {"model": MODEL}),
    "patch": (tfkit.patch, {"model": MODEL, "names": STREAM, "source": TOKENS}),
    "prepare_decoding": (tfkit.prepare_decoding, {"model": MODEL}),
    "profile": (tfkit.profile, {"graph": GRAPH}),
    "profile_models": (profile_models, {"graphs": [GRAPH], "weights": "nowhere.safetensors", "length": 99}),
    "reference.run": (reference.run, {"graph": GRAPH, "weights": WEIGHTS, "inputs": {"tokens": TOKENS.numpy()}}),
    "sample_flow": (tfkit.sample_flow, {"flow": FLOW, "n_samples": 2, "steps": 2, "labels": [3, 1]}),
    "save": (tfkit.save, {"model": MODEL, "folder": "/dev/null/x"}),
    "solve": (tfkit.solve, {"spec": "nowhere.yaml", "budget": BUDGET}),
    "steer": (
        tfkit.steer,
        {"model": MODEL, "names": STREAM, "vector": torch.zeros(GRAPH.node("decoder").output.width)},
    ),
    "trace": (tfkit.trace, {"model": MODEL, "read": "decoder"}),
    "train": (tfkit.train, {"run": "nowhere.yaml"}),
}

LEFT_OUT = {
    ("CachedModel", "compile"): "torch's compiler is imported",
    ("generate", "compile"): "torch compiles",
    ("attribution", "metric"): "whatever can be called is called",
    ("profile", "graph"): "it runs",
    ("generate", "on_token"): "whatever can be called is called",
    ("load_plugins", "entry_points"): "what is installed is loaded",
}
"""Arguments that are not tried, and why."""


def mistakes(name: str) -> Iterator[Call]:
    """Calls of a public function with one thing wrong."""
    function, good = FUNCTIONS[name]
    for field, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or (name, field) in LEFT_OUT:
            continue
        for what, value in WRONG.items():
            yield f"{name}({field}={what})", partial(function, **{**good, field: value})
        if parameter.default is parameter.empty:
            yield f"{name} without {field}", partial(function, **{k: v for k, v in good.items() if k != field})
        yield f"{name}({field}x=)", partial(function, **{**good, f"{field}x": 1})
    yield f"{name} with too many", partial(function, *range(20))


def complaint(call: Callable[[], Any]) -> str | None:
    """What a call is answered with; None where it works. Fails for an error that is not tfkit's own."""
    try:
        call()
    except (TypeError, ValueError) as error:
        frame = [item for item, _ in walk_tb(error.__traceback__)][-1]
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            return str(error)
        raise AssertionError(f"{type(error).__name__} of {frame.f_code.co_filename}: {error}") from error
    return None


def failures(calls: Iterable[Call]) -> list[str]:
    """The calls that end in an error of torch or of Python."""
    result = []
    for name, call in calls:
        try:
            complaint(call)
        except Exception as error:
            result.append(f"{name}: {type(error).__name__}: {error}")
    return result


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", chosen(FUNCTIONS, FUNCTIONS.keys() - {"profile_models"}))
def test_every_argument(name: str) -> None:
    assert failures(mistakes(name)) == []


def test_they_are_many() -> None:
    assert sum(len(list(mistakes(name))) for name in FUNCTIONS) > 1000


def test_every_public_function_is_there() -> None:
    public = {name for name in tfkit.__all__ if inspect.isfunction(getattr(tfkit, name))}
    for_plugins = {
        "choose_top",
        "command",
        "divisors",
        "expect",
        "frozen_copy",
        "load_tokenizer",
        "next_tokens",
        "optional_slot",
        "read_rows",
        "slot",
        "update_cache",
    }
    inside = {"ablate", "activity", "attention_weights", "attribution", "contributions", "lens", "patch", "steer"}
    assert public - for_plugins <= {*FUNCTIONS, *inside, "draw"}


# ---- what models read ----

BAD_TOKENS: dict[str, Any] = {
    **{what: value for what, value in WRONG.items() if what != "None"},
    "a list of lists": [[1, 2], [3]],
    "one sequence": TOKENS[0],
    "one number": TOKENS[0, 0],
    "three dimensions": TOKENS[None],
    "bool": TOKENS.bool(),
    "float": TOKENS.float(),
    "complex": TOKENS.cfloat(),
    "too large": TOKENS + 23,
    "negative": TOKENS - 1,
    "too long": torch.zeros(2, 40, dtype=torch.long),
    "an array": np.zeros((2, 3)),
}
BAD_MASKS: dict[str, Any] = {
    "one longer": torch.ones(2, 4, dtype=torch.bool),
    "another batch": torch.ones(3, 3, dtype=torch.bool),
    "one sequence": torch.ones(3, dtype=torch.bool)[:2],
    "a list": [[True, True, True]] * 2,
    "a number": 1,
    "a string": "yes",
}
INPUTS: dict[str, Callable[[Any], Any]] = {
    "model": MODEL,
    "model by name": lambda x: MODEL(tokens=x),
    "encoder-decoder, source": lambda x: SEQ2SEQ(x, TOKENS),
    "encoder-decoder, target": lambda x: SEQ2SEQ(TOKENS, x),
    "Loss": tfkit.Loss(MODEL),
    "Loss, source": lambda x: tfkit.Loss(SEQ2SEQ)({"source": x, "target": TOKENS}),
    "Loss, targets": lambda x: tfkit.Loss(MODEL)(TOKENS, x),
    "CachedModel": lambda x: tfkit.CachedModel(MODEL, length=8)(x),  # noqa: PLW0108  new caches in each call
    "CachedModel, source": lambda x: tfkit.CachedModel(SEQ2SEQ, length=8).start(2, source=x),
    "generate": lambda x: tfkit.generate(MODEL, x, max_new_tokens=1),
    "generate, source": lambda x: tfkit.generate(SEQ2SEQ, [[0], [0]], source=x, max_new_tokens=1),
    "attention_weights": lambda x: tfkit.attention_weights(MODEL, x),
    "attention_weights by name": lambda x: tfkit.attention_weights(MODEL, tokens=x),
    "contributions": lambda x: tfkit.contributions(MODEL, x),
    "lens": lambda x: tfkit.lens(MODEL, x),
}
MASKS: dict[str, Callable[[Any], Any]] = {
    "model": lambda x: MODEL(TOKENS, x),
    "encoder-decoder": lambda x: SEQ2SEQ(TOKENS, TOKENS, source_mask=x),
    "Loss": lambda x: tfkit.Loss(MODEL)({"tokens": TOKENS, "tokens_mask": x}),
    "CachedModel": lambda x: tfkit.CachedModel(MODEL, length=8)(TOKENS, x),
    "generate": lambda x: tfkit.generate(MODEL, TOKENS, mask=x, max_new_tokens=1),
    "generate, source": lambda x: tfkit.generate(SEQ2SEQ, [[0], [0]], source=TOKENS, source_mask=x, max_new_tokens=1),
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_input(name: str) -> None:
    assert failures((what, partial(INPUTS[name], value)) for what, value in BAD_TOKENS.items()) == []


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    actual = {what: complaint(partial(MASKS[name], value)) for what, value in BAD_MASKS.items()}
    assert None not in actual.values(), actual


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MODEL(), "`gpt2` needs `tokens`"),  # noqa: PLW0108  like the other calls
        (lambda: MODEL(TOKENS, TOKENS, TOKENS), "`gpt2` must be called with tokens, tokens_mask; got 3 inputs"),
        (lambda: MODEL(TOKENS, tokens=TOKENS), "`tokens` of `gpt2` must be passed once; got two values"),
        (lambda: MODEL(token=TOKENS), "`gpt2` has no argument `token`: an argument with a similar name is `tokens`"),
        (lambda: MODEL("text"), "`tokens` must be a tensor; got 'text'"),
        (lambda: MODEL(TOKENS.float()), "`tokens` must be token ids [b, t] of 64 or 32 bits; got torch.float32 [2, 3]"),
        (lambda: MODEL(TOKENS.byte()), "`tokens` must be token ids [b, t] of 64 or 32 bits; got torch.uint8 [2, 3]"),
        (lambda: MODEL(TOKENS.to_sparse()), "`tokens` must be a dense tensor, token ids [b, t] of 64 or 32 bits"),
        (lambda: MODEL(TOKENS + 23), "23 is not a token id of this model: `tokens` may be 0 to 22"),
        (lambda: SEQ2SEQ(TOKENS), "`t5_small` needs `target`"),
        (
            lambda: SEQ2SEQ(TOKENS, TOKENS[:1].repeat(3, 1)),
            "the inputs must have the same batch size; got `source` 2, `target` 3",
        ),
    ],
)
def test_what_a_model_says(call: Callable[[], Any], message: str) -> None:
    assert complaint(call) == message


def test_an_error_of_a_component_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODEL.decoder, "forward", lambda *args, **kwargs: [][0])
    with pytest.raises(IndexError, match="list index out of range"):
        MODEL(TOKENS)


# ---- changes, names and types ----


@pytest.mark.parametrize(
    "sets",
    [
        "decoder.n_layers=1",
        ["decoder.n_layers=1"],
        iter(["decoder.n_layers=1"]),
        {"decoder.n_layers": 1},
        {"decoder.n_layers": np.int32(1)},
        {"decoder.n_layers": "3 - 2", "decoder.final_norm": True, "decoder.norm": {"kind": "rmsnorm", "eps": 1e-6}},
    ],
)
def test_changes_are_a_text_several_or_a_mapping(sets: Any) -> None:
    decoder = tfkit.load("gpt2", sets=sets, plugins=PLUGINS).node("decoder").config
    assert decoder.n_layers == 1  # type: ignore[attr-defined]
    assert not isinstance(sets, dict) or len(sets) == 1 or decoder.norm.eps == 1e-6  # type: ignore[attr-defined]


def test_a_truth_value_of_numpy_is_not_called_a_bool() -> None:
    with pytest.raises(TypeError, match=r"got a (numpy\.bool|bool_)$"):
        tfkit.load("gpt2", sets={"bias": np.bool_(True)}, plugins=PLUGINS)


def test_a_text_and_a_model_are_told_from_a_spec() -> None:
    with pytest.raises(tfkit.SpecError, match=r"not a path\n.*= help: `tfkit.loads` reads a text"):
        tfkit.load("tfkit: 1\nname: x\n")
    with pytest.raises(TypeError, match=r"`model.meta\['graph'\]` of a built model; got a Gpt2"):
        tfkit.build(MODEL)  # type: ignore[arg-type]


def test_a_model_without_values_is_named(tmp_path: Path) -> None:
    model, words = tfkit.build(GRAPH, device="meta"), "the model is on the meta device, where weights have no values"
    for call in (
        lambda: tfkit.generate(model, [[1]], max_new_tokens=1),
        lambda: tfkit.save(model, tmp_path / "out"),
        lambda: tfkit.export(model, tmp_path / "out.ts"),
        lambda: tfkit.attention_weights(model, TOKENS),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_changes_of_a_loaded_graph_are_refused() -> None:
    for sets in (["decoder.n_layers=2"], ["nonsense=2"], {"decoder.n_layers": 2}, "decoder.n_layers=2"):
        with pytest.raises(ValueError, match="`sets` have no effect on a loaded graph"):
            tfkit.build(GRAPH, sets=sets)


def test_options_of_a_backward_have_no_effect_on_decoding() -> None:
    for item in ({"optimizer": "sgd"}, {"recompute": True}):
        with pytest.raises(ValueError, match="has no effect without a backward"):
            tfkit.cost(GRAPH, mode="decode", **item)  # type: ignore[arg-type]


def test_types_and_devices_have_names() -> None:
    assert tfkit.build(GRAPH, dtype="bfloat16").logits.forward is not None
    assert {parameter.dtype for parameter in tfkit.build(GRAPH, dtype="torch.float16", device="meta").parameters()} == {
        torch.float16
    }
    for item, message in (
        ({"dtype": "bf16"}, "got 'bf16': a similar one is 'bfloat16'"),
        ({"dtype": torch.int8}, "the type of weights must be one of float32, .*; got torch.int8"),
        ({"dtype": torch.float8_e4m3fn}, "the type of weights must be one of float32, .*; got torch.float8_e4m3fn"),
        ({"device": "warp"}, "`warp` is not a device"),
        ({"attention_backend": "spda"}, "a similar one is 'sdpa'"),
    ):
        with pytest.raises(ValueError, match=message):
            tfkit.build(GRAPH, **item)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_transformers_say_what_is_meant(name: str) -> None:
    message = complaint(lambda: tfkit.generate(MODEL, TOKENS, max_new_tokens=1, **{name: 1}))
    assert message == f"`generate` has no argument `{name}`: {FOREIGN[name]}"


@pytest.mark.slow
def test_names_of_transformers_are_its_own() -> None:
    from transformers import GenerationConfig
    from transformers.generation import GenerationMixin

    theirs = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
    read = {"input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "past_key_values", "cache"}
    assert set(FOREIGN) <= theirs | read
    local = set(inspect.signature(tfkit.generate).parameters)
    for text in FOREIGN.values():
        named = {match for match in re.findall(r"`(\w+)`", text) if match not in ("NAME_mask", "generate")}
        assert named <= local


def test_the_package_says_its_version_and_its_names() -> None:
    assert tfkit.__version__ == version("tfkit")
    for invalid, near in (("params", "count_params"), ("biuld", "build"), ("importconfig", "import_config")):
        with pytest.raises(AttributeError, match=f"one with a similar name is '{near}'"):
            getattr(tfkit, invalid)
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'$"):
        tfkit.__wrapped__  # noqa: B018


def test_specs_stand_for_their_graphs() -> None:
    assert tfkit.count_params("bert_tiny").total == tfkit.cost("bert_tiny", length=2).total.parameters
    assert tfkit.draw("bert_tiny").title == "bert_tiny"


def test_an_optimizer_has_the_arguments_of_torch() -> None:
    assert complaint(lambda: tfkit.adamw(MODEL, 0.1, beta=(0.9, 0.95))) == (
        "`adamw` has no argument `beta`: an argument with a similar name is `betas`"
    )
    assert complaint(lambda: tfkit.adamw(nn.ReLU(), 0.1)) == "there is nothing to train: the module has no parameters"
    for options in ({"betas": 5}, {"eps": -1.0}, {"betas": (2.0, 3.0)}):
        assert complaint(lambda options=options: tfkit.adamw(MODEL, 0.1, **options)) is not None  # type: ignore[misc]
