"""Weights read from a checkpoint on demand: BF16 or EXL3, whole or one rank's share of them."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from enum import StrEnum
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from keys35.errors import SourceError
from keys35.exl3.linear import decode_weight
from keys35.exl3.packed import PackedLinears, codebook_of
from keys35.files.source import ShardedSource
from keys35.glm.block import LayerWeights
from keys35.glm.config import GlmConfig
from keys35.glm.experts import FEW_TOKENS, RoutedExperts
from keys35.glm.names import PROJECTIONS, Split, TensorRule, census, exl3_parts, most_ranks, rank_range, split_axis


class Keep(StrEnum):
    """What a layer keeps in memory after use.

    DENSE: everything decoded except routed experts, right for one streamed pass. ALL: those too. PACKED:
    every stored part as it is on disk, decoded again at each use, right for many passes over a large model.
    """

    DENSE = "dense"
    ALL = "all"
    PACKED = "packed"


class WeightStore:
    """All weights of a checkpoint for one rank of `tp`; reads only that rank's bytes.

    A linear is EXL3 when its trellis exists and plain otherwise, so a source, an output and a mixture load alike.
    In shares (`in_shares`), every product that ranks cut is made in equal parts of the whole, however many of them this
    rank has: the same shapes and the same sums, so the same bits for any number of ranks. `read` counts bytes by role
    and by "sharded" or "replicated". Values come in `dtype` on `device`, except the router's correction bias, which
    stays float32.
    """

    def __init__(
        self,
        source: ShardedSource,
        config: GlmConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        tp: int = 1,
        rank: int = 0,
    ) -> None:
        self.source, self.config, self.rules = source, config, census(config)
        self.device, self.dtype = torch.device(device), dtype
        self.tp, self.rank, self.shares = tp, rank, 1
        self.read: Counter[str] = Counter()

    def in_shares(self) -> Self:
        """The same store, cut into as many shares as the model can have ranks, up to 8: one result for all of them."""
        most, store = most_ranks(self.config), copy(self)
        store.shares = 1 if most % self.tp else most // self.tp
        return store

    def layer(self, layer: int, keep: Keep = Keep.DENSE) -> "StoredLayer":
        """The weights of one layer, loaded when first asked for."""
        return StoredLayer(self, layer, keep)

    def tensor(self, name: str) -> Tensor:
        """A carried tensor (or a plain linear's weight), this rank's rows or columns of it."""
        return self.unpack(self.rules[name], self.stored(self.rules[name]))

    def stored(self, rule: TensorRule) -> dict[str, Tensor]:
        """The parts of a tensor as they lie on disk: {"weight": ...} or an EXL3 linear's parts."""
        names = exl3_parts(rule.module) | {"mcg": f"{rule.module}.mcg"}  # other people's checkpoints may use it
        parts = {part: name for part, name in names.items() if name in self.source.tensors}
        if not (rule.quantized and "trellis" in parts):
            name = rule.name if rule.name in self.source.tensors else rule.source
            return {"weight": self._read(rule, "weight", name)}
        return {part: self._read(rule, part, name) for part, name in parts.items()}

    def unpack(self, rule: TensorRule, parts: Mapping[str, Tensor]) -> Tensor:
        """Stored parts as a usable tensor; linears come (out, in), without padding."""
        if "weight" in parts:
            weight = parts["weight"]
            return weight.float() if "F32" in rule.dtypes else weight.to(self.dtype)
        weight = decode_weight(parts["trellis"], parts["suh"], parts["svh"], codebook_of(parts))
        return weight[: rule.in_features, : rule.out_features].T.to(self.dtype)

    def _read(self, rule: TensorRule, part: str, name: str) -> Tensor:
        self._refuse_shape(rule, part, name)
        axis, before = split_axis(rule, part), self.source.bytes_read
        if axis is None or self.tp == 1:
            value = self.source.read(name, pinned=self.device.type == "cuda")
        else:
            size = self.source.tensors[name].entry.shape[axis]
            value = self.source.read_slice(name, axis, *rank_range(size, self.tp, self.rank))
        count = self.source.bytes_read - before
        self.read[rule.role] += count
        self.read["replicated" if axis is None else "sharded"] += count
        return value.to(self.device)

    def _refuse_shape(self, rule: TensorRule, part: str, name: str) -> None:
        """A config.json of another model, say: its products would fail, or be of the wrong numbers."""
        if name not in self.source.tensors:
            return  # which reading says
        shape = self.source.tensors[name].entry.shape
        fits = shape == rule.shape
        if part == "trellis":
            fits = len(shape) == 3 and shape[0] * 16 >= rule.in_features and shape[1] * 16 >= rule.out_features
        if part in ("weight", "trellis") and not fits:
            raise SourceError(f"{self.source.root}: {name} has shape {list(shape)}, which is not what its config.json "
                              f"asks for ({list(rule.shape)}); fetch or assemble the checkpoint again")


class StoredLayer:
    """One layer of a WeightStore, in the form `decoder_layer` takes."""

    def __init__(self, store: WeightStore, layer: int, keep: Keep) -> None:
        self._store, self._layer, self._keep = store, layer, keep
        self._ready: dict[str, Tensor] = {}
        self._packed: dict[str, dict[str, Tensor]] = {}
        self._linears: dict[str, PackedLinears | None] = {}
        self._routed: RoutedExperts | None = None

    def tensor(self, name: str) -> Tensor:
        return self._value(f"model.layers.{self._layer}.{name}")

    def linear(self, module: str, x: Tensor) -> Tensor:
        name = f"model.layers.{self._layer}.{module}.weight"
        few = self._keep is Keep.PACKED and len(x) <= FEW_TOKENS and self._store.shares == 1
        packed = self._packed_linear(name) if few else None
        if packed is None:
            weight = self._value(name)
            cut = self._store.shares if self._store.rules[name].split is Split.OUT else 1
            return torch.cat([F.linear(x, rows) for rows in weight.chunk(cut)], -1) if cut > 1 else F.linear(x, weight)
        rule = self._store.rules[name]
        x = F.pad(x, (0, packed.shapes[0][0] - x.shape[-1]))
        columns = min(packed.shapes[0][1], rule.out_features)
        return packed.multiply([0] * len(x), x)[:, :columns].to(x.dtype)

    def partial(self, module: str, x: Tensor) -> Tensor:
        if self._store.shares == 1:
            return self.linear(module, x)[None]
        weight, shares = self._value(f"model.layers.{self._layer}.{module}.weight"), self._store.shares
        return torch.stack([F.linear(a, w) for a, w in zip(x.chunk(shares, -1), weight.chunk(shares, -1), strict=True)])

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor | None:
        """All routed experts from their stored parts, where that is faster: 16 bits on a GPU, or a few tokens."""
        shares, half = self._store.shares, rows.dtype in (torch.bfloat16, torch.float16)
        few = len(rows) <= FEW_TOKENS and shares == 1 and self._keep is Keep.PACKED
        if not (rows.is_cuda and half or few and rows.dtype == torch.float32):
            return None
        chosen = None if self._keep is Keep.PACKED else ids.unique()
        routed = self._routed or self._routed_experts(chosen)
        if routed is None:
            return None
        if chosen is None:
            self._routed = routed
            return routed(rows, ids, weights, shares)
        return routed(rows, torch.searchsorted(chosen, ids), weights, shares)

    def _routed_experts(self, chosen: Tensor | None) -> RoutedExperts | None:
        """Some or all of the experts, when all of their linears are encoded."""
        ids = range(self._store.config.n_routed_experts) if chosen is None else chosen.tolist()
        modules = [f"model.layers.{self._layer}.mlp.experts.{i}.{leaf}" for i in ids for leaf in PROJECTIONS]
        if not all(f"{module}.trellis" in self._store.source.tensors for module in modules):
            return None  # known from the headers: a plain source is not read twice
        return RoutedExperts([self._parts(self._store.rules[f"{module}.weight"]) for module in modules])

    def _packed_linear(self, name: str) -> PackedLinears | None:
        if name not in self._linears:
            parts = self._parts(self._store.rules[name])
            self._linears[name] = PackedLinears([parts]) if "trellis" in parts else None
        return self._linears[name]

    def load(self, readers: int = 1, experts: bool = True) -> None:
        """Read everything now, or all but the routed experts, for a layer that is to stay in memory.

        `WeightStore.read` counts for one reader only.
        """
        mine = (rule for rule in self._store.rules.values() if rule.layer == self._layer)
        rules = [rule for rule in mine if experts or rule.expert is None]
        fetch = self._parts if self._keep is Keep.PACKED else lambda rule: self._value(rule.name)
        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(fetch, rules))

    def forget(self, module: str) -> None:
        """Drop what is kept of a linear; it is read again if it is asked for again."""
        name = f"model.layers.{self._layer}.{module}.weight"
        self._packed.pop(name, None)
        self._ready.pop(name, None)

    def _value(self, name: str) -> Tensor:
        if name in self._ready:
            return self._ready[name]
        rule = self._store.rules[name]
        parts = self._parts(rule)
        value = self._store.unpack(rule, parts)
        decoded_stays = rule.expert is None if self._keep is Keep.DENSE else self._keep is Keep.ALL
        if decoded_stays:
            self._ready[name] = value
        return value

    def _parts(self, rule: TensorRule) -> dict[str, Tensor]:
        if rule.name in self._packed:
            return self._packed[rule.name]
        parts = self._store.stored(rule)
        if self._keep is Keep.PACKED:
            self._packed[rule.name] = parts
        return parts


class Overlay:
    """A layer with other matrices (in, out) for the named linears, say another width of some experts."""

    def __init__(self, base: LayerWeights, matrices: Mapping[str, Tensor]) -> None:
        self._base, self._matrices = base, matrices

    def tensor(self, name: str) -> Tensor:
        return self._base.tensor(name)

    def linear(self, module: str, x: Tensor) -> Tensor:
        matrix = self._matrices.get(module)
        return self._base.linear(module, x) if matrix is None else x @ matrix

    def partial(self, module: str, x: Tensor) -> Tensor:
        matrix = self._matrices.get(module)
        return self._base.partial(module, x) if matrix is None else (x @ matrix)[None]

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> None:
        """One by one: any of them may be replaced."""
