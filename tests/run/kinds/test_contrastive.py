"""Pairs of texts: the data, the losses and gradients of sentence-transformers, and metrics of retrieval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit.cli import main
from tfkit.errors import Invalid, SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.kinds.contrastive import ContrastiveConfig, ContrastiveLoss, Embeddings, MRRConfig, RecallConfig
from tfkit.run.kinds.text_pairs import NumeralsConfig, examples_of, number_in_words
from tfkit.run.training.loop import Trainer
from tfkit.run.training.processes import check_count

from ..training.runs import PLUGINS, WITH_PLUGINS, Memory, trained

ORACLE = json.loads((Path(__file__).parent / "multiple_negatives.json").read_text(encoding="utf-8"))
ROWS = [
    {"question": "2+3", "answer": "five", "distractor": "six"},
    {"question": "né→", "answer": "été, oui", "distractor": "no"},
    {"question": "1+4", "answer": "five", "distractor": "né→"},
    {"question": "a", "answer": "bcd", "distractor": "bc"},
    {"question": "long, long", "answer": "z", "distractor": "five"},
]
MODEL: dict[str, Any] = {
    "name": "twins",
    "d_model": 16,
    "vocab_size": 256,
    "max_len": 20,
    "norm": "layernorm",
    "dropout": 0.2,
    "inputs": ["query", "document"],
    "outputs": ["query_vector", "document_vector"],
    "graph": {
        "query_embedding": {"block": "embedding", "input": "query", "position": "learned"},
        "query_encoder": {
            "block": "encoder",
            "n_layers": 1,
            "attention": {"kind": "mha", "n_heads": 2},
            "ffn": {"kind": "gelu", "d_ff": 32},
        },
        "query_vector": {"block": "pooler", "select": "mean"},
        "document_embedding": {"same": "query_embedding", "input": "document"},
        "document_encoder": {"same": "query_encoder"},
        "document_vector": {"same": "query_vector"},
    },
}


def run_of(folder: Path, *sets: str, data: str = "", model: dict[str, Any] = MODEL) -> Run:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    text = f"""\
tfkit: 1
name: pairs
seed: 3
model: {json.dumps(model)}
data:
  kind: text_pairs
  files: {{train: rows.jsonl, val: rows.jsonl}}
  query: question
  document: answer
  tokenizer: bytes
{data}
batch: {{sequences: 4, length: 12}}
steps: 3
loss: contrastive
optimizer: {{kind: adamw, lr: 1e-2}}
eval: {{every: 3, splits: {{val: all}}, metrics: [objective, recall, mrr]}}
"""
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_run(folder / "run.yaml", PLUGINS, sets=[*sets])


class Vectors(nn.Module):
    """A model whose outputs are its parameters."""

    def __init__(self, *vectors: Tensor) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(map(nn.Parameter, vectors))

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(self.vectors)


def oracle_vectors(count: int) -> list[Tensor]:
    """Queries, documents and further negatives of five pairs, as in the oracle."""
    return [
        torch.sin(torch.arange(15, dtype=torch.float64) * 1.7 + 0.9 * side).view(5, 3) * (1 + side)
        for side in range(count)
    ]


@pytest.mark.parametrize("name", ORACLE)
def test_loss_and_gradients_are_those_of_sentence_transformers(name: str) -> None:
    expected = ORACLE[name]
    model = Vectors(*oracle_vectors(expected["columns"]))
    config = ContrastiveConfig(symmetric=expected["symmetric"], temperature=1 / expected["scale"])
    loss = ContrastiveLoss(model, config)({}, torch.arange(5)) / 5
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
    gradients = torch.stack([vectors.grad for vectors in model.vectors if vectors.grad is not None])
    torch.testing.assert_close(gradients, torch.tensor(expected["gradients"], dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ORACLE)
def test_the_oracle_is_what_sentence_transformers_computes(name: str) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    expected = ORACLE[name]
    vectors = [tensor.requires_grad_() for tensor in oracle_vectors(expected["columns"])]
    directions = ("query_to_doc", "doc_to_query")[: 1 + expected["symmetric"]]
    options: dict[str, Any] = {"partition_mode": "per_direction"} if expected["symmetric"] else {}
    loss = losses.MultipleNegativesRankingLoss(None, scale=expected["scale"], directions=directions, **options)
    value = loss.compute_loss_from_embeddings(vectors, None)
    value.backward()
    assert value.item() == pytest.approx(expected["loss"], abs=1e-12)
    gradients = [vector.grad.tolist() for vector in vectors]
    np.testing.assert_allclose(gradients, expected["gradients"], atol=1e-12)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_repeated_document_is_no_negative(symmetric: bool) -> None:
    queries, documents, negatives = oracle_vectors(3)
    documents[3] = documents[1]
    loss = ContrastiveLoss(Vectors(queries, documents, negatives), ContrastiveConfig(symmetric=symmetric))
    targets = torch.tensor([7, 2, 0, 2, 9])
    cosines = torch.stack(
        [torch.cosine_similarity(query[None], torch.cat([documents, negatives])) for query in queries]
    )
    total = torch.tensor(0.0, dtype=torch.float64)
    for i in range(5):
        rows = [cosines[i, j] / 0.05 for j in range(10) if j == i or j >= 5 or targets[j] != targets[i]]
        columns = [cosines[j, i] / 0.05 for j in range(5) if j == i or targets[j] != targets[i]]
        nats = [torch.logsumexp(torch.stack(scores), 0) - cosines[i, i] / 0.05 for scores in (rows, columns)]
        total = total + (sum(nats) / 2 if symmetric else nats[0])
    torch.testing.assert_close(loss({}, targets), total)


def test_scores_are_computed_in_float32() -> None:
    vectors = [tensor.float() for tensor in oracle_vectors(2)]
    loss, targets = ContrastiveLoss(Vectors(*vectors), ContrastiveConfig()), torch.arange(5)
    expected = ContrastiveLoss(Vectors(*oracle_vectors(2)), ContrastiveConfig())({}, targets).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert loss({}, targets).item() == pytest.approx(expected, rel=1e-6)
    half = ContrastiveLoss(Vectors(*(tensor.bfloat16() for tensor in vectors)), ContrastiveConfig())
    assert half({}, targets).dtype == torch.float32


@pytest.mark.parametrize("targets", [None, torch.zeros(5, 2).long(), torch.zeros(5), torch.arange(5) - 1])
def test_targets_must_be_numbers_of_documents(targets: Tensor | None) -> None:
    with pytest.raises(Invalid, match="needs the number of a document as the target of each example"):
        ContrastiveLoss(Vectors(*oracle_vectors(2)), ContrastiveConfig())({}, targets)


def pairs_model(**fields: Any) -> fx.GraphModule:
    """Return a model of logits of pairs."""
    logits = {"block": "contrast", "inputs": MODEL["outputs"], **fields}
    model = {name: value for name, value in MODEL.items() if name not in ("outputs", "dropout")}
    graph = {**MODEL["graph"], "logits": logits}
    spec = {"tfkit": 1, "requires": ["tfkit-media"], **model, "graph": graph}
    return tfkit.build(tfkit.load(spec, plugins=WITH_PLUGINS))


PAIR_INPUTS = {name: torch.randint(256, (5, 4), generator=torch.Generator().manual_seed(3)) for name in MODEL["inputs"]}


def test_the_softmax_loss_of_logits_is_that_of_clip() -> None:
    model = pairs_model()
    expected = transformers.models.clip.modeling_clip.image_text_contrastive_loss(model(**PAIR_INPUTS))
    torch.testing.assert_close(ContrastiveConfig().build(model)(PAIR_INPUTS, torch.arange(5)) / 5, expected)


@pytest.mark.parametrize("targets", [[0, 1, 2, 3, 4], [3, 1, 3, 0, 2]])
def test_the_sigmoid_loss_of_logits_is_that_of_siglip(targets: list[int]) -> None:
    model = pairs_model(bias=-2.0)
    logits = model(**PAIR_INPUTS)
    pairs = [(i, j) for i in range(5) for j in range(5) if i == j or targets[i] != targets[j]]
    expected = torch.stack([-torch.log(torch.sigmoid(logits[i, j] * (1 if i == j else -1))) for i, j in pairs]).sum()
    loss = ContrastiveConfig(form="sigmoid").build(model)
    torch.testing.assert_close(loss(PAIR_INPUTS, torch.tensor(targets)), expected)


def test_logits_of_pairs_have_a_learned_temperature() -> None:
    with pytest.raises(Invalid, match="`temperature` has no effect: `logits` returns logits of pairs"):
        ContrastiveConfig(temperature=0.05).build(pairs_model())


def test_examples_have_their_texts_and_the_number_of_their_document(tmp_path: Path) -> None:
    model = {**MODEL, "inputs": [*MODEL["inputs"], "negative"], "outputs": [*MODEL["outputs"], "negative_vector"]}
    third = {f"negative_{part}": {"same": f"query_{part}"} for part in ("embedding", "encoder", "vector")}
    third["negative_embedding"]["input"] = "negative"
    run = run_of(tmp_path, data="  negative: distractor", model={**model, "graph": {**MODEL["graph"], **third}})
    batch = run.data.examples("train", "sequential").batch(np.array([4, 0, 2, 1]))
    assert batch.targets is not None
    assert batch.targets.tolist() == [3, 0, 0, 1]
    for name, column in (("query", "question"), ("document", "answer"), ("negative", "distractor")):
        texts = [
            bytes(ids[mask].tolist()).decode() for ids, mask in zip(batch.inputs[name], batch.masks[name], strict=True)
        ]
        assert texts == [ROWS[index][column] for index in (4, 0, 2, 1)]
    assert run.data.examples("train", "sequential").positions == 4 + 10 + 6 + 3 + 10  # type: ignore[attr-defined]
    memory, _ = trained(run)
    assert memory.losses[-1] < memory.losses[0]


def test_a_document_has_the_same_number_in_all_splits() -> None:
    pairs = [{"query": [1], "document": [token]} for token in (7, 8, 9)]
    examples = examples_of({"train": pairs[:2], "val": [pairs[2], pairs[0]]})
    assert [part.documents.tolist() for part in examples.values()] == [[0, 1], [2, 0]]


def test_a_long_text_is_cut_omitted_or_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"line 2 has 10 positions, but `batch\.length` is 9"):
        run_of(tmp_path, "batch.length=9")
    cut = run_of(tmp_path, "batch.length=3", "data.long=cut").data.examples("train", "sequential")
    assert cut.batch(np.arange(5)).inputs["document"].shape == (5, 3)
    assert cut.batch(np.arange(5)).targets.tolist() == [0, 1, 0, 2, 3]  # type: ignore[union-attr]
    examples = run_of(tmp_path, "batch.length=9", "data.long=skip").data.examples("train", "sequential")
    assert examples.batch(np.arange(3)).targets.tolist() == [0, 0, 1]  # type: ignore[union-attr]


def test_a_negative_that_equals_the_document_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must be a text that differs from `answer`"):
        run_of(tmp_path, data="  negative: answer")


def test_the_same_text_twice_has_two_dropouts(tmp_path: Path) -> None:
    run = run_of(tmp_path, "data.document=question", "batch.sequences=5")
    model = tfkit.build(run.graph).train()
    batch = run.data.examples("train", "sequential").batch(np.arange(5))
    inputs = {name: torch.from_numpy(ids) for name, ids in batch.inputs.items()}
    assert torch.equal(inputs["query"], inputs["document"])
    queries, documents = model(**inputs)
    assert not torch.isclose(queries, documents).all(1).any()
    queries, documents = model.eval()(**inputs)
    assert torch.equal(queries, documents)


def test_metrics_search_all_distinct_documents_of_the_split() -> None:
    generator = torch.Generator().manual_seed(5)
    targets = torch.tensor([4, 1, 4, 0, 9, 1, 7])
    documents = torch.randn(10, 3, generator=generator, dtype=torch.float64)[targets]
    queries = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    distinct = {int(target): documents[index] for index, target in enumerate(targets)}
    ranks = []
    for query, target in zip(queries, targets.tolist(), strict=True):
        scores = {number: float(torch.cosine_similarity(query, vector, 0)) for number, vector in distinct.items()}
        ranks.append(1 + sum(score > scores[target] for score in scores.values()))
    assert len({*ranks}) > 2
    vectors = F.normalize(torch.stack([queries, documents], 1), dim=-1)
    for config, expected in (
        (RecallConfig(), np.mean(np.array(ranks) == 1)),
        (RecallConfig(at=3), np.mean(np.array(ranks) <= 3)),
        (MRRConfig(), np.mean(1 / np.array(ranks))),
    ):
        metric = config.build(None)  # type: ignore[arg-type]
        ignored = torch.where(torch.arange(9) < 7, F.pad(targets, (0, 2)), -100)[:, None]
        values = torch.cat([vectors, vectors[:2].flip(1)])[:, None]
        parts = [metric.sums(values[rows], ignored[rows]) for rows in (slice(0, 3), slice(3, 9))]
        assert metric.compute(parts[0] + parts[1]) == pytest.approx(expected)


def test_equal_vectors_of_different_documents_do_not_count_as_found() -> None:
    equal = Embeddings(torch.ones(4, 2, 3).double(), torch.tensor([2, 0, 5, 2]))
    assert equal.ranks().tolist() == [3, 3, 3, 3]


def test_an_evaluation_does_not_depend_on_the_batches(tmp_path: Path) -> None:
    numbers = []
    for size in (2, 5):
        trainer = Trainer(run_of(tmp_path, f"batch.sequences={size}"), Memory(), until=0)
        numbers.append({name: value for name, value in trainer.evaluate().items() if name != "val.objective"})
    assert numbers[0] == pytest.approx(numbers[1])
    assert 0 < numbers[0]["val.mrr"] < 1


def test_a_batch_is_never_divided(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="`contrastive` must be computed from all sequences of a step together"):
        check_count(run_of(tmp_path, "machine.micro_batch=2"), 1)
    with pytest.raises(SpecError, match="must be computed from all sequences of a step together"):
        check_count(run_of(tmp_path), 2)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["model.outputs=[query_vector, document_vector, document_encoder]"],
            "needs a model that returns a vector of each query and of its document",
        ),
        (["loss={kind: contrastive, form: sigmoid}"], "`form: sigmoid` needs logits of pairs"),
        (["loss={kind: contrastive, form: sigmoid, symmetric: true}"], "`symmetric` has no effect: `form` is sigmoid"),
    ],
)
def test_models_and_losses_that_do_not_fit_are_errors(sets: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        Trainer(run_of(tmp_path, *sets), Memory(), until=0)


@pytest.mark.slow
def test_a_run_of_pairs_passes_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "numerals", "--set", "data.numbers=300", "--no-plugins"]) == 0, capsys.readouterr().out


def test_metrics_of_logits_are_not_computed_from_vectors(tmp_path: Path) -> None:
    trainer = Trainer(run_of(tmp_path, "eval.metrics=[accuracy]"), Memory(), until=0)
    with pytest.raises(SpecError, match="`accuracy` needs logits of ids, which `query_vector` does not return"):
        trainer.evaluate()


def test_vectors_may_be_narrower_than_the_number_of_documents() -> None:
    run = load_run("numerals", PLUGINS, sets=["data.numbers=100"])
    assert run.graph.node("query_vector").output.width == 64


def test_a_metric_of_retrieval_needs_vectors(tmp_path: Path) -> None:
    model = {**MODEL, "outputs": ["query_vector", "document_encoder", "document_vector"]}
    metric = RecallConfig().build(None)  # type: ignore[arg-type]
    built = tfkit.build(tfkit.load({"tfkit": 1, **model}, plugins=PLUGINS))
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(Invalid, match="need a model that returns a vector of each query and of its document"):
        metric.values(built, {"query": ids, "document": ids}, torch.arange(2), seed=0, first=0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (101, "one hundred one"),
        (4002, "four thousand two"),
        (95_017, "ninety-five thousand seventeen"),
        (720_386, "seven hundred twenty thousand three hundred eighty-six"),
    ],
)
def test_numbers_in_words(number: int, text: str) -> None:
    assert number_in_words(number) == text


def test_numerals_are_in_one_split() -> None:
    data = NumeralsConfig(numbers=200).build(None)
    pairs = {}
    for split in data.splits:
        examples = data.examples(split, "sequential")
        batch = examples.batch(np.arange(len(examples)))
        texts = {
            name: [data.tokenizer.decode(row[mask].tolist()) for row, mask in zip(ids, batch.masks[name], strict=True)]  # type: ignore[union-attr]
            for name, ids in batch.inputs.items()
        }
        assert texts["query"] == [number_in_words(int(digits)) for digits in texts["document"]]
        pairs[split] = {*texts["document"]}
    assert len(pairs["train"]) == 180
    assert not pairs["train"] & pairs["val"]
