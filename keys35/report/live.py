"""Progress on the terminal: a bar per stage with rate and time left; plain lines where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from keys35.files.ledger import Workdir
from keys35.progress import Progress, Tick
from keys35.report.terminal import human_seconds


@contextmanager
def live_progress(
    console: Console, work: Workdir | None, show: Callable[[Tick], None] | None = None
) -> Iterator[Progress]:
    """A Progress that draws itself on `console`, or calls `show` instead, and keeps `work`'s heartbeat."""
    if show:
        yield Progress(work, show)
        return
    if not console.is_terminal:
        yield Progress(work, _lines(console))
        return
    columns = (TextColumn("[bold]{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TextColumn("{task.fields[left]}  {task.fields[note]}", markup=False), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(tick: Tick) -> None:
            if tick.stage not in tasks:
                tasks[tick.stage] = bars.add_task(tick.stage, total=tick.total, left="", note="")
            left = "" if tick.done == tick.total else f"{human_seconds(tick.seconds_left)} left"
            bars.update(tasks[tick.stage], completed=tick.done, left=left, note=tick.note)

        yield Progress(work, draw)


def _lines(console: Console) -> Callable[[Tick], None]:
    """A line for each unit that ended, and none for the signs of life between them."""
    shown = ("", 0)

    def show(tick: Tick) -> None:
        nonlocal shown
        if tick.done and (tick.stage, tick.done) != shown:
            shown = tick.stage, tick.done
            left = human_seconds(tick.seconds_left) if tick.done < tick.total else "done"
            console.print(f"{tick.stage:>10} {tick.done}/{tick.total}  {tick.note}  ({left})", highlight=False,
                          markup=False)

    return show
