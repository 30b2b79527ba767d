"""ONNX: graphs for ONNX Runtime and similar engines, written by torch's exporter. See https://onnx.ai/onnx/.

FILE.onnx is the full model. If the model can be decoded token by token, the entry `parts` of its metadata names a
folder next to it. The folder contains prefill.onnx, decode.onnx, with an encoder read.onnx (see
`exported_programs.py`), and weights.data, which stores the weights of all graphs once. The folder gets a new name at
each export, so FILE.onnx can never be combined with the folder of a different model. A graph changes nothing in place:
it takes caches as `cache_NODE_LAYER_NUMBER`, and returns them as `new_cache_NODE_LAYER_NUMBER`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from tfkit.building.builder import graph_of
from tfkit.decoding.modules import initial_value_names
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.decode_split import split_for_decoding
from tfkit.tools.common.atomic_files import extras_of
from tfkit.tools.export.exported_programs import (
    MODEL,
    READ,
    Cache,
    Programs,
    export_errors,
    model_programs,
    program_arguments,
    returning_modules,
)
from tfkit.tools.export.failing_component import exporter_error, operation_module_path, suppress_messages
from tfkit.tools.export.formats import ComponentCall, Format, Inputs, Opened, model_metadata
from tfkit.torch_private.tensors import map_nested

OPSET = 20
SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of the metadata in which the exporter records the modules of an operation."""
FOLDER = "session.model_external_initializers_file_folder_path"
"""Option of ONNX Runtime: the folder with the weights of a graph that is in memory."""
PARTS, WEIGHTS = "parts", "weights.data"
"""Metadata key of the folder of additional files, and name of its file of weights."""
MAX_GRAPH_BYTES = 2**30
"""Maximum bytes of weights inside a graph; protobuf messages are limited to 2 GiB."""


