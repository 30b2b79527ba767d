"""A plugin outside tfkit with an example of every hook: all tools support it, and work without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tfkit
from tfkit.cli import main
from tfkit.testing import check_component, check_model

from ..sampling import slow, some

PROJECT = Path(__file__).parent / "everything"
CONFIG = {
    "model_type": "everything",
    "architectures": ["EverythingForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "max_position_embeddings": 32,
    "num_layers": 3,
    "intermediate_size": 48,
}
Run = Callable[..., tuple[str, str]]
SPEC = "everything_small"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, without the plugins that are installed, and no module of the plugin left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    yield
    for name in [module for module in sys.modules if module.partition(".")[0] == "tfkit_everything"]:
        del sys.modules[name]


def project(folder: str, text: str) -> Path:
    """A copy of the plugin in which the code of its hooks is another."""
    for path in PROJECT.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".toml", ".yaml"):
            copy = Path(folder) / path.relative_to(PROJECT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text if path.name == "__init__.py" else path.read_text())
    return Path(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command prints and says with the plugin, in a folder of plugins."""

    def call(*arguments: str, status: int = 0, plugin: Path = PROJECT) -> tuple[str, str]:
        actual = main([*arguments, "--no-plugins", "--plugin-dir", str(plugin)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert actual == status, err
        return out, err

    return call


def test_it_is_small() -> None:
    files = [path for path in PROJECT.rglob("*") if path.suffix in (".py", ".toml", ".yaml")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 220


# ---- its parts, served by the tools ----


@pytest.mark.parametrize(
    ("words", "expected"),
    some(
        [
            (["list", "everything"], "tfkit-everything 0.1.0"),
            (["components", "ffn"], "maxout"),
            (["components", "block", "tower"], "block `tower`, tfkit-everything 0.1.0"),
            (["validate", SPEC], f"{SPEC}: ok"),
            (["params", SPEC], "22,656"),
            (["show", SPEC], "x = x + ffn(layernorm(x))"),
            (["show", SPEC, "--prose"], "the larger of two"),
            (["cost", SPEC], "tower"),
            (["draw", SPEC, "-o", "a.svg"], "wrote a.svg"),
            slow((["eject", SPEC, "-o", "a.py"], "equal to the last bit")),  # in a process that imports torch
            (["export", SPEC, "-o", "a.npz"], "a.npz: everything_small as npz"),
            (["export", "--formats"], "the weights as an archive"),
            (["generate", SPEC, "--tokens", "1,2", "--max-new-tokens", "3"], "3 tokens"),
            (["depth", SPEC], "tower: 2\n"),
            (["plugins"], "3 components, 1 spec, 1"),
        ],
        8,
    ),
    ids=lambda words: words[0] if isinstance(words, list) else None,
)
def test_a_tool_serves_it(words: list[str], expected: str, run: Run) -> None:
    out, err = run(*words)
    assert expected in out + err


def test_its_family_is_imported_and_saved(run: Run) -> None:
    """`tfkit import` finds the family by its model_type, and files of that family load and are written."""
    Path("config.json").write_text(json.dumps(CONFIG))
    run("import", "config.json", "-o", "mine.yaml")
    plugins = tfkit.load_plugins(plugin_dirs=[PROJECT], entry_points=False)
    model = tfkit.build(tfkit.load("mine.yaml", plugins=plugins), seed=3)
    tfkit.save(model, "own")
    run("save", "own", "--layout", "huggingface", "-o", "saved")
    assert json.loads(Path("saved/config.json").read_text()).items() >= CONFIG.items()
    again = tfkit.build(tfkit.load("mine.yaml", plugins=plugins), weights="saved")
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_its_format_has_the_weights(run: Run) -> None:
    run("export", SPEC, "-o", "a.npz")
    plugins = tfkit.load_plugins(plugin_dirs=[PROJECT], entry_points=False)
    expected = tfkit.build(tfkit.load(SPEC, plugins=plugins)).state_dict()
    with np.load("a.npz") as arrays:
        assert {name: arrays[name].tobytes() for name in arrays} == {
            k: x.numpy().tobytes() for k, x in expected.items()
        }


def test_its_check_warns_at_the_place(run: Run) -> None:
    out, err = run("validate", SPEC, "--set", "tower.ffn.d_ff=33")
    assert out == f"{SPEC}: ok\n"
    assert err.startswith(
        "warning: widths beside the multiples of 8 are slow\n  --> --set:1:16  (graph.tower.ffn.d_ff)"
    )
    assert "from the plugin tfkit-everything 0.1.0" in err


def test_a_stack_that_ignores_its_mask_takes_none_of_pairs() -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[PROJECT], entry_points=False)
    with pytest.raises(AssertionError, match=r"- documents: `tower` takes no pairwise mask$"):
        check_model(tfkit.load(SPEC, plugins=plugins), plugins=plugins, only=("documents",))


@pytest.mark.slow
def test_its_parts_keep_every_promise() -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[PROJECT], entry_points=False)
    check_component("maxout", slot="ffn", plugins=plugins)
    check_model(tfkit.load(SPEC, plugins=plugins), plugins=plugins)


# ---- without it, and when it is broken ----


def test_switched_off_all_else_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-everything")
    assert "switched off: tfkit-everything" in run("plugins")[0]
    assert run("validate", "gpt2") == ("gpt2: ok\n", "")
    assert SPEC not in run("list")[0]
    assert "npz" not in run("export", "--formats")[0]
    assert f"there is no spec named `{SPEC}`" in run("params", SPEC, status=1)[1]
    assert "there is no command `depth`" in run("depth", SPEC, status=2)[1]
    Path("config.json").write_text(json.dumps(CONFIG))
    assert "`everything`" in run("import", "config.json", status=1)[1]


def test_broken_all_else_works(run: Run) -> None:
    """It says so once, with the place; its spec is there, as data, and says why it cannot be built."""
    broken = project("broken", 'import tfkit\n\nraise RuntimeError("not today")\n')
    warning = "warning: plugin `tfkit-everything` is skipped: RuntimeError: not today\n"
    location = str(broken.resolve() / "src/tfkit_everything/__init__.py") + ":3"
    for words, expected in (["validate", "gpt2"], "gpt2: ok"), (["params", "gpt2"], "124,439,808"):
        out, err = run(*words, plugin=broken)
        assert expected in out
        assert err.startswith(warning)
        assert err.count("warning: ") == 1
        assert location in err.replace("\n", "").replace(" ", "")
    out, _ = run("plugins", plugin=broken)
    assert "broken: tfkit-everything" in out
    assert location in out.replace("\n", "")
    assert SPEC in run("list", "everything", plugin=broken)[0]
    _, err = run("params", SPEC, status=1, plugin=broken)
    assert "the spec needs the plugin `tfkit-everything`, which is not loaded" in err
    assert "it is installed and fails: RuntimeError: not today" in err
    assert "npz" not in run("export", "--formats", plugin=broken)[0]


@pytest.mark.parametrize("hook", ["tfkit_export_formats", "tfkit_checks"])
def test_a_hook_that_fails_is_its_own_matter(hook: str, run: Run) -> None:
    text = (PROJECT / "src/tfkit_everything/__init__.py").read_text()
    head, body = text.split(f"def {hook}(", 1)
    end = body.index(":\n") + 2
    broken = project("broken", f"{head}def {hook}({body[:end]}    raise RuntimeError('not today')\n{body[end:]}")
    words = ["export", "--formats"] if "formats" in hook else ["validate", SPEC]
    out, err = run(*words, plugin=broken)
    assert f"`{hook}` failed: RuntimeError: not today" in err
    assert ("onnx" if "formats" in hook else f"{SPEC}: ok") in out
    assert "22,656" in run("params", SPEC, plugin=broken)[0]


def test_a_command_that_fails_is_its_own_matter(run: Run) -> None:
    broken = project("broken", (PROJECT / "src/tfkit_everything/__init__.py").read_text())
    file = broken / "src/tfkit_everything/depth.py"
    file.write_text(f'"""Print the number of layers of a spec."""\nimport nowhere\n{file.read_text()}')
    _, err = run("depth", SPEC, status=1, plugin=broken)
    assert "the command `depth` of plugin tfkit-everything 0.1.0 cannot be loaded: ModuleNotFoundError" in err
    assert "depth.py:2" in err.replace("\n", "").replace(" ", "")
    assert "22,656" in run("params", SPEC, plugin=broken)[0]


# ---- a plugin that is known, and not there ----


def test_a_spec_of_a_plugin_that_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "deepseek_v3", "--no-plugins"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: `deepseek_v3` comes with the plugin tfkit-mla, which is not loaded\n   = help: ")
    assert err.count("\n") == 2


@pytest.mark.parametrize(("name", "plugin"), [("deepseek_v3", "tfkit-mla"), ("mixtral_8x7b", "tfkit-moe")])
def test_the_way_to_it_works(name: str, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the folders of both plugins, which the help names, it is there."""
    folders = [str(Path(tfkit.__file__).parents[1] / "plugins" / plugin) for plugin in ("tfkit-mla", "tfkit-moe")]
    assert main(["validate", name, "--no-plugins", *(w for plugin in folders for w in ("--plugin-dir", plugin))]) == 0
    assert capsys.readouterr().out == f"{name}: ok\n"
    assert main(["validate", name, "--no-plugins", "--plugin-dir", folders[plugin == "tfkit-mla"]]) == 1
    assert plugin in capsys.readouterr().err
