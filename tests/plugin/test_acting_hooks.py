"""Hooks that act: `tfkit_spec_loaded` observes or rejects specs, `tfkit_model_built` changes models in place."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tests.run.training.runs import same, trained, write_run
from tests.texts import TINY
from tfkit.cli import main
from tfkit.errors import Invalid, PluginWarning, SpecError
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import load_run

from .written import load, write

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


class Probe:
    """A plugin that records specs and models, and counts the forward calls of layers."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.built: list[Any] = []
        self.calls = 0

    @tfkit.hookimpl
    def tfkit_spec_loaded(self, graph: Graph) -> None:
        self.loaded.append(graph.name)

    @tfkit.hookimpl
    def tfkit_model_built(self, model: Any, graph: Graph) -> None:
        assert model.meta["graph"] is graph
        self.built.append(model)
        for layer in model.get_submodule("decoder.layers"):
            layer.register_forward_hook(self.count)
            layer.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, *_: Any) -> None:
        self.calls += 1


def objects(**plugins: object) -> Plugins:
    return tfkit.load_plugins(entry_points=False, objects=plugins)


def of(hook: str, function: Callable[..., Any], **options: Any) -> object:
    """A plugin of one hook."""
    implementation = tfkit.hookimpl(**options)(lambda self, graph: function(graph))
    if hook == "tfkit_model_built":
        implementation = tfkit.hookimpl(**options)(lambda self, model, graph: function(model))
    return type("Plugin", (), {hook: implementation})()


def graph_with(*plugins: object, sets: Any = ()) -> Graph:
    names = ("lab", "probe", "third")
    return tfkit.loads(TINY, plugins=objects(**dict(zip(names, plugins, strict=False))), sets=sets)


# ---- tfkit_spec_loaded ----


def refuse_norms(graph: Graph) -> None:
    for path, norm in graph.configs(tfkit.NormConfig):
        if norm.kind_name() != "rmsnorm":
            raise Invalid(path, "our models must have RMSNorm", help="write `norm: rmsnorm`")


def test_each_way_to_load_calls_it_once(tmp_path: Path) -> None:
    probe = Probe()
    plugins = objects(probe=probe)
    (tmp_path / "tiny.yaml").write_text(TINY)
    tfkit.load(tmp_path / "tiny.yaml", plugins=plugins)
    tfkit.loads(TINY, plugins=plugins)
    tfkit.load({"extends": str(tmp_path / "tiny.yaml"), "name": "mapped"}, plugins=plugins)
    assert probe.loaded == ["tiny", "tiny", "mapped"]


def test_tools_that_derive_models_do_not_call_it() -> None:
    probe = Probe()
    graph = graph_with(probe)
    tfkit.count_params(graph)
    tfkit.cost(graph)
    tfkit.draw(graph)
    assert (len(probe.loaded), probe.built) == (1, [])


def test_a_spec_is_rejected_where_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("tiny.yaml", TINY)
    with pytest.raises(SpecError) as caught:
        tfkit.load("tiny.yaml", plugins=objects(lab=of("tfkit_spec_loaded", refuse_norms)))
    (error,) = caught.value.diagnostics
    assert (error.message, error.help) == ("our models must have RMSNorm", "write `norm: rmsnorm`")
    assert error.notes == ("from `tfkit_spec_loaded` of the plugin lab",)
    assert error.path.startswith("graph.decoder")
    assert error.span is not None
    assert error.span.source.name == "tiny.yaml"


