// Attention of 1 or 2 query rows per sequence over its paged keys and values, each KV byte read once for all query
// heads that share it. A threadgroup owns (sequence, KV head, partition of the context); see README for the drawing.
// inputs: q k v k_scale v_scale k_bias v_bias block_tables context_lens sinks dims scalars
// outputs: out ml
// header: unroll loads softcap
// template: T TO D DV BS G ROWS HPT NH NK KU TK PART SINKS WINDOW SOFTCAP
constexpr int SLOTS = G * ROWS;  // (query head of the group, row) pairs that share the loads
constexpr int CHUNKS = (SLOTS + HPT * NH - 1) / (HPT * NH);
constexpr int EK = (D + 31) / 32, EV = (DV + 31) / 32;
constexpr int WK = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;  // neighbours a lane loads together
constexpr int WV = DV % 128 == 0 ? 4 : DV % 64 == 0 ? 2 : 1;
constexpr int THREADS = 32 * NH * NK;
constexpr float LOG2E = 1.44269504f, EMPTY = -1e30f, MASKED = -2e30f;  // finite: no inf - inf

threadgroup T k_tile[NH > 1 ? TK * D : 1];
threadgroup T v_tile[NH > 1 ? TK * DV : 1];
threadgroup float o_shared[NK > 1 ? NH * NK * DV : 1];
threadgroup float m_shared[NH * NK];
threadgroup float l_shared[NH * NK];

