"""Refuses kernel text that Apple's compiler would refuse, as far as clang and text rules can tell.

clang's OpenCL C++ front end checks address spaces, types, overloads and banned C++ (no std, new,
exceptions, VLAs, function pointers, double). The text rules catch what it lets pass. What neither
sees is listed in README.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from .rewrite import threadgroup_arrays
from .toolchain import syntax_check

_PRELUDE = (Path(__file__).parent / "lint_prelude.cl").read_text()
_ARRAY = "threadgroup {type} (&{name}){dims} = *(threadgroup {type} (*){dims})lint_arena();"

# what is wrong, where it shows
TEXT_RULES = {
    "a float literal needs the suffix f": r"(?<![\w.])\d+\.\d*(?:e[+-]?\d+)?(?![\w.])",
    "no lambdas": r"\[[&=]?\]\s*\(",
    "no static variables": r"^\s*static\s",
    "no std": r"\bstd::",
    "no goto": r"\bgoto\b",
    "no 64-bit floats": r"\bdouble\b",
    "no dynamic casts of qualifiers": r"\b(?:const|reinterpret|dynamic)_cast\b",
    "no structs or classes with methods": r"\b(?:struct|class)\s+\w+\s*\{",
    "convert with static_cast<T>(x): T(x) is ambiguous for bfloat": r"(?<![\w<(])T\(",
}


def lint_text(text: str) -> list[str]:
    """Complaints of the text rules, with line numbers of `text`."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for rule, pattern in TEXT_RULES.items():
            if re.search(pattern, line):
                found.append(f"line {number}: {rule}: {line.strip()}")
    return found


def lint(text: str) -> list[str]:
    """All complaints about one captured kernel; empty when it is clean."""
    found = lint_text(text)
    text = re.sub(r"^#include <metal_\w+>$", "", text, flags=re.M)  # all is in the prelude
    body = re.sub(r"\[\[[^\]]*\]\]", "", text)
    body = re.sub(r"\bstatic_cast<", "lint_cast<", threadgroup_arrays(body, _ARRAY))
    complaints = syntax_check(_PRELUDE + body)
    found += [line for line in complaints.splitlines() if ": error:" in line]
    if complaints and not found:
        found.append(complaints[:400])
    return found