def test_the_path_of_a_model_in_a_run(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_run(write_run(tmp_path), objects(lab=of("tfkit_spec_loaded", refuse_norms)))
    (error,) = caught.value.diagnostics
    assert error.path.startswith("model.graph.decoder")
    assert error.span is not None
    assert error.span.source.name.endswith("small.yaml")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda graph: dict[str, int]()["x"], "plugin lab: `tfkit_spec_loaded` failed: KeyError: 'x'"),
        (lambda graph: graph, "plugin lab: `tfkit_spec_loaded` must return None; got Graph"),
        (lambda graph: 0, "plugin lab: `tfkit_spec_loaded` must return None; got int"),
    ],
)
def test_a_failure_is_an_error_of_the_plugin(function: Callable[[Graph], Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        graph_with(of("tfkit_spec_loaded", function), Probe())
    (error,) = caught.value.diagnostics
    assert error.message == message
    assert error.notes[0].startswith(f"{__file__}:")
    assert error.help == "correct the plugin, or switch it off: TFKIT_DISABLE=lab"


def test_a_wrapper_may_accept_what_another_plugin_rejects() -> None:
    class Lenient:
        @tfkit.hookimpl(wrapper=True, tryfirst=True)
        def tfkit_spec_loaded(self) -> Any:
            try:
                return (yield)
            except Invalid:
                return None

    assert graph_with(of("tfkit_spec_loaded", refuse_norms), Lenient()).name == "tiny"


# ---- tfkit_model_built ----


def test_each_build_calls_it_once(tmp_path: Path) -> None:
    probe = Probe()
    graph = graph_with(probe)
    model = tfkit.build(graph)
    assert [*map(id, probe.built)] == [id(model)]
    tfkit.save(model, tmp_path / "out")
    assert len(probe.built) == 1
    weights = tmp_path / "out"
    rebuilt = [
        tfkit.build(graph, device="meta"),
        tfkit.build(graph, weights=weights),
        tfkit.build(graph, weights=weights, missing=["decoder.final_norm.*"], unused=["decoder.final_norm.*"]),
    ]
    assert [*map(id, probe.built)] == [*map(id, (model, *rebuilt))]
    model(TOKENS)
    assert probe.calls == 2 * len(model.decoder.layers)


def test_only_the_plugins_of_the_call_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import tfkit\n\nbuilt = []\n\n\n@tfkit.hookimpl\ndef tfkit_model_built(model):\n    built.append(model)\n"
    plugins = load(write("plugins/here.py", text))
    (module,) = (part for _, part in plugins.hooks._manager.list_name_plugin() if hasattr(part, "built"))
    tfkit.build(tfkit.loads(TINY, plugins=load()))
    assert module.built == []
    tfkit.build(tfkit.loads(TINY, plugins=plugins))
    assert len(module.built) == 1
    monkeypatch.setenv("TFKIT_DISABLE", "probe")
    tfkit.build(tfkit.loads(TINY, plugins=objects(probe=(probe := Probe()))))
    assert probe.built == []


def test_a_pickled_graph_has_no_plugins() -> None:
    probe = Probe()
    graph = pickle.loads(pickle.dumps(graph_with(probe)))
    assert graph == graph_with(probe)
    assert tfkit.build(graph) not in probe.built


def test_the_order_is_the_order_of_pluggy() -> None:
    events: list[str] = []

    class Around:
        @tfkit.hookimpl(wrapper=True, trylast=True)
        def tfkit_model_built(self, model: Any) -> Any:
            events.append("begins")
            result = yield
            events.append("ends")
            return result

    parts = [of("tfkit_model_built", lambda model, name=name: events.append(name)) for name in ("ada", "bo")]
    tfkit.build(graph_with(parts[0], parts[1], Around()))
    assert events == ["begins", "bo", "ada", "ends"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda model: model.lost, "plugin lab: `tfkit_model_built` failed: AttributeError: 'Tiny' object has no"),
        (lambda model: model, "plugin lab: `tfkit_model_built` must return None; got Tiny"),
    ],
)
def test_a_build_fails_with_its_instruments(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        tfkit.build(graph_with(of("tfkit_model_built", function), Probe()))
    assert caught.value.diagnostics[0].message.startswith(message)
    assert caught.value.diagnostics[0].help == "correct the plugin, or switch it off: TFKIT_DISABLE=lab"


def test_global_settings_are_restored() -> None:
    graph = graph_with(of("tfkit_model_built", lambda model: torch.set_default_dtype(torch.float64)))
    with pytest.warns(PluginWarning, match=r"plugin lab changes torch's default dtype from torch\.float32 to"):
        tfkit.build(graph)
    assert torch.get_default_dtype() == torch.float32


class Empty:
    pass


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (Empty(), "it defines no hook; write `@tfkit.hookimpl def tfkit_register(register)`"),
        (
            type("Late", (), {"tfkit_register": tfkit.hookimpl(trylast=True)(lambda self, register: None)})(),
            "`tfkit_register` must not have `trylast`, because tfkit calls it for each plugin separately",
        ),
        (
            type("Fails", (), {"tfkit_register": tfkit.hookimpl(lambda self, register: register(int))})(),
            "`tfkit_register` failed: TypeError: register() must be called with a subclass of tfkit.Component; got",
        ),
    ],
)
def test_an_object_that_is_no_plugin_is_an_error(part: object, cause: str) -> None:
    with pytest.raises(SpecError) as caught:
        objects(lab=part, probe=Probe())
    (error,) = caught.value.diagnostics
    assert error.message.startswith(f"plugin `lab`: {cause}")


# ---- what it may change ----


def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_a_forward_hook_cannot_change_what_a_model_computes(tmp_path: Path) -> None:
    model = tfkit.build(graph_with(of("tfkit_model_built", lambda m: register(m.decoder.final_norm, double))))
    with pytest.raises(tfkit.SpecError, match="a forward hook of plugin lab must return None; got Tensor"):
        model(TOKENS)


def test_the_error_of_torchscript_names_the_plugin() -> None:
    model = tfkit.build(graph_with(of("tfkit_model_built", lambda m: register(m.decoder.final_norm, print))))
    (hook,) = model.decoder.final_norm._forward_hooks.values()
    with pytest.raises(AttributeError, match="a forward hook of plugin lab cannot be scripted"):
        hook.__name__  # noqa: B018


