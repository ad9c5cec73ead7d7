"""The model card: valid metadata, links that resolve, every figure that of the report files and of the shapes."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from made_up import metrics, write_out

from keys35.errors import ContractError, PublishError
from keys35.files.headers import pack_header
from keys35.report import card
from keys35.report.card import CARD, SOURCE_CARD, write_card
from keys35.report.facts import QUALITY
from keys35.report.html import write_making, write_report
from keys35.report.measured import MEASUREMENTS
from keys35.report.schema import REPORT
from keys35.stages.check import Engine, check

SOURCE_TEXT = """---
license: mit
language: [en, zh]
base_model: zai-org/GLM-5.3
pipeline_tag: text-generation
---
# The original

Thanks to everybody.
"""


def front(path: Path) -> dict:
    text = path.read_text()
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def cells(text: str, label: str) -> list[str]:
    """A row of one of the card's tables."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def local_links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]


def test_metadata(out):
    (out / CARD).write_text(SOURCE_TEXT)
    head = front(write_card(out))
    assert head["license"] == "mit" and head["language"] == ["en", "zh"]
    assert head["base_model"] == "zai-org/GLM-5.3" and head["base_model_relation"] == "quantized"
    assert {"exl3", "keys35", "glm_moe_dsa"} <= set(head["tags"])
    assert head["quantization"]["bits_per_weight"] == {"routed_experts": 2.75, "MTP_experts": 8.0, "attention": 5.0}


@pytest.mark.parametrize(("basis", "profile", "said"), [
    ({}, "per-expert", "What an expert's error costs the model's output decided its width."),
    ({"width_basis": "experts"}, "uniform-layer", "What its layer's error costs the model's output decided its width."),
    ({"width_basis": "random"}, "per-expert", "Widths are a random mix, for want of text that says better."),
])  # fmt: skip
def test_what_decided_widths_is_what_did(out, basis, profile, said):
    for name, more in ((REPORT, basis), ("quantization_config.json", {"profile": profile})):
        (out / name).write_text(json.dumps(json.loads((out / name).read_text()) | more))
    assert f"bits per routed weight. {said}\n" in write_card(out).read_text()


def test_a_text_may_have_any_name(out):
    """A table with `code|docs` in it had a row of nine cells."""
    quality = json.loads((out / QUALITY).read_text())
    known = quality["metrics"]["domains"]
    quality["metrics"]["domains"] = {"code|docs <i>\n": next(iter(known.values()))}
    (out / QUALITY).write_text(json.dumps(quality))
    assert r"| code\|docs &lt;i&gt; | " in write_card(out).read_text()


def test_a_card_written_by_hand_replaces_nothing(out):
    """The source's card is kept once; a third one would have taken its place, and its credits."""
    (out / CARD).write_text(SOURCE_TEXT)
    write_card(out)
    (out / CARD).write_text("# By hand\n")
    with pytest.raises(PublishError, match="neither keys35's card nor the source's"):
        write_card(out)
    assert (out / SOURCE_CARD).read_text() == SOURCE_TEXT and (out / CARD).read_text() == "# By hand\n"
    (out / CARD).write_text(SOURCE_TEXT)  # as a second assembly leaves it
    write_card(out)
    assert (out / SOURCE_CARD).read_text() == SOURCE_TEXT


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT License\n\nCopyright", {"license": "mit"}),
        ("        Apache License\n  Version 2.0", {"license": "apache-2.0"}),
        ("be kind", {"license": "other", "license_name": "as-the-source", "license_link": "LICENSE"}),
        (None, {"license": "unknown"}),
    ],
)
def test_licence_from_its_text(out, licence, expected):
    if licence:
        (out / "LICENSE").write_text(licence)
    path = write_card(out)
    assert {k: v for k, v in front(path).items() if k.startswith("license")} == expected
    assert ("[LICENSE](LICENSE)" in path.read_text()) == bool(licence)


def test_a_source_card_that_begins_with_a_byte_order_mark(out):
    (out / CARD).write_text("\ufeff" + SOURCE_TEXT, encoding="utf-8")
    assert front(write_card(out))["base_model"] == "zai-org/GLM-5.3"


@pytest.mark.parametrize("text", ["no front matter", "---\n: : bad [\n---\n", "---\n- a\n- b\n---\n", "\xff\xfe"])
def test_any_source_card_is_kept(out, text):
    (out / CARD).write_bytes(text.encode("latin1"))
    head = front(write_card(out))
    assert head["license"] == "unknown" and "base_model" not in head
    assert (out / SOURCE_CARD).read_bytes() == text.encode("latin1")


