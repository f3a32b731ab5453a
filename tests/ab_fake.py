"""A stand-in for another install's Python: answers as `warmset ab-leg` does, with speeds from a file of orders.

Called as `ab_fake.py -P -m warmset ab-leg`. The file named by AB_FAKE holds one JSON object: `speeds`, tokens a
second of each leg in turn; `tokens`, leg -> the ids of its answers; `fail`, legs that fail; `hang`, the leg that never
ends; `files`, what the check says of the arm's files; `work` and `read`, leg -> the hash of its windows and how many
experts it read, for legs of `bench window`.
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
        words = list(arm["words"])
        if words[:1] != ["bench"] and arm["model"] not in words:
            words.append(arm["model"])
        config = {"words": words}
        if arm["words"][:2] == ["bench", "window"]:
            rows = arm["words"][arm["words"].index("--rows") + 1] if "--rows" in arm["words"] else "4"
            config |= {"shape": "tiny", "rows": int(rows), "trace": "t.safetensors", "trace_sha256": "0" * 64}
        exact = None if "--route-resident" in arm["words"] else ["m"]
        say(words=words, config=config, exact_work=exact, files=orders.get("files", {}))
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
    if "windows" in job:
        for _ in range(job["samples"]):
            say(
                event="sample",
                windows=job["windows"],
                ms_per_window=1e3 / speed,
                tokens_per_sec=None,
                accepted_per_window=None,
                cold_experts_per_layer_window=2.0,
                distinct_experts=orders.get("read", {}).get(str(number), 9),
                work_sha256=orders.get("work", {}).get(str(number), "w"),
            )
        say(event="end", machine={})
        return
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
