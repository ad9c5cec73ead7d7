"""The page's sections, each from what the facts hold; a section without facts is empty."""

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from html import escape

from keys35.report.facts import RANDOM, Facts
from keys35.report.figures import calibration_figure, cost_figures, layer_figure, map_figure, proxy_figure
from keys35.report.pictures import bar, legend, width_class
from keys35.report.terminal import human_seconds
from keys35.report.words import (
    bits,
    coverage,
    few_rows,
    nats,
    noise,
    perplexity_note,
    quality_rows,
    set_name,
    share,
    short_size,
    size,
    verdict,
)

GRAPH = '<th class="spare"></th>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], ours: int | None = None, info: int = 0) -> str:
    """An HTML table of finished cells; row `ours` stands out, the last `info` columns stay in the background."""
    quiet = len(columns) - info
    head = "".join(name if name.startswith("<th") else f'<th{" class=info" if i >= quiet else ""}>{name}</th>'
                   for i, name in enumerate(columns))
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(
            cell if cell.startswith("<td") else f'<td{" class=info" if i >= quiet else ""}>{cell}</td>'
            for i, cell in enumerate(row)
        )
        body += f"<tr{' class=ours' if number == ours else ''}>{cells}</tr>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def _under(text: str) -> str:
    return f'<p class="under">{text}</p>'


def warnings(facts: Facts) -> str:
    """What a careful reader should know first."""
    found = (facts.report or {}).get("warnings", [])
    if not found:
        return ""
    return _section("Warnings", *(f'<p class="verdict warn">{escape(text)}</p>' for text in found))


def quality(facts: Facts) -> str:
    """KL and top-1 of this checkpoint and its baselines, then where the loss lies."""
    rows = quality_rows(facts)
    if not rows:
        return ""
    panel = facts.quality["panel"] if facts.quality else None
    lead = f"Held-out text that was never calibrated on: {panel['windows']} windows, {panel['tokens']:,} tokens of " \
           f"{escape(panel['set'])}. KL is the mean of KL(BF16 || this) in nats over every position and the whole " \
           f"vocabulary. Noise floor, BF16 against itself: {noise(facts.quality)}." if panel else ""
    judged = verdict(facts)
    opinion = f'<p class="verdict{"" if judged[0] else " warn"}">{judged[1]}</p>' if judged else ""
    return _section("Quality", _under(lead), opinion, _quality_table(rows), _under(perplexity_note(facts)),
                    _domains(facts), _confidence(facts), _ranks(facts))


def _quality_table(rows: Sequence[tuple[str, dict, str]]) -> str:
    worst = max(metrics["kl"] for _, metrics, _ in rows)
    cells = []
    for number, (name, m, remark) in enumerate(rows):
        label = escape(name) + (f"<small>{remark}</small>" if remark else "")
        drawn = bar([(m["kl"] / worst, "plain" if number else "accent")], f"KL {nats(m['kl'])}")
        cells.append([label, nats(m["kl"]), f'<td class="graph spare">{drawn}</td>', share(m["top1"]), share(m["top2"]),
                      f"{m['ppl']:.3f}"])
    original = rows[0][1]["ppl_reference"]
    cells.append(["BF16", "0", '<td class="graph spare"></td>', share(1), share(1), f"{original:.3f}"])
    return table(("widths", "KL", GRAPH, "top-1", "top-2", "ppl"), cells, ours=0, info=1)


def _domains(facts: Facts) -> str:
    domains = facts.quality["metrics"]["domains"] if facts.quality else {}
    if not domains:
        return ""
    whole = {"all": facts.quality["metrics"]} | domains
    rows = [[escape(name), nats(m["kl"]), nats(m["kl_median"]), nats(m["kl_p99"]), share(m["top1"]),
             f"{m['ppl']:.3f} / {m['ppl_reference']:.3f}"] for name, m in whole.items()]
    return "<h3>By kind of text</h3>" + table(("text", "KL", "median", "p99", "top-1", "ppl / BF16"), rows, info=1)


