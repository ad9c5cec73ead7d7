"""A checkpoint's tensors against its config.json, by headers alone: what a rank would miss in the middle of a pass."""

from collections.abc import Mapping

from keys35.errors import SourceError
from keys35.exl3.tiles import TILE
from keys35.files.index import some
from keys35.files.source import ShardedSource, SourceTensor
from keys35.glm.config import GlmConfig
from keys35.glm.names import TensorRule, census, exl3_parts


def require_readable(source: ShardedSource, config: GlmConfig, mtp: bool = True) -> None:
    """Refuse (SourceError) a checkpoint that lacks a tensor, or a scale of an encoded linear; mtp: or its MTP layer's.

    A linear may be encoded or plain, as it is read.
    """
    rules = (rule for rule in census(config).values() if mtp or rule.layer is None or not config.is_mtp(rule.layer))
    if faults := [fault for rule in rules if (fault := _fault(source.tensors, rule))]:
        raise SourceError(f"{source.root} does not hold what its config.json asks for: {some(faults)}; fetch or "
                          "assemble the checkpoint again")


def _fault(tensors: Mapping[str, SourceTensor], rule: TensorRule) -> str:
    names = exl3_parts(rule.module)
    if not (rule.quantized and names["trellis"] in tensors):
        return "" if rule.name in tensors or rule.source in tensors else f"{rule.name} is missing"
    shape = tensors[names["trellis"]].entry.shape
    for part, tiles in zip(("suh", "svh"), shape, strict=False):
        if names[part] not in tensors:
            return f"{names[part]} is missing"
        if (found := tensors[names[part]].entry.shape) != (tiles * TILE,):
            return f"{names[part]} has shape {list(found)}, its trellis {list(shape)}"
    return ""
