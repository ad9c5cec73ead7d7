"""Text from a checkpoint, and how fast it comes."""

import tempfile
from pathlib import Path
from typing import Any

from keys35.calibration.windows import read_tokenizer
from keys35.errors import SourceError, UsageError
from keys35.files.atomic import read_json
from keys35.glm.config import GlmConfig
from keys35.runtime.launch import run_generate

RATES = ("rank", "device", "backend", "prefill_tokens_s", "decode_tokens_s", "communication_s", "peak_rss_bytes")


def reply(checkpoint: Path, prompt: str, tokens: int, tp: int, **options: Any) -> dict[str, Any]:
    """What a model says after a prompt, greedily; options as for `run_generate`.

    Raises SourceError, RankError, and UsageError for a prompt that is empty or no text.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give some text to go on from")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python keeps what a terminal sends in another encoding as half a surrogate pair
        raise UsageError("the prompt is not UTF-8; give it as UTF-8 text") from None
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    with tempfile.TemporaryDirectory() as scratch:
        done = run_generate(checkpoint, ids, tokens, tp, Path(scratch), **options)
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

    Not stopped by the end of the model's text, which may come at once.
    """
    config = read_json(checkpoint / "config.json", SourceError, "give a checkpoint's folder")
    size = GlmConfig.from_dict(config).vocab_size
    ids = [(7919 * position + 11) % size for position in range(prompt)]
    with tempfile.TemporaryDirectory() as scratch:
        done = run_generate(checkpoint, ids, tokens, tp, Path(scratch), past_end=True, **options)
    return {"prompt_tokens": prompt, "new_tokens": len(done.tokens), "ranks": _rates(done.ranks)}


def _rates(ranks: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [{key: rank[key] for key in RATES if key in rank} for rank in ranks]
