"""The model card: README.md of a finished checkpoint, every figure from its report files."""

import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from keys35.errors import ContractError, PublishError
from keys35.files.atomic import read_json, write_bytes, write_json
from keys35.files.forms import OBJECT, read_formed
from keys35.report.facts import REDO, REPORT, REPOSITORY, Facts, facts_of_checkpoint
from keys35.report.html import PAGE
from keys35.report.measured import MEASUREMENTS
from keys35.report.sections import describe_machine
from keys35.report.terminal import human_seconds, markdown_table
from keys35.report.words import (
    bits,
    coverage,
    few_rows,
    nats,
    noise,
    perplexity_note,
    quality_rows,
    share,
    short_size,
    size,
    verdict,
)

CARD, SOURCE_CARD = "README.md", "SOURCE_README.md"
MARK = "<!-- written by keys35 from the report files beside it; `keys35 report` rewrites it -->"
LICENCES = {"MIT License": "mit", "Apache License": "apache-2.0"}
LICENCE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt")
FROM_SOURCE = ("license", "license_name", "license_link", "language", "pipeline_tag")


def write_card(out: Path) -> Path:
    """Write README.md of a finished checkpoint and return its path; the same report files give the same bytes.

    A README.md carried from the source is kept as SOURCE_README.md, and the assembly report lists README.md under
    changed_files, so that `check` knows it was replaced on purpose. Raises ContractError for damaged report files,
    PublishError for a third card: neither ours nor the one that is kept.
    """
    facts = facts_of_checkpoint(out)
    path, carried = out / CARD, out / SOURCE_CARD
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        if carried.is_file() and carried.read_bytes() != path.read_bytes():
            raise PublishError(f"{path} is neither keys35's card nor the source's, which {SOURCE_CARD} keeps: move it "
                               "away and run the same command again")
        write_bytes(carried, path.read_bytes())
    if carried.is_file():
        _declare_changed(out)
    write_bytes(path, render_card(facts, out).encode())
    return path


def _declare_changed(out: Path) -> None:
    report = read_json(out / REPORT)
    changed = report.get("changed_files") or []
    if CARD not in changed:
        write_json(out / REPORT, report | {"changed_files": sorted([*changed, CARD])})


def render_card(facts: Facts, out: Path) -> str:
    """The card's text; `out` is asked only which files it holds and for the source's licence and card."""
    head = yaml.safe_dump(front_matter(facts, out), sort_keys=False, allow_unicode=True)
    parts = [f"---\n{head}---\n{MARK}\n\n# {facts.name}", _opening(facts, out), _quality(facts), _contents(facts),
             _serving(facts), _making(facts), _checking(), _credits(facts, out)]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter(facts: Facts, out: Path) -> dict[str, Any]:
    """Metadata as model hubs read it; licence and language are the source's own."""
    carried = source_card(out)
    head: dict[str, Any] = {key: carried[key] for key in FROM_SOURCE if key in carried}
    if "license" not in head:
        head = _licence(out) | head
    base = base_model(facts, out)
    if base:
        head |= {"base_model": base, "base_model_relation": "quantized"}
    config = _config(out)
    head["tags"] = sorted({"exl3", "keys35", "quantized", "mixture-of-experts", str(config.get("model_type"))})
    encoded = {row.name.replace(" ", "_"): float(row.bits) for row in facts.classes if row.bits is not None}
    return head | {"quantization": {"method": "exl3", "format": facts.report["format"], "codebook": "mul1",
                                    "bits_per_weight": encoded}}


def source_card(out: Path) -> dict[str, Any]:
    """The front matter of the card that the source carried, empty if there is none or it cannot be read."""
    path = out / SOURCE_CARD
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""  # some editors leave a mark
    found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        head = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError:
        return {}
    return head if isinstance(head, dict) else {}


def base_model(facts: Facts, out: Path) -> str | None:
    """The source's repository: as the publisher named it, else as the source's own card or config does."""
    named = (facts.making or {}).get("base_model")
    given = source_card(out).get("base_model")
    listed = given[0] if isinstance(given, list) and given else given
    guesses = (named, listed, _config(out).get("_name_or_path"))
    return next((guess for guess in guesses if isinstance(guess, str) and REPOSITORY.fullmatch(guess)), None)


def _config(out: Path) -> dict[str, Any]:
    return read_formed(out / "config.json", OBJECT, ContractError, REDO)


def _licence(out: Path) -> dict[str, Any]:
    """From the licence text that the source carries."""
    for name in LICENCE_FILES:
        if (out / name).is_file():
            start = (out / name).read_text(encoding="utf-8", errors="replace")[:500]
            known = next((key for words, key in LICENCES.items() if words in start), None)
            return {"license": known} if known else {
                "license": "other", "license_name": "as-the-source", "license_link": name}
    return {"license": "unknown"}


