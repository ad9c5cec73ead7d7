"""Commands that look at a checkpoint: the contract, its quality, its words and its report."""

from pathlib import Path
from typing import Annotated

import typer

from keys35.cli.frame import app, voice
from keys35.cli.options import Device, Dtype, Length, PanelFiles, Rows, Scratch, Tp
from keys35.errors import ContractError
from keys35.stages.engines import Engine


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

    if sample and reference is None:
        raise typer.BadParameter("--sample compares with the source: give --reference, too")
    with voice.progress() as progress:
        report = run_check(out, reference, deep, engine=engine, sample=sample, progress=progress)
    voice.result(report, show_check)
    if report.findings:
        rules = ", ".join(finding.rule for finding in report.findings)
        raise ContractError(f"{out} breaks {len(report.findings)} rule(s) of {engine.asked}: {rules}")
    voice.say(f"{out}: {engine.asked}; routed mean {report.routed_mean} bits", "passed")


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
    from keys35.report.facts import QUALITY
    from keys35.report.html import PAGE
    from keys35.report.panel import write_panel_page
    from keys35.report.terminal import show_validation
    from keys35.stages.panels import text_panel, validate_panel
    from keys35.stages.validate import recipe_of
    from keys35.stages.validate import validate as run_validate

    if not panel and (rows, length, device, dtype) != (32, 2048, "auto", "float32"):
        raise typer.BadParameter("--rows, --len, --device and --dtype are of a text: give it with --panel")
    scratch, known = scratch or _scratch(out, "validate"), _bytes(out / QUALITY)
    with voice.progress() as progress:
        if not panel:
            result = run_validate(out, reference, recipe_of(out), tp=tp, scratch=scratch, progress=progress)
        else:
            windows = text_panel(panel, reference / "tokenizer.json", rows, length)
            options = {"mtp_hidden": _mtp_hidden(out), "device": device, "dtype": dtype}
            result = validate_panel(out, reference, windows, tp, scratch, progress, **options)
    voice.result(result, show_validation)
    if panel:
        voice.say(str(write_panel_page(scratch, out.resolve().name, result)))
    elif (out / PAGE).is_file() and _bytes(out / QUALITY) != known:
        voice.say(f"{PAGE} and the card show the figures of before: `keys35 report {out}` writes them anew")


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
        if work or base_model:
            raise typer.BadParameter(f"--work and --base-model are of a checkpoint, {path} is a work directory")
        written = [write_work_report(path)]
    else:
        if work or base_model:
            write_making(path, work, base_model)
        written = [write_report(path, work), write_card(path)]
    voice.result({"written": written}, lambda _, result: [voice.say(str(file)) for file in result["written"]])


def _scratch(out: Path, name: str) -> Path:
    return out.resolve().parent / f"{out.resolve().name}.{name}"


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _mtp_hidden(checkpoint: Path) -> str | None:
    """Which trunk state feeds the MTP layer, where a checkpoint's report says so."""
    from keys35.report.facts import REPORT
    from keys35.stages.validate import recipe_of

    return recipe_of(checkpoint).mtp.hidden if (checkpoint / REPORT).exists() else None
