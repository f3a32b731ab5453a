"""`warmset ab`: matched pairs of engine restarts, and a verdict."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from warmset.config import EngineConfig, require, shown
from warmset.errors import WarmsetError

from . import ab_arms, ab_parse
from .ab_windows import check_same_windows
from .common import JsonOption, app, check_writable, emit_json, number

OF_SIMULATIONS = ("effect", "drift", "noise")
PAIRS, SAMPLES, ORDER, SEED = 12, 9, "alternating", 0
NEW_TOKENS = WINDOWS = 150
OF_ANSWERS, OF_WINDOWS = ("model", "prompts", "max_new_tokens"), ("windows",)
"""Options that only arms of answers have, and only arms of `bench window`."""
TO_SHOW = {"resume", "json_path", "markdown", "plot", "budget"}
"""Options that say nothing of an experiment."""


@app.command()
def ab(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="For arms of generate that name no model of their own.")
    ] = EngineConfig().model,
    a: Annotated[
        str | None,
        typer.Option(
            "--a",
            metavar="ARGS",
            help="Arm A: options of `generate`, or `bench decode ...`, `bench window ...`.",
        ),
    ] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="ARGS", help="Arm B, of the same command.")] = None,
    a_python: Annotated[
        str | None,
        typer.Option("--a-python", metavar="FILE", help="Python of another install, for arm A."),
    ] = None,
    b_python: Annotated[
        str | None,
        typer.Option("--b-python", metavar="FILE", help="Python of another install, for arm B."),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", help="Arm A against itself: the answer should be 'no verdict'.")
    ] = False,
    pairs: Annotated[int, typer.Option("--pairs", parser=number(int), metavar="N")] = PAIRS,
    samples: Annotated[
        int,
        typer.Option("--samples", parser=number(int), metavar="N", help="Answers, or stretches, of a leg."),
    ] = SAMPLES,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", parser=number(int), metavar="N", help="Tokens of each answer.")
    ] = NEW_TOKENS,
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            parser=number(int),
            metavar="N",
            help="Windows of each stretch of a `bench window` leg.",
        ),
    ] = WINDOWS,
    order: Annotated[
        str,
        typer.Option(
            "--order",
            metavar="alternating|halves",
            help="Which arm goes first: by turns, or A in the first half and B in the second.",
        ),
    ] = ORDER,
    seed: Annotated[int, typer.Option("--seed", parser=number(int), metavar="N")] = SEED,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="A JSON list of prompts; those that ship if absent."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the record of --json; it knows all other options.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget-sec",
            parser=number(float),
            metavar="S",
            help="No pair begins that would end later; --resume goes on.",
        ),
    ] = None,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="PATH", help="Write the tables as Markdown.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw the paired differences: PNG, SVG or PDF."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="The same experiment on a synthetic clock.")
    ] = False,
    effect: Annotated[
        str | None, typer.Option("--effect", metavar="X%", help="How much faster B is, in a simulation.")
    ] = None,
    drift: Annotated[
        str | None,
        typer.Option("--drift", metavar="X%", help="How much slower the last leg is, in a simulation."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            "--noise", metavar="X%", help="Standard deviation of a pair's difference, in a simulation (4%)."
        ),
    ] = None,
    power: Annotated[
        str | None, typer.Option("--power", metavar="X%", help="How many pairs an effect of this size needs.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Compare two configurations by matched pairs of engine restarts: faster, slower, or no verdict."""
    check_writable(json_path)
    given = {name for name in context.params if _is_given(context, name)}
    if simulate or power is not None:
        _simulated(given, context.params)
        return
    for name in OF_SIMULATIONS:
        if name in given:
            raise WarmsetError(f"--{name} is for --simulate{' and --power' if name == 'noise' else ''}.")
    check_writable(markdown)
    if plot is not None:
        from warmset.measure.ab.plot import check_plot

        check_writable(plot)
        check_plot(Path(plot))
    record = _experiment(given, context.params)
    _show(record, json_path, markdown, plot)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _simulated(given: set[str], options: dict[str, Any]) -> None:
    from warmset.measure.ab import report
    from warmset.measure.ab.simulate import PAIR_NOISE, Clock, pairs_needed
    from warmset.measure.ab.simulate import simulate as run

    by_power = options["power"] is not None
    allowed = {"power", "noise", "seed", "json_path"}
    if not by_power:
        allowed = {"simulate", "pairs", "order", "seed", "json_path", *OF_SIMULATIONS}
    if extra := sorted(given - allowed):
        mode = "--power" if by_power else "--simulate"
        flag = _flag(extra[0])
        raise WarmsetError(f"{mode} runs no engine and goes with {_flags(allowed)}. Got {flag} beside it.")
    json_path = options["json_path"]
    noise = PAIR_NOISE if options["noise"] is None else percent("noise", options["noise"])
    if by_power:
        found = pairs_needed(percent("power", options["power"]), noise, options["seed"])
        if json_path != "-":
            typer.echo(report.power_line(found))
    else:
        sizes = {name: percent(name, options[name]) for name in ("effect", "drift") if name in given}
        clock = Clock(pairs=options["pairs"], noise=noise, seed=options["seed"], **sizes)
        found = run(clock, options["order"])
        if json_path != "-":
            report.print_simulation(found)
    emit_json(found, json_path)


