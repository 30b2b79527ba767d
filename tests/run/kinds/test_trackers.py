"""Data that W&B and MLflow receive from a run: as fakes, and as installed packages in offline mode."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.run.training.runs import RUN, write_run
from tfkit.cli import main

TRACK = "track=[{kind: wandb, mode: offline, project: sheep}, {kind: mlflow, uri: 'URI', experiment: sheep}]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, RUN + "eval: {every: 4, splits: {val: {batches: 1}}}\ncheckpoint: {every: 2}\n")
    monkeypatch.chdir(tmp_path)


def train(track: str, *words: str) -> int:
    return main(["train", "small.yaml", "-o", "out", "--set", track, *words])


def curves() -> dict[str, list[tuple[int, float]]]:
    """Return the logged numbers by name: pairs of step and value."""
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {name for line in lines for name in line} - {"step"}
    return {name: [(line["step"], line[name]) for line in lines if name in line] for name in names}


class Session:
    """A run of either service, and what it received."""

    def __init__(self) -> None:
        self.id, self.points, self.axes, self.ended = "abc", list[Mapping[str, Any]](), list[Any](), 0
        self.info = SimpleNamespace(run_id=self.id)

    def log(self, values: Mapping[str, Any]) -> None:
        self.points.append(values)

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def finish(self) -> None:
        self.ended += 1


class Client:
    """The client of MLflow, with one run."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, *, tracking_uri: str) -> None:
        self.uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Session:
            self.calls.append((method, args, kwargs))
            return Session()

        return call


def test_a_run_and_its_continuation_are_one_run_of_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    begins, session = list[dict[str, Any]](), Session()
    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    wandb = SimpleNamespace(init=lambda **options: begins.append(options) or session)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, entities=entities))
    monkeypatch.setattr(Client, "calls", [])
    assert train(TRACK, "--stop-after", "3") == 0
    assert train(TRACK) == 0
    first, second = begins
    assert (first["name"], first["mode"], first["project"], first["dir"]) == ("small", "offline", "sheep", "out")
    assert (first["config"]["model"], first["config"]["optimizer.lr"]) == ("small", 1e-2)
    assert first["config"]["model.graph.decoder.ffn.d_ff"] == 32
    assert (first["id"], first["resume"], second["id"], second["resume"]) == (None, None, "abc", "allow")
    assert session.axes == [("*", "step")] * 2
    assert session.ended == 2
    calls = [(method, kwargs) for method, _, kwargs in Client.calls]
    created = [kwargs for method, kwargs in calls if method == "create_run"]
    assert created == [{"run_name": "small"}]
    parameters = [pair for _, kwargs in calls for pair in kwargs.get("params", ())]
    assert {("model", "small"), ("optimizer.lr", "0.01")} <= set(parameters)
    sent = [metric for _, kwargs in calls for metric in kwargs.get("metrics", ())]
    for name, points in curves().items():
        assert {(point["step"], point[name]) for point in session.points if name in point} >= set(points)
        assert {(step, value) for key, value, _, step in sent if key == name} >= set(points)
    assert all(abs(milliseconds / 1000 - time.time()) < 3600 for _, _, milliseconds, _ in sent)


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in the format of LevelDB: blocks of 32 KiB, which contain fragments of records."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        size, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        if offset % 2**15 > 2**15 - 7 or kind == 0:
            offset += -offset % 2**15
            continue
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a complete record, or its last fragment
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the services
def test_offline_modes_have_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    uri = f"sqlite:///{Path('runs.db').absolute()}"
    track = TRACK.replace("URI", uri)
    assert train(track, "--stop-after", "4") == 0
    assert train(track) == 0
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("sheep").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["optimizer.lr"]) == ("small", "FINISHED", "0.01")
    for name, points in curves().items():
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((point.step, point.value) for point in history) == points
    points, config = list[dict[str, Any]](), dict[str, Any]()
    for path in sorted(Path("out/wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, records(path.read_bytes())):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [items] if items else []
    assert config["optimizer.lr"] == 1e-2
    for name, expected in curves().items():
        assert [(point["step"], point[name]) for point in points if name in point] == expected


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        assert train(f"track={name}") == 1
        error = capsys.readouterr().err
        assert f"`{name}` needs the package" in error
        assert f'pip install "tfkit[{name}]"' in error