def _opening(facts: Facts, out: Path) -> str:
    base = base_model(facts, out)
    source = f"[{base}](https://huggingface.co/{base})" if base else "Its BF16 source"
    smaller = f", down from {short_size(facts.source_bytes)}" if facts.source_bytes else ""
    lines = [f"{source} as EXL3, **{size(facts.total_bytes)}**{smaller}: {_counts(facts)}, mean exactly "
             f"**{bits(facts.routed_mean)}** bits per routed weight. {_basis(facts)}"]
    if (out / PAGE).is_file():
        lines.append(f"Heat map of widths, cost curves and calibration coverage: [{PAGE}]({PAGE}).")
    return "\n\n".join(lines + [f"> **Warning:** {text}" for text in facts.report["warnings"]])


def _basis(facts: Facts) -> str:
    if facts.report.get("width_basis") == "random":
        return "Widths are a random mix, for want of text that says better."
    whose = "its layer's error" if facts.profile == "uniform-layer" else "an expert's error"
    return f"What {whose} costs the model's output decided its width."


def _counts(facts: Facts) -> str:
    parts = [f"{count:,} at {width}" for width, count in facts.counts.items()]
    return f"{sum(facts.counts.values()):,} routed experts, {', '.join(parts)} bits"


def _quality(facts: Facts) -> str:
    if facts.quality is None:
        return "## Quality\n\nNot measured yet: `keys35 validate` scores it against its source."
    panel, quality = facts.quality["panel"], facts.quality
    rows = [[f"**{name}**" if not number else f"{name} ({remark})" if remark else name, nats(m["kl"]),
             share(m["top1"]), nats(m["kl_reverse"]), nats(m["kl_p99"]), share(m["top2"]), f"{m['ppl']:.3f}"]
            for number, (name, m, remark) in enumerate(quality_rows(facts))]
    rows.append(["BF16", "0", "100%", "0", "0", "100%", f"{quality['metrics']['ppl_reference']:.3f}"])
    judged = verdict(facts)
    parts = [
        "## Quality",
        f"KL(BF16 || this) in nats and agreement on the first choice, over {panel['tokens']:,} tokens of held-out text "
        f"({panel['windows']} windows of `{panel['set']}`, scored from position 0, weights only: no KV quantization), "
        f"through a tensor-parallel runtime with {quality['tp']} ranks. Noise floor, BF16 against itself: "
        f"{noise(quality)}; smaller differences mean nothing.",
        markdown_table(("widths", "KL", "top-1", "reverse KL", "KL p99", "top-2", "ppl"), rows),
        judged[1] if judged else "",
        perplexity_note(facts),
        _domains(quality),
    ]
    return "\n\n".join(part for part in parts if part)


def _in_a_cell(name: str) -> str:
    """A name that somebody else chose, which ends neither its cell nor its row, and is no markup."""
    return escape(" ".join(name.split())).replace("|", r"\|")


def _domains(quality: dict[str, Any]) -> str:
    rows = [[_in_a_cell(name), f"{m['tokens']:,}", *(nats(m[key]) for key in ("kl", "kl_median", "kl_p90", "kl_p99")),
             share(m["top1"]), f"{m['ppl']:.3f} / {m['ppl_reference']:.3f}"]
            for name, m in quality["metrics"]["domains"].items()]
    text = markdown_table(("text", "tokens", "KL", "median", "p90", "p99", "top-1", "ppl / BF16"), rows)
    mtp = quality["metrics"].get("mtp")
    if mtp:
        original = share(mtp["acceptance_reference"])
        text += f"\n\nMTP: {share(mtp['acceptance'])} of greedy drafts are accepted, {original} with BF16."
    return text


def _contents(facts: Facts) -> str:
    rows = [[row.name, bits(row.bits), f"{row.tensors:,}", f"{row.nbytes:,}", share(row.nbytes / facts.total_bytes)]
            for row in facts.classes]
    rows.append(["**all**", "", f"{sum(r.tensors for r in facts.classes):,}", f"{facts.total_bytes:,}", "100%"])
    text = f"{len(facts.report['shards'])} shards, profile `{facts.profile}`. Encoded linears are EXL3, codebook " \
           "mul1; what is carried has the source's bytes. `quantization_config.json` lists every expert's width and " \
           "every tensor's shape."
    table = markdown_table(("class", "bits per weight", "tensors", "bytes", "share"), rows)
    layers = [[layer, *(str(row.get(str(width), 0)) for width in facts.counts)]
              for layer, row in facts.report["widths_by_layer"].items()]
    by_layer = markdown_table(("layer", *(f"{width} bits" for width in facts.counts)), layers)
    fold = f"<details><summary>Experts per width, layer by layer</summary>\n\n{by_layer}\n\n</details>"
    return f"## What is in it\n\n{text}\n\n{table}\n\n{fold}"


