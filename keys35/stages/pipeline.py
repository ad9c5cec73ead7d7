"""The whole job in order; each stage finds what the ledger says is done."""

from pathlib import Path

from keys35.errors import ContractError
from keys35.progress import Progress
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.baselines import compare_baselines
from keys35.stages.check import check
from keys35.stages.job import Job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.validate import validate


def run(job: Job, out: Path, progress: Progress, tp: int = 4) -> dict[str, object]:
    """measure -> allocate -> quantize -> assemble -> check -> validate -> baselines; returns the quality report.

    Raises ContractError naming each broken rule if the finished checkpoint does not pass `check`.
    """
    measure(job, progress)
    allocate(job)
    quantize(job, progress)
    assemble(job, out, progress)
    report = check(out, reference=job.source.root)
    if report.findings:
        raise ContractError("\n".join(str(finding) for finding in report.findings))
    quality = validate(out, job.source.root, job.recipe, tp=tp, scratch=job.work.path("validate"), progress=progress)
    return {**quality, "baselines": compare_baselines(job, progress)}
