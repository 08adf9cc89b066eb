/* What the three parts of the runtime share: fibers.c (who runs when), checks.c (what an access may do),
 * dispatch.c (memory, one launch). All state is global: one dispatch runs at a time.
 */
#pragma once
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stddef.h>

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

enum {
  WIDTH = 32,
  MAX_LANES = 1024,
  MAX_BUFFERS = 31,
  ARENA_BYTES = 32768,
  STACK_BYTES = 131072,
  MAX_ARRAYS = 32
};
enum { RUNNABLE, AT_SIMD, AT_BARRIER, FINISHED };
enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

typedef struct {
  unsigned char in[64], out[64];
  uint32_t arg;
} Slot; /* shared with the shim */
typedef void (*Combine)(Slot* slots, int width);

typedef struct {
  void* sp;
  int state, index;
  Combine combine; /* which collective it waits in */
  int is_simd_barrier, flags;
} Lane;

typedef struct {
  int first, width, position, state;
  uint32_t epoch;
  int order[WIDTH];
} Group;

typedef struct {
  uint32_t writer_epoch, writer_simd_epoch, reader_epoch, reader_simd_epoch, writer_tg, reader_tg;
  uint16_t writer, reader;
  uint8_t has_writer, has_reader, atomic, initialised;
} Shadow;

typedef struct {
  unsigned char* data;
  size_t bytes, mapped;
  unsigned char* base;
  int writable;
  Shadow* shadow;
  uint32_t* round;
} Buffer;

/* Filled for Python; the order is fixed by emulator.Report. */
typedef struct {
  int32_t findings, aborted;
  char text[32][240];
  int64_t simd_ops, mma_ops, barriers, threadgroups, threadgroup_bytes;
  int64_t read[MAX_BUFFERS], written[MAX_BUFFERS], unique_read[MAX_BUFFERS];
} Report;

typedef struct {
  void (*entry)(void** buffers);
  void** buffers;
  int64_t* bytes;
  int32_t* writable;
  int32_t count, schedule, check;
  uint32_t seed, grid[3], group[3];
} Dispatch;

/* What the shim's attributes read. */
typedef struct {
  uint32_t thread_in_grid[3], group_in_grid[3], thread_in_group[3], threads_per_group[3], groups[3], grid[3],
      index, simdgroup, lane, simdgroups;
} Position;
extern Position msl_position[MAX_LANES];
extern int msl_lane; /* the running lane's index */

typedef struct {
  const void* key;
  size_t bytes;
  unsigned char* at;
} Array; /* of the running threadgroup */

extern Lane msl_lanes[MAX_LANES];
extern Group msl_groups[WIDTH];
extern int msl_group_count, msl_array_count;
extern unsigned char *msl_stacks, *msl_arena;
extern Array msl_arrays[MAX_ARRAYS];
extern size_t msl_arena_used;
extern Buffer msl_buffers[MAX_BUFFERS];
extern Shadow msl_arena_shadow[ARENA_BYTES];
extern Dispatch* msl_run;
extern Report* msl_report;
extern uint32_t msl_tg_epoch, msl_device_epoch, msl_round, msl_tg_index, msl_random_state;

/* Add a finding; the running threadgroup and thread are appended. */
void msl_find(const char* format, ...);
/* Give up the threadgroup: back to dispatch.c, and no later one runs. */
void msl_abandon(void);
/* Run the lanes of a prepared threadgroup to their end. */
void msl_run_lanes(void);
void msl_order_lanes(Group* g);
/* Where a new lane's stack pointer must point. */
void* msl_new_stack(int lane);
