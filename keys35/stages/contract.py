"""The contract of a finished checkpoint: every rule by name, and who refuses when it is broken.

Rules restate the design notes reader-contract 1.10 and exl3-format 7; the engines listed are the ones whose
public loaders refuse or misread such a checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import BLOCK, Split, TensorRule
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.stages.engines import (
    B12X,
    EXLLAMA,
    HUB,
    NAMES,
    PROOF,
    SAFETENSORS,
    TENSORFOLD,
    TRANSFORMERS,
    VLLM,
    Engine,
)

TP = 4  # the published serving engine cuts a model into four ranks
SHOWN = 4


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold, and who refuses or goes wrong when it does not.

    `contract` rules hold for every keys35 checkpoint. The others are one engine's own wishes, which a profile may
    leave unmet: they count when that engine is asked for by name, and are notes otherwise.
    """

    says: str
    engines: tuple[str, ...]
    contract: bool = True


RULES: dict[str, Rule] = {
    # The folder and its shards
    "folder-entries": Rule("at most 10,000 entries lie in a folder", (HUB,)),
    "partial-left": Rule("no unfinished file is left", (PROOF,)),
    "pickled-weights": Rule("no pickled weights lie beside the shards", (EXLLAMA, HUB)),
    "shard-header": Rule("every shard is a complete safetensors file", (TENSORFOLD, EXLLAMA, VLLM)),
    "shard-aligned": Rule("a shard's data starts 8-aligned", (SAFETENSORS,)),
    "shard-names": Rule("shards are model-NNNNN-of-MMMMM.safetensors without gaps", (TRANSFORMERS, HUB)),
    "shard-stray": Rule("no shard lies outside the index", (EXLLAMA,)),
    "index-file": Rule("the index is readable and names plain files", (TENSORFOLD, VLLM, TRANSFORMERS)),
    "index-shard": Rule("every shard of the index exists", (TENSORFOLD, VLLM, TRANSFORMERS)),
    "index-tensor": Rule("index and shards name the same tensors", (TENSORFOLD, VLLM, TRANSFORMERS)),
    "index-size": Rule("the index's total_size is the bytes of all tensors", (TENSORFOLD, HUB)),
    "tensor-twice": Rule("a tensor lies in one shard", (EXLLAMA,)),
    # Names, types and shapes
    "name-forbidden": Rule("no tensor has a name that an engine refuses", (TENSORFOLD, EXLLAMA)),
    "name-unknown": Rule("every tensor has a split rule", (TENSORFOLD,)),
    "name-missing": Rule("every tensor of the model is stored", (TENSORFOLD, EXLLAMA, VLLM)),
    "carried-encoded": Rule("carried tensors are not encoded", (TENSORFOLD, EXLLAMA)),
    "codebook": Rule("one codebook, mul1, in the whole model", (TENSORFOLD, EXLLAMA, VLLM)),
    "marker-form": Rule("a marker is one int32 without dimensions", (VLLM, EXLLAMA)),
    "marker-value": Rule("the mul1 marker is 0x83DCD12D", (EXLLAMA, TENSORFOLD)),
    "trellis-dtype": Rule("a trellis is int16", (TENSORFOLD, EXLLAMA, VLLM)),
    "trellis-shape": Rule("a trellis is (in/16, out/16, 16 K), padded", (TENSORFOLD, EXLLAMA, VLLM)),
    "width-legal": Rule("a width is 1 to 8 bits, or a half rate below 4", (TENSORFOLD, EXLLAMA, VLLM)),
    "scale-dtype": Rule("suh and svh are float16", (TENSORFOLD, EXLLAMA)),
    "scale-length": Rule("suh and svh have the padded layer's lengths", (TENSORFOLD, EXLLAMA)),
    "scale-finite": Rule("suh and svh are finite", (TENSORFOLD, EXLLAMA)),
    "svh-zero": Rule("svh is zero in real columns only where the source is", (TENSORFOLD, EXLLAMA)),
    "svh-padding": Rule("svh is zero in padded columns", (EXLLAMA, TENSORFOLD)),
    "carried-dtype": Rule("a carried tensor keeps its dtype", (TENSORFOLD, VLLM)),
    "carried-shape": Rule("a carried tensor has the model's shape", (TENSORFOLD, EXLLAMA, VLLM)),
    "tp-cut": Rule(f"cuts for {TP} ranks fall on whole blocks of 128", (TENSORFOLD,)),
    # Widths
    "expert-width": Rule("the three projections of an expert share one width", (TENSORFOLD,)),
    "mtp-width": Rule("MTP experts have the declared width", (PROOF,)),
    "dense-width": Rule("dense linears have the declared width", (PROOF,)),
    "profile": Rule("profile is known, and the layers have the widths it promises", (PROOF,)),
    "expert-bits": Rule("expert_bits agrees with the trellis shapes", (PROOF,)),
    "recipe": Rule("profile, widths, mean and number of shards are the recipe's", (PROOF,)),
    # Values, decoded (only with --deep and --sample)
    "value-finite": Rule("every value is finite", (TENSORFOLD, EXLLAMA, VLLM)),
    "value-scale": Rule("decoded weights have a root mean square from 1e-5 to 10", (PROOF,)),
    "value-source": Rule("decoded weights are the source's, within the error of their width", (PROOF,)),
    # Configuration
    "config-file": Rule("config.json describes a supported model", (TENSORFOLD, EXLLAMA, VLLM)),
    "config-engine": Rule("config.json has what engines read without a default", (TENSORFOLD, EXLLAMA)),
    "config-tie": Rule("tie_word_embeddings is spelled so and false", (TRANSFORMERS, EXLLAMA)),
    "config-source": Rule("config.json keeps every key of the source", (TENSORFOLD, EXLLAMA, TRANSFORMERS)),
    "quant-file": Rule("quantization_config.json is readable", (VLLM,)),
    "quant-copies": Rule("both copies of the quantization config agree", (B12X,)),
    "quant-method": Rule("quant_method is exl3", (VLLM, B12X, TRANSFORMERS)),
    "quant-bits": Rule("bits is a float, the routed experts' mean", (VLLM, PROOF)),
    "quant-facts": Rule("version, format, head_bits and codebook are declared right", (VLLM, EXLLAMA)),
    "quant-original": Rule("original_quantization_config keeps the source's block, if it has one", (PROOF,)),
    "tensor-storage": Rule("tensor_storage agrees with the shards", (VLLM,)),
    # Proof against the source and the report
    "source-names": Rule("the output lacks exactly the declared tensors of the source", (PROOF,)),
    "carried-bytes": Rule("carried tensors are byte-identical to the source", (PROOF,)),
    "side-files": Rule("every other file of the source is present", (TENSORFOLD, TRANSFORMERS)),
    "side-bytes": Rule("other files are byte-identical to the source or listed in changed_files", (PROOF,)),
    "report-file": Rule("KEYS35_ASSEMBLY_REPORT.json is present and complete", (PROOF,)),
    "report-widths": Rule("the report's mean and widths are those of the shapes", (PROOF,)),
    "report-shards": Rule("the report's shards, sizes, tensors and hashes are those on disk", (PROOF,)),
    "report-recipe": Rule("the report's recipe has the SHA-256 that it records", (PROOF,)),
    "report-configs": Rule("both configs have the SHA-256 that the report records, or are in changed_files", (PROOF,)),
    "report-names": Rule("the report's carried and dropped tensors are the model's", (PROOF,)),
    # Wishes of single engines, outside the contract
    "layer-width": Rule("experts of a layer share one width, which fused kernels need", (EXLLAMA, VLLM), False),
    "layer-bits": Rule("layer_bits declares the width of every layer with experts", (VLLM,), False),
    "dense-declared": Rule("non_routed_exl3 declares the encoded dense linears", (VLLM,), False),
    "dense-encoded": Rule("dense linears are encoded", (TENSORFOLD,), False),
}


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that are not as engines read them, which they do without a default (`config-engine`)."""
    needs = {
        "architectures": config.get("architectures") == ["GlmMoeDsaForCausalLM"],
        "eos_token_id": isinstance(config.get("eos_token_id"), list),
        "indexer_types": len(config.get("indexer_types") or []) == config.get("num_hidden_layers"),
        "rope_parameters": "rope_theta" in (config.get("rope_parameters") or {}),
    }
    return [key for key, good in needs.items() if not good]


def is_off_cut(rule: TensorRule, size: int) -> bool:
    """Whether an axis that ranks cut falls between blocks, or vocabulary rows, for TP of them (`tp-cut`)."""
    return size % (TP if rule.split is Split.ROW else TP * BLOCK) != 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule: what was found, and every name it concerns."""

    rule: str
    message: str
    names: tuple[str, ...]

    @property
    def engines(self) -> tuple[str, ...]:
        """Who refuses or misreads the checkpoint because of it."""
        return RULES[self.rule].engines

    def counts_for(self, engine: Engine) -> bool:
        """Whether it is a refusal when `engine` is asked for; a note otherwise."""
        return RULES[self.rule].contract if engine is Engine.ALL else NAMES[engine] in self.engines

    @property
    def brief(self) -> str:
        """The rule and whom it concerns, without names."""
        return f"{self.rule}: {RULES[self.rule].says} ({self._whom})"

    @property
    def _whom(self) -> str:
        refusing = ", ".join(engine for engine in self.engines if engine != PROOF)
        return f"refused or misread by {refusing}" if refusing else PROOF

    def __str__(self) -> str:
        return f"{self.rule}: {self.message} ({self._whom})"


