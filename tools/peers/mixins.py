"""Run the tests of transformers on folders of `tfkit save --layout transformers`, and on classes of transformers.

`python tools/peers/mixins.py SOURCE` saves a small model of each kind in the layouts `transformers` and `huggingface`.
It then runs `ModelTesterMixin`, `ConfigTester` and `GenerationTesterMixin` of transformers on the classes of the first
folder, and in the same process on the classes of transformers that open the second folder. Sizes, token ids, inputs and
files of tests are equal. It prints how many tests pass, and the tests that pass only for the classes of transformers.

SOURCE is a folder with the tests of transformers, which its wheel lacks. A checkout at the tag of the installed version
has all of them. The sdist has the tests of models and configs:

    pip install pytest parameterized
    pip download --no-deps --no-binary :all: transformers==VERSION
    tar xf transformers-VERSION.tar.gz

`--generation CHECKOUT` names a checkout of another version with the tests that SOURCE lacks. Without it, generation and
export are not tested, and the output says so. `python tools/peers/mixins.py SOURCE llama gpt2` tests these kinds only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

import transformers

import tfkit

SUITE = Path(__file__).with_name("suite.py")
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""The ids in transformers' `CausalLMModelTester`."""
SIDES = ("Folder", "Transformers")


class Kind(NamedTuple):
    """A small model.

    Attributes:
        spec: the name of the published spec that it extends; its family has a class in transformers.
        sizes: the changes to the spec, without its name, as YAML.
        heading: fields outside of `graph`.
        peer: the kind whose class of transformers is compared; by default its own.
        names: the names of its modules, as for `tfkit save --names`.
    """

    spec: str
    sizes: str
    heading: str = "vocab_size: 99\nd_model: 32\nmax_len: 512"
    peer: str | None = None
    names: str | None = None


GROUPED = "n_heads: 4, n_kv_heads: 2"
DECODER = "decoder: {n_layers: 2, attention: {%s}, ffn: {d_ff: 64}}"
WINDOW = "layers: {variants: {local: {attention: {mask: {left: 15}}}}, pattern: [local, base]}"
WINDOWS = f"decoder: {{n_layers: 2, {WINDOW}, attention: {{{GROUPED}, d_head: 8}}, ffn: {{d_ff: 64}}}}"
TRANSLATION = "encoder: {n_layers: 2, attention: {n_heads: 4%s}, ffn: {d_ff: 64}}"
IMAGE = "{type: image, channels: 3, height: 16, width: 16}"
KINDS = {
    "gpt2": Kind("gpt2", DECODER % "n_heads: 4"),
    "llama": Kind("llama3_8b", DECODER % GROUPED),
    "llama_names": Kind("llama3_8b", DECODER % GROUPED, peer="llama", names="llama"),
    "qwen3": Kind("qwen3_0_6b", DECODER % f"{GROUPED}, d_head: 8"),
    "gemma2": Kind("gemma2_2b", WINDOWS),
    "gemma3": Kind("gemma3_1b", WINDOWS),
    "mixtral": Kind(
        "mixtral_8x7b", f"decoder: {{n_layers: 2, attention: {{{GROUPED}}}, ffn: {{n_experts: 4, d_ff: 64}}}}"
    ),
    "bert": Kind("bert_base", "encoder: {n_layers: 2, attention: {n_heads: 4}, ffn: {d_ff: 64}}"),
    "modernbert": Kind(
        "modernbert_base",
        "encoder: {n_layers: 2, layers: {variants: {local: {attention: {mask: {left: 8, right: 8}}}}, "
        "pattern: [first, local]}, attention: {n_heads: 4}, ffn: {d_ff: 64}}",
    ),
    "t5": Kind("t5_small", TRANSLATION % ", d_head: 8", "vocab_size: 99\nd_model: 32"),
    "bart": Kind("bart_base", TRANSLATION % ""),
    "mamba2": Kind("mamba2_130m", "decoder: {n_layers: 2, mixer: {n_heads: 4, d_head: 16, d_state: 8}}"),
    "vit": Kind(
        "vit_base_16",
        "patches: {size: 4}, encoder: {n_layers: 2, attention: {n_heads: 4}, ffn: {d_ff: 64}}, logits: {n_classes: 3}",
        f"d_model: 32\ninputs: {{image: {IMAGE}}}",
    ),
    "additive": Kind(
        "llama3_8b",
        "decoder: {n_layers: 2, attention: {kind: additive, n_heads: 4}, ffn: {d_ff: 64}}",
        peer="llama",
    ),
}
"""The kinds by name. transformers has no class for `additive`, an attention of a plugin: it is compared with Llama."""


class Outcome(NamedTuple):
    """The outcome of a test: passed, failed or skipped, and the first line of its error or reason."""

    result: str
    line: str = ""


def spec_text(name: str) -> str:
    """Return the spec of a kind as YAML."""
    kind = KINDS[name]
    checkpoint = "checkpoint: null\n" if kind.peer and not kind.names else ""  # no family has this model
    head = f"tfkit: 1\nextends: {kind.spec}\nname: {name}\nparameters: null\n"
    return f"{head}{kind.heading}\n{checkpoint}graph: {{{kind.sizes}}}\n"


