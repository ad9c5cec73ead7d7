"""Four ranks against one process, and what happens when a rank fails."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen, run

import pytest
import torch
from builders import TINY_CONFIG, random_source
from builders_exl3 import DEMO, demo_config, demo_windows, exl3_checkpoint, rounded_checkpoint

from keys35.errors import PlanError, RankError
from keys35.files.atomic import load_tensors
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.stream import Head, embed, trunk
from keys35.glm.weights import Keep, WeightStore
from keys35.runtime import score
from keys35.runtime.generate import Decoder, Drafter, Drafting, generate, generate_drafted
from keys35.runtime.launch import check_ranks, run_generate, run_panel
from keys35.runtime.panel import Panel
from keys35.runtime.rank import RankJob, _reply, checkpoint_of, save_jobs
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import make_reference
from keys35.runtime.score import score_panel


@pytest.fixture(scope="module")
def alone(packed, panel, reference, tmp_path_factory):
    out = tmp_path_factory.mktemp("tp1")
    return out, run_panel(
        packed.root, panel, reference.root, 1, out, mtp_hidden="pre_norm", device="cpu", save_logits=True
    )


@pytest.fixture(scope="module")
def four(packed, panel, reference, tmp_path_factory):
    out = tmp_path_factory.mktemp("tp4")
    return out, run_panel(
        packed.root, panel, reference.root, 4, out, mtp_hidden="pre_norm", device="cpu", save_logits=True
    )


def test_four_ranks_make_the_bits_of_one_process(alone, four, panel):
    for window, tokens in enumerate(panel.tokens):
        name = f"logits/window-{window:05d}.safetensors"
        one, many = (load_tensors(out / name)["logits"] for out, _ in (alone, four))
        assert one.shape == (len(tokens), 2048)
        assert torch.equal(one, many)
    assert 0 < alone[1].metrics["kl"] < 0.01 and alone[1].metrics["top1"] > 0.95
    assert four[1].metrics == alone[1].metrics
    assert all(report["backend"] == "gloo" and report["communication_s"] > 0 for report in four[1].ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_make_the_same_bits_in_bfloat16(packed, panel, tmp_path, ranks):
    few = dataclasses.replace(panel, tokens=panel.tokens[1:3], domains=panel.domains[1:3])
    make_reference(WeightStore(packed, demo_config()), few, tmp_path / "reference", repeat=False)
    logits = []
    for count in (1, ranks):
        out = tmp_path / str(count)
        options = {"device": "cpu", "dtype": "bfloat16", "save_logits": True}
        run_panel(packed.root, few, tmp_path / "reference", count, out, **options)
        logits.append([load_tensors(path)["logits"] for path in sorted((out / "logits").iterdir())])
    assert all(torch.equal(one, many) for one, many in zip(*logits, strict=True))


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """What fails says so within 30 seconds, the start of the ranks included."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    print(f"{took:.1f} s")
    assert took < 30


def assert_every_rank_says(out: Path, words: dict[int, str]) -> None:
    for rank, word in words.items():
        assert word in json.loads((out / f"rank-{rank}.error.json").read_text())["message"]


def test_braces_in_a_path_are_the_paths_own(tmp_path):
    folder = tmp_path / "{v2}" / "copy-0"
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(DEMO / "model" / "config.json")
    check_ranks(tmp_path / "{v2}" / "copy-{rank}", 2)
    assert checkpoint_of("/models/{v2}/copy-{rank}", 3) == Path("/models/{v2}/copy-3")


def test_a_truncated_shard_is_named_by_its_rank(packed, panel, reference, tmp_path):
    for rank in range(2):
        shutil.copytree(packed.root, tmp_path / f"copy-{rank}")
    shard = sorted((tmp_path / "copy-1").glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1000)
    with soon(), pytest.raises(RankError, match=f"rank 1 of 2: .*{shard.name}"):
        run_panel(str(tmp_path / "copy-{rank}"), panel, reference.root, 2, tmp_path / "out", device="cpu", limit_s=120)
    assert_every_rank_says(tmp_path / "out", {1: shard.name})


def test_no_draft_is_made_for_a_token_that_nobody_asked_for(packed):
    store = WeightStore(packed, demo_config())
    decoder, drafting = Decoder(store, Ranks()), Drafting()
    assert len(list(generate_drafted(decoder, Drafter(store, decoder), [5, 6, 7], 1, drafting))) == 1
    assert drafting.drafts == 0