const int lane = int(thread_index_in_simdgroup);
const int thread_id = int(thread_index_in_threadgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int head_part = sg / NK, key_part = sg % NK;
const int partitions = dims[0], max_blocks = dims[1], kv_heads = dims[2], window = dims[3];
const int group = int(threadgroup_position_in_grid.y) / CHUNKS;
const int chunk = int(threadgroup_position_in_grid.y) % CHUNKS;
const int seq = int(threadgroup_position_in_grid.z) / partitions;
const int part = int(threadgroup_position_in_grid.z) % partitions;
const int heads = kv_heads * G;

const int context = context_lens[seq];
const int start = WINDOW ? max(0, context - ROWS + 1 - window) : 0;  // first key that any row sees
const int first = start + part * PART;
const int last = PART > 0 ? min(context, first + PART) : context;
if (PART > 0 && first >= last) {
  return;  // the merge does not read partitions beyond the context
}

const int slot0 = (chunk * NH + head_part) * HPT;
float query[HPT][EK];
float o[HPT][EV];
float m[HPT];
float l[HPT];
UNROLL for (int h = 0; h < HPT; h++) {
  const int slot = min(slot0 + h, SLOTS - 1);  // spare slots repeat the last one and are not written
  const size_t base = (size_t(seq * ROWS + slot / G) * heads + group * G + slot % G) * D;
  UNROLL for (int e = 0; e < EK; e++) {
    const int d = (e / WK) * 32 * WK + lane * WK + e % WK;
    query[h][e] = d < D ? float(q[base + d]) * scalars[0] * (SOFTCAP ? 1.0f : LOG2E) : 0.0f;
  }
  UNROLL for (int e = 0; e < EV; e++) {
    o[h][e] = 0.0f;
  }
  m[h] = EMPTY;
  l[h] = 0.0f;
}

const size_t table = size_t(seq) * max_blocks;
constexpr int TILE = NH > 1 ? TK : NK * KU;
for (int t0 = first; t0 < last; t0 += TILE) {
  if (NH > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id * 4; i < TK * D; i += THREADS * 4) {
      const int t = t0 + i / D;
      if (t < last) {
        const size_t row = (size_t(block_tables[table + t / BS]) * kv_heads + group) * BS + t % BS;
        for (int j = 0; j < 4; j++) {
          k_tile[i + j] = static_cast<T>(load_kv(k, k_scale, k_bias, row * D + i % D + j));
        }
      }
    }
    for (int i = thread_id * 4; i < TK * DV; i += THREADS * 4) {
      const int t = t0 + i / DV;
      if (t < last) {
        const size_t row = (size_t(block_tables[table + t / BS]) * kv_heads + group) * BS + t % BS;
        for (int j = 0; j < 4; j++) {
          v_tile[i + j] = static_cast<T>(load_kv(v, v_scale, v_bias, row * DV + i % DV + j));
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = key_part; i < TILE && t0 + i < last; i += NK * KU) {
    // KU keys at once: one rescaling of the output serves all of them
    float value[KU][EV];
    float score[KU][HPT];
    UNROLL for (int u = 0; u < KU; u++) {
      const int at = i + u * NK, t = t0 + at;
      const bool inside = at < TILE && t < last;  // the same for the whole simdgroup
      size_t row = 0;
      if (NH == 1 && inside) {
        row = (size_t(block_tables[table + t / BS]) * kv_heads + group) * BS + t % BS;
      }
      float key[EK];
      UNROLL for (int e = 0; e < EK; e++) {
        const int d = (e / WK) * 32 * WK + lane * WK + e % WK;
        key[e] = d >= D || !inside ? 0.0f : NH > 1 ? float(k_tile[at * D + d]) : load_kv(k, k_scale, k_bias, row * D + d);
      }
      UNROLL for (int e = 0; e < EV; e++) {
        const int d = (e / WV) * 32 * WV + lane * WV + e % WV;
        value[u][e] = d >= DV || !inside ? 0.0f : NH > 1 ? float(v_tile[at * DV + d]) : load_kv(v, v_scale, v_bias, row * DV + d);
      }
      UNROLL for (int h = 0; h < HPT; h++) {
        float dot = 0.0f;
        UNROLL for (int e = 0; e < EK; e++) {
          dot += query[h][e] * key[e];
        }
        dot = simd_sum(dot);
        if (SOFTCAP) {
          dot = soft_cap(dot, scalars[1]) * LOG2E;
        }
        const int position = context - ROWS + min(slot0 + h, SLOTS - 1) / G;
        const bool hidden = ROWS > 1 && (t > position || (WINDOW && t + window <= position));
        score[u][h] = inside && !hidden ? dot : MASKED;
      }
    }
    UNROLL for (int h = 0; h < HPT; h++) {
      float top = m[h];
      UNROLL for (int u = 0; u < KU; u++) {
        top = max(top, score[u][h]);
      }
      const float decay = fast::exp2(m[h] - top);
      m[h] = top;
      l[h] *= decay;
      UNROLL for (int e = 0; e < EV; e++) {
        o[h][e] *= decay;
      }
      UNROLL for (int u = 0; u < KU; u++) {
        const float p = fast::exp2(score[u][h] - top);
        l[h] += p;
        UNROLL for (int e = 0; e < EV; e++) {
          o[h][e] += p * value[u][e];
        }
      }
    }
  }
}

UNROLL for (int h = 0; h < HPT; h++) {
  // combine the simdgroups that saw different keys for the same head
  float m_all = m[h], l_all = l[h];
  if (NK > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      m_shared[sg] = m[h];
      l_shared[sg] = l[h];
    }
    UNROLL for (int e = 0; e < EV; e++) {
      const int d = (e / WV) * 32 * WV + lane * WV + e % WV;
      if (d < DV) {
        o_shared[sg * DV + d] = o[h][e];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < NK; j++) {
      m_all = max(m_all, m_shared[head_part * NK + j]);
    }
    l_all = 0.0f;
    for (int j = 0; j < NK; j++) {
      l_all += l_shared[head_part * NK + j] * fast::exp2(m_shared[head_part * NK + j] - m_all);
    }
  }
  const int slot = slot0 + h;
  const int head = group * G + slot % G;
  const size_t target = size_t(seq * ROWS + slot / G) * heads + head;
  float norm = 1.0f;
  if (PART == 0) {
    if (SINKS) {
      const float sink = float(sinks[min(head, heads - 1)]) * LOG2E;
      const float top = max(m_all, sink);
      norm = fast::exp2(m_all - top);
      l_all = l_all * norm + fast::exp2(sink - top);
    }
    norm = l_all > 0.0f ? norm / l_all : 0.0f;
  } else if (slot < SLOTS && key_part == 0 && lane == 0) {
    ml[(target * partitions + part) * 2] = m_all;
    ml[(target * partitions + part) * 2 + 1] = l_all;
  }
  if (NK > 1) {
    for (int d = key_part * 32 + lane; d < DV; d += 32 * NK) {
      float sum = 0.0f;
      for (int j = 0; j < NK; j++) {
        sum += o_shared[(head_part * NK + j) * DV + d] * fast::exp2(m_shared[head_part * NK + j] - m_all);
      }
      if (slot < SLOTS) {
        out[(target * partitions + part) * DV + d] = static_cast<TO>(sum * norm);
      }
    }
  } else if (slot < SLOTS) {
    UNROLL for (int e = 0; e < EV; e++) {
      const int d = (e / WV) * 32 * WV + lane * WV + e % WV;
      if (d < DV) {
        out[(target * partitions + part) * DV + d] = static_cast<TO>(o[h][e] * norm);
      }
    }
  }
}
