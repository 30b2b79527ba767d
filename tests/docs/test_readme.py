"""Every block of the README does what it says: YAML loads, Python runs, console output is what is really printed."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tfkit
from tfkit.tools.gallery import shipped

ROOT = Path(__file__).parents[2]
PLUGINS = ",".join(sorted(folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir()))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_every_block_is_of_a_kind_that_is_executed():
    assert {name for name, _ in BLOCKS} <= {"", "yaml", "python", "console"}
    assert all(blocks(language) for language in ("", "yaml", "python", "console"))


@pytest.mark.parametrize("text", blocks(""))
def test_commands_of_the_first_screen_are_targets_of_the_makefile(text):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in text.splitlines():
        target = line.split("#")[0].split()[1]
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def test_one_command_installs_all_that_the_specs_need():
    (command,) = re.findall(r'`(pip install "\.\[all\]".*?)`', (ROOT / "README.md").read_text(encoding="utf-8"))
    projects = [tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in command.split()[3:]]
    assert {one["name"] for one in projects} == {name for spec in shipped() for name in spec.requires}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_specs_load_and_run(text):
    graph = tfkit.loads(text)
    assert tfkit.build(graph, device="meta").code


def test_python_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for text in blocks("python"):
        exec(compile(text, "README.md", "exec"), namespace)
    assert tuple(namespace["logits"].shape) == (1, 16, 50257)


def test_the_plugin_works_from_a_plugin_dir(tmp_path):
    (text,) = [text for text in blocks("python") if "tfkit_register" in text]
    (tmp_path / "double_gelu.py").write_text(text, encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
    (spec,) = blocks("yaml")
    graph = tfkit.loads(spec, plugins=plugins, sets=["decoder.ffn={kind: double_gelu, d_ff: 512}"])
    assert tfkit.build(graph, device="meta").meta["components"]["decoder.layers.0.ffn"].kind_name() == "double_gelu"


def sessions(text: str) -> list[tuple[str, str]]:
    """Commands and their output."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("command", "expected"), [pair for text in blocks("console") for pair in sessions(text)])
def test_console_output_is_what_is_printed(command, expected):
    words = shlex.split(command)
    assert words[0] == "tfkit", "the README shows tfkit commands"
    run = subprocess.run(
        [sys.executable, "-m", "tfkit", *words[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TFKIT_DISABLE": PLUGINS},
        check=False,
    )
    assert without_times(run.stdout + run.stderr) == without_times(expected)


def without_times(text: str) -> str:
    """Without blanks at the ends of lines, and with every duration replaced: those differ from run to run."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return re.sub(r"\d+(\.\d+)? ?(ms|s)\b", "<time>", "\n".join(lines))


def test_no_message_sends_to_a_registry_for_tfkit():
    """tfkit is not published: `pip install tfkit...` would find nothing, or somebody else's."""
    sources = [*ROOT.glob("tfkit/**/*.py"), *ROOT.glob("plugins/tfkit-m*/**/*.md"), ROOT / "README.md"]
    sent = re.compile(r"pip install \"?tfkit")
    assert [path for path in sources if sent.search(path.read_text(encoding="utf-8"))] == []
