"""The two-pass tail-biting search in plain numpy float64, one tile at a time, any width; shares no code with keys35."""

import numpy as np
from reference_decoder import codebook_value

TABLE = np.array([codebook_value(s, "mul1") for s in range(65536)]).astype(np.float64)


def _new_bits(p: int, bits: float) -> int:
    return int(bits) + (p % 2 if bits % 1 else 0)


def _run(x: np.ndarray, bits: float, first: int, costs: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Advance a whole ring; returns the final costs and, per step, the state by which each node is reached best."""
    choices = []
    states = np.arange(65536)
    for step in range(256):
        p = (first + step) % 256
        total = costs[states >> _new_bits(p, bits)] + (TABLE - x[p]) ** 2
        by_node = total.reshape(1 << _new_bits(p + 1, bits), -1)  # a node keeps all but a state's oldest bits
        top = by_node.argmin(0)
        choices.append(top * by_node.shape[1] + np.arange(by_node.shape[1]))
        costs = by_node.min(0)
    return costs, choices


def _walk_back(
    choices: list[np.ndarray], bits: float, first: int, node: int, steps: int
) -> tuple[list[int], int]:
    states = []
    for step in range(255, 255 - steps, -1):
        state = int(choices[step][node])
        states.append(state)
        node = state >> _new_bits((first + step) % 256, bits)
    return states[::-1], node


def encode(x: np.ndarray, bits: float) -> list[int]:
    """The 256 states of a tile x, (256,) in ring order."""
    nodes = 1 << (16 - _new_bits(0, bits))
    costs, choices = _run(x, bits, 128, np.zeros(nodes))
    _, node = _walk_back(choices, bits, 128, int(costs.argmin()), 128)
    start = np.full(nodes, np.inf)
    start[node] = 0
    _, choices = _run(x, bits, 0, start)
    states, first_node = _walk_back(choices, bits, 0, node, 256)
    assert first_node == node
    return states
