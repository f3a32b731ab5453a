"""`warmset trace`: record what routers score, and run policies, caches and slot counts over it without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from warmset.config import (
    ADMISSIONS,
    MAX_WINDOW_ROWS,
    EngineConfig,
    SamplingConfig,
    SlotsRequest,
    require,
    shown,
)
from warmset.errors import WarmsetError

from .common import JsonOption, check_writable, command_group, emit_json, number, parse_list, show_table
from .profile import check_out, profile_for, read_texts

ENGINE, SAMPLING = EngineConfig(), SamplingConfig()
DEFAULT_MARGIN = "1.0"
MOST_RUNS = 1000
MOST_RATE_BYTES = 1 << 40
trace = command_group("trace", "Routing traces, and any policy, cache or slot count over them.")


@trace.command("record")
def trace_record(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="builtin:tiny, a folder, or a hub id.")
    ] = ENGINE.model,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="Where it is written.")
    ] = "trace.safetensors",
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="Plain text or JSON lines to read; may be given often."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="In place of texts: record the answer to this.")
    ] = None,
    margin: Annotated[
        str,
        typer.Option("--margin", metavar="X|all", help="Keep scores at most so far below the last pick."),
    ] = DEFAULT_MARGIN,
    tokens: Annotated[
        int | None, typer.Option("--tokens", parser=number(int), metavar="N", help="At most, of each text.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", parser=number(int), metavar="N", help="Of the answer.")
    ] = SAMPLING.max_new_tokens,
    window: Annotated[
        int,
        typer.Option("--window", parser=number(int), metavar="T", help="The most rows of a window, 1 to 8."),
    ] = 1,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="none|lookup|mtp", help="Of an answer's further rows.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a hub id.")] = None,
    slots: Annotated[str, typer.Option("--slots", metavar="N|33%|auto|all")] = ENGINE.slots.text,
    dtype: Annotated[str, typer.Option("--dtype")] = ENGINE.dtype,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = ENGINE.device,
    json_path: JsonOption = None,
) -> None:
    """Run texts, or an answer, through decode windows with exact routing and write what the routers scored."""
    from warmset.engine import TokenEngine
    from warmset.measure.recording import read_texts as run_texts
    from warmset.measure.recording import recording, save_recording
    from warmset.prepare import prepare
    from warmset.progress import Bars
    from warmset.text import Engine, check_request, encode, load_tokenizer

    kept = _margin(margin)
    require(tokens is None or tokens >= 1, "--tokens", "1 or more", tokens)
    require(1 <= window <= MAX_WINDOW_ROWS, "--window", f"1 to {MAX_WINDOW_ROWS} rows", window)
    if (prompt is None) == (text is None):
        raise WarmsetError("trace record needs --text or --prompt, one of them.")
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    config = EngineConfig(
        model=model, revision=revision, slots=SlotsRequest(text=slots), dtype=dtype, device=device,
        admission="off", stages=False, window=None if prompt is None else window, draft=draft,
    )  # fmt: skip
    check_writable(json_path)
    check_out(out)
    with Bars() as bars:
        if prompt is not None:
            check_request(config, prompt)
            with Engine.open(config, None, bars.update) as engine, recording(engine.tokens, kept) as recorder:
                recorder.kind = "answer"
                for _ in engine.stream_ids(encode(engine.tokenizer, prompt), sampling):
                    pass
                recorded = recorder.recording()
        else:
            documents = read_texts(text)
            tokenizer = load_tokenizer(prepare(config))
            ids = [(kind, encode(tokenizer, document)[:tokens]) for kind, document in documents]
            with TokenEngine(config, None, bars.update) as tokens_in, recording(tokens_in, kept) as recorder:
                for done, (kind, part) in enumerate(ids, start=1):
                    recorder.kind = kind
                    run_texts(tokens_in, part, window)
                    bars.update("reading", done, len(ids))
                recorded = recorder.recording()
    save_recording(recorded, Path(out))
    answer = {**_about(recorded), "file": out, "bytes": Path(out).stat().st_size}
    if json_path != "-":
        from warmset.measure.report import key_values

        show_table(key_values(answer))
    emit_json(answer, json_path)


@trace.command("replay")
def trace_replay(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A trace; the one that ships if absent.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME:key=value,...", help="exact if absent; may be given often."),
    ] = None,
    admission: Annotated[str, typer.Option("--admission", metavar="NAME,NAME")] = ",".join(ADMISSIONS),
    slots: Annotated[
        str, typer.Option("--slots", metavar="N|33%,...", help="Over all layers.")
    ] = "8%,16%,33%",
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="Fills the slots at the start.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only the rows of this kind of text.")] = None,
    budget: Annotated[
        str,
        typer.Option("--budget", metavar="SIZE", help="What admission may copy in a window, such as 32MiB."),
    ] = "32MiB",
    expert_bytes: Annotated[
        int | None,
        typer.Option(
            "--expert-bytes",
            parser=number(int),
            metavar="N",
            help="Size of an expert; the trace's if absent.",
        ),
    ] = None,
    cold_gbs: Annotated[
        float,
        typer.Option("--cold-gbs", parser=number(float), metavar="X", help="Cold experts, read in place."),
    ] = 48.0,
    copy_gbs: Annotated[
        float, typer.Option("--copy-gbs", parser=number(float), metavar="X", help="Copies into slots.")
    ] = 52.7,
    fast_gbs: Annotated[
        float, typer.Option("--fast-gbs", parser=number(float), metavar="X", help="Fast memory.")
    ] = 4244.0,
    layer_bytes: Annotated[
        int,
        typer.Option("--layer-bytes", parser=number(int), metavar="N", help="All else that a layer reads."),
    ] = 98_500_000,
    check: Annotated[
        bool, typer.Option("--check", help="Judge lfu on the trace that ships; exit 1 on a miss.")
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Hits, cold experts, bytes and predicted ms of policies x admissions x slots."""
    from warmset.measure.replay import Rates

    allowed = f"1 to {MOST_RATE_BYTES}"
    require(
        expert_bytes is None or 1 <= expert_bytes <= MOST_RATE_BYTES, "--expert-bytes", allowed, expert_bytes
    )
    require(0 <= layer_bytes <= MOST_RATE_BYTES, "--layer-bytes", f"0 to {MOST_RATE_BYTES}", layer_bytes)
    for name, rate in (("--cold-gbs", cold_gbs), ("--copy-gbs", copy_gbs), ("--fast-gbs", fast_gbs)):
        require(0 < rate < 1e9, name, "above 0 and below 1e9 GB/s", rate)
    rates = Rates(
        fast_gbs=fast_gbs, cold_gbs=cold_gbs, copy_gbs=copy_gbs, expert_bytes=expert_bytes, layer_bytes=layer_bytes
    )  # fmt: skip
    check_writable(json_path)
    if check:
        if file is not None or policy is not None or profile is not None or kind is not None:
            raise WarmsetError("--check is about the trace that ships: it takes rates only.")
        _check(rates, json_path)
        return
    _replay(file, policy or [], admission, slots, profile, kind, budget, rates, json_path)


