"""`warmset price`: perplexity and KL of a routing policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from warmset.config import EngineConfig, SlotsRequest, require, shown
from warmset.errors import WarmsetError

from .common import JsonOption, app, check_writable, emit_json, number, parse_list, show_table
from .generate import parse_ranks
from .price_speed import DEFAULT_MARGINS, SpeedOptions

ENGINE = EngineConfig()


@app.command()
def price(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="builtin:tiny, a folder, or a hub id.")
    ] = ENGINE.model,
    text: Annotated[
        str, typer.Option("--text", metavar="FILE", help="Plain text, or .jsonl with `text` and `kind`.")
    ] = "builtin:price",
    margins: Annotated[
        str | None, typer.Option("--margins", metavar="X,X", help="Margins to measure: 0.25,0.5,1.0.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", metavar="LO-HI", help="The tail, 0-based (6-9 of 10); 6-9,4-9 with --speed."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="NAME:key=value,...", help="A policy to measure; may be given often."
        ),
    ] = None,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="all", help="Every policy, from gentle to strong.")
    ] = None,
    free: Annotated[
        bool, typer.Option("--free", help="Free answers to 20 prompts too: where they part, and their loss.")
    ] = False,
    budget_kl: Annotated[
        float | None,
        typer.Option(
            "--budget-kl",
            parser=number(float),
            metavar="X",
            help="Find the margins that cost at most so much excess KL, in nats.",
        ),
    ] = None,
    calibration: Annotated[
        str, typer.Option("--calibration", metavar="FILE", help="The text that margins are found on.")
    ] = "builtin:calibration",
    calibration_positions: Annotated[
        int,
        typer.Option(
            "--calibration-positions",
            parser=number(int),
            metavar="N",
            help="How much of it, from every document.",
        ),
    ] = 3000,
    policy_file: Annotated[
        str | None, typer.Option("--policy-file", metavar="FILE", help="Where the margins found are written.")
    ] = None,
    slots: Annotated[
        str, typer.Option("--slots", metavar="N|33%|auto|all", help="Slots over all layers; 0 is legal.")
    ] = "33%",
    window: Annotated[
        int, typer.Option("--window", parser=number(int), metavar="T", help="Rows of a window, 1 to 8.")
    ] = 4,
    residency: Annotated[
        str, typer.Option("--residency", metavar="frozen|live", help="live: admission moves experts.")
    ] = "frozen",
    simulate_residency: Annotated[
        bool,
        typer.Option("--simulate-residency", help="Load every expert; only policies take some for cold."),
    ] = False,
    positions: Annotated[
        int | None,
        typer.Option("--positions", parser=number(int), metavar="N", help="Score the first N only."),
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Off against off, rounding null, random swaps.")
    ] = True,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="Learned profile that fills the slots.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a hub id.")] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto: float32 on a CPU, the checkpoint's on a GPU.")
    ] = ENGINE.dtype,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = ENGINE.device,
    seed: Annotated[int, typer.Option("--seed", parser=number(int), metavar="N")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what an interrupted run of the same left.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Bytes against excess KL, .png or .svg.")
    ] = None,
    records: Annotated[
        str | None, typer.Option("--records", metavar="FILE", help="Every position: .jsonl or .parquet.")
    ] = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed", help="On a GPU: cold wait, ms a window, tokens a second by margin and ranks."
        ),
    ] = False,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="NAME", help="Of the windows timed (qwen3-next-80b).")
    ] = None,
    shape_slots: Annotated[
        int | None,
        typer.Option("--shape-slots", parser=number(int), metavar="N", help="Slots of the shape (8083)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="What those windows pick (the shipped one)."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="With --speed: prices that --json wrote; time only."),
    ] = None,
    budget_sec: Annotated[
        float | None,
        typer.Option(
            "--budget-sec", parser=number(float), metavar="S", help="No round of --speed ends later (68)."
        ),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Perplexity and KL of a routing policy, teacher-forced through decode windows, against off and controls.

    What a policy saves stands beside what it costs; a rounding and as many random swaps are measured too.
    """
    from warmset.measure.price.plot import check_plot_path
    from warmset.measure.price.records import check_records_path
    from warmset.measure.price.run import PriceConfig, check_policies

    options = SpeedOptions(
        shape=shape, shape_slots=shape_slots, trace=trace, prices=prices, budget_sec=budget_sec
    )
    timing = None
    if speed:
        others = {"--policy": policy, "--policies": policies, "--free": free, "--budget-kl": budget_kl}
        others |= {} if prices is None else {"--records": records}
        for name, value in others.items():
            if value:
                raise WarmsetError(f"{name} is not for --speed{'' if prices is None else ' with --prices'}.")
        timing = options.check(margins, ranks, window, device)
        chosen: list[Any] = list(timing.request.policies().values())
    else:
        options.refuse_without_speed()
        chosen = _policies(margins, ranks, policy)
    require(policies in (None, "all"), "--policies", "all", policies)
    if policies is not None and residency == "live":
        raise WarmsetError("--policies all needs frozen residency: its curve of more slots knows no other.")
    config = PriceConfig(
        rows=window,
        residency=residency,
        controls=controls,
        seed=seed,
        positions=positions,
        simulate_residency=simulate_residency,
        resume=resume,
    )
    engine = EngineConfig(
        model=model,
        revision=revision,
        slots=SlotsRequest(text=slots),
        device=device,
        dtype=dtype,
        profile=profile,
        stages=False,
    )
    if budget_kl is not None and not 0 < budget_kl < 100:
        raise WarmsetError(f"--budget-kl must be above 0 nats. Got {budget_kl:g}.")
    if calibration_positions < 100:
        raise WarmsetError(f"--calibration-positions must be 100 or more. Got {calibration_positions}.")
    if policy_file is not None and budget_kl is None:
        raise WarmsetError("--policy-file needs --budget-kl: it is where the margins found are written.")
    if policy_file is not None and not policy_file.endswith(".json"):
        raise WarmsetError(f"--policy-file must end in .json. Got {shown(policy_file)}.")
    if plot is not None:
        if policies is None:
            raise WarmsetError("--plot needs --policies all: it draws them side by side.")
        check_plot_path(plot)
    if records is not None:
        check_records_path(records)
    check_writable(json_path)
    for option, path in (("--policy-file", policy_file), ("--plot", plot), ("--records", records)):
        check_writable(path, option)
    check_policies(chosen)
    if not chosen and policies is None and budget_kl is None:
        chosen = _policies(DEFAULT_MARGINS, ranks, None)
    timed = None if timing is None else timing.run()
    if timing is not None and timed is not None and timing.prices is not None:
        timing.report(timed, timing.prices, json_path)
        return
    results = run_price(
        engine,
        config,
        _source(text),
        chosen,
        sweep=policies is not None,
        free=free,
        budget_kl=budget_kl,
        search={
            "calibration": _source(calibration),
            "positions": calibration_positions,
            "ranks": None if speed else parse_ranks(ranks),
        },
        policy_file=policy_file,
        plot=plot,
        records=records,
    )
    if json_path != "-":
        _show(results)
    if timing is not None and timed is not None:
        timed["results"]["price"] = results
        timing.report(timed, results, json_path)
        return
    emit_json(results, json_path)


