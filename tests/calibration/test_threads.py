"""The same bytes whatever the number of threads: Hessians, the scales and the encodings that follow from them."""

import os
import subprocess
import sys

CODE = """
import hashlib, os
import keys35, torch
from keys35.calibration.compensation import corrected_downs
from keys35.calibration.correction import PairedInputs
from keys35.calibration.statistics import MoeRows, expert_hessians
from keys35.exl3.encode import EncodeOptions, LinearJob, encode_group
from keys35.exl3.hessian import factor_hessian
from keys35.exl3.scale import ScalePowers, regularise
from keys35.precision import cholesky, vector_sum
from keys35.recipe import Calibration
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # as numba does; LAPACK takes it more to heart
torch.manual_seed(0)
signs = torch.ones(512), torch.ones(128)
scales = [regularise(torch.randn(512, 128), *signs, None, ScalePowers(0, 0, 0)).sv for _ in range(50)]  # one block
x = torch.randn(1920, 128)
rows = MoeRows(x, torch.randint(0, 2, (1920, 1)), torch.rand(1920, 1))
gate, up = torch.randn(2, 128, 512)
found = expert_hessians(rows, x.T @ x / 1920, 0, gate, up, Calibration())
weight = torch.randn(512, 128)
down = LinearJob("down", weight, "inner")
coded = encode_group([down], {"inner": found.down}, [4], EncodeOptions(backend="cpu"), 35)["down", 4]
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # the search leaves its own
feedback = factor_hessian(found.down, torch.ones(512), 0.025).feedback  # a last bit of it seldom changes the code
[corrected] = corrected_downs(rows, 0, (gate, up, weight), {2: (0.8 * gate, 0.8 * up)}, Calibration()).values()
assert not torch.equal(corrected, weight)
wide, sums = torch.randn(4096, 512), PairedInputs()
sums.add(wide, 0.9 * wide, torch.arange(4096) % 2 == 0)
digest, behind = hashlib.sha256(), sums.corrected(weight)
for tensor in (found.gate_up, found.down, coded.trellis, coded.suh, coded.svh, feedback, corrected, behind,
               cholesky(wide.T @ wide)[0], vector_sum(torch.rand(100_000)), *scales):
    digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""


def test_bytes_do_not_depend_on_the_number_of_threads():
    seen = set()
    for threads in ("1", "2", "3"):
        environment = os.environ | {"OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1
