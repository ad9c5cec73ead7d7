"""keys35: stream a BF16 mixture-of-experts checkpoint into a small EXL3 one."""

import os

__version__ = "0.1.0"

# MKL splits a product's inner dimension by the number of threads unless it is told to be reproducible. Set before
# torch first uses it, so that a job's bytes do not depend on how many cores it was given.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