def _flags(names: set[str]) -> str:
    return ", ".join(sorted(f"--{_flag(name)}" for name in names))


def _flag(name: str) -> str:
    """An option's flag without its dashes, from its Python name."""
    return {"json_path": "json", "budget": "budget-sec"}.get(name, name.replace("_", "-"))


def percent(name: str, text: str) -> float:
    """`5%` -> 0.05; a bare 0 is 0%."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = float("nan")
    legal = abs(value) < 1e6 and (text.endswith("%") or value == 0)
    require(legal, f"--{name}", "a percentage such as 5%", text)
    return value


def _experiment(given: set[str], options: dict[str, Any]) -> dict[str, Any]:
    """Run the legs that are missing; the record."""
    from warmset.measure.ab.run import held

    path = None if options["json_path"] in (None, "-") else Path(options["json_path"])
    require(
        options["budget"] is None or 0 < options["budget"] < 1e9, "--budget-sec", "above 0", options["budget"]
    )
    with contextlib.nullcontext() if path is None else held(path):
        return _held_experiment(given, options, path)


def _held_experiment(given: set[str], options: dict[str, Any], path: Path | None) -> dict[str, Any]:
    from warmset.measure.ab import run

    if options["resume"]:
        if path is None:
            raise WarmsetError("--resume needs --json FILE: the record to go on with.")
        recorded = run.read_record_of_pairs(path)
        if (
            run.is_complete(recorded) and given <= TO_SHOW
        ):  # nothing is run, so nothing has to be there to run it
            return run.concluded(recorded, path)
        options = {**options, **_recorded(recorded, given)}
    plan = _plan(given, options)
    if options["resume"]:
        assert path is not None
        record = run.read_record_of_pairs(path)
        run.check_same(record["config"], plan, path)
    else:
        if path is not None and path.exists() and path.is_file() and path.stat().st_size:
            raise WarmsetError(
                f"{path} is there already: --resume goes on with it, another name starts anew."
            )
        record = run.new_record(plan)
    if path is None:
        typer.echo("warmset: without --json FILE no leg is kept if this stops.", err=True)
    try:
        return run.run_legs(plan, record, path, _told, options["budget"])
    finally:
        done, total = len(record["results"]["legs"]), 2 * plan.pairs
        if path is not None and done < total:
            typer.echo(f"warmset: {path} has {done} of {total} legs: --resume goes on.", err=True)


def _recorded(record: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Options that the record knows and the command line did not give."""
    import shlex

    config = record["config"]
    keys = ("pairs", "samples", "max_new_tokens", "windows", "order", "seed", "null")
    found = {key: config[key] for key in keys if key in config}
    found |= {name: shlex.join(config["arms"][name]["words"]) for name in ("a", "b")}
    found |= {f"{name}_python": config["arms"][name]["python"] for name in ("a", "b")}
    if config.get("prompts", {}).get("path") is not None:
        found["prompts"] = config["prompts"]["path"]
    if found["null"] and "null" not in given:
        found["b"] = None
    return {key: value for key, value in found.items() if key not in given}


