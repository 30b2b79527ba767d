"""Use folders as a user of transformers does, in a process without tfkit, and print the failed checks by folder.

Arguments: the folder for copies of the code, then the folders of models.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

os.environ |= {"HF_MODULES_CACHE": sys.argv[1], "HF_HUB_OFFLINE": "1"}
blocked: dict[str, Any] = sys.modules
blocked["tfkit"] = None
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

transformers.logging.set_verbosity_error()
MAX_TOKENS = 20
"""Maximum number of generated tokens."""


def ids(model: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, 8), generator=generator)


def failures(model: Any) -> Iterator[str]:
    single, batch = ids(model, 0), torch.cat([ids(model, 0), ids(model, 1)])
    mask = torch.ones_like(batch)
    mask[0, :3] = 0
    decodes = isinstance(model, transformers.GenerationMixin)
    tokens = generated(model, single, batch, mask) if decodes else ()
    for name, ours, theirs in [*tokens, *computed(model, batch, mask)]:
        if not torch.equal(ours, theirs):
            yield name
    if len(model(batch, output_hidden_states=True).hidden_states) != model.config.num_hidden_layers + 1:
        yield "hidden states"
    if (difference := gradients(model, batch, mask)) > 1e-6:
        yield f"checkpointing changes a gradient by {difference}"
    model.resize_token_embeddings(model.config.vocab_size + 3)
    if model(batch).logits.shape[-1] != model.lm_head.weight.shape[0]:
        yield "resize_token_embeddings"
    model.bfloat16()
    if decodes:
        model.generate(batch, attention_mask=mask, max_new_tokens=2)


def generated(model: Any, single: Tensor, batch: Tensor, mask: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield pairs of tokens that must be equal, such as with a cache and without."""
    count = min(MAX_TOKENS, getattr(model.config, "max_len", 99) - 10)
    greedy: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
    beams = greedy | {"num_beams": 3, "num_return_sequences": 2, "attention_mask": mask}
    yield "greedy", model.generate(single, **greedy), model.generate(single, use_cache=False, **greedy)
    ragged = model.generate(batch, attention_mask=mask, **greedy)
    yield "padding", ragged, model.generate(batch, attention_mask=mask, use_cache=False, **greedy)
    yield "a row alone", ragged[0, 8:], model.generate(batch[:1, 3:], **greedy)[0, 5:]
    yield "beams", model.generate(batch, **beams), model.generate(batch, use_cache=False, **beams)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampling = {"do_sample": True, "max_new_tokens": count, "num_return_sequences": 2, "use_cache": use_cache}
        samples.append(model.generate(batch, attention_mask=mask, **sampling))
    yield "samples", samples[0], samples[1]
    if not model._is_stateful:
        expected = model.generate(single, **greedy)
        yield "prompt lookup", model.generate(single, prompt_lookup_num_tokens=3, **greedy), expected
        yield "assisted", model.generate(single, assistant_model=model, **greedy), expected


def computed(model: Any, batch: Tensor, mask: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield pairs of values that must be equal."""
    output = model(batch, attention_mask=mask, output_hidden_states=True)
    vectors = model.get_input_embeddings()(batch)
    yield "inputs_embeds", model(inputs_embeds=vectors, attention_mask=mask).logits, output.logits
    yield "the body", model.base_model(batch, attention_mask=mask).last_hidden_state, output.hidden_states[-1]
    if not isinstance(model, transformers.GenerationMixin):
        return
    last_logits = model(batch, attention_mask=mask, logits_to_keep=2).logits
    yield "logits_to_keep", last_logits, output.logits[:, -2:]
    inside = torch.ones_like(batch)
    inside[0, 3] = 0
    rest = torch.cat([batch[:1, :3], batch[:1, 4:]], dim=1)
    difference = (model(batch, attention_mask=inside).logits[0, 4:] - model(rest).logits[0, 3:]).abs().max()
    yield "padding between tokens", difference > 1e-4, torch.tensor(False)


def gradients(model: Any, batch: Tensor, mask: Tensor) -> float:
    """Return the largest difference of a gradient with checkpointing and without."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    results = []
    for checkpointing in (False, True):
        model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
        model.zero_grad()
        model(batch, attention_mask=mask, labels=batch).loss.backward()
        results.append({name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None})
    model.gradient_checkpointing_disable()
    model.eval()
    assert results[0].keys() == results[1].keys()
    return max(float((gradient - results[1][name]).abs().max()) for name, gradient in results[0].items())


for folder in sys.argv[2:]:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto = next(name for name in config.auto_map if name.startswith("AutoModelFor"))
    opened: Any = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    opened.eval()
    if isinstance(opened, transformers.GenerationMixin):
        opened.generation_config = transformers.GenerationConfig(pad_token_id=0)
    print(json.dumps([os.path.basename(folder), *failures(opened)]), flush=True)
