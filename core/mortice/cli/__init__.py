"""The command line: `mortice COMMAND`. One file per command; each is imported when it is called.

Whatever a user did wrong is one message on standard error and exit code 2. `--debug` (or MORTICE_DEBUG=1) shows the
traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import UnknownCommandError

from mortice import __version__
from mortice.errors import MorticeError, suggest

COMMANDS = {
    "train": ("train:train", "Train as a run file says."),
    "resume": ("resume:resume", "Go on with a run that stopped."),
    "runs": ("runs:runs", "List run folders, compare them, remove checkpoints."),
    "check": ("check:check", "Check a run file, its model and its data, without training."),
    "plan": ("plan:plan", "Predict peak memory and time, or what fits a memory limit."),
    "data": ("data:data", "Show how records tokenize, what is scored and what is cut."),
    "pairs": ("pairs:pairs", "Make preference pairs from a model's own answers and a checker."),
    "score": ("score:score", "Rate the answers in a data file with a trained reward model."),
    "eval": ("eval:evaluate", "Grade answers to tasks; measure perplexity and preference accuracy."),
    "task": ("task:task", "Write problems of a task as a data file."),
    "list": ("list_strategies:show", "List the strategies of all installed plugins."),
    "describe": ("describe:describe", "Show a strategy and its options, or what a model folder holds."),
    "plugins": ("plugins:plugins", "List installed plugins and what failed to load."),
    "generate": ("generate:generate", "Answer one prompt, with or without an adapter."),
    "convert": ("convert:convert", "Quantize, dequantize or cast a model, or read a GGUF file."),
    "doctor": ("doctor:doctor", "Show backend, BLAS, versions, and the remedy for what is missing."),
    "quickstart": ("quickstart:quickstart", "Train a real model on real preference pairs, in minutes."),
}
"""Name → (`module:function` in this package, one line of help). Nothing of it is imported for `--help`."""

BACKEND = "install one: pip install 'mortice[cpu]', or mortice[cuda12] or mortice[cuda13] (macOS needs none)"

app = App(
    name="mortice",
    help="Train language models after pre-training (SFT, ORPO, …) on Apple MLX. Every capability is a plugin.",
    version=__version__,
    version_flags=["--version", "-V"],
    help_format="plaintext",
)
for _name, (_target, _help) in COMMANDS.items():
    app.command(f"mortice.cli.{_target}", name=_name, help=_help)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("MORTICE_DEBUG") == "1"
    given = [argument for argument in given if argument != "--debug"]
    try:
        result = app(given, exit_on_error=False, print_error=False, result_action="return_value")
    except (MorticeError, CycloptsError) as error:
        if debug:
            traceback.print_exc()
        print(f"mortice: {message(error)}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        if debug or "mlx" not in f"{error.name} {error.path}":
            raise
        print(f"mortice: MLX has no backend on this machine: {error}\nmortice: {BACKEND}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if debug:
            traceback.print_exc()
        print(f"mortice: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else 0)


def message(error: Exception) -> str:
    """What a user sees of an error."""
    if isinstance(error, UnknownCommandError):
        name = (error.unused_tokens or ["?"])[0]
        return f"unknown command {name!r}{suggest(name, COMMANDS)} (commands: {', '.join(COMMANDS)})"
    return str(error).strip()
