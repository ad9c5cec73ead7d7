"""What the terminal shows: tables of artefacts, nothing computed here that is not in them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isnan
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:  # the stages write reports, so a report may not load the stages
    from keys35.stages.check import CheckReport
    from keys35.stages.plan import Plan


UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def human_bytes(count: float) -> str:
    """A size for people: 276.1 GB is 257.1 GiB; small sizes in bytes."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,.0f} B"


def count(number: int, noun: str) -> str:
    """"1 file", "3 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human_seconds(seconds: float | None) -> str:
    """A duration for people: 95 s, 12 min, 7.2 h; "unknown" for None."""
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_plan(console: Console, plan: "Plan") -> None:
    """Coverage, sizes per class and per rank, needs."""
    console.print(_plan_table(plan))
    for name, text in [*_needs(plan), *_time(plan), *_choices(plan)]:
        console.print(f"[bold]{name:>15}[/bold]  {text}", highlight=False)
    if plan.work_bytes + plan.output_bytes > plan.free_bytes + plan.held_bytes:
        console.print("[bold red]Not enough free space here for the work directory and the output.[/bold red]")
    for refusal in plan.missing:
        console.print(f"[bold red]`run` would refuse now:[/bold red] {escape(refusal)}", soft_wrap=True)
    if plan.foregone:
        console.print(f"[bold red]Known before anything is measured:[/bold red] {escape(plan.foregone)}",
                      soft_wrap=True)


def _plan_table(plan: "Plan") -> Table:
    table = Table(title=f"{escape(plan.source)}  with recipe  {plan.recipe}", title_justify="left")
    table.add_column("class", overflow="fold")  # the one that gives way where a terminal is narrow
    for name in ("tensors", "parameters", "source", "output", f"rank (TP {plan.tp})"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.classes:
        sizes = (row.source_bytes, row.output_bytes, row.rank_bytes)
        table.add_row(row.name, f"{row.tensors:,}", f"{row.params:,}", *map(human_bytes, sizes))
    total = (sum(c.tensors for c in plan.classes), sum(c.params for c in plan.classes))
    sums = (plan.source_bytes, plan.output_bytes, plan.rank_bytes)
    table.add_section()
    table.add_row("total", *(f"{n:,}" for n in total), *map(human_bytes, sums))
    return table


def _needs(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Lines about disk and memory, each with its name."""
    yield "output", (f"{plan.output_bytes / 1e9:,.3f} GB, {plan.output_bytes:,} bytes of tensors in {plan.shards} "
                     f"shards: {_by_size(plan.shard_bytes)}")
    yield "work directory", (f"{human_bytes(plan.work_bytes)} ({human_bytes(plan.free_bytes)} free there): "
                             + ", ".join(f"{name} {human_bytes(size)}" for name, size in plan.work_parts.items()))
    yield "host memory", f"about {human_bytes(plan.host_bytes)} of data at the peak"
    yield "compute memory", (f"about {human_bytes(plan.device_bytes)} while a layer or a group of experts is worked "
                             f"on; a GPU with room for them keeps up to {human_bytes(plan.rows_bytes)} of rows besides")
    yield "unified memory", (f"about {human_bytes(plan.unified_bytes)} where host and device share one (a GB10 has "
                             "119.2 GiB); what is read leaves the page cache")


