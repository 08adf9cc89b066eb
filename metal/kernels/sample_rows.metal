// The lowest logit that top-k, then top-p (of what top-k left), then min-p keep in each row, without a sort.
// Radix select: floats map to integers of the same order; four histograms of 8 bits narrow the cut from the top, first
// by count (top-k), then by probability in 2^-31 units (integers, so the result does not depend on thread order).
// One threadgroup per row. k <= 0, p outside (0, 1) and min-p <= 0 switch a filter off.
// inputs: logits top_k top_p min_p dims
// outputs: threshold
// header:
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

float best = -INFINITY;
for (int i = thread_id; i < V; i += THREADS) {
  best = max(best, float(logits[base + i]));
}
best = simd_max(best);
if (lane == 0) {
  shared_float[sg] = best;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int j = 0; j < NSG; j++) {
  best = max(best, shared_float[j]);
}

uint cut = 0;  // keep keys >= cut
for (int stage = 0; stage < 2; stage++) {
  const int k = top_k[row];
  const float p = top_p[row];
  if (stage == 0 ? (k <= 0 || k >= V) : !(p > 0.0f && p < 1.0f)) {
    continue;  // the same for the whole threadgroup
  }
  float total = 1.0f;
  if (stage == 1) {
    float sum = 0.0f;
    for (int i = thread_id; i < V; i += THREADS) {
      const uint bits = as_type<uint>(float(logits[base + i]));
      const uint key = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
      sum += key >= cut ? exp2((float(logits[base + i]) - best) * LOG2E) : 0.0f;
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
  uint found = 0, need = stage == 0 ? uint(k) : uint(p * UNIT);
  for (int shift = 24; shift >= 0; shift -= 8) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < 256; i += THREADS) {
      atomic_store_explicit(&histogram[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < V; i += THREADS) {
      const float x = float(logits[base + i]);
      const uint bits = as_type<uint>(x);
      const uint key = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
      if (key >= cut && (shift == 24 || (key >> (shift + 8)) == (found >> (shift + 8)))) {
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
      const bool here = above < need && above + mine >= need;
      if (!simd_any(here) && lane == 31) {
        shared_uint[0] = found;  // rounding left the sum short of `need`: keep all that cut keeps
        shared_uint[1] = need;
      }
      if (here) {
        int bin = 255 - lane * 8;
        uint count = atomic_load_explicit(&histogram[bin], memory_order_relaxed);
        while (above + count < need) {
          above += count;
          bin -= 1;
          count = atomic_load_explicit(&histogram[bin], memory_order_relaxed);
        }
        shared_uint[0] = found | (uint(bin) << shift);
        shared_uint[1] = need - above;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    found = shared_uint[0];
    need = shared_uint[1];
  }
  cut = max(cut, found);
}

if (thread_id == 0) {
  const uint bits = cut ^ ((cut >> 31) != 0 ? 0x80000000u : 0xffffffffu);
  float lowest = cut == 0 ? -INFINITY : as_type<float>(bits);
  if (min_p[row] > 0.0f) {
    lowest = max(lowest, best + log(min(min_p[row], 1.0f)));
  }
  threshold[row] = min(lowest, best);
}
