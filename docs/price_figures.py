"""Measure and draw what docs/price.md shows: `make docs-figures`; with `--render` only draw from the record.

results/price.json              the record: table, sweep, budget, free answers, time beside plain transformers
docs/price-policies.svg, .png   bytes of cold experts a token against excess KL
docs/price-budget.svg, .png     one margin for all layers against one for each
warmset/models/tiny/policy.json the margins that `--route-resident auto` stands for
docs/price.md                   the blocks between `<!-- NAME -->` and `<!-- end -->`; `speed` comes from
                                results/price-speed.json, which `warmset price --speed` wrote on a GPU
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from warmset.measure.price import table
from warmset.measure.price.plain import ratio_to_plain
from warmset.measure.price.plot import plot_budget, plot_policies
from warmset.measure.price.run import PriceConfig, Source, open_engine, price_engine, run, scored_text
from warmset.measure.price.session import Search, measure_free, write_policy_file
from warmset.measure.price.speed import prices_of
from warmset.measure.record import read_record, write_record
from warmset.models import BUILTIN_POLICIES
from warmset.profile import write_atomically
from warmset.progress import Bars
from warmset.routing import MarginSwap
from warmset.text import load_tokenizer

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "results" / "price.json", ROOT / "docs" / "price.md"
SPEED_RECORD = ROOT / "results" / "price-speed.json"
MODEL, SLOTS = "builtin:tiny", "33%"
MARGINS = (0.25, 0.5, 1.0)
OTHER_RANKS = ((4, 9), (8, 9))
"""Tails besides the default one, 6-9, for the price beside the speed."""
BUDGET_SHARE = 0.5
"""Of the excess KL of margin 0.25: the margins found with it ship."""
PLAIN_POSITIONS, CALIBRATION_POSITIONS = 1000, 3000
# The reference document's losses, on its own model and text.
REFERENCE = {"off": 3.2033, "0.25": 3.2238, "0.5": 3.4360, "1.0": 4.7751}


def measure() -> dict[str, Any]:
    """Everything, on two quiet host cores about an hour; goes on where an earlier try was interrupted."""
    config = PriceConfig(resume=True)
    with Bars() as bars:
        engine = open_engine(MODEL, SLOTS, config, bars.update)
        tokenizer = load_tokenizer(engine.prepared)
        text = scored_text(Source.of("builtin:price"), tokenizer, config, engine)
        pricing = price_engine(engine, text, config, SLOTS, bars.update)
        policies = [MarginSwap(margin=margin) for margin in MARGINS]
        results = run(pricing, policies).results
        search = Search(
            *(engine, tokenizer, text, config, SLOTS),
            calibration=Source.of("builtin:calibration"),
            positions=CALIBRATION_POSITIONS,
            progress=bars.update,
        )
        found = search.find(BUDGET_SHARE * results["policies"][0]["excess_kl"])
        arms = [pricing.arm(policy, random=False) for policy in found.policies]
        results["budget"] = found.results(engine.identity(), arms)
        write_policy_file(BUILTIN_POLICIES[MODEL], results["budget"], MODEL, results)
        results["free"] = measure_free(engine, tokenizer, policies, config.seed, bars.update)
        part = text.first_positions(PLAIN_POSITIONS, config.rows)
        results["plain"] = ratio_to_plain(engine, part, policies[0], config.rows)
        results["sweep"] = pricing.sweep(engine.choose_residents)
        results["other_ranks"] = [
            pricing.arm(MarginSwap(margin=margin, ranks=ranks), random=False)
            for ranks in OTHER_RANKS
            for margin in MARGINS
        ]
        search.finish()
        pricing.finish()
        engine.close()
    return results


def render(record: dict[str, Any]) -> None:
    """The pictures, and the blocks of the page."""
    results = record["results"]
    for suffix in ("svg", "png"):
        plot_policies(results["sweep"], ROOT / "docs" / f"price-policies.{suffix}")
        plot_budget(results["budget"], ROOT / "docs" / f"price-budget.{suffix}")
    page = PAGE.read_text(encoding="utf-8")
    shown = blocks(results)
    if SPEED_RECORD.exists():
        shown["speed"] = speed_block(read_record(SPEED_RECORD), results)
    for name, block in shown.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert len(pattern.findall(page)) == 1, name
        page = pattern.sub(lambda match, block=block: match[1] + block + match[2], page)
    write_atomically(PAGE, page)


def blocks(results: dict[str, Any]) -> dict[str, str]:
    off, arms = results["off"], results["policies"]
    header = ["", "off", *(table.short(arm["policy"]) for arm in arms)]
    return {
        "table": table.markdown(header, table.price_rows(off, arms)),
        "tails": table.markdown(*tail_rows([*arms, *results["other_ranks"]])),
        "losses": table.markdown(["margin", "loss here", "change", "perplexity", "change",
                                  "loss there", "change", "perplexity", "change"], losses(off, arms)),
        "kinds": table.markdown(*table.split_rows(arms, "by_kind", "kind of text")),
        "places": table.markdown(*table.split_rows(arms, "by_place", "positions")),
        "ranks": table.markdown(*rank_rows(arms[0])),
        "sweep": table.markdown(*table.sweep_rows(results["sweep"])),
        "free": table.markdown(*table.free_rows(results["free"])),
        "budget": table.markdown(*budget_rows(results["budget"])) + budget_sentence(results["budget"]),
        "plain": plain_sentence(results["plain"]),
    }  # fmt: skip


def losses(off: dict[str, Any], arms: list[dict[str, Any]]) -> list[list[str]]:
    import math

    rows = []
    for arm in (off, *arms):
        margin = "off" if arm is off else arm["policy"].rpartition("=")[2]
        change, there = arm["loss"] - off["loss"], REFERENCE[margin]
        beyond = there - REFERENCE["off"]
        rows.append([
            margin, f"{arm['loss']:.4f}", f"{change:+.4f}", f"{arm['perplexity']:.3f}", f"{math.expm1(change):+.1%}",
            f"{there:.4f}", f"{beyond:+.4f}", f"{math.exp(there):.2f}", f"{math.expm1(beyond):+.1%}",
        ])  # fmt: skip
    return rows


def tail_rows(arms: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for arm in arms:
        margin, _, ranks = arm["policy"].removeprefix("margin:margin=").partition(",ranks=")
        low, high = arm["excess_kl_interval"]
        rows.append(
            [
                ranks or "6-9",
                margin,
                f"{arm['excess_kl']:.5f}",
                f"{low:.5f} to {high:.5f}",
                f"{arm['argmax_same']:.1%}",
                f"{arm['loss_change']:+.4f}",
                f"{arm['bytes_saved']:.1%}",
            ]
        )
    return ["ranks", "margin", "excess KL", "interval", "argmax", "loss change", "bytes saved"], rows


def rank_rows(arm: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    swaps = arm["swaps_by_layer_and_rank"]
    used = [rank for rank in range(len(swaps[0])) if any(layer[rank] for layer in swaps)]
    header = ["layer", *(f"rank {rank}" for rank in used), "all"]
    rows = [
        [str(number), *(f"{layer[rank]:,}" for rank in used), f"{sum(layer):,}"]
        for number, layer in enumerate(swaps)
    ]
    return header, rows


def budget_rows(budget: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["margins of the layers", "on", "excess KL", "interval", "bytes saved"]
    rows = []
    for side in ("single", "by_layer"):
        margins = budget[side]["policy"].rpartition("margin=")[2].replace("-1e+30", "off").rstrip("/")
        margins = " / ".join(part if part == "off" else f"{float(part):.3f}" for part in margins.split("/"))
        chosen, found = budget[side]["on_calibration"][-1], budget[side]["on_text"]
        low, high = found["excess_kl_interval"]
        rows.append(
            [margins, "calibration", f"{chosen['excess_kl']:.5f}", "-", f"{chosen['bytes_saved']:.2%}"]
        )
        rows.append(
            [
                "",
                "price",
                f"{found['excess_kl']:.5f}",
                f"{low:.5f} to {high:.5f}",
                f"{found['bytes_saved']:.2%}",
            ]
        )
    return header, rows


def budget_sentence(budget: dict[str, Any]) -> str:
    found = budget["compared"]
    return (
        f"\nOn the price text one margin a layer saves {found['bytes_saved_ratio']:.2f} times the bytes of one margin "
        f"for all, at {found['excess_kl_ratio']:.2f} times its excess KL.\n"
    )


def speed_block(record: dict[str, Any], results: dict[str, Any]) -> str:
    config, found = record["config"], record["results"]
    speed = found["speed"]
    return (
        table.markdown(*table.speed_rows(found["legs"], prices_of(results)))
        + f"\nTime: one {record['gpu']}, the shape {config['shape']}, {config['slots']:,} of "
        f"{config['layers'] * config['experts']:,} experts resident, windows of {config['rows']} rows; "
        f"{speed['rounds']} rounds of {config['windows']} windows a leg; committed rows: {speed['committed_from']}. "
        f"Price: the embedded model, {results['positions']:,} positions.\n"
    )


def plain_sentence(plain: dict[str, Any]) -> str:
    return (
        f"Over {plain['positions']:,} positions a pass with margin 0.25, comparison and all, took "
        f"{plain['ratio']:.2f} times the processor time of plain transformers windows over the same rows.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--render", action="store_true", help="draw from the record, measure nothing")
    if not parser.parse_args().render:
        tests = sorted(map(str, (ROOT / "tests").glob("test_price*.py")))
        green = (
            subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode
            == 0
        )
        if not green:
            sys.exit("the tests of the price are red: nothing was measured")
        results = measure()
        settings = {"model": MODEL, "slots": SLOTS, "margins": MARGINS, "budget_share": BUDGET_SHARE}
        write_record(RECORD, name="price", config=settings, results=results, tests="green")
    render(read_record(RECORD))


if __name__ == "__main__":
    main()
