"""`warmset generate`: continue a text and say what it took."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import warmset
from warmset.config import EngineConfig, SamplingConfig, SlotsRequest, shown
from warmset.errors import WarmsetError

from .common import JsonOption, app, check_writable, emit_json, number, show_table

ENGINE, SAMPLING = EngineConfig(), SamplingConfig()


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
            metavar="MARGIN",
            help="Redirect tail picks from cold experts to resident ones at most MARGIN worse (off when absent).",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="LO-HI", help="The tail, 0-based (6-9 of 10 by default).")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="NAME:key=value,...", help="Any routing policy, or module:Class."),
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
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="Learned profile that fills the slots.")
    ] = None,
    admission: Annotated[
        str, typer.Option("--admission", help="off: slots stay as they were filled.")
    ] = ENGINE.admission,
    route_kernel: Annotated[
        str,
        typer.Option("--route-kernel", metavar="fused|warp|serial", help="Which kernels route, on a GPU."),
    ] = ENGINE.route_kernel,
    stats: Annotated[bool, typer.Option("--stats", help="Show the figures of the answer on stderr.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Show where a window's time goes.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Continue a text and say what it took."""
    chosen = build_policy(route_resident, ranks, policy)
    config = EngineConfig(
        model=model,
        revision=revision,
        slots=SlotsRequest(text=slots),
        vram=vram,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        profile=profile,
        admission=admission,
        route_kernel=route_kernel,
    )
    sampling = SamplingConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    if not prompt:
        raise WarmsetError("--prompt must hold some text. Got an empty one.")
    check_writable(json_path)
    answer = run_generate(config, sampling, prompt, chosen, quiet=json_path == "-")
    if stats:
        show_table(stats_table(answer), stderr=True)
    if stages and answer["stages"]:
        from warmset.measure.report import stage_table

        show_table(stage_table(answer["stages"]), stderr=json_path == "-")
    emit_json(answer, json_path)


def build_policy(route_resident: str | None, ranks: str | None, policy: str | None) -> Any:
    """The policy that the options name together, or None for off; refuses a margin beside a policy."""
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
    try:
        margin = float(route_resident)
    except ValueError:
        raise WarmsetError(f"--route-resident must be a number. Got {shown(route_resident)}.") from None
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


def run_generate(
    config: EngineConfig, sampling: SamplingConfig, prompt: str, policy: Any, *, quiet: bool
) -> dict[str, Any]:
    """Check, load, answer (streamed to stdout unless `quiet`), and return the object of `--json`."""
    from warmset.progress import Bars
    from warmset.text import Engine, check_request, encode

    check_request(config, prompt, policy)
    with Bars() as bars:
        engine = Engine.open(config, policy, bars.update)
    for note in engine.notes:
        typer.echo(f"warmset: {note}", err=True)
    pieces: list[str] = []
    try:
        for piece in engine.stream_ids(encode(engine.tokenizer, prompt), sampling):
            pieces.append(piece)
            if not quiet:
                typer.echo(piece, nl=False)
    finally:  # also before an error: its sentence begins a line
        if not quiet:
            typer.echo()
    figures = engine.stats()
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

    hidden = ("text", "stages", "routing", "notes")
    flat = {key: value for key, value in answer.items() if key not in hidden}
    return key_values({**flat, **{f"routing.{key}": value for key, value in answer["routing"].items()}})