def broken(rule: str, cases: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """One finding for all (name, what was found) cases of a rule, none if there are none."""
    found = list(cases)
    if found:
        shown = "; ".join(f"{name} {what}" for name, what in found[:SHOWN])
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        names = tuple(name for name, _ in found)
        yield Finding(rule, f"{RULES[rule].says}, but {shown}{more}", names)


@dataclass(slots=True)
class Checkpoint:
    """An output as far as it could be read; parts that could not are None or empty and have their finding."""

    root: Path
    stored: ShardedSource
    rules: dict[str, TensorRule]
    glm: GlmConfig | None
    quantization: dict[str, Any]
    report: dict[str, Any]
    weight_map: dict[str, str]
    reference: ShardedSource | None
    recipe: Recipe | None
    deep: bool = False
    sample: int = 0
    progress: Progress = field(default_factory=Progress)
    widths: dict[str, float] = field(default_factory=dict)
    """Bits per weight by source tensor name, from the trellis shapes."""

    @property
    def config(self) -> dict[str, Any]:
        return self.stored.config

    @property
    def profile(self) -> str:
        """The declared profile; checkpoints from before there were any have a width per expert."""
        return self.quantization.get("profile", "per-expert")

    def experts(self, layer: int) -> dict[int, int]:
        """Width by expert of a layer, for experts whose width is known."""
        return {rule.expert: self.widths[rule.name] for rule in self.rules.values()
                if rule.layer == layer and rule.expert is not None and rule.name in self.widths}

    def mean(self, names: Iterable[str]) -> Fraction | None:
        """Exact mean width of some linears, weighted by their unpadded weights; None if one is unknown."""
        bits, weights = 0, 0
        for name in names:
            if name not in self.widths:
                return None
            bits += self.widths[name] * self.rules[name].numel
            weights += self.rules[name].numel
        return Fraction(bits) / weights if weights else None
