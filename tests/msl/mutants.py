"""Seeded bugs: one small change of a kernel's text each, of the kinds that people make.

A mutant is killed when, on some case of its kernel, the answer leaves its tolerance, the bench
finds something, or the bits change with the order of execution. A mutant that survives fails the
suite.
"""

from __future__ import annotations

from dataclasses import dataclass

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Mutant:
    """`old` (its `nth` occurrence, from 0) becomes `new` in metal/kernels/<kernel>.metal."""

    kernel: str
    label: str
    old: str
    new: str
    nth: int = 0

    def apply(self, source: str) -> str:
        """The mutated text. Raises ValueError when `old` is not there: the list is out of date."""
        at = -1
        for _ in range(self.nth + 1):
            at = source.find(self.old, at + 1)
            if at < 0:
                raise ValueError(f"{self.kernel}: {self.label}: text not found: {self.old!r}")
        return source[:at] + self.new + source[at + len(self.old) :]


def _of(kernel: str, *rows: tuple) -> list[Mutant]:
    return [Mutant(kernel, *row) for row in rows]


MUTANTS = [
    *_of(
        "paged_decode",
        ("no barrier before the tile is loaded", BARRIER, "", 0),
        ("no barrier after the tile is loaded", BARRIER, "", 1),
        ("no barrier before the exchange", BARRIER, "", 2),
        ("no barrier after the exchange", BARRIER, "", 3),
        ("barrier by one lane only", BARRIER, "if (lane == 0) { " + BARRIER + " }", 3),
        ("block table ignored", "size_t(block_tables[table + t / BS])", "size_t(t / BS)", 2),
        (
            "block table ignored in the K tile",
            "size_t(block_tables[table + t / BS])",
            "size_t(t / BS)",
            0,
        ),
        (
            "block table ignored in the V tile",
            "size_t(block_tables[table + t / BS])",
            "size_t(t / BS)",
            1,
        ),
        ("table row of another sequence", "size_t(seq) * max_blocks", "size_t(0) * max_blocks"),
        ("half of the keys of a step", "u < KU", "u < (KU + 1) / 2", 2),
        ("maximum over half of the keys", "u < KU", "u < (KU + 1) / 2", 1),
        ("neighbour key of the step", "i + u * NK, t", "i + u, t"),
        ("wrong KV head", "* kv_heads + group) * BS + t % BS;", "* kv_heads) * BS + t % BS;", 2),
        (
            "one token too many",
            "const int last = PART > 0 ? min(context, first + PART) : context;",
            "const int last = PART > 0 ? min(context, first + PART) : context + 1;",
        ),
        ("one token too few", "at < TILE && t < last;", "at < TILE && t < last - 1;"),
        ("partition runs into the next", "min(context, first + PART)", "context"),
        ("partition one short", "first + PART) : context", "first + PART - 1) : context"),
        ("slot in block ignored", "t % BS;", "0;", 2),
        ("wrong query head", "heads + group * G + slot % G) * D", "heads + slot % G) * D"),
        (
            "output head of another group",
            "const int head = group * G + slot % G;",
            "const int head = slot % G;",
        ),
        ("no rescale of the sum", "l[h] *= decay;", ""),
        ("no rescale of the output", "o[h][e] *= decay;", ""),
        ("row 0 sees the newest token", "(t > position ||", "(t > position + 1 ||"),
        ("window off by one", "context - ROWS + 1 - window)", "context - ROWS - window)"),
        ("window of row 1", "t + window <= position", "t + window < position"),
        (
            "softcap after log2e",
            "soft_cap(dot, scalars[1]) * LOG2E",
            "soft_cap(dot * LOG2E, scalars[1])",
        ),
        ("sink of the first head", "sinks[min(head, heads - 1)]", "sinks[0]"),
        (
            "sink not in base 2",
            "float(sinks[min(head, heads - 1)]) * LOG2E",
            "sinks[min(head, heads - 1)]",
        ),
        ("spare slots written", "if (slot < SLOTS) {\n        out", "if (true) {\n        out"),
        (
            "partials of another partition",
            "(target * partitions + part) * 2]",
            "(target * partitions) * 2]",
        ),
        ("scale forgotten", "* scalars[0] *", "*"),
        ("empty context divides by zero", "l_all > 0.0f ? norm / l_all : 0.0f", "norm / l_all"),
        ("shared output one simdgroup too small", "NH * NK * DV : 1]", "NH * NK * DV - DV : 1]"),
        (
            "sum over half the keys",
            "for (int j = 0; j < NK; j++) {\n      l_all +=",
            "for (int j = 0; j < NK / 2; j++) {\n      l_all +=",
        ),
        (
            "int32 overflow of a pool index",
            "(size_t(block_tables[table + t / BS]) * kv_heads + group) * BS + t % BS",
            "size_t((block_tables[table + t / BS] * 100000000 + group) * BS + t % BS)",
            2,
        ),
    ),
    *_of(
        "paged_decode_merge",
        (
            "reads a partition too many",
            "(context - start + PART - 1) / PART",
            "(context - start + PART) / PART + 1",
        ),
        (
            "misses the last partition",
            "(context - start + PART - 1) / PART",
            "(context - start) / PART",
        ),
        ("no maximum", "m = simd_max(m);", ""),
        ("lane-local sum", "l = simd_sum(l);", ""),
        ("sum in one lane", "l = simd_sum(l);", "if (lane == 0) { l = simd_sum(l); }"),
        (
            "weights not rescaled",
            "fast::exp2(ml_part[(base + p) * 2] - m);\n  }\n  out",
            "1.0f;\n  }\n  out",
        ),
        ("row not mapped to its sequence", "context_lens[row / ROWS]", "context_lens[row]"),
        ("sink forgotten", "l += fast::exp2(float(sinks[head]) * LOG2E - m);", ""),
        ("ignores the window", "const int start = WINDOW ?", "const int start = false ?"),
    ),
    *_of(
        "paged_prefill",
        ("no barrier before the tile is loaded", BARRIER, "", 0),
        ("no barrier after the tile is loaded", BARRIER, "", 1),
        ("early return before the barrier", BARRIER, "if (!active) { return; } " + BARRIER, 0),
        ("block table ignored", "size_t(block_tables[table + t / BS])", "size_t(t / BS)", 0),
        (
            "stale values not zeroed",
            "const bool seen = t >= first && t < last;",
            "const bool seen = true;",
            1,
        ),
        ("wrong KV head", "group = head / G;", "group = head % G;"),
        ("not causal", "t > position ||", "false ||"),
        ("causal off by one", "t > position ||", "t >= position ||"),
        ("window off by one", "t + window <= position)", "t + window < position)"),
        ("left edge of the window", "offset + row0 + 1 - window)", "offset + row0 + 9 - window)"),
        ("interior test too wide", "t0 + TKV - 1 > low ||", "t0 + TKV - 1 > high ||"),
        ("chunk position ignored", "- q_count;", "- q_count - 1;"),
        ("row reduction misses a lane pair", "top = max(top, simd_shuffle_xor(top, 8));", ""),
        ("wrong shuffle", "sum += simd_shuffle_xor(sum, 8);", "sum += simd_shuffle_xor(sum, 4);"),
        ("no rescale of the output", "o[n].thread_elements()[0] *= decay;", ""),
        (
            "key not transposed",
            "k_tile[(j * 8 + c) * LDK + d + r]",
            "k_tile[(j * 8 + r) * LDK + d + c]",
        ),
        (
            "tail rows written",
            "if (row < q_end) {\n  const size_t target",
            "if (true) {\n  const size_t target",
        ),
        ("wrong sink", "float(sinks[head]) * LOG2E", "float(sinks[group]) * LOG2E"),
        (
            "keys behind the chunk not zeroed",
            "const bool seen = t >= first && t < last;",
            "const bool seen = t >= first;",
            1,
        ),
        ("value columns of the other half", "% DSPLIT * (DV / DSPLIT);", "% DSPLIT * 0;"),
        (
            "first row of the work list ignored",
            "row0 = work[2 * threadgroup_position_in_grid.x + 1]",
            "row0 = 0",
        ),
    ),
    *_of(
        "mla_decode",
        ("no barrier before the partial sums are read", BARRIER, "", 2),
        ("no barrier before the tile is loaded", BARRIER, "", 0),
        (
            "one slice forgotten",
            "for (int i = 0; i < NSL; i++) {",
            "for (int i = 1; i < NSL; i++) {",
        ),
        ("no context mask", "score = t0 + t < last ? score : MASKED;", ""),
        ("block table ignored", "size_t(block_tables[table + t / BS])", "size_t(t / BS)"),
        ("heads beyond the last written", "if (head < heads) {", "if (true) {"),
        ("query of head 0", "min(head, heads - 1)) * DK", "0) * DK"),
        ("partials of another partition", "* partitions + part;", "* partitions;"),
        ("no rescale of the sum", "l = l * decay + sum;", "l = l + sum;"),
        ("two slices write one maximum", "slice == 0 && c == 0", "c == 0"),
    ),
    *_of(
        "kv_quantize",
        ("codes not clamped and wrong range", "high / 127.0f", "high / 100.0f"),
        ("maximum of the signed value", "BITS == 8 ? fabs(value) : value", "value"),
        ("nibbles in the wrong place", "4 * (lane % 8)", "4 * (lane / 8)"),
        ("missing shuffle step", "step < 8; step *= 2", "step < 4; step *= 2"),
        ("bias forgotten", "(value - float(b))", "value"),
        ("truncates", "rint((value", "floor((value"),
        (
            "writes beyond the last group",
            "if (group >= size_t(dims[0])) {\n  return;",
            "if (false) {\n  return;",
        ),
        ("every lane writes the word", "if (lane % 8 == 0) {", "if (lane % 4 == 0) {"),
    ),
    *_of(
        "qmm_small",
        ("last rows not padded", "min(i, rows - 1)", "i"),
        ("scale of another group", "(n * K + k) / GS", "(n * K + k) / GS + 1"),
        ("bias forgotten", "& ((1u << BITS) - 1)) + b;", "& ((1u << BITS) - 1));"),
        ("columns beyond N written", "i < rows && n0 + j < N", "i < rows"),
        ("K tail dropped", "k < K; k += 256", "k + 256 <= K; k += 256"),
        ("lane-local sum", "simd_sum(acc[i][j])", "acc[i][j]"),
        ("one word per step", "word < BITS / 4", "word < 1"),
        (
            "sum under a divergent branch",
            "const float sum = simd_sum(acc[i][j]);",
            "float sum = 0.0f; if (lane < 16) { sum = simd_sum(acc[i][j]); }",
        ),
    ),
    *_of(
        "sample_rows",
        (
            "histogram not cleared",
            "atomic_store_explicit(&histogram[i], 0u, memory_order_relaxed);",
            "",
        ),
        ("no barrier after clearing", BARRIER, "", 4),
        ("no barrier before the scan", BARRIER, "", 5),
        ("no barrier after the scan", BARRIER, "", 6),
        ("keeps one too few", "uint(k) :", "uint(k - 1) :"),
        ("top-p of everything", "sum += order_of(x) >= cut ?", "sum += true ?"),
        ("top-p starts from nothing", "uint(p * UNIT)", "uint(p * UNIT) / 2"),
        (
            "draw from the bottom",
            "uint(uniform[row] * UNIT) + 1",
            "uint((1.0f - uniform[row]) * UNIT) + 1",
        ),
        ("draw one boundary early", "UNIT) + 1;", "UNIT * 0.9f);"),
        ("draw among all", "if (order >= cut &&", "if ((stage == 2 || order >= cut) &&"),
        ("higher ids first", "~uint(i);", "uint(i);"),
        ("min-p ignored", "if (stage == 2 && min_p", "if (stage == 9 && min_p"),
        ("prefix not compared", "(shift == 24 || ", "(true || "),
        ("min-p of the wrong logit", "best + log(", "0.5f * best + log("),
        ("row 0 for all", "size_t(row) * V", "size_t(0) * V"),
    ),
]
