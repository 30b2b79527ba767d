"""The `tfkit` command: its help, its exit status, its errors.

Each command is an entry point, of tfkit or of a plugin, imported when the command runs: help only reads its source. No
module of a command imports torch, pydantic or rich before it runs.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence

import click

from tfkit.console.commands import HELP_OPTIONS, Command, CommandGroup, HintedError
from tfkit.console.completion import VARIABLE, run_completion
from tfkit.console.output import warnings_as_text
from tfkit.console.signals import Ended, end_on_signal
from tfkit.errors import (
    ChangedWeightsWarning,
    Diagnostic,
    FirstLossWarning,
    LeftOutWarning,
    NamesWarning,
    NotFiniteWarning,
    PluginWarning,
    SpecError,
    quoted,
)

WRONG_SPEC, WRONG_USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
BY_SIGNAL = 128
"""Added to the number of a signal that ended the process, as shells do."""


def _print_version(context: click.Context, option: click.Parameter, requested: bool) -> None:
    if not requested:
        return
    from tfkit.plugin.discover import tfkit_version

    number = tfkit_version()
    click.echo(f"tfkit {number}" if number else "tfkit, not installed")
    context.exit()


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": HELP_OPTIONS, "max_content_width": 80},
    examples="""
    tfkit build gpt2
    tfkit params gpt2 llama3_8b
    tfkit show my_model.yaml --set decoder.n_layers=2
    """,
    notes="""
    SPEC is a YAML file, the name of a spec that comes with tfkit, or the folder of
    a model that `tfkit build -o` or `tfkit save` wrote. A run, by its file or name,
    stands for its model; --set then takes paths of the run: model.d_model=64.

    Exit status: 0; 1 if a spec is wrong or cannot be built; 2 for wrong usage.
    With --json, standard output is always one JSON document: the result, or
    {"errors": [...]} with exit status 1. Warnings go to standard error.

    In bash, the key Tab completes commands, options and specs after
    eval "$(_TFKIT_COMPLETE=bash_source tfkit)"; zsh_source and fish_source exist.
    """,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Transformers as YAML, built to plain PyTorch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the arguments of the process; return the exit status."""
    status = _main(arguments)
    if arguments is None and status == 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        # Caches of torch keep the process groups. A thread of gloo that still holds a tensor while Python is finalized
        # would abort the process, and torchrun would report a finished run as a failure.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return status


def _main(arguments: Sequence[str] | None) -> int:
    if arguments is None and VARIABLE in os.environ:
        return run_completion(cli, os.environ[VARIABLE])
    if arguments is None:
        gc.disable()  # imports leave no garbage, and a GC pass over them costs a third of the time
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  it was closed before the start
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries would end the process
        click.echo("error: the current folder does not exist any more", err=True)
        return WRONG_SPEC
    try:
        with end_on_signal():
            return _run_command(list(sys.argv[1:] if arguments is None else arguments))
    except Ended as end:
        click.echo(f"ended by {signal.Signals(end.number).name}", err=True)
        return BY_SIGNAL + end.number
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:  # a full disk is a SpecError for every other file
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        click.echo(f"error: cannot write to standard output: {error.strerror}", err=True)
        return WRONG_SPEC
    finally:
        if arguments is None:
            gc.freeze()  # the interpreter flushes once more when it ends


def _drop_output() -> None:
    """Discard the remaining standard output, so that the last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: list[str]) -> int:
    try:
        categories = (ChangedWeightsWarning, LeftOutWarning, NamesWarning, NotFiniteWarning, PluginWarning)
        with cli.make_context("tfkit", arguments) as context, warnings_as_text(*categories):
            warnings.simplefilter("ignore", FirstLossWarning)  # `build` shows it; other commands do not train
            cli.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.exceptions.Exit as end:
        return end.exit_code
    except SpecError as error:
        click.echo(str(error), err=True)
        return WRONG_SPEC
    except SystemExit as end:  # no command of tfkit raises it: without this, `sys.exit(0)` would look like success
        click.echo(str(_ended_by(end)), err=True)
        return WRONG_SPEC
    except click.UsageError as error:
        click.echo(_usage_error_text(error), err=True)
        return WRONG_USAGE
    finally:
        sys.stdout.flush()
    return 0


def _ended_by(end: SystemExit) -> SpecError:
    """Return the error of code that ends the process, with the location of that code."""
    from tfkit.plugin.hooks import error_location, in_words

    help = "code of a plugin must raise an exception instead of ending the process"
    message = f"the command was ended by code outside tfkit: {in_words(end)}"
    return SpecError(Diagnostic(message, notes=tuple(filter(None, [error_location(end)])), help=help))


def _usage_error_text(error: click.UsageError) -> str:
    """Format an error of wrong usage like all other errors."""
    context = error.ctx
    text = _number_error_text(error) or error.format_message().rstrip(".").replace("'", "`")
    lines = [f"error: {text[:1].lower()}{text[1:]}"]
    if context is not None:
        usage = context.command.get_usage(context).removeprefix("Usage: ")
        lines += [f"   = usage: {' '.join(usage.split())}"] if isinstance(context.command, Command) else []
        help = error.help if isinstance(error, HintedError) else f"{context.command_path} --help"
        lines += [f"   = help: {help}"]
    return "\n".join(lines)


def _number_error_text(error: click.UsageError) -> str | None:
    """Describe an option's value that is not a valid number, in the words of the spec's errors."""
    if not isinstance(error, click.BadParameter) or error.param is None:
        return None
    kind, name = error.param.type, error.param.get_error_hint(error.ctx).replace("'", "`")
    match = re.fullmatch(r"'(.*)' is not a valid .*|(\S+) is not in the range .*", error.message, re.DOTALL)
    if match is None or not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return None
    what = "an integer" if isinstance(kind, click.types.IntParamType) else "a number"
    bounds = _range_text(kind) if isinstance(kind, click.IntRange | click.FloatRange) else ""
    return f"{name} must be {what}{bounds}; got {quoted(match[1]) if match[1] is not None else match[2]}"


def _range_text(kind: click.IntRange | click.FloatRange) -> str:
    minimum = f" {'above' if kind.min_open else 'from'} {kind.min:,}" if kind.min is not None else ""
    return minimum + (f" {'below' if kind.max_open else 'to'} {kind.max:,}" if kind.max is not None else "")
