"""The order of the modules, the public names, the flags, and what importing the light part pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import typer

import warmset

PACKAGE = Path(warmset.__file__).parent

# A module may import those above it, never one below: the way of the data, from files to the command line.
ORDER = [
    "errors",
    "progress",
    "config",
    "models",
    "checkpoint",
    "disk",
    "store",
    "memory",
    "plan",
    "copies",
    "landing",
    "slots",
    "profile",
    "admission",
    "residency",
    "routing",
    "kernels",
    "route_rows",
    "stages",
    "device_experts",
    "experts",
    "router",
    "recurrent",
    "model",
    "noise",
    "sample",
    "states",
    "draft",
    "mtp",
    "drafting",
    "depth",
    "graph",
    "window",
    "captured",
    "conversation",
    "answer",
    "prepare",
    "needs",
    "engine",
    "text",
    "auto_policy",
    "measure",
    "cli",
    "__main__",
]


def part_of(module: str) -> str:
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def imports_of(file: Path) -> set[str]:
    """Parts of the package that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "warmset":
            if node.module == "warmset":
                found |= {name.name for name in node.names if (PACKAGE / f"{name.name}.py").exists()
                          or (PACKAGE / name.name).is_dir()}  # fmt: skip
            else:
                found.add(part_of(node.module))
        if isinstance(node, ast.Import):
            found |= {part_of(name.name) for name in node.names if name.name.startswith("warmset.")}
    return found


def test_imports_go_one_way():
    for file in sorted(PACKAGE.rglob("*.py")):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for other in imports_of(file) - {part}:
            assert ORDER.index(other) < ORDER.index(part), f"{file.name} imports {other}"


def test_every_part_has_a_place_in_the_order():
    parts = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith("__pycache")
    }
    parts = {part for part in parts if part not in ("__init__", "serve", "py.typed")}
    assert parts == set(ORDER) & parts and not parts - set(ORDER), parts - set(ORDER)


PUBLIC = """
AdditiveBias CachePrior CheckpointError CumulativeMass DropCold Engine EngineConfig Exact FewerPicks MarginSwap
MaxRank Policy PolicyError RandomSwap ResidentOnly Routed RouterRule RowError SamplingConfig WarmsetError
WindowJoint __version__ as_windows parse_policy price route
""".split()


def test_public_names():
    assert sorted(warmset.__all__) == sorted(PUBLIC)
    assert all(getattr(warmset, name) is not None for name in PUBLIC)


FLAGS = {
    "generate": "--admission --chat --device --draft --draft-model --dtype --frequency-penalty --graphs --json --learn "
    "--logprobs --max-model-len --max-new-tokens --min-p --num-speculative-tokens --policy "
    "--presence-penalty --profile --prompt --ranks --repetition-penalty --revision --route-kernel "
    "--route-resident --seed --slots --stages --stats --stop --temperature --top-k --top-p --vram "
    "--window",
    "ab": "--a --a-python --b --b-python --budget-sec --drift --effect --json --markdown --max-new-tokens --noise "
    "--null --order --pairs --plot --power --prompts --resume --samples --seed --simulate --windows",
    "ab-leg": "",
    "price": "--budget-kl --budget-sec --calibration --calibration-positions --controls --device --dtype --free --json "
    "--margins --plot --policies --policy --policy-file --positions --prices --profile --ranks --records --residency "
    "--resume --revision --seed --shape --shape-slots --simulate-residency --slots --speed --text --trace --window",
    "env": "--json",
    "parity": "--cases --device --json --seed",
    "bench kernels": "--cases --json --trace",
    "bench check": "--bars --json",
    "bench machine": "--folder --json --part --rounds --size",
    "bench window": "--budget-sec --cold-experts --device --json --part --route-kernel --route-resident --rows "
    "--shape --slots --tiles --trace",
    "bench decode": "--device --json --rounds --tokens --windows",
    "bench drafts": "--device --json --prompts --slots --tokens --windows",
    "stages": "--json",
    "profile learn": "--device --dtype --json --out --revision --slots --text --tokens",
    "profile show": "--json --plot --ranked",
    "profile merge": "--json --out",
    "trace record": "--device --draft --dtype --json --margin --max-new-tokens --out --prompt --revision --slots "
    "--text --tokens --window",
    "trace replay": "--admission --budget --check --cold-gbs --copy-gbs --expert-bytes --fast-gbs --json --kind "
    "--layer-bytes --policy --profile --slots",
}


def flags_of(words: list[str]) -> list[str]:
    from warmset.cli import app

    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return sorted(
        option for parameter in command.params for option in parameter.opts if option.startswith("--")
    )


def test_flags():
    for words, expected in FLAGS.items():
        assert flags_of(words.split()) == sorted(expected.split()), words


def test_importing_the_light_part_pulls_neither_transformers_nor_triton():
    code = "import sys, warmset.routing, warmset; print([m for m in ('transformers', 'triton') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
