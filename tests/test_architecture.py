"""The table of rooms: who may import whom. A new arrow is a decision and is made here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mlx_cb"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Everyone may import these.
COMMON = {"errors", "config", "sampling_params", "standing"}

#: Room -> rooms (or modules of rooms) that it may import besides COMMON and itself.
ARROWS: dict[str, set[str]] = {
    "__init__": {"engine"},
    "__main__": {"cli"},
    "errors": set(),
    "config": set(),
    "sampling_params": set(),
    "standing": set(),
    "blas": set(),
    "core": set(),
    # Files of blocks: bytes by content hash. Only the engine moves blocks in and out.
    "ssd": set(),
    "attention": {"blas"},
    "model": {"attention", "blas", "core"},
    # llm.py turns text into tokens and back, which is what makes it a Python API.
    "engine": {"blas", "core", "model", "ssd", "text"},
    "text": {"core.outputs"},
    "server": {"engine.client", "engine.interface", "engine.scripted", "core.outputs", "text"},
    "bench": {"blas", "core", "engine", "server.client"},
    "cli": {"*"},
}

#: Outside packages that a room must not touch.
FORBIDDEN: dict[str, set[str]] = {
    "core": {"mlx", "mlx_lm", "threading", "asyncio", "time", "numpy"},
    "server": {"mlx", "mlx_lm"},
    "ssd": {"mlx", "mlx_lm", "asyncio"},
    "text": {"mlx", "starlette"},
    "engine": {"mlx", "mlx_lm", "starlette"},
    "errors": {"mlx", "mlx_lm"},
    "config": {"mlx", "mlx_lm", "os"},
}

MAX_LINES = 400
MAX_FUNCTION_LINES = 60


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    room = room_of(path)
    assert room in ARROWS, f"{room} is not in the table of rooms"
    for name in imports(ast.parse(path.read_text())):
        top, _, inner = name.partition(".")
        assert top not in FORBIDDEN.get(room, set()), f"{room} must not import {top}"
        if top != "mlx_cb" or not inner:
            continue
        target = inner.split(".")[0]
        if target == room or target in COMMON or "*" in ARROWS[room]:
            continue
        allowed = any(inner == arrow or inner.startswith(f"{arrow}.") for arrow in ARROWS[room])
        assert allowed, f"a new arrow: {room} -> {inner}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, "split the concept, not the text"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_no_cycles_between_rooms() -> None:
    arrows: dict[str, set[str]] = {}
    for path in FILES:
        room = room_of(path)
        for name in imports(ast.parse(path.read_text())):
            if name.startswith("mlx_cb."):
                target = name.split(".")[1]
                if target != room:
                    arrows.setdefault(room, set()).add(target)

    def visit(room: str, trail: tuple[str, ...]) -> None:
        assert room not in trail, f"cycle: {' -> '.join((*trail, room))}"
        for target in arrows.get(room, set()):
            visit(target, (*trail, room))

    for room in arrows:
        visit(room, ())
