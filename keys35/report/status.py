"""Where a work directory stands, read from its ledger and heartbeat alone."""

import os
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keys35.files.atomic import read_json
from keys35.files.ledger import Workdir
from keys35.progress import HEARTBEAT, Tick
from keys35.report.terminal import human_seconds


def show_status(console: Console, root: Path) -> None:
    """Finished units per stage and layer, the running stage's rate and time left; raises ResumeError without a job."""
    work = Workdir.open(root, None)
    console.print(f"[bold]{work.root}[/bold]  recipe {work.job['recipe']['name']}, keys35 {work.job['tool']}")
    table = Table("units", "finished")
    for kind, count in sorted(Counter(_kind(name) for name in work.units()).items()):
        table.add_row(kind, str(count))
    console.print(table)
    heartbeat = work.path(HEARTBEAT)
    if not heartbeat.is_file():
        return
    tick = Tick(**read_json(heartbeat))
    alive = _alive(tick.pid) and tick.done < tick.total
    state = "running" if alive else ("finished" if tick.done == tick.total else "stopped; run the same command again")
    console.print(
        f"last stage [bold]{tick.stage}[/bold]: {tick.done} of {tick.total} ({tick.kept} kept), "
        f"{tick.note or 'starting'}; "
        f"{tick.rate * 60:.1f} units a minute, {human_seconds(tick.seconds_left)} left; {state}, "
        f"last sign of life {human_seconds(time.time() - tick.updated)} ago"
    )


def _kind(unit: str) -> str:
    parts = unit.split("/")
    return "/".join(parts[:2]) if parts[0] in ("experts", "measure", "quantize") and len(parts) > 1 else parts[0]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
