"""What is refused before a byte leaves, and what must not be mistaken for it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from keys35.errors import ContractError, PublishError
from keys35.publish.card import broken_links
from keys35.publish.preflight import MAX_ENTRIES, MAX_FILE_BYTES, over_limits, preflight
from keys35.publish.scan import scan_file

REPO, REPORT = "someone/tiny", "KEYS35_ASSEMBLY_REPORT.json"
TOKEN = "hf_" + "abcDEF0123456789" * 2 + "ab"
# Put together here, so that no scanner takes this file for a leak.
LEAKS = {
    "a hub token": TOKEN,
    "an AWS key id": "AKIA" + "ABCDEFGH12345678",
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----",
    "a GitHub token": "ghp_" + "a1" * 18,
    "a Slack token": "xoxb-" + "1234567890-abc",
    "a Google key": "AIza" + "a1B2c3D4e5" * 3 + "abcde",
    "an API key": "sk-" + "proj-" + "a1B2" * 8,
    "a signed web token": "eyJ" + "a" * 12 + ".eyJ" + "b" * 12 + "." + "c" * 12,
    "a password in a URL": "https://me:" + "hunter2@example.org/x",
    "a credential": "aws_secret_access_key = " + "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
    "a home directory": "/home/alice/models",
    "root's home directory": "/root/models",
    "a work directory": "/workspace/GLM-5.3",
    "a Windows home directory": "C:\\Users\\Alice\\models",
}
HARMLESS = """
`keys35 run SRC --work W`, https://example.org/home/alice, https://example.org/work/page, ~/.cache/huggingface
docker run -v ~/.cache/huggingface:/root/.cache/huggingface image --model /model --workdir
client = OpenAI(api_key="EMPTY", token=os.environ["HF_TOKEN"]); access_token: YOUR_ACCESS_TOKEN_HERE
hf_hub_download, hf_transfer, a task-force, sk-learn, "bos_token": "<|begin|>", "token_type_ids", /rooted/tree, a/root/b
sha256: 6509b52d109c8a5ecafeff40ca61ed4577179941429aecd4431c00d27e62c4a9, s3://bucket/home/x, 10:30@noon
"""


def refused(out: Path, words: str) -> None:
    with pytest.raises(PublishError, match=words):
        preflight(out, REPO)


def test_a_good_checkpoint_passes(out: Path) -> None:
    files = preflight(out, REPO)
    assert [file.name for file in files] == sorted(path.name for path in out.iterdir())
    licence = next(file for file in files if file.name == "generation_config.json")
    assert licence.blob_id() == "9e26dfeeb6e641a33dae4961196235bdb965b21b", "what git says of {}"


@pytest.mark.parametrize("repo", ["", "name", "a/b/c", "not a repo/x", "https://huggingface.co/a/b"])
def test_a_repository_without_a_name_is_refused_before_anything_is_read(repo: str, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="is no repository's name; give it as OWNER/NAME"):
        preflight(tmp_path / "absent", repo)


def test_a_file_whose_name_is_no_text_is_refused(out: Path) -> None:
    (out / "caf\u00e9.txt").write_text("x")
    preflight(out, REPO)
    Path(os.fsdecode(bytes(out / "caf") + b"\xe9.txt")).write_text("x")
    refused(out, "not UTF-8")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_leak_in_a_log_of_another_encoding_is_found(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text(f"first\ntoken: {TOKEN}\n", encoding=encoding)
    assert scan_file(path, "run.txt") == ["run.txt, line 2: a hub token"]


def test_a_report_file_that_nobody_can_read_is_not_published(out: Path) -> None:
    (out / "KEYS35_QUALITY.json").write_text("{")
    with pytest.raises(ContractError, match="KEYS35_QUALITY.json: is not complete JSON"):
        preflight(out, REPO)


def test_a_checkpoint_without_its_tokenizer_is_not_published(out: Path) -> None:
    (out / "tokenizer.json").unlink()
    with pytest.raises(ContractError, match="side-files: .* tokenizer.json is missing"):
        preflight(out, REPO)


@pytest.mark.parametrize("kind", LEAKS)
@pytest.mark.parametrize("suffix", [".json", ".md", ".txt"])
def test_every_leak_is_found_and_not_repeated(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{suffix}"
    leak = LEAKS[kind]
    as_json = json.dumps({"a": 1, "note": f"see {leak} there"}, indent=1)
    path.write_text(as_json if suffix == ".json" else f"a\n\n{leak}")
    (found,) = scan_file(path, path.name)
    assert found == f"{path.name}, line 3: {kind}" and leak not in found


def test_harmless_text_passes(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(HARMLESS)
    assert scan_file(tmp_path / "README.md", "README.md") == []


def test_escapes_hide_nothing(tmp_path: Path) -> None:
    for text in (r'{"a": "\/home\/alice"}', r'{"\u002fhome/alice": 1}', '["\\u0068' + TOKEN[1:] + '"]'):
        (tmp_path / "a.json").write_text(text)
        assert len(scan_file(tmp_path / "a.json", "a.json")) == 1, text


def test_a_vocabulary_may_hold_paths_but_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"/home/user": 1, "/root": 2}))
    assert scan_file(path, path.name) == []
    path.write_text(json.dumps({TOKEN: 1}))
    assert scan_file(path, path.name) == ["tokenizer.json, line 1: a hub token"]


@pytest.mark.parametrize("leak", [TOKEN, "/home/alice/GLM-5.3"])
def test_a_report_that_leaks_is_refused(out: Path, leak: str) -> None:
    report = json.loads((out / REPORT).read_text())
    report["warnings"] = [f"read from {leak}"]
    (out / REPORT).write_text(json.dumps(report, indent=1))
    refused(out, rf"{REPORT}, line \d+: a h")


def test_the_folder_it_lies_in_is_local_too(out: Path) -> None:
    (out / "notes.txt").write_text(f"made in {out.resolve()}/x")
    refused(out, "notes.txt, line 1: a folder of this machine")


def test_a_shards_metadata_is_read(out: Path) -> None:
    path = out / "model-00002-of-00012.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "made_by": "/home/alice/run.py"})
    with pytest.raises((PublishError, ContractError), match="model-00002"):
        preflight(out, REPO)
    assert scan_file(path, path.name) == [f"{path.name}, line 1: a home directory"]


def test_a_checkpoint_that_fails_its_check(out: Path) -> None:
    (out / "model-00003-of-00012.safetensors").unlink()
    with pytest.raises(ContractError, match="index-shard.*model-00003"):
        preflight(out, REPO)


def test_bytes_other_than_the_report_records(out: Path) -> None:
    path = out / "model-00005-of-00012.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises((PublishError, ContractError), match="model-00005"):
        preflight(out, REPO)


def leave(name: str) -> Callable[[Path], object]:
    return lambda out: (out / name).write_text("x")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (leave("config.json~"), "config.json~ is a leftover"),
        (leave("nohup.log"), "nohup.log is a leftover"),
        (lambda out: os.mkfifo(out / "pipe"), "pipe is not a regular file"),
        (lambda out: (out / "notes.txt").symlink_to("/etc/hostname"), "notes.txt links to /etc/hostname"),
        (lambda out: (out / "dangling.txt").symlink_to("nothing"), "dangling.txt is not a regular file"),
    ],
)
def test_what_is_no_part_of_a_checkpoint(out: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(out)
    refused(out, words)


def test_partial_files_are_refused(out: Path) -> None:
    (out / "config.json.partial").write_text("{")
    with pytest.raises(ContractError, match="partial-left"):
        preflight(out, REPO)


def test_limits(out: Path) -> None:
    with open(out / "big.txt", "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse: takes no space
    refused(out, f"big.txt: {MAX_FILE_BYTES + 1} bytes")
    assert over_limits({"big.txt": MAX_FILE_BYTES}) == []
    many = {f"deep/{number}": 1 for number in range(MAX_ENTRIES)}
    assert over_limits(many) == []
    assert over_limits(many | {"deep/er/x": 1}) == ["deep: 10001 entries, the hub takes 10000 in a folder"]


CARD = """[a](config.json) [b](docs/a.html "title") ![c](docs) <img src="missing.png"> [d](#anchor) [e](mailto:a@b.c)
[f](../up.json) [g](/config.json) [h](https://huggingface.co/someone/tiny/blob/main/config.json)
[i](https://huggingface.co/someone/tiny/resolve/main/gone.json) [j](https://huggingface.co/zai-org/GLM-5.3)
[k](https://huggingface.co/zai-org/GLM-5.3/blob/main/LICENSE) [l](docs/a%2Ehtml#part)
[m](https://huggingface.co/someone/sibling/blob/main/KEYS35_QUALITY.json) [n](file:///tmp/x)
`[o](inline.json)` [p][ref]

```md
[q](fenced.json)
```

[ref]: reference.json
"""


def test_links_of_the_card() -> None:
    names = ["config.json", "docs/a.html", "KEYS35_QUALITY.json", "LICENSE"]
    found = [line.split("'")[1] for line in broken_links(CARD, REPO, names)]
    assert found == [
        "missing.png", "../up.json", "/config.json", "https://huggingface.co/someone/tiny/resolve/main/gone.json",
        "https://huggingface.co/someone/sibling/blob/main/KEYS35_QUALITY.json", "file:///tmp/x", "reference.json",
    ]


def test_a_link_that_is_no_address_is_named(out: Path) -> None:
    """Python refuses a placeholder's brackets as no IPv6 address; it was a traceback."""
    (out / "README.md").write_text("served at [here](https://[your-host]/v1)\n")
    refused(out, r"README.md: link 'https://\[your-host\]/v1' is no address")


def test_a_dead_link_is_refused(out: Path) -> None:
    (out / "README.md").write_text("see [the report](REPORT.html)\n")
    refused(out, "README.md: link 'REPORT.html' names no file")