def _policies(margins: str | None, ranks: str | None, policies: list[str] | None) -> list[Any]:
    from warmset.routing import MarginSwap, parse_policy

    tail = parse_ranks(ranks)
    found: list[Any] = [] if margins is None else [
        MarginSwap(margin=margin, ranks=tail) for margin in parse_list("--margins", margins, float)
    ]  # fmt: skip
    return found + [parse_policy(text) for text in policies or []]


def _source(text: str) -> Any:
    from warmset.measure.price.run import Source

    return Source.of(text if text.startswith("builtin:") else Path(text))


def run_price(
    engine_config: EngineConfig,
    config: Any,
    source: Any,
    policies: list[Any],
    *,
    sweep: bool,
    free: bool,
    budget_kl: float | None,
    search: dict[str, Any],
    policy_file: str | None,
    plot: str | None,
    records: str | None,
) -> dict[str, Any]:
    """Load, measure what was asked for, write files, and return the object of `--json`."""
    from warmset.measure.price.plot import plot_policies
    from warmset.measure.price.run import open_engine, price_engine, run, scored_text
    from warmset.measure.price.session import Search, measure_free, write_policy_file
    from warmset.prepare import prepare
    from warmset.progress import Bars
    from warmset.text import load_tokenizer

    prepare(engine_config)
    settings = {name: getattr(engine_config, name) for name in ("revision", "device", "dtype", "profile")}
    slots = engine_config.slots.text
    with Bars() as bars:
        engine = open_engine(engine_config.model, slots, config, bars.update, **settings)
        try:
            for note in engine.notes:
                typer.echo(f"warmset: {note}", err=True)
            tokenizer = load_tokenizer(engine.prepared)
            scored = scored_text(source, tokenizer, config, engine)
            results: dict[str, Any] = {"model": engine_config.model, "slots": engine.num_slots.value}
            found = None
            if budget_kl is not None:
                searching = Search(engine, tokenizer, scored, config, slots, progress=bars.update, **search)
                found = searching.find(budget_kl)
                searching.finish()
                policies = [*policies, *(policy for policy in found.policies if policy not in policies)]
            pricing = price_engine(engine, scored, config, slots, bars.update)
            report = run(pricing, policies)
            results |= report.results
            if sweep:
                results["sweep"] = pricing.sweep(engine.choose_residents)
            pricing.finish()
            if found is not None:
                results["budget"] = found.results(engine.identity(), report.results["policies"])
            if free:
                results["free"] = measure_free(engine, tokenizer, policies, config.seed, bars.update)
        except KeyboardInterrupt:
            typer.echo("warmset: finished passes are kept: the same command with --resume goes on.", err=True)
            raise
        finally:
            engine.close()
    if policy_file is not None:
        write_policy_file(policy_file, results["budget"], engine_config.model, results)
    if plot is not None:
        plot_policies(results["sweep"], plot)
    if records is not None:
        report.save_records(records)
    return results


def _show(results: dict[str, Any]) -> None:
    from warmset.measure.price import table

    arms = results["policies"]
    if arms:
        show_table(table.price_table(results["off"], arms))
        show_table(table.split_table(arms, "by_kind", "kind of text"))
        show_table(table.split_table(arms, "by_place", "positions"))
    for arm in arms:
        if arm["verdict"] != "measured":
            typer.echo(f"{arm['policy']}: {arm['verdict']}: {arm['why']}.")
    if "sweep" in results:
        show_table(table.sweep_table(results["sweep"]))
    if "budget" in results:
        found = results["budget"]
        typer.echo(f"one margin: {found['single']['policy']}; one a layer: {found['by_layer']['policy']}")
    if "free" in results:
        show_table(table.free_table(results["free"]))
    checked = results["off"]["checked_positions"]
    if checked:
        typer.echo(f"off against off: the same bits at {checked:,} positions.")
