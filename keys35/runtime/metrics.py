"""How far a quantized model is from its reference: one definition of every number, used everywhere.

P is the reference's next-token distribution, Q the quantized model's, at the same position of a window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK_VALUES = 1 << 23  # float64 values per tensor while scoring: 64 MiB
CONFIDENCE = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
NO_LABEL = -1


@dataclass
class PanelMetrics:
    """Collects per-token numbers window by window; `result` summarises them.

    Everything is computed in float64 over all vocabulary columns. KL is KL(P || Q) in nats.
    """

    _columns: list[dict[str, np.ndarray]] = field(default_factory=list)
    _domains: dict[int, str] = field(default_factory=dict)

    def add(self, window: int, domain: str, reference: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Score consecutive positions of a window: logits (n, vocabulary) of both models, labels (n,).

        A label is the next token, or NO_LABEL at a window's last position. Large inputs are cut into chunks.
        """
        self._domains[window] = domain
        for part in _chunks(*logits.shape):
            scores = _score(reference[part].double(), logits[part].double(), labels[part])
            columns = {name: values.cpu().numpy() for name, values in scores.items()}
            self._columns.append(columns | {"window": np.full(len(columns["kl"]), window)})

    def result(self) -> dict[str, Any]:
        """All numbers as JSON values: the whole panel, per domain, per window, per confidence bucket."""
        table = {name: np.concatenate([c[name] for c in self._columns]) for name in self._columns[0]}
        windows = sorted(self._domains)
        per_window = [
            {"window": w, "domain": self._domains[w], **_summary(_where(table, table["window"] == w))} for w in windows
        ]
        domains = {}
        for domain in sorted(set(self._domains.values())):
            members = [w for w in windows if self._domains[w] == domain]
            domains[domain] = _summary(_where(table, np.isin(table["window"], members)))
        return {
            **_summary(table),
            "windows": len(windows),
            "domains": domains,
            "per_window": per_window,
            "confidence": list(_buckets(table)),
        }


@dataclass
class MtpMetrics:
    """How well MTP drafts do: against the text, and against the trunk that would verify them."""

    _hits: int = 0
    _labels: int = 0
    _accepted: int = 0
    _drafts: int = 0

    def add(self, drafts: Tensor, tokens: Tensor, greedy: Tensor) -> None:
        """Greedy drafts (S-1,) for tokens 2..S; the window's tokens (S,); the trunk's greedy choices (S,).

        The draft at row t predicts token t + 2; the trunk's own choice there is `greedy[t + 1]`.
        """
        self._hits += int((drafts[:-1] == tokens[2:]).sum())
        self._labels += len(tokens) - 2
        self._accepted += int((drafts == greedy[1:]).sum())
        self._drafts += len(drafts)

    def result(self) -> dict[str, float]:
        """`top1`: drafts equal to the text's token after next; `acceptance`: drafts the trunk agrees with."""
        return {"top1": self._hits / self._labels, "acceptance": self._accepted / self._drafts}


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _score(reference: Tensor, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Per-token columns, float64 (n,); columns about labels are NaN where there is none."""
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    top_p, top_q = reference.topk(5).indices, logits.topk(5).indices
    labels = labels.to(logits.device)
    label = labels.clamp_min(0)[:, None]
    same = top_p == top_q
    columns = {
        "kl": (p * (log_p - log_q)).sum(-1),
        "kl_reverse": (q * (log_q - log_p)).sum(-1),
        "top1": same[:, 0],
        "top2": same[:, :2].all(1),
        "confidence": p.amax(-1),
    }
    about_label = {
        "top5_reference": (top_p == label).any(1),
        "top5": (top_q == label).any(1),
        "nll_reference": -log_p.gather(1, label)[:, 0],
        "nll": -log_q.gather(1, label)[:, 0],
    }
    for name, values in about_label.items():
        columns[name] = values.double().masked_fill(labels == NO_LABEL, torch.nan)
    return {name: values.double() for name, values in columns.items()}


def _where(table: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[mask] for name, values in table.items()}


def _summary(table: dict[str, np.ndarray]) -> dict[str, Any]:
    median, p90, p99 = np.quantile(table["kl"], [0.5, 0.9, 0.99]).tolist()
    labelled = _where(table, ~np.isnan(table["nll"]))
    return {
        "tokens": len(table["kl"]),
        "kl": float(table["kl"].mean()),
        "kl_reverse": float(table["kl_reverse"].mean()),
        "kl_median": median,
        "kl_p90": p90,
        "kl_p99": p99,
        "top1": float(table["top1"].mean()),
        "top2": float(table["top2"].mean()),
        "top5_reference": float(labelled["top5_reference"].mean()),
        "top5": float(labelled["top5"].mean()),
        "ppl_reference": float(np.exp(labelled["nll_reference"].mean())),
        "ppl": float(np.exp(labelled["nll"].mean())),
    }


def _buckets(table: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Agreement by how sure the reference was; empty buckets are left out."""
    bucket = np.clip(np.searchsorted(CONFIDENCE, table["confidence"], "right") - 1, 0, len(CONFIDENCE) - 2)
    for index in range(len(CONFIDENCE) - 1):
        part = _where(table, bucket == index)
        if len(part["kl"]):
            yield {
                "from": CONFIDENCE[index],
                "to": CONFIDENCE[index + 1],
                "tokens": len(part["kl"]),
                "kl": float(part["kl"].mean()),
                "top1": float(part["top1"].mean()),
            }
