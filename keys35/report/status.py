"""Where a work directory stands, read from its ledger and heartbeat alone."""

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keys35.errors import ResumeError
from keys35.files.atomic import read_json
from keys35.files.forms import misfit, read_formed
from keys35.files.ledger import BEGIN_AGAIN, FRESH, MANIFEST, WHEREABOUTS, Workdir
from keys35.progress import HEARTBEAT, Tick
from keys35.report.terminal import human_seconds

_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
JOB = {"type": "object", "required": ["recipe", "tool"], "properties": {"tool": _TEXT, "recipe": {
    "type": "object", "required": ["name", "experts"], "properties": {"name": _TEXT, "experts": {
        "type": "object", "required": ["group"], "properties": {"group": _COUNT}}}}}}
COUNTED = {"type": "object", "properties": {"layers": _COUNT, "experts": _COUNT, "experts_a_layer": _COUNT,
                                            "mtp_layers": {"type": "array", "items": _COUNT}}}


@dataclass(frozen=True)
class Status:
    """A job's finished units by kind, and the heartbeat of the stage that ran last (None before the first).

    layers, experts: how many are through their calibration pass, or measured, and how many there are.
    """

    work: Path
    recipe: str
    tool: str
    finished: dict[str, int]
    layers: tuple[int, int]
    experts: tuple[int, int]
    last: Tick | None

    @property
    def state(self) -> str:
        """new, finished (the last stage is), running, stopped, or elsewhere: only the driver's host knows which."""
        if self.last is None:
            return "new"
        if self.last.done == self.last.total:
            return "finished"
        if self.last.host not in ("", os.uname().nodename):
            return "elsewhere"
        return "running" if _alive(self.last.pid) else "stopped"


def read_status(root: Path) -> Status:
    """The state of a work directory; raises ResumeError if it holds no job, or not all that is known of one."""
    work = Workdir.open(root, None)
    if fault := misfit(work.job, JOB):
        raise ResumeError(f"{work.root / MANIFEST}: {fault}; {FRESH}")
    last = _heartbeat(work.path(HEARTBEAT))
    units, place = work.units(), work.path(WHEREABOUTS)
    finished = dict(sorted(Counter(_kind(name) for name in units).items()))
    facts = read_formed(place, COUNTED, remedy=BEGIN_AGAIN) if place.is_file() else {}
    captured = sum(name.startswith("measure/capture/") for name in units)
    group, mtp = work.job["recipe"]["experts"]["group"], facts.get("mtp_layers", [])
    experts = facts.get("experts", 0)
    a_layer = facts.get("experts_a_layer", experts)
    measured = sum(min(group, a_layer - int(name.rpartition("/")[2])) for name in units
                   if name.startswith("experts/") and int(name.split("/")[1].rpartition("-")[2]) not in mtp)
    return Status(work.root, work.job["recipe"]["name"], work.job["tool"], finished,
                  (captured, facts.get("layers", 0)), (measured, experts), last)


def _heartbeat(path: Path) -> Tick | None:
    """The last tick; None before the first, and for one that says too little: the ledger knows the rest."""
    try:
        return Tick.known_of(read_json(path)) if path.is_file() else None
    except (ResumeError, AttributeError, TypeError):
        return None


def show_status(console: Console, status: Status) -> None:
    """Finished units per stage and layer, the running stage's rate and time left."""
    console.print(f"[bold]{escape(str(status.work))}[/bold]  recipe {status.recipe}, keys35 {status.tool}")
    table = Table("units", "finished")
    for kind, count in status.finished.items():
        table.add_row(kind, str(count))
    console.print(table)
    console.print(f"layers calibrated: {status.layers[0]} of {status.layers[1]}; "
                  f"experts measured: {status.experts[0]:,} of {status.experts[1]:,}", highlight=False)
    if status.last is None:
        return
    tick, state = status.last, status.state
    more = {"stopped": "; run the same command again",
            "elsewhere": f": ask on {escape(tick.host)} whether process {tick.pid} still runs"}
    console.print(
        f"last stage [bold]{tick.stage}[/bold]: {tick.done} of {tick.total} ({tick.kept} kept), "
        f"{escape(tick.note) or 'starting'}; {tick.rate * 60:.1f} units a minute, "
        f"{human_seconds(tick.seconds_left)} left; "
        f"{state}{more.get(state, '')}, "
        f"last sign of life {human_seconds(time.time() - tick.updated)} ago"
    )
    if tick.workers:
        console.print(_workers(tick))


def _workers(tick: Tick) -> Table:
    """What each worker does and has done in this stage."""
    table = Table("worker", "unit", "for", "units done", "seconds a unit", "replaced")
    for worker in tick.workers:
        unit = worker["unit"] or "waiting"
        since = human_seconds(tick.updated - worker["since"]) if worker["unit"] else ""
        rate = f"{worker['seconds'] / worker['done']:.1f}" if worker["done"] else ""
        table.add_row(worker["where"], unit, since, str(worker["done"]), rate, str(worker["deaths"]))
    return table


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