def _plan(given: set[str], options: dict[str, Any]) -> Any:
    from warmset.measure.ab.plan import Plan, check_numbers

    numbers = {key: options[key] for key in ("pairs", "samples", "order", "seed")}
    check_numbers(**numbers)
    texts = {"a": options["a"], "b": options["b"]}
    pythons = {"a": options["a_python"], "b": options["b_python"]}
    if options["null"]:
        if texts["b"] is not None or pythons["b"] is not None:
            raise WarmsetError("--null sets arm A against itself: leave --b and --b-python out.")
        texts["b"], pythons["b"] = texts["a"], pythons["a"]
    for name in ("a", "b"):
        if texts[name] is None:
            raise WarmsetError(f"--{name} must say what arm {name.upper()} is: options of generate, or ''.")
    words = {name: ab_parse.split_arm(name, texts[name]) for name in ("a", "b")}
    work = _work(given, options, ab_parse.command_of(words["a"]), ab_parse.command_of(words["b"]))
    prompts = getattr(work, "prompts", None)
    asked = {
        "model": options["model"],
        "prompts": () if prompts is None else prompts.texts,
        "max_new_tokens": options["max_new_tokens"],
    }
    arms = {name: ab_arms.make_arm(name, words[name], pythons[name], **asked) for name in ("a", "b")}
    if prompts is None:
        check_same_windows(arms["a"].config, arms["b"].config)
    alike = all(
        getattr(arms["a"], part) == getattr(arms["b"], part) for part in ("config", "python", "files")
    )
    if alike and not options["null"]:
        raise WarmsetError(f"--a and --b are identical: {shown(texts['b'])}. --null does that on purpose.")
    return Plan(arms=arms, work=work, null=options["null"], **numbers)


def _work(given: set[str], options: dict[str, Any], command: str, other: str) -> Any:
    """What the samples of both arms are; refuses two commands, and options that their samples do not have."""
    from warmset.measure.ab.plan import Answers, Stretches, read_prompts

    if command != other:
        raise WarmsetError(f"--a and --b must be arms of one command. Got {command} and {other}.")
    foreign = {
        ab_parse.GENERATE: OF_WINDOWS,
        ab_parse.DECODE: (*OF_WINDOWS, "model"),
        ab_parse.WINDOW: OF_ANSWERS,
    }
    for name in foreign[command]:
        if name in given:
            flag = "MODEL" if name == "model" else f"--{_flag(name)}"
            raise WarmsetError(f"{flag} is not for arms of {command}.")
    if command == ab_parse.WINDOW:
        return Stretches(windows=options["windows"])
    path = options["prompts"]
    prompts = read_prompts(None if path is None else Path(path))
    return Answers(prompts=prompts, max_new_tokens=options["max_new_tokens"])


def _told(leg: dict[str, Any], done: int, total: int) -> None:
    """One line a leg on stderr, as it ends."""
    from warmset.measure.ab.analysis import METRICS, medians

    if leg["failed"] is not None:
        what = f"failed, the pair is left out: {leg['failed']}"
    else:
        figures = medians(leg)
        known = [metric for metric in METRICS if figures[metric.key] is not None]
        what = f"{figures[known[0].key]:.2f} {known[0].label}" if known else "done"
    typer.echo(f"leg {done} of {total}: pair {leg['pair'] + 1}, {leg['arm'].upper()}: {what}", err=True)


def _show(record: dict[str, Any], json_path: str | None, markdown: str | None, plot: str | None) -> None:
    from warmset.measure.ab import report

    if json_path == "-":
        emit_json(record, json_path)
    else:
        report.print_report(record)
    if markdown is not None:
        from warmset.profile import write_atomically

        write_atomically(Path(markdown), report.markdown(record))
    if plot is not None:
        from warmset.measure.ab.plot import draw

        draw(record, Path(plot))
