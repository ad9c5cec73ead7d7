"""A second EXL3 decoder, from the format notes alone, in Python integers and numpy; shares no code with keys35."""

import numpy as np


def half(bits: int) -> np.float16:
    return np.array([bits], dtype=np.uint16).view(np.float16)[0]


def codebook_value(state: int, codebook: str) -> np.float16:
    if codebook == "mul1":
        x = (state * 2212286765) % 2**32
        total = sum(x.to_bytes(4, "little"))
        exact = (1024 + total) * float(half(0x1EEE)) + float(
            half(0xC931)
        )  # exact in float64, one rounding below
        return np.float16(exact)
    x = state * 3417055213 % 2**32 if codebook == "mcg" else (state * 89226354 + 64248484) % 2**32
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return half(x & 0xFFFF) + half(x >> 16)


def tile_states(words: np.ndarray, bits: float) -> list[int]:
    """The 256 states of one tile from its stored int16 words, bit by bit."""
    stream = ""
    for word in words.astype("<i2").view("<u4").tolist():
        stream += format(word, "032b")
    assert len(stream) == 256 * bits
    states, end = [], 0
    for p in range(256):
        end += int(bits) + (p % 2 if bits % 1 else 0)
        states.append(int("".join(stream[i % len(stream)] for i in range(end - 16, end)), 2))
    return states


def element(p: int) -> tuple[int, int]:
    """Row and column of ring position p inside its tile."""
    t, j = p >> 3, p & 7
    return 2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1), (t >> 2) + 8 * (j >> 2)


def rotated_weight(trellis: np.ndarray, codebook: str = "mul1") -> np.ndarray:
    """The decoded codebook values of a trellis, float16 (k, n)."""
    table = np.array([codebook_value(s, codebook) for s in range(65536)], dtype=np.float16)
    tile_rows, tile_columns, words = trellis.shape
    weight = np.empty((16 * tile_rows, 16 * tile_columns), dtype=np.float16)
    for a in range(tile_rows):
        for c in range(tile_columns):
            for p, state in enumerate(tile_states(trellis[a, c], words / 16)):
                row, column = element(p)
                weight[16 * a + row, 16 * c + column] = table[state]
    return weight


def hadamard() -> np.ndarray:
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]) / np.sqrt(128)


def decode(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str = "mul1") -> np.ndarray:
    """The whole weight in float64, (k, n)."""
    k, n = 16 * trellis.shape[0], 16 * trellis.shape[1]
    left = np.kron(np.eye(k // 128), hadamard())
    right = np.kron(np.eye(n // 128), hadamard())
    rotated = rotated_weight(trellis, codebook).astype(np.float64)
    return suh.astype(np.float64)[:, None] * (left @ rotated @ right) * svh.astype(np.float64)
