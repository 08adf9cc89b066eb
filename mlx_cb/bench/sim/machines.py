"""The machines and models that are simulated: numbers with their source, and what fits into memory.

Source of all numbers: performance.md §2; bandwidths of M4 and M5 and prefill rates from the reports
named there. F of M1, M2 Pro and M5 is the weakest, ±20 %. No Mac was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cb.errors import InvalidRequest

WORKSPACE_GB = 0.8  # of the working set, for activations and MLX's own cache


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as the cost formula sees it.

    Attributes:
        bandwidth: bytes/s of memory.
        flops: FLOP/s that matrix products reach.
        vector_limit: rows from which MLX takes the tiled kernel (`get_qmv_batch_limit`).
        tile_rows: rows that a tile computes whether they are there or not.
        layer_us: fixed time per layer, µs.
        wide_vectors: MLX's wide vector kernel (generation 15 on: M3 and later).
        kv_efficiency: part of the bandwidth that reading keys and values reaches.
    """

    name: str
    bandwidth: float
    flops: float
    vector_limit: int
    tile_rows: int
    layer_us: float
    wide_vectors: bool
    kv_efficiency: float = 0.55


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `chosen` of `count` per token, `bytes` of all of them."""

    count: int
    chosen: int
    bytes: float
    dense_bytes: float

    def bytes_read(self, rows: int) -> float:
        """Expected weight bytes of a pass, rows choosing independently."""
        untouched = (1 - self.chosen / self.count) ** rows
        return self.dense_bytes + self.bytes * (1 - untouched)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the cost formula sees it.

    Attributes:
        weight_bytes: read per pass by a dense model.
        parameters: multiplied per row.
        kv_bytes: keys and values of one token, fp16.
        attention_width: query heads times head size.
        file_bytes: weights in memory.
    """

    name: str
    weight_bytes: float
    parameters: float
    kv_bytes: int
    layers: int
    file_bytes: float
    attention_width: int = 4096
    max_tokens: int = 32768
    experts: Experts | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("M1", 68e9, 1.7e12, 6, 32, 110, False),
        Chip("M2 Pro", 200e9, 4.3e12, 6, 32, 90, False),
        Chip("M3 Max", 400e9, 10.5e12, 13, 32, 70, True),
        Chip("M4 Max", 546e9, 12.7e12, 13, 32, 50, True),
        Chip("M5", 153e9, 12.5e12, 13, 64, 65, True),
        Chip("M3 Ultra", 819e9, 22e12, 12, 32, 75, True),
        Chip("M5 Max", 614e9, 42e12, 13, 64, 60, True),
    )
}

MODELS = {
    model.name: model
    for model in (
        ModelShape("Llama-3.1-8B-4bit", 4.22e9, 7.50e9, 131_072, 32, 4.52e9),
        ModelShape(
            "Qwen3-30B-A3B-4bit",
            1.70e9,
            3.03e9,
            98_304,
            48,
            17.2e9,
            experts=Experts(128, 8, 15.9e9, 0.70e9),
        ),
    )
}


def chip_named(name: str) -> Chip:
    """Case and spaces do not matter. Raises InvalidRequest for a chip that is not modelled."""
    return CHIPS[_match(name, list(CHIPS), "chip")]


def model_named(name: str) -> ModelShape:
    """The one whose name contains this. Raises InvalidRequest for none or several."""
    return MODELS[_match(name, list(MODELS), "model")]


def _match(name: str, names: list[str], what: str) -> str:
    def plain(text: str) -> str:
        return text.lower().replace(" ", "").replace("-", "")

    exact = [known for known in names if plain(known) == plain(name)]
    found = exact or [known for known in names if plain(name) in plain(known)]
    if len(found) != 1:
        raise InvalidRequest(f"no {what} {name!r} is modelled; there are: {', '.join(names)}")
    return found[0]


def kv_room(model: ModelShape, memory_gb: float) -> float:
    """Bytes left for keys and values on a machine of that memory.

    The GPU's working set is taken as 2/3 of up to 32 GB and 3/4 of more.
    Raises InvalidRequest when the model does not fit.
    """
    working_set = memory_gb * 2**30 * (2 / 3 if memory_gb <= 32 else 3 / 4)
    room = working_set - model.file_bytes - WORKSPACE_GB * 1e9
    if room < 2**28:
        raise InvalidRequest(f"{model.name} does not fit into {memory_gb:g} GB")
    return room
