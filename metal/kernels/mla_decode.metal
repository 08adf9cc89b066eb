// Absorbed MLA decode: all query heads share one row per token. A key is DV latent columns, then DK - DV rotated ones,
// each from a pool of its own, as mlx-lm caches them; the values are the latent columns.
// Heads are the rows of 8x8 matrices. A threadgroup owns (sequence, HB heads, partition of the context); NSL simdgroups
// share 8 heads: each multiplies 1 / NSL of the key columns, adds up through threadgroup memory, and owns 1 / NSL of the
// value columns.
// inputs: q latent rotated block_tables context_lens dims scalars
// outputs: out ml
// header: unroll fragments
// template: T TO DK DV BS HB NSL TK PART
constexpr int PAD = 16 / int(sizeof(T));
constexpr int LD = DK + PAD;
constexpr int NT = TK / 8, NQ = DK / NSL / 8, NV = DV / NSL / 8;
constexpr int THREADS = HB / 8 * NSL * 32;
constexpr float LOG2E = 1.44269504f, EMPTY = -1e30f, MASKED = -2e30f;  // finite: no inf - inf

threadgroup T tile[TK * LD];
threadgroup float partial[HB / 8 * NSL * 8 * TK];

const int thread_id = int(thread_index_in_threadgroup);
const int head_part = int(simdgroup_index_in_threadgroup) / NSL;
const int slice = int(simdgroup_index_in_threadgroup) % NSL;
int r, c;
lane_place(thread_index_in_simdgroup, r, c);

const int partitions = dims[0], max_blocks = dims[1], heads = dims[2];
const int seq = int(threadgroup_position_in_grid.z) / partitions;
const int part = int(threadgroup_position_in_grid.z) % partitions;
const int head = int(threadgroup_position_in_grid.y) * HB + head_part * 8 + r;
const int context = context_lens[seq];
const int first = part * PART;
const int last = PART > 0 ? min(context, first + PART) : context;
if (PART > 0 && first >= last) {
  return;  // the merge does not read partitions beyond the context
}

simdgroup_float8x8 query[NQ];
const size_t q_base = (size_t(seq) * heads + min(head, heads - 1)) * DK + slice * (DK / NSL);
UNROLL for (int n = 0; n < NQ; n++) {
  query[n].thread_elements()[0] = float(q[q_base + n * 8 + c]) * scalars[0] * LOG2E;
  query[n].thread_elements()[1] = float(q[q_base + n * 8 + c + 1]) * scalars[0] * LOG2E;
}
simdgroup_float8x8 o[NV];
UNROLL for (int n = 0; n < NV; n++) {
  o[n].thread_elements()[0] = 0.0f;
  o[n].thread_elements()[1] = 0.0f;
}
float m = EMPTY, l = 0.0f;
const size_t table = size_t(seq) * max_blocks;

for (int t0 = first; t0 < last; t0 += TK) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id * 4; i < TK * DK; i += THREADS * 4) {
    const int t = t0 + i / DK;
    const int d = i % DK;  // DV is a multiple of 4: four neighbours lie in one pool
    const size_t row = t < last ? size_t(block_tables[table + t / BS]) * BS + t % BS : 0;
    UNROLL for (int j = 0; j < 4; j++) {
      float x = 0.0f;
      if (t < last) {
        x = d < DV ? float(latent[row * DV + d + j]) : float(rotated[row * (DK - DV) + (d - DV) + j]);
      }
      tile[i / DK * LD + d + j] = static_cast<T>(x);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 s[NT];
  UNROLL for (int j = 0; j < NT; j++) {
    s[j].thread_elements()[0] = 0.0f;
    s[j].thread_elements()[1] = 0.0f;
    UNROLL for (int n = 0; n < NQ; n++) {
      simdgroup_float8x8 b;
      const int d = slice * (DK / NSL) + n * 8 + r;
      b.thread_elements()[0] = float(tile[(j * 8 + c) * LD + d]);  // transposed
      b.thread_elements()[1] = float(tile[(j * 8 + c + 1) * LD + d]);
      simdgroup_multiply_accumulate(s[j], query[n], b, s[j]);
    }
    UNROLL for (int e = 0; e < 2; e++) {
      partial[((head_part * NSL + slice) * 8 + r) * TK + j * 8 + c + e] = s[j].thread_elements()[e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float top = m;
  UNROLL for (int j = 0; j < NT; j++) {
    UNROLL for (int e = 0; e < 2; e++) {
      const int t = j * 8 + c + e;
      float score = 0.0f;
      for (int i = 0; i < NSL; i++) {
        score += partial[((head_part * NSL + i) * 8 + r) * TK + t];
      }
      score = t0 + t < last ? score : MASKED;
      s[j].thread_elements()[e] = score;
      top = max(top, score);
    }
  }
  top = max(top, simd_shuffle_xor(top, 1));  // a row lies in the four lanes that differ in bits 0 and 3
  top = max(top, simd_shuffle_xor(top, 8));
  const float decay = fast::exp2(m - top);
  float sum = 0.0f;
  UNROLL for (int j = 0; j < NT; j++) {
    UNROLL for (int e = 0; e < 2; e++) {
      const float p = fast::exp2(s[j].thread_elements()[e] - top);
      s[j].thread_elements()[e] = p;
      sum += p;
    }
  }
  sum += simd_shuffle_xor(sum, 1);
  sum += simd_shuffle_xor(sum, 8);
  m = top;
  l = l * decay + sum;
  UNROLL for (int n = 0; n < NV; n++) {
    o[n].thread_elements()[0] *= decay;
    o[n].thread_elements()[1] *= decay;
    UNROLL for (int j = 0; j < NT; j++) {
      simdgroup_float8x8 b;
      const int d = slice * (DV / NSL) + n * 8 + c;
      b.thread_elements()[0] = float(tile[(j * 8 + r) * LD + d]);
      b.thread_elements()[1] = float(tile[(j * 8 + r) * LD + d + 1]);
      simdgroup_multiply_accumulate(o[n], s[j], b, o[n]);
    }
  }
}

if (head < heads) {
  const size_t target = (size_t(seq) * heads + head) * partitions + part;
  const float norm = PART > 0 ? 1.0f : l > 0.0f ? 1.0f / l : 0.0f;
  UNROLL for (int n = 0; n < NV; n++) {
    const int d = slice * (DV / NSL) + n * 8 + c;
    out[target * DV + d] = static_cast<TO>(o[n].thread_elements()[0] * norm);
    out[target * DV + d + 1] = static_cast<TO>(o[n].thread_elements()[1] * norm);
  }
  if (PART > 0 && slice == 0 && c == 0) {
    ml[target * 2] = m;
    ml[target * 2 + 1] = l;
  }
}