def test_a_prompt_is_not_slow_because_another_rank_still_loads(packed):
    class Late(Ranks):
        late = True

        def all(self, x):
            if self.late:
                time.sleep(2)
                self.late = False
            return [x]

    store, rates = WeightStore(packed, demo_config()), {}
    job = RankJob(checkpoint=str(packed.root), out="", prompt=tuple(range(20)), new_tokens=1)
    assert _reply(job, Decoder(store, Late()), store, rates)["tokens"]
    assert rates["prefill_tokens_s"] > 20 / 2


@pytest.mark.parametrize("file", ["eval-prose.txt", "eval-code.txt"])
def test_drafted_tokens_are_the_serial_ones(packed, file):
    """24 tokens by default, from a prompt longer than index_topk; the slow test below does 200."""
    _drafted_equals_serial(packed, file, 24)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["eval-prose.txt", "eval-code.txt"])
def test_two_hundred_drafted_tokens_are_the_serial_ones(packed, file):
    _drafted_equals_serial(packed, file, 200)


def _drafted_equals_serial(packed, file, count):
    store = WeightStore(packed, demo_config())
    decoder, drafting = Decoder(store, Ranks()), Drafting()
    prompt = demo_windows(file, 2, 150)[1].tolist()
    drafted = list(generate_drafted(decoder, Drafter(store, decoder), prompt, count, drafting))
    assert drafted == list(generate(decoder, prompt, count)) and len(drafted) == count
    assert drafting.accepted > drafting.drafts / 2


def test_a_damaged_checkpoint_is_named_not_averaged(source_store, panel, reference, monkeypatch):
    store = WeightStore(source_store.source, source_store.config)
    damaged = WeightStore.tensor
    monkeypatch.setattr(
        WeightStore, "tensor", lambda self, name: damaged(self, name) * (torch.nan if "model.norm" in name else 1)
    )
    with pytest.raises(RankError, match="window 0 gives NaN"):
        score_panel(store, Ranks(), panel, reference)


class WatchedRanks(Ranks):
    """Knows how many of the logits that it has given out are still there."""

    def __init__(self):
        self.given, self.most = [], 0

    def logits(self, share):
        self.most = max(self.most, sum(one() is not None for one in self.given))
        whole = super().logits(share)
        self.given.append(weakref.ref(whole))
        return whole


def test_logits_that_nobody_asked_for_are_not_kept(source_store, panel, reference, monkeypatch):
    """Those of a window of 2,048 tokens take 1.3 GB with GLM-5.3's vocabulary, and were joined, which took it twice."""
    monkeypatch.setattr(score, "LOGIT_ROWS", 32)
    ranks = WatchedRanks()
    score_panel(source_store, ranks, panel, reference)
    assert len(ranks.given) > 2 * 256 / 32 and ranks.most <= 4  # both models', of this chunk and the one before


def test_each_rank_reads_about_a_quarter_and_stays_small(alone, four, packed):
    whole = alone[1].ranks[0]["bytes_by_class"]
    read = alone[1].ranks[0]["bytes_read"]  # an expert no token chose is never read
    assert 0.9 * packed.total_size < read < packed.total_size + 4096
    for report in four[1].ranks:
        by_class = report["bytes_by_class"]
        assert by_class["sharded"] * 4 == whole["sharded"]
        assert by_class["replicated"] == whole["replicated"]
        assert report["bytes_read"] == by_class["sharded"] + by_class["replicated"]
        assert report["peak_rss_bytes"] < 400 << 20
    assert sum(report["peak_rss_bytes"] for report in four[1].ranks) < 1.6 * 2**30


def test_ranks_load_neither_encoder_nor_transformers():
    code = "import sys, keys35.runtime.rank; print([m for m in sys.modules])"
    modules = run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for unwanted in ("'numba'", "'transformers'", "keys35.exl3.encode", "keys35.exl3.viterbi"):
        assert unwanted not in modules


def test_the_source_scores_zero_against_itself(panel, reference, tmp_path):
    result = run_panel(DEMO / "model", panel, reference.root, 1, tmp_path, mtp_hidden="pre_norm", device="cpu")
    assert result.metrics["kl"] < 1e-9 and result.metrics["top1"] == 1
    mtp = result.metrics["mtp"]
    assert mtp["top1"] == mtp["top1_reference"] and mtp["acceptance"] == mtp["acceptance_reference"]
    assert result.metrics["domains"]["code"]["ppl"] < result.metrics["domains"]["prose"]["ppl"]
    assert not (tmp_path / "logits").exists()


