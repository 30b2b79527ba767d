import gzip
import json
import os
import re
import subprocess
import sys
import time
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest

import tfkit
from tfkit.tools.profile.models import profile_models
from tfkit.tools.profile.profiled_step import named_parts
from tfkit.tools.profile.torch_trace import adapt_events, write_trace

pytestmark = pytest.mark.slow
pytest.importorskip("torch_tb_profiler", reason="TensorBoard is not installed: pip install torch-tb-profiler")

SMALL_SIZES = (
    "d_model=32",
    "decoder.n_layers=2",
    "decoder.attention.n_heads=2",
    "decoder.ffn.d_ff=64",
    "vocab_size=64",
)
VIEWS = ["Overview", "Operator", "Trace", "Memory", "Module"]
PATIENCE = 60
PLUGIN = "/data/plugin/pytorch_profiler"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder that the tool has written, but the model is."""
    folder = tmp_path_factory.mktemp("tensorboard") / "log"
    graph = tfkit.load("gpt2", sets=SMALL_SIZES)
    profile_models([graph], device="cpu", batch=2, length=8, steps=2, warmup=1, directory=folder)
    model = tfkit.build(graph, device="meta")
    return folder, model


def trace_of(folder):
    (path,) = folder.glob("*/*.pt.trace.json.gz")
    return path


class Server:
    """A TensorBoard that shows a folder on a free port of this machine."""

    def __init__(self, folder, log):
        self._log = log
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
        command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "NO_PROXY": "*"})
        self._open = build_opener(ProxyHandler({})).open

    def __enter__(self):
        try:
            actual = self._until(lambda: re.search(r"http://127\.0\.0\.1:\d+", self._log.read_text()))
            self._address = actual[0]
            self._until(lambda: (runs := self.ask(f"{PLUGIN}/runs"))["runs"] and not runs["loading"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, route, **query):
        """What a route answers, as data."""
        with self._open(f"{self._address}{route}?{urlencode(query)}", timeout=PATIENCE) as answer:
            data = answer.read()
        return json.loads(gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data)

    def _until(self, actual):
        """Wait for something that is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            if answer := actual():
                return answer
            time.sleep(0.1)
        raise AssertionError(f"TensorBoard does not serve the run:\n{self._log.read_text()}")


@pytest.fixture(scope="module")
def server(written):
    folder, _ = written
    with Server(folder, folder.parent / "tensorboard.txt") as server:
        yield server


@pytest.fixture(scope="module")
def ask(server):
    """Asks the plugin about the only run."""
    (run,) = server.ask(f"{PLUGIN}/runs")["runs"]
    (worker,) = server.ask(f"{PLUGIN}/workers", run=run, view="Overview")
    (span,) = server.ask(f"{PLUGIN}/spans", run=run, worker=worker) or [None]
    options = {"run": run, "worker": worker} | ({"span": span} if span is not None else {})
    return lambda route, **query: server.ask(f"{PLUGIN}/{route}", **options, **query)


def test_the_plugin_knows_the_run(server):
    assert server.ask(f"{PLUGIN}/runs") == {"runs": ["gpt2"], "loading": False}
    assert server.ask(f"{PLUGIN}/views", run="gpt2") == VIEWS


def test_the_overview_has_steps(ask):
    overview = ask("overview")
    times = {row["name"]: row["value"] for row in overview["performance"][0]["children"]}
    assert overview["performance"][0]["value"] > 0
    assert times["CPU Exec"] > 0
    assert len(overview["steps"]["rows"]) >= 1


def test_the_operators_have_times(ask):
    rows = ask("operation/table", group_by="Operation")["data"]
    times = {row["name"]: row["host_total_duration"] for row in rows}
    assert times["aten::mm"] > 0
    assert times["aten::addmm"] > 0  # GPT-2 has biases
    by_shape = ask("operation/table", group_by="OperationAndInputShape")["data"]
    assert any(row["name"] == "aten::addmm" and "[16, 32]" in str(row["input_shape"]) for row in by_shape)


def test_memory_was_recorded(ask):
    (device,) = ask("memory_curve")["metadata"]["devices"]
    assert device == "CPU"
    assert ask("memory_curve")["metadata"]["peaks"]["CPU"]
    assert len(ask("memory")["rows"]["CPU"]) > 10


def test_the_trace_is_the_one_that_was_written(ask, written):
    folder, _ = written
    assert ask("trace")["traceEvents"] == read(trace_of(folder))["traceEvents"]