def _replay(
    file: str | None,
    policies: list[str],
    admission: str,
    slots: str,
    profile: str | None,
    kind: str | None,
    budget: str,
    rates: Any,
    json_path: str | None,
) -> None:
    from warmset.measure.recording import load_recording, of_kind
    from warmset.measure.replay import expert_bytes_of, replay
    from warmset.measure.replay_table import rates_line, replay_tables
    from warmset.models import DATA
    from warmset.plan import parse_bytes
    from warmset.progress import Bars
    from warmset.routing import describe, parse_policy

    budget_bytes = parse_bytes(budget, "--budget")
    chosen: list[Any] = [parse_policy(text) for text in policies] or [None]
    rules = admission.split(",")
    for rule in rules:
        require(rule in ADMISSIONS, "--admission", f"of {', '.join(ADMISSIONS)}", rule)
    requests = [SlotsRequest(text=text) for text in slots.split(",")]
    if any(request.text.strip() == "auto" for request in requests):
        raise WarmsetError("--slots auto is for engines: a replay needs a number, a share or all.")
    recorded = load_recording(DATA / "trace.safetensors" if file is None else Path(file))
    if kind is not None:
        recorded = of_kind(recorded, kind)
    total = recorded.num_layers * recorded.num_experts
    counts = [
        request.resolve(experts_total=total, fitting=total, fitting_why="").value for request in requests
    ]
    require(
        len(chosen) * len(rules) * len(counts) <= MOST_RUNS, "policies x admissions x slots", f"at most {MOST_RUNS}",
        len(chosen) * len(rules) * len(counts),
    )  # fmt: skip
    for one in chosen:
        _check_fits(one, recorded)
    learned = profile_for(profile, recorded)
    runs: list[dict[str, Any]] = []
    with Bars() as bars:
        for one in chosen:
            for count in counts:
                for rule in rules:
                    found = replay(
                        recorded,
                        num_slots=count,
                        policy=one,
                        rule=rule,
                        learned=learned,
                        budget_bytes=budget_bytes,
                        rates=rates,
                    )
                    name = "exact" if one is None else describe(one)
                    runs.append({"policy": name, "admission": rule, **found.figures()})
                    bars.update("replaying", len(runs), len(chosen) * len(counts) * len(rules))
    size = expert_bytes_of(recorded, rates)
    if json_path != "-":
        for table in replay_tables(runs):
            show_table(table)
        for why in dict.fromkeys(f"{run['policy']}: {run['unknown']}." for run in runs if run["unknown"]):
            typer.echo(f"unknown: {why}")
        typer.echo(rates_line(rates, size))
    emit_json(
        {
            "trace": _about(recorded),
            "profile": None if learned is None else Path(learned.source).name,
            "budget_bytes": budget_bytes,
            "rates": {**vars(rates), "expert_bytes": size},
            "runs": runs,
        },
        json_path,
    )


