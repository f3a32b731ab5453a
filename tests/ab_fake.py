"""A stand-in for another install's Python: answers as `warmset ab-leg` does, with speeds from a file of orders.

Called as `ab_fake.py -P -m warmset ab-leg`. The file named by AB_FAKE holds one JSON object: `speeds`, tokens a
second of each leg in turn; `tokens`, leg -> the ids of its answers; `fail`, legs that fail; `hang`, the leg that never
ends; `files`, what the check says of the arm's files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def say(**value: object) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    assert sys.argv[1:] == ["-P", "-m", "warmset", "ab-leg"]
    orders_file = Path(os.environ["AB_FAKE"])
    orders = json.loads(orders_file.read_text())
    job = json.loads(sys.stdin.readline())
    if "check" in job:
        arm = job["check"]
        if "--bogus" in arm["words"]:
            sys.exit("warmset: --a: No such option: --bogus")
        exact = None if "--route-resident" in arm["words"] else ["m"]
        words = [*arm["words"], *([] if arm["model"] in arm["words"] else [arm["model"]])]
        say(words=words, config={"words": words}, exact_work=exact, files=orders.get("files", {}))
        return
    legs = orders_file.with_suffix(".legs")
    number = len(legs.read_text().splitlines()) if legs.exists() else 0
    with legs.open("a") as stream:
        print(os.getpid(), " ".join(job["words"]), file=stream)
    for flag, name in zip(job["words"], job["words"][1:], strict=False):
        if flag == "--learn":  # a leg that leaves something behind
            Path(name).write_text(Path(name).read_text() + "!" if Path(name).exists() else "!")
    say(event="start", pid=os.getpid(), commit="c", gpu=None, slots=1, profile_sha256=None, machine={})
    if number in orders.get("fail", []):
        sys.exit("warmset: the weights are gone.")
    if number == orders.get("hang"):
        time.sleep(600)
    speed = orders["speeds"][number % len(orders["speeds"])]
    tokens = orders.get("tokens", {}).get(str(number), "1 2 3")
    for _ in job["prompts"][1:]:
        say(
            event="sample",
            tokens_per_sec=speed,
            ms_per_window=1e3 / speed,
            accepted_per_window=1.0,
            cold_experts_per_layer_window=2.0,
            tokens=tokens,
            tokens_sha256=tokens,
        )
    say(event="end", machine={})


if __name__ == "__main__":
    main()
