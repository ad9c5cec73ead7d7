"""The terminal: parse, call a stage, print. Nothing else lives here."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from keys35 import __version__
from keys35.errors import ContractError, Keys35Error, ResumeError
from keys35.glm.config import refuse_other_architectures
from keys35.report.voice import Mode, Voice
from keys35.stages.engines import Engine

if TYPE_CHECKING:  # imported by the commands that need it, so that a refusal is fast
    from keys35.recipe import Recipe
    from keys35.stages.workers import Workers

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Turn a very large mixture-of-experts checkpoint into a small EXL3 one, and prove what it lost.",
)
# Tables need room: where nobody watches a terminal, they are not squeezed into 80 columns.
_console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)
voice = Voice(_console, Console(stderr=True))


def _supported(source: Path) -> Path:
    """Refuse an unsupported architecture before anything heavy is imported."""
    refuse_other_architectures(source)
    return source


Source = Annotated[Path, typer.Argument(help="directory of the BF16 checkpoint", callback=_supported)]


def _recipes(incomplete: str) -> list[str]:
    """Shipped recipes for the shell's completion."""
    from keys35.recipe import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeName = Annotated[
    str, typer.Option("--recipe", help="TOML file, or the name of a shipped recipe", autocompletion=_recipes)
]
Work = Annotated[Path, typer.Option("--work", help="work directory; the same command again resumes in it")]
Out = Annotated[Path, typer.Option("--out", help="directory of the finished checkpoint")]
Count = Annotated[
    int, typer.Option("--workers", min=0, help="processes that encode; 0: one per GPU, or this one alone without")
]
Place = Annotated[Literal["local", "ray"], typer.Option("--engine", help="on this machine, or on a Ray cluster")]
Address = Annotated[str, typer.Option("--address", help="the Ray cluster's HOST:PORT; auto: the one of this host")]
Kept = Annotated[
    Literal["all", "errors"],
    typer.Option("--keep", help="encodings that stay on disk: of all widths, or errors and one width (chosen ones are "
                 "encoded again)"),
]
Fp8 = Annotated[bool, typer.Option("--fp8", help="the source holds FP8 weights; sets the recipe's source.fp8")]
Wait = Annotated[bool, typer.Option("--wait", help="wait for a source that is still being downloaded")]
Tp = Annotated[int, typer.Option("--tp", min=1, help="tensor-parallel ranks")]


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
            voice.say(f"[green]passed[/green] all values of {read} tensors are finite")


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
    """Bring everything to its final width; nothing is encoded twice.

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
def check(
    out: Annotated[Path, typer.Argument(help="finished checkpoint")],
    reference: Annotated[Path | None, typer.Option(help="its BF16 source: compares carried bytes")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="also decode every weight and verify every SHA-256")] = False,
    sample: Annotated[int, typer.Option(min=0, help="decode so many linears and compare them with --reference")] = 0,
    engine: Annotated[Engine, typer.Option(help="whose refusals count; all: the contract they share")] = Engine.ALL,
) -> None:
    """Hold a checkpoint against the contract of the serving engines, or against one of them.

    Example: keys35 check OUT --reference SRC --engine tensorfold
    """
    from keys35.report.terminal import show_check
    from keys35.stages.check import check as run_check

    with voice.progress() as progress:
        report = run_check(out, reference, deep, engine=engine, sample=sample, progress=progress)
    voice.result(report, show_check)
    if report.findings:
        rules = ", ".join(finding.rule for finding in report.findings)
        raise ContractError(f"{out} breaks {len(report.findings)} rule(s) of {engine.asked}: {rules}")
    voice.say(f"[green]passed[/green] {out}: {engine.asked}; routed mean {report.routed_mean} bits")


PanelFiles = Annotated[list[Path], typer.Option("--panel", help="a text; give it again for each domain")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="windows of each --panel text")]
Length = Annotated[int, typer.Option("--len", min=3, help="tokens of each of these windows")]
Scratch = Annotated[Path | None, typer.Option(help="where reference states are kept; beside OUT")]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16: what products are made in")]


@app.command()
def validate(
    out: Annotated[Path, typer.Argument(help="finished checkpoint")],
    reference: Annotated[Path, typer.Option(help="the BF16 source")],
    tp: Tp = 4,
    scratch: Scratch = None,
    panel: PanelFiles = [],  # noqa: B006 (typer wants a list)
    rows: Rows = 32,
    length: Length = 2048,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Score a checkpoint with the tensor-parallel runtime, on its recipe's panel or on a text of yours.

    Example: keys35 validate OUT --reference SRC --tp 4 --panel wikitext-2.txt --rows 32 --len 2048
    """
    from keys35.report.panel import write_panel_page
    from keys35.report.terminal import show_validation
    from keys35.stages.panels import text_panel, validate_panel
    from keys35.stages.validate import recipe_of
    from keys35.stages.validate import validate as run_validate

    scratch = scratch or _scratch(out, "validate")
    with voice.progress() as progress:
        if not panel:
            result = run_validate(out, reference, recipe_of(out), tp=tp, scratch=scratch, progress=progress)
        else:
            windows = text_panel(panel, reference / "tokenizer.json", rows, length)
            options = {"mtp_hidden": _mtp_hidden(out), "device": device, "dtype": dtype}
            result = validate_panel(out, reference, windows, tp, scratch, progress, **options)
    voice.result(result, show_validation)
    if panel:
        voice.say(str(write_panel_page(scratch, out.name, result)))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="a checkpoint")],
    second: Annotated[Path, typer.Argument(help="another one of the same source")],
    reference: Annotated[Path, typer.Option(help="their BF16 source")],
    panel: PanelFiles,
    rows: Rows = 32,
    length: Length = 2048,
    tp: Tp = 4,
    scratch: Scratch = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """The same panel for two checkpoints: what each loses, and the paired differences with their standard errors.

    Example: keys35 compare OUT OTHER --reference SRC --panel wikitext-2.txt --rows 32 --len 2048
    """
    from keys35.report.panel import show_comparison
    from keys35.stages.panels import compare as run_compare
    from keys35.stages.panels import text_panel

    scratch = scratch or _scratch(second, "compare")
    windows = text_panel(panel, reference / "tokenizer.json", rows, length)
    options = {"mtp_hidden": _mtp_hidden(first), "device": device, "dtype": dtype}
    with voice.progress() as progress:
        result = run_compare(first, second, reference, windows, tp, scratch, progress, **options)
    voice.result(result, show_comparison)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, finished or BF16")],
    prompt: Annotated[str, typer.Argument(help="text to go on from")],
    tokens: Annotated[int, typer.Option(min=1, help="new tokens at most")] = 64,
    tp: Tp = 1,
    draft: Annotated[bool, typer.Option("--draft", help="let the MTP layer guess ahead: same text, sooner")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Go on from a prompt, greedily, and say how fast.

    Example: keys35 generate OUT "Once upon a time" --tokens 64
    """
    from keys35.report.panel import show_reply
    from keys35.stages.speak import reply

    result = reply(checkpoint, prompt, tokens, tp, draft=draft, device=device, dtype=dtype,
                   mtp_hidden=_mtp_hidden(checkpoint))  # fmt: skip
    voice.result(result, show_reply)


@app.command()
def bench(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, finished or BF16")],
    prompt: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="tokens to decode")] = 32,
    tp: Tp = 1,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Tokens a second of prefill and of decoding, for each rank.

    Example: keys35 bench OUT --tp 4
    """
    from keys35.report.panel import show_rates
    from keys35.stages.speak import rates

    voice.result(rates(checkpoint, prompt, tokens, tp, device=device, dtype=dtype), show_rates)


def _scratch(out: Path, name: str) -> Path:
    return out.resolve().parent / f"{out.resolve().name}.{name}"


def _mtp_hidden(checkpoint: Path) -> str | None:
    """Which trunk state feeds the MTP layer, where a checkpoint's report says so."""
    from keys35.stages.assemble import REPORT
    from keys35.stages.validate import recipe_of

    return recipe_of(checkpoint).mtp.hidden if (checkpoint / REPORT).exists() else None


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
    from keys35.report.markdown import update_quality_table

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
    from keys35.stages.ablate import load_variants
    from keys35.stages.ablate import table as as_table

    chosen = load_variants(variants, only or ())
    with voice.progress() as progress:
        result = run_ablate(source, load_recipe(recipe), chosen, work, progress, finished)
    text = as_table(result)
    if table:
        write_bytes(table, text.encode())
        write_json(table.with_suffix(".json"), result)
    voice.result(result, lambda _, __: voice.say(text))


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="work directory or finished checkpoint")],
    work: Annotated[Path | None, typer.Option("--work", help="also store its time and machines in OUT")] = None,
    base_model: Annotated[str | None, typer.Option(help="the source's repository, OWNER/NAME, for the card")] = None,
) -> None:
    """Write the HTML report again, and a checkpoint's model card.

    Example: keys35 report OUT --work W --base-model zai-org/GLM-5.3-BF16
    """
    from keys35.report.card import write_card
    from keys35.report.html import is_work, write_making, write_report, write_work_report

    if is_work(path):
        written = [write_work_report(path)]
    else:
        if work or base_model:
            write_making(path, work, base_model)
        written = [write_report(path, work), write_card(path)]
    voice.result({"written": written}, lambda _, result: [voice.say(str(file)) for file in result["written"]])


