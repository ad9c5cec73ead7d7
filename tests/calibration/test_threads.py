"""The same bytes whatever the number of threads: Hessians, the scales and the encodings that follow from them."""

import os
import subprocess
import sys

CODE = """
import hashlib, sys
import keys35, torch
from keys35.calibration.statistics import MoeRows, expert_hessians
from keys35.exl3.encode import EncodeOptions, LinearJob, encode_group
from keys35.recipe import Calibration
torch.manual_seed(0)
x = torch.randn(1920, 128)
rows = MoeRows(x, torch.randint(0, 2, (1920, 1)), torch.rand(1920, 1))
gate, up = torch.randn(2, 128, 384)
found = expert_hessians(rows, x.T @ x / 1920, 0, gate, up, Calibration())
down = LinearJob("down", torch.randn(384, 128), "inner")
coded = encode_group([down], {"inner": found.down}, [4], EncodeOptions(backend="cpu"), 35)["down", 4]
digest = hashlib.sha256()
for tensor in (found.gate_up, found.down, coded.trellis, coded.suh, coded.svh):
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
