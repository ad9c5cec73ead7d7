"""The reference: final states of the BF16 source on a panel, kept on disk so that it is streamed only once.

States take hidden_size numbers per token instead of a vocabulary's worth of logits, and logits made from them
again are exact where stored 16-bit logits are not.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keys35.errors import RankError, ResumeError, SourceError
from keys35.files.atomic import load_tensors, require_space, save_tensors, sha256_file, write_json
from keys35.files.forms import OBJECT, read_formed
from keys35.files.headers import read_header
from keys35.files.source import ShardedSource
from keys35.glm.block import sum_shares
from keys35.glm.names import FINAL_NORM, HEAD, rank_range
from keys35.glm.stream import Head, embed, mtp, trunk
from keys35.glm.weights import WeightStore
from keys35.runtime.metrics import NO_LABEL, PanelMetrics
from keys35.runtime.panel import Panel

log = logging.getLogger(__name__)

LOGIT_ROWS = 256
FACTS = "reference.json"
_AGAIN = "delete the reference folder and make it again"
_TEXT = {"type": "string"}
_FORM = {
    "type": "object", "required": ["panel", "states", "eps", "tokens", "noise", "sha256", "head_sha256"],
    "properties": {"states": {"type": "array", "items": _TEXT}, "eps": {"type": "number"}, "head_sha256": _TEXT,
                   "noise": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["kl", "changed_top1"]}]},
                   "sha256": {"type": "array", "items": _TEXT}},
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """A reference folder. `facts` holds the panel's and the source's fingerprints and the noise floor."""

    root: Path
    facts: dict[str, Any]

    @classmethod
    def open(cls, root: Path, panel: Panel) -> "Reference":
        """Open a reference; RankError when it is damaged or belongs to another panel."""
        facts = read_formed(root / FACTS, _FORM, RankError, _AGAIN)
        if facts["panel"] != panel.fingerprint:
            raise RankError(f"{root} was made for another panel than '{panel.name}'; {_AGAIN}")
        head = root / "head.safetensors"
        if not head.is_file() or facts["head_sha256"] != sha256_file(head):
            raise RankError(f"{head} is missing or was changed; {_AGAIN}")
        return cls(root, facts)

    def states(self, window: int) -> dict[str, Tensor]:
        """ "hidden" (S, d) before the final norm, and "mtp" (S-1, d) when the model has an MTP layer.

        Raises RankError for a file that is gone or was changed: it is no unit of a job, which a rerun would do again.
        """
        path = _window_file(self.root, window)
        try:
            return load_tensors(path, self.facts["sha256"][window])
        except ResumeError as error:
            raise RankError(f"{path} is missing or was changed; {_AGAIN}") from error

    def heads(self, tp: int, rank: int, device: torch.device) -> dict[str, Head]:
        """The source's own heads ("hidden", "mtp"), this rank's rows of the vocabulary."""
        # By our own reader: the safetensors library opens no path that is not UTF-8.
        kept = ShardedSource(self.root, {}, (read_header(self.root / "head.safetensors"),))
        start, stop = rank_range(kept.tensors["weight"].entry.shape[0], tp, rank)
        weight = kept.read_slice("weight", 0, start, stop).to(device)
        norms = {key: kept.read(f"norm.{key}").to(device) for key in self.facts["states"]}
        return {key: Head(norm, weight, self.facts["eps"]) for key, norm in norms.items()}


def make_reference(
    store: WeightStore, panel: Panel, root: Path, *, repeat: bool = True, watch: Callable[[], None] | None = None
) -> Reference:
    """Stream the source over the panel and keep its final states; `repeat` does it twice for a noise floor.

    An existing reference of the same source and panel is reused. PlanError if the disk has no room for it, SourceError
    if the source gives values that are not finite: every number would be NaN. The noise floor is the mean KL and the
    share of changed top-1 tokens between two passes of the same weights: a smaller difference is not a difference.
    `watch` is called many times on the way, and may raise.
    """
    panel.check_vocabulary(store.config.vocab_size)
    store = store.in_shares()
    wanted = _identity(store, panel)
    if (root / FACTS).exists():
        facts = read_formed(root / FACTS, OBJECT, RankError, _AGAIN)
        if all(facts.get(key) == value for key, value in wanted.items()):
            return Reference.open(root, panel)
    for stale in [root / FACTS, *root.glob("*.safetensors")]:
        stale.unlink(missing_ok=True)
    require_space(root, _needed(store, panel))  # known before the source is streamed
    root.mkdir(parents=True, exist_ok=True)
    heads = _heads(store)
    states = _pass(store, panel, watch)
    _refuse_infinite(store, panel, states)
    hashes = [save_tensors(_window_file(root, window), tensors) for window, tensors in enumerate(states)]
    head = save_tensors(root / "head.safetensors", heads)
    noise = _noise(store, panel, states, _pass(store, panel, watch)) if repeat else None
    facts = wanted | {
        "states": sorted(states[0]),
        "eps": store.config.rms_norm_eps,
        "tokens": panel.token_count,
        "noise": noise,
        "sha256": hashes,
        "head_sha256": head,
    }
    write_json(root / FACTS, facts)
    log.info("reference of %d tokens in %s, noise floor %s", panel.token_count, root, noise)
    return Reference(root, facts)


def _identity(store: WeightStore, panel: Panel) -> dict[str, Any]:
    return {
        "schema": 2,
        "panel": panel.fingerprint,
        "source": store.source.fingerprint(),
        "dtype": str(store.dtype),
        "device": store.device.type,
        "mtp_hidden": store.config.mtp_hidden,
    }


def _needed(store: WeightStore, panel: Panel) -> int:
    """Bytes of a reference's files, but for their headers."""
    config, rows = store.config, panel.token_count
    if config.num_nextn_predict_layers:
        rows += panel.token_count - len(panel.tokens)
    head = store.source.tensors[store.rules[HEAD].source].entry
    return 4 * rows * config.hidden_size + head.nbytes