@app.command()
def status(work: Work) -> None:
    """Where a work directory stands.

    Example: keys35 status --work W
    """
    from keys35.report.status import read_status, show_status

    voice.result(read_status(work), show_status)


@app.command()
def upload(
    out: Annotated[Path, typer.Argument(help="finished checkpoint")],
    repo: Annotated[str, typer.Argument(help="repository on the hub, as owner/name; created if it is not there")],
    private: Annotated[bool, typer.Option("--private", help="create it as a private one")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="delete files there that are not the checkpoint's")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only check whether it may be published")] = False,
) -> None:
    """Publish a checkpoint: checked first, compared afterwards, marked complete last; run it again to resume.

    Example: keys35 upload OUT owner/GLM-5.3-EXL3-2.75
    """
    from keys35.publish.hub import Hub
    from keys35.publish.preflight import preflight
    from keys35.publish.upload import upload as run_upload
    from keys35.report.terminal import count, human_bytes

    if dry_run:
        with voice.progress() as progress:
            files = preflight(out, repo, progress)
        size = human_bytes(sum(file.size for file in files))
        voice.say(f"[green]passed[/green] {out}: {count(len(files), 'file')}, {size} may go to {repo}")
        voice.result({"repo": repo, "files": files})
        return
    with voice.progress() as progress:
        done = run_upload(out, Hub.connect(repo), progress, private=private, prune=prune)
    voice.say(f"[green]complete[/green] {done.repo} at {done.revision}: {count(done.files, 'file')}, "
              f"{human_bytes(done.bytes)}; sent {len(done.sent)} this time")
    voice.result(done)


