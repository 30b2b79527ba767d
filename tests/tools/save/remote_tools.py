"""Train and evaluate a folder with the tools of transformers, in a process without tfkit, and print the results.

Argument: the folder with the model and rows.json, the token ids of four sequences.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

blocked: dict[str, Any] = sys.modules
blocked["tfkit"] = None
warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

folder = Path(sys.argv[1])
path = str(folder / "model")
rows = json.loads((folder / "rows.json").read_text())
options: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,  # TRL's default is True
    "logging_steps": 1,
    "disable_tqdm": True,
}


def opened() -> Any:
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)


def first_loss(trainer: Any) -> float:
    """Train, and return the loss of the first step, which must change the weights."""
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))
    return float(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))


tokenizer = AutoTokenizer.from_pretrained(path)
tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
tensors = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
arguments = TrainingArguments(str(folder / "trainer"), **options)
numbers: dict[str, Any] = {"trainer": first_loss(Trainer(opened(), arguments, train_dataset=tensors))}
AutoModelForCausalLM.from_pretrained(folder / "trainer" / "checkpoint-1", trust_remote_code=True)

config = SFTConfig(str(folder / "sft"), gradient_checkpointing=True, **options)
data = Dataset.from_list([{"input_ids": row} for row in rows])
numbers["sft"] = first_loss(SFTTrainer(opened(), config, train_dataset=data, processing_class=tokenizer))

texts = [tokenizer.decode(row) for row in rows]
os.environ["TOKENIZERS_PARALLELISM"] = "false"
evaluated = HFLM(pretrained=path, trust_remote_code=True, prefix_token_id=0, device="cpu", batch_size=2)
requests = [Instance("loglikelihood", {}, (text[:4], text[4:]), index) for index, text in enumerate(texts)]
numbers["lm_eval"] = [value for value, _ in evaluated.loglikelihood(requests, disable_tqdm=True)]
print(json.dumps(numbers))
