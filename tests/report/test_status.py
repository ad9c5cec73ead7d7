"""Where a work directory stands, read from names and small files alone."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from keys35.errors import ResumeError
from keys35.files.atomic import write_json
from keys35.files.ledger import WHEREABOUTS, Workdir
from keys35.progress import HEARTBEAT, Progress
from keys35.report.status import read_status, show_status


def test_a_last_group_may_be_smaller(tmp_path: Path) -> None:
    """Ten experts in groups of eight are ten, not sixteen; an MTP layer's are not among those that are measured."""
    work = Workdir.open(tmp_path, {"tool": "0", "recipe": {"name": "some", "experts": {"group": 8}}})
    facts = {"layers": 3, "experts": 20, "experts_a_layer": 10, "mtp_layers": [2]}
    write_json(work.path(WHEREABOUTS), facts)
    for unit in ("layer-000/0000", "layer-000/0008", "layer-001/0008", "layer-002/0000"):
        work.commit(f"experts/{unit}", [], {})
    assert read_status(tmp_path).experts == (12, 20)


def test_only_its_own_host_knows_whether_a_driver_runs(tmp_path: Path) -> None:
    work = Workdir.open(tmp_path, {"tool": "0", "recipe": {"name": "some", "experts": {"group": 8}}})
    Progress(work).meter("measure", 2).count("layer 0")
    beat = json.loads(work.path(HEARTBEAT).read_text())
    assert (beat["host"], read_status(tmp_path).state) == (os.uname().nodename, "running")
    nobody = 1 << 22  # above what Linux gives
    for host, state, words in (("", "stopped", "run the same command again"), ("gpu-7", "elsewhere", "ask on gpu-7")):
        write_json(work.path(HEARTBEAT), beat | {"host": host, "pid": nobody})
        console = Console(record=True, width=300, file=open(os.devnull, "w"))
        show_status(console, read_status(tmp_path))
        assert read_status(tmp_path).state == state and words in console.export_text()
    write_json(work.path(HEARTBEAT), beat | {"what a newer version says": 1})
    assert read_status(tmp_path).state == "running"
    del beat["host"]  # as older versions wrote it
    write_json(work.path(HEARTBEAT), beat)
    assert read_status(tmp_path).state == "running"


def test_nothing_is_left_of_a_stage_that_was_found_finished(tmp_path: Path) -> None:
    """"unknown left; finished", and null for programs."""
    work, ticks = Workdir.open(tmp_path, {}), []
    meter = Progress(work, ticks.append).meter("assemble", 2)
    for name in ("a", "b"):
        meter.count(name, kept=True)
    assert [tick.seconds_left for tick in ticks] == [None, None, 0.0]


def test_a_heartbeat_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    work = Workdir.open(tmp_path, {"tool": "0", "recipe": {"name": "some", "experts": {"group": 8}}})
    work.commit("experts/layer-000/0000", [], {})
    for text in ("{", "[]", "{}", '{"stage": "measure"}'):
        work.path(HEARTBEAT).write_text(text)
        found = read_status(tmp_path)
        assert found.state == "new" and found.finished == {"experts/layer-000": 1}


def test_files_that_say_too_little_are_refused(tmp_path: Path) -> None:
    """Whole JSON that is no object, or has no recipe in it, was a traceback."""
    whole = {"tool": "0", "recipe": {"name": "some", "experts": {"group": 8}}}
    work = Workdir.open(tmp_path, whole)
    for facts, words in (([], "it is no object"), ({"mtp_layers": 1}, "'mtp_layers' is no array")):
        write_json(work.path(WHEREABOUTS), facts)
        with pytest.raises(ResumeError, match=f"whereabouts.json: {words}; begin with `keys35 measure"):
            read_status(tmp_path)
    for job, words in (({}, "it lacks recipe, tool"), (whole | {"recipe": {"name": "some"}}, "'recipe' lacks experts")):
        write_json(tmp_path / "manifest.json", {"schema": 1, "job": job})
        with pytest.raises(ResumeError, match=f"manifest.json: {words}; choose an empty work directory"):
            read_status(tmp_path)