def register(module: nn.Module, hook: Callable[..., Any]) -> None:
    module.register_forward_hook(hook)


def test_a_hook_of_the_user_may_return_a_value() -> None:
    plain = tfkit.build(graph_with())
    model = tfkit.build(graph_with(Probe()))
    register(model.decoder.final_norm, double)
    assert not torch.equal(model(TOKENS), plain(TOKENS))
    with pytest.raises(SpecError, match="a forward hook, which can change its output"):
        tfkit.save(model, "out")


@pytest.mark.slow  # imports the compiler
def test_a_compiled_model_calls_its_instruments() -> None:
    probe = Probe()
    model = torch.compile(tfkit.build(graph_with(probe)).eval(), backend="eager")
    assert torch.equal(model(TOKENS), tfkit.build(graph_with()).eval()(TOKENS))
    assert probe.calls == 2 * 2


def test_instruments_leave_a_model_as_it_is() -> None:
    probe = Probe()
    plain, model = tfkit.build(graph_with()).eval(), tfkit.build(graph_with(probe)).eval()
    assert torch.equal(model(TOKENS), plain(TOKENS))
    before = probe.calls
    assert before == 2 * len(model.decoder.layers)
    text = tfkit.generate(model, TOKENS, max_new_tokens=3)
    assert torch.equal(text.tokens, tfkit.generate(plain, TOKENS, max_new_tokens=3).tokens)
    assert probe.calls > before


def test_modules_may_be_replaced_and_are_then_not_saved(tmp_path: Path) -> None:
    graph = graph_with(of("tfkit_model_built", lambda model: setattr(model.decoder, "final_norm", nn.Identity())))
    model = tfkit.build(graph)
    assert not torch.equal(model(TOKENS), tfkit.build(graph_with())(TOKENS))
    with pytest.raises(SpecError, match="the model must have the tensors of `tiny`; its modules were changed"):
        tfkit.save(model, tmp_path / "out")


# ---- in runs ----


def test_a_run_is_observed_and_has_the_same_results(tmp_path: Path) -> None:
    probe = Probe()
    run = write_run(tmp_path)
    (plain, expected), (observed, actual) = (
        trained(load_run(run, plugins, sets=["steps=3"])) for plugins in (objects(), objects(probe=probe))
    )
    assert (len(probe.built), probe.calls) == (1, 3 * 2 * 2)
    assert observed.losses == plain.losses
    assert same(actual, expected)


def freeze_tokens(model: Any) -> None:
    model.embedding.tokens.requires_grad_(False)


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (freeze_tokens, "embedding.tokens.weight is frozen"),
        (
            lambda model: setattr(model.decoder.layers[1].ffn, "activation", nn.GELU()),
            "decoder.layers.1.ffn.activation: GELU, and ReLU by the spec",
        ),
    ],
)
def test_a_run_does_not_depend_on_plugins(function: Callable[[Any], Any], note: str, tmp_path: Path) -> None:
    plugins = objects(lab=of("tfkit_model_built", function), probe=Probe())
    with pytest.raises(SpecError) as caught:
        trained(load_run(write_run(tmp_path), plugins))
    (error,) = caught.value.diagnostics
    assert error.message == "a plugin cannot change the model of a run"
    assert error.notes == (note, "from `tfkit_model_built` of the plugin lab")


COUNTING = """
import tfkit


@tfkit.hookimpl
def tfkit_spec_loaded(graph):
    print("loaded", graph.name)


@tfkit.hookimpl
def tfkit_model_built(model, graph):
    print("built", graph.name)
"""


@pytest.mark.slow
def test_commands_call_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write("tiny.yaml", TINY)
    write_run(tmp_path)
    options = ["--no-plugins", "--plugin-dir", str(write("mine.py", COUNTING))]
    expected = {
        "validate tiny.yaml": "loaded tiny",
        "build tiny.yaml": "loaded tiny, built tiny",
        "params tiny.yaml": "loaded tiny",
        "generate tiny.yaml --tokens 1,2 --max-new-tokens 2": "loaded tiny, built tiny",
        "train small.yaml --set steps=2 -o out": "loaded small, built small",
        "eval out": "loaded small, built small",
        "export tiny.yaml -o tiny.safetensors": "loaded tiny",
        "check tiny.yaml --only copies": "loaded tiny",
        "check small.yaml --only optimizer": "loaded small",
    }
    for words, calls in expected.items():
        assert main([*words.split(), *options]) == 0, capsys.readouterr()
        err = capsys.readouterr().err.splitlines()
        assert ", ".join(line for line in err if line.split()[:1] in (["loaded"], ["built"])) == calls, words