def _confidence(facts: Facts) -> str:
    buckets = facts.quality["metrics"].get("confidence", []) if facts.quality else []
    if not buckets:
        return ""
    rows = [[f"{b['from']:.0%} to {b['to']:.0%}" if b["to"] < 1 else f"above {b['from']:.0%}", f"{b['tokens']:,}",
             nats(b["kl"]), share(b["top1"])] for b in buckets]
    return "<h3>By how sure BF16 was</h3>" + table(("BF16's probability of its first choice", "positions", "KL",
                                                    "top-1"), rows)


def _ranks(facts: Facts) -> str:
    if not facts.quality:
        return ""
    quality, rows = facts.quality, []
    for rank in quality["ranks"]:
        part = rank["bytes_read"] / quality["checkpoint_bytes"]
        rows.append([str(rank["rank"]), short_size(rank["bytes_read"]), share(part), short_size(rank["sharded"]),
                     short_size(rank["replicated"])])
    against = quality["tp_against_one"]
    text = f"Measured through the tensor-parallel runtime with {quality['tp']} ranks."
    if against:
        text += f" Against one process its logits differ by at most {against['max_logit_difference']:.1e}, " \
                f"KL {against['kl']:.1e}."
    return "<h3>What each rank reads</h3>" + _under(text) + \
           table(("rank", "bytes", "of all", "its share", "replicated"), rows)


def contents(facts: Facts) -> str:
    """Bytes by class, as one bar and as a table."""
    if not facts.classes:
        return ""
    largest = facts.classes[0].nbytes
    rows = []
    for row in facts.classes:
        drawn = bar([(row.nbytes / largest, "plain" if row.bits is None else "accent")], short_size(row.nbytes))
        rows.append([escape(row.name), bits(row.bits), short_size(row.nbytes),
                     f'<td class="graph">{drawn}</td>', share(row.nbytes / facts.total_bytes)])
    lead = f"{size(facts.total_bytes)} of tensors in {len(facts.report['shards'])} files. Encoded linears are EXL3, " \
           "codebook mul1; everything else is the source's bytes, unchanged."
    keys = legend({"accent": "encoded", "plain": "carried as it was"})
    return _section("What is in it", _under(lead), keys, table(("class", "bits", "bytes", "", "share"), rows))


def widths(facts: Facts) -> str:
    """The heat map, and the mean of each layer beside it."""
    if not facts.widths:
        return ""
    total = sum(facts.counts.values())
    words = {width_class(width): f"{width} bits: {count:,} experts ({share(count / total)})"
             for width, count in facts.counts.items()}
    lead = f"One width per routed expert, {total:,} in {len(facts.widths)} layers; their mean is exactly " \
           f"{bits(facts.routed_mean)} bits. A row is a layer, a column an expert."
    return _section("Widths", _under(lead), legend(words), map_figure(facts), layer_figure(facts))


def cost(facts: Facts) -> str:
    """What bits buy, as the allocation saw it."""
    pictures = cost_figures(facts)
    if not pictures:
        return ""
    lead = "Each expert was encoded at every candidate width. Its error was measured at the layer's output on " \
           "held-out calibration rows and weighed by what that layer's error does to the final KL. Predicted KL is " \
           "the experts' alone; measured KL is of the whole model, with dense linears and MTP at their widths."
    return _section("Cost against bits", _under(lead), *pictures, _sets(facts))


def _sets(facts: Facts) -> str:
    """Predicted and measured KL per set of widths; random mixes as one row of means."""
    groups: dict[str, list[tuple[float, float, float | None]]] = {}
    for name, entry in (facts.measured or {}).get("sets", {}).items():
        kl = facts.baselines[name]["kl"] if name in facts.baselines else None
        key = "random mixes, mean" if name.startswith(RANDOM) else set_name(name)
        groups.setdefault(key, []).append((float(Fraction(entry["mean"])), entry["predicted_kl"], kl))
    rows = []
    for name, entries in groups.items():
        width, predicted, measured = zip(*entries, strict=True)
        known = None not in measured
        rows.append([escape(name), bits(width[0]), nats(sum(predicted) / len(predicted)),
                     nats(sum(measured) / len(measured)) if known else "not measured"])
    ours = list(groups).index(set_name("allocation")) if set_name("allocation") in groups else None
    return table(("widths", "mean bits", "predicted KL", "measured KL"), rows, ours=ours) if rows else ""


