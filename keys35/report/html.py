"""The report as one HTML file: no scripts, nothing loaded from elsewhere, the same bytes for the same facts."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from keys35.errors import PublishError, ResumeError
from keys35.files.atomic import write_bytes, write_json
from keys35.files.ledger import MANIFEST, Workdir
from keys35.report.facts import REPOSITORY, Facts, facts_of_checkpoint, facts_of_work, of_another_job
from keys35.report.measured import MAKING, MAKING_FORMAT, MEASUREMENTS, making, measurements
from keys35.report.sections import SECTIONS
from keys35.report.terminal import human_seconds
from keys35.report.words import bits, nats, noise, share, short_size

PAGE, WORK_PAGE = "KEYS35_REPORT.html", "report.html"


def write_report(out: Path, work: Path | None = None) -> Path:
    """Write the page of a finished checkpoint into it, from its own report files, and return its path.

    With `work` what that directory measured is first stored beside the page as KEYS35_MEASUREMENTS.json, so that the
    page can be rebuilt from the checkpoint alone. Neither holds a time, path or host name. Raises ContractError, and
    ResumeError for the directory of another job.
    """
    if work is not None:
        write_json(out / MEASUREMENTS, measurements(_work_of(out, work)))
    return _write(out / PAGE, facts_of_checkpoint(out))


def write_work_report(root: Path) -> Path:
    """Write the page of a work directory, finished or not, into it: everything, with time and hardware."""
    return _write(root / WORK_PAGE, facts_of_work(root))


def write_making(out: Path, work: Path | None = None, base_model: str | None = None) -> None:
    """Store what a publisher adds: how long each step took on which machine, and the source's repository.

    Kept in a file of its own, because it differs from run to run while all others are the same bytes. Raises
    PublishError for a `base_model` that is no repository, ResumeError for the directory of another job.
    """
    if base_model is not None and not REPOSITORY.fullmatch(base_model):
        raise PublishError(f"base model {base_model!r} is no repository; give OWNER/NAME, such as zai-org/GLM-5.3")
    kept = facts_of_checkpoint(out).making or {}
    made = making(_work_of(out, work)) if work is not None else {}
    facts = {**kept, **made} | ({"base_model": base_model} if base_model else {})
    write_json(out / MAKING, {"format": MAKING_FORMAT, "seconds": {}, "machines": []} | facts)


def _work_of(out: Path, root: Path) -> Workdir:
    """The directory that a checkpoint was made in: what another one measured is not the checkpoint's."""
    work = Workdir.open(root, None)
    other = of_another_job(facts_of_checkpoint(out).report, work)
    if other:
        raise ResumeError(f"{root} is not the work directory that {out} was made in: another {' and '.join(other)}; "
                          "give that one, or none")
    return work


def is_work(root: Path) -> bool:
    """Whether a directory is a work directory rather than a finished checkpoint."""
    return (root / MANIFEST).is_file()


def _write(path: Path, facts: Facts) -> Path:
    write_bytes(path, render(facts).encode())
    return path


def render(facts: Facts) -> str:
    """The page's text."""
    style = files("keys35.report").joinpath("page.css").read_text(encoding="utf-8")
    title = escape(facts.name)
    body = "\n".join(text for text in (_head(facts), *(section(facts) for section in SECTIONS)) if text)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(facts: Facts) -> str:
    done = facts.report is not None
    tool = facts.report["tool"] if done else "a job in progress"
    lead = "What is in this checkpoint, what it lost against its BF16 source, and how its widths came about." \
        if done else "What this work directory has measured so far."
    tiles = "".join(f"<div><span>{name}</span><b>{value}</b><span>{under}</span></div>"
                    for name, value, under in _tiles(facts))
    return f'<header><h1>{escape(facts.name)}</h1><p class="lead">{lead} Made by {escape(tool)}.</p>' \
           f'<div class="tiles">{tiles}</div></header>'


def _tiles(facts: Facts) -> Sequence[tuple[str, str, str]]:
    tiles = []
    if facts.classes:
        source = f"the BF16 source has {short_size(facts.source_bytes)}" if facts.source_bytes else ""
        tiles.append(("stored", short_size(facts.total_bytes), source))
    if facts.routed_mean is not None:
        counts = ", ".join(f"{count:,} at {width}" for width, count in facts.counts.items())
        tiles.append(("bits per routed weight", bits(facts.routed_mean), f"experts: {counts} bits"))
    if facts.quality:
        metrics = facts.quality["metrics"]
        tiles.append(("KL from BF16, nats", nats(metrics["kl"]), f"noise floor: {noise(facts.quality)}"))
        tiles.append(("same first choice", share(metrics["top1"]), f"of {metrics['tokens']:,} held-out positions"))
        if "mtp" in metrics:
            tiles.append(("MTP drafts accepted", share(metrics["mtp"]["acceptance"]),
                          f"BF16: {share(metrics['mtp']['acceptance_reference'])}"))
    if facts.making and facts.making["seconds"]:
        spent = human_seconds(sum(facts.making["seconds"].values()))
        tiles.append(("made in", spent, "wall clock, without validation"))
    return tiles
