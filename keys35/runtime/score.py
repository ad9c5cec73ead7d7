"""Run a checkpoint over a panel and compare it with the reference, on one rank or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keys35.errors import RankError
from keys35.files.atomic import tensor_bytes, write_safetensors
from keys35.files.headers import SAFETENSORS_NAME
from keys35.glm.stream import Head, embed, mtp, trunk
from keys35.glm.weights import WeightStore
from keys35.runtime.metrics import MtpMetrics, PanelMetrics
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import LOGIT_ROWS, Reference, next_tokens


def score_panel(
    store: WeightStore, ranks: Ranks, panel: Panel, reference: Reference, logits_dir: Path | None = None
) -> dict[str, Any] | None:
    """Metrics of a checkpoint on a panel, on rank 0 (None on the others).

    Layers are streamed, so every byte is read once. Rank 0 keeps each window's logits in `logits_dir`.
    """
    embedded = embed(store, panel.tokens)
    hidden = trunk(store, embedded, reduce=ranks.reduce)
    scorer = _Scorer(store, ranks, reference)
    drafting = mtp(store, hidden, embedded, reduce=ranks.reduce) if scorer.mtp_heads else []
    for window, tokens in enumerate(panel.tokens):
        stored = reference.states(window)
        kept: list[Tensor] | None = [] if logits_dir is not None and ranks.rank == 0 else None
        greedy = scorer.trunk(window, panel.domains[window], hidden[window], stored["hidden"], tokens, kept)
        if drafting:
            scorer.mtp(drafting[window], stored["mtp"], tokens, greedy)
        if kept is not None:
            _save_logits(logits_dir / f"window-{window:05d}.safetensors", kept)
    return scorer.result() if ranks.rank == 0 else None


def _save_logits(path: Path, pieces: Sequence[Tensor]) -> None:
    """Pieces (rows, vocabulary) as one tensor "logits", which takes no second copy of them."""
    form = SAFETENSORS_NAME[pieces[0].dtype], (sum(map(len, pieces)), pieces[0].shape[1])
    write_safetensors(path, [("logits", *form)], [map(tensor_bytes, pieces)], {})


class _Scorer:
    """Makes both models' logits in chunks and feeds the metrics; only rank 0 sees whole vocabularies."""

    def __init__(self, store: WeightStore, ranks: Ranks, reference: Reference) -> None:
        self.ranks = ranks
        self.metrics = PanelMetrics()
        self.drafts = (MtpMetrics(), MtpMetrics())
        head, theirs = Head.of_trunk(store), reference.heads(store.tp, store.rank, store.device)
        self.trunk_heads = (head, theirs["hidden"])
        both = store.config.num_nextn_predict_layers and "mtp" in theirs
        self.mtp_heads = (head.for_mtp(store), theirs["mtp"]) if both else ()

    def trunk(
        self, window: int, domain: str, states: Tensor, stored: Tensor, tokens: Tensor, kept: list[Tensor] | None
    ) -> list[Tensor]:
        """Score one window; return both greedy choices. The checkpoint's logits go to `kept`, if there is one."""
        labels, greedy = next_tokens(tokens), []
        for rows in _chunks(len(states)):
            shares = [head(x[rows]) for head, x in zip(self.trunk_heads, (states, stored), strict=True)]
            greedy.append([self.ranks.greedy(share).cpu() for share in shares])
            ours, theirs = (self.ranks.logits(share) for share in shares)
            if ours is not None and theirs is not None:
                if not ours.isfinite().all():
                    raise RankError(f"window {window} gives NaN or infinite logits: the checkpoint is damaged")
                self.metrics.add(window, domain, theirs, ours, labels[rows])
                if kept is not None:
                    kept.append(ours.cpu())
        return [torch.cat(column) for column in zip(*greedy, strict=True)]

    def mtp(self, states: Tensor, stored: Tensor, tokens: Tensor, greedy: list[Tensor]) -> None:
        """Score the drafts of both models, each against its own trunk."""
        for index, (head, x) in enumerate(zip(self.mtp_heads, (states, stored), strict=True)):
            drafts = [self.ranks.greedy(head(x[rows])).cpu() for rows in _chunks(len(x))]
            self.drafts[index].add(torch.cat(drafts), tokens, greedy[index])

    def result(self) -> dict[str, Any]:
        result = self.metrics.result()
        if self.mtp_heads:
            ours, theirs = (metrics.result() for metrics in self.drafts)
            result["mtp"] = ours | {f"{name}_reference": value for name, value in theirs.items()}
        return result


def _chunks(rows: int) -> list[slice]:
    return [slice(start, start + LOGIT_ROWS) for start in range(0, rows, LOGIT_ROWS)]
