"""`bench drafts`: its figures are those of the answers, its table and record have every arm, bad input is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from warmset.cli import app
from warmset.errors import WarmsetError
from warmset.measure.drafts import run_drafts


def test_the_record_has_every_arm_and_its_figures_belong_together(tmp_path):
    path = tmp_path / "drafts.json"
    words = ["bench", "drafts", "--device", "cpu", "--windows", "1,3", "--prompts", "1", "--tokens", "16"]
    done = CliRunner().invoke(app, [*words, "--json", str(path)])
    assert done.exit_code == 0, done.output
    record = json.loads(path.read_text())
    assert record["name"] == "drafts-cpu" and record["config"]["prompts"] == 2
    assert set(record["results"]) == {"none_t1", "mtp_t3", "lookup_t3"}
    alone = record["results"]["none_t1"]["sampled"]
    assert alone["accepted_per_window"] == 1.0 and alone["drafted"] == 0
    for setting in ("greedy", "sampled"):
        found = record["results"]["mtp_t3"][setting]
        made = found["windows"] + found["accepted"]
        assert made == 2 * 15, "all tokens but each answer's first"
        assert found["accepted_per_window"] == pytest.approx(made / found["windows"])
        assert found["rejected"] == found["drafted"] - found["accepted"] > 0
        assert 0 < found["commit_share"] < 1 and 0 < found["draft_share"] < 1
        assert list(found["by_depth"]) == ["1", "2"]
        assert f"mtp_t3 {setting}" in done.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"windows": [9]}, "windows must be of 1 to 8 rows. Got 9"),
        ({"windows": [2, 2]}, "windows must be different"),
        ({"tokens": 7}, "tokens must be 8 to 2048. Got 7"),
        ({"prompts": 0}, "prompts must be 1 to"),
    ],
)
def test_c17_what_cannot_be_measured_is_refused(changes, words):
    given = {"windows": [1, 4], "prompts": 1, "tokens": 8, "slots": "33%", "device": "cpu"}
    with pytest.raises(WarmsetError, match=words):
        run_drafts(**{**given, **changes})
