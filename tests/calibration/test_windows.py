"""Text to windows: split by document, no padding, sealed with the tokenizer's hash."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer

from keys35.calibration.chat import ChatTemplate
from keys35.calibration.text import documents, key_of, load_text_set
from keys35.calibration.windows import WindowMaker, _side, _Sides, load_windows, save_windows, shares
from keys35.demo import MODEL
from keys35.errors import PlanError, RecipeError, ResumeError, SourceError

TOKENIZER = MODEL / "tokenizer.json"


def text_set(tmp_path, content, documents="line", name="mine.txt"):
    (tmp_path / name).write_text(content)
    path = tmp_path / "set.toml"
    path.write_text(
        f'version = 1\n[[domain]]\nname = "mine"\nshare = 1\nfiles = ["{name}"]\ndocuments = "{documents}"\n'
    )
    return load_text_set(str(path))


def test_fit_and_selection_share_no_document(tmp_path):
    lines = [f"document {n} " + "word " * 30 for n in range(200)]
    text = text_set(tmp_path, "\n".join(lines))
    maker = WindowMaker(TOKENIZER, 0, 32, seed=1)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    seen = {}
    for split in ("fit", "selection"):
        words = tokenizer.decode(maker.make(text, [20], split).tokens.flatten().tolist()).split("document ")
        seen[split] = {w.split()[0] for w in words[1:] if w.split()[0].isdigit() and "word" in w}
    assert seen["fit"] and seen["selection"] and not seen["fit"] & seen["selection"]


def test_a_copy_with_other_space_around_it_falls_on_the_same_side(tmp_path):
    """Its hash is another: a text that was fitted to judged the fit where two files cut it otherwise."""
    copies = [f"{before}document {n}{after}" for n in range(100) for before, after in (("", ""), ("\n", " \n"))]
    text = text_set(tmp_path, "<|endoftext|>".join(copies), "<|endoftext|>")
    maker, read = WindowMaker(TOKENIZER, 0, 2, seed=1), {}
    for split in ("fit", "selection"):
        asked = read[split] = []
        maker._ids = lambda document, asked=asked: asked.append(document.strip()) or [5]
        maker.make(text, [1], split)
    assert len(read["fit"]) + len(read["selection"]) == 200 and not set(read["fit"]) & set(read["selection"])


@pytest.mark.parametrize("name", ["demo", "standard", "ablation"])
def test_shipped_sets_are_split_by_each_text_as_it_is(name):
    """So were they when their figures were made: none of their domains has a text twice, once on either side."""
    for domain in load_text_set(name).domains:
        sides = _Sides()
        assert all(sides.of(key) == _side(key) for key in map(key_of, documents(domain)))


def test_windows_are_whole_and_repeatable():
    text = load_text_set("demo")
    maker = WindowMaker(TOKENIZER, 0, 128, seed=35)
    first, again = (maker.make(text, [5, 7], "fit") for _ in range(2))
    assert first.tokens.shape == (12, 128) and torch.equal(first.tokens, again.tokens)
    assert torch.bincount(first.domain).tolist() == [5, 7]
    assert not (first.tokens == 6).any(), "6 is the pad token"
    other = WindowMaker(TOKENIZER, 0, 128, seed=36).make(text, [5, 7], "fit")
    assert not torch.equal(first.tokens, other.tokens)


def test_head_keeps_every_domain():
    windows = WindowMaker(TOKENIZER, 0, 64, 0).make(load_text_set("demo"), [6, 6], "selection")
    assert torch.bincount(windows.head(4).domain).tolist() == [2, 2]


def test_too_little_text_names_the_domain(tmp_path):
    text = text_set(tmp_path, "a few words\n" * 20)
    with pytest.raises(PlanError, match="'mine' has text for .* 50 asked"):
        WindowMaker(TOKENIZER, 0, 64, 0).make(text, [50], "fit")


def test_a_tokenizer_file_that_cuts_and_pads_does_neither_here(tmp_path):
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64, pad_id=6)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = load_text_set("demo")
    wanted, found = (WindowMaker(file, 0, 64, 0).make(text, [4, 4], None)
                     for file in (TOKENIZER, tmp_path / "tokenizer.json"))
    assert torch.equal(found.tokens, wanted.tokens)


def test_a_tokenizer_in_a_folder_that_the_locale_cannot_name(tmp_path):
    folder = tmp_path / "modèle"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    code = ("import sys; from pathlib import Path; from keys35.calibration.windows import read_tokenizer; "
            "[root] = Path(sys.argv[1]).glob('mod*'); print(read_tokenizer(root / 'tokenizer.json').encode('a b').ids)")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=environment)
    assert done.stdout == f"{Tokenizer.from_file(str(TOKENIZER)).encode('a b').ids}\n", done.stderr


def test_another_tokenizer_is_refused(tmp_path):
    maker = WindowMaker(TOKENIZER, 0, 64, 0)
    windows = maker.make(load_text_set("demo"), [1, 1], "fit")
    save_windows(tmp_path / "fit", windows, maker.tokenizer_sha256)
    assert torch.equal(load_windows(tmp_path / "fit", maker.tokenizer_sha256).tokens, windows.tokens)
    facts = json.loads((tmp_path / "fit.json").read_text())
    assert facts["first_tokens"] == windows.tokens[:, :8].tolist()
    with pytest.raises(ResumeError, match="another tokenizer"):
        load_windows(tmp_path / "fit", "0" * 64)
    (tmp_path / "fit.json").write_text("[]")
    with pytest.raises(ResumeError, match="fit.json: it is no object"):
        load_windows(tmp_path / "fit", maker.tokenizer_sha256)


def test_no_tokenizer(tmp_path):
    with pytest.raises(SourceError, match="tokenizer.json"):
        WindowMaker(tmp_path / "tokenizer.json", 0, 64, 0)


def test_json_lines_and_their_mistakes(tmp_path):
    text = text_set(tmp_path, '{"text": "one"}\n\n{"text": "two"}\n', name="mine.jsonl")
    assert list(documents(text.domains[0])) == ["one", "two"]
    bad = text_set(tmp_path, '{"text": "one"}\n{"texts": 2}\n', name="bad.jsonl")
    with pytest.raises(RecipeError, match="bad.jsonl line 2"):
        list(documents(bad.domains[0]))


@pytest.mark.parametrize(("name", "content"), [("mine.jsonl", '{"text": "one"}\n'), ("mine.txt", "one\n")])
def test_a_byte_order_mark_is_no_part_of_a_set_or_a_text(tmp_path, name, content):
    wanted = text_set(tmp_path, content, name=name)
    for file in ("set.toml", name):
        (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + (tmp_path / file).read_bytes())
    found = load_text_set(str(tmp_path / "set.toml"))
    assert found.domains == wanted.domains and list(documents(found.domains[0])) == ["one"]


def test_a_set_that_is_no_text_is_not_shown_whole(tmp_path):
    (tmp_path / "set.toml").write_bytes(b"\x7fELF\xd0" * 9999)
    with pytest.raises(RecipeError) as caught:
        load_text_set(str(tmp_path / "set.toml"))
    assert "UnicodeDecodeError" in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def test_digest_follows_the_text(tmp_path):
    first = text_set(tmp_path, "one\n").digest
    assert text_set(tmp_path, "one\n").digest == first != text_set(tmp_path, "two\n").digest


@pytest.mark.parametrize(
    "content",
    [
        "version = 1",
        'version = 1\n[[domain]]\nname = "a"\nshare = 0\nfiles = []\ndocuments = "line"',
        'version = inf\n[[domain]]\nname = "a"\nshare = 1\nfiles = []\ndocuments = "line"',
        'version = 1\n[[domain]]\nname = "a"\nshare = inf\nfiles = []\ndocuments = "line"',
        'version = 1\n[[domain]]\nname = "a"\nshare = nan\nfiles = []\ndocuments = "line"',
        'version = 1\n[[domain]]\nname = "a"\nshare = 1\nfiles = ["no.txt"]\ndocuments = "line"',
        'version = 1\n[[domain]]\nname = "a"\nshare = 1\nfiles = []\ndocument = "line"',
        'version = 1\n[[domain]]\nname = "a"\nshare = 1\nfiles = []\ndocuments = ""',
        'version = 1\n[[domain]]\nname = "a"\nshare = 1\nfiles = []\ndocuments = 3',
        'version = 1\n[[domain]]\nname = "a"\nshare = 1\nfiles = [3]\ndocuments = "line"',
        'version = 1\n[[domain]]\nname = 5\nshare = 1\nfiles = []\ndocuments = "line"',
    ],
)
def test_broken_sets(tmp_path, content):
    (tmp_path / "set.toml").write_text(content)
    with pytest.raises(RecipeError):
        load_text_set(str(tmp_path / "set.toml"))


def test_another_encoding_is_refused_by_name(tmp_path):
    text = text_set(tmp_path, "caf\u00e9\n")
    (tmp_path / "mine.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(RecipeError, match="mine.txt: is not UTF-8 .* at byte 3.*iconv"):
        list(documents(text.domains[0]))


def test_shares_add_up():
    text = load_text_set("standard")
    assert sum(shares(text, 224)) == 224 and min(shares(text, 224)) >= 1
    assert shares(load_text_set("demo"), 7) in ([4, 3], [3, 4])


def test_peer_text_is_read_without_importing_the_peer():
    import sys

    assert len(list(documents(load_text_set("standard").domains[0]))) > 100
    assert "exllamav3" not in sys.modules


def test_calibration_and_report_parts_share_no_document(tmp_path):
    lines = "\n".join(f"document {n} " + "word " * 5 for n in range(400))
    whole = text_set(tmp_path, lines)
    parts = {}
    for part in ("calibration", "report"):
        file = tmp_path / f"{part}.toml"
        file.write_text((tmp_path / "set.toml").read_text() + f'part = "{part}"\n')
        parts[part] = set(documents(load_text_set(str(file)).domains[0]))
    assert parts["calibration"] | parts["report"] == set(documents(whole.domains[0]))
    assert not parts["calibration"] & parts["report"]
    assert 400 / 16 < len(parts["report"]) < 400 / 4


def test_an_unknown_part_is_refused(tmp_path):
    text_set(tmp_path, "a\nb")
    (tmp_path / "set.toml").write_text((tmp_path / "set.toml").read_text() + 'part = "reports"\n')
    with pytest.raises(RecipeError, match="part must be one of all, calibration, report, found 'reports'"):
        load_text_set(str(tmp_path / "set.toml"))


def test_some_domains_of_a_set():
    text = load_text_set("demo")
    assert [d.name for d in text.only(["code"]).domains] == ["code"] and text.only([]) == text
    with pytest.raises(RecipeError, match="no domain law: it has prose, code"):
        text.only(["law"])


TEMPLATE = """{%- if not messages -%}{{ raise_exception('no messages') }}{%- endif -%}
[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
{{ m.content }}{% else %}<|system|>
{{ m.content }}{% endif %}
{%- endfor %}"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."}]


