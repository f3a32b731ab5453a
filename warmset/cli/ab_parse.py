"""The text of an arm, read by the command that it names: which one, its options, and what an arm may not say."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import typer

from warmset.config import shown
from warmset.errors import WarmsetError

from .common import app, parse_list
from .main import UsageProblem

GENERATE, DECODE, WINDOW = "generate", "bench decode", "bench window"
REFUSED: dict[str, dict[str, str]] = {
    GENERATE: {
        "prompt": "the prompts are the same for both arms",
        "max_new_tokens": "it is an option of ab, the same for both arms",
        "temperature": "a sample is a greedy answer",
        "stop": "every answer has the same number of tokens",
        "logprobs": "only the tokens are compared",
        "stats": "the record has all figures",
        "stages": "the record has all figures",
        "json_path": "it is an option of ab",
    },
    DECODE: {
        "tokens": "it is --max-new-tokens of ab, the same for both arms",
        "rounds": "it is --samples of ab, the same for both arms",
        "json_path": "it is an option of ab",
    },
    WINDOW: {
        "part": "an arm runs whole windows",
        "cold_experts": "an arm runs the windows of a trace",
        "tiles": "an arm runs whole windows",
        "budget": "it is an option of ab",
        "json_path": "it is an option of ab",
    },
}
"""Command -> options, by Python name, that an arm of it may not have, and why."""


def split_arm(name: str, text: str) -> list[str]:
    """The words of an arm: those of `generate` without its name, those of a bench with it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WarmsetError(
            f"--{name} must be options as a shell takes them: {error}. Got {shown(text)}."
        ) from None
    if words[:1] == ["bench"] and command_of(words) == GENERATE:
        raise WarmsetError(
            f"--{name} must be an arm of {GENERATE}, {DECODE} or {WINDOW}: no other bench decodes. Got {shown(text)}."
        )
    return words[1:] if words[:1] == [GENERATE] else words


def command_of(words: Sequence[str]) -> str:
    """Which command the words of an arm are of."""
    named = " ".join(words[:2])
    return named if named in (DECODE, WINDOW) else GENERATE


def given_options(name: str, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Every option of the arm's command by its Python name, and the names that were really given.

    Raises WarmsetError on what the command does not know, and on what an arm may not have.
    """
    named = command_of(words)
    command: Any = typer.main.get_command(app)
    for word in named.split():
        command = command.commands[word]
    own = list(words if named == GENERATE else words[2:])
    if set(command.get_help_option_names(typer.Context(command))) & set(own):
        raise WarmsetError(f"--{name} must be options of {named} that decode something. Got --help.")
    try:
        context = command.make_context(named, own)
    except UsageProblem as error:
        raise WarmsetError(f"--{name}: {error.format_message()}") from None
    sources = {option: context.get_parameter_source(option) for option in context.params}
    given = {
        option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }
    flags = {parameter.name: parameter.opts[0] for parameter in command.params}
    for option, why in REFUSED[named].items():
        if option in given:
            raise WarmsetError(f"--{name} may not have {flags[option]}: {why}.")
    return context.params, given


def one_of_rows(option: str, text: str | None, default: int) -> int:
    """The single number of rows that an arm's windows have, from an option that takes a list."""
    numbers = [default] if text is None else parse_list(option, text, int)
    if len(numbers) != 1:
        raise WarmsetError(f"{option} must be one number of rows in an arm. Got {shown(text)}.")
    return numbers[0]
