"""What a layer's errors are worth, against whole forward passes of models that are perturbed by hand."""

import pytest
import torch

from keys35.glm.stream import Head, embed, trunk
from keys35.glm.weights import Keep, Overlay, WeightStore
from keys35.stages.candidates import Candidates
from keys35.stages.capture import calibration_windows
from keys35.stages.costs import read_measured
from keys35.stages.job import resume_job
from keys35.stages.sensitivity import LEAST, TOGETHER, a_unit


class Changed(WeightStore):
    """The source with other matrices (in, out) in some layers."""

    def but(self, matrices):
        self.matrices = matrices
        return self

    def layer(self, layer, keep=Keep.DENSE):
        return Overlay(super().layer(layer, keep), self.matrices.get(layer, {}))


@pytest.fixture(scope="module")
def weighed(tiny):
    with resume_job(tiny.work) as job:
        windows = calibration_windows(job)["selection"].head(job.recipe.calibration.sensitivity_windows)
        middle = job.recipe.experts.widths[len(job.recipe.experts.widths) // 2]
        lossy = {layer: dict(Candidates(job, layer).decoded([middle] * job.experts)) for layer in job.config.moe_layers}
        doubled = {layer: {module: 2 * matrix - job.source.read(f"model.layers.{layer}.{module}.weight").float().T
                           for module, matrix in found.items()} for layer, found in lossy.items()}
        sets = {TOGETHER: lossy} | {layer: lossy | {layer: doubled[layer]} for layer in doubled}

        def logits(matrices):
            store = Changed(job.source, job.config).but(matrices)
            hidden = trunk(store, embed(store, list(windows.tokens)))
            return torch.stack([Head.of_trunk(store)(states).double() for states in hidden]).log_softmax(-1)

        exact = logits({})
        kl = {}
        for name, matrices in sets.items():
            of_window = (exact.exp() * (exact - logits(matrices))).sum(-1).mean(1)
            kl[name] = [float(of_window[windows.domain == d].mean()) for d in range(len(windows.domains))]
        return job.work.require("measure/sensitivity")["data"], kl, read_measured(job), middle


def test_weights_are_those_of_models_perturbed_by_hand(weighed):
    found, kl, measured, middle = weighed
    assert len(found["alpha"]) > 1 and found["together"] == pytest.approx(kl[TOGETHER], rel=5e-3)
    column = measured.widths.index(middle)
    for place, layer in enumerate(measured.layers):
        rise = [max((loud - all_of_it) / 3, LEAST * all_of_it / len(measured.layers))
                for loud, all_of_it in zip(kl[layer], kl[TOGETHER], strict=True)]
        assert found["kl"][str(layer)] == pytest.approx(rise, rel=1e-2)
        worth = measured.alpha[place] * measured.error[place][:, column].sum(0)
        assert worth == pytest.approx(found["kl"][str(layer)], rel=1e-9)


def test_all_experts_at_the_middle_width_cost_what_was_found_together(weighed):
    found, _, measured, middle = weighed
    chosen = [[middle] * len(layer) for layer in measured.error]
    together = sum(share * nats for share, nats in zip(measured.share, found["together"], strict=True))
    assert measured.predicted_kl(chosen) == pytest.approx(together, rel=1e-9)


def test_a_domain_in_which_no_perturbed_expert_is_chosen_has_the_weight_of_the_others():
    """A layer counts for something in every domain, and something over nothing outweighed all other layers."""
    nats, error = (torch.tensor(values, dtype=torch.float64) for values in ([0.02, 0.01, 0.03], [2.0, 0.0, 4.0]))
    assert a_unit(nats, error).tolist() == pytest.approx([0.01, 0.01, 0.0075])
    assert a_unit(nats, 0 * error).tolist() == [0.0, 0.0, 0.0], "a layer of zeros"
