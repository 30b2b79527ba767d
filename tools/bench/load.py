"""The cost of loading published weights, compared with transformers, and of importing a config.

    python tools/bench/load.py [--rounds 5] [--specs gpt2_xl qwen25_1_5b] [--folder DIR] [--json]

For each spec, a random bfloat16 checkpoint is written in the layout of transformers. tfkit loads it through the weight
map of the spec, and transformers with `from_pretrained`. The figures are CPU time after the imports, and the peak
memory of the process as a multiple of the weights. tfkit copies the weights to memory. `from_pretrained` maps the file
and reads weights at first use, so it is measured both unchanged and with a copy of each weight, which is the same work.
The contenders take turns, each in a fresh process on one thread. Compare only figures of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

from build_time import Target
from measure import ROOT, Contender, compare, machine, race, ratio, run_once, script, version

MAKE = """
import torch, tfkit
from pathlib import Path
from tfkit.tools.save.save import save
graph = tfkit.load({spec!r})
model = tfkit.build(graph, dtype=torch.bfloat16)
save(model, graph, Path({folder!r}), layout="huggingface")
print(sum(p.numel() for p in model.parameters()))
"""
PROBE = """
import json, time, torch
{imports}
start = time.process_time()
model = {load}
print(json.dumps({{"load": time.process_time() - start, "parameters": sum(p.numel() for p in model.parameters())}}))
"""
TFKIT_IMPORTS = "import tfkit\nfrom tfkit.tools.common.loading_weights import build_with_weights"
TRANSFORMERS_IMPORTS = "import transformers\nfrom transformers import AutoModelForCausalLM, {architecture}"
COPIED = """
def copied(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
"""
IMPORTED = ["gpt2", "llama31_405b", "gemma3_1b", "bert_base", "t5_11b"]


def checkpoint(spec: str, folder: Path) -> Path:
    """Return the folder of a checkpoint of the spec in transformers' layout; write it if it does not exist."""
    location = folder / spec
    if not location.exists():
        run_once(script(MAKE.format(spec=spec, folder=str(location))), timeout=1200)
    return location


def loading(spec: str, folder: Path) -> list[Contender]:
    """Return the contenders that load a checkpoint: tfkit, and transformers with and without a copy."""
    location = checkpoint(spec, folder)
    architecture = json.loads((location / "config.json").read_text())["architectures"][0]
    ours = f"build_with_weights(tfkit.load({spec!r}), {str(location)!r})"
    theirs = f"{architecture}.from_pretrained({str(location)!r}, dtype=torch.bfloat16)"
    imports = TRANSFORMERS_IMPORTS.format(architecture=architecture)
    return [
        Contender("tfkit", script(PROBE.format(imports=TFKIT_IMPORTS, load=ours))),
        Contender("transformers, copied", script(PROBE.format(imports=f"{imports}{COPIED}", load=f"copied({theirs})"))),
        Contender("transformers, mapped", script(PROBE.format(imports=imports, load=theirs))),
    ]


def weights_mb(spec: str, folder: Path) -> float:
    """Return the size of a checkpoint's files in MB."""
    return sum(file.stat().st_size for file in (folder / spec).glob("*.safetensors")) / 2**20


def importing() -> list[Contender]:
    """Return the processes of `tfkit import`, `tfkit params` and `import torch`."""
    published = ROOT / "tests" / "published"
    tfkit = [sys.executable, "-m", "tfkit"]
    contenders = [Contender("import torch", script("import torch"))]
    contenders += [
        Contender(f"import {name}", [*tfkit, "import", str(published / f"{name}.json")]) for name in IMPORTED
    ]
    return contenders + [Contender(f"params {name}", [*tfkit, "params", name]) for name in IMPORTED]


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender (default 5)")
    parser.add_argument("--specs", nargs="+", default=["gpt2_xl", "qwen25_1_5b"], help="the specs to load")
    parser.add_argument("--folder", type=Path, help="the folder in which the checkpoints are made, and kept")
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        groups = {spec: loading(spec, folder) for spec in options.specs}
        sizes = {spec: weights_mb(spec, folder) for spec in options.specs}
        import_time = importing()
        for group in [*groups.values(), import_time]:
            race(group, options.rounds)
    targets = []
    for spec, (ours, theirs, _) in groups.items():
        result = ratio(ours.values("load"), theirs.values("load"))
        targets.append(Target(f"{spec}, times of from_pretrained and a copy", 1.0, result.of_minima))
        targets.append(
            Target(f"{spec}, peak memory in times of the weights", 1.15, max(ours.values("rss")) / sizes[spec])
        )
    torch, *commands = import_time
    worst = max(commands, key=lambda command: ratio(command.values("cpu"), torch.values("cpu")).of_minima)
    result = ratio(worst.values("cpu"), torch.values("cpu"))
    targets.append(Target(f"{worst.name}, times of import torch", 1.3, result.of_minima))
    about = [str(date.today()), machine(), f"torch {version('torch')}, transformers {version('transformers')}"]
    if options.json:
        contenders = {**groups, "processes": import_time}
        runs = {name: {contender.name: contender.runs for contender in group} for name, group in contenders.items()}
        print(json.dumps({"about": about, "runs": runs, "targets": [asdict(target) for target in targets]}, indent=2))
        sys.exit(not all(target.met for target in targets))
    print(
        "\n".join(about), f"CPU seconds on one thread, {options.rounds} rounds in turns, each a fresh process", sep="\n"
    )
    for spec, group in groups.items():
        print(f"\n{spec}, {sizes[spec]:,.0f} MB of bfloat16, after the imports", compare(group, "load"), sep="\n")
        peaks = ", ".join(f"{contender.name} {max(contender.values('rss')):,.0f}" for contender in group)
        print(f"  peak memory of the process in MB: {peaks}")
    print(
        "\nwhole processes",
        *(f"  {process.name:26}{statistics.median(process.values('cpu')):>8.3f}" for process in import_time),
        sep="\n",
    )
    print("\ntargets", *map(str, targets), sep="\n")
    sys.exit(not all(target.met for target in targets))


if __name__ == "__main__":
    main()
