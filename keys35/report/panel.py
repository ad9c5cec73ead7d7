"""What a panel of any text, a comparison, a reply and a bench look like."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as plain
from rich.table import Column, Table
from rich.text import Text

from keys35.files.atomic import write_bytes
from keys35.report.pictures import Axis, Plot, legend
from keys35.report.sections import table
from keys35.report.terminal import human_bytes
from keys35.report.words import nats, noise, share

COLUMNS = ("tokens", "KL", "reverse", "median", "p90", "top-1", "top-2", "ppl BF16", "ppl")


def write_panel_page(scratch: Path, name: str, quality: Mapping[str, Any]) -> Path:
    """`scratch`/panel.html: per domain, per window, by confidence, with pictures; returns its path."""
    metrics, panel = quality["metrics"], quality["panel"]
    style = files("keys35.report").joinpath("page.css").read_text(encoding="utf-8")
    parts = [
        f'<header><h1>{escape(name)}</h1><p class="lead">{escape(panel["set"])}: {panel["windows"]} windows, '
        f"{panel['tokens']:,} tokens. Noise floor: {noise(quality)}.</p></header>",
        _section("By domain", table(("", *COLUMNS), _rows(quality))),
        _section("By how sure BF16 was", _confidence(metrics["confidence"])),
        _section(
            "By window", _picture(metrics["per_window"]), table(("window", "domain", *COLUMNS), _windows(metrics))
        ),
        _section("Drafts", _drafts(metrics["mtp"])) if "mtp" in metrics else "",
    ]
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(name)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n{''.join(parts)}\n</body>\n</html>\n"
    )
    path = scratch / "panel.html"
    write_bytes(path, page.encode(errors="backslashreplace"))  # a folder may have a name that is not UTF-8
    return path


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{''.join(parts)}\n</section>\n"


def _cells(m: Mapping[str, Any]) -> list[str]:
    kls = [nats(m[key]) for key in ("kl", "kl_reverse", "kl_median", "kl_p90")]
    return [
        f"{m['tokens']:,}",
        *kls,
        share(m["top1"]),
        share(m["top2"]),
        f"{m['ppl_reference']:.3f}",
        f"{m['ppl']:.3f}",
    ]


def _rows(quality: Mapping[str, Any]) -> list[list[str]]:
    domains = [[escape(name), *_cells(m)] for name, m in quality["metrics"]["domains"].items()]
    return [["all", *_cells(quality["metrics"])], *(domains if len(domains) > 1 else [])]


def _windows(metrics: Mapping[str, Any]) -> list[list[str]]:
    return [[str(m["window"]), escape(m["domain"]), *_cells(m)] for m in metrics["per_window"]]


def _confidence(buckets: Sequence[Mapping[str, Any]]) -> str:
    rows = [[f"{b['from']:.0%} to {b['to']:.0%}", f"{b['tokens']:,}", nats(b["kl"]), share(b["top1"])] for b in buckets]
    return table(("BF16's probability of its first choice", "positions", "KL", "top-1"), rows)


def _picture(windows: Sequence[Mapping[str, Any]]) -> str:
    plot = Plot(Axis(-1, len(windows)), Axis.over([m["kl"] for m in windows]))
    domains = list(dict.fromkeys(m["domain"] for m in windows))
    colours = {domain: f"w{2 + index % 3}" for index, domain in enumerate(domains)}
    drawn = [
        plot.columns([(m["window"], 0, m["kl"]) for m in windows if m["domain"] == domain], 1, colour)
        for domain, colour in colours.items()
    ]
    words = legend({colour: domain for domain, colour in colours.items()}) if len(domains) <= 3 else ""
    numbers = [tick for tick in plot.x.ticks() if tick in range(len(windows))]
    return f"<figure>{words}{plot.html(drawn, 'KL of each window', 'window', 'KL, nats', x_ticks=numbers)}</figure>"


def _drafts(m: Mapping[str, float]) -> str:
    rows = [
        ["this checkpoint", share(m["top1"]), share(m["acceptance"])],
        ["BF16", share(m["top1_reference"]), share(m["acceptance_reference"])],
    ]
    return table(("", "next-next token right", "drafts the trunk agrees with"), rows)


def show_comparison(console: Console, found: Mapping[str, Any]) -> None:
    """Two checkpoints beside each other, and the paired differences."""
    shown = _folding("", "first", "second")  # of a path, the end tells most
    shown.title = f"{found['panel']['windows']} windows, {found['panel']['tokens']:,} tokens"
    shown.add_row("checkpoint", *(plain(path) for path in found["checkpoints"]))
    shown.add_row("size", *(human_bytes(size) for size in found["bytes"]))
    for key in found["metrics"][0]:
        shown.add_row(key, *(f"{metrics[key]:.5g}" for metrics in found["metrics"]))
    console.print(shown)
    apart = _folding("second minus first", "mean over windows", "standard error", "in standard errors")
    names = {name: d for name, d in found["differences"].items()}
    names |= {f"{key} of {domain}": d for domain, ds in found["domains"].items() for key, d in ds.items()}
    for name, d in names.items():
        cells = [
            "" if d[key] is None else form.format(d[key])
            for key, form in (("standard_error", "{:.2g}"), ("z", "{:+.1f}"))
        ]
        apart.add_row(plain(name), f"{d['mean']:+.3g}", *cells)
    console.print(apart)
    floor = found["noise_floor"]
    console.print(f"noise floor: KL {floor['kl']:.1e}; a smaller difference is none", highlight=False)


def _folding(*names: str) -> Table:
    """A table that in a narrow terminal breaks its cells, where it would cut digits."""
    return Table(*(Column(name, overflow="fold") for name in names))


def show_reply(console: Console, found: Mapping[str, Any]) -> None:
    """The text, and how fast it came."""
    console.print(Text.assemble((found["prompt"], "dim"), found["text"]), soft_wrap=True)
    if found["drafts"]:
        console.print(f"drafts accepted: {found['accepted']} of {found['drafts']}", highlight=False)
    show_rates(console, found)


def show_rates(console: Console, found: Mapping[str, Any]) -> None:
    """Tokens a second of each rank."""
    shown = _folding("rank", "device", "prefill tokens/s", "decode tokens/s", "exchanges, s", "peak memory")
    for rank in found["ranks"]:
        rates = [f"{rank[key]:.1f}" if key in rank else "" for key in ("prefill_tokens_s", "decode_tokens_s")]
        shown.add_row(str(rank["rank"]), rank["device"], *rates, f"{rank['communication_s']:.2f}",
                      human_bytes(rank["peak_rss_bytes"]))  # fmt: skip
    console.print(shown)