def write_folders(name: str, folder: Path) -> dict[str, str]:
    """Save a model in both layouts, and return the folders by side."""
    source = folder / "source"
    source.mkdir()
    start = {"decoder_start_token_id": IDS["pad_token_id"]}
    (source / "config.json").write_text(json.dumps(IDS | start))
    paths = {side: folder / side.lower() for side in SIDES}
    kind = KINDS[name]
    model = tfkit.build(tfkit.loads(spec_text(name)), seed=0)
    peer = tfkit.build(tfkit.loads(spec_text(kind.peer)), seed=0) if kind.peer else model
    tfkit.save(model, paths["Folder"], layout="transformers", files_from=source, names=kind.names)
    tfkit.save(peer, paths["Transformers"], layout="huggingface", files_from=source)
    return {side: str(path) for side, path in paths.items()}


def run_suite(folders: dict[str, str], roots: list[Path], expression: str | None, report: Path) -> str:
    """Run the tests on both sides in one process, and return its output; `report` is written as JUnit XML."""
    settings = {"folders": folders, "tests": [str(root / "tests") for root in roots]}
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(report.parent / "modules"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TFKIT_MIXINS": json.dumps(settings),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    command += ["--tb", "short", "--disable-warnings", "--durations", "10"]
    command += [f"--rootdir={report.parent}", f"--junitxml={report}", str(SUITE)]
    command += ["-k", expression] if expression else []
    done = subprocess.run(command, cwd=report.parent, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def outcomes_of(report: Path) -> dict[str, dict[str, Outcome]]:
    """Return the outcomes of the tests by side and name. A test with a failed subtest has failed."""
    sides: dict[str, dict[str, Outcome]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [part for part in case if part.tag in ("failure", "error", "skipped")]
        tag = problems[0].tag if problems else "passed"
        line = (problems[0].get("message") or "").strip().splitlines()[:1] if problems else []
        outcome = Outcome(tag if tag in ("passed", "skipped") else "failed", "".join(line))
        tests = sides.setdefault(case.get("classname", "").rpartition(".Test")[2], {})
        name = case.get("name", "").partition(" [")[0]
        if name not in tests or outcome.result == "failed":
            tests[name] = outcome
    return sides


def counts(outcomes: dict[str, Outcome]) -> str:
    """Return the numbers of passed, failed and skipped tests as text."""
    numbers = Counter(outcome.result for outcome in outcomes.values())
    return ", ".join(str(numbers[result]) for result in ("passed", "failed", "skipped"))


def version_of(root: Path) -> str:
    """Return the version of a checkout or sdist."""
    text = (root / "src" / "transformers" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return match[1] if match else "of an unknown version"


def main() -> None:
    """Test the kinds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout or an unpacked sdist of transformers")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"by default all: {' '.join(KINDS)}")
    parser.add_argument("--generation", type=Path, help="a checkout with the tests that SOURCE lacks")
    parser.add_argument("--tests", metavar="EXPRESSION", help="only these tests, as for `pytest -k`")
    parser.add_argument("--log", type=Path, help="a folder for the output of pytest")
    options = parser.parse_intermixed_args()
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"there is no kind {unknown[0]}; kinds: {' '.join(KINDS)}")
    roots = [root.absolute() for root in (options.source, options.generation) if root is not None]
    for root in roots:
        if not (root / "tests" / "test_modeling_common.py").is_file():
            parser.error(f"{root} must be a checkout or an unpacked sdist of transformers")
    versions = [version_of(root) for root in roots]
    complete = any((root / "tests" / "generation" / "test_utils.py").is_file() for root in roots)
    further = f"; generation of {versions[1]}" if len(roots) > 1 else "" if complete else "; generation is not tested"
    print(f"transformers {transformers.__version__}, its tests of {versions[0]}{further}")
    if versions[0] != transformers.__version__:
        print("the tests have another version than transformers: a test may fail for this reason, on both sides")
    print("passed, failed, skipped; then the tests that pass only for the class of transformers")
    for name in options.kinds or KINDS:
        begin = time.perf_counter()
        with TemporaryDirectory() as folder:
            folders = write_folders(name, Path(folder))
            output = run_suite(folders, roots, options.tests, report := Path(folder) / "report.xml")
            if options.log:
                options.log.mkdir(parents=True, exist_ok=True)
                (options.log / f"{name}.txt").write_text(output)
            sides = outcomes_of(report) if report.is_file() else {}
            if set(sides) != {*SIDES}:
                sys.exit(output)  # of tests that cannot be imported
        ours, theirs = (sides[side] for side in SIDES)
        print(f"\n{name:12} {counts(ours):16} transformers: {counts(theirs):16} {time.perf_counter() - begin:.0f} s")
        for test, outcome in ours.items():
            if outcome.result != "passed" and theirs.get(test, outcome).result == "passed":
                print(f"  {test}: {outcome.result}: {outcome.line}", flush=True)


if __name__ == "__main__":
    main()
