"""An experiment for people: the verdict, the table of all pairs and of all metrics, in a terminal or as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from warmset.measure.ab.analysis import METRICS, primary_of
from warmset.measure.ab.proof import of_windows
from warmset.measure.report import number, plain_table, show

Rows = list[list[str]]


def verdict_lines(record: dict[str, Any]) -> list[str]:
    """The answer in a few sentences, the most important first."""
    results, config = record["results"], record["config"]
    primary = primary_of(config)
    verdict, summary = results["verdict"], results["metrics"][primary.key]
    lines = [f"B against A: {verdict['word']}. {_sentence(verdict['reason'])}"]
    if summary is not None:
        lines.append(f"{_capital(primary.label)}: {effect_text(summary)}.")
    work_line = _windows_line if of_windows(config) else _work_line
    lines.append(work_line(results["same_work"]))
    lines += [f"Pair {entry['pair'] + 1} is left out: {entry['why']}." for entry in results["dropped"]]
    lines += results["notes"]
    for name in ("a", "b"):
        lines.append(f"{name.upper()} = {shlex.join(config['arms'][name]['words'])}")
    return lines


def effect_text(summary: dict[str, Any]) -> str:
    """`+6.6% [+2.1%, +9.8%] (95% interval), 12 pairs`."""
    unit = summary["unit"]
    text = signed(summary["estimate"], unit)
    if summary["low"] is None:
        return f"{text}, no interval from {summary['n']} pairs"
    low, high = signed(summary["low"], unit), signed(summary["high"], unit)
    return f"{text} [{low}, {high}] ({summary['coverage']:.1%} interval), {summary['n']} pairs"


def signed(value: float | None, unit: str) -> str:
    """A difference for a cell."""
    if value is None:
        return "-"
    return f"{value:+.1f}%" if unit == "percent" else f"{value:+.2f}"


NOTHING_COMPARED = "No pair is complete, so nothing says that both arms did the same work."


def _windows_line(work: dict[str, Any]) -> str:
    if work["proven"] is None:
        return NOTHING_COMPARED
    if not work["proven"]:
        return f"Not the same work: {work['claim']} differ."
    read = ", and as exact arms they read the same number of experts" if work["both_exact"] else ""
    return f"Same work: the hashes of all windows are equal{read}."


def _work_line(work: dict[str, Any]) -> str:
    if work["equal_tokens"] is None:
        return NOTHING_COMPARED
    share = f"{work['equal_tokens']:.1%} of the tokens are equal"
    if work["proven"]:
        return "Same work: both arms are exact, and all token hashes are equal."
    if work["proven"] is False:
        return f"Not the same work: both arms are exact, but {share}."
    return f"The arms may answer differently: {share}."


def _sentence(text: str) -> str:
    return f"{_capital(text)}."


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def metric_rows(results: dict[str, Any], which: str = "metrics") -> Rows:
    """One row a metric: medians of A and B, the estimate with its interval, better in n of m, p."""
    source = results["metrics"] if which == "metrics" else results["by_order"][which]
    rows = []
    for metric in METRICS:
        summary = source[metric.key]
        if summary is None:
            rows.append([metric.label, "-", "-", "-", "-", "-", "-"])
            continue
        unit = summary["unit"]
        interval = "-"
        if summary["low"] is not None:
            interval = f"{signed(summary['low'], unit)} to {signed(summary['high'], unit)}"
        rows.append(
            [
                metric.label,
                number(summary["a"]["median"]),
                number(summary["b"]["median"]),
                signed(summary["estimate"], unit),
                interval,
                _count(summary),
                f"{summary['p']:.4f}",
            ]
        )
    return rows


METRIC_HEAD = ["", "A", "B", "B vs A", "interval", "B better", "p"]


def _count(summary: dict[str, Any]) -> str:
    untied = summary["better"] + summary["worse"]
    return f"{summary['better']} of {untied}" + (f", {summary['ties']} tied" if summary["ties"] else "")


SPREAD_HEAD = ["", "median", "mean", "least", "most"]


def spread_rows(results: dict[str, Any]) -> Rows:
    """Median, mean and range of each metric for A, B and the differences."""
    rows = []
    for metric in METRICS:
        summary = results["metrics"][metric.key]
        if summary is None:
            continue
        for name, label in (("a", "A"), ("b", "B"), ("difference", "B against A")):
            values = [summary[name][key] for key in ("median", "mean", "min", "max")]
            if name == "difference":
                cells = [signed(value, summary["unit"]) for value in values]
            else:
                cells = [number(value) for value in values]
            rows.append([f"{metric.label}, {label}", *cells])
    return rows


PAIR_HEAD = ["pair", "first", "tokens/s", "", "ms a window", "", "cold", "accepted", "same"]


def pair_rows(results: dict[str, Any]) -> Rows:
    """Every pair in full: medians of both legs as `A / B`, differences of speed, share of equal tokens."""
    rows = []
    for pair in results["pairs"]:
        row = [f"{pair['pair'] + 1}{'*' if pair['split'] else ''}", pair["first"].upper()]
        for metric in METRICS[:4]:
            row.append(" / ".join(number(pair[arm][metric.key]) for arm in ("a", "b")))
            if metric.relative:
                difference = pair["difference"][metric.key]
                row.append("-" if difference is None else signed(metric.shown(difference), "percent"))
        same = pair["equal_tokens"]
        rows.append([*row, "-" if same is None else f"{same:.0%}"])
    return rows


def tables(results: dict[str, Any]) -> list[tuple[str, Sequence[str], Rows]]:
    """Title, head and rows of each table of a report."""
    found: list[tuple[str, Sequence[str], Rows]] = [
        ("All pairs: medians of the legs, A / B, and B against A", PAIR_HEAD, pair_rows(results)),
        ("Over the pairs", METRIC_HEAD, metric_rows(results)),
    ]
    for arm in ("a", "b"):
        count = sum(pair["first"] == arm for pair in results["pairs"])
        title = f"{arm.upper()} first, {count} {'pair' if count == 1 else 'pairs'}"
        found.append((title, METRIC_HEAD, metric_rows(results, f"{arm}_first") if count else []))
    found.append(("Medians, means and ranges over the pairs", SPREAD_HEAD, spread_rows(results)))
    return found


def print_report(record: dict[str, Any]) -> None:
    """All tables, then the verdict, on stdout."""
    for title, head, rows in tables(record["results"]):
        if rows:
            table = plain_table(*head, title=title)
            for row in rows:
                table.add_row(*map(escape, row))
            show(table)
    print("\n".join(verdict_lines(record)))


def markdown(record: dict[str, Any]) -> str:
    """The same as `print_report` in Markdown, with what was run on what."""
    config = record["config"]
    lines = [f"**{line}**" if place == 0 else f"- {line}" for place, line in enumerate(verdict_lines(record))]
    lines.insert(1, "")
    stretches = of_windows(config)
    what = "stretch" if stretches else "answer"
    if config["samples"] != 1:
        what += "es" if stretches else "s"
    what += f" of {config['windows']} windows" if stretches else f" of {config['max_new_tokens']} tokens"
    lines.append(
        f"- {config['pairs']} pairs, {config['samples']} {what} a leg, order {config['order']}, seed {config['seed']}"
    )
    if stretches:
        arm = config["arms"]["a"]["config"]
        lines.append(
            f"- {arm['shape']}, windows of {arm['rows']} rows, trace {arm['trace']} ({arm['trace_sha256'][:12]})"
        )
    else:
        lines.append(f"- prompts {config['prompts']['file']} ({config['prompts']['sha256'][:12]})")
    lines += [
        f"- commit {record['commit']}, GPU {record['gpu'] or 'none'}, {record['date']}",
    ]
    for title, head, rows in tables(record["results"]):
        if rows:
            lines += ["", f"### {title}", "", _markdown_row(head), _markdown_row(["---"] * len(head))]
            lines += [_markdown_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def simulation_lines(found: dict[str, Any]) -> list[str]:
    """What a simulated experiment says, and what a fixed order would have said on the same clock."""
    clock, order = found["clock"], found["order"]
    lines = [
        f"{clock['pairs']} pairs, B {clock['effect']:+.1%} faster in truth, drift {clock['drift']:.1%} from the first "
        f"leg to the last, pair noise {clock['noise']:.1%} (standard deviation), seed {clock['seed']}."
    ]
    for name, label in ((order, f"Order {order}"), ("fixed", "A always first, the same clock")):
        one = found["orders"][name]
        effect = f"{one['effect']:+.2%}"
        if one["low"] is not None:
            effect += f" [{one['low']:+.2%}, {one['high']:+.2%}]"
        lines.append(f"{label}: {one['verdict']}. {_sentence(one['reason'])} Estimate {effect}.")
    return lines


SHARES_HEAD = ["order", "faster", "slower", "no verdict"]


def share_rows(found: dict[str, dict[str, float]]) -> Rows:
    """Shares of the three verdicts, one row a name."""
    return [[name, *(f"{one[word]:.1%}" for word in SHARES_HEAD[1:])] for name, one in found.items()]


def print_simulation(found: dict[str, Any]) -> None:
    print("\n".join(simulation_lines(found)))
    if found["rules"] is not None:
        rows = share_rows({name: one["shares"] for name, one in found["orders"].items()})
        print(
            f"Verdicts of {found['experiments']:,} such experiments, by order, then in order {found['order']} by rule:"
        )
        for head, body in ((SHARES_HEAD, rows), (["rule", *SHARES_HEAD[1:]], share_rows(found["rules"]))):
            table = plain_table(*head)
            for row in body:
                table.add_row(*row)
            show(table)


def power_line(found: dict[str, Any]) -> str:
    return (
        f"{found['pairs']} pairs: an effect of {found['effect']:+.1%} at a pair noise of {found['noise']:.1%} is found "
        f"in {found['power']:.1%} of the experiments."
    )
