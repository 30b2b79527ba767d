"""The C++ program in tools/cpp, built against the libtorch of the wheel: its tokens equal Python's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.tools.export.export import export

from ...small_specs import reduced

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[3] / "tools" / "cpp"
LLAMA = """\
tfkit: 1
name: llama
d_model: 32
vocab_size: 60
max_len: 40
bias: false
norm: rmsnorm
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 2
    attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, position: {kind: rope, theta: 10000}, mask: {left: 5, right: 0}}
    ffn: {kind: swiglu, d_ff: 48}
  logits: {block: lm_head}
"""
GPT = LLAMA.replace("position: {kind: rope, theta: 10000}, mask: {left: 5, right: 0}", "bias: true").replace(
    "embedding: {block: embedding}", "embedding: {block: embedding, position: learned}"
)
PAIR = """\
tfkit: 1
name: pair
d_model: 32
vocab_size: 60
max_len: 40
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source, position: sinusoidal}
  encoder: &stack {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 48}}
  target_embedding: {block: embedding, input: target, position: sinusoidal}
  decoder: {<<: *stack, block: decoder, input: target_embedding, memory: encoder}
  logits: {block: lm_head}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built as its README says."""
    if shutil.which("cmake") is None or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no cmake or no C++ compiler here")
    build = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", str(SOURCE), "-B", str(build), prefix], ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "cannot find the CUDA" in " ".join(done.stderr.split()):
            pytest.skip(f"torch {torch.__version__} was built for CUDA, and no CUDA toolkit is here to link with")
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "generate"


def run(program: Path, *arguments: object, status: int = 0) -> str:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


@pytest.mark.parametrize("text", [GPT, LLAMA], ids=["learned positions", "rope, gqa and a window"])
def test_a_decoder(program: Path, tmp_path: Path, text: str) -> None:
    model = tfkit.build(tfkit.loads(text), seed=1).eval()
    export(model, tmp_path / "model.ts")
    prompt = [7, 1, 50, 2, 9, 9, 30]
    want = tfkit.generate(model, [prompt], max_new_tokens=20).rows()[0]
    assert len({*want}) > 2
    actual = run(program, tmp_path / "model.ts", 20, ",".join(map(str, prompt)))
    assert actual == ",".join(map(str, want)) + "\n"


def test_an_encoder_and_a_decoder(program: Path, tmp_path: Path) -> None:
    model = tfkit.build(tfkit.loads(PAIR), seed=1).eval()
    export(model, tmp_path / "model.ts")
    source = [1, 2, 3, 4, 5, 6, 7]
    want = tfkit.generate(model, [[0]], source=torch.tensor([source]), max_new_tokens=20).rows()[0]
    assert len({*want}) > 2
    actual = run(program, tmp_path / "model.ts", 20, "0", ",".join(map(str, source)))
    assert actual == ",".join(map(str, want)) + "\n"


def test_what_is_wrong_is_said_in_a_line(program: Path, tmp_path: Path) -> None:
    assert "usage" in run(program, status=2)
    assert "`3x` is no number" in run(program, "nowhere.ts", 4, "1,3x", status=1)
    export(tfkit.build(reduced("bert_base")), tmp_path / "bert.ts")
    assert "cannot be decoded token by token" in run(program, tmp_path / "bert.ts", 4, "1", status=1)
