"""Initial weights of a run: loading all or part of a checkpoint, mapping weights, and freezing parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import fx

import tfkit
from tfkit.building.builder import build
from tfkit.building.transfer import Transfer
from tfkit.checkpoint.selection import check_matches, matches_any, shortened_names
from tfkit.errors import Invalid, SpecError, listing
from tfkit.run.checked_run import Run
from tfkit.run.contract import Tokenizer
from tfkit.run.run_spec import WeightsConfig
from tfkit.run.training.adapters import adapters_description, insert_adapters, matching_adapter, start_from
from tfkit.run.training.initial_states import initial_moves, set_initial_states
from tfkit.run.training.optimizer import Rules, groups_of
from tfkit.run.training.parametrize import parameter_rules, scale_initial_values
from tfkit.spec.extending import short_path
from tfkit.spec.folder import TOKENIZERS, model_folder, tokenizer_in


def set_initial_weights(model: fx.GraphModule, run: Run, rules: Rules | None = None) -> dict[str, str]:
    """Fill a new model with the weights that its run names, and freeze parameters; return a description of the start.

    Before, the initial values are scaled by the rules of the parametrization.

    Raises:
        SpecError: the weights cannot be read, or do not fit; or a pattern matches nothing.
    """
    done = {}
    scale_initial_values(model, rules)
    config = run.config.weights
    adapters = run.config.adapters
    # A run that continues has its own weights; its adapters do not.
    if config is not None and (run.recorded is None or adapters is not None):
        with _located_errors(run, "weights"):
            path = Path(config.path)
            rows = rows_of_tokens(run.data.tokenizer, path) if config.tokens else ()
            done["weights"] = _weight_transfer(config, rows).fill(model, path)
    if adapters is not None:
        done["adapters"] = adapters_description(model)
        if adapters.start is not None and run.recorded is None:
            with _located_errors(run, "adapters"):
                done["start"] = start_from(model, Path(adapters.start))
    if run.recorded is None and run.branch is not None:
        done["branch"] = f"{run.branch.name.replace('-', ' ')} of {short_path(run.branch.parent)}"
    if run.config.freeze:
        with _located_errors(run):
            done["frozen"] = listing(shortened_names(freeze_parameters(model, run.config.freeze)), 24)
    return done


def check_start(run: Run) -> None:
    """Raise the errors of a start that need no values: patterns without a match, and weights of other shapes.

    A weight without a rule of the parametrization is an error, too.
    """
    config, optimizer, rules = run.config.weights, run.config.optimizer, parameter_rules(run)
    if config is None and not run.config.freeze and not optimizer.groups:
        return
    model = build(run.graph, device="meta")
    insert_adapters(model, run)
    if config is not None and run.recorded is None:
        with _located_errors(run, "weights"):
            _weight_transfer(config, ()).check(model, Path(config.path))
    adapters = run.config.adapters
    if adapters is not None and adapters.start is not None and run.recorded is None:
        with _located_errors(run, "adapters"), matching_adapter(model, Path(adapters.start)):
            pass
    if run.config.freeze:
        with _located_errors(run):
            freeze_parameters(model, run.config.freeze)
    if config is not None and config.states and run.recorded is None:
        with _located_errors(run, "weights"):
            initial_moves(model, run)
    with run.guarded(optimizer, "`build`", "optimizer"):
        groups_of(model, optimizer, rules)


def start_optimizer(model: fx.GraphModule, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, str]:
    """Set the state that the optimizer of a run begins with, if it is not zero, and return a description of it.

    Raises SpecError if the state cannot be read, or does not fit.
    """
    config = run.config.weights
    if config is None or not config.states or run.recorded is not None:
        return {}
    with _located_errors(run, "weights"):
        return {"states": set_initial_states(model, optimizer, run)}


def _weight_transfer(config: WeightsConfig, rows: Sequence[tuple[int, int]]) -> Transfer:
    return Transfer(config.missing, config.unused, config.allow_change, config.map, config.tokens, rows)


@contextmanager
def _located_errors(run: Run, *path: str) -> Iterator[None]:
    """Add the location of a value of the run to errors."""
    try:
        yield
    except Invalid as error:
        raise run.refused(error, *path) from error
    except SpecError as error:
        raise run.file.placed(error, *path) from error


def freeze_parameters(model: fx.GraphModule, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose names match; return their names.

    Raises `Invalid` for a pattern that matches nothing, and if no parameter remains to train.
    """
    names = dict(model.named_parameters())
    check_matches("freeze", patterns, names, (), "no parameter matches")
    frozen = [name for name in names if matches_any(name, patterns)]
    if len(frozen) == len(names):
        raise Invalid("freeze", "every parameter is frozen: there is nothing to train")
    for name in frozen:
        names[name].requires_grad_(False)
    return frozen


def rows_of_tokens(tokenizer: Tokenizer | None, path: Path) -> list[tuple[int, int]]:
    """Return the ids of the tokens that the data and the weights at `path` share: in the data, and in the weights.

    Raises `Invalid` if a vocabulary is missing, or if they share no token.
    """
    file = tokenizer_in(model_folder(path))
    if file is None:
        names = " or ".join(TOKENIZERS)
        raise Invalid("tokens", f"the weights must have a tokenizer next to them, {names}, to find their tokens")
    new, old = (_ids_by_token(vocabulary) for vocabulary in (tokenizer, tfkit.load_tokenizer(file)))
    rows = [(index, old[piece]) for piece, index in new.items() if piece in old]
    if not rows:
        raise Invalid("tokens", "the vocabularies of the data and of the weights have no token in common")
    return rows


def _ids_by_token(tokenizer: object) -> dict[bytes, int]:
    pieces = getattr(tokenizer, "pieces", None)
    if pieces is None:
        help = "use data with a tokenizer; a tokenizer of a plugin needs the method `pieces`"
        raise Invalid("tokens", "rows can be found only for data whose tokenizer has the text of its tokens", help=help)
    return {piece: index for index, piece in reversed(list(enumerate(pieces()))) if piece is not None}