def test_generation_on_four_ranks_equals_one_process(packed, panel, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    prompt = panel.tokens[0][:140].tolist()  # longer than index_topk
    one = run_generate(packed.root, prompt, 12, 1, tmp_path / "one", device="cpu")
    many = run_generate(packed.root, prompt, 12, 4, tmp_path / "four", device="cpu")
    assert one.tokens == many.tokens and len(one.tokens) > 0
    assert max(r["bytes_read"] for r in many.ranks) < 0.5 * one.ranks[0]["bytes_read"]
    assert not list((tmp_path / "temporary").glob("torchelastic*")), "torchrun left a folder at every start"


def test_generated_tokens_are_the_greedy_ones_of_a_full_pass(source_store, panel):
    prompt = panel.tokens[2][:130].tolist()
    tokens = list(generate(Decoder(source_store, Ranks()), prompt, 10))
    whole = torch.tensor(prompt + tokens)
    logits = Head.of_trunk(source_store)(trunk(source_store, embed(source_store, [whole]))[0])
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_packed_weights_generate_the_same_tokens(source_store, packed, panel):
    store = WeightStore(packed, source_store.config)
    prompt = panel.tokens[2][:20].tolist()
    decoders = [Decoder(store, Ranks(), keep) for keep in (Keep.ALL, Keep.PACKED)]
    decoded, as_stored = (list(generate(decoder, prompt, 3)) for decoder in decoders)
    assert decoded == as_stored


def test_generation_ends_at_an_end_of_sequence_token(source_store, panel):
    decoder = Decoder(source_store, Ranks())
    prompt = panel.tokens[2][:20].tolist()
    first = next(generate(decoder, prompt, 1))
    decoder.config = dataclasses.replace(decoder.config, eos_token_ids=(first,))
    assert list(generate(decoder, prompt, 5)) == []


def test_a_rank_with_another_checkpoint_is_refused(packed, panel, reference, tmp_path):
    for rank in range(2):
        shutil.copytree(packed.root, tmp_path / f"copy-{rank}")
    shard = sorted((tmp_path / "copy-1").glob("*.safetensors"))[0]
    with open(shard, "r+b") as file:  # one bit of one trellis, same shapes
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with soon(), pytest.raises(RankError, match=r"ranks \[1\] opened another checkpoint"):
        run_panel(str(tmp_path / "copy-{rank}"), panel, reference.root, 2, tmp_path / "out", device="cpu", limit_s=120)
    assert_every_rank_says(tmp_path / "out", {0: "another checkpoint", 1: "another checkpoint"})


@pytest.mark.parametrize(("whom", "sign", "words"), [
    ("rank", signal.SIGKILL, r"rank 1 of 2 was killed by signal 9 \(out of memory\?\)"),
    ("rank", signal.SIGTERM, "rank 1 of 2 was killed by signal 15;"),
    ("torchrun", signal.SIGKILL, "torchrun, which starts the ranks, was killed by signal 9"),
])  # fmt: skip
def test_a_killed_rank_is_named_and_nobody_hangs(packed, panel, reference, tmp_path, whom, sign, words):
    def kill() -> None:
        path = tmp_path / "rank-1.pid.json"
        while not path.exists():
            time.sleep(0.02)
        pid = json.loads(path.read_text())["pid"]
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid if whom == "rank" else parent, sign)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with soon(), pytest.raises(RankError, match=words):
        run_panel(packed.root, panel, reference.root, 2, tmp_path, device="cpu", limit_s=120)