def _time(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Lines about how long it takes."""
    yield "encoding", (f"{plan.weights_to_encode / 1e9:,.3f} G weights over all widths; {plan.backend} here: "
                       f"{plan.weights_per_second / 1e6:,.2f} Mweights/s in the trellis search alone, measured just "
                       f"now: {human_seconds(plan.encode_seconds)}")
    if plan.measured:
        rate = plan.measured
        yield "GPU time", (f"{plan.gpu_hours:,.2f} h on one {rate.device}, {plan.gpu_hours / 8:,.2f} h on eight, "
                           f"encoding alone at {rate.weights_per_second / 1e6:,.1f} Mweights/s ({rate.file}, "
                           f"{rate.date}); reading, forward passes and writing come on top")
    if plan.projection:
        yield "whole job", plan.projection.text()
    if plan.simulated_hours:
        yield "simulated", (f"{plan.simulated_hours:,.1f} GPU-hours with experts.measure = \"predicted\", which "
                            "simulates what encodings cost and makes those that are chosen")


def _choices(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Lines about other checkpoints that could be made, and what is left out of this one."""
    yield "profiles", "; ".join(
        f"{cost.name} {cost.output_bytes / 1e9:,.3f} GB at {float(cost.mean_bits):.4g} bits"
        f"{' (this recipe)' if cost.name == plan.profile else ''}" for cost in plan.profiles)
    yield "same size", f"experts at {plan.mean_bits:.4g} bits (this recipe); " + "; ".join(
        f"{trade.mean:.4g} with dense {trade.dense}, MTP {trade.mtp}" for trade in plan.trades)
    if plan.dropped:
        yield "left out", f"{len(plan.dropped)} unused indexer tensors of layers that share a selection"


def _by_size(sizes: Sequence[int]) -> str:
    """How many shards have which size; each one's bytes are in the JSON result, at the mean width of its layer."""
    sizes_falling = sorted(Counter(sizes).items(), reverse=True)
    return ", ".join(f"{number} of {human_bytes(size)}" for size, number in sizes_falling)


def show_allocation(console: Console, allocation: dict) -> None:
    """Widths chosen, and what each set is predicted to cost."""
    table = Table(title="allocation and its baselines", title_justify="left")
    for name in ("set", "mean bits", "experts per width", "predicted KL of the experts"):
        table.add_column(name, justify="left" if name == "set" else "right")
    for name, entry in allocation["sets"].items():
        counts = "  ".join(f"{count} x {width}" for width, count in entry["counts"].items())
        table.add_row(name, entry["mean"], counts, f"{entry['predicted_kl']:.4f}")
    console.print(table)
    choice = allocation["choice"]
    gains = ", ".join(f"{escape(name)} {gain:.1%}{' (one way: a half has none)' if name in choice['one_way'] else ''}"
                      for name, gain in choice["gains"].items())
    console.print(f"Costs from two halves of the held-out text: rank correlation {choice['correlation']:.2f}; widths "
                  f"from one half gain on the other, over a random mix: {gains or 'not compared'}; every domain was to "
                  f"have {choice['fairness']:.0%} of the mean gain.", soft_wrap=True)
    if checked := allocation["predicted"]:
        known = (f"rank correlation {checked['rank_correlation']:.2f} with the {count(checked['experts'], 'expert')} "
                 f"that were encoded, {checked['apart']:.0%} apart" if checked["experts"] > 1 else
                 f"held-out text chose {count(checked['experts'], 'expert')} of those that were encoded, too few to "
                 "compare with (experts.sample)")
        console.print(f"Costs are of simulated encodings: {known}.", soft_wrap=True)
    if allocation["warning"]:
        console.print(f"[bold red]warning[/bold red] {escape(allocation['warning'])}", soft_wrap=True)


def show_assembly(console: Console, report: dict) -> None:
    """What was written."""
    console.print(f"{human_bytes(report['total_bytes'])} in {count(len(report['shards']), 'shard')}, "
                  f"routed mean {report['routed_mean_bits']} bits")


def show_check(console: Console, report: "CheckReport") -> None:
    """Every broken rule, and what other engines than the one asked for would miss."""
    for finding in report.findings:
        console.print(f"[red]refused[/red] {escape(str(finding))}", highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"[dim]note[/dim]    not met: {escape(note.brief)}", highlight=False, soft_wrap=True)


def show_run(console: Console, result: dict) -> None:
    """The allocation, what the checkpoint lost, and the baselines beside it."""
    show_allocation(console, result["allocation"])
    show_validation(console, result["validation"])
    show_quality(console, quality_rows(result["baselines"], own_figures(result)))
    if result["warning"]:
        console.print(f"[bold red]warning[/bold red] {escape(result['warning'])}", soft_wrap=True)


def own_figures(result: dict) -> dict | None:
    """The checkpoint's metrics where it was encoded behind a quantized prefix, which its baselines were not."""
    behind = result["report"]["recipe"]["encoder"]["prefix"] == "quantized"
    return result["validation"]["metrics"] if behind else None


def quality_rows(baselines: dict[str, dict], own: dict | None = None) -> list[list[str]]:
    """The table of the README: one row per set of widths, the random mixes as mean and spread.

    own: what the checkpoint itself scores, if that is otherwise than its widths do beside the others.
    """
    named = {name: metrics for name, metrics in baselines.items() if not name.startswith("random-")}
    if own is not None:
        theirs = {WITHOUT_PREFIX if name == "allocation" else name: metrics for name, metrics in named.items()}
        named = {"allocation": own} | theirs
    rows = [[name, *_format(_flat(metrics))] for name, metrics in named.items()]
    if random := [_flat(metrics) for name, metrics in baselines.items() if name.startswith("random-")]:
        mean = [sum(column) / len(random) for column in zip(*random, strict=True)]
        kl = sorted(cells[0] for cells in random)
        row = [f"random mix, mean of {len(random)}", *_format(mean)]
        row[1] += f" ({kl[0]:.4f} to {kl[-1]:.4f})"
        rows.insert(1 if own is None else 2, row)
    return rows


WITHOUT_PREFIX = "without the prefix, as below"
QUALITY_COLUMNS = (
    "widths", "KL", "reverse KL", "top-1", "top-2", "ppl BF16", "ppl", "MTP acceptance BF16", "MTP acceptance"
)


def _flat(metrics: dict) -> list[float]:
    names = ("kl", "kl_reverse", "top1", "top2", "ppl_reference", "ppl")
    mtp = metrics.get("mtp", {})
    return [metrics[n] for n in names] + [mtp.get(n, float("nan")) for n in ("acceptance_reference", "acceptance")]


def _format(cells: list[float]) -> list[str]:
    forms = (".4f", ".4f", ".1%", ".1%", ".3f", ".3f", ".1%", ".1%")
    return ["" if isnan(value) else format(value, form) for value, form in zip(cells, forms, strict=True)]


def show_quality(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """The quality table on the terminal, for which 80 columns do: BF16's own figures, the same in all rows, stand
    above it. Nothing for no rows, as where costs were predicted and nothing was encoded that is not shipped.
    """
    if not rows:
        return
    theirs = [place for place, name in enumerate(QUALITY_COLUMNS) if name.endswith(" BF16") and rows[0][place]]
    figures = ", ".join(f"{QUALITY_COLUMNS[place].removesuffix(' BF16')} {rows[0][place]}" for place in theirs)
    table = Table(title=f"held-out text, against BF16 ({figures})", title_justify="left")
    shown = [place for place, name in enumerate(QUALITY_COLUMNS) if not name.endswith(" BF16")]
    for place in shown:
        table.add_column(QUALITY_COLUMNS[place], justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table, first column left, the others right."""
    head = "| " + " | ".join(columns) + " |"
    rule = "|---|" + "---:|" * (len(columns) - 1)
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def show_validation(console: Console, quality: dict) -> None:
    """The headline numbers, each rank's bytes, and the ranks against one process."""
    m, noise = quality["metrics"], quality["noise_floor"]
    console.print(
        f"[bold]validated[/bold] on {quality['panel']['windows']} windows, {quality['panel']['tokens']:,} tokens: "
        f"KL {m['kl']:.4f} (reverse {m['kl_reverse']:.4f}, median {m['kl_median']:.4f}, p90 {m['kl_p90']:.3f}, "
        f"p99 {m['kl_p99']:.3f}), top-1 {m['top1']:.1%}, top-2 {m['top2']:.1%}, ppl {m['ppl']:.3f} against "
        f"{m['ppl_reference']:.3f}, label in top-5 {m['top5']:.1%} against {m['top5_reference']:.1%}; "
        f"noise floor KL {noise['kl']:.1e}",
        highlight=False,
    )
    for line in _details(quality):
        console.print(f"    {line}", highlight=False, markup=False)


def _details(quality: dict) -> Iterator[str]:
    metrics = quality["metrics"]
    for domain, m in metrics["domains"].items():
        yield (
            f"{domain}: KL {m['kl']:.4f}, top-1 {m['top1']:.1%}, ppl {m['ppl']:.3f} against {m['ppl_reference']:.3f}"
        )
    if "mtp" in metrics:
        m = metrics["mtp"]
        yield (
            f"MTP: next-next token {m['top1']:.1%} (BF16 {m['top1_reference']:.1%}), "
            f"drafts accepted {m['acceptance']:.1%} (BF16 {m['acceptance_reference']:.1%})"
        )
    for rank in quality["ranks"]:
        yield (
            f"rank {rank['rank']} read {human_bytes(rank['bytes_read'])}, "
            f"{rank['bytes_read'] / quality['checkpoint_bytes']:.1%} of the checkpoint: "
            f"{human_bytes(rank['sharded'])} its own share, {human_bytes(rank['replicated'])} replicated"
        )
    if quality["tp_against_one"]:
        m = quality["tp_against_one"]
        yield (
            f"{quality['tp']} ranks against one process: logits differ by at most {m['max_logit_difference']:.1e}, "
            f"KL {m['kl']:.1e}"
        )