def model_folder(tmp_path, template=TEMPLATE):
    root = tmp_path / "model"
    root.mkdir()
    (root / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    if template:
        (root / "chat_template.jinja").write_text(template)
    return root


def test_chats_go_through_the_checkpoints_own_template(tmp_path):
    transformers = pytest.importorskip("transformers")
    root = model_folder(tmp_path)
    text = text_set(tmp_path, json.dumps({"messages": CHAT}) + "\n", name="chat.jsonl")
    found = WindowMaker(root / "tokenizer.json", 0, 16, 0).make(text, [1], None).tokens[0].tolist()
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), chat_template=TEMPLATE)
    wanted = peer.apply_chat_template(CHAT, return_dict=False)
    assert found == wanted[:16] and wanted[:2] == [1, 2]  # [gMASK] <sop>, once
    assert {3, 4} <= set(found), "the special tokens of system and user"


@pytest.mark.parametrize("template", [
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "{% if tools is not none %}TOOLS {{ tools }}{% endif %}{% if documents %}D{% endif %}{{ messages[1].content }}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}",
])  # fmt: skip
def test_a_template_finds_what_transformers_gives_it(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    root, special = model_folder(tmp_path, template), {"bos_token": "[gMASK]", "eos_token": "<sop>"}
    given = special | {"eos_token": {"content": "<sop>", "lstrip": False}, "pad_token": None}
    (root / "tokenizer_config.json").write_text(json.dumps(given))
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), chat_template=template, **special)
    assert ChatTemplate(root).render(CHAT) == peer.apply_chat_template(CHAT, tokenize=False)


