"""Tokenize the second model's training text, leaving out what its report split will be read from.

    python prepare_text.py TRAIN.txt.xz TOKENIZER.json TOKENS.npy

TRAIN holds documents separated by <|endoftext|>. Left out: every document that shares a line of 40 characters or more
with what `calibration/ablation-panel.toml` keeps for the report (the bundled eval text is not in TRAIN at all), and
every second document of code (it is two thirds of the text).
"""

import lzma
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from keys35.calibration.text import documents, load_text_set

SEPARATOR, LONG = "<|endoftext|>", 40


def lines(document: str) -> set[str]:
    return {line.strip() for line in document.splitlines() if len(line.strip()) >= LONG}


def main() -> None:
    source, tokenizer, out = sys.argv[1:]
    held_back = set()
    for domain in load_text_set("ablation-panel").domains:
        for document in documents(domain) if domain.part == "report" else ():
            held_back |= lines(document)
    with lzma.open(source, "rt", encoding="utf-8", errors="replace") as file:
        text = [d for d in file.read().split(SEPARATOR) if d.strip() and not lines(d) & held_back]
    code = [d for d in text if "\n    def " in d or "\ndef " in d]
    dropped = set(map(id, code[::2]))
    kept = [d for d in text if id(d) not in dropped]
    encoder = Tokenizer.from_file(tokenizer)
    end = encoder.token_to_id(SEPARATOR)
    ids: list[np.ndarray] = []
    for first in range(0, len(kept), 256):
        batch = encoder.encode_batch(kept[first : first + 256], add_special_tokens=False)
        ids += [np.array([*item.ids, end], dtype=np.uint16) for item in batch]
    order = np.random.default_rng(0).permutation(len(ids))
    tokens = np.concatenate([ids[i] for i in order])
    np.save(Path(out), tokens)
    print(f"{len(text)} documents, {len(kept)} kept, {len(tokens) / 1e6:.1f} M tokens")


if __name__ == "__main__":
    main()
