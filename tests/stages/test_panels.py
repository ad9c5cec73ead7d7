"""Panels of any text: windows, pages, paired differences, and the commands that use them."""

import io
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from small import small_recipe
from tokenizers import Tokenizer
from typer.testing import CliRunner

from keys35.calibration.windows import read_tokenizer
from keys35.cli import app
from keys35.demo import MODEL
from keys35.errors import PlanError, RankError, ResumeError, SourceError, UsageError
from keys35.files.ledger import held
from keys35.glm.config import refuse_other_architectures
from keys35.progress import Progress
from keys35.report.panel import show_reply
from keys35.runtime.group import RankGroup
from keys35.runtime.launch import PanelResult
from keys35.stages.panels import paired, score, text_panel
from keys35.stages.validate import validate

TOKENIZER, TEXT = MODEL / "tokenizer.json", MODEL.parent / "text"


def test_a_text_becomes_contiguous_windows(tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("One two three four five six seven eight nine ten. " * 20)
    panel = text_panel([text], TOKENIZER, 3, 20)
    whole = text_panel([text], TOKENIZER, 1, 60)
    assert sum((window.tolist() for window in panel.tokens), []) == whole.tokens[0].tolist()
    assert panel.domains == ("words",) * 3
    other = tmp_path / "more" / "words.txt"
    other.parent.mkdir()
    other.write_text(text.read_text())
    assert text_panel([text, other], TOKENIZER, 1, 20).domains == (str(text), str(other)), "two texts, two domains"
    with pytest.raises(PlanError, match="words.txt: given twice"):
        text_panel([text, other, text], TOKENIZER, 1, 20)
    with pytest.raises(PlanError, match=r"words.txt has \d+ tokens; 50 windows of 100 need 5,000"):
        text_panel([text], TOKENIZER, 50, 100)
    with pytest.raises(PlanError, match="200 windows of 9999 .*: ask for shorter ones, or give more text"):
        text_panel([text], TOKENIZER, 200, 9999)
    text.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(PlanError, match="words.txt: is not UTF-8"):
        text_panel([text], TOKENIZER, 1, 3)


def test_of_a_long_text_only_the_beginning_is_encoded(tmp_path, monkeypatch):
    """36 MB took 6 GB, and a corpus all there is."""
    text, encoder, seen = tmp_path / "long.txt", read_tokenizer(TOKENIZER), []
    text.write_text((TEXT / "eval-prose.txt").read_text() * 3)

    class Watched:
        def encode(self, part, **options):
            seen.append(len(part))
            return encoder.encode(part, **options)

    whole = encoder.encode(text.read_text(), add_special_tokens=False).ids
    monkeypatch.setattr("keys35.stages.panels.read_tokenizer", lambda path: Watched())
    for length in (200, 30_000):  # one that is less than the spare tokens, too
        panel = text_panel([text], TOKENIZER, 2, length)
        assert torch.cat(panel.tokens).tolist() == whole[: 2 * length]
    assert max(seen) < text.stat().st_size / 2
    with pytest.raises(PlanError, match=f"long.txt has {len(whole):,} tokens"):
        text_panel([text], TOKENIZER, 2, 10_000_000)


def test_paired_differences_are_of_windows():
    def result(kls):
        windows = [{"kl": kl, "ppl": 2.0, "domain": "a"} for kl in kls]
        return PanelResult({"per_window": windows}, (), 0.0)

    found = paired([result([1.0, 2.0, 3.0]), result([1.5, 2.4, 3.6])], "kl")
    assert found["mean"] == pytest.approx(0.5)
    assert found["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert found["z"] == pytest.approx(5 * 3**0.5)
    alike = paired([result([0.8, 0.83]), result([0.12, 0.15])], "kl")
    assert alike["mean"] == pytest.approx(-0.68) and (alike["standard_error"], alike["z"]) == (0, None), "by rounding"
    assert paired([result([1.0]), result([1.0])], "nll") == {"mean": 0.0, "standard_error": None, "z": None}


def test_what_texts_differ_by_is_no_chance():
    """Drawn again and again, as many windows of each text as before: the mean spreads as the standard error says."""
    generator = torch.Generator().manual_seed(5)
    domains = ["prose"] * 6 + ["code"] * 3
    centre = torch.tensor([0.1 if domain == "prose" else -0.5 for domain in domains], dtype=torch.double)
    drawn = centre + 0.03 * torch.randn(4000, len(domains), generator=generator, dtype=torch.double)

    def result(kls):
        windows = [{"kl": kl, "domain": domain} for kl, domain in zip(kls, domains, strict=True)]
        return PanelResult({"per_window": windows}, (), 0.0)

    found = [paired([result([1.0] * 9), result((1 + apart).tolist())], "kl") for apart in drawn[:400]]
    squares = [pair["standard_error"] ** 2 for pair in found]
    assert sum(squares) / len(squares) == pytest.approx(float(drawn.mean(1).var()), rel=0.1)
    alone = [result(kls) for kls in ([1.0] * 9, (1 + drawn[0]).tolist())]
    for one in alone:
        one.metrics["per_window"] = [one.metrics["per_window"][index] for index in (0, 1, 8)]
    few = drawn[0][[0, 1, 8]]
    assert paired(alone, "kl")["standard_error"] == pytest.approx(float(few.std() / 3**0.5)), "one window tells nothing"


def test_a_checkpoint_that_cannot_be_scored_is_refused_before_the_source_is_streamed(tmp_path, monkeypatch):
    text = tmp_path / "words.txt"
    text.write_text("One two three four five six seven eight nine ten. " * 20)
    panel = text_panel([text], TOKENIZER, 1, 20)

    def too_late(*_, **__):
        raise AssertionError("the source is streamed")

    monkeypatch.setattr("keys35.stages.panels.make_reference", too_late)
    cut, other = (Path(shutil.copytree(MODEL, tmp_path / name)) for name in ("cut", "other"))
    shard = cut / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    for second, tp, error, words in ((tmp_path / "no-such", 1, SourceError, "no-such"), (cut, 1, SourceError, "00002"),
                                     (MODEL, 3, PlanError, "tp = 3"), (other, 1, PlanError, "vocabulary of 4096")):
        with pytest.raises(error, match=words):
            score([MODEL, second], MODEL, panel, tp, tmp_path / "scratch", Progress())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 19}))
    with pytest.raises(PlanError, match="windows of 20 tokens: .*other was made for texts of at most 19"):
        score([MODEL], other, panel, 1, tmp_path / "scratch", Progress())


