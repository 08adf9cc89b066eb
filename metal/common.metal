// Parts that kernels ask for with `// header: part ...`; only those are compiled in.
// Rule for the lint: convert to the element type T with static_cast<T>(x) only, to float with float(x).

// part: unroll
// Arrays stay in registers only if every index is known, so loops over them must be unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")

// part: loads
// One element of the KV pool as float. Overloads by storage: the pool's type decides at compile time.
// `at` counts elements from the pool's start; scales and biases hold one value per 32 elements.
METAL_FUNC float load_kv(const device float* p, const device half* s, const device half* b, size_t at) { return p[at]; }
METAL_FUNC float load_kv(const device half* p, const device half* s, const device half* b, size_t at) { return float(p[at]); }
METAL_FUNC float load_kv(const device bfloat16_t* p, const device half* s, const device half* b, size_t at) { return float(p[at]); }
METAL_FUNC float load_kv(const device int8_t* p, const device half* s, const device half* b, size_t at) {
  return float(s[at / 32]) * float(p[at]);
}
METAL_FUNC float load_kv(const device uint32_t* p, const device half* s, const device half* b, size_t at) {
  // little-endian words: element i is nibble i % 2 of byte i / 2
  uint byte = ((const device uchar*)p)[at / 2];
  return float(s[at / 32]) * float((byte >> (4 * (at & 1))) & 15) + float(b[at / 32]);
}

// part: softcap
METAL_FUNC float soft_cap(float x, float cap) { return cap * precise::tanh(x / cap); }

// part: order
// Unsigned integers in the order of the floats they stand for, and back.
METAL_FUNC uint order_of(float x) {
  const uint bits = as_type<uint>(x);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
METAL_FUNC float float_of(uint order) {
  return as_type<float>(order ^ ((order >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// part: fragments
#include <metal_simdgroup_matrix>
// 8x8 matrices are filled element by element: every lane owns row `r`, columns `c` and `c + 1`
// (the layout MLX's own attention relies on), so any storage type converts to float on the way.
METAL_FUNC void lane_place(uint lane, thread int& r, thread int& c) {
  r = int((lane / 4) & 4) + int((lane / 2) % 4);
  c = int((lane / 4) & 2) * 2 + int(lane % 2) * 2;
}
