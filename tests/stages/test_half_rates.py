"""Half rates from measurement to the finished checkpoint, as ranks read it."""

from fractions import Fraction

import pytest
from small import small_recipe, small_source

from keys35.progress import Progress
from keys35.stages.check import check
from keys35.stages.job import open_job
from keys35.stages.pipeline import run


@pytest.mark.slow
def test_half_rates_go_through_every_stage(tmp_path):
    source, out = small_source(tmp_path / "source"), tmp_path / "out"
    recipe = small_recipe(experts={"widths": [2, 2.5, 3], "bits": 2.5, "group": 2, "fairness": 0, "fallback": False})
    with open_job(source, recipe, tmp_path / "work") as job:
        result = run(job, out, Progress(job.work), tp=4)
    report = check(out, reference=source, deep=True, expected=recipe)
    assert report.ok, report.findings
    assert report.routed_mean == Fraction(5, 2) and 2.5 in report.widths
    ours = result["baselines"]
    assert ours["allocation"]["kl"] < min(ours[name]["kl"] for name in ours if name.startswith("random-"))
