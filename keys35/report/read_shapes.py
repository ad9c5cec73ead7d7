"""Reads widths from the trellis shapes of the shards beside it: `python read_shapes.py FOLDER`."""
import json
import struct
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

folder = Path(sys.argv[1])
trunk = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
bits, weights, widths, total = 0, 0, Counter(), 0
for shard in sorted(folder.glob("*.safetensors")):
    with open(shard, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    for name, tensor in header.items():
        total += tensor["data_offsets"][1] - tensor["data_offsets"][0] if name != "__metadata__" else 0
        if ".mlp.experts." in name and name.endswith(".trellis") and int(name.split(".")[2]) < trunk:
            rows, columns, words = tensor["shape"]
            bits, weights = bits + rows * columns * words * 16, weights + rows * columns * 256
            widths[f"{words / 16:g}"] += ".down_proj." in name
print(json.dumps({"mean": str(Fraction(bits, weights)), "experts": dict(sorted(widths.items())), "bytes": total}))
