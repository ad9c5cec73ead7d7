"""Opening a checkpoint: every disagreement of failure cases A1 and A10 is refused before work starts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import SIDE_FILES, read_index, some_tensors, write_checkpoint, write_index, write_raw_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from keys35.errors import SourceError
from keys35.files import source as source_module
from keys35.files.source import ShardedSource

DEMO = Path(__file__).parents[2] / "keys35/demo/model"
SHARD = "model-0000{}-of-00003.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", some_tensors())


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_reads_what_was_written(root: Path) -> None:
    source = ShardedSource.open(root)
    tensors = some_tensors()
    assert set(source.tensors) == set(tensors)
    assert source.total_size == sum(t.nbytes for t in tensors.values())
    assert len(source.shards) == 3 and source.config["model_type"] == "glm_moe_dsa"
    assert source.bytes_read == 0
    for name, tensor in tensors.items():
        read = source.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
        assert source.raw(name) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert source.bytes_read == 2 * source.total_size


def test_read_owns_its_memory(root: Path) -> None:
    source = ShardedSource.open(root)
    source.read("layers.0.weight").zero_()
    assert torch.equal(source.read("layers.0.weight"), some_tensors()["layers.0.weight"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["layers.1.weight", "layers.1.trellis", "layers.1.bias"]), data=st.data())
def test_slices_equal_torch_slices_and_read_no_more(root: Path, name: str, data: st.DataObject) -> None:
    source, whole = ShardedSource.open(root), some_tensors()[name]
    axis = data.draw(st.integers(0, whole.ndim - 1))
    start = data.draw(st.integers(0, whole.shape[axis]))
    stop = data.draw(st.integers(start, whole.shape[axis]))
    expected = whole.narrow(axis, start, stop - start)
    assert torch.equal(source.read_slice(name, axis, start, stop), expected)
    assert source.bytes_read == expected.numel() * whole.element_size()


@pytest.mark.parametrize("axis, start, stop", [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 3, 2), (1, 0, 11)])
def test_impossible_slice_is_refused(root: Path, axis: int, start: int, stop: int) -> None:
    with pytest.raises(SourceError, match="no slice"):
        ShardedSource.open(root).read_slice("layers.0.weight", axis, start, stop)


def test_unknown_tensor_is_named(root: Path) -> None:
    with pytest.raises(SourceError, match="no tensor absent.weight"):
        ShardedSource.open(root).read("absent.weight")


def test_single_file_without_index(root: Path, tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    save_file(some_tensors(), single / "model.safetensors")
    (single / "config.json").write_text("{}")
    assert set(ShardedSource.open(single).tensors) == set(some_tensors())


def test_missing_shard_is_listed_before_any_shard_is_opened(root: Path) -> None:  # case 7, 15
    (root / SHARD.format(2)).unlink()
    (root / SHARD.format(1)).write_bytes(b"never looked at")
    with pytest.raises(SourceError, match=r"1 files of the index are not there: model-00002-of-00003"):
        ShardedSource.open(root)


def test_tensor_of_the_index_absent_from_its_shard(root: Path) -> None:  # case 8
    name = next(iter(load_file(root / SHARD.format(2))))
    rewrite(root / SHARD.format(2), lambda tensors: tensors.pop(name))
    with pytest.raises(SourceError, match=f"{name} in model-00002-of-00003"):
        ShardedSource.open(root)


def test_tensor_in_a_shard_but_not_in_the_index(root: Path) -> None:  # case 10
    rewrite(root / SHARD.format(3), lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)}))
    with pytest.raises(SourceError, match="not in the index: mtp.fc.weight in model-00003-of-00003"):
        ShardedSource.open(root)


def test_tensor_in_two_shards(root: Path) -> None:
    name = next(iter(load_file(root / SHARD.format(1))))
    rewrite(root / SHARD.format(3), lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(SourceError, match=f"not in the index: {name} in model-00003-of-00003"):
        ShardedSource.open(root)


def test_shard_that_the_index_does_not_name(root: Path) -> None:  # case 10, 11
    save_file({"mtp.weight": torch.ones(2)}, root / "mtp.safetensors")
    with pytest.raises(SourceError, match="1 files are not in the index: mtp.safetensors"):
        ShardedSource.open(root)


def test_stale_totals_in_shard_names(root: Path) -> None:  # case 11
    index = read_index(root)
    for path in sorted(root.glob("*.safetensors")):
        path.rename(root / path.name.replace("of-00003", "of-00030"))
    moved = {name: file.replace("of-00003", "of-00030") for name, file in index["weight_map"].items()}
    write_index(root, moved, index["metadata"]["total_size"])
    with pytest.raises(SourceError, match="00001-of-00030.safetensors does not belong to a set of 3"):
        ShardedSource.open(root)


def test_a_file_beside_the_numbered_shards(tmp_path):
    """As some checkpoints keep their MTP layer: the shards' total counts the others."""
    root = write_checkpoint(tmp_path, some_tensors())
    save_file({"mtp.weight": torch.ones(4)}, root / "mtp.safetensors")
    index = read_index(root)
    files = index["weight_map"] | {"mtp.weight": "mtp.safetensors"}
    write_index(root, files, index["metadata"]["total_size"] + 16)
    assert torch.equal(ShardedSource.open(root).read("mtp.weight"), torch.ones(4))
    (root / "mtp.safetensors").rename(root / "mtp-00001-of-00002.safetensors")
    write_index(root, files | {"mtp.weight": "mtp-00001-of-00002.safetensors"}, index["metadata"]["total_size"] + 16)
    with pytest.raises(SourceError, match="mtp-00001-of-00002.safetensors does not belong to a set of 1 "):
        ShardedSource.open(root)


