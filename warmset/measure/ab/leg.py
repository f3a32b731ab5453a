"""One leg seen from outside: a process of its own that is fed a job and gives lines back.

The job goes in as one line of JSON, and the pipe stays open: the worker ends when it closes, so that no leg outlives
the experiment however that was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import warmset
from warmset.measure.ab.plan import Arm

GRACE_SEC = 10.0


def run_arm(arm: Arm, job: dict[str, Any], num_samples: int) -> dict[str, Any]:
    """Run one leg with fresh copies of the arm's files; the leg as it is recorded.

    job: what `warmset ab-leg` reads, the words apart. A leg that failed has its reason in `failed`, else None.
    """
    with tempfile.TemporaryDirectory(prefix="warmset-ab-") as folder:
        words = list(arm.words)
        for option, file in arm.files.items():
            copy = Path(folder) / Path(file).name
            if Path(file).exists():
                shutil.copyfile(file, copy)
            words += [f"--{option}", str(copy)]
        started = _now()
        lines, failed = talk(arm.python, {**job, "words": words})
    by_event: dict[str, Any] = {"start": {}, "end": {}}
    samples = []
    for line in lines:
        event = line.pop("event", None)
        if event == "sample":
            samples.append(line)
        elif event in by_event:
            by_event[event] = line
    if failed is None and len(samples) != num_samples:
        failed = f"it gave {len(samples)} samples of {num_samples}"
    machine = {"before": by_event["start"].pop("machine", None), "after": by_event["end"].get("machine")}
    return {
        "started": started,
        "ended": _now(),
        **by_event["start"],
        "machine": machine,
        "failed": failed,
        "samples": samples,
    }


def talk(python: str | None, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Run `warmset ab-leg` with a job; the objects it printed, and why it failed, or None."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        try:
            process = subprocess.Popen(
                [python or sys.executable, "-P", "-m", "warmset", "ab-leg"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(own=python is None),
                start_new_session=True,  # Ctrl-C reaches the experiment, which ends its leg itself
            )
        except OSError as error:
            return [], f"{python or sys.executable} does not start: {error.strerror}"
        assert process.stdin is not None and process.stdout is not None
        try:
            lines = _exchange(process, job)
            code = process.wait()
        finally:
            _end(process)
        stderr.seek(0)
        said = stderr.read()
    return lines, _why(code, said)


def _exchange(process: subprocess.Popen[str], job: dict[str, Any]) -> list[dict[str, Any]]:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return []  # it ended before it read: its exit code and stderr say why
    lines = []
    for line in process.stdout:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """End the leg's process group, if it still runs, and let go of its pipes."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(GRACE_SEC)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _environment(*, own: bool) -> dict[str, str]:
    """The environment of a leg; `own`: it runs the very package that this process runs, and sees this folder."""
    env = dict(os.environ)
    if own:
        root = str(Path(warmset.__file__).resolve().parent.parent)
        known = env.get("PYTHONPATH", "").split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(part for part in (root, *known, os.getcwd()) if part)
    else:
        env.pop("PYTHONPATH", None)
        env.pop("WARMSET_COMMIT", None)  # the commit of this install, not of that one
    return env


def _why(code: int, said: str) -> str | None:
    if code == 0:
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    sentences = [line.removeprefix("warmset: ") for line in lines if line.startswith("warmset: ")]
    last = (sentences or lines or [""])[-1]
    if code < 0:
        return f"it was ended by signal {signal.Signals(-code).name}"
    return last.rstrip(".") or f"it left with exit code {code}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
