"""What the terminal says is what it was given: names and paths in brackets are no markup."""

import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from made_up import metrics
from rich.console import Console

from keys35.progress import Progress
from keys35.report.live import live_progress
from keys35.report.panel import write_panel_page
from keys35.report.status import Status, show_status
from keys35.report.terminal import quality_rows, show_validation
from keys35.report.voice import Mode, Voice
from keys35.stages.contract import Finding

NAME = "prose [raw] [/x]"


def say(console: Console) -> None:
    Voice(console, console).say(f"the finished checkpoint is in /data/{NAME}", "passed")


def status(console: Console) -> None:
    ticks = []
    for _ in Progress(show=ticks.append).walk("panel", [NAME]):
        pass
    show_status(console, Status(Path(NAME), "recipe", "0", {}, (1, 1), (1, 1), ticks[-1]))


def validation(console: Console) -> None:
    found = metrics(0.1) | {"domains": {NAME: metrics(0.1)["domains"]["prose"]}}
    show_validation(console, {"metrics": found, "noise_floor": {"kl": 0.0}, "panel": {"windows": 1, "tokens": 512},
                              "ranks": [], "tp_against_one": None})


def progress(console: Console) -> None:
    with live_progress(console, None) as shown:
        for _ in shown.walk("panel", [NAME]):
            pass


@pytest.mark.parametrize("show", [say, status, validation, progress])
def test_names_are_shown_as_they_are(show: Callable[[Console], None]) -> None:
    console = Console(file=StringIO(), width=300)
    show(console)
    assert NAME in console.file.getvalue()


def test_a_checkpoint_of_any_name_has_a_panel_page(tmp_path: Path) -> None:
    """A traceback, after all was scored."""
    scored = {"metrics": metrics(0.1), "ranks": [], "noise_floor": {"kl": 0.0, "changed_top1": 0.0},
              "panel": {"set": "x", "windows": 1, "tokens": 512}}
    page = write_panel_page(tmp_path, os.fsdecode(b"\xe9tude"), scored)
    assert "<h1>\\udce9tude</h1>" in page.read_text(encoding="utf-8")


def test_where_nobody_watches_each_unit_is_one_line() -> None:
    """Every sign of life between two units, one in five seconds, printed the last line again."""
    console = Console(file=StringIO(), width=80)
    with live_progress(console, None) as shown:
        for stage in ("measure", "quantize"):
            meter = shown.meter(stage, 2)
            for unit in ("a", "b"):
                meter.count(unit)
                meter.beat()
    lines = console.file.getvalue().splitlines()
    assert [line.split()[:3] for line in lines] == [
        [stage, f"{done}/2", unit] for stage in ("measure", "quantize") for done, unit in ((1, "a"), (2, "b"))]


def test_a_good_end_is_one_line() -> None:
    console = Console(file=StringIO(), width=40)
    say(console)
    assert console.file.getvalue() == f"passed the finished checkpoint is in /data/{NAME}\n"


def test_a_model_without_mtp_has_no_acceptance() -> None:
    scored = {key: value for key, value in metrics(0.1).items() if key != "mtp"}
    for row in quality_rows({"allocation": scored, "random-0": scored, "random-1": scored}):
        assert row[-2:] == ["", ""] and "nan" not in " ".join(row)


def test_a_result_as_json_has_what_is_public(capsys: pytest.CaptureFixture[str]) -> None:
    """A finding's own helper stood among its keys."""
    voice = Voice(Console(), Console(stderr=True))
    voice.mode = Mode.JSON  # `speak` would listen to the log of all tests that follow
    voice.result(Finding("shard-stray", "x is", ("x",)))
    assert json.loads(capsys.readouterr().out).keys() == {"rule", "message", "names", "engines", "brief"}