def test_the_sources_card_is_kept_and_declared(out):
    """Written twice, or after `assemble` has put the source's back: the same card."""
    (out / CARD).write_text(SOURCE_TEXT)
    first = write_card(out).read_bytes()
    assert (out / SOURCE_CARD).read_text() == SOURCE_TEXT
    assert json.loads((out / "KEYS35_ASSEMBLY_REPORT.json").read_text())["changed_files"] == [CARD]
    assert write_card(out).read_bytes() == first
    (out / CARD).write_text(SOURCE_TEXT)
    assert write_card(out).read_bytes() == first and (out / SOURCE_CARD).read_text() == SOURCE_TEXT


def test_without_a_source_card_nothing_is_declared_changed(out):
    write_card(out)
    assert "changed_files" not in json.loads((out / "KEYS35_ASSEMBLY_REPORT.json").read_text())
    assert not (out / SOURCE_CARD).exists()


def test_links_resolve(out):
    """Failure case 96."""
    (out / CARD).write_text(SOURCE_TEXT)
    (out / "LICENSE").write_text("be kind")
    write_report(out)
    links = local_links(write_card(out).read_text())
    assert {"LICENSE", SOURCE_CARD, "KEYS35_REPORT.html", "KEYS35_MEASUREMENTS.json"} <= set(links)
    for link in links:
        assert (out / link).is_file(), link


def test_links_only_to_what_is_there(out):
    (out / "KEYS35_MEASUREMENTS.json").unlink()
    for link in local_links(write_card(out).read_text()):
        assert (out / link).is_file(), link


def test_figures_are_the_quality_reports(out):
    text = write_card(out).read_text()
    m = json.loads((out / "KEYS35_QUALITY.json").read_text())["metrics"]
    row = cells(text, "**this checkpoint**")
    assert [float(row[1]), row[2]] == [pytest.approx(m["kl"], abs=5e-5), f"{m['top1']:.1%}"]
    assert float(cells(text, "uniform 3 bits")[1]) == pytest.approx(m["kl"] / 2, abs=5e-5)
    assert "random mix, mean of 2 (KL 0.0600 to 0.0700) | 0.0650" in text
    assert "Noise floor, BF16 against itself: KL 0.0010, 0.2% of top-1" in text


def test_perplexity_is_information(tmp_path):
    """Failure case 58: KL and top-1 come first, and a ppl below BF16's is not sold as a gain."""
    text = write_card(write_out(tmp_path, metrics=metrics(0.05, ppl=9.5))).read_text()
    header = next(line for line in text.splitlines() if line.startswith("| widths |"))
    columns = [column.strip() for column in header.strip("|").split("|")]
    assert columns[1:3] == ["KL", "top-1"] and columns[-1] == "ppl"
    assert "that is no improvement" in text


def test_a_loss_to_random_mixes_is_said(tmp_path):
    """Failure case 85."""
    text = write_card(write_out(tmp_path, 0.08, (0.06, 0.07))).read_text()
    assert "No better than random mixes of the same bytes: KL 0.0800 against 0.0650" in text


def test_a_predicted_measurement_claims_no_encodings(out):
    """Its sample's costs alone were measured, and KEYS35_MEASUREMENTS.json has none."""
    report, measured = (json.loads((out / name).read_text()) for name in (REPORT, MEASUREMENTS))
    assert "judged each expert at 2, 3, 4 bits" in write_card(out).read_text()
    report["recipe"]["experts"]["measure"] = "predicted"
    for layer in measured["layers"].values():
        layer.pop("cost", None)
    for name, value in ((REPORT, report), (MEASUREMENTS, measured)):
        (out / name).write_text(json.dumps(value))
    text = write_card(out).read_text()
    assert "judged each expert, by simulated encodings, at 2, 3, 4 bits" in text
    assert "from the routed experts alone." in text and "cost at every width" not in text


def test_half_rates_say_who_misreads_them(tmp_path):
    whole, half = (write_card(write_out(tmp_path / str(low), low=low)).read_text() for low in (2, 2.5))
    assert "1.5.0 and older misread them" in half and "misread them" not in whole


def test_without_quality(out):
    (out / "KEYS35_QUALITY.json").unlink()
    text = write_card(out).read_text()
    assert "Not measured yet" in text and "| KL |" not in text


def test_time_and_machines_when_the_publisher_adds_them(out):
    making = {"format": "keys35-making-v1", "seconds": {"expert encoding": 9000.0, "assembly": 60.0}, "machines": [
        {"processor": "Xeon", "cores": 16, "memory_bytes": 128 << 30, "gpus": ["H200"], "python": "3.12", "torch": "2"},
    ]}
    assert "Hardware" not in write_card(out).read_text()
    (out / "KEYS35_MAKING.json").write_text(json.dumps(making))
    text = write_card(out).read_text()
    assert "Time, wall clock: 2.5 h (expert encoding 2.5 h, assembly 60 s)." in text
    assert "Hardware: 1 x H200, Xeon, 16 cores, 128 GiB of memory" in text


