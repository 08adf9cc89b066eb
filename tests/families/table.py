"""README's table of supported models: one row per model file of mlx-lm, none left out."""

from __future__ import annotations

from pathlib import Path

import mlx_lm.models

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.cache_spec import CacheSpec, Layout
from mlx_cb.model.probe import probe
from tests.families.build import build
from tests.families.configs import FAMILIES

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- supported models: written by scripts/supported_models.py -->"
END = "<!-- end of supported models -->"
HEADER = "| family | layout | status | a token keeps | a request keeps |\n|---|---|---|---|---|"

#: Families that cannot be served, or (muse_spark) not be proven without a GPU.
REFUSED = {"deepseek_v41", "muse_spark", "olmo", "phi3small", "plamo3"}


def model_files() -> list[str]:
    """Every file in mlx-lm's folder of models, with or without a model in it."""
    (folder,) = mlx_lm.models.__path__
    return sorted(path.stem for path in Path(folder).glob("*.py"))


def row_of(family: str, spec: CacheSpec) -> str:
    """A row for a family that is equal. Sizes are per token and in numbers stored, not bytes."""
    elements = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in spec.layers)
    kept = f"{describe(spec)} ({elements} numbers here)" if spec.layers else "nothing"
    state = f"{spec.state_bytes // 1024 or '<1'} KiB here" if spec.is_recurrent else "–"
    return f"| {family} | {spec.layout.name} | equal | {kept} | {state} |"


def describe(spec: CacheSpec) -> str:
    """What the attention layers keep per token, by kind of layer."""
    counts: dict[str, int] = {}
    for layer in spec.layers:
        kind = "in full" if layer.window is None else "in a window"
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} × {kind}" for kind, count in counts.items())


def refused_row(family: str) -> str:
    """A row for a family that is refused, with the reason given at load."""
    try:
        probe(build(family), family)
    except UnsupportedModel as error:
        reason = error.message.split(": ", 1)[1]
        return f"| {family} | – | refused: {reason} | – | – |"
    raise AssertionError(f"{family} is not refused")


def other_row(name: str) -> str:
    """A row for a file that holds no model."""
    return f"| {name} | – | no model: shared code | – | – |"


def recorded_rows() -> dict[str, str]:
    """README's rows by family."""
    text = README.read_text().split(BEGIN)[1].split(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def counts(rows: dict[str, str]) -> dict[str, int]:
    """How many rows have which layout, are refused, or hold no model."""
    found = {layout.name: 0 for layout in Layout} | {"refused": 0, "no model": 0}
    for row in rows.values():
        cells = row.split(" | ")
        kind = cells[1] if cells[2] == "equal" else cells[2].split(":")[0]
        found[kind] += 1
    return found


def is_family(name: str) -> bool:
    """True for a file that holds a model."""
    return name in FAMILIES
