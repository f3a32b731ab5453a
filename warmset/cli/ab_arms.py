"""From the text of an arm to what a leg runs, by the definitions of `warmset generate` itself; the leg's command."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from typing import Any

import typer

from warmset.config import shown
from warmset.errors import WarmsetError
from warmset.measure.ab.leg import talk
from warmset.measure.ab.plan import Arm

from .common import app
from .generate import Request, request_of
from .main import UsageProblem

NOT_IN_AN_ARM = {
    "prompt": "the prompts are the same for both arms",
    "max_new_tokens": "it is an option of ab, the same for both arms",
    "temperature": "a sample is a greedy answer",
    "stop": "every answer has the same number of tokens",
    "logprobs": "only the tokens are compared",
    "stats": "the record has all figures",
    "stages": "the record has all figures",
    "json_path": "it is an option of ab",
}
FILES = ("profile", "learn")
"""Options that name a file which a leg may change: each leg gets a fresh copy."""
LATER = {
    "decode": "bench decode does not exist yet",
    "window": "bench window cannot replay the windows of a trace yet",
}


def split_arm(name: str, text: str) -> list[str]:
    """The words of an arm after `generate`; refuses other commands."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WarmsetError(
            f"--{name} must be options as a shell takes them: {error}. Got {shown(text)}."
        ) from None
    if words[:1] == ["bench"]:
        kind = words[1] if len(words) > 1 else ""
        why = LATER.get(kind, f"bench {kind} gives no samples of decoding".replace("  ", " "))
        raise WarmsetError(f"--{name} can only be an arm of `generate` so far: {why}. Got {shown(text)}.")
    return words[1:] if words[:1] == ["generate"] else words


def _given(name: str, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Every option of `generate` by its Python name, and the names that were really given."""
    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    help_names = command.get_help_option_names(typer.Context(command))
    if set(help_names) & set(words):
        raise WarmsetError(f"--{name} must be options of generate that decode something. Got --help.")
    try:
        context = command.make_context("generate", list(words))
    except UsageProblem as error:
        raise WarmsetError(f"--{name}: {error.format_message()}") from None
    sources = {option: context.get_parameter_source(option) for option in context.params}
    given = {
        option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }
    return context.params, given


def request_of_arm(name: str, words: Sequence[str]) -> tuple[Request, dict[str, str]]:
    """What an arm asks for, and its files by option; WarmsetError on what an arm may not say."""
    params, given = _given(name, words)
    for option, why in NOT_IN_AN_ARM.items():
        if option in given:
            flag = "--json" if option == "json_path" else f"--{option.replace('_', '-')}"
            raise WarmsetError(f"--{name} may not have {flag}: {why}.")
    files = {option: params[option] for option in FILES if params.get(option) is not None}
    try:
        return request_of(params), files
    except WarmsetError as error:
        raise WarmsetError(f"--{name}: {error}") from None


def make_arm(
    name: str, text: str, python: str | None, model: str, prompts: Sequence[str], max_new_tokens: int
) -> Arm:
    """Check an arm against its model and all prompts, in its own install, without loading weights.

    model: for an arm that names none.
    """
    job: dict[str, Any] = {
        "name": name,
        "words": split_arm(name, text),
        "model": model,
        "prompts": list(prompts),
        "max_new_tokens": max_new_tokens,
    }
    if python is None:
        return Arm(python=None, **describe_arm(**job))
    lines, failed = talk(python, {"check": job})
    if failed is not None or not lines:
        raise WarmsetError(f"--{name}-python {shown(python)}: {failed or 'it gave no answer'}.")
    return Arm(python=python, **lines[-1])


def describe_arm(
    name: str, words: list[str], model: str, prompts: list[str], max_new_tokens: int
) -> dict[str, Any]:
    """The fields of an `Arm` that its own install knows; JSON values only."""
    from warmset.engine import prepare
    from warmset.routing import describe
    from warmset.text import check_request, encode, load_tokenizer

    if "model" not in _given(name, words)[1]:
        words = [*words, model]
    request, files = request_of_arm(name, words)
    config, policy = request.config, request.policy
    try:
        check_request(config, prompts[0], policy, request.chat)
        prepared = prepare(config)
        tokenizer = load_tokenizer(prepared)
        longest = max(len(encode(tokenizer, prompt, request.chat)) for prompt in prompts)
    except WarmsetError as error:
        raise WarmsetError(f"--{name}: {error}") from None
    if longest + max_new_tokens > prepared.max_model_len:
        raise WarmsetError(
            f"--{name}: a prompt of {longest} tokens and {max_new_tokens} new ones must fit into max_model_len, "
            f"{prepared.max_model_len}."
        )
    work: list[Any] = [
        prepared.checkpoint.fingerprint(),
        str(prepared.device),
        str(prepared.dtype),
        request.chat,
    ]
    return {
        "words": words,
        "config": {
            **dataclasses.asdict(config),
            "slots": config.slots.text,
            "policy": "off" if policy is None else describe(policy),
            "chat": request.chat,
            "device": work[1],
            "dtype": work[2].removeprefix("torch."),
            "sampling": {**dataclasses.asdict(request.sampling), "max_new_tokens": max_new_tokens},
        },
        "exact_work": work if policy is None else None,
        "files": files,
    }


@app.command("ab-leg", hidden=True)
def ab_leg() -> None:
    """One leg of `warmset ab`: reads its job from stdin, gives one line of JSON a sample."""
    from warmset.measure.ab.worker import answer_prompts

    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr: stdout has the samples only
    try:
        job = json.loads(sys.stdin.readline())
    except ValueError:
        raise WarmsetError("ab-leg is run by `warmset ab`: it reads its job from stdin.") from None
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def emit(value: dict[str, Any]) -> None:
        os.write(answers, (json.dumps(value) + "\n").encode())

    if "check" in job:
        emit(describe_arm(**job["check"]))
        return
    request, _ = request_of_arm("arm", job["words"])
    sampling = dataclasses.replace(request.sampling, max_new_tokens=job["max_new_tokens"])
    answer_prompts(request.config, request.policy, sampling, request.chat, job["prompts"], emit)


def _end_with_stdin() -> None:
    """The experiment holds the other end: when it is gone, so is the leg."""
    while os.read(0, 4096):
        pass
    os._exit(1)