def test_two_at_once_do_not_share_a_scratch_folder(tmp_path):
    """Ranks of one found the other's jobs, and its figures came out under this one's name."""
    text, scratch = tmp_path / "words.txt", tmp_path / "scratch"
    text.write_text("One two three four five six seven eight nine ten. " * 20)
    panel = text_panel([text], TOKENIZER, 1, 20)
    with held(scratch):
        with pytest.raises(ResumeError, match=f"scratch: is in use by process {os.getpid()}"):
            score([MODEL], MODEL, panel, 1, scratch, Progress())
        with pytest.raises(ResumeError, match="scratch: is in use"):
            validate(tmp_path, MODEL, small_recipe(), 1, scratch, Progress())
    assert [path.name for path in scratch.iterdir()] == ["lock"]


def test_a_checkpoint_is_no_reference(tiny, tmp_path):
    """Scored against itself it has lost nothing, and KEYS35_QUALITY.json would say so."""
    text, out = tmp_path / "words.txt", shutil.copytree(tiny.out, tmp_path / "out")
    text.write_text("One two three four five six seven eight nine ten. " * 20)
    for words in (["--tp", "1"], ["--panel", str(text), "--rows", "1", "--len", "20", "--tp", "1"]):
        with pytest.raises(SourceError, match="is itself an EXL3 checkpoint"):
            CliRunner().invoke(app, ["validate", str(out), "--reference", str(out), *words], catch_exceptions=False)
    assert not (out / "KEYS35_QUALITY.json").exists()
    with pytest.raises(SourceError, match="is itself an EXL3 checkpoint"):
        refuse_other_architectures(out)


