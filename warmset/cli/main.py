"""The entry point: runs a command and turns errors into one sentence and an exit code."""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer

from warmset.errors import WarmsetError

from .common import app

# Typer carries its own copy of click in newer releases: take the class from what it exports.
UsageProblem: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

INTERRUPTED = 130


def main() -> None:
    """Entry point: runs the command and turns errors into one sentence and an exit code."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us as it ends any filter
    try:
        code = app(standalone_mode=False)
    except WarmsetError as error:
        _leave(str(error), 2)
    except OSError as error:
        _leave(f"{error.strerror or error}: {error.filename or 'standard output'}.", 2)
    except MemoryError:
        _leave("out of memory: fewer slots or a shorter max_model_len need less.", 2)
    except UsageProblem as error:
        _leave(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer may turn Ctrl-C into a code by itself
        _leave("stopped.", INTERRUPTED)
    sys.exit(code)


def _leave(sentence: str, code: int) -> None:
    typer.echo(f"warmset: {' '.join(sentence.split())}", err=True)
    sys.exit(code)
