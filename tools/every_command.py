"""Run every command of an installed tfkit, with all extras and its plugins, on shipped specs, runs and sweeps.

`PYTHON tools/every_command.py` works in a new folder, so that it uses the tfkit of PYTHON and not a checkout. It prints
the exit status and the time of each command, and after the last one the warnings of all. `tools/release.py` calls it.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

SMALL_SIZES = "--set d_model=32 --set vocab_size=512 --set decoder.n_layers=2 --set decoder.attention.n_heads=4"
SHORT_RUN = "--set steps=2 --set eval.splits.train.batches=1 --set eval.splits.val.batches=1"
PUBLISHED = "gpt2 t5_small mixtral_8x7b deepseek_v2_lite granite4_h_tiny gemma3n_e2b clip_base_32"
"""Specs of tfkit and of each plugin that has specs."""
COMMANDS = f"""
list gpt2
plugins --trace
components attention additive
schema -o schema.json
validate {PUBLISHED} minigpt_relu
params {PUBLISHED}
show gpt2 --points
diff llama2_7b llama3_8b
show deepseek_v2_lite --prose
cost gpt2 --device h100
solve gpt2 --params 350M
draw gpt2 -o gpt2.svg
draw llama2_7b mixtral_8x7b -o two.png
build gpt2 {SMALL_SIZES} -o model
generate model --tokens 1,2,3 --max-new-tokens 4
attention model --tokens 1,2,3 -o attention.svg
profile model --steps 2 -o profile
save model --layout tfkit -o saved
save model --layout huggingface -o published
save model --layout transformers -o hub
save model --layout transformers --names llama -o named
convert weights.pt -o converted
import published -o imported.yaml
tensors published
compare model published
export model -o model.pt
export model -o model.pt2
export model -o model.onnx
eject model -o model.py
check minigpt_relu
check --kind additive
new plugin shift
new run nanogpt -o run.yaml
train run.yaml --plan
train minigpt_relu {SHORT_RUN} --stop-after 1 -o relu
train relu
eval relu --task agreement
grow relu n_layers=6 -o larger.yaml
generate relu --prompt ROMEO: --max-new-tokens 8
train dit_shapes --set steps=2 --set eval=null -o shapes
sample shapes --samples 2 --steps 2 --label 3 -o shapes.npy
sweep minigpt --plan
sweep sweep.yaml {SHORT_RUN} -o sweep
runs sweep/runs/* -o runs.html
tokenizer text.txt --vocab-size 300 -o tokenizer.json
tokens text.txt --tokenizer tokenizer.json --processes 2 -o corpus.npy
"""
"""Commands in an order in which each one finds the files that it reads."""
FILES = {
    "text.txt": "The cat sat on the mat. The dog sat on the log.\n" * 200,
    "sweep.yaml": """
tfkit: 1
base: minigpt_relu
variants: {relu: {}, swiglu: {model.decoder.ffn: {kind: swiglu, d_ff: 256, bias: false}}}
seeds: [0, 1]
compare: {to: relu, on: val.loss}
""",
}


def main() -> int:
    """Run the commands, and return 1 if one fails, or if a command of tfkit is not among them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in FILES.items():
            (folder / file).write_text(text, encoding="utf-8")
        write_pickle(folder / "weights.pt")
        print(f"Python {platform.python_version()}, torch {version('torch')}, tfkit {version('tfkit')}")
        commands = [line for line in COMMANDS.splitlines() if line]
        missing = names_in(run("--help", folder).stdout) - {line.partition(" ")[0] for line in commands}
        if missing:
            print(f"error: COMMANDS is missing {', '.join(sorted(missing))}", file=sys.stderr)
        warnings: Counter[str] = Counter()
        failures = 0
        for line in commands:
            start = time.perf_counter()
            done = run(line, folder)
            print(f"{done.returncode:>3} {time.perf_counter() - start:>6.1f} s  tfkit {line}", flush=True)
            if done.returncode:
                failures += 1
                print(done.stderr[-4000:] or done.stdout[-4000:], file=sys.stderr)
            warnings.update(set(warnings_in(done.stderr)))
    for text, count in warnings.most_common():
        print(f"{count:>3} commands warn: {text}")
    print(f"{len(commands)} commands, {failures} failed")
    return 1 if failures or missing else 0


def write_pickle(file: Path) -> None:
    """Write tensors as torch does; this process may have no torch."""
    code = f"import torch; torch.save({{'weight': torch.ones(2)}}, {str(file)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with all warnings shown."""
    variables = {"PYTHONWARNINGS": "default", "COLUMNS": "120", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        f"{shlex.quote(sys.executable)} -m tfkit {line}",
        shell=True,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def names_in(text: str) -> set[str]:
    """Return the commands in the text of `tfkit --help`."""
    return set(re.findall(r"^  (\w+)  ", text, re.MULTILINE))


def warnings_in(text: str) -> Iterator[str]:
    """Yield the warnings of Python in what a command printed, without folders."""
    for match in re.finditer(r"^(?P<file>.+?):(?P<line>\d+): (?P<text>\w*Warning: .*)", text, re.MULTILINE):
        yield f"{'/'.join(Path(match['file']).parts[-3:])}:{match['line']}: {match['text']}"


if __name__ == "__main__":
    sys.exit(main())
