// Joins the partitions of paged_decode by their log-sum-exp; counts a sink once. One simdgroup per (row, query head).
// inputs: o_part ml_part context_lens sinks dims
// outputs: out
// header:
// template: T DV ROWS PART SINKS WINDOW
constexpr float LOG2E = 1.44269504f, EMPTY = -1e30f;
const int lane = int(thread_index_in_simdgroup);
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int partitions = dims[0], heads = dims[2], window = dims[3];
const int context = context_lens[row / ROWS];
const int start = WINDOW ? max(0, context - ROWS + 1 - window) : 0;
const int used = (context - start + PART - 1) / PART;  // the others were never written
const size_t base = (size_t(row) * heads + head) * partitions;

float m = EMPTY;
for (int p = lane; p < used; p += 32) {
  m = max(m, ml_part[(base + p) * 2]);
}
m = simd_max(m);
if (SINKS) {
  m = max(m, float(sinks[head]) * LOG2E);
}
float l = 0.0f;
for (int p = lane; p < used; p += 32) {
  l += ml_part[(base + p) * 2 + 1] * fast::exp2(ml_part[(base + p) * 2] - m);
}
l = simd_sum(l);
if (SINKS) {
  l += fast::exp2(float(sinks[head]) * LOG2E - m);
}
for (int d = lane; d < DV; d += 32) {
  float sum = 0.0f;
  for (int p = 0; p < used; p++) {
    sum += o_part[(base + p) * DV + d] * fast::exp2(ml_part[(base + p) * 2] - m);
  }
  out[(size_t(row) * heads + head) * DV + d] = static_cast<T>(l > 0.0f ? sum / l : 0.0f);
}
