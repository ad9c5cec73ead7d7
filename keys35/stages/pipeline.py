"""The whole job in order; each stage finds what the ledger says is done."""

from pathlib import Path
from typing import Any

from keys35.errors import ContractError
from keys35.progress import Progress
from keys35.report.card import write_card
from keys35.report.html import write_report
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble, prepare
from keys35.stages.baselines import compare_baselines, gate
from keys35.stages.check import check
from keys35.stages.feasible import refuse_uncut
from keys35.stages.job import Job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.validate import Validation, held_out_panel, ranks_ahead, refuse_read_panel
from keys35.stages.workers import Workers


def run(
    job: Job, out: Path, progress: Progress, tp: int = 4, workers: Workers | None = None
) -> dict[str, Any]:
    """measure -> allocate -> quantize -> assemble -> check -> validate -> baselines -> report; results by stage.

    Raises PlanError at once for what `assemble` or `check` would refuse of the output and of the model, ContractError
    naming each broken rule if the finished checkpoint does not pass `check`.
    """
    refuse_uncut(job.rules.values())
    prepare(job, out)  # foreign files and too little text are better known now than at the end
    refuse_read_panel(job.recipe, job.folder)
    held_out_panel(job.source.root, job.config, job.recipe)
    measure(job, progress, workers)
    allocation = allocate(job)
    scratch = job.work.path("validate")
    with ranks_ahead(scratch, tp) as ranks:
        quantize(job, progress, workers)
        report = assemble(job, out, progress)
        checked = check(out, reference=job.source.root)
        if checked.findings:
            raise ContractError("\n".join(str(finding) for finding in checked.findings))
        validation = Validation(out, job.source.root, job.recipe, tp, scratch, ranks, progress)
        baselines = compare_baselines(job, progress)  # while the ranks are at work
        validated = validation.finish(progress)
    write_report(out, job.work.root)
    write_card(out)  # after the page, to which it links
    return {
        "allocation": allocation,
        "report": report,
        "validation": validated,
        "baselines": baselines,
        "warning": gate(baselines),
    }
