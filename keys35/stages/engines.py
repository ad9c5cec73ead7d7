"""Who reads a finished checkpoint. Free of heavy imports, so that the command line can name them at once."""

from enum import StrEnum


class Engine(StrEnum):
    """What `check` is asked for: the whole contract, or one engine's refusals and its own extra ones."""

    ALL = "all"
    TENSORFOLD = "tensorfold"
    EXLLAMAV3 = "exllamav3"
    VLLM_EXL3 = "vllm-exl3"

    @property
    def asked(self) -> str:
        """What was asked for, in words."""
        return "the contract" if self is Engine.ALL else NAMES[self]


TENSORFOLD, EXLLAMA, VLLM, B12X = "TensorFold", "exllamav3", "vllm-exl3", "b12x"
TRANSFORMERS, SAFETENSORS, HUB, PROOF = "transformers", "safetensors", "Hugging Face Hub", "proof of origin"
NAMES = {Engine.TENSORFOLD: TENSORFOLD, Engine.EXLLAMAV3: EXLLAMA, Engine.VLLM_EXL3: VLLM}
