"""From the text of an arm to what a leg runs, by the definitions of its own command; the leg's command."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from warmset.config import shown
from warmset.errors import WarmsetError
from warmset.measure.ab.leg import talk
from warmset.measure.ab.plan import Arm

from .ab_parse import DECODE, WINDOW, command_of, given_options, one_of_rows
from .ab_windows import describe_windows, window_request
from .common import app
from .generate import Request, request_of

FILES = ("profile", "learn")
"""Options that name a file which a leg may change: each leg gets a fresh copy."""


def request_of_arm(name: str, words: Sequence[str]) -> tuple[Request, dict[str, str]]:
    """What an arm of answers asks for, and its files by option; WarmsetError on what an arm may not say."""
    params, given = given_options(name, words)
    try:
        if command_of(words) == DECODE:
            return _decode_request(params["windows"] if "windows" in given else None, params["device"]), {}
        files = {option: params[option] for option in FILES if params.get(option) is not None}
        return request_of(params), files
    except WarmsetError as error:
        raise WarmsetError(f"--{name}: {error}") from None


def _decode_request(windows: str | None, device: str) -> Request:
    """The embedded model, everything resident, at one number of rows."""
    from warmset.config import SamplingConfig
    from warmset.measure.decode import engine_config

    rows = one_of_rows("--windows", windows, 1)
    return Request(config=engine_config(rows, device), sampling=SamplingConfig(), policy=None, chat=False)


def make_arm(
    name: str, words: list[str], python: str | None, model: str, prompts: Sequence[str], max_new_tokens: int
) -> Arm:
    """Check an arm against its model and all prompts, or its trace, in its own install, without loading weights.

    model: for an arm of generate that names none.
    """
    job: dict[str, Any] = {
        "name": name,
        "words": words,
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
    from warmset.prepare import prepare
    from warmset.routing import describe
    from warmset.text import check_request, encode, load_tokenizer

    named = command_of(words)
    if named == WINDOW:
        return describe_windows(name, words)
    if named != DECODE and "model" not in given_options(name, words)[1]:
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
    words = job.pop("words")
    if command_of(words) == WINDOW:
        from warmset.measure.ab.windows import replay_windows

        windows, device = window_request("arm", words)
        replay_windows(windows, device, emit, **job)
        return
    from warmset.measure.ab.worker import answer_prompts

    request, _ = request_of_arm("arm", words)
    sampling = dataclasses.replace(request.sampling, max_new_tokens=job["max_new_tokens"])
    answer_prompts(request.config, request.policy, sampling, request.chat, job["prompts"], emit)


def _end_with_stdin() -> None:
    """The experiment holds the other end: when it is gone, so is the leg."""
    while os.read(0, 4096):
        pass
    os._exit(1)
