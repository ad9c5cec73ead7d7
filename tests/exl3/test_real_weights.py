"""The bundled trained model: weights and activations that are not made up."""

import pytest
from builders_exl3 import DEMO, demo_config, demo_windows
from torch import Tensor

from keys35.exl3.encode import EncodeOptions, LinearJob, encode_group
from keys35.exl3.linear import decode_weight
from keys35.exl3.scale import ScalePowers
from keys35.files.source import ShardedSource
from keys35.glm.block import Observer
from keys35.glm.stream import embed, trunk
from keys35.glm.weights import WeightStore

MODULES = [f"model.layers.{name}" for name in ("1.self_attn.o_proj", "0.mlp.gate_proj", "2.self_attn.q_b_proj")]
PLAIN = EncodeOptions(backend="cpu", refit_rounds=0)
UNSCALED = EncodeOptions(backend="cpu", powers=ScalePowers(1, 1, 0), scaled_metric=False)


class InputHessians(Observer):
    def __init__(self) -> None:
        self.hessians: dict[str, Tensor] = {}

    def linear_input(self, modules: tuple[str, ...], rows: Tensor, where: Tensor) -> None:
        for module in set(modules) & set(MODULES):
            self.hessians[module] = rows.float().T @ rows.float() / len(rows)


@pytest.fixture(scope="module")
def source() -> ShardedSource:
    return ShardedSource.open(DEMO / "model")


@pytest.fixture(scope="module")
def hessians(source: ShardedSource) -> dict[str, dict[str, Tensor]]:
    """Per text, the mean of x x^T of the inputs of MODULES."""
    found = {}
    store = WeightStore(source, demo_config())
    for text in ("calibration", "eval"):
        observer = InputHessians()
        trunk(store, embed(store, demo_windows(f"{text}-prose.txt", 8, 256)), observer=observer)
        found[text] = observer.hessians
    return found


@pytest.mark.parametrize("module", MODULES)
def test_the_default_beats_plain_rounding_on_unseen_text(source, hessians, module: str) -> None:
    weight = source.read(f"{module}.weight").float().T.contiguous()
    seen, unseen = (hessians[text][module].double() for text in ("calibration", "eval"))

    def errors(hessian: str | None, options: EncodeOptions) -> list[float]:
        job = LinearJob(module, weight, hessian)
        encoded = encode_group([job], {"h": seen.float()}, [4], options, 0)[module, 4]
        wrong = (weight - decode_weight(encoded.trellis, encoded.suh, encoded.svh)).double()
        energy = [(weight * (judge @ weight.double())).sum() for judge in (seen, unseen)]
        return [float((wrong * (h @ wrong)).sum() / e) for h, e in zip((seen, unseen), energy, strict=True)]

    default, unscaled, plain = errors("h", EncodeOptions(backend="cpu")), errors("h", UNSCALED), errors(None, PLAIN)
    for text, ours, rounded in zip(("calibration", "unseen"), default, plain, strict=True):
        print(f"{module}, {text} text: LDLQ+refit {ours:.3e}, plain rounding {rounded:.3e}, ratio {ours / rounded:.2f}")
    assert default[0] < 0.95 * unscaled[0] and unscaled[0] < 0.85 * plain[0]
    assert default[1] < 0.75 * plain[1]