class Onnx(Format):
    """ONNX graphs with dynamic shapes: the full sequence, and the steps of cached decoding."""

    name = "onnx"
    suffixes = (".onnx",)
    description = "for onnxruntime"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        _check_installed()
        if any(tensor.dtype == torch.bfloat16 for tensor in model.parameters()):
            return [Diagnostic("ONNX Runtime does not compute in bfloat16 on the CPU", help="use --dtype float32")]
        return export_errors(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        _check_installed()
        import onnx_ir as ir

        exported = model_programs(model, inputs, in_place=False)
        size = sum(tensor.nbytes for tensor in exported[MODEL].state_dict.values())
        parts = extras_of(path) if len(exported) > 1 or size > MAX_GRAPH_BYTES else None
        if parts is not None:
            parts.mkdir()
        written: dict[Any, Any] = {}
        for name, program in exported.items():
            outputs = (
                graph_of(model).outputs if name != READ else initial_value_names(split_for_decoding(graph_of(model)))
            )
            try:
                graph = translated_program(program, outputs)
            except Exception as error:
                raise exporter_error(
                    model, operation_module_path(program, error), error, "torch's exporter to ONNX"
                ) from error
            graph.metadata_props.update(
                model_metadata(model) | ({PARTS: parts.name} if parts and name == MODEL else {})
            )
            for key, value in graph.graph.initializers.items():
                value.const_value = _reused_tensor(value.const_value, written.get(_content_key(value.const_value)), key)
            external = f"{parts.name}/{WEIGHTS}" if parts and name == MODEL else None
            ir.save(graph, path if name == MODEL else extras_of(path) / f"{name}.onnx", external_data=external)
            if name == MODEL and len(exported) > 1:
                tensors = [value.const_value for value in ir.load(path).graph.initializers.values()]
                written = {_content_key(tensor): tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Sessions(path, model)


def _check_installed() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise SpecError(Diagnostic(f"onnx needs {listing(missing)}", help='pip install "tfkit[export]"'))


def translated_program(program: ExportedProgram, outputs: Sequence[str]) -> Any:
    """Translate a program into a model of `onnx_ir` that shares its weights. The program is modified."""
    from tfkit.tools.export.operations import TRANSLATIONS

    assert program.example_inputs is not None
    _, arguments = program.example_inputs
    _prepare_program(program)
    with suppress_messages():
        exported = torch.onnx.export(
            program,
            kwargs=arguments,
            output_names=[*outputs, *_new_caches(program)],
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes={name: _dynamic_sizes(name, value) for name, value in arguments.items()},
            custom_translation_table=TRANSLATIONS,
        )
    assert exported is not None
    for node in exported.model.graph:
        scopes = node.metadata_props.get(SCOPES, "[]")
        node.metadata_props.clear()
        node.metadata_props[SCOPES] = scopes
    return exported.model


def _prepare_program(program: ExportedProgram) -> None:
    """Change operations that the exporter cannot handle."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.flatten.using_ints):
        # The memory layout of torch's attention allows a view of the result; the layout of the translation does not.
        with graph.inserting_before(node):
            layout = {"memory_format": torch.contiguous_format}
            dense = graph.call_function(torch.ops.aten.clone.default, (node.args[0],), layout)
        dense.meta = dict(node.args[0].meta)
        node.args = (dense, *node.args[1:])
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        node.meta["nn_module_stack"] = {call: (_call_path(call, path), kind) for call, (path, kind) in stack.items()}


def _call_path(call: str, path: str) -> str:
    """Return the path of a module; a second call gets a unique path, because the exporter records only paths."""
    return f"{path}@" if "@" in call else path


def _content_key(tensor: Any) -> Any:
    """Return a key that is equal only for equal tensors."""
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()


def _reused_tensor(tensor: Any, written: Any, name: str) -> Any:
    """Return the location of a tensor that the file already contains. The exporter renames some tensors."""
    import onnx_ir as ir

    if written is None:
        return tensor
    location = (WEIGHTS, written.offset, written.length, written.dtype)
    return ir.ExternalTensor(*location, shape=written.shape, name=name, base_dir=Path(written.path).parent)


def _new_caches(program: ExportedProgram) -> Iterator[str]:
    """Yield the names of the caches that a program returns."""
    returns = program.call_spec.out_spec
    assert program.example_inputs is not None
    if returns is None or "cache" not in program.example_inputs[1]:
        return
    caches = returns.child(1)
    for name, layers in zip(caches.context, caches.children(), strict=True):
        for layer, tensors in enumerate(layers.children()):
            yield from (f"new_{_cache_name(name, layer, i)}" for i in range(tensors.num_children))


def _cache_name(name: str, layer: int, i: int) -> str:
    """Return the name of a cache in a graph."""
    return f"cache_{name.replace('.', '_')}_{layer}_{i}"


def _dynamic_sizes(name: str, value: Any) -> Any:
    """Name the dynamic sizes of an argument."""
    if isinstance(value, dict):
        return map_nested(lambda _: {0: "batch", 2: "slots"}, value)
    if value.dim() == 1:
        return {0: "batch"}
    return {0: "batch", 1: f"{name.removesuffix('_mask')}_length"}


class _Sessions(Programs):
    """The graphs of a file, run by ONNX Runtime on the CPU."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        import onnx_ir as ir

        super().__init__(graph_of(model))
        self._path = path
        self._parts = ir.load(path).metadata_props.get(PARTS, "")
        self._names = list(model.state_dict())
        self._sessions: dict[str, Any] = {}

    def session(self, name: str) -> Any:
        if name not in self._sessions:
            parts = self._path.parent / self._parts
            file = self._path if name == MODEL else parts / f"{name}.onnx"
            self._sessions[name] = _open_session(file, file.parent)
        return self._sessions[name]

    def takes(self, name: str) -> list[str]:
        return ["cache", *(argument.name for argument in self.session(name).get_inputs())]

    def run(self, name: str, arguments: dict[str, Any]) -> list[Tensor]:
        """Run a program and return its results. The caches in `arguments` are updated in place."""
        cache: Cache = arguments.get("cache", {})
        locations = {
            _cache_name(name, layer, i): (tensors, i)
            for name, layers in cache.items()
            for layer, tensors in enumerate(layers)
            for i in range(len(tensors))
        }
        feeds = {key: value for key, value in arguments.items() if key != "cache"}
        feeds |= {key: tensors[i] for key, (tensors, i) in locations.items()}
        session = self.session(name)
        values = session.run(None, {slot.name: feeds[slot.name].numpy() for slot in session.get_inputs()})
        results = []
        for slot, value in zip(session.get_outputs(), values, strict=True):
            if slot.name.removeprefix("new_") in locations:
                tensors, i = locations[slot.name.removeprefix("new_")]
                tensors[i] = torch.from_numpy(value)
            else:
                results.append(torch.from_numpy(value))
        return results

    def weights(self) -> Mapping[str, Tensor]:
        import onnx_ir as ir

        initializers = ir.load(self._path).graph.initializers
        return {
            key: torch.from_numpy(tensor.numpy().copy())
            for key in self._names
            if key in initializers and (tensor := initializers[key].const_value) is not None
        }

    def outputs(self, inputs: Inputs, calls: Mapping[str, ComponentCall]) -> Mapping[str, Tensor]:
        import onnx_ir as ir

        model = ir.load(self._path)
        outside, results = object(), set(model.graph.outputs)
        inside: dict[Any, Mapping[str, str]] = {outside: {}}
        for node in model.graph:
            inside[node] = {scope: scope for scope in ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))[:-1]}

        def users(node: Any) -> list[Any]:
            return [outside] if node is outside or results & set(node.outputs) else list(node.successors())

        reached = {
            node: paths for node, paths in returning_modules(inside, users).items() if paths and len(node.outputs) == 1
        }
        targets = {node.outputs[0]: paths for node, paths in reached.items()}
        model.graph.outputs.extend(value for value in targets if value not in results)
        session = _open_session(ir.to_proto(model).SerializeToString(), self._path.parent)
        arguments = program_arguments(self.graph, inputs, [scope.name for scope in session.get_inputs()])
        names = [value.name for value in targets]
        values = session.run(names, {key: value.numpy() for key, value in arguments.items()})
        return {
            path: torch.from_numpy(value)
            for value, paths in zip(values, targets.values(), strict=True)
            for path in paths
        }


def _open_session(graph: Path | bytes, folder: Path) -> Any:
    """Open a session of ONNX Runtime for a graph whose weights are in `folder`."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if isinstance(graph, bytes):
        options.add_session_config_entry(FOLDER, str(folder))
    return onnxruntime.InferenceSession(graph, options)