@app.command()
def fetch(
    repo: Annotated[str, typer.Argument(help="repository on the hub, as owner/name")],
    to: Annotated[Path, typer.Option("--to", help="directory for the checkpoint")],
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit; the default branch if left out")] = None,
) -> None:
    """Get a source from the hub at one pinned commit and verify every byte; run it again to resume.

    Example: keys35 fetch zai-org/GLM-5.3-BF16 --to GLM-5.3-BF16
    """
    from keys35.publish.fetch import fetch as run_fetch
    from keys35.publish.hub import Hub
    from keys35.report.terminal import count, human_bytes

    hub = Hub.connect(repo)
    pinned = hub.resolve(revision)
    voice.say(f"{repo} at {pinned}")
    with voice.progress() as progress:
        done = run_fetch(hub, to, progress, pinned)
    voice.say(f"[green]verified[/green] {to}: {count(done.files, 'file')}, {human_bytes(done.bytes)}, "
              f"{count(len(done.source.tensors), 'tensor')}")
    voice.result({"repo": repo, "revision": pinned, "to": to, "files": done.files, "bytes": done.bytes})


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
        show_plan(voice.console, make_plan(source, recipe, work, tp, keep))
        with voice.progress(job.work) as progress:
            result = run_all(job, out, progress, tp, workers)
    voice.result(result, show_run)
    voice.say(f"[green]passed[/green] the finished checkpoint is in {out}")
    return result


def _version(value: bool) -> None:
    if value:
        voice.say(f"keys35 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print refusals only")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the result as one JSON document, events as JSON lines on stderr")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="version")] = False,
) -> None:
    voice.speak(Mode.JSON if as_json else Mode.QUIET if quiet else Mode.TEXT)


def main() -> None:
    """Run the command line; a refusal is one message on stderr and its own exit code."""
    try:
        app()
    except OSError as error:
        voice.refuse(error, ResumeError.exit_code)
        sys.exit(ResumeError.exit_code)
    except Keys35Error as error:
        voice.refuse(error, error.exit_code)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
