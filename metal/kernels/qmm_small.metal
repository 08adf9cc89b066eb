// out = x @ dequantized(w).T for 2 to 16 rows: every weight is read and dequantized once and used for all rows.
// A simdgroup owns R output columns; its lanes stride over K, eight weights at a time.
// inputs: x w scales biases dims
// outputs: out
// header: unroll
// template: T BITS GS M R
const int lane = int(thread_index_in_simdgroup);
const int rows = dims[0], K = dims[1], N = dims[2];
const int n0 = int(threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup) * R;
if (n0 >= N) {
  return;  // the whole simdgroup leaves, and there is no barrier below
}
float acc[M][R];
UNROLL for (int i = 0; i < M; i++) {
  UNROLL for (int j = 0; j < R; j++) {
    acc[i][j] = 0.0f;
  }
}
for (int k = lane * 8; k < K; k += 256) {
  float weight[R][8];
  UNROLL for (int j = 0; j < R; j++) {
    const size_t n = size_t(min(n0 + j, N - 1));
    const size_t at = (n * K + k) / GS;
    const float s = float(scales[at]), b = float(biases[at]);
    UNROLL for (int word = 0; word < BITS / 4; word++) {
      const uint packed = w[(n * K + k) * BITS / 32 + word];
      UNROLL for (int i = 0; i < 32 / BITS; i++) {
        weight[j][word * (32 / BITS) + i] = s * float((packed >> (BITS * i)) & ((1u << BITS) - 1)) + b;
      }
    }
  }
  UNROLL for (int i = 0; i < M; i++) {
    const size_t row = size_t(min(i, rows - 1)) * K + k;  // rows are padded up to M by repeating the last
    float value[8];
    UNROLL for (int e = 0; e < 8; e++) {
      value[e] = float(x[row + e]);
    }
    UNROLL for (int j = 0; j < R; j++) {
      float sum = 0.0f;
      UNROLL for (int e = 0; e < 8; e++) {
        sum += value[e] * weight[j][e];
      }
      acc[i][j] += sum;
    }
  }
}
UNROLL for (int i = 0; i < M; i++) {
  UNROLL for (int j = 0; j < R; j++) {
    const float sum = simd_sum(acc[i][j]);
    if (lane == 0 && i < rows && n0 + j < N) {
      out[size_t(i) * N + n0 + j] = static_cast<T>(sum);
    }
  }
}
