// Causal attention of chunks of queries over paged keys and values, 8x8 matrices, online softmax in fp32.
// A threadgroup owns BQ query rows of one query head; a simdgroup owns 8 rows and 1 / DSPLIT of the value columns.
// inputs: q k v k_scale v_scale k_bias v_bias block_tables context_lens query_starts work sinks dims scalars
// outputs: out
// header: unroll loads softcap fragments
// template: T D DV BS BQ TKV DSPLIT G SINKS WINDOW SOFTCAP
constexpr int PAD = 16 / int(sizeof(T));  // 16 bytes per row against bank conflicts
constexpr int LDQ = D + PAD, LDK = D + PAD, LDV = DV + PAD;
constexpr int NT = TKV / 8, NV = DV / DSPLIT / 8;
constexpr int THREADS = BQ / 8 * DSPLIT * 32;
constexpr float LOG2E = 1.44269504f, EMPTY = -1e30f, MASKED = -2e30f;  // finite: no inf - inf

threadgroup T q_tile[BQ * LDQ];
threadgroup T k_tile[TKV * LDK];
threadgroup T v_tile[TKV * LDV];

const int thread_id = int(thread_index_in_threadgroup);
const int row_part = int(simdgroup_index_in_threadgroup) / DSPLIT;
const int v0 = int(simdgroup_index_in_threadgroup) % DSPLIT * (DV / DSPLIT);
int r, c;
lane_place(thread_index_in_simdgroup, r, c);

const int kv_heads = dims[0], max_blocks = dims[1], window = dims[2];
const int heads = kv_heads * G;
const int head = int(threadgroup_position_in_grid.y), group = head / G;
const int seq = work[2 * threadgroup_position_in_grid.x], row0 = work[2 * threadgroup_position_in_grid.x + 1];
const int q_start = query_starts[seq], q_count = query_starts[seq + 1] - q_start;
const int offset = context_lens[seq] - q_count;  // position of the chunk's row 0
const int q_end = min(row0 + BQ, q_count);
const int first = WINDOW ? max(0, offset + row0 + 1 - window) : 0;
const int last = offset + q_end;  // causal: no row of this threadgroup sees key `last`
const size_t table = size_t(seq) * max_blocks;

for (int i = thread_id; i < BQ * D; i += THREADS) {
  const int row = row0 + i / D;
  T x = static_cast<T>(0.0f);
  if (row < q_end) {
    x = q[(size_t(q_start + row) * heads + head) * D + i % D];
  }
  q_tile[i / D * LDQ + i % D] = x;
}

simdgroup_float8x8 o[NV];
UNROLL for (int n = 0; n < NV; n++) {
  o[n].thread_elements()[0] = 0.0f;
  o[n].thread_elements()[1] = 0.0f;
}
float m = EMPTY, l = 0.0f;
const int low = offset + row0 + row_part * 8, high = low + 7;  // positions of this simdgroup's rows
const int position = low + r;
const bool active = row0 + row_part * 8 < q_end;

for (int t0 = first / TKV * TKV; t0 < last; t0 += TKV) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // keys that no row sees are zero, not stale memory: 0 * NaN would spoil the product
  for (int i = thread_id * 4; i < TKV * D; i += THREADS * 4) {
    const int t = t0 + i / D;
    const bool seen = t >= first && t < last;
    const size_t at = seen ? (size_t(block_tables[table + t / BS]) * kv_heads + group) * BS + t % BS : 0;
    UNROLL for (int j = 0; j < 4; j++) {
      const float x = seen ? load_kv(k, k_scale, k_bias, at * D + i % D + j) : 0.0f;
      k_tile[i / D * LDK + i % D + j] = static_cast<T>(x);
    }
  }
  for (int i = thread_id * 4; i < TKV * DV; i += THREADS * 4) {
    const int t = t0 + i / DV;
    const bool seen = t >= first && t < last;
    const size_t at = seen ? (size_t(block_tables[table + t / BS]) * kv_heads + group) * BS + t % BS : 0;
    UNROLL for (int j = 0; j < 4; j++) {
      const float x = seen ? load_kv(v, v_scale, v_bias, at * DV + i % DV + j) : 0.0f;
      v_tile[i / DV * LDV + i % DV + j] = static_cast<T>(x);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!active || t0 > high || (WINDOW && t0 + TKV - 1 + window <= low)) {
    continue;  // the same for all lanes of the simdgroup, and both barriers are behind it
  }

  simdgroup_float8x8 s[NT];
  UNROLL for (int j = 0; j < NT; j++) {
    s[j].thread_elements()[0] = 0.0f;
    s[j].thread_elements()[1] = 0.0f;
  }
  for (int d = 0; d < D; d += 8) {
    simdgroup_float8x8 a, b;
    a.thread_elements()[0] = float(q_tile[(row_part * 8 + r) * LDQ + d + c]);
    a.thread_elements()[1] = float(q_tile[(row_part * 8 + r) * LDQ + d + c + 1]);
    UNROLL for (int j = 0; j < NT; j++) {
      b.thread_elements()[0] = float(k_tile[(j * 8 + c) * LDK + d + r]);  // transposed
      b.thread_elements()[1] = float(k_tile[(j * 8 + c + 1) * LDK + d + r]);
      simdgroup_multiply_accumulate(s[j], a, b, s[j]);
    }
  }
  const bool boundary = t0 + TKV - 1 > low || (WINDOW && t0 + window <= high);
  float top = m;
  UNROLL for (int j = 0; j < NT; j++) {
    UNROLL for (int e = 0; e < 2; e++) {
      float score = s[j].thread_elements()[e] * scalars[0];
      score = (SOFTCAP ? soft_cap(score, scalars[1]) : score) * LOG2E;
      const int t = t0 + j * 8 + c + e;
      if (boundary && (t > position || (WINDOW && t + window <= position))) {
        score = MASKED;
      }
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
      b.thread_elements()[0] = float(v_tile[(j * 8 + r) * LDV + v0 + n * 8 + c]);
      b.thread_elements()[1] = float(v_tile[(j * 8 + r) * LDV + v0 + n * 8 + c + 1]);
      simdgroup_multiply_accumulate(o[n], s[j], b, o[n]);
    }
  }
}

float norm = 1.0f;
if (SINKS) {
  const float sink = float(sinks[head]) * LOG2E;
  const float top = max(m, sink);
  norm = fast::exp2(m - top);
  l = l * norm + fast::exp2(sink - top);
}
norm = l > 0.0f ? norm / l : 0.0f;
const int row = row0 + row_part * 8 + r;
if (row < q_end) {
  const size_t target = (size_t(q_start + row) * heads + head) * DV + v0;
  UNROLL for (int n = 0; n < NV; n++) {
    out[target + n * 8 + c] = static_cast<T>(o[n].thread_elements()[0] * norm);
    out[target + n * 8 + c + 1] = static_cast<T>(o[n].thread_elements()[1] * norm);
  }
}
