// Chooses one token per row by top-k, then top-p (of what top-k left), then min-p, then inverse CDF over what is left in
// the order of token ids, without a sort. Radix select: floats map to integers of the same order; four histograms of 8
// bits narrow a cut from the top. Three stages use it: logits by count (top-k), logits by probability (top-p), and ids by
// probability (the draw). Probabilities are integers in units of 2^-31, so the result does not depend on thread order.
// One threadgroup per row. k <= 0, p outside (0, 1), min-p <= 0 are off.
// inputs: logits top_k top_p min_p uniform dims
// outputs: threshold token
// header: order
// template: NSG
constexpr int THREADS = 32 * NSG;
constexpr float LOG2E = 1.44269504f, UNIT = 2147483648.0f;
threadgroup atomic_uint histogram[256];
threadgroup float shared_float[NSG];
threadgroup uint shared_uint[2];  // the bits found so far; what is still needed below them

const int lane = int(thread_index_in_simdgroup);
const int thread_id = int(thread_index_in_threadgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int row = int(threadgroup_position_in_grid.x);
const int V = dims[0];
const size_t base = size_t(row) * V;
const int k = top_k[row];
const float p = top_p[row];

float best = -INFINITY;
for (int i = thread_id; i < V; i += THREADS) {
  best = max(best, float(logits[base + i]));
}
best = simd_max(best);
if (lane == 0) {
  shared_float[sg] = best;
}
if (thread_id == 0) {
  shared_uint[0] = 0;  // what stays when no logit has any weight (all NaN)
  shared_uint[1] = 1;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int j = 0; j < NSG; j++) {
  best = max(best, shared_float[j]);
}

uint cut = 0;  // keep logits whose order is >= cut
for (int stage = 0; stage < 3; stage++) {
  if ((stage == 0 && (k <= 0 || k >= V)) || (stage == 1 && !(p > 0.0f && p < 1.0f))) {
    continue;  // the same for the whole threadgroup
  }
  if (stage == 2 && min_p[row] > 0.0f) {
    cut = max(cut, order_of(min(best, best + log(min(min_p[row], 1.0f)))));
  }
  float total = 1.0f;
  if (stage > 0) {
    float sum = 0.0f;
    for (int i = thread_id; i < V; i += THREADS) {
      const float x = float(logits[base + i]);
      sum += order_of(x) >= cut ? exp2((x - best) * LOG2E) : 0.0f;
    }
    sum = simd_sum(sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      shared_float[sg] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = 0.0f;
    for (int j = 0; j < NSG; j++) {
      total += shared_float[j];
    }
  }
  uint found = 0;
  uint need = stage == 0 ? uint(k) : stage == 1 ? uint(p * UNIT) : uint(uniform[row] * UNIT) + 1;
  for (int shift = 24; shift >= 0; shift -= 8) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < 256; i += THREADS) {
      atomic_store_explicit(&histogram[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < V; i += THREADS) {
      const float x = float(logits[base + i]);
      const uint order = order_of(x);
      const uint key = stage < 2 ? order : ~uint(i);  // lower ids first
      if (order >= cut && (shift == 24 || (key >> (shift + 8)) == (found >> (shift + 8)))) {
        const uint weight = stage == 0 ? 1u : uint(exp2((x - best) * LOG2E) / total * UNIT);
        if (weight > 0) {
          atomic_fetch_add_explicit(&histogram[(key >> shift) & 255], weight, memory_order_relaxed);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
      // lane 0 holds the eight highest bins; the cut lies where the sum from the top reaches `need`
      uint mine = 0;
      for (int j = 0; j < 8; j++) {
        mine += atomic_load_explicit(&histogram[255 - lane * 8 - j], memory_order_relaxed);
      }
      uint above = simd_prefix_exclusive_sum(mine);
      const uint reachable = min(need, simd_sum(mine));  // rounding may leave the whole sum short
      if (above < reachable && above + mine >= reachable) {
        int bin = 255 - lane * 8;
        uint count = atomic_load_explicit(&histogram[bin], memory_order_relaxed);
        while (above + count < reachable) {
          above += count;
          bin -= 1;
          count = atomic_load_explicit(&histogram[bin], memory_order_relaxed);
        }
        shared_uint[0] = found | (uint(bin) << shift);
        shared_uint[1] = reachable - above;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    found = shared_uint[0];
    need = shared_uint[1];
  }
  if (stage < 2) {
    cut = max(cut, found);
  } else if (thread_id == 0) {
    threshold[row] = cut == 0 ? -INFINITY : float_of(cut);
    token[row] = int(min(~found, uint(V - 1)));
  }
}