def test_wrong_total_size(root: Path) -> None:
    index = read_index(root)
    write_index(root, index["weight_map"], 1)
    with pytest.raises(SourceError, match="index says 1 bytes"):
        ShardedSource.open(root)


def test_truncated_shard(root: Path) -> None:  # case 13
    path = root / SHARD.format(2)
    os.truncate(path, path.stat().st_size - 16)
    with pytest.raises(SourceError, match=r"model-00002-of-00003.safetensors: is truncated: needs \d+ bytes"):
        ShardedSource.open(root)


def test_lfs_pointer(root: Path) -> None:  # case 14
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 5330\n"
    (root / SHARD.format(1)).write_bytes(text)
    with pytest.raises(SourceError, match="Git LFS pointer"):
        ShardedSource.open(root)


def test_fifo_as_shard(root: Path) -> None:  # case 99
    (root / SHARD.format(1)).unlink()
    os.mkfifo(root / SHARD.format(1))
    with pytest.raises(SourceError, match="not a regular file"):
        ShardedSource.open(root)


@pytest.mark.parametrize("file", [
    "../../x.safetensors", "/abs/x.safetensors", "a/../../x.safetensors", r"C:\x.safetensors", "",
    "x\0.safetensors", "..safetensors", "sub/x.safetensors", r"..\x.safetensors", "model.bin",
    ".hidden.safetensors", 7, None, ["model.safetensors"], "x.safetensors\n",
])  # fmt: skip
def test_index_cannot_name_a_path(root: Path, file: object) -> None:  # case 98
    outside = some_tensors(1)
    save_file(outside, root.parent / "x.safetensors")
    write_index(root, {**read_index(root)["weight_map"], "layers.0.bias": file}, 1)
    with pytest.raises(SourceError, match="not a plain .safetensors file name"):
        ShardedSource.open(root)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{} x", '{"a": 1}']
)
def test_damaged_index(root: Path, text: str) -> None:
    (root / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SourceError, match="index.json"):
        ShardedSource.open(root)


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_damaged_config(root: Path, text: str | None) -> None:
    (root / "config.json").unlink()
    if text is not None:
        (root / "config.json").write_text(text)
    with pytest.raises(SourceError, match="config.json"):
        ShardedSource.open(root)


def test_pickled_weights_and_empty_folders_are_refused(tmp_path: Path) -> None:  # case 102
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="neither"):
        ShardedSource.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(SourceError, match="pickled"):
        ShardedSource.open(tmp_path)
    with pytest.raises(SourceError, match="not a folder"):
        ShardedSource.open(tmp_path / "config.json")


def test_shards_without_an_index_are_not_globbed(root: Path) -> None:
    (root / "model.safetensors.index.json").unlink()
    with pytest.raises(SourceError, match="3 shards but no model.safetensors.index.json"):
        ShardedSource.open(root)


def test_fp8_source_is_refused_by_name(tmp_path: Path) -> None:  # case 1, 2
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    for tensors in ({"w.weight": weight}, {"w.weight": torch.ones(2), "w.weight_scale_inv": torch.ones(1)}):
        root = write_checkpoint(tmp_path / str(len(tensors)), tensors, shards=1)
        with pytest.raises(SourceError, match="FP8 source.*w.weight.*use the BF16 one, or say --fp8"):
            ShardedSource.open(root)


