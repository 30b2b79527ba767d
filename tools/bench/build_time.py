"""The cost of building a model, compared with litgpt and Hugging Face transformers in the same run.

    python tools/bench/build_time.py [--rounds 7] [--litgpt-python PATH] [--json]

Every figure is CPU time of a fresh process on one thread. The contenders take turns, round by round. Compare only
figures of the same run. litgpt 0.5 needs an older huggingface-hub than transformers 5, and so a separate interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date

from measure import WIDTH, Contender, compare, machine, race, ratio, run_once, script, version

LLAMA_PARAMETERS = 405_853_388_800
GPT2_PARAMETERS = 124_439_808

PROBE = """
import json, sys, time
{imports}
modules, start = len(sys.modules), time.process_time()
model = {build}
end = time.process_time()
print(json.dumps({{
    "imports": start, "construction": end - start, "total": end, "modules": len(sys.modules) - modules,
    "parameters": sum(p.numel() for p in model.parameters()),
}}))
"""
# Plugins are loaded, and components imported, before the measurement starts. Reading the spec is measured.
TFKIT = "import torch, tfkit, tfkit.building.builder\ntfkit.load_plugins()"
LITGPT = "import torch\nfrom litgpt import GPT, Config"
LLAMA_CONFIG = """LlamaConfig(
    vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False)"""


@dataclass(frozen=True)
class Target:
    """The limit of a figure, and the measured figure."""

    what: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        """True if the figure is within its limit."""
        return self.measured <= self.limit

    def __str__(self) -> str:
        return f"  {'met' if self.met else 'MISSED':7}{self.what}: {self.measured:.2f}, at most {self.limit:g}"


def probe(imports: str, build: str, python: str = sys.executable) -> list[str]:
    """Return the command of a process that imports, builds, and prints the cost of both steps."""
    return script(PROBE.format(imports=imports, build=build), python)


def llama(litgpt_python: str) -> list[Contender]:
    """Return the builders of llama3_405b on the meta device: tfkit, litgpt, transformers."""
    meta = "torch.device('meta').__enter__()"
    return [
        Contender("tfkit", probe(TFKIT, "tfkit.build('llama3_405b', device='meta')")),
        Contender("litgpt", probe(f"{LITGPT}\n{meta}", "GPT(Config.from_name('Llama-3.1-405B'))", litgpt_python)),
        Contender(
            "transformers",
            probe(
                f"import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n{meta}",
                f"LlamaForCausalLM({LLAMA_CONFIG})",
            ),
        ),
    ]


def gpt2() -> list[Contender]:
    """Return the builders of GPT-2 124M on the CPU with random weights: tfkit, transformers."""
    imports = "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel"
    return [
        Contender("tfkit", probe(TFKIT, "tfkit.build('gpt2')")),
        Contender("transformers", probe(imports, "GPT2LMHeadModel(GPT2Config())")),
    ]


def command_line() -> list[Contender]:
    """Return the processes that run commands of tfkit, and `import torch`."""
    tfkit = [sys.executable, "-m", "tfkit"]
    return [
        Contender("tfkit params llama3_405b", [*tfkit, "params", "llama3_405b"]),
        Contender("import torch", script("import torch")),
        Contender("tfkit --help", [*tfkit, "--help"]),
    ]


def present(contenders: Sequence[Contender], missing: list[str]) -> list[Contender]:
    """Return the contenders that run, and add the errors of the remaining contenders to `missing`."""
    working = []
    for contender in contenders:
        try:
            run_once(contender.command)
            working.append(contender)
        except (OSError, RuntimeError) as error:
            missing.append(f"{contender.name}: {error}")
    return working


def targets(models: Sequence[Contender], small: Sequence[Contender], commands: Sequence[Contender]) -> list[Target]:
    """Return the targets, in the order of the tables."""
    results = []
    for title, group, key in (("llama3_405b, construction", models, "construction"), ("gpt2", small, "construction")):
        for peer in group[1:]:
            result = ratio(group[0].values(key), peer.values(key)).of_minima
            results.append(Target(f"{title}, times of {peer.name}", 1.0, result))
    params, torch, help = commands
    result = ratio(params.values("cpu"), torch.values("cpu")).of_minima
    results.append(Target("tfkit params, times of import torch", 1.3, result))
    results.append(Target("tfkit params, peak memory in MB", 400, max(params.values("rss"))))
    results.append(Target("tfkit --help, seconds", 0.35, statistics.median(help.values("cpu"))))
    return results


def check_counts(models: Sequence[Contender], small: Sequence[Contender]) -> None:
    """Exit if two libraries did not build the same model."""
    for group, expected in ((models, LLAMA_PARAMETERS), (small, GPT2_PARAMETERS)):
        for contender in group:
            if set(contender.values("parameters")) != {expected}:
                sys.exit(
                    f"{contender.name} built {contender.values('parameters')[0]:,} parameters instead of {expected:,}"
                )


def show(models: Sequence[Contender], small: Sequence[Contender], commands: Sequence[Contender]) -> None:
    """Print the tables, each line within 80 columns."""
    *processes, help = commands
    print("\nllama3_405b on the meta device, construction after the imports")
    print(compare(models, "construction"))
    print("  modules imported in between: " + ", ".join(f"{m.name} {m.runs[0]['modules']:.0f}" for m in models))
    print("\nllama3_405b on the meta device, the whole process, imports included")
    print(compare(models, "total"))
    print("\ngpt2 (124M) on the CPU, random initialization included, after the imports")
    print(compare(small, "construction"))
    print("\nthe command line, whole processes")
    print(compare(processes, "cpu"))
    print(f"  {help.name:26}{min(help.values('cpu')):>8.3f}{statistics.median(help.values('cpu')):>9.3f}")
    memory = ", ".join(f"{contender.name} {max(contender.values('rss')):.0f}" for contender in processes)
    print(f"  peak memory in MB: {memory}")


def versions(litgpt_python: str) -> str:
    """Return the versions of the measured libraries, on one line."""
    installed = {name: version(name) for name in ("torch", "transformers")} | {
        "litgpt": version("litgpt", litgpt_python)
    }
    return ", ".join(
        [f"Python {sys.version.split()[0]}", *(f"{name} {text}" for name, text in installed.items() if text)]
    )


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contender (default 7)")
    parser.add_argument(
        "--litgpt-python", default=sys.executable, metavar="PATH", help="an interpreter that has litgpt"
    )
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    options = parser.parse_args()
    missing: list[str] = []
    models, small = present(llama(options.litgpt_python), missing), present(gpt2(), missing)
    commands = command_line()
    for group in (models, small, commands):
        race(group, options.rounds)
    check_counts(models, small)
    goals = targets(models, small, commands)
    about = {"date": str(date.today()), "machine": machine(), "versions": versions(options.litgpt_python)}
    if options.json:
        groups = {"llama3_405b": models, "gpt2": small, "processes": commands}
        runs = {name: {contender.name: contender.runs for contender in group} for name, group in groups.items()}
        results = [{**asdict(target), "met": target.met} for target in goals]
        print(json.dumps({**about, "runs": runs, "targets": results, "not_measured": missing}, indent=2))
    else:
        print("\n".join(about.values()))
        print(f"CPU seconds on one thread, {options.rounds} rounds in turns, each a fresh process")
        show(models, small, commands)
        print("\ntargets", *map(str, goals), *(f"  not measured: {line}"[:WIDTH] for line in missing), sep="\n")
    sys.exit(not all(target.met for target in goals))


if __name__ == "__main__":
    main()
