"""`warmset generate`: continue a text and say what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import warmset
from warmset.config import MAX_WINDOW_ROWS, EngineConfig, SamplingConfig, SlotsRequest, shown
from warmset.errors import WarmsetError

from .common import JsonOption, app, check_writable, emit_json, number, show_table

ENGINE, SAMPLING = EngineConfig(), SamplingConfig()
AUTO = "auto"


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="builtin:tiny, a folder, or a hub id.")
    ] = ENGINE.model,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")] = "",
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a hub id.")] = None,
    slots: Annotated[
        str, typer.Option("--slots", metavar="N|33%|auto|all", help="Slots over all layers; 0 is legal.")
    ] = ENGINE.slots.text,
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram", metavar="SIZE", help="The most VRAM to use, such as 12GiB; all that is free if absent."
        ),
    ] = None,
    route_resident: Annotated[
        str | None,
        typer.Option(
            "--route-resident",
            metavar="MARGIN|auto",
            help="Redirect tail picks from cold experts to resident ones at most MARGIN worse (off when absent).",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="LO-HI", help="The tail, 0-based (6-9 of 10 by default).")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME:key=value,...",
            help="Any routing policy, module:Class, or a file *.json.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", parser=number(int), metavar="N")
    ] = SAMPLING.max_new_tokens,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            parser=number(int),
            metavar="N",
            help="Prompt and answer together; the model's context if absent.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto: float32 on a CPU, the checkpoint's on a GPU.")
    ] = ENGINE.dtype,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = ENGINE.device,
    seed: Annotated[int, typer.Option("--seed", parser=number(int), metavar="N")] = SAMPLING.seed,
    temperature: Annotated[
        float,
        typer.Option("--temperature", parser=number(float), metavar="X", help="0 is greedy."),
    ] = SAMPLING.temperature,
    top_p: Annotated[float, typer.Option("--top-p", parser=number(float), metavar="X")] = SAMPLING.top_p,
    top_k: Annotated[
        int, typer.Option("--top-k", parser=number(int), metavar="N", help="0 is off.")
    ] = SAMPLING.top_k,
    min_p: Annotated[float, typer.Option("--min-p", parser=number(float), metavar="X")] = SAMPLING.min_p,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", parser=number(float), metavar="X", help="1 is off.")
    ] = SAMPLING.repetition_penalty,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", parser=number(float), metavar="X", help="0 is off.")
    ] = SAMPLING.presence_penalty,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", parser=number(float), metavar="X", help="0 is off.")
    ] = SAMPLING.frequency_penalty,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", parser=number(int), metavar="N", help="Log-probabilities, with the N most likely."
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends the answer; may be given often.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's turn, in the model's own template.")
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", parser=number(int), metavar="T", help="The most rows a window verifies, 1 to 8."
        ),
    ] = None,
    speculative: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens", parser=number(int), metavar="N", help="The same as --window N+1."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", metavar="none|lookup|mtp|model", help="Where the rows after the first come from."
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", metavar="MODEL", help="A small model with the same tokenizer."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="Learned profile that fills the slots.")
    ] = None,
    learn: Annotated[
        str | None,
        typer.Option("--learn", metavar="FILE", help="Profile that the answer's picks are added to."),
    ] = None,
    admission: Annotated[
        str,
        typer.Option(
            "--admission",
            metavar="off|lfu|lru",
            help="Who is brought in between windows: experts picked often, or lately; off: nobody.",
        ),
    ] = ENGINE.admission,
    route_kernel: Annotated[
        str,
        typer.Option("--route-kernel", metavar="fused|warp|serial", help="Which kernels route, on a GPU."),
    ] = ENGINE.route_kernel,
    graphs: Annotated[
        str,
        typer.Option(
            "--graphs",
            metavar="auto|on|off",
            help="Windows that the device leads; auto: on a GPU. On a CPU slower.",
        ),
    ] = ENGINE.graphs,
    stats: Annotated[bool, typer.Option("--stats", help="Show the figures of the answer on stderr.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Show where a window's time goes.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Continue a text and say what it took."""
    request = request_of(locals())
    if not prompt:
        raise WarmsetError("--prompt must hold some text. Got an empty one.")
    check_writable(json_path)
    answer = run_generate(request, prompt, quiet=json_path == "-")
    if stats:
        show_table(stats_table(answer), stderr=True)
        typer.echo(f"Slots: {answer['slots_why']}.", err=True)
        if answer["drafts"]["by_depth"]:
            show_table(depth_table(answer["drafts"]["by_depth"]), stderr=True)
            typer.echo(f"Rows of a window: {answer['drafts']['rows_why']}.", err=True)
    if logprobs is not None and json_path is None:
        show_table(logprobs_table(answer["logprobs"]), stderr=True)
    if stages and answer["stages"]:
        from warmset.measure.report import stage_table

        show_table(stage_table(answer["stages"]), stderr=json_path == "-")
    emit_json(answer, json_path)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the options of `generate` ask for, the prompt apart. `policy` None = off."""

    config: EngineConfig
    sampling: SamplingConfig
    policy: Any
    chat: bool


def request_of(given: Mapping[str, Any]) -> Request:
    """The options of `generate` by their Python names, checked and put together; WarmsetError on bad ones."""
    policy = build_policy(given["route_resident"], given["ranks"], given["policy"])
    draft, draft_model = given["draft"], given["draft_model"]
    config = EngineConfig(
        model=given["model"],
        revision=given["revision"],
        slots=SlotsRequest(text=given["slots"]),
        vram=given["vram"],
        device=given["device"],
        dtype=given["dtype"],
        max_model_len=given["max_model_len"],
        profile=given["profile"],
        learn=given["learn"],
        admission=given["admission"],
        route_kernel=given["route_kernel"],
        graphs=given["graphs"],
        stages=given["stages"] or None,
        window=rows_of(given["window"], given["speculative"]),
        draft="model" if draft is None and draft_model is not None else draft,
        draft_model=draft_model,
    )
    sampling = SamplingConfig(
        max_new_tokens=given["max_new_tokens"],
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given["top_k"],
        min_p=given["min_p"],
        seed=given["seed"],
        repetition_penalty=given["repetition_penalty"],
        presence_penalty=given["presence_penalty"],
        frequency_penalty=given["frequency_penalty"],
        logprobs=given["logprobs"],
        stop=tuple(given["stop"] or ()),
    )
    if policy == AUTO:
        policy = resolve_auto(config)
    return Request(config=config, sampling=sampling, policy=policy, chat=given["chat"])


def rows_of(window: int | None, speculative: int | None) -> int | None:
    """`--window`, or its other name, which counts the drafts only."""
    if speculative is None:
        return window
    if window is not None:
        raise WarmsetError("--window and --num-speculative-tokens say the same: give one of them.")
    if not 0 <= speculative < MAX_WINDOW_ROWS:
        raise WarmsetError(f"--num-speculative-tokens must be 0 to {MAX_WINDOW_ROWS - 1}. Got {speculative}.")
    return speculative + 1


def resolve_auto(config: EngineConfig) -> Any:
    """The policy that `--route-resident auto` stands for with this model; why is said on stderr."""
    from warmset.auto_policy import auto_policy
    from warmset.routing import describe

    chosen = auto_policy(config)
    typer.echo(f"warmset: --route-resident auto is {describe(chosen.value)}: {chosen.why}.", err=True)
    return chosen.value


def build_policy(route_resident: str | None, ranks: str | None, policy: str | None) -> Any:
    """The policy that the options name together, AUTO, or None for off; refuses a margin beside a policy."""
    from warmset.routing import MarginSwap, parse_policy

    if policy is not None:
        if route_resident is not None or ranks is not None:
            raise WarmsetError(
                "--policy already says everything: give it or --route-resident and --ranks, not both."
            )
        return parse_policy(policy)
    if route_resident is None:
        if ranks is not None:
            raise WarmsetError("--ranks needs --route-resident: without it no pick is redirected.")
        return None
    if route_resident == AUTO:
        if ranks is not None:
            raise WarmsetError("--route-resident auto chooses its own ranks: give it without --ranks.")
        return AUTO
    try:
        margin = float(route_resident)
    except ValueError:
        raise WarmsetError(
            f"--route-resident must be a number or auto. Got {shown(route_resident)}."
        ) from None
    return MarginSwap(margin=margin, ranks=parse_ranks(ranks))


def parse_ranks(text: str | None) -> tuple[int, int] | None:
    """`6-9` -> (6, 9); refuses what leaves no tail."""
    if text is None:
        return None
    low, dash, high = text.partition("-")
    digits = all(part.isascii() and part.isdecimal() and len(part) < 10 for part in (low, high))
    if not (dash and digits):
        raise WarmsetError(f"--ranks must be LO-HI, two whole numbers of 0 or more. Got {shown(text)}.")
    if int(low) > int(high):
        raise WarmsetError(f"--ranks must leave a tail: LO at most HI. Got {text!r}.")
    return int(low), int(high)


def run_generate(request: Request, prompt: str, *, quiet: bool) -> dict[str, Any]:
    """Check, load, answer (streamed to stdout unless `quiet`), and return the object of `--json`."""
    from warmset.progress import Bars
    from warmset.text import Engine, check_request, encode

    config, sampling = request.config, request.sampling
    check_request(config, prompt, request.policy, request.chat)
    with Bars() as bars:
        engine = Engine.open(config, request.policy, bars.update)
    for note in engine.notes:
        typer.echo(f"warmset: {note}", err=True)
    pieces: list[str] = []
    try:
        for piece in engine.stream_ids(encode(engine.tokenizer, prompt, request.chat), sampling):
            pieces.append(piece)
            if not quiet:
                typer.echo(piece, nl=False)
    finally:  # also before an error: its sentence begins a line
        if not quiet:
            typer.echo()
    figures = engine.stats()
    if sampling.logprobs is not None:
        figures["logprobs"] = engine.logprobs()
    engine.close()
    return {
        "model": config.model,
        "version": warmset.__version__,
        "text": "".join(pieces),
        **figures,
        "seed": sampling.seed,
        "notes": engine.notes,
    }


def stats_table(answer: dict[str, Any]) -> Any:
    from warmset.measure.report import key_values

    hidden = ("text", "stages", "admission", "routing", "drafts", "graphs", "logprobs", "notes")
    flat = {key: value for key, value in answer.items() if key not in hidden and not key.endswith("_why")}
    for group in ("admission", "routing", "drafts", "graphs"):
        for key, value in answer[group].items():
            if not isinstance(value, list | dict) and not key.endswith("_why"):
                flat[f"{group}.{key}"] = value
    return key_values(flat)


def depth_table(by_depth: list[dict[str, int]]) -> Any:
    """How often the draft at each depth was right, of all drafts that windows verified at that depth."""
    from rich import box
    from rich.table import Table

    table = Table("depth", "drafted", "accepted", "share", box=box.SIMPLE_HEAD)
    for entry in by_depth:
        share = f"{entry['accepted'] / entry['drafted']:.1%}"
        table.add_row(str(entry["depth"]), str(entry["drafted"]), str(entry["accepted"]), share)
    return table


def logprobs_table(entries: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table("token", "log-probability", "most likely", box=box.SIMPLE_HEAD)
    for entry in entries:
        top = ", ".join(f"{other['token']!r} {other['logprob']:.3f}" for other in entry["top"])
        table.add_row(escape(repr(entry["token"])), f"{entry['logprob']:.3f}", escape(top))
    return table