def test_exotic_dtypes_open_but_are_not_read(tmp_path: Path) -> None:  # case 6
    header = {"ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
              "odd": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [8, 10]},
              "tiny": {"dtype": "F4", "shape": [4], "data_offsets": [10, 12]}}
    write_raw_shard(tmp_path / "model.safetensors", header, bytes(range(12)))
    (tmp_path / "config.json").write_text("{}")
    source = ShardedSource.open(tmp_path)
    assert {t.entry.dtype for t in source.tensors.values()} == {"I64", "F8_E5M2", "F4"}
    assert source.raw("tiny") == bytes([10, 11])
    for read in (lambda: source.read("tiny"), lambda: source.read_slice("tiny", 0, 0, 2)):
        with pytest.raises(SourceError, match="tiny has dtype F4"):
            read()


def test_shard_cut_while_in_use(root: Path) -> None:
    source = ShardedSource.open(root)
    name, tensor = list(source.tensors.items())[-1]
    os.truncate(tensor.file, tensor.entry.start)
    with pytest.raises(SourceError, match="were promised"):
        source.read(name)


def test_side_files_are_everything_but_weights(root: Path) -> None:  # case 93
    (root / "figures").mkdir()
    (root / "figures" / "plot.svg").write_text("<svg/>")
    for name in ("pytorch_model.bin", "x.pt", "old.gguf", ".gitattributes", "quantization_config.json",
                 "pytorch_model.bin.index.json", "tokenizer.json.partial"):
        (root / name).write_text("{}")
    (root / ".cache").mkdir()
    (root / ".cache" / "lock").write_text("")
    found = [path.relative_to(root).as_posix() for path in ShardedSource.open(root).side_files()]
    assert found == [*sorted(SIDE_FILES), "figures/plot.svg"]


def test_side_file_must_not_lead_out_of_the_checkpoint(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    (root / "README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="README.md: links to .*secret, outside"):
        ShardedSource.open(root).side_files()
    (root / "README.md").unlink()
    os.mkfifo(root / "README.md")
    with pytest.raises(SourceError, match="README.md: is not a regular file"):
        ShardedSource.open(root).side_files()


def test_hub_cache_links_are_followed(root: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1234", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(root.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    source = ShardedSource.open(snapshot)
    assert torch.equal(source.read("layers.2.bias"), some_tensors()["layers.2.bias"])
    assert [path.name for path in source.side_files()] == sorted(SIDE_FILES)


def test_a_linked_folder_is_not_left_out_silently(root: Path, tmp_path: Path) -> None:
    """A walk does not enter it, and every other file of a source is promised to be copied."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "figure.txt").write_text("a figure")
    (root / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="figures: is a link to a folder"):
        ShardedSource.open(root).side_files()


def test_fingerprint_sees_content_and_config(root: Path) -> None:  # case 62
    before = ShardedSource.open(root).fingerprint()
    assert before == ShardedSource.open(root).fingerprint()
    path = root / SHARD.format(2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (root / "config.json").write_text(json.dumps({"model_type": "other"}))
    after = ShardedSource.open(root).fingerprint()
    assert {key for key in before if before[key] != after[key]} == {"config.json", path.name}


def test_fingerprint_of_large_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "WHOLE_HASH_BYTES", 100)
    monkeypatch.setattr(source_module, "SAMPLE_BYTES", 32)
    before, path = ShardedSource.open(root).fingerprint(), root / SHARD.format(1)
    data, time = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(time, time))
    sampled = ShardedSource.open(root).fingerprint()
    path.write_bytes(data)
    os.utime(path, ns=(time + 1, time + 1))
    touched = ShardedSource.open(root).fingerprint()
    assert len({fingerprint[path.name] for fingerprint in (before, sampled, touched)}) == 3


def test_282_shards_with_64_handles(tmp_path: Path) -> None:  # case 73
    tensors = {f"t.{number}": torch.full((3,), float(number)) for number in range(282)}
    root = write_checkpoint(tmp_path / "many", tensors, shards=282)
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from keys35.files.source import ShardedSource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "source = ShardedSource.open(Path(sys.argv[1]))\n"
        "assert all((source.read(f't.{i}') == i).all() for i in range(282))\n"
        "assert len(source.fingerprint()) == 283\n"
    )
    subprocess.run([sys.executable, "-c", script, str(root)], check=True, cwd=Path(__file__).parents[2])


def test_the_bundled_demo_opens() -> None:
    source = ShardedSource.open(DEMO)
    assert len(source.tensors) == 191 and source.bytes_read == 0
    assert source.tensors["model.layers.1.mlp.gate.e_score_correction_bias"].entry.dtype == "F32"