def proxies(facts: Facts) -> str:
    """The encoder's own error: by layer, and by role and width."""
    picture = proxy_figure(facts)
    rows = [[escape(row["role"].replace("_", " ")), str(row["bits"]), f"{row['linears']:,}", f"{row['mean']:.3g}",
             f"{row['max']:.3g}"] for row in (facts.report or {}).get("proxy_errors", [])]
    if not picture and not rows:
        return ""
    lead = "The encoder's relative error under its Hessian, tr(E^T H E) / tr(W^T H W): how well one matrix was " \
           "encoded, not what that costs the model."
    numbers = table(("linears", "bits", "count", "mean", "largest"), rows) if rows else ""
    return _section("Proxy errors", _under(lead), picture, numbers)


def calibration(facts: Facts) -> str:
    """Rows of calibration text that each expert saw."""
    found = coverage(facts)
    if found is None:
        return ""
    count, layer, expert = found["least"]
    lead = f"Rows of calibration text that the router sent to each of {found['experts']:,} routed experts: median " \
           f"{found['median']:,}, least {count:,} (expert {expert} of layer {layer}), most {found['most']:,}. " \
           f"{few_rows(found)}"
    return _section("Calibration coverage", _under(lead), calibration_figure(facts))


def effort(facts: Facts) -> str:
    """Time and hardware, where they are known."""
    made = facts.making
    if not made or not (made["seconds"] or made["machines"]):
        return ""
    total = sum(made["seconds"].values())
    rows = []
    for step, seconds in sorted(made["seconds"].items(), key=lambda item: -item[1]):
        drawn = bar([(seconds / (total or 1), "accent")], human_seconds(seconds))
        rows.append([escape(step), human_seconds(seconds), f'<td class="graph">{drawn}</td>'])
    machines = [_under(escape(describe_machine(m))) for m in made["machines"]] or \
        [_under("The log names no machine.")]
    return _section("Time and hardware", *machines, table(("work", "wall clock", ""), rows) if rows else "")


def describe_machine(m: dict) -> str:
    """One line about a machine."""
    gpus = f"{len(m['gpus'])} x {m['gpus'][0]}, " if m["gpus"] else "no GPU, "
    return f"{gpus}{m['processor']}, {m['cores']} cores, {m['memory_bytes'] / (1 << 30):.0f} GiB of memory; " \
           f"Python {m['python']}, torch {m['torch']}"


def provenance(facts: Facts) -> str:
    """What it was made from, the recipe, and hashes to hold the files against."""
    report = facts.report
    if report is None:
        return ""
    sources = [[escape(name), f'<td class="hash">{escape(text)}</td>']
               for name, text in report["source_fingerprint"].items()]
    shards = [[escape(s["file"]), short_size(s["bytes"]), f'<td class="hash">{s["sha256"]}</td>']
              for s in report["shards"]]
    recipe = escape(json.dumps(report["recipe"], indent=1))
    fold = "<details><summary>{}</summary>{}</details>".format
    return _section(
        "Provenance", _under(f"{escape(report['tool'])}, format {escape(report['format'])}. The same source, recipe "
                             "and calibration text give the same bytes."),
        fold("The recipe", f"<pre>{recipe}</pre>"),
        fold(f"{len(sources)} files of the source", table(("file", "fingerprint"), sources)),
        fold(f"{len(shards)} files of this checkpoint", table(("file", "bytes", "SHA-256"), shards)),
    )


SECTIONS: tuple[Callable[[Facts], str], ...] = (
    warnings, quality, contents, widths, cost, proxies, calibration, effort, provenance
)
