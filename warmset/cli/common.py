"""What the commands share: the application, options, the answer's way out, and the checks before any work."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import warmset
from warmset.config import shown
from warmset.errors import WarmsetError

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts models bigger than the fast memory of the machine.",
)

MAX_CASES = 1_000_000
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write one object; - = stdout.")
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"warmset {warmset.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    help_if_alone(context)


def command_group(name: str, help: str) -> typer.Typer:
    """A group of commands under `warmset NAME`; alone it shows its help."""
    group = typer.Typer(invoke_without_command=True, rich_markup_mode=None, help=help)
    group.callback()(help_if_alone)
    app.add_typer(group, name=name)
    return group


def help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def number(kind: type) -> Any:
    """A parser that says what came when it is no number of this kind."""

    def parse(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            whole = "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"must be {whole}. Got {shown(text)}.") from None

    return parse


def parse_list(option: str, text: str, kind: type) -> list[Any]:
    """`1,4,8`, as `option` got it -> [1, 4, 8]."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise WarmsetError(f"{option} must be {what} with commas between them. Got {shown(text)}.") from None


def check_writable(json_path: str | None, option: str = "--json") -> None:
    """Refuse a path of `--json`, or of another option, that cannot be written, before the work and not after it."""
    if json_path in (None, "-"):
        return
    refusal = WarmsetError(
        f"{option} must be {'- or ' if option == '--json' else ''}a file in a folder that can be written to. "
        f"Got {shown(json_path)}."
    )
    try:
        path = Path(json_path).resolve()
        if path.exists() and not path.is_file():
            if path.is_dir() or not os.access(path, os.W_OK):
                raise refusal
            return
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        os.close(descriptor)
        os.unlink(temporary)
        os.stat(path) if path.exists() else os.lstat(path.parent)
        if len(os.fsencode(path.name)) > 255:
            raise refusal
    except (OSError, ValueError):
        raise refusal from None


def emit_json(value: dict[str, Any], json_path: str | None) -> None:
    if json_path is None:
        return
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    if json_path == "-":
        typer.echo(text, nl=False)
    else:
        from warmset.profile import write_atomically

        write_atomically(Path(json_path), text)


def show_table(table: Any, *, stderr: bool = False) -> None:
    from warmset.measure.report import show

    show(table, stderr=stderr)
