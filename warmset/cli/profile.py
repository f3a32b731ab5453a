"""`warmset profile`: learn which experts a text uses, show it, add profiles up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from warmset.config import EngineConfig, SlotsRequest, require, shown
from warmset.errors import WarmsetError

from .common import JsonOption, check_writable, command_group, emit_json, number, show_table

ENGINE = EngineConfig()
profile = command_group("profile", "Learned expert profiles: which experts a text uses, by layer.")
OutOption = Annotated[str, typer.Option("--out", metavar="FILE", help="Where the profile is written.")]


@profile.command("learn")
def profile_learn(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="builtin:tiny, a folder, or a hub id.")
    ] = ENGINE.model,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="Plain text or JSON lines; may be given often."),
    ] = None,
    out: OutOption = "profile.json",
    tokens: Annotated[
        int | None, typer.Option("--tokens", parser=number(int), metavar="N", help="At most, of each text.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a hub id.")] = None,
    slots: Annotated[str, typer.Option("--slots", metavar="N|33%|auto|all")] = ENGINE.slots.text,
    dtype: Annotated[str, typer.Option("--dtype")] = ENGINE.dtype,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = ENGINE.device,
    json_path: JsonOption = None,
) -> None:
    """Count the router's own picks while the model reads texts."""
    from warmset.engine import TokenEngine
    from warmset.measure.learn import learn_profile
    from warmset.prepare import prepare
    from warmset.profile import save_profile
    from warmset.progress import Bars
    from warmset.text import encode, load_tokenizer

    require(tokens is None or tokens >= 1, "--tokens", "1 or more", tokens)
    documents = read_texts(text)
    check_writable(json_path)
    check_out(out)
    config = EngineConfig(
        model=model, revision=revision, slots=SlotsRequest(text=slots), dtype=dtype, device=device,
        admission="off", stages=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(prepare(config))
    ids = [encode(tokenizer, document)[:tokens] for _, document in documents]
    with Bars() as bars, TokenEngine(config, None, bars.update) as engine:
        learned = learn_profile(engine, ids, text=", ".join(text or []), progress=bars.update)
    save_profile(learned, Path(out))
    if json_path != "-":
        show(learned, ranked=False)
        typer.echo(f"{learned.rows:,.0f} rows, written to {out}.")
    emit_json(object_of(learned), json_path)


@profile.command("show")
def profile_show(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A profile; that of builtin:tiny if absent.")
    ] = None,
    ranked: Annotated[
        bool, typer.Option("--ranked", help="Each layer's experts from the busiest to the least.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="The map as .png or .svg.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Draw a profile as a map of layers by experts."""
    from warmset.measure.heatmap import plot_heat
    from warmset.measure.price.plot import check_plot_path
    from warmset.models import BUILTIN_PROFILES
    from warmset.profile import read_profile

    if plot is not None:
        check_plot_path(plot)
        check_writable(plot, "--plot")
    check_writable(json_path)
    found = read_profile(BUILTIN_PROFILES[ENGINE.model] if file is None else Path(file))
    if json_path != "-":
        show(found, ranked=ranked)
    if plot is not None:
        plot_heat(found, plot, ranked=ranked)
    emit_json(object_of(found), json_path)


@profile.command("merge")
def profile_merge(
    files: Annotated[list[str], typer.Argument(metavar="FILE FILE...", help="Profiles of one model.")],
    out: OutOption = "profile.json",
    json_path: JsonOption = None,
) -> None:
    """Add profiles of one model up, each with the weight of its rows."""
    from warmset.profile import merge, read_profile, save_profile

    require(len(files) >= 2, "merge", "given two profiles or more", files)
    check_writable(json_path)
    check_out(out)
    merged = merge([read_profile(Path(file)) for file in files])
    save_profile(merged, Path(out))
    if json_path != "-":
        typer.echo(f"{len(files)} profiles, {merged.rows:,.0f} rows, written to {out}.")
    emit_json(object_of(merged), json_path)


def check_out(out: str) -> None:
    """Refuse `--out` where no file can be written."""
    require(out != "-", "--out", "a file", out)
    check_writable(out, "--out")


def read_texts(sources: list[str] | None) -> list[tuple[str, str]]:
    """(kind, text) of each document; a plain file's kind is its name without the ending."""
    from warmset.measure.price.documents import BUILTIN_TEXTS, read_documents

    if not sources:
        raise WarmsetError(f"--text must name a file or one of {', '.join(BUILTIN_TEXTS)}. Got none.")
    found = []
    for source in sources:
        lines = source in BUILTIN_TEXTS or ".jsonl" in Path(source).suffixes
        for document in read_documents(source):
            found.append((document.kind if lines else Path(source).stem, document.text))
    return found


def show(learned: Any, *, ranked: bool) -> None:
    from warmset.measure.heatmap import heat_table, legend

    show_table(heat_table(learned, ranked=ranked))
    typer.echo(legend())


def object_of(learned: Any) -> dict[str, Any]:
    """A profile without its counts, for `--json`."""
    from warmset.measure.heatmap import layer_figures

    identity = learned.identity
    return {
        "model": identity.model,
        "fingerprint": identity.fingerprint,
        "layers": identity.num_layers,
        "experts": identity.num_experts,
        "rows": learned.rows,
        "decay": learned.decay,
        "text": learned.text,
        "by_layer": layer_figures(learned),
    }


def profile_for(path: str | None, recorded: Any) -> Any:
    """The profile that fills the slots of a replay: the file's, or the one that ships with the trace's model, or None.

    WarmsetError where the file is of another model than the trace.
    """
    from warmset.models import BUILTIN_PROFILES
    from warmset.profile import Identity, load_profile

    expected = Identity(
        model=recorded.model,
        num_layers=recorded.num_layers,
        num_experts=recorded.num_experts,
        fingerprint=recorded.fingerprint,
    )
    if path is not None:
        learned, reason = load_profile(Path(path), expected)
        if learned is None:
            raise WarmsetError(f"--profile {shown(path)}: {reason}.")
        return learned
    shipped = BUILTIN_PROFILES.get(recorded.model)
    return None if shipped is None else load_profile(shipped, expected)[0]