def test_the_module_view_speaks_of_the_spec(ask, written):
    _, model = written
    (root,) = ask("module")["data"]
    actual = {node["name"]: node for node in flat(root)}
    paths = set(named_parts(model))
    assert paths <= set(actual)
    for path in paths:  # the tree of the view is the tree of the spec
        inside = {node["name"] for node in flat(actual[path])} & paths
        assert inside == {module for module in paths if module == path or module.startswith(f"{path}.")}
    assert actual["decoder.layers.0.ffn"]["host_duration"] > 0


def flat(node):
    yield node
    for child in node["children"]:
        yield from flat(child)


def test_the_scalars_are_there(server):
    tags = server.ask("/data/plugin/scalars/tags")
    (run,) = tags
    assert {"step/milliseconds", "milliseconds/attention", "milliseconds/FFN", "memory/peak"} <= set(tags[run])
    points = server.ask("/data/plugin/scalars/scalars", run=run, tag="step/milliseconds")
    assert len(points) == 2
    assert all(value > 0 for _, _, value in points)


def test_an_unknown_run_is_an_error(server):
    with pytest.raises(HTTPError, match="404"):
        server.ask(f"{PLUGIN}/views", run="nobody")


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


LAUNCHING = ("aten::mm", "aten::addmm")


def with_kernels(trace):
    """Make a trace what it would be with a GPU: each matrix product launches a kernel."""
    launches = [event for event in trace["traceEvents"] if event.get("name") in LAUNCHING]
    for number, event in enumerate(launches):
        shared = {"External id": event["args"]["External id"], "correlation": number + 1}
        host = {"ph": "X", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + 0.1, "dur": 0.1}
        call = {**host, "cat": ("cuda_runtime", "cuda_driver")[number % 2], "name": "launch", "args": shared}
        device = {"device": 0, "stream": 7, "grid": [1, 1, 1], "block": [32, 1, 1], "blocks per SM": 1.0}
        more = {"registers per thread": 32, "shared memory": 0, "est. achieved occupancy %": 10}
        kernel = {**host, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 5, "args": shared | device | more}
        trace["traceEvents"] += [call, kernel]
    trace["deviceProperties"] = [{"id": 0, "name": "made up", "numSms": 132, "totalGlobalMem": 2**30}]
    return len(launches)


@pytest.mark.filterwarnings("ignore")  # the plugin's own imports
def test_kernels_stand_below_the_operators_that_launch_them(written, tmp_path):
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    folder, model = written
    path, trace = tmp_path / "made_up.pt.trace.json.gz", read(trace_of(folder))
    launched = with_kernels(trace)
    write_trace(trace, path, named_parts(model))
    data = RunProfileData.parse("made_up", None, str(path), str(tmp_path))
    profile = RunGenerator("made_up", None, data).generate_run_profile()
    rows = {row["name"]: row for row in profile.operation_table_by_name["data"]}
    assert sum(rows[name]["device_self_duration"] for name in LAUNCHING) == 5 * launched
    actual = {node["name"]: node for node in flat(profile.get_module_view()["data"][0])}
    assert actual["decoder.layers.0.ffn"]["device_duration"] == 5 * 2 * len(data.steps_names)  # two matrix products


def test_a_module_has_the_name_of_the_annotation_right_inside_it():
    def event(kind, name, start, end, thread=1):
        return {"cat": kind, "name": name, "ts": start, "dur": end - start, "tid": thread}

    events = [
        event("user_annotation", "a.b", 3, 8),
        event("python_function", "nn.Module: Outer_0", 0, 20),
        event("python_function", "nn.Module: Inner_0", 2, 9),
        event("python_function", "nn.Module: Inner_1", 10, 15),
        event("python_function", "model.py(12): forward", 2.5, 8.5),
        event("user_annotation", "not a module", 11, 14),
        event("user_annotation", "a.b", 30, 40),  # outside of every module
        event("user_annotation", "a.b", 3, 8, thread=2),
        {"ph": "i", "name": "no thread"},
    ]
    adapt_events(events, {"a.b"})
    assert [event["name"] for event in events[1:5]] == [
        "nn.Module: Outer_0",
        "nn.Module: a.b",
        "nn.Module: Inner_1",
        "model.py(12): forward",
    ]


def test_a_trace_is_compressed(tmp_path):
    path = tmp_path / "trace.json.gz"
    write_trace({"traceEvents": [{"cat": "cuda_runtime", "name": "µ"}], "schemaVersion": 1}, path, ())
    assert read(path) == {"traceEvents": [{"cat": "runtime", "name": "µ"}], "schemaVersion": 1}