def test_chats_need_a_template_that_takes_them(tmp_path):
    text = text_set(tmp_path, '{"messages": []}\n', name="chat.jsonl")
    root = model_folder(tmp_path)
    with pytest.raises(PlanError, match="no messages"):
        WindowMaker(root / "tokenizer.json", 0, 16, 0).make(text, [1], None)
    (root / "chat_template.jinja").unlink()
    with pytest.raises(SourceError, match="chat_template.jinja"):
        WindowMaker(root / "tokenizer.json", 0, 16, 0).make(text, [1], None)


def test_a_template_reaches_nothing(tmp_path):
    text = text_set(tmp_path, json.dumps({"messages": CHAT}) + "\n", name="chat.jsonl")
    root = model_folder(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PlanError, match="does not fit"):
        WindowMaker(root / "tokenizer.json", 0, 16, 0).make(text, [1], None)


def test_token_files_are_taken_from_the_checkpoints_tokenizer_only(tmp_path):
    maker = WindowMaker(TOKENIZER, 0, 8, 0)
    lines = [{"tokenizer_sha256": maker.tokenizer_sha256}, {"ids": [11, 12, 13, 14, 15]}, {"ids": [1, 2, 21, 22]}]
    text = text_set(tmp_path, "\n".join(map(json.dumps, lines)), name="tokens.jsonl")
    assert maker.make(text, [1], None).tokens.tolist() == [[1, 2, 11, 12, 13, 14, 15, 0]]  # then 1, 2, 21, 22, 0
    whole = text_set(tmp_path, "\n".join(json.dumps(lines[0] | line) for line in lines[1:]), name="whole.jsonl")
    assert list(map(key_of, documents(whole.domains[0]))) == list(map(key_of, documents(text.domains[0])))
    lines[0] = {"tokenizer_sha256": "ab" * 32}
    other = text_set(tmp_path, "\n".join(map(json.dumps, lines)), name="o.jsonl")
    with pytest.raises(PlanError, match=r"o.jsonl holds token ids of another tokenizer \(abababababab"):
        maker.make(other, [1], None)


