"""What the terminal shows, where it is as narrow as terminals begin."""

import os

import pytest
from made_up import metrics
from rich.console import Console

from keys35.report.panel import show_comparison, show_rates
from keys35.report.terminal import WITHOUT_PREFIX, own_figures, quality_rows, show_quality


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=80, file=open(os.devnull, "w"), emoji=False)


def test_the_quality_table_is_whole_in_80_columns(console):
    """It named two rows "unifo...", and left digits out."""
    names = ("allocation", "random-0", "random-1", "equal-per-layer", "error-only", "uniform-2", "uniform-3")
    scored = {name: metrics(0.06 + 0.001 * place) for place, name in enumerate(names)}
    show_quality(console, quality_rows(scored))
    text = console.export_text()
    assert "…" not in text and {"uniform-2", "uniform-3", "0.0650", "0.0660"} <= set(text.split())
    assert f"ppl {metrics(0.06)['ppl_reference']:.3f}" in text.splitlines()[0]


@pytest.mark.parametrize("prefix", ["source", "quantized"])
def test_a_checkpoint_behind_a_prefix_has_a_row_of_its_own(prefix):
    """Its baselines are without one, and so is what its widths are worth beside them."""
    names = ("allocation", "random-0", "random-1", "uniform-2")
    result = {"report": {"recipe": {"encoder": {"prefix": prefix}}}, "validation": {"metrics": metrics(0.05)},
              "baselines": {name: metrics(0.06 + 0.001 * place) for place, name in enumerate(names)}}
    rows = [row[:2] for row in quality_rows(result["baselines"], own_figures(result))]
    behind = [["allocation", "0.0500"], [WITHOUT_PREFIX, "0.0600"]]
    assert rows[:-2] == (behind if prefix == "quantized" else [["allocation", "0.0600"]])
    assert rows[-2:] == [["random mix, mean of 2", "0.0615 (0.0610 to 0.0620)"], ["uniform-2", "0.0630"]]


@pytest.mark.parametrize("prefix", ["source", "quantized"])
def test_a_predicted_measurement_may_have_no_baselines(console, prefix):
    """GLM-5.3's own recipe ended in a KeyError, after all the hours."""
    result = {"report": {"recipe": {"encoder": {"prefix": prefix}}}, "validation": {"metrics": metrics(0.05)},
              "baselines": {}}
    rows = quality_rows(result["baselines"], own_figures(result))
    show_quality(console, rows)
    assert [row[:2] for row in rows] == ([["allocation", "0.0500"]] if prefix == "quantized" else [])
    assert ("0.0500" in console.export_text()) is (prefix == "quantized")


def test_a_comparison_tells_long_paths_apart(console):
    one = {"mean": 0.1, "standard_error": 0.01, "z": 10.0}
    found = {
        "panel": {"windows": 2, "tokens": 9}, "checkpoints": ["/models/some/where/" * 3 + end for end in "12"],
        "bytes": [1, 2], "metrics": [{"kl": 0.1}] * 2, "differences": {"kl": one}, "domains": {},
        "noise_floor": {"kl": 0.0},
    }  # fmt: skip
    show_comparison(console, found)
    text = "".join(console.export_text().split()).replace("│", "")
    assert "where/1" in text and "where/2" in text and "…" not in text


def test_a_narrow_terminal_cuts_no_digits():
    console = Console(record=True, width=40, file=open(os.devnull, "w"), emoji=False)
    rank = {"rank": 0, "device": "cpu", "prefill_tokens_s": 31234.5, "decode_tokens_s": 281.9, "communication_s": 0.25,
            "peak_rss_bytes": 300 << 20}  # fmt: skip
    show_rates(console, {"ranks": [rank] * 2})
    assert "…" not in console.export_text()