def _pass(store: WeightStore, panel: Panel, watch: Callable[[], None] | None = None) -> list[dict[str, Tensor]]:
    def reduce(shares: Tensor) -> Tensor:
        if watch:
            watch()
        return sum_shares(shares)

    embedded = embed(store, panel.tokens)
    hidden = trunk(store, embedded, reduce=reduce)
    states = [{"hidden": x.float().cpu()} for x in hidden]
    if store.config.num_nextn_predict_layers:
        for window, x in zip(states, mtp(store, hidden, embedded, reduce=reduce), strict=True):
            window["mtp"] = x.float().cpu()
    return states


def _refuse_infinite(store: WeightStore, panel: Panel, states: list[dict[str, Tensor]]) -> None:
    windows = [window for window, tensors in enumerate(states) if not _finite(tensors)]
    if windows:
        names = ", ".join(f"{window} ({panel.domains[window]})" for window in windows[:5])
        raise SourceError(
            f"{store.source.root} gives values that are not finite in {len(windows)} of {len(states)} windows of panel "
            f"'{panel.name}', such as {names}; `keys35 plan SOURCE --recipe R --scan` tells whether its weights are "
            "finite, and if they are, leave that text out"
        )


def _finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def _heads(store: WeightStore) -> dict[str, Tensor]:
    """Norms and head, which lie with the states, so that scoring needs neither the source nor the checkpoint's word."""
    names = {"norm.hidden": FINAL_NORM, "weight": store.rules[HEAD].source}
    if store.config.num_nextn_predict_layers:
        names["norm.mtp"] = f"model.layers.{store.config.num_hidden_layers}.shared_head.norm.weight"
    tensors = {name: store.source.read(source) for name, source in names.items()}
    if broken := [names[name] for name, tensor in tensors.items() if not _finite({name: tensor})]:
        raise SourceError(f"{store.source.root}: {', '.join(broken)} is not finite; fetch it again")
    return tensors


def _noise(
    store: WeightStore, panel: Panel, first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]
) -> dict[str, float]:
    head, metrics = Head.of_trunk(store), PanelMetrics()
    for window, (a, b) in enumerate(zip(first, second, strict=True)):
        labels = next_tokens(panel.tokens[window])
        for start in range(0, len(labels), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            p, q = (head(x["hidden"][rows]) for x in (a, b))
            metrics.add(window, panel.domains[window], p, q, labels[rows])
    result = metrics.result()
    return {"kl": result["kl"], "changed_top1": 1 - result["top1"]}


def next_tokens(tokens: Tensor) -> Tensor:
    """The label of each position of a window (S,): its next token, NO_LABEL at the end."""
    return torch.cat([tokens[1:], tokens.new_full((1,), NO_LABEL)])


def _window_file(root: Path, window: int) -> Path:
    return root / f"window-{window:05d}.safetensors"