def _check_fits(policy: Any, recorded: Any) -> None:
    """Refuse ranks that leave no tail in this trace, and margins for another number of layers."""
    check_layers = getattr(policy, "check_layers", None)
    if check_layers is not None:
        check_layers(recorded.num_layers)
    ranks = getattr(policy, "ranks", None)
    if ranks is not None and not ranks[0] <= min(ranks[1], recorded.top_k - 1):
        raise WarmsetError(
            f"ranks must leave a tail: LO at most HI, in a row of {recorded.top_k} picks. "
            f"Got {ranks[0]}-{ranks[1]}."
        )


def _check(rates: Any, json_path: str | None) -> None:
    from warmset.measure.record import make_record
    from warmset.measure.replay import DEFAULT_EXPERT_BYTES
    from warmset.measure.replay_check import shipped_check
    from warmset.measure.replay_table import blocks_table, check_lines

    results = shipped_check(rates)
    if not results["forms_agree"]:
        typer.echo("The two forms of the replay count differently, so nothing was judged.", err=True)
        raise typer.Exit(1)
    if json_path != "-":
        show_table(blocks_table(results["blocks"]))
        typer.echo("\n".join(check_lines(results)))
    if json_path is not None:
        config = {**vars(rates), "expert_bytes": rates.expert_bytes or DEFAULT_EXPERT_BYTES}
        emit_json(make_record(name="trace-replay", config=config, results=results, tests="green"), json_path)
    if not results["ok"]:
        raise typer.Exit(1)


def _margin(text: str) -> float | None:
    if text == "all":
        return None
    margin = parse_list("--margin", text, float) if "," not in text else []
    legal = len(margin) == 1 and 0 <= margin[0] < 1e6
    if not legal:
        raise WarmsetError(f"--margin must be 0 or more, or all. Got {shown(text)}.")
    return margin[0]


def _about(recorded: Any) -> dict[str, Any]:
    return {
        "model": recorded.model,
        "fingerprint": recorded.fingerprint,
        "layers": recorded.num_layers,
        "experts": recorded.num_experts,
        "top_k": recorded.top_k,
        "windows": len(recorded.windows),
        "rows": recorded.num_rows,
        "committed_rows": int(recorded.committed_N.sum()),
        "kinds": list(recorded.kinds),
        "margin": "all" if recorded.margin is None else recorded.margin,
    }