@pytest.mark.parametrize("number", [2**31, 2**32 + 5, 2**63])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(tmp_path, number):
    """Windows are kept as int32, where 2**32 + 5 became token 5."""
    maker = WindowMaker(TOKENIZER, 0, 8, 0)
    lines = [{"tokenizer_sha256": maker.tokenizer_sha256}, {"ids": [1, 2, number, 4, 5, 6, 7]}]
    text = text_set(tmp_path, "\n".join(map(json.dumps, lines)), name="tokens.jsonl")
    with pytest.raises(PlanError, match=f"tokens.jsonl holds token {number}, the tokenizer's last is "):
        maker.make(text, [1], None)


def test_a_line_of_json_ends_where_json_says(tmp_path):
    """Text from the web holds separators that Python's splitlines ends a line at, and JSON does not."""
    wanted = "one\u2028two\u0085three\x0cfour"
    line = json.dumps({"text": wanted}, ensure_ascii=False)
    for name in ("mine.jsonl", "MINE.JSONL"):  # some systems write endings so
        assert list(documents(text_set(tmp_path, f"{line}\r\n{line}", name=name).domains[0])) == [wanted, wanted]


NESTED = f'{{"text": {"[" * 100_000}{"]" * 100_000}}}'
NO_TEXT = [NESTED, '{"text": null}', '{"text": 5}', r'{"text": "\ud800"}', r'{"messages": [{"content": "\ud800"}]}']


@pytest.mark.parametrize(
    "line", ['{"ids": [1]}', '{"tokenizer_sha256": "a"}\n{"ids": [-1]}', '{"messages": 3}', *NO_TEXT]
)
def test_json_lines_that_are_neither(tmp_path, line):
    with pytest.raises(RecipeError, match="mine.jsonl line"):
        list(documents(text_set(tmp_path, line, name="mine.jsonl").domains[0]))
