"""The command line: parse, build one configuration, call one function.

Answers go to stdout, everything else to stderr. Bad input is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import warmset
from warmset.config import EngineConfig, SamplingConfig, SlotsRequest, shown
from warmset.errors import WarmsetError

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts models bigger than the fast memory of the machine.",
)
bench = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, help="Speed beside its floor, and the bars."
)
app.add_typer(bench, name="bench")

ENGINE, SAMPLING = EngineConfig(), SamplingConfig()
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
    _help_if_alone(context)


@bench.callback()
def _bench_root(context: typer.Context) -> None:
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _number(kind: type) -> Any:
    """A parser that says what came when it is no number of this kind."""

    def parse(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            whole = "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"must be {whole}. Got {shown(text)}.") from None

    return parse


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
        int, typer.Option("--max-new-tokens", parser=_number(int), metavar="N")
    ] = SAMPLING.max_new_tokens,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            parser=_number(int),
            metavar="N",
            help="Prompt and answer together; the model's context if absent.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto: float32 on a CPU, the checkpoint's on a GPU.")
    ] = ENGINE.dtype,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = ENGINE.device,
    seed: Annotated[int, typer.Option("--seed", parser=_number(int), metavar="N")] = SAMPLING.seed,
    temperature: Annotated[
        float,
        typer.Option("--temperature", parser=_number(float), metavar="X", help="0 is greedy."),
    ] = SAMPLING.temperature,
    top_p: Annotated[float, typer.Option("--top-p", parser=_number(float), metavar="X")] = SAMPLING.top_p,
    top_k: Annotated[
        int, typer.Option("--top-k", parser=_number(int), metavar="N", help="0 is off.")
    ] = SAMPLING.top_k,
    min_p: Annotated[float, typer.Option("--min-p", parser=_number(float), metavar="X")] = SAMPLING.min_p,
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


@app.command()
def env(json_path: JsonOption = None) -> None:
    """Versions, GPU, compiler, memory and limits: what a bug report needs."""
    from warmset.measure.machine import describe_machine
    from warmset.measure.report import key_values

    check_writable(json_path)
    found = describe_machine()
    if json_path != "-":
        show_table(key_values({key: "-" if value is None else value for key, value in found.items()}))
    emit_json(found, json_path)


@app.command()
def parity(
    cases: Annotated[int, typer.Option("--cases", parser=_number(int), metavar="N")] = 400,
    seed: Annotated[int, typer.Option("--seed", parser=_number(int), metavar="N")] = 0,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda")] = "cpu",
    json_path: JsonOption = None,
) -> None:
    """Compare the routing kernels with one another and with the reference, bit for bit; exit 1 on a mismatch."""
    from warmset.engine import resolve_device
    from warmset.measure import parity as harness

    if not 1 <= cases <= MAX_CASES:
        raise WarmsetError(f"--cases must be 1 to {MAX_CASES:,}. Got {cases}.")
    if not 0 <= seed < 2**31:
        raise WarmsetError(f"--seed must be 0 to 2**31 - 1. Got {seed}.")
    if device not in ("cpu", "cuda"):
        raise WarmsetError(f"--device must be cpu or cuda. Got {device!r}.")
    resolve_device(device)
    check_writable(json_path)
    report = harness.run(cases, seed, device)
    if json_path != "-":
        typer.echo("\n".join(report.lines()))
    emit_json({**vars(report), "ok": report.ok}, json_path)
    if not report.ok:
        raise typer.Exit(1)


@bench.command("kernels")
def bench_kernels(
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="A routing trace to time too.")
    ] = None,
    cases: Annotated[int, typer.Option("--cases", parser=_number(int), metavar="N")] = 20_000,
    json_path: JsonOption = None,
) -> None:
    """Time the routing kernels on a GPU, beside their floor; parity first, and no speed where it is red."""
    from warmset.engine import resolve_device
    from warmset.measure import kernels, kernels_table

    if not 1 <= cases <= MAX_CASES:
        raise WarmsetError(f"--cases must be 1 to {MAX_CASES:,}. Got {cases}.")
    resolve_device("cuda")
    check_writable(json_path)
    measured = kernels.run_bench(trace=trace, parity_cases=cases)
    if measured["tests"] == "red":
        typer.echo("parity is red, so no speed was measured:\n" + "\n".join(measured["mismatches"]), err=True)
        raise typer.Exit(1)
    if json_path != "-":
        typer.echo("\n".join(kernels_table.table(measured["results"])))
    if json_path is not None:
        from warmset.measure.record import make_record

        emit_json(make_record(name="routing-kernels", **measured), json_path)


@bench.command("check")
def bench_check(
    bars: Annotated[Path, typer.Option("--bars", metavar="FILE", help="The bars.")] = Path(
        "results/bars.toml"
    ),
    json_path: JsonOption = None,
) -> None:
    """Compare the records in results/ with results/bars.toml; exit 1 on a miss or a red record."""
    from warmset.measure.bars import check_bars
    from warmset.measure.report import bars_table

    check_writable(json_path)
    results = check_bars(bars)
    if json_path != "-":
        show_table(bars_table(results))
        for result in results:
            if result.why:
                typer.echo(f"{result.name}: {result.verdict}: {result.why}")
    emit_json({"bars": [vars(result) for result in results]}, json_path)
    if any(result.fails for result in results):
        raise typer.Exit(1)


@bench.command("window")
def bench_window(
    part: Annotated[str, typer.Option("--part", help="experts: the expert part alone.")] = "experts",
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME", help="qwen3-next-80b, or tiny for a rehearsal.")
    ] = "qwen3-next-80b",
    rows: Annotated[str, typer.Option("--rows", metavar="N,N", help="Rows of a window.")] = "1,4,8",
    cold_experts: Annotated[
        str, typer.Option("--cold-experts", metavar="X,X", help="Cold experts a layer, spread evenly.")
    ] = "0.63,1.87",
    tiles: Annotated[
        str | None, typer.Option("--tiles", metavar="NAME", help="Block sizes of the kernels.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = "auto",
    json_path: JsonOption = None,
) -> None:
    """A decode window's expert part beside its floors; exit 1 when a part failed."""
    from warmset.config import require
    from warmset.engine import resolve_device
    from warmset.measure.window import run_bench, save_record, window_table

    check_writable(json_path)
    require(part == "experts", "--part", "experts", part)
    chosen = resolve_device(device)
    if chosen.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise WarmsetError(
            "bench window needs a CUDA device: on a CPU it only rehearses, with TRITON_INTERPRET=1."
        )
    found = run_bench(shape, parse_list(rows, int), parse_list(cold_experts, float), chosen, tiles)
    if json_path == "-":
        emit_json(found, json_path)
    elif json_path is not None:
        save_record(Path(json_path), found)
    if json_path != "-":
        show_table(window_table(found["results"]))
    if found["failed"]:
        typer.echo(f"warmset: failed: {', '.join(found['failed'])}.", err=True)
        raise typer.Exit(1)


def parse_list(text: str, kind: type) -> list[Any]:
    """`1,4,8` -> [1, 4, 8]."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise WarmsetError(f"A list must be {what} with commas between them. Got {text!r}.") from None


def check_writable(json_path: str | None) -> None:
    """Refuse a `--json` path that cannot be written, before the work and not after it."""
    if json_path in (None, "-"):
        return
    refusal = WarmsetError(
        f"--json must be - or a file in a folder that can be written to. Got {shown(json_path)}."
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


# Typer carries its own copy of click in newer releases: take the class from what it exports.
_UsageProblem: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Entry point: runs the command and turns errors into one sentence and an exit code."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us as it ends any filter
    try:
        sys.exit(app(standalone_mode=False))
    except WarmsetError as error:
        _leave(str(error), 2)
    except OSError as error:
        _leave(f"{error.strerror or error}: {error.filename or 'standard output'}.", 2)
    except MemoryError:
        _leave("out of memory: fewer slots or a shorter max_model_len need less.", 2)
    except _UsageProblem as error:
        _leave(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        _leave("stopped.", 130)


def _leave(sentence: str, code: int) -> None:
    typer.echo(f"warmset: {' '.join(sentence.split())}", err=True)
    sys.exit(code)
