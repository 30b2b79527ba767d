"""Prepare a release: build and check the distributions, install them in an empty environment, run README and commands.

`python tools/release.py`, or `make release`. The files are in dist/; nothing is published: the workflow `release.yml`
does that. With `--offline`, the new environment takes the dependencies from the environment of this Python. `--python`
uses other Pythons: `make release ARGS="--python python3.11 python3.14"`.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
NEEDED = (
    "Makefile",
    "constraints.txt",
    "CONTRIBUTING.md",
    "docs/pictures/gpt2.svg",
    "docs/examples/gpt2.py",
    "tests/texts.py",
)
"""A sample of the files that the tests of an sdist read."""
RELATIVE = re.compile(
    r"^```.*?^```$"
    r"|\[(?P<text>[^][]*)\]\((?P<link>(?![a-z]+:|#)[^)\s]+)\)"
    r'|<img src="(?P<picture>(?![a-z]+:)[^"]+)" alt="(?P<alt>[^"]*)"[^>]*>',
    re.DOTALL | re.MULTILINE,
)
"""Matches relative links and pictures. It also matches blocks of code, so that links inside them do not match."""
FOLLOW = """
import sys, subprocess, shlex
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import page

def printed(command):
    program, *arguments = shlex.split(command)
    done = subprocess.run([sys.executable, "-m", program, *arguments], capture_output=True, text=True)
    return done.stderr + done.stdout

page.follow(Path(sys.argv[2]), Path.cwd(), printed)
"""
"""Program that runs a page with the functions of tests/docs/page.py, and each command in a process."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps of a release and return 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="the folder of the distributions")
    parser.add_argument("--offline", action="store_true", help="take the dependencies from this environment")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="install and run with these Pythons")
    options = parser.parse_args(arguments)
    if options.offline and options.python != [sys.executable]:
        parser.error("--offline cannot be combined with --python: this environment has packages for this Python only")
    if faults := list(versions()):
        print("\n".join(f"error: {fault}" for fault in faults), file=sys.stderr)
        return 1
    output = options.output.resolve()
    try:
        build(output)
        check_sdist(next(output.glob("tfkit-*.tar.gz")))
        for base in options.python:
            with tempfile.TemporaryDirectory() as folder:
                python = environment(base, Path(folder) / "environment", output, offline=options.offline)
                follow_readme(python, Path(folder))
                run_commands(python, output, offline=options.offline)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(path.name for path in sorted(output.iterdir())))
    return 0


def versions() -> Iterator[str]:
    """Yield a message for each file whose version is not the version of tfkit."""
    version = project(ROOT)["version"]
    for folder in PROJECTS[1:]:
        if (other := project(folder)["version"]) != version:
            yield f"the version of {folder.name} must be {version}, as of tfkit; got {other}"
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"the version in CITATION.cff must be {version}"
    if not re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        yield f"CHANGELOG.md must have a section `## {version}`"


def project(folder: Path) -> dict[str, Any]:
    """Return the table `project` of a folder's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def build(output: Path) -> None:
    """Build the sdist of each project, and the wheel from the sdist.

    Wheels are uploaded first, so the README of the wheel becomes the project's page on a package index.
    """
    shutil.rmtree(output, ignore_errors=True)
    for folder in PROJECTS:
        name = f"{project(folder)['name'].replace('-', '_')}-{project(folder)['version']}"
        hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(output), "-t"]
        run([*hatchling, "sdist"], folder)
        with tempfile.TemporaryDirectory() as temporary:
            with tarfile.open(output / f"{name}.tar.gz") as archive:
                archive.extractall(temporary, filter="data")
            readme = Path(temporary) / name / "README.md"
            text = long_description(readme.read_text(encoding="utf-8"), folder.relative_to(ROOT).as_posix())
            readme.write_text(text, encoding="utf-8")
            run([*hatchling, "wheel"], readme.parent)


def long_description(readme: str, folder: str) -> str:
    """Return a README of `folder` without relative links and pictures, which are broken on a package index.

    They become links to the repository if `project.urls` contains it; otherwise they become text with the path.
    """
    table = project(ROOT)
    repository = table.get("urls", {}).get("Repository")

    def rewrite(match: re.Match[str]) -> str:
        target = match["link"] or match["picture"]
        if target is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if repository is not None:
            address = f"{repository}/{'blob' if match['link'] else 'raw'}/v{table['version']}/{path}"
            if match["link"]:
                return f"[{match['text']}]({address})"
            return match[0].replace(f'"{target}"', f'"{address}"', 1)
        path = path.partition("#")[0]
        text = match["text"] or match["alt"]
        return text if text == path else f"{text} (`{path}`)"

    return RELATIVE.sub(rewrite, readme)


def check_sdist(sdist: Path) -> None:
    """Raise ValueError unless the sdist has the files that its tests read."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in NEEDED if name not in names]:
        raise ValueError(f"{sdist.name} is missing {', '.join(missing)}")


def environment(base: str, folder: Path, wheels: Path, *, offline: bool) -> Path:
    """Create an environment of the Python `base` with the wheels and without extras, and return its Python."""
    run([base, "-m", "venv", str(folder)], Path.cwd())
    python = folder / "bin" / "python"
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    pip = [str(python), "-m", "pip"]
    if offline:
        (site,) = folder.glob("lib/*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        run([*pip, "install", "--quiet", "--no-index", "--no-deps", *files], folder)
    else:
        run([*pip, "install", "--quiet", *files], folder)
        run([*pip, "check"], folder)
    return python


def follow_readme(python: Path, folder: Path) -> None:
    """Run the README in an environment and an empty folder, without plugins, which the tables of the README omit."""
    reader = folder / "reader"
    reader.mkdir()
    plugins = ",".join(path.name for path in PROJECTS[1:])
    arguments = [str(python), "-c", FOLLOW, str(ROOT / "tests" / "docs"), str(ROOT / "README.md")]
    run(arguments, reader, COLUMNS="80", NO_COLOR="1", TFKIT_DISABLE=plugins)
    for command in ("list", "plugins"):
        run([str(python), "-m", "tfkit", command], reader)


def run_commands(python: Path, wheels: Path, *, offline: bool) -> None:
    """Add the extras to an environment, and run every command there, on shipped specs."""
    if not offline:
        (wheel,) = wheels.glob("tfkit-*.whl")
        run([str(python), "-m", "pip", "install", "--quiet", f"{wheel}[all]"], wheels)
        run([str(python), "-m", "pip", "check"], wheels)
    run([str(python), str(ROOT / "tools" / "every_command.py")], wheels, output=None)


def run(command: Sequence[str], folder: Path, *, output: int | None = subprocess.DEVNULL, **variables: str) -> None:
    """Run a command in a folder; raise CalledProcessError if it fails."""
    hidden = {"PYTHONPATH", "TFKIT_DISABLE", "TFKIT_PLUGIN_DIR"}
    outer = {name: value for name, value in os.environ.items() if name not in hidden}
    subprocess.run(command, cwd=folder, env={**outer, **variables}, check=True, stdout=output)


if __name__ == "__main__":
    sys.exit(main())
