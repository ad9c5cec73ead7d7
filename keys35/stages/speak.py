"""Text from a checkpoint, and how fast it comes."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keys35.calibration.windows import read_tokenizer
from keys35.errors import RankError, SourceError, UsageError
from keys35.files.forms import OBJECT, read_formed
from keys35.glm.config import GlmConfig
from keys35.runtime.launch import run_generate

RATES = ("rank", "device", "backend", "prefill_tokens_s", "decode_tokens_s", "communication_s", "peak_rss_bytes")


def reply(checkpoint: Path, prompt: str, tokens: int, tp: int, **options: Any) -> dict[str, Any]:
    """What a model says after a prompt, greedily; options as for `run_generate`.

    Raises SourceError, RankError, and UsageError for a prompt that is empty, no text, or longer than the model reads.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give some text to go on from")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python keeps what a terminal sends in another encoding as half a surrogate pair
        raise UsageError("the prompt is not UTF-8; give it as UTF-8 text") from None
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    tokens = min(tokens, _room(checkpoint, len(ids)) or tokens)
    with _folder() as scratch:
        done = run_generate(checkpoint, ids, tokens, tp, scratch, **options)
    return {
        "prompt": prompt,
        "text": tokenizer.decode(list(done.tokens)),
        "tokens": len(done.tokens),
        "drafts": done.drafts,
        "accepted": done.accepted,
        "ranks": _rates(done.ranks),
    }


def rates(checkpoint: Path, prompt: int, tokens: int, tp: int, **options: Any) -> dict[str, Any]:
    """Prefill and decode tokens a second of each rank, on a prompt of tokens from all over the vocabulary.

    Not stopped by the end of the model's text, which may come at once. Raises UsageError for more tokens than the model
    was made for: it would answer, and as slowly as no text of its own.
    """
    room = _room(checkpoint, prompt)
    if room is not None and tokens > room:
        raise UsageError(f"a prompt of {prompt:,} tokens leaves room for {room:,} more, {tokens:,} were asked for: "
                         f"{checkpoint} was made for texts of at most {prompt + room:,} (max_position_embeddings)")
    size = _config(checkpoint).vocab_size
    ids = [(7919 * position + 11) % size for position in range(prompt)]
    with _folder() as scratch:
        done = run_generate(checkpoint, ids, tokens, tp, scratch, past_end=True, **options)
    return {"prompt_tokens": prompt, "new_tokens": len(done.tokens), "ranks": _rates(done.ranks)}


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for ranks that is gone afterwards, unless an error sends people to the log in it."""
    folder = Path(tempfile.mkdtemp(prefix="keys35-"))
    named = False
    try:
        yield folder
    except RankError as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            shutil.rmtree(folder)


def _room(checkpoint: Path, prompt: int) -> int | None:
    """How many tokens may follow a prompt of so many; None if the model does not say."""
    longest = _config(checkpoint).max_position_embeddings
    if longest and prompt >= longest:
        raise UsageError(f"the prompt has {prompt:,} tokens, {checkpoint} was made for texts of at most {longest:,} "
                         "(max_position_embeddings); give a shorter one")
    return longest and longest - prompt


def _config(checkpoint: Path) -> GlmConfig:
    path, remedy = checkpoint / "config.json", "give a checkpoint's folder"
    return GlmConfig.from_dict(read_formed(path, OBJECT, SourceError, remedy))


def _rates(ranks: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [{key: rank[key] for key in RATES if key in rank} for rank in ranks]
