// New keys or values to int8 (scale) or 4-bit (scale and bias) in groups of 32. One simdgroup per group, one lane per
// element. value = code * scale (+ bias), with scale and bias as stored, so the rounding error is at most scale / 2.
// inputs: x dims
// outputs: codes scale bias
// header:
// template: T BITS
const int lane = int(thread_index_in_simdgroup);
const size_t group = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
if (group >= size_t(dims[0])) {
  return;  // the whole simdgroup leaves, and there is no barrier below
}
const float value = float(x[group * 32 + lane]);
const float high = simd_max(BITS == 8 ? fabs(value) : value);
if (BITS == 8) {
  const half s = half(high / 127.0f);
  const float code = float(s) > 0.0f ? rint(value / float(s)) : 0.0f;
  codes[group * 32 + lane] = int(clamp(code, -127.0f, 127.0f));
  if (lane == 0) {
    scale[group] = s;
  }
} else {
  const float low = simd_min(value);
  const half s = half((high - low) / 15.0f);
  const half b = half(low);
  const float code = float(s) > 0.0f ? rint((value - float(b)) / float(s)) : 0.0f;
  uint word = uint(clamp(code, 0.0f, 15.0f)) << (4 * (lane % 8));
  for (ushort step = 1; step < 8; step *= 2) {
    word |= simd_shuffle_xor(word, step);
  }
  if (lane % 8 == 0) {
    codes[group * 4 + lane / 8] = word;
  }
  if (lane == 0) {
    scale[group] = s;
    bias[group] = b;
  }
}
