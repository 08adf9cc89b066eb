// Declarations only: what Metal offers to our kernels, in clang's "C++ for OpenCL" dialect, whose
// address-space rules are Metal's once the generic address space is off. No definitions, so nothing can run;
// overloads are Metal's.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef half float16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));

// bfloat converts to float by itself, but nothing converts to bfloat except static_cast (rewritten to
// lint_cast).
struct bfloat {
  ushort bits;
  bfloat() = default;
  operator float() const __private;
  operator float() const __global;
  operator float() const __local;
  operator float() const __constant;
  bfloat(const __private bfloat&) __private;
  bfloat(const __global bfloat&) __private;
  bfloat(const __local bfloat&) __private;
  bfloat(const __constant bfloat&) __private;
  void operator=(const __private bfloat&) __private;
  void operator=(const __global bfloat&) __private;
  void operator=(const __local bfloat&) __private;
  void operator=(const __private bfloat&) __global;
  void operator=(const __global bfloat&) __global;
  void operator=(const __local bfloat&) __global;
  void operator=(const __private bfloat&) __local;
  void operator=(const __global bfloat&) __local;
  void operator=(const __local bfloat&) __local;
};
typedef bfloat bfloat16_t;
template <class T, class U>
const __private T& lint_cast(U);
__local void* lint_arena();

#define LINT_ORDER(T) \
  T max(T, T);        \
  T min(T, T);        \
  T clamp(T, T, T);
#define LINT_UNARY         \
  float exp(float);        \
  float exp2(float);       \
  float log(float);        \
  float log2(float);       \
  float sqrt(float);       \
  float rsqrt(float);      \
  float tanh(float);       \
  float rint(float);       \
  float round(float);      \
  float floor(float);      \
  float ceil(float);       \
  float fabs(float);       \
  float pow(float, float); \
  float divide(float, float);
namespace metal {
LINT_ORDER(float)
LINT_ORDER(half) LINT_ORDER(int) LINT_ORDER(uint) LINT_ORDER(long) LINT_ORDER(ulong) LINT_ORDER(short)
    LINT_ORDER(ushort) LINT_UNARY float abs(float);
int abs(int);
bool isnan(float);
bool isinf(float);
float fma(float, float, float);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);
namespace fast {
LINT_UNARY
}
namespace precise {
LINT_UNARY
}
template <class To, class From>
To as_type(From);

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define LINT_SIMD(T)              \
  T simd_sum(T);                  \
  T simd_max(T);                  \
  T simd_min(T);                  \
  T simd_product(T);              \
  T simd_shuffle(T, ushort);      \
  T simd_shuffle_xor(T, ushort);  \
  T simd_shuffle_down(T, ushort); \
  T simd_shuffle_up(T, ushort);   \
  T simd_broadcast(T, ushort);    \
  T simd_prefix_exclusive_sum(T); \
  T simd_prefix_inclusive_sum(T);
LINT_SIMD(float) LINT_SIMD(half) LINT_SIMD(int) LINT_SIMD(uint) uint simd_or(uint);
uint simd_and(uint);
bool simd_any(bool);
bool simd_all(bool);

// renamed: clang has OpenCL atomics of the same names
#define atomic_uint metal_atomic_uint
#define atomic_fetch_add_explicit metal_fetch_add
#define atomic_load_explicit metal_load
#define atomic_store_explicit metal_store
#define memory_order metal_order
#define memory_order_relaxed metal_relaxed
enum memory_order { memory_order_relaxed };
struct atomic_uint {
  uint value;
};
#define LINT_ATOMIC(AS)                                                \
  uint atomic_fetch_add_explicit(AS atomic_uint*, uint, memory_order); \
  uint atomic_load_explicit(const AS atomic_uint*, memory_order);      \
  void atomic_store_explicit(AS atomic_uint*, uint, memory_order);
LINT_ATOMIC(__local)
LINT_ATOMIC(__global)

    struct simdgroup_float8x8 {
  float2 elements;
  __private float2& thread_elements() __private;
};
void simdgroup_multiply_accumulate(__private simdgroup_float8x8&, const __private simdgroup_float8x8&,
                                   const __private simdgroup_float8x8&, const __private simdgroup_float8x8&);
}  // namespace metal
using namespace metal;
#line 1
