"""Compare the numbers of every spec that comes with tfkit between two checkouts: `same_numbers.py ../before`.

Both checkouts build the reduced model of each spec from the same seed. The names and values of the state dict, outputs
without and with padding, gradients, and tokens decoded with a cache must be bit-identical. The other checkout needs a
`.venv`. Numbers depend on the processor, so they cannot be stored in a file: both checkouts run here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

import tfkit
from tfkit.testing import example_inputs

if TYPE_CHECKING:
    from tfkit.plugin.manager import Plugins

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 6
Digests = dict[str, str]


def main() -> int:
    """Compare the checkouts, and print the differences."""
    from tfkit.plugin.manager import load_plugins

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("specs", nargs="*", help="names of specs; all unless given")
    options, plugins = parser.parse_args(), load_plugins()
    shipped = list(plugins.specs.files)
    python, names = options.checkout.resolve() / ".venv/bin/python", options.specs or shipped
    if not python.exists():
        parser.error(f"{options.checkout} is not a checkout with a .venv")
    if unknown := sorted({*names} - {*shipped}):
        parser.error(f"there is no spec named {', '.join(unknown)}")
    specs = json.dumps({name: _small(name, plugins) for name in names})
    before, after = (_digests(interpreter, specs) for interpreter in (str(python), sys.executable))
    differing = [f"{name}: {', '.join(_differing(before[name], after[name]))}" for name in names]
    differing = [line for line in differing if not line.endswith(": ")]
    compared = sum(len(digests) for digests in after.values())
    print("\n".join([*differing, f"{len(names)} specs, {compared} comparisons, {len(differing)} specs differ"]))
    return int(bool(differing))


def _small(name: str, plugins: Plugins) -> tuple[dict[str, Any], str | None]:
    """Return the reduced model of a spec as data, and the input that is fed incrementally when decoding."""
    from tfkit.graph.decode_split import split_if_decodable
    from tfkit.spec.render import spec_data
    from tfkit.tools.check.reduced import reduced_model

    graph = reduced_model(tfkit.load(name, plugins=plugins), plugins).graph
    parts = split_if_decodable(graph)
    return spec_data(graph.spec.model), None if parts is None or len(parts.step_inputs) > 1 else parts.step_inputs[0]


def _digests(python: str, specs: str) -> dict[str, Digests]:
    """Compute the digests with the Python of a checkout, which runs this file."""
    command = [python, __file__, "--digests"]
    done = subprocess.run(command, input=specs, stdout=subprocess.PIPE, text=True, check=True)
    digests: dict[str, Digests] = json.loads(done.stdout)
    return digests


def _differing(before: Digests, after: Digests) -> list[str]:
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


def worker() -> None:
    """Read small models and their inputs by spec, and print digests by spec."""
    torch.set_num_threads(1)
    specs: Mapping[str, tuple[Mapping[str, Any], str | None]] = json.load(sys.stdin)
    json.dump({name: dict(numbers(*arguments)) for name, arguments in specs.items()}, sys.stdout)


def numbers(spec: Mapping[str, Any], main_input: str | None) -> Iterator[tuple[str, str]]:
    """Yield digests of everything that a small model computes, by name."""
    graph = tfkit.load(spec)
    model = tfkit.build(graph).eval()
    state = model.state_dict()
    yield "names", _digest(list(state))
    yield "weights", _digest(list(state.values()))
    for padding in ("none", "left", "right"):
        yield f"outputs, padding {padding}", _digest(model(**_inputs(model, graph, padding)))
    yield "gradients", _digest(_gradients(model, _inputs(model, graph, "right")))
    if main_input is not None:
        yield "decoded", _digest(_decoded(model, _inputs(model, graph, "none"), main_input))


def _inputs(model: fx.GraphModule, graph: Any, padding: Any) -> dict[str, Tensor]:
    examples = example_inputs(graph, batch=2, length=LENGTH, padding=padding)
    names = [node.name for node in model.graph.find_nodes(op="placeholder")]  # also in checkouts with other modules
    return {name: examples[name] for name in names if name in examples}


def _gradients(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    outputs = model(**inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    sum(output.float().nan_to_num(neginf=0.0).square().sum() for output in outputs).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _decoded(model: Any, inputs: dict[str, Tensor], form: str) -> list[Tensor]:
    """Return the logits of three tokens of the incremental input, and of three more tokens step by step."""
    cached = tfkit.CachedModel(model, length=LENGTH)
    tokens = inputs.pop(form)
    cached.start(len(tokens), **inputs)
    with torch.no_grad():
        return [cached(tokens[:, :3]), *(cached(tokens[:, i : i + 1]) for i in range(3, LENGTH))]


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        _add(digest, [item for pair in value.items() for item in pair])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())


if __name__ == "__main__":
    if sys.argv[1:] == ["--digests"]:
        worker()
    else:
        sys.exit(main())
