"""`bench check`: passes, misses, reasons, red records, and rows that cannot be read."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from warmset.cli import app
from warmset.errors import WarmsetError
from warmset.measure.bars import check_bars
from warmset.measure.record import read_record, write_record

ROW = """
[[bar]]
name = "a speed"
file = "speed.json"
key = "results.us"
comparison = "<="
bar = 3.0
floor_key = "results.floor_us"
"""


@pytest.fixture
def results(tmp_path):
    write_record(
        tmp_path / "speed.json",
        name="speed",
        config={"rows": 8},
        results={"us": 2.5, "floor_us": 1.0},
        tests="green",
    )
    (tmp_path / "bars.toml").write_text(ROW)
    return tmp_path


def edit(results, **changes) -> None:
    record = json.loads((results / "speed.json").read_text())
    for key, value in changes.items():
        (record if key in record else record["results"])[key] = value
    (results / "speed.json").write_text(json.dumps(record))


def exit_code(results) -> int:
    return CliRunner().invoke(app, ["bench", "check", "--bars", str(results / "bars.toml")]).exit_code


def test_a_pass(results):
    (result,) = check_bars(results / "bars.toml")
    assert (result.verdict, result.measured, result.floor) == ("pass", 2.5, 1.0)
    assert exit_code(results) == 0


def test_a_bar_on_a_difference(results):
    row = ROW.replace("bar = 3.0", 'bar = 1.5\nminus_key = "results.floor_us"')
    (results / "bars.toml").write_text(row)
    (result,) = check_bars(results / "bars.toml")
    assert (result.verdict, result.measured) == ("pass", 1.5)
    edit(results, us=2.6)
    assert check_bars(results / "bars.toml")[0].verdict == "miss"


def test_a_miss_fails_and_a_missed_row_with_a_reason_does_not(results):
    edit(results, us=3.5)
    assert check_bars(results / "bars.toml")[0].verdict == "miss"
    assert exit_code(results) == 1
    (results / "bars.toml").write_text(ROW + 'missed = "three tries, see LOG"\n')
    (result,) = check_bars(results / "bars.toml")
    assert result.verdict == "missed" and "three tries" in result.why
    assert exit_code(results) == 0


def test_a_red_record_fails_whatever_it_says(results):
    edit(results, tests="red")
    assert check_bars(results / "bars.toml")[0].verdict == "red"
    assert exit_code(results) == 1


def test_a_red_run_is_not_recorded(results):
    with pytest.raises(WarmsetError, match="red"):
        write_record(results / "new.json", name="x", config={}, results={}, tests="red")
    assert not (results / "new.json").exists()


@pytest.mark.parametrize(
    "row",
    [
        ROW.replace("results.us", "results.none"),
        ROW.replace("speed.json", "none.json"),
        ROW.replace('"<="', '"~"'),
        ROW.replace("bar = 3.0", ""),
        ROW + "typo = 1\n",
        "[[bar",
    ],
)
def test_rows_that_cannot_be_read_are_refused(results, row):
    (results / "bars.toml").write_text(row)
    with pytest.raises(WarmsetError) as caught:
        check_bars(results / "bars.toml")
    assert "\n" not in str(caught.value)


def test_a_figure_that_is_no_number_is_refused(results):
    edit(results, us=float("nan"))
    with pytest.raises(WarmsetError, match="no number"):
        check_bars(results / "bars.toml")


def test_a_record_says_what_a_reader_needs(results):
    record = read_record(results / "speed.json")
    assert {"name", "date", "commit", "gpu", "versions", "config", "results", "tests"} <= set(record)
    assert record["versions"]["torch"]


def test_the_projects_own_bars_hold():
    from pathlib import Path

    bars = Path(__file__).parent.parent / "results" / "bars.toml"
    assert not [result for result in check_bars(bars) if result.fails]
