"""Hide each private name of torch in turn, in a process of its own, and print as JSON what tfkit reports.

Each process imports tfkit, then loads, builds, runs and trains a model, then uses the feature that needs the name.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Processes that are forked need not import these again.
import numpy as np  # noqa: F401
import pydantic  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo
import torch._inductor
import torch.export
import torch.profiler
from torch import nn
from torch.utils import _pytree

SIZES = ["d_model=256", "vocab_size=13", "max_len=32", "decoder.n_layers=1", "decoder.attention.n_heads=2"]
TOKENS = torch.arange(6).expand(4, 6)
resolve = pkgutil.resolve_name


def core() -> Any:
    """Load, build, run and train a model, and decode with it."""
    import tfkit

    tfkit.load("gpt2", sets=SIZES)
    model = tfkit.build("gpt2", sets=SIZES)
    model(TOKENS).sum().backward()
    tfkit.Loss(model)(TOKENS).backward()
    tfkit.adamw(model, lr=0.1).step()
    tfkit.generate(model.eval(), TOKENS[:, :2], max_new_tokens=2)
    return model


def compiled(mode: bool | str) -> Callable[[Any, Path], Any]:
    def decode(model: Any, _: Path) -> None:
        import tfkit

        tfkit.CachedModel(model, length=8, compile=mode).start(2)

    return decode


def check(model: Any, _: Path) -> None:
    from tfkit import load_plugins
    from tfkit.tools.check.measure import outcome_of
    from tfkit.tools.check.model_under_test import ModelUnderTest
    from tfkit.tools.check.properties.forms import captured_model

    outcome = outcome_of(captured_model, ModelUnderTest(model.meta["graph"], load_plugins()))
    if outcome.status == "does not apply":
        raise ValueError(outcome.detail)


def cost(model: Any, _: Path) -> None:
    import tfkit

    tfkit.cost(model.meta["graph"], length=8)


def memory(model: Any, _: Path) -> None:
    from tfkit.tools.cost.step_memory import memory_of_step

    memory_of_step(model.meta["graph"], 1, 8, bfloat16=True)


def profile(model: Any, _: Path) -> None:
    import tfkit

    tfkit.profile(model.meta["graph"], device="cpu", batch=1, length=4)


def trace(model: Any, _: Path) -> None:
    from tfkit.torch_private.hooks import borrowed_hooks

    with borrowed_hooks(nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())):
        pass


def save(model: Any, folder: Path) -> None:
    import tfkit

    tfkit.save(model, folder / "saved")


def sharded(model: Any, _: Path) -> None:
    from tfkit.torch_private.sharding import computes_in

    module: Any = nn.Linear(2, 3)
    module._get_fsdp_state = lambda: type("State", (), {"_mp_policy": type("Policy", (), {"param_dtype": None})})
    computes_in(module)


def export(model: Any, folder: Path) -> None:
    import tfkit

    tfkit.export(model, folder / "model.pt2")


def library(model: Any, folder: Path) -> None:
    """Do what the format aoti does, with a compiler that writes no file: it would take most of a minute."""
    from tfkit.torch_private import programs

    programs.has_compiler()
    spec = _pytree.treespec_dumps(_pytree.tree_structure(((), {"x": 0})))
    loaded = type("Library", (), {"loader": type("Loader", (), {"get_call_spec": staticmethod(lambda: (spec, ""))})})
    assert programs.arguments_of(loaded()) == ["x"]
    exported = torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),))
    programs.write_programs(folder / "linear.pt2", {"linear": exported}, {})
    programs.read_libraries(folder / "linear.pt2")
    exported = torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),))
    inductor: Any = torch._inductor
    inductor.aot_compile = lambda *_, **__: []
    programs.write_libraries(folder / "library.pt2", {"linear": exported}, {})


def forget(model: Any, _: Path) -> None:
    from tfkit.torch_private.torchscript import forget_classes

    forget_classes()


def decompose(model: Any, _: Path) -> None:
    from tfkit.torch_private.programs import decomposed_program

    decomposed_program(torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),)))


def checked(model: Any, _: Path) -> None:
    from tfkit.torch_private.tensors import version_of

    version_of(torch.ones(2))


def nothing(model: Any, _: Path) -> None:
    """Use no more than `core` does."""


ATEN = ("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
ARCHIVE = "torch.export.pt2_archive._package"
FEATURES: dict[str, Callable[[Any, Path], Any]] = {
    "torch._dynamo.mark_static_address": compiled(True),
    "torch._inductor.list_mode_options": compiled("max-autotune"),
    "torch._dynamo.lookup_backend": check,
    "torch.fx.experimental._config.patch": check,
    "torch.fx.graph_module._loader": nothing,
    **{f"torch.ops.aten.{name}.default": cost for name in (*ATEN, "_to_copy", "_unsafe_view")},
    "torch.utils._python_dispatch.TorchDispatchMode": cost,
    "torch.utils._python_dispatch._disable_current_modes": memory,
    "torch._C._current_autograd_node": cost,
    "torch._C._autograd._get_sequence_nr": cost,
    "torch._C._profiler._RecordFunctionFast": profile,
    "_sequence_nr": cost,
    "_schema": cost,
    "torch.ops.mkldnn._linear_pointwise": nothing,
    "torch._C._functorch.peek_interpreter_stack": nothing,
    "torch._C._len_torch_dispatch_stack": nothing,
    "torch.autograd.forward_ad._current_level": nothing,
    "torch.Tensor._version": checked,
    "_cdata": cost,
    "_forward_hooks": save,
    "_forward_pre_hooks": save,
    "_state_dict_hooks": nothing,
    "_forward_hooks_with_kwargs": trace,
    "_forward_hooks_always_called": trace,
    "_forward_pre_hooks_with_kwargs": trace,
    "_get_fsdp_state": sharded,
    "_mp_policy": sharded,
    "torch._export.serde.schema.PayloadConfig": export,
    "torch._export.serde.serialize.serialize": export,
    **{f"{ARCHIVE}.{name}": export for name in ("_package_state_dict", "_package_constants", "load_pt2")},
    **{f"{ARCHIVE}.{name}": export for name in ("_package_payload_config", "_package_extra_files", "PT2ArchiveWriter")},
    **{f"{ARCHIVE}.{name}": library for name in ("PT2ArchiveReader", "package_pt2")},
    "torch._inductor.cpp_builder.get_cpp_compiler": library,
    "torch._inductor.aot_compile": library,
    "torch.utils._pytree.treespec_loads": library,
    "torch._decomp.decomposition_table": decompose,
    "torch.jit._recursive.concrete_type_store": forget,
}
"""What uses each name; a name without a module is an attribute of objects."""


def report(hidden: str, folder: Path) -> dict[str, Any]:
    """Return the warnings of this process without a name, the error of its feature, and any other exception."""

    def without(name: str) -> Any:
        if name == hidden:
            raise AttributeError(name)
        return resolve(name)

    def attribute(owner: object, name: str, *default: Any) -> Any:
        if name != hidden:
            return getattr(owner, name, *default)
        if default:
            return default[0]
        raise AttributeError(name)

    pkgutil.resolve_name = without
    result: dict[str, Any] = {"name": hidden, "error": "", "fault": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            from tfkit import torch_private
            from tfkit.torch_private import tensors

            for module in (torch_private, tensors):
                vars(module)["getattr"] = attribute
            model = core()
            try:
                FEATURES[hidden](model, folder)
            except ValueError as error:
                result["error"] = str(error)
        except BaseException:
            result["fault"] = traceback.format_exc()
    result["warnings"] = [str(warning.message) for warning in caught if "which tfkit needs" in str(warning.message)]
    return result


def main() -> None:
    for name in sys.argv[1:] or FEATURES:
        reader, writer = os.pipe()
        if os.fork() == 0:
            with tempfile.TemporaryDirectory() as folder:
                os.write(writer, json.dumps(report(name, Path(folder))).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            print(stream.read(), flush=True)
        os.wait()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
