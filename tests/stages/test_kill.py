"""kill -9 in every stage, then the same command: finished work is kept and the bytes are the same."""

import json
import multiprocessing
import os
import signal
import sys
import time

from small import digest, recipe_file

from keys35.cli import main
from keys35.stages import plan

# (unit that must just have been finished, stage it falls into)
MOMENTS = [
    ("measure/calibration", "measure"),
    ("measure/capture/layer-000", "measure"),
    ("experts/layer-001/0000", "measure"),
    ("measure/sensitivity", "measure"),
    ("quantize/dense/layer-000", "quantize"),
    ("experts/layer-002/0000", "quantize"),
    ("assemble/model-00002-of-00004", "assemble"),
    ("validate/reference", "validate"),
    ("baselines/random-0", "baselines"),
]


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["keys35.cli", "keys35.stages.pipeline", "keys35.exl3.viterbi.cpu"])


def command(arguments):
    """`keys35` as a process of its own, leader of a group with its ranks; what it imports is there already.

    How fast it encodes here, which each start measures for its plan, is told: that took a fifth of the test.
    """
    os.setsid()
    sys.argv = ["keys35", *arguments]
    plan._encoder_rate = lambda recipe: ("cpu", 1e6)
    main()


def start(source, recipe, work, out):
    arguments = ["--quiet", "run", str(source), "--recipe", str(recipe)]
    process = SERVER.Process(target=command, args=([*arguments, "--work", str(work), "--out", str(out), "--tp", "2"],))
    process.start()
    return process


def finish(process):
    process.join(timeout=300)
    assert process.exitcode == 0


def wait_for(process, path):
    """Until a file exists; the moment just after a unit is the start of the next one."""
    while not path.exists():
        assert process.exitcode is None, f"ended before {path}"
        time.sleep(0.02)
    time.sleep(0.15)


def mark(work, unit):
    """The file whose appearance says that a unit is finished."""
    if unit == "validate/reference":
        return work / "validate/reference/reference.json"
    return work / "receipts" / f"{unit}.json"


def dates(work):
    """Receipts that a resume must leave alone (allocate is cheap and always runs, captures drop old states)."""
    kept = [p for p in (work / "receipts").rglob("*.json") if p.parent.name != "capture" and p.stem != "allocate"]
    return {p: p.stat().st_mtime_ns for p in kept}


def changed(receipts):
    """Which of them were written again, or are gone."""
    return [path.name for path, written in receipts.items() if not path.exists() or path.stat().st_mtime_ns != written]


def test_killed_in_every_stage(finished, tmp_path):
    recipe = recipe_file(tmp_path / "small.toml", finished.recipe)
    work, out, receipts = tmp_path / "work", tmp_path / "out", {}
    for unit, _ in MOMENTS:
        process = start(finished.source, recipe, work, out)
        wait_for(process, mark(work, unit))
        assert changed(receipts) == [], f"what was finished before is kept, up to {unit}"
        receipts = dates(work)
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    finish(start(finished.source, recipe, work, out))
    assert changed(receipts) == []
    assert digest(out) == digest(finished.out), "as without a kill"
    assert not list(work.rglob("*.partial")), "what a kill left unfinished is gone"
    events = [json.loads(line)["event"] for line in (work / "log.jsonl").read_text().splitlines()]
    groups = events.count("experts")
    assert groups <= 4 + len(MOMENTS), "a kill costs at most the unit it fell into"
