"""`warmset price` and `--route-resident auto`: the object it writes, and bad input before anything loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from warmset import cli
from warmset.measure.price.plain import ratio_to_plain
from warmset.measure.price.run import PriceConfig, Source, open_engine, scored_text
from warmset.models import BUILTIN_POLICIES
from warmset.routing import MarginSwap
from warmset.routing.parse import read_policy_file
from warmset.text import load_tokenizer

runner = CliRunner()
TEXT = "The server reads the query and the planner picks an index.\n" * 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "warmset", *words], capture_output=True, text=True, check=False
    )


def test_help_says_what_it_is_for():
    answer = runner.invoke(cli.app, ["price", "--help"])
    assert "Perplexity and KL of a routing policy" in answer.stdout


def test_price_of_margins_on_the_embedded_model():
    answer = runner.invoke(
        cli.app, "price --margins 0.25,0.5,1.0 --positions 120 --no-controls --json -".split()
    )
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    kl = [arm["kl"] for arm in (found["off"], *found["policies"])]
    assert kl[0] == 0 and found["off"]["argmax_same"] == 1.0 and kl == sorted(kl) and kl[3] > kl[1] > 0
    assert [arm["policy"] for arm in found["policies"]] == [f"margin:margin={m}" for m in (0.25, 0.5, 1.0)]
    assert all(arm["perplexity"] > 1 and arm["bytes_per_token"] > 0 for arm in found["policies"])
    assert found["positions"] == 120 and found["rows"] == 4 and found["resident"] == 676


def test_everything_at_once_on_a_small_model(checkpoints, tmp_path):
    text, calibration = tmp_path / "t.txt", tmp_path / "c.txt"
    text.write_text(TEXT)
    calibration.write_text("Other words stand here, of which none is in the first text.\n" * 3)
    paths = {name: str(tmp_path / name) for name in ("o.json", "p.json", "plot.svg", "plot.png", "r.jsonl")}
    words = f"price {checkpoints['qwen3_moe']} --text {text} --calibration {calibration} --calibration-positions 100"
    words += f" --window 8 --ranks 0-3 --positions 24 --policies all --plot {paths['plot.svg']} --margins 2.0"
    words += f" --budget-kl 0.5 --policy-file {paths['p.json']} --json {paths['o.json']} --records {paths['r.jsonl']}"
    answer = runner.invoke(cli.app, words.split())
    assert answer.exit_code == 0, answer.output
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["budget"]["by_layer"]["on_calibration"][-1]["excess_kl"] <= 0.5
    assert set(found["sweep"]["families"]) > {"margin", "fewer-picks", "resident-only"}
    shares = [point["bytes_per_token"] for point in found["sweep"]["exact"]]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    svg = (tmp_path / "plot.svg").read_text()
    assert "more slots, exact routing" in svg and "Pareto front" in svg and "fewer-picks" in svg
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 24 * len(found["policies"])
    policy = read_policy_file(tmp_path / "p.json")
    assert len(policy.margin) == 2 and policy.ranks == (0, 3)
    use = (
        f"generate {checkpoints['qwen3_moe']} --prompt hello --slots 33% --policy {paths['p.json']} --json -"
    )
    answer = runner.invoke(cli.app, [*use.split(), "--max-new-tokens", "3"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["routing"]["policy"].startswith("margin:margin=")
    assert not list((tmp_path / "cache" / "warmset" / "price").glob("*/")), "nothing is left behind"


def test_auto_is_the_calibration_of_a_known_model_and_the_default_of_others(checkpoints):
    known = runner.invoke(
        cli.app,
        "generate --prompt hello --slots 33% --route-resident auto --max-new-tokens 2 --json -".split(),
    )
    assert known.exit_code == 0, known.output
    shipped = read_policy_file(BUILTIN_POLICIES["builtin:tiny"])
    margins = "/".join(str(margin) for margin in shipped.margin)
    assert json.loads(known.stdout)["routing"]["policy"] == f"margin:margin={margins}"
    assert "the calibration of builtin:tiny" in known.stderr
    words = (
        f"generate {checkpoints['mixtral']} --prompt hello --route-resident auto --max-new-tokens 2 --json -"
    )
    other = runner.invoke(cli.app, words.split())
    assert json.loads(other.stdout)["routing"]["policy"] == "margin:margin=0.25"
    assert "no calibration ships with this model" in other.stderr


def test_a_pass_takes_little_more_than_plain_transformers_windows():
    """The bar of 1.5, in processor seconds of one run; both take turns document by document."""
    config = PriceConfig()
    engine = open_engine("builtin:tiny", "33%", config, None)
    tokenizer = load_tokenizer(engine.prepared)
    text = scored_text(Source.of("builtin:price"), tokenizer, config, engine).openings(240, config.rows)
    found = ratio_to_plain(engine, text, MarginSwap(margin=0.25), config.rows)
    assert found["positions"] == text.num_positions and 0.1 < found["ratio"] <= 1.5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--margins a", "--margins must be numbers with commas between them. Got 'a'."),
        ("--margins nan", "`margin` must be a finite number"),
        ("--margins 0.25,0.25", "policies must differ"),
        ("--ranks 3-1 --margins 1", "--ranks must leave a tail"),
        ("--policy nearest", "`policy` must be one of"),
        ("--policy /nowhere.json", "cannot be read"),
        ("--policies some", "--policies must be all. Got 'some'."),
        ("--window 9", "window must be 1 to 8 rows. Got 9."),
        ("--residency melting", "residency must be one of frozen, live"),
        ("--residency live --policies all", "--policies all needs frozen residency"),
        ("--positions 0", "positions must be 1 or more"),
        ("--text /nowhere.txt", "text '/nowhere.txt' cannot be read"),
        ("--text builtin:none", "text must be a file or one of builtin:price"),
        ("--plot p.svg", "--plot needs --policies all"),
        ("--policies all --plot p.gif", "--plot must be a .png or .svg file"),
        ("--records r.csv", "records must be written to"),
        ("--records /nowhere/r.jsonl", "--records must be a file in a folder that can be written to"),
        ("--budget-kl 0", "--budget-kl must be above 0 nats"),
        ("--budget-kl x", "must be a number"),
        ("--policy-file p.json", "--policy-file needs --budget-kl"),
        ("--budget-kl 1 --policy-file p.txt", "--policy-file must end in .json"),
        ("--calibration-positions 3", "--calibration-positions must be 100 or more"),
        ("--slots 120%", "slots must be"),
        ("--json /nowhere/x.json", "--json must be"),
    ],
)
def test_bad_input_is_refused_before_anything_loads(words, sentence, monkeypatch):
    from warmset.measure.price import run as measuring

    def must_not_load(*given, **settings):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(measuring, "open_engine", must_not_load)
    answer = runner.invoke(cli.app, ["price", *words.split()])
    said = str(answer.exception) + answer.output
    assert answer.exit_code != 0 and not isinstance(answer.exception, AssertionError), said
    assert sentence in said


def test_bad_input_has_exit_code_2():
    answer = run("price", "--margins", "wide")
    assert answer.returncode == 2 and answer.stderr.startswith("warmset: ") and answer.stderr.count("\n") == 1
