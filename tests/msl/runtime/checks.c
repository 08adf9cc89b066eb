/* What an access may do, in check mode: the kernel is compiled with clang's thread and undefined sanitizers,
 * but linked against these hooks instead of their libraries. Races, bounds, uninitialised reads, overflow,
 * bytes moved.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

void msl_find(const char* format, ...) {
  if (msl_report->findings < 32) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(msl_report->text[msl_report->findings], 240, format, args);
    va_end(args);
    if (n < 200)
      snprintf(msl_report->text[msl_report->findings] + n, 240 - n, " [threadgroup %u thread %d]",
               msl_tg_index, msl_lane);
  }
  msl_report->findings++;
}

static int ordered(int other, uint32_t other_epoch, uint32_t other_simd, uint32_t epoch) {
  if (other == msl_lane || other_epoch != epoch) return 1;
  return other / WIDTH == msl_lane / WIDTH && other_simd != msl_groups[msl_lane / WIDTH].epoch;
}

static void touch(Shadow* s, size_t n, int write, int atomic, uint32_t epoch, uint32_t tg, const char* what,
                  size_t at) {
  uint32_t simd = msl_groups[msl_lane / WIDTH].epoch;
  int raced = 0, uninitialised = 0;
  for (size_t i = 0; i < n; i++, s++) {
    if (s->has_writer && !(atomic && s->atomic) &&
        (s->writer_tg != tg || !ordered(s->writer, s->writer_epoch, s->writer_simd_epoch, epoch)))
      raced = s->writer + 1;
    if (write) {
      if (s->has_reader && !atomic &&
          (s->reader_tg != tg || !ordered(s->reader, s->reader_epoch, s->reader_simd_epoch, epoch)))
        raced = s->reader + 1;
      s->writer = msl_lane;
      s->writer_epoch = epoch;
      s->writer_simd_epoch = simd;
      s->writer_tg = tg;
      s->has_writer = 1;
      s->atomic = atomic;
      s->initialised = 1;
    } else {
      uninitialised |= !s->initialised;
      s->reader = msl_lane;
      s->reader_epoch = epoch;
      s->reader_simd_epoch = simd;
      s->reader_tg = tg;
      s->has_reader = 1;
    }
  }
  if (raced)
    msl_find("race: %s byte %zu, %s by thread %d against thread %d", what, at, write ? "write" : "read",
             msl_lane, raced - 1);
  if (uninitialised) msl_find("uninitialised read: %s byte %zu", what, at);
}

static void access_memory(unsigned char* p, size_t n, int write, int atomic) {
  if (p >= msl_stacks && p < msl_stacks + (size_t)MAX_LANES * STACK_BYTES) return;
  if (p >= msl_arena && p < msl_arena + ARENA_BYTES) {
    for (int i = 0; i < msl_array_count; i++)
      if (p >= msl_arrays[i].at && p + n <= msl_arrays[i].at + msl_arrays[i].bytes) {
        touch(msl_arena_shadow + (p - msl_arena), n, write, atomic, msl_tg_epoch, msl_tg_index,
              "threadgroup memory", p - msl_arena);
        return;
      }
    msl_find("out of bounds: threadgroup memory byte %zu is in no array", (size_t)(p - msl_arena));
    return;
  }
  for (int i = 0; i < msl_run->count; i++) {
    Buffer* b = &msl_buffers[i];
    if (p < b->base || p >= b->base + b->mapped) continue;
    size_t at = p - b->data;
    if (p < b->data || at + n > b->bytes) {
      msl_find("out of bounds: buffer %d byte %td of %zu", i, p - b->data, b->bytes);
      return;
    }
    if (write) {
      msl_report->written[i] += n;
      if (!b->writable) msl_find("write to input buffer %d byte %zu", i, at);
    } else {
      msl_report->read[i] += n;
      if (b->round[at] != msl_round) {
        b->round[at] = msl_round;
        msl_report->unique_read[i] += n;
      }
    }
    char name[24];
    if (b->writable) {
      snprintf(name, sizeof name, "buffer %d", i);
      touch(b->shadow + at, n, write, atomic, msl_device_epoch, msl_tg_index, name, at);
    }
    return;
  }
}

void msl_atomic_access(void* p, int n) {
  if (msl_run->check) access_memory(p, n, 1, 1);
}

#define HOOK(n)                                                          \
  void __tsan_read##n(void* p) { access_memory(p, n, 0, 0); }            \
  void __tsan_write##n(void* p) { access_memory(p, n, 1, 0); }           \
  void __tsan_unaligned_read##n(void* p) { access_memory(p, n, 0, 0); }  \
  void __tsan_unaligned_write##n(void* p) { access_memory(p, n, 1, 0); } \
  void __tsan_read_write##n(void* p) {                                   \
    access_memory(p, n, 0, 0);                                           \
    access_memory(p, n, 1, 0);                                           \
  }                                                                      \
  void __tsan_unaligned_read_write##n(void* p) {                         \
    access_memory(p, n, 0, 0);                                           \
    access_memory(p, n, 1, 0);                                           \
  }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16) void __tsan_init(void) {}
void __tsan_func_entry(void* pc) { (void)pc; }
void __tsan_func_exit(void) {}
void __tsan_vptr_read(void** p) { (void)p; }
void __tsan_vptr_update(void** p, void* v) {
  (void)p;
  (void)v;
}
void __tsan_read_range(void* p, size_t n) { access_memory(p, n, 0, 0); }
void __tsan_write_range(void* p, size_t n) { access_memory(p, n, 1, 0); }
void* __tsan_memcpy(void* d, const void* s, size_t n) {
  access_memory((void*)s, n, 0, 0);
  access_memory(d, n, 1, 0);
  return memcpy(d, s, n);
}
void* __tsan_memmove(void* d, const void* s, size_t n) {
  access_memory((void*)s, n, 0, 0);
  access_memory(d, n, 1, 0);
  return memmove(d, s, n);
}
void* __tsan_memset(void* d, int v, size_t n) {
  access_memory(d, n, 1, 0);
  return memset(d, v, n);
}

typedef struct {
  const char* file;
  uint32_t line, column;
} Location; /* how every ubsan record begins */
#define UB(name, what)                                          \
  void __ubsan_handle_##name(Location* at, void* a, void* b) {  \
    (void)a;                                                    \
    (void)b;                                                    \
    msl_find(what ": line %u column %u", at->line, at->column); \
  }
UB(add_overflow, "integer overflow in +")
UB(sub_overflow, "integer overflow in -") UB(mul_overflow, "integer overflow in *")
    UB(negate_overflow, "integer overflow in unary -") UB(divrem_overflow, "division by zero or overflow")
        UB(shift_out_of_bounds, "shift by too much") UB(out_of_bounds, "array index out of bounds")
            UB(type_mismatch_v1, "misaligned or null access")
                UB(float_cast_overflow, "float does not fit the integer type") UB(pointer_overflow,
                                                                                  "pointer overflow")
                    UB(load_invalid_value,
                       "invalid bool or enum value") void __ubsan_handle_builtin_unreachable(Location* at) {
  msl_find("unreachable code reached: line %u", at->line);
  msl_abandon();
}
void __ubsan_handle_missing_return(Location* at) {
  msl_find("function ends without a value: line %u", at->line);
  msl_abandon();
}

/* clang lowers float -> __bf16 to this call on CPUs without the instruction. Round to nearest even, as the
 * GPU does. */
typedef __bf16 BFloat;
BFloat __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t top =
      (x != x) ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  BFloat result;
  memcpy(&result, &top, 2);
  return result;
}