def test_the_publisher_names_the_source(out):
    write_making(out, base_model="owner/model-BF16")
    path = write_card(out)
    assert front(path)["base_model"] == "owner/model-BF16"
    assert "[owner/model-BF16](https://huggingface.co/owner/model-BF16)" in path.read_text()


def test_read_me_shapes_and_check_agree(finished, tmp_path):
    """Failure case 86: the card's own script reads the shapes; check, card, configs and report say the same."""
    import shutil

    out = shutil.copytree(finished.out, tmp_path / "out")
    write_report(out, finished.work)
    text = write_card(out).read_text()
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    body = script[script.index("folder = ") :]
    assert len(body.splitlines()) <= 20
    (tmp_path / "read.py").write_text(script)
    command = [sys.executable, "-I", str(tmp_path / "read.py"), str(out)]
    read = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    checked = check(out, reference=finished.source, deep=True, expected=finished.recipe)
    assert checked.ok, checked.findings
    assert Fraction(read["mean"]) == checked.routed_mean == Fraction(11, 4)
    assert {int(width): count for width, count in read["experts"].items()} == checked.widths
    assert read["bytes"] == checked.counts["tensor_bytes"]

    mean = float(Fraction(read["mean"]))
    quantization = json.loads((out / "quantization_config.json").read_text())
    report = json.loads((out / "KEYS35_ASSEMBLY_REPORT.json").read_text())
    assert mean == quantization["bits"] == report["routed_mean_bits"]
    assert read["experts"] == report["widths_total"]
    assert cells(text, "routed experts")[1] == f"{mean:g}" and f"mean exactly **{mean:g}** bits" in text
    assert ", ".join(f"{count} at {width}" for width, count in read["experts"].items()) + " bits" in text
    assert cells(text, "**all**")[3] == f"{read['bytes']:,}"
    assert front(out / CARD)["quantization"]["bits_per_weight"]["routed_experts"] == mean
    page = (out / "KEYS35_REPORT.html").read_text()
    assert f"<b>{mean:g}</b>" in page


def test_the_cards_script_counts_half_rates(tmp_path):
    layout = [(f"model.layers.1.mlp.experts.{expert}.down_proj.trellis", "I16", (1, 1, words))
              for expert, words in enumerate((40, 40, 48))]
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    data = pack_header(layout, {}) + bytes(2 * sum(shape[-1] for _, _, shape in layout))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(data)
    command = [sys.executable, "-I", str(Path(card.__file__).with_name("read_shapes.py")), str(tmp_path)]
    read = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert read == {"mean": "8/3", "experts": {"2.5": 2, "3": 1}, "bytes": 256}


def test_engines_as_check_sees_them(finished, tmp_path):
    import shutil

    out = shutil.copytree(finished.out, tmp_path / "out")
    text = write_card(out).read_text()
    labels = {Engine.TENSORFOLD: "TensorFold (`glm_moe_dsa`)", Engine.EXLLAMAV3: "exllamav3",
              Engine.VLLM_EXL3: "vllm-exl3"}
    for engine, label in labels.items():
        assert (cells(text, label)[1] == "yes") == check(out, engine=engine).ok, engine


def test_check_accepts_a_replaced_card(finished, tmp_path):
    """A source with a card of its own: ours replaces it, `check` knows, and a silent change is still found."""
    import shutil

    source = shutil.copytree(finished.source, tmp_path / "source")
    out = shutil.copytree(finished.out, tmp_path / "out")
    for folder in (source, out):
        (folder / CARD).write_text(SOURCE_TEXT)
    assert check(out, reference=source).ok
    write_card(out)
    assert check(out, reference=source).ok
    (out / "LICENSE").write_text("changed\n")
    assert [finding.rule for finding in check(out, reference=source).findings] == ["side-bytes"]


def test_no_paths_times_or_hosts(finished, tmp_path):
    """Failure case 97."""
    import platform
    import shutil

    out = shutil.copytree(finished.out, tmp_path / "out")
    write_report(out, finished.work)
    text = write_card(out).read_text()
    assert not re.search(r"/(root|home|tmp|Users|work)/|\d\d:\d\d:\d\d|\b20\d\d-\d\d-\d\d\b", text)
    assert platform.node() not in text


def test_a_config_that_is_none_is_refused(out):
    """Whole JSON that is no object was a traceback."""
    (out / "config.json").write_text("[]")
    with pytest.raises(ContractError, match="config.json: it is no object; give a work directory or a finished"):
        write_card(out)
