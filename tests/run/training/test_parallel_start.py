"""Initial weights of several processes: bit-identical to one process, built layer by layer or read from files.

Run as a program, this file compares them in processes of its own, which `test_...` starts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.run.checked_run import load_run
from tfkit.run.training.parallel import distributed_processes
from tfkit.run.training.processes import Processes
from tfkit.run.training.start import set_initial_weights
from tfkit.tools.save.save import save

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.run.kinds.test_tasks import PAIR
from tests.run.training.launches import TIMEOUT, fork
from tests.run.training.runs import RECURRENT, write_run

pytestmark = pytest.mark.slow
MOE = Path(__file__).parents[3] / "plugins" / "tfkit-moe"
BASE = ("batch.sequences=8",)
TIED = "model.head={block: lm_head, tie: embedding}"
GQA = "model.decoder.attention={kind: gqa, n_heads: 4, n_kv_heads: 2}"
EXPERTS = "model.decoder.ffn={kind: moe, n_experts: 5, n_experts_per_token: 2, d_ff: 8}"
LLAMA = ("model.embedding.position=null", "model.decoder.attention.position=rope", "model.decoder.norm=rmsnorm")
# Not `gated_delta`, whose norm amplifies rounding: see "Rounding" in the README of the plugin.
HYBRID = """model.decoder={block: decoder, n_layers: 3, ffn: {kind: relu, d_ff: 32},
    mixer: {kind: mamba2, n_heads: 4, d_head: 8, d_state: 8}, layers: {pattern: [base, full, base],
    variants: {full: {mixer: null, attention: {kind: gqa, n_heads: 4, n_kv_heads: 2}}}}}"""
REVERSED = "data={kind: copy, task: reverse, symbols: 7, items: 5, sequences: 400, layout: pair}"
CASES = {
    "gpt": (TIED,),
    "gqa": (GQA, "model.decoder.ffn={kind: swiglu, d_ff: 24, bias: false}", *LLAMA),
    "experts": (GQA, EXPERTS),
    "hybrid": (HYBRID,),
    "encoder and decoder": (PAIR, REVERSED, "batch={sequences: 8}"),
    "layers that run twice": ("model.decoder.layers={groups: 1}",),
}
MAP = "weights={path: gpt, map: {'decoder.layers.{i}': 'decoder.layers.{i // 2}'}}"
READERS = {
    "all from a folder": (*CASES["gpt"], "seed=9", "weights=gpt"),
    "experts from a folder": (*CASES["experts"], "seed=9", "weights=experts"),
    "a part of a folder": (
        GQA,
        "seed=9",
        "weights={path: experts, missing: ['*.ffn.*'], unused: ['*.ffn.*'], allow_change: [decoder.ffn]}",
    ),
    "layers twice": (TIED, "seed=9", "model.decoder.n_layers=4", MAP),
    "frozen": (*CASES["gpt"], "freeze=['decoder.layers.*']"),
}


def differences(folder: Path, shard: int) -> int:
    """Print the tensors that differ from one process's, in all cases, and count them; 1 for each of freezing too."""
    plugins = tfkit.load_plugins(plugin_dirs=[MOE, RECURRENT], entry_points=False)
    torch.set_num_threads(1)
    count = 0
    with distributed_processes() as processes:
        for name, sets in {**CASES, **READERS}.items():
            run = load_run(folder / "small.yaml", plugins, sets=[*BASE, f"machine.shard={shard}", *sets])
            models = [each.build(run, torch.device("cpu")) for each in (processes, Processes())]
            for model in models:
                set_initial_weights(model, run)
            sharded, alone = models
            if [p.requires_grad for p in sharded.parameters()] != [p.requires_grad for p in alone.parameters()]:
                count += 1
            copy = processes.full_model(sharded)
            if copy is not None:
                ours, theirs = copy.state_dict(), alone.state_dict()
                bad = [key for key in {**ours, **theirs} if not torch.equal(ours[key], theirs[key])]
                print(name, len(ours), bad)
                count += len(bad)
                if name in CASES and not (folder / name).exists():
                    save(alone, folder / name)
            processes.check_equal("", "the folders are written")
    return count


@pytest.mark.parametrize(("count", "shard"), [(2, 2), (4, 4), (4, 2)])
def test_the_first_weights_have_the_bits_of_one_process(count: int, shard: int, tmp_path: Path) -> None:
    write_run(tmp_path)
    command = [sys.executable, __file__, str(count), str(tmp_path), str(shard)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(CASES) + len(READERS)


if __name__ == "__main__":
    sys.exit(fork(int(sys.argv[1]), lambda: differences(Path(sys.argv[2]), int(sys.argv[3]))))
