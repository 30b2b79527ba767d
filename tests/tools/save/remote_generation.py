"""Use folders as a user of transformers would, in a process without tfkit, and print failed checks by folder.

Arguments: the folder for copies of the code, then the folders of models. The file FOLDER.pt has inputs of two
sequences, the tokens that tfkit generates for the first sequence if the model generates, and the number of calls of
torch's attention.
"""

import inspect
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

os.environ |= {"HF_MODULES_CACHE": sys.argv[1], "HF_HUB_OFFLINE": "1"}
blocked: dict[str, Any] = sys.modules
blocked["tfkit"] = None
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

transformers.logging.set_verbosity_error()
Inputs = dict[str, Tensor]


def failures(model: Any, inputs: Inputs, expected: Tensor | None, n_attentions: int) -> Iterator[str]:
    main = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    texts = [name for name in inputs if name.endswith("input_ids")]
    masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(inputs[name]) for name in texts}
    for mask in masks.values():
        mask[0, :3] = 0
    tokens = generated(model, inputs, masks, expected) if expected is not None else ()
    for name, ours, theirs in [*tokens, *computed(model, inputs, masks, main)]:
        if not torch.equal(ours, theirs):
            yield name
    if masks:
        yield from accepted(model, inputs, masks, main)
    hidden = model(**inputs, output_hidden_states=True)
    hidden = hidden.decoder_hidden_states if main == "decoder_input_ids" else hidden.hidden_states
    if len(hidden) != model.config.num_hidden_layers + 1:
        yield "hidden states"
    yield from recorded(model, inputs)
    if n_attentions:
        yield from attention_functions(model, inputs, n_attentions)
    if model._supports_sdpa != (n_attentions > 0):
        yield "_supports_sdpa"
    if (difference := gradients(model, inputs, masks, main)) > 1e-6:
        yield f"checkpointing changes a gradient by {difference}"
    yield from resized(model, inputs)
    model.bfloat16()
    inputs = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    model(**inputs, **masks)
    if expected is not None:
        inputs.pop("decoder_input_ids", None)
        model.generate(**inputs, **sources(masks), max_new_tokens=2)


def resized(model: Any, inputs: Inputs) -> Iterator[str]:
    """Add rows to the table of tokens, if a head reads it: the logits then have as many."""
    if hasattr(model, "lm_head") and "input_ids" in inputs and has_one_table(model.model):
        model.resize_token_embeddings(model.config.vocab_size + 3)
        if model(**inputs).logits.shape[-1] != model.lm_head.weight.shape[0]:
            yield "resize_token_embeddings"


def has_one_table(body: Any) -> bool:
    """Return True if an encoder and a decoder look up tokens in one table, which can be given new rows."""
    parts = [body.encoder, body.decoder] if body.config.is_encoder_decoder else [body]
    return len({part.get_input_embeddings().weight for part in parts}) == 1


def sources(values: Mapping[str, Tensor]) -> Inputs:
    """Return the values that `generate` takes."""
    return {name: value for name, value in values.items() if not name.startswith("decoder_")}


def row(inputs: Mapping[str, Tensor], start: int = 0) -> Inputs:
    """Return the first row of the inputs of `generate`, from a token on."""
    return {name: value[:1, start:] if value.dim() == 2 else value[:1] for name, value in sources(inputs).items()}