def _serving(facts: Facts) -> str:
    every = max((rank["bytes_read"] for rank in facts.quality["ranks"]), default=0) if facts.quality else 0
    rank = f" Each of {facts.quality['tp']} ranks reads {size(every)} of weights." if every else ""
    rows = "\n".join(f"| {name} | {'yes' if loads else 'no'} | {why} |" for name, loads, why in engines(facts))
    return f"## How to serve it\n\nPoint the engine at this folder; nothing is converted.{rank}\n\n" \
           f"| engine | reads it at full speed | why |\n|---|---|---|\n{rows}\n\n" \
           "Before a long load, `keys35 check FOLDER --engine NAME` holds the files against that engine's known rules."


def engines(facts: Facts) -> list[tuple[str, bool, str]]:
    """(engine, whether it reads this checkpoint as fast as any, why), by the stored widths and classes."""
    one_width = "experts of a layer have one width, as its fused kernels need"
    mixed = "experts of a layer differ in width: its fused kernels want one per layer"
    halves = "; half rates from 1.6.5 on, 1.5.0 and older misread them without a word" if any(
        width % 1 for width in facts.counts) else ""
    dense = any(row.bits is not None and row.name == "attention" for row in facts.classes)
    return [
        ("TensorFold (`glm_moe_dsa`)", dense, "takes widths from the trellis shapes, one per expert" if dense
         else "its main reader wants dense linears encoded; readers that take plain ones load it"),
        ("exllamav3", not facts.mixed, (mixed if facts.mixed else one_width) + halves),
        ("vllm-exl3", facts.profile == "uniform-layer", f"{mixed}; runs eagerly only" if facts.mixed else one_width
         if facts.profile == "uniform-layer" else "its config keys are written for the profile uniform-layer only"),
    ]


def _making(facts: Facts) -> str:
    report, recipe = facts.report, facts.report["recipe"]
    calibration, experts = recipe["calibration"], recipe["experts"]
    simulated = ", by simulated encodings," if experts.get("measure") == "predicted" else ""
    lines = [
        f"{report['tool']}, recipe `{recipe['name']}` (in [{REPORT}]({REPORT})), seed {recipe['seed']}. Calibrated on "
        f"{calibration['fit_windows']} windows of {calibration['window']:,} tokens of the set `{calibration['set']}`; "
        f"{calibration['selection_windows']} more, held out, judged each expert{simulated} at "
        f"{', '.join(map(str, experts['widths']))} bits.",
    ]
    found = coverage(facts)
    if found:
        count, layer, expert = found["least"]
        lines.append(f"Calibration rows per routed expert: median {found['median']:,}, least {count:,} (layer {layer}, "
                     f"expert {expert}). {few_rows(found)}")
    errors = [[row["role"].replace("_", " "), str(row["bits"]), f"{row['linears']:,}", f"{row['mean']:.3g}",
               f"{row['max']:.3g}"] for row in report["proxy_errors"]]
    lines.append(markdown_table(("encoded linears", "bits", "count", "mean proxy error", "largest"), errors))
    if facts.measured and "allocation" in facts.measured["sets"]:
        foreseen = nats(facts.measured["sets"]["allocation"]["predicted_kl"])
        costs = any("cost" in layer for layer in facts.measured["layers"].values())
        where = f"; every expert's cost at every width is in [{MEASUREMENTS}]({MEASUREMENTS})" if costs else ""
        lines.append(f"The allocation foresaw a KL of {foreseen} from the routed experts alone{where}.")
    made = facts.making or {}
    if made.get("seconds"):
        steps = ", ".join(f"{step} {human_seconds(value)}" for step, value in made["seconds"].items())
        lines.append(f"Time, wall clock: {human_seconds(sum(made['seconds'].values()))} ({steps}).")
    lines += [f"Hardware: {describe_machine(machine)}." for machine in made.get("machines", [])]
    return "## How it was made\n\n" + "\n\n".join(line for line in lines if line)


def _checking() -> str:
    script = files("keys35.report").joinpath("read_shapes.py").read_text(encoding="utf-8")
    return "## Check it yourself\n\nThe mean, the experts per width and the bytes above follow from the shards' " \
           f"headers alone; this needs Python and nothing else:\n\n```python\n{script}```"


def _credits(facts: Facts, out: Path) -> str:
    base = base_model(facts, out)
    lines = [f"The weights are those of {base or 'the source'}, and its licence applies to them."]
    lines += [f"Licence: [{name}]({name})." for name in LICENCE_FILES if (out / name).is_file()]
    if (out / SOURCE_CARD).is_file():
        lines.append(f"The source's own card, with its credits and citation: [{SOURCE_CARD}]({SOURCE_CARD}).")
    lines.append("EXL3 is [exllamav3](https://github.com/turboderp-org/exllamav3)'s format, after QTIP. "
                 f"Encoded with {facts.report['tool']}.")
    return "## Licence and credits\n\n" + " ".join(lines)
