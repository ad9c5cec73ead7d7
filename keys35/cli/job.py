"""Commands that make a checkpoint: plan, the stages one by one, and all of them at once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from keys35.cli.frame import app, voice
from keys35.cli.options import Address, Count, Fp8, Kept, Out, Place, RecipeName, Source, Tp, Wait, Work

if TYPE_CHECKING:  # imported by the commands that need it, so that a refusal is fast
    from keys35.recipe import Recipe
    from keys35.stages.workers import Workers


@app.command()
def plan(
    source: Source,
    recipe: RecipeName,
    work: Work = Path("."),
    tp: Tp = 4,
    fp8: Fp8 = False,
    wait: Wait = False,
    keep: Kept = "all",
    scan: Annotated[bool, typer.Option("--scan", help="also read every weight and name NaN and Inf")] = False,
) -> None:
    """Read headers only: coverage, sizes, disk, memory and time.

    Example: keys35 plan GLM-5.3-BF16 --recipe glm-5.3-2.75bpw
    """
    from keys35.report.terminal import show_plan
    from keys35.stages.plan import plan as make_plan
    from keys35.stages.scan import scan as run_scan

    chosen = _recipe(source, recipe, fp8, wait)
    voice.result(make_plan(source, chosen, work, tp, keep), show_plan)
    if scan:
        with voice.progress() as progress:
            read = run_scan(source, progress, chosen.source.fp8)
            voice.say(f"all values of {read} tensors are finite", "passed")


@app.command()
def measure(
    source: Source,
    recipe: RecipeName,
    work: Work,
    workers: Count = 0,
    engine: Place = "local",
    address: Address = "auto",
    fp8: Fp8 = False,
    wait: Wait = False,
    keep: Kept = "all",
) -> None:
    """Stream the model, encode every expert at every width, record its cost.

    Example: keys35 measure SRC --recipe R --work W
    """
    from keys35.stages.job import open_job
    from keys35.stages.measure import measure as run_measure
    from keys35.stages.workers import Workers

    with open_job(source, _recipe(source, recipe, fp8, wait), work, keep) as job, voice.progress(job.work) as progress:
        run_measure(job, progress, Workers(workers, engine, address))


@app.command()
def allocate(
    work: Work,
    explain: Annotated[str | None, typer.Option(help="LAYER/EXPERT: only say why it has the width it has")] = None,
) -> None:
    """Choose one width per expert under the exact budget.

    Example: keys35 allocate --work W
    """
    from keys35.report.terminal import show_allocation
    from keys35.stages.allocate import allocate as run_allocate
    from keys35.stages.explain import explain as why
    from keys35.stages.explain import sentences
    from keys35.stages.job import resume_job

    with resume_job(work) as job:
        if explain is None:
            voice.result(run_allocate(job), show_allocation)
            return
        layer, _, expert = explain.partition("/")
        if not (layer.isdecimal() and expert.isdecimal()):
            raise typer.BadParameter(f"{explain!r} is no LAYER/EXPERT, such as 12/200")
        voice.result(why(job, int(layer), int(expert)), lambda _, found: [voice.say(s) for s in sentences(found)])


@app.command()
def quantize(
    work: Work, workers: Count = 0, engine: Place = "local", address: Address = "auto"
) -> None:
    """Encode everything at its final width, behind the layers encoded before it unless the recipe says otherwise.

    Example: keys35 quantize --work W
    """
    from keys35.stages.job import resume_job
    from keys35.stages.quantize import quantize as run_quantize
    from keys35.stages.workers import Workers

    with resume_job(work) as job, voice.progress(job.work) as progress:
        run_quantize(job, progress, Workers(workers, engine, address))


@app.command()
def assemble(work: Work, out: Out) -> None:
    """Write shards, index, configs and report.

    Example: keys35 assemble --work W --out OUT
    """
    from keys35.report.terminal import show_assembly
    from keys35.stages.assemble import assemble as run_assemble
    from keys35.stages.job import resume_job

    with resume_job(work) as job, voice.progress(job.work) as progress:
        report = run_assemble(job, out, progress)
    voice.result(report, show_assembly)


@app.command()
def run(
    source: Source,
    recipe: RecipeName,
    work: Work,
    out: Out,
    tp: Tp = 4,
    workers: Count = 0,
    engine: Place = "local",
    address: Address = "auto",
    fp8: Fp8 = False,
    wait: Wait = False,
    keep: Kept = "all",
) -> None:
    """All of it, in order, resuming what is unfinished.

    Example: keys35 run SRC --recipe R --work W --out OUT --workers 8
    """
    from keys35.stages.workers import Workers

    _run(source, _recipe(source, recipe, fp8, wait), work, out, tp, Workers(workers, engine, address), keep)


@app.command()
def demo(
    work: Work = Path("build/demo/work"),
    out: Out = Path("build/demo/out"),
    tp: Tp = 4,
    table: Annotated[Path | None, typer.Option(help="a Markdown file whose quality table is rewritten")] = None,
) -> None:
    """All of it on the bundled trained model, in minutes on two cores.

    Example: keys35 demo
    """
    from keys35.demo import MODEL
    from keys35.recipe import load_recipe
    from keys35.report.markdown import text_with_marks, update_quality_table

    if table:
        text_with_marks(table)
    result = _run(MODEL, load_recipe("demo"), work, out, tp)
    if table:
        update_quality_table(table, result)


@app.command()
def ablate(
    source: Source,
    recipe: RecipeName,
    work: Work,
    variants: Annotated[Path | None, typer.Option(help="TOML list of variants; without it the shipped one")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a variant or a group; may be given several times")] = None,
    finished: Annotated[bool, typer.Option("--finished", help="only what WORK has rows of; runs nothing")] = False,
    table: Annotated[Path | None, typer.Option(help="also write Markdown to this file, and JSON beside it")] = None,
) -> None:
    """Score variants of a recipe on its held-out panel: what each choice is worth on this model.

    Example: keys35 ablate keys35/demo/model --recipe demo --work W
    """
    from keys35.files.atomic import write_bytes, write_json
    from keys35.recipe import load_recipe
    from keys35.stages.ablate import ablate as run_ablate
    from keys35.stages.ablation_table import table as as_table
    from keys35.stages.variants import load_variants

    if table and table.suffix == ".json":
        raise typer.BadParameter(f"--table {table} is Markdown, and JSON of that name goes beside it: give a .md file")
    if table and table.is_dir():
        raise typer.BadParameter(f"--table {table} is a folder: give a .md file in it")
    chosen = load_variants(variants, only or ())
    with voice.progress() as progress:
        result = run_ablate(source, load_recipe(recipe), chosen, work, progress, finished)
    text = as_table(result)
    if table:
        write_bytes(table, text.encode())
        write_json(table.with_suffix(".json"), result)
    voice.result(result, lambda _, __: voice.say(text))


@app.command()
def status(work: Work) -> None:
    """Where a work directory stands.

    Example: keys35 status --work W
    """
    from keys35.report.status import read_status, show_status

    voice.result(read_status(work), show_status)


def _recipe(source: Path, name: str, fp8: bool, wait: bool) -> "Recipe":
    """The recipe with what the command line says of the source, which has arrived when this returns."""
    from keys35.recipe import load_recipe
    from keys35.stages.arrival import wait_for_source

    recipe = load_recipe(name)
    if wait:
        with voice.progress() as progress:
            wait_for_source(source, progress)
    return recipe.with_fp8() if fp8 else recipe


def _run(
    source: Path,
    recipe: "Recipe",
    work: Path,
    out: Path,
    tp: int,
    workers: "Workers | None" = None,
    keep: Literal["all", "errors"] = "all",
) -> dict:
    from keys35.report.terminal import show_plan, show_run
    from keys35.stages.job import open_job
    from keys35.stages.pipeline import run as run_all
    from keys35.stages.plan import plan as make_plan

    with open_job(source, recipe, work, keep) as job:
        show_plan(voice.console, make_plan(source, recipe, work, tp, keep, out))
        with voice.progress(job.work) as progress:
            result = run_all(job, out, progress, tp, workers)
    voice.result(result, show_run)
    voice.say(f"the finished checkpoint is in {out}", "passed")
    return result