def generated(model: Any, inputs: Inputs, masks: Inputs, expected: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield pairs of tokens that must be equal, such as with a cache and without."""
    count = len(expected)
    greedy: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
    batch = sources(inputs) | sources(masks)
    beams = batch | greedy | {"num_beams": 3, "num_return_sequences": 2}
    tokens = model.generate(**row(inputs), **greedy)
    yield "greedy", tokens, model.generate(**row(inputs), use_cache=False, **greedy)
    yield "greedy in tfkit", tokens[0, -count:], expected
    ragged = model.generate(**batch, **greedy)
    yield "padding", ragged, model.generate(**batch, use_cache=False, **greedy)
    if masks.keys() & batch.keys():
        yield "a row alone", ragged[0, -count:], model.generate(**row(inputs, 3), **greedy)[0, -count:]
    yield "beams", model.generate(**beams), model.generate(**beams, use_cache=False)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampling = {"do_sample": True, "max_new_tokens": count, "num_return_sequences": 2, "use_cache": use_cache}
        samples.append(model.generate(**batch, **sampling))
    yield "samples", samples[0], samples[1]
    if not model._is_stateful:
        yield "assisted", model.generate(**row(inputs), assistant_model=model, **greedy), tokens
        if "decoder_input_ids" not in inputs:
            yield "prompt lookup", model.generate(**row(inputs), prompt_lookup_num_tokens=3, **greedy), tokens


def computed(model: Any, inputs: Inputs, masks: Inputs, main: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield pairs of values that must be equal."""
    output = model(**inputs, **masks, output_hidden_states=True)
    hidden = output.decoder_hidden_states if main == "decoder_input_ids" else output.hidden_states
    if "input_ids" in inputs:
        rest = {name: value for name, value in inputs.items() if name != "input_ids"}
        vectors = model.get_input_embeddings()(inputs["input_ids"])
        yield "inputs_embeds", model(inputs_embeds=vectors, **rest, **masks)[0], output[0]
    body: Any = model.base_model
    yield "the body", body(**inputs, **masks).last_hidden_state, hidden[-1]
    if not hasattr(model, "generate"):
        return
    if main == "decoder_input_ids":
        model.config.decoder_start_token_id = 1
        labels = inputs[main].masked_fill(torch.arange(8) == 6, -100)
        shifted = inputs[main].roll(1, dims=1)
        shifted[:, 0], shifted[:, 7] = 1, 0
        logits = model(**inputs | {main: shifted}).logits
        loss = model(**sources(inputs), labels=labels).loss
        yield "labels", loss, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    last_logits = model(**inputs, **masks, logits_to_keep=2).logits
    yield "logits_to_keep", last_logits, output.logits[:, -2:]
    if not {"sliding_window", "attention_chunk_size"}.isdisjoint(vars(model.config)):  # windows count columns
        return
    name = main.replace("input_ids", "attention_mask")
    inside = torch.ones_like(inputs[main])
    inside[0, 3] = 0
    rest = {key: value[:1] for key, value in inputs.items()}
    rest |= {main: torch.cat([inputs[main][:1, :3], inputs[main][:1, 4:]], dim=1)}
    difference = (model(**inputs, **{name: inside}).logits[0, 4:] - model(**rest).logits[0, 3:]).abs().max()
    yield "padding between tokens", difference > 1e-4, torch.tensor(False)


def accepted(model: Any, inputs: Inputs, masks: Inputs, main: str) -> Iterator[str]:
    """Yield the arguments that the model must reject, and accepts."""
    name = main.replace("input_ids", "attention_mask")
    positions = main.replace("input_ids", "position_ids")
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    rejected: list[tuple[str, dict[str, Any]]] = [
        (positions, {positions: torch.arange(7 if takes_positions else 8)[None]}),
        (name, {name: masks[name][:, :1]}),
        (name, {name: masks[name][:1]}),
    ]
    if hasattr(model, "generate"):
        rejected.append(("past_key_values", {"past_key_values": ((torch.zeros(1),),)}))
    for argument, values in rejected:
        try:
            model(**inputs, **values)
        except (TypeError, ValueError) as error:
            if argument.removeprefix("decoder_") in str(error):
                continue
        yield f"accepts {argument}"


def attention_functions(model: Any, inputs: Inputs, n_attentions: int) -> Iterator[str]:
    """Yield the attention functions of transformers with which the model computes something else."""
    calls: list[Any] = []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return sdpa(module, *args, **kwargs)

    sdpa = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register("counted", counted)
    expected = model(**inputs)[0]
    for name in ("eager", "counted"):
        model.set_attn_implementation(name)
        if (difference := float((model(**inputs)[0] - expected).abs().max())) > 1e-5:
            yield f"{name} attention differs by {difference}"
    if len(calls) != n_attentions:
        yield f"the registered attention is called {len(calls)} times, torch's by tfkit {n_attentions} times"
    model.set_attn_implementation("sdpa")


def recorded(model: Any, inputs: Inputs) -> Iterator[str]:
    """Yield the attention weights that the model records, and that sum to more than 1."""
    bodies = [body for body in model.modules() if "hidden_states" in (getattr(body, "_can_record_outputs", None) or {})]
    if not all("attentions" in body._can_record_outputs for body in bodies):
        return
    model.set_attn_implementation("eager")
    output = model(**inputs, output_attentions=True)
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        for weights in output.get(name) or ():
            if weights.dim() != 4 or weights.shape[2:].numel() == 1 or float(weights.sum(-1).max()) > 1.001:
                yield name
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")


def labels_of(model: Any, inputs: Inputs, main: str) -> Inputs:
    """Return labels for a model with a head."""
    name = type(model).__name__
    if hasattr(model, "lm_head"):
        return {"labels": inputs[main]}
    if name.endswith("ForTokenClassification"):
        return {"labels": inputs[main] % model.config.num_labels}
    return {"labels": torch.arange(2)} if hasattr(model, "classifier") else {}


def gradients(model: Any, inputs: Inputs, masks: Inputs, main: str) -> float:
    """Return the largest difference of a gradient with checkpointing and without."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    results = []
    labels = labels_of(model, inputs, main)
    for checkpointing in (False, True):
        model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
        model.zero_grad()
        torch.manual_seed(0)  # a router may draw experts
        output = model(**inputs, **masks, **labels)
        (output.loss if labels else output[0].square().mean()).backward()
        results.append({name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None})
    model.gradient_checkpointing_disable()
    model.eval()
    assert results[0].keys() == results[1].keys()
    return max(float((gradient - results[1][name]).abs().max()) for name, gradient in results[0].items())


for folder in sys.argv[2:]:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto = max(config.auto_map, key=lambda name: (name.startswith("AutoModel"), len(name)))
    opened: Any = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    opened.eval()
    if isinstance(opened, transformers.GenerationMixin):
        opened.generation_config = transformers.GenerationConfig(pad_token_id=0, decoder_start_token_id=1)
    facts = torch.load(f"{folder}.pt")
    print(json.dumps([os.path.basename(folder), *failures(opened, *facts)]), flush=True)