def test_a_rank_whose_torchrun_is_gone_does_not_wait_for_its_peers(tmp_path):
    """torchrun that ended while its rank still imported torch left it in a rendezvous for minutes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
             "LOCAL_WORLD_SIZE": "2"}
    rank = [sys.executable, "-m", "keys35.runtime", str(tmp_path), str(os.getpid()), "cpu", "60"]
    start = f"import subprocess; print(subprocess.Popen({rank!r}, stdout=subprocess.DEVNULL).pid)"
    pid = int(run([sys.executable, "-c", start], env=os.environ | place, capture_output=True, check=True).stdout)
    with soon():
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
    assert not (tmp_path / "rank-1.pid.json").exists(), "it got as far as its peers"


def test_a_folder_without_a_launcher_holds_nothing_of_an_earlier_start(packed, tmp_path):
    """As on four Sparks: a failed rerun left the first one's result, and a good one the error of the failed one."""
    def start(checkpoint: Path) -> int:
        save_jobs(tmp_path / "jobs.json", [RankJob(str(checkpoint), str(tmp_path), prompt=(5,), new_tokens=1)])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, "-m", "keys35.runtime", str(tmp_path), "1", "cpu", "60"]
        return run(command, env=os.environ | place | numbers, capture_output=True).returncode

    def left() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} - {"jobs.json", "rank-0.pid.json"}

    assert start(packed.root) == 0 and left() == {"result.json", "rank-0.json"}
    assert start(tmp_path / "nowhere") == 1 and left() == {"rank-0.error.json"}
    assert start(packed.root) == 0 and left() == {"result.json", "rank-0.json"}


def test_a_port_in_use_is_refused(packed, panel, reference, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with soon(), pytest.raises(RankError, match=f"port {port} cannot be used"):
            run_panel(packed.root, panel, reference.root, 2, tmp_path, device="cpu", port=port)


def test_running_out_of_time_is_an_error_not_a_hang(packed, panel, reference, tmp_path):
    with pytest.raises(RankError, match="did not finish within 0.5 s"):
        run_panel(packed.root, panel, reference.root, 2, tmp_path, device="cpu", limit_s=0.5)


def test_a_number_of_ranks_that_does_not_cut_is_refused_before_loading(packed, panel, reference, tmp_path):
    with pytest.raises(PlanError, match="tp = 8"):
        run_panel(packed.root, panel, reference.root, 8, tmp_path, device="cpu")
    assert not (tmp_path / "ranks.log").exists()


def test_a_gpu_per_rank_is_required_when_gpus_are_asked_for(packed, panel, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RankError, match="need a GPU each"):
        run_panel(packed.root, panel, reference.root, 1, tmp_path, device="cuda")


WAITING = """
import pathlib, sys, time
from keys35.runtime.group import RankGroup
group = RankGroup(pathlib.Path(sys.argv[1]), 2, device='cpu')
time.sleep(600)
"""
WORKING = """
import pathlib, sys
from keys35.runtime.launch import run_generate
run_generate(sys.argv[2], [1, 2, 3], 100000, 2, pathlib.Path(sys.argv[1]), device='cpu')
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [WAITING, WORKING])
def test_ranks_end_with_the_process_that_started_them(packed, tmp_path, code):
    starter = Popen([sys.executable, "-c", code, str(tmp_path), str(packed.root)])
    try:
        files = [tmp_path / f"rank-{rank}.pid.json" for rank in range(2)]
        limit = time.monotonic() + 120
        while not all(file.exists() for file in files) and time.monotonic() < limit:
            time.sleep(0.1)
        pids = [json.loads(file.read_text())["pid"] for file in files]
        time.sleep(5 if code == WORKING else 0)
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        starter.kill()
        starter.wait()
    limit = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_one_rank_scores_a_model_that_no_two_could_cut(tmp_path: Path) -> None:
    """Its linears are stored with padding, which one rank need not cut through."""
    odd = {"q_lora_rank": 100, "kv_lora_rank": 72, "num_attention_heads": 3, "v_head_dim": 40, "intermediate_size": 200,
           "qk_nope_head_dim": 30, "qk_rope_head_dim": 16, "index_head_dim": 40, "index_n_heads": 3}
    source = ShardedSource.open(random_source(tmp_path / "source", TINY_CONFIG | odd))
    config, panel = GlmConfig.from_dict(source.config), Panel.of("numbers", [torch.arange(40)], ["numbers"])
    make_reference(WeightStore(source, config), panel, tmp_path / "reference", repeat=False)
    kl = []
    for number, make in enumerate((rounded_checkpoint, exl3_checkpoint)):
        made, out = make(tmp_path / f"{number}", source, config), tmp_path / f"run-{number}"
        kl.append(run_panel(made.root, panel, tmp_path / "reference", 1, out, device="cpu").metrics["kl"])
    assert 0 < kl[0] < kl[1] / 100, "rounded to eight bits, and noise"