def command(*words: str) -> dict:
    result = CliRunner().invoke(app, ["--json", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_validate_and_compare_on_a_text(finished, tmp_path):
    text = tmp_path / "prose.txt"
    text.write_text("It was the best of times, it was the worst of times; we had everything before us. " * 12)
    scratch = tmp_path / "scratch"
    panel = ["--reference", str(finished.source), "--panel", str(text), "--rows", "3", "--len", "24", "--tp", "1",
             "--scratch", str(scratch)]  # fmt: skip
    quality = command("validate", str(finished.out), *panel)
    assert quality["panel"]["windows"] == 3 and quality["metrics"]["kl"] > 0
    page = (scratch / "panel.html").read_text()
    assert "By window" in page and "prose" in page and page.count("<tr") > 8
    numbers = re.findall(r"%\">([^<]*)</span>", page.partition('<div class="xaxis">')[2].partition("</div>")[0])
    assert numbers == ["0", "1", "2"], "no window before the first, none behind the last"
    found = command("compare", str(finished.out), str(finished.source), *panel)
    assert found["metrics"][0]["kl"] == pytest.approx(quality["metrics"]["kl"]) and found["metrics"][1]["kl"] < 1e-9
    assert found["differences"]["kl"]["mean"] == pytest.approx(-quality["metrics"]["kl"], rel=1e-6)


def test_a_page_names_texts_and_folders_as_they_are(finished, tmp_path, monkeypatch):
    """A whole panel was scored, and then the page ended in a UnicodeEncodeError; a `.` gave it no title."""
    text = tmp_path / os.fsdecode(b"caf\xe9 <b>.txt")
    text.write_text("It was the best of times, it was the worst of times; we had everything before us. " * 3)
    monkeypatch.chdir(finished.out)
    command("validate", ".", "--reference", str(finished.source), "--panel", str(text), "--rows", "1", "--len", "24",
            "--tp", "1", "--scratch", str(tmp_path / "scratch"))  # fmt: skip
    page = (tmp_path / "scratch" / "panel.html").read_text()
    assert f"<title>{finished.out.name}</title>" in page and r"caf\udce9 &lt;b&gt;" in page


def test_generate_and_bench_say_what_they_did(tmp_path):
    serial = command("generate", str(MODEL), "The old house stood", "--tokens", "6")
    drafted = command("generate", str(MODEL), "The old house stood", "--tokens", "6", "--draft")
    assert serial["text"] == drafted["text"] and drafted["drafts"] > 0
    [rank] = command("bench", str(MODEL), "--prompt", "20", "--tokens", "4")["ranks"]
    assert rank["prefill_tokens_s"] > 0 and rank["decode_tokens_s"] > 0


def test_a_reply_is_printed_as_it_is():
    console, found = Console(file=io.StringIO()), {"drafts": 0, "ranks": []}
    show_reply(console, found | {"prompt": "[/dim] C:\\\\", "text": "[red]:smile: \\"})
    assert console.file.getvalue().startswith("[/dim] C:\\\\[red]:smile: \\\n")


def test_a_log_that_an_error_names_is_still_there(tmp_path, monkeypatch):
    """generate and bench told people to see a file that they had removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def killed(self, limit_s=None):
        self._process.send_signal(signal.SIGKILL)
        raise_failure(self, limit_s)

    raise_failure = RankGroup.wait
    monkeypatch.setattr(RankGroup, "wait", killed)
    with pytest.raises(RankError, match="killed by signal 9; see .*ranks.log") as found:
        command("bench", str(MODEL), "--prompt", "3", "--tokens", "2", "--tp", "2")
    assert Path(str(found.value).partition("see ")[2]).is_file()
    with pytest.raises(PlanError, match="tp = 3"):
        command("bench", str(MODEL), "--prompt", "3", "--tokens", "2", "--tp", "3")
    assert len(list(tmp_path.iterdir())) == 1, "nothing else stays"


def test_a_bench_goes_on_where_a_reply_ends(tmp_path):
    """Rates were blank where a model ended its text at once, as one may after a prompt of odd tokens."""
    ending = Path(shutil.copytree(MODEL, tmp_path / "ending"))
    config = json.loads((ending / "config.json").read_text())
    (ending / "config.json").write_text(json.dumps(config | {"eos_token_id": list(range(2048))}))
    assert command("generate", str(ending), "The old house stood", "--tokens", "4")["tokens"] == 0
    found = command("bench", str(ending), "--prompt", "20", "--tokens", "4")
    assert found["new_tokens"] == 4 and found["ranks"][0]["decode_tokens_s"] > 0


def test_a_config_of_another_model_is_refused(tmp_path):
    """A product of matrices that do not fit was a traceback; a config.json that is no object, too."""
    other = Path(shutil.copytree(MODEL, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"q_lora_rank": 256}))
    with pytest.raises(SourceError, match=r"q_a_proj.weight has shape \[128, 128\], .*asks for \(\[256, 128\]\)"):
        command("bench", str(other), "--prompt", "3", "--tokens", "2")
    (other / "config.json").write_text("[]")
    for words in (["generate", str(other), "a"], ["bench", str(other)]):
        with pytest.raises(SourceError, match="config.json: it is no object; give a checkpoint's folder"):
            command(*words)


def test_prompts_that_no_model_can_read_are_refused(tmp_path):
    for prompt, words in (("", "the prompt is empty"), ("caf\udce9", "the prompt is not UTF-8")):
        with pytest.raises(UsageError, match=words):
            command("generate", str(MODEL), prompt)
    short = Path(shutil.copytree(MODEL, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    assert command("generate", str(short), "The old house stood")["tokens"] <= 12
    with pytest.raises(UsageError, match="the prompt has [0-9]+ tokens, .*short was made for texts of at most 12"):
        command("generate", str(short), "The old house stood " * 3)
    for prompt, tokens, words in (("12", "2", "the prompt has 12 tokens, .*at most 12"),
                                  ("9", "4", "9 tokens leaves room for 3 more, 4 were asked .*at most 12")):
        with pytest.raises(UsageError, match=words):
            command("bench", str(short), "--prompt", prompt, "--tokens", tokens)
    assert command("bench", str(short), "--prompt", "9", "--tokens", "3")["new_tokens"] == 3
    with pytest.raises(SourceError, match="no-such/tokenizer.json is missing; give the folder of a checkpoint"):
        command("generate", str(tmp_path / "no-such"), "The old house")
    other = Path(shutil.copytree(MODEL, tmp_path / "other"))
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_tokens(["Zanzibar"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(RankError, match="the prompt has token 2048, the model's vocabulary ends at 2047"):
        command("generate", str(other), "Zanzibar")
