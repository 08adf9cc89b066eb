/* The GPU of the test bench: runs one compute dispatch on the CPU, one fiber per Metal thread.
 *
 * Owns: buffers that end at guard pages, the fibers, the order in which simdgroups and lanes run, collectives, barriers,
 * and (in check mode, where the kernel is compiled with clang's thread and undefined sanitizers but linked against the
 * hooks below instead of their libraries) races, bounds, uninitialised reads and bytes moved.
 * Knows nothing about MSL text or about what any kernel computes. Driven from Python through ctypes (emulator.py).
 *
 * A lane runs until it meets a collective, a barrier or its end; then the next lane of its simdgroup runs. When the last
 * lane has stopped, all must have stopped at the same place, or the dispatch is reported as divergent and abandoned.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

enum { WIDTH = 32, MAX_LANES = 1024, MAX_BUFFERS = 31, ARENA_BYTES = 32768, STACK_BYTES = 131072, MAX_ARRAYS = 32 };
enum { RUNNABLE, AT_SIMD, AT_BARRIER, FINISHED };
enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

typedef struct { unsigned char in[64], out[64]; uint32_t arg; } Slot; /* shared with shim/metal_stdlib */
typedef void (*Combine)(Slot *slots, int width);

typedef struct {
  void *sp;
  int state, index;
  Combine combine;   /* which collective it waits in */
  int is_simd_barrier, flags;
} Lane;

typedef struct { int first, width, position, state; uint32_t epoch; int order[WIDTH]; } Group;

typedef struct { uint32_t writer_epoch, writer_simd_epoch, reader_epoch, reader_simd_epoch, writer_tg, reader_tg; uint16_t writer, reader;
                 uint8_t has_writer, has_reader, atomic, initialised; } Shadow;

typedef struct { unsigned char *data; size_t bytes, mapped; unsigned char *base; int writable; Shadow *shadow; uint32_t *round; } Buffer;

/* Filled for Python; the order is fixed by emulator.Report. */
typedef struct {
  int32_t findings, aborted;
  char text[32][240];
  int64_t simd_ops, mma_ops, barriers, threadgroups, threadgroup_bytes;
  int64_t read[MAX_BUFFERS], written[MAX_BUFFERS], unique_read[MAX_BUFFERS];
} Report;

typedef struct {
  void (*entry)(void **buffers);
  void **buffers;
  int64_t *bytes;
  int32_t *writable;
  int32_t count, schedule, check;
  uint32_t seed, grid[3], group[3];
} Dispatch;

/* What the shim's attributes read. */
typedef struct { uint32_t thread_in_grid[3], group_in_grid[3], thread_in_group[3], threads_per_group[3], groups[3], grid[3], index, simdgroup, lane, simdgroups; } Position;
Position msl_position[MAX_LANES];
int msl_lane; /* the running lane's index */

static Lane lanes[MAX_LANES];
static Slot slots[MAX_LANES];
static Group groups[WIDTH];
static int group_count, lane_count, current_group;
static void *main_sp;
static unsigned char *stacks, *arena, *arena_base;
static Shadow arena_shadow[ARENA_BYTES];
static struct { const void *key; size_t bytes; unsigned char *at; } arrays[MAX_ARRAYS];
static int array_count;
static size_t arena_used;
static Buffer buffers[MAX_BUFFERS];
static Dispatch *run;
static Report *report;
static uint32_t tg_epoch, device_epoch, round_id, tg_index, rng;
static sigjmp_buf escape;

static void find(const char *format, ...) {
  if (report->findings < 32) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(report->text[report->findings], 240, format, args);
    va_end(args);
    if (n < 200) snprintf(report->text[report->findings] + n, 240 - n, " [threadgroup %u thread %d]", tg_index, msl_lane);
  }
  report->findings++;
}

/* ---- fibers ---------------------------------------------------------------------------------------------------- */
void msl_switch(void **save, void *to);
__asm__(".text\n.globl msl_switch\nmsl_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");

static uint32_t next_random(void) { rng ^= rng << 13; rng ^= rng >> 17; rng ^= rng << 5; return rng; }

static void order_lanes(Group *g) {
  for (int i = 0; i < g->width; i++) g->order[i] = g->first + (run->schedule == 1 ? g->width - 1 - i : i);
  if (run->schedule == 2)
    for (int i = g->width - 1; i > 0; i--) { int j = next_random() % (i + 1), t = g->order[i]; g->order[i] = g->order[j]; g->order[j] = t; }
}

static int pick_group(int after) { /* a simdgroup that can run, or -1 */
  int start = run->schedule == 2 ? (int)(next_random() % group_count) : after;
  for (int i = 0; i < group_count; i++) {
    int g = (run->schedule == 1 ? start - i + group_count : start + i) % group_count;
    if (groups[g].state == RUNNABLE) return g;
  }
  return -1;
}

static int first_group(void) { return run->schedule == 1 ? group_count - 1 : 0; }

static void leave(void *abandon) { /* back to the dispatcher; an abandoned threadgroup never resumes */
  if (abandon) report->aborted = 1;
  void *ignored;
  msl_switch(&ignored, main_sp);
}

static void release_barrier(void) {
  int waiting = 0, flags = 0;
  for (int g = 0; g < group_count; g++) {
    if (groups[g].state == AT_BARRIER) waiting++;
    flags |= groups[g].state == AT_BARRIER ? lanes[groups[g].first].flags : 0;
  }
  if (!waiting) leave(0);
  if (waiting < group_count) { find("divergence: threadgroup_barrier reached by %d of %d simdgroups", waiting, group_count); leave(report); }
  report->barriers++;
  if (flags & MEM_THREADGROUP) tg_epoch++;
  if (flags & MEM_DEVICE) device_epoch++;
  for (int g = 0; g < group_count; g++) {
    groups[g].state = RUNNABLE;
    for (int i = 0; i < groups[g].width; i++) lanes[groups[g].first + i].state = RUNNABLE;
  }
}

static void finish_round(Group *g) { /* every lane of g has stopped: do what they wait for */
  Lane *first = &lanes[g->first];
  for (int i = 1; i < g->width; i++) {
    Lane *l = first + i;
    if (l->state != first->state || (l->state == AT_SIMD && (l->combine != first->combine || l->is_simd_barrier != first->is_simd_barrier))) {
      find("divergence: lanes %d and %d of simdgroup %d stopped at different operations", 0, i, (int)(g - groups));
      leave(report);
    }
  }
  round_id++;
  g->position = 0;
  if (run->schedule == 2) order_lanes(g);
  if (first->state == AT_SIMD) {
    if (first->is_simd_barrier) { g->epoch += first->flags != 0; }
    else { first->combine(slots + g->first, g->width); report->simd_ops++; }
    for (int i = 0; i < g->width; i++) first[i].state = RUNNABLE;
    if (run->schedule != 2) return;
  } else g->state = first->state;
  int next = pick_group(g - groups);
  if (next < 0) { release_barrier(); next = pick_group(first_group()); }
  current_group = next;
}

static void stop(Lane *self) { /* the running lane waits (or ends): run whoever is next */
  Group *g = &groups[current_group];
  if (++g->position == g->width) { finish_round(g); g = &groups[current_group]; }
  int next = g->order[g->position];
  if (next == self->index && self->state == RUNNABLE) return;
  msl_lane = next;
  msl_switch(&self->sp, lanes[next].sp);
}

static void lane_main(void) {
  run->entry(run->buffers);
  lanes[msl_lane].state = FINISHED;
  stop(&lanes[msl_lane]);
  __builtin_trap();
}

/* ---- what the shim calls --------------------------------------------------------------------------------------- */
Slot *msl_slot(void) { return &slots[msl_lane]; }

void msl_collective(Combine combine) {
  Lane *l = &lanes[msl_lane];
  l->state = AT_SIMD; l->combine = combine; l->is_simd_barrier = 0;
  stop(l);
}
void msl_simdgroup_barrier(int flags) {
  Lane *l = &lanes[msl_lane];
  l->state = AT_SIMD; l->combine = 0; l->is_simd_barrier = 1; l->flags = flags;
  stop(l);
}
void msl_threadgroup_barrier(int flags) {
  Lane *l = &lanes[msl_lane];
  l->state = AT_BARRIER; l->flags = flags;
  stop(l);
}
void msl_count_mma(void) { report->mma_ops++; }

/* Address of a threadgroup array, the same for all lanes. key: the array's declaration. */
void *msl_threadgroup_array(const void *key, size_t bytes) {
  for (int i = 0; i < array_count; i++)
    if (arrays[i].key == key) return arrays[i].at;
  size_t at = (arena_used + 15) & ~(size_t)15;
  if (at + bytes > ARENA_BYTES || array_count == MAX_ARRAYS) {
    find("threadgroup memory: %zu bytes needed, %d allowed", at + bytes, ARENA_BYTES);
    leave(report);
  }
  arena_used = at + bytes;
  if ((int64_t)arena_used > report->threadgroup_bytes) report->threadgroup_bytes = arena_used;
  arrays[array_count].key = key; arrays[array_count].bytes = bytes; arrays[array_count].at = arena + at;
  return arrays[array_count++].at;
}

/* ---- check mode ------------------------------------------------------------------------------------------------- */
static int ordered(int other, uint32_t other_epoch, uint32_t other_simd, uint32_t epoch) {
  if (other == msl_lane || other_epoch != epoch) return 1;
  return other / WIDTH == msl_lane / WIDTH && other_simd != groups[msl_lane / WIDTH].epoch;
}

static void touch(Shadow *s, size_t n, int write, int atomic, uint32_t epoch, uint32_t tg, const char *what, size_t at) {
  uint32_t simd = groups[msl_lane / WIDTH].epoch;
  int raced = 0, uninitialised = 0;
  for (size_t i = 0; i < n; i++, s++) {
    if (s->has_writer && !(atomic && s->atomic) && (s->writer_tg != tg || !ordered(s->writer, s->writer_epoch, s->writer_simd_epoch, epoch))) raced = s->writer + 1;
    if (write) {
      if (s->has_reader && !atomic && (s->reader_tg != tg || !ordered(s->reader, s->reader_epoch, s->reader_simd_epoch, epoch))) raced = s->reader + 1;
      s->writer = msl_lane; s->writer_epoch = epoch; s->writer_simd_epoch = simd; s->writer_tg = tg; s->has_writer = 1; s->atomic = atomic; s->initialised = 1;
    } else {
      uninitialised |= !s->initialised;
      s->reader = msl_lane; s->reader_epoch = epoch; s->reader_simd_epoch = simd; s->reader_tg = tg; s->has_reader = 1;
    }
  }
  if (raced) find("race: %s byte %zu, %s by thread %d against thread %d", what, at, write ? "write" : "read", msl_lane, raced - 1);
  if (uninitialised) find("uninitialised read: %s byte %zu", what, at);
}

static void access_memory(unsigned char *p, size_t n, int write, int atomic) {
  if (p >= stacks && p < stacks + (size_t)MAX_LANES * STACK_BYTES) return;
  if (p >= arena && p < arena + ARENA_BYTES) {
    for (int i = 0; i < array_count; i++)
      if (p >= arrays[i].at && p + n <= arrays[i].at + arrays[i].bytes) {
        touch(arena_shadow + (p - arena), n, write, atomic, tg_epoch, tg_index, "threadgroup memory", p - arena);
        return;
      }
    find("out of bounds: threadgroup memory byte %zu is in no array", (size_t)(p - arena));
    return;
  }
  for (int i = 0; i < run->count; i++) {
    Buffer *b = &buffers[i];
    if (p < b->base || p >= b->base + b->mapped) continue;
    size_t at = p - b->data;
    if (p < b->data || at + n > b->bytes) { find("out of bounds: buffer %d byte %td of %zu", i, p - b->data, b->bytes); return; }
    if (write) { report->written[i] += n; if (!b->writable) find("write to input buffer %d byte %zu", i, at); }
    else {
      report->read[i] += n;
      if (b->round[at] != round_id) { b->round[at] = round_id; report->unique_read[i] += n; }
    }
    char name[24];
    if (b->writable) { snprintf(name, sizeof name, "buffer %d", i); touch(b->shadow + at, n, write, atomic, device_epoch, tg_index, name, at); }
    return;
  }
}

void msl_atomic_access(void *p, int n) { if (run->check) access_memory(p, n, 1, 1); }

#define HOOK(n) \
  void __tsan_read##n(void *p) { access_memory(p, n, 0, 0); } \
  void __tsan_write##n(void *p) { access_memory(p, n, 1, 0); } \
  void __tsan_unaligned_read##n(void *p) { access_memory(p, n, 0, 0); } \
  void __tsan_unaligned_write##n(void *p) { access_memory(p, n, 1, 0); } \
  void __tsan_read_write##n(void *p) { access_memory(p, n, 0, 0); access_memory(p, n, 1, 0); } \
  void __tsan_unaligned_read_write##n(void *p) { access_memory(p, n, 0, 0); access_memory(p, n, 1, 0); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_init(void) {}
void __tsan_func_entry(void *pc) { (void)pc; }
void __tsan_func_exit(void) {}
void __tsan_vptr_read(void **p) { (void)p; }
void __tsan_vptr_update(void **p, void *v) { (void)p; (void)v; }
void __tsan_read_range(void *p, size_t n) { access_memory(p, n, 0, 0); }
void __tsan_write_range(void *p, size_t n) { access_memory(p, n, 1, 0); }
void *__tsan_memcpy(void *d, const void *s, size_t n) { access_memory((void *)s, n, 0, 0); access_memory(d, n, 1, 0); return memcpy(d, s, n); }
void *__tsan_memmove(void *d, const void *s, size_t n) { access_memory((void *)s, n, 0, 0); access_memory(d, n, 1, 0); return memmove(d, s, n); }
void *__tsan_memset(void *d, int v, size_t n) { access_memory(d, n, 1, 0); return memset(d, v, n); }

typedef struct { const char *file; uint32_t line, column; } Location; /* how every ubsan record begins */
#define UB(name, what) \
  void __ubsan_handle_##name(Location *at, void *a, void *b) { (void)a; (void)b; find(what ": line %u column %u", at->line, at->column); }
UB(add_overflow, "integer overflow in +") UB(sub_overflow, "integer overflow in -") UB(mul_overflow, "integer overflow in *")
UB(negate_overflow, "integer overflow in unary -") UB(divrem_overflow, "division by zero or overflow") UB(shift_out_of_bounds, "shift by too much")
UB(out_of_bounds, "array index out of bounds") UB(type_mismatch_v1, "misaligned or null access") UB(float_cast_overflow, "float does not fit the integer type")
UB(pointer_overflow, "pointer overflow") UB(load_invalid_value, "invalid bool or enum value")
void __ubsan_handle_builtin_unreachable(Location *at) { find("unreachable code reached: line %u", at->line); leave(report); }
void __ubsan_handle_missing_return(Location *at) { find("function ends without a value: line %u", at->line); leave(report); }

/* clang lowers float -> __bf16 to this call on CPUs without the instruction. Round to nearest even, as the GPU does. */
typedef __bf16 BFloat;
BFloat __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t top = (x != x) ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  BFloat result;
  memcpy(&result, &top, 2);
  return result;
}

/* ---- memory and dispatch ---------------------------------------------------------------------------------------- */
static size_t page_round(size_t n) { size_t page = sysconf(_SC_PAGESIZE); return (n + page - 1) / page * page; }

/* A block of `bytes` that ends (up to 16-byte alignment) at an inaccessible page. */
void *msl_allocate(int64_t bytes) {
  size_t padded = ((size_t)bytes + 15) & ~(size_t)15, mapped = page_round(padded) + 2 * page_round(1);
  unsigned char *base = mmap(0, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return 0;
  mprotect(base, page_round(1), PROT_NONE);
  mprotect(base + mapped - page_round(1), page_round(1), PROT_NONE);
  return base + mapped - page_round(1) - padded;
}
void msl_free(void *p, int64_t bytes) {
  size_t padded = ((size_t)bytes + 15) & ~(size_t)15, mapped = page_round(padded) + 2 * page_round(1);
  munmap((unsigned char *)p + padded + page_round(1) - mapped, mapped);
}

static void on_fault(int signal_number, siginfo_t *info, void *context) {
  (void)context;
  unsigned char *p = info->si_addr;
  int named = 0;
  for (int i = 0; i < run->count && signal_number == SIGSEGV; i++)
    if (p >= buffers[i].base && p < buffers[i].base + buffers[i].mapped) { find("out of bounds: buffer %d byte %td of %zu", i, p - buffers[i].data, buffers[i].bytes); named = 1; }
  if (!named) find("fault: signal %d at address %p", signal_number, (void *)p);
  report->aborted = 1;
  siglongjmp(escape, 1);
}

static int start(void) {
  if (stacks) return 1;
  stacks = mmap(0, (size_t)MAX_LANES * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  arena_base = mmap(0, ARENA_BYTES + 2 * page_round(1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stacks == MAP_FAILED || arena_base == MAP_FAILED) return 0;
  arena = arena_base + page_round(1);
  mprotect(arena_base, page_round(1), PROT_NONE);
  mprotect(arena + ARENA_BYTES, page_round(1), PROT_NONE);
  return 1;
}

static void prepare_lane(int i, const uint32_t tg[3], const uint32_t count[3]) {
  const uint32_t *d = run->group;
  uint32_t at[3] = {i % d[0], i / d[0] % d[1], i / (d[0] * d[1])};
  Position *p = &msl_position[i];
  for (int a = 0; a < 3; a++) {
    p->thread_in_group[a] = at[a]; p->group_in_grid[a] = tg[a]; p->thread_in_grid[a] = tg[a] * d[a] + at[a];
    p->threads_per_group[a] = d[a]; p->groups[a] = count[a]; p->grid[a] = run->grid[a];
  }
  p->index = i; p->simdgroup = i / WIDTH; p->lane = i % WIDTH; p->simdgroups = group_count;
  void **sp = (void **)(stacks + (size_t)(i + 1) * STACK_BYTES - 16);
  *--sp = 0;                 /* keeps the stack 16-byte aligned at lane_main's entry */
  *--sp = (void *)lane_main; /* popped by ret */
  for (int r = 0; r < 6; r++) *--sp = 0;
  lanes[i].sp = sp; lanes[i].state = RUNNABLE; lanes[i].index = i; lanes[i].flags = 0;
}

static void run_threadgroup(const uint32_t tg[3], const uint32_t count[3]) {
  memset(arena, 0xff, arena_used ? arena_used : ARENA_BYTES); /* NaN in every float format */
  if (run->check) memset(arena_shadow, 0, sizeof(Shadow) * (arena_used ? arena_used : ARENA_BYTES));
  array_count = 0; arena_used = 0;
  tg_epoch++; device_epoch++; round_id++;
  for (int g = 0; g < group_count; g++) {
    Group *group = &groups[g];
    group->first = g * WIDTH;
    group->width = lane_count - group->first < WIDTH ? lane_count - group->first : WIDTH;
    group->position = 0; group->state = RUNNABLE; group->epoch++;
    order_lanes(group);
  }
  for (int i = 0; i < lane_count; i++) prepare_lane(i, tg, count);
  current_group = pick_group(first_group());
  msl_lane = groups[current_group].order[0];
  msl_switch(&main_sp, lanes[msl_lane].sp);
}

static void run_grid(void) {
  uint32_t count[3];
  for (int a = 0; a < 3; a++) {
    if (run->group[a] == 0 || run->grid[a] % run->group[a]) { find("grid %u is not a multiple of threadgroup %u", run->grid[a], run->group[a]); return; }
    count[a] = run->grid[a] / run->group[a];
  }
  uint64_t total = (uint64_t)count[0] * count[1] * count[2];
  for (uint64_t k = 0; k < total && !report->aborted; k++) {
    uint64_t t = run->schedule == 1 ? total - 1 - k : k;
    uint32_t tg[3] = {t % count[0], t / count[0] % count[1], t / ((uint64_t)count[0] * count[1])};
    tg_index = t;
    run_threadgroup(tg, count);
    report->threadgroups++;
  }
}

/* Runs one dispatch. Returns 0; what went wrong is in `out`. */
int msl_dispatch(Dispatch *dispatch, Report *out) {
  static unsigned char signal_stack[65536];
  run = dispatch; report = out; rng = dispatch->seed | 1;
  memset(report, 0, sizeof *report);
  if (!start()) { find("no memory for fiber stacks"); report->aborted = 1; return 0; }
  uint64_t size = (uint64_t)run->group[0] * run->group[1] * run->group[2];
  if (size == 0 || size > MAX_LANES) { find("threadgroup of %llu threads, %d allowed", (unsigned long long)size, MAX_LANES); report->aborted = 1; return 0; }
  lane_count = size; group_count = (size + WIDTH - 1) / WIDTH; arena_used = 0;
  for (int i = 0; i < run->count; i++) {
    Buffer *b = &buffers[i];
    size_t padded = ((size_t)run->bytes[i] + 15) & ~(size_t)15;
    b->data = run->buffers[i]; b->bytes = run->bytes[i]; b->mapped = page_round(padded) + 2 * page_round(1);
    b->base = b->data + padded + page_round(1) - b->mapped; b->writable = run->writable[i];
    b->shadow = run->check && b->writable ? calloc(b->bytes + 16, sizeof(Shadow)) : 0;
    b->round = run->check ? calloc(b->bytes + 16, 4) : 0;
  }
  stack_t alternate = {.ss_sp = signal_stack, .ss_size = sizeof signal_stack}, old_stack;
  struct sigaction action, old[3];
  int watched[3] = {SIGSEGV, SIGBUS, SIGFPE};
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault; action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaltstack(&alternate, &old_stack);
  for (int i = 0; i < 3; i++) sigaction(watched[i], &action, &old[i]);
  if (!sigsetjmp(escape, 1)) run_grid();
  for (int i = 0; i < 3; i++) sigaction(watched[i], &old[i], 0);
  sigaltstack(&old_stack, 0);
  for (int i = 0; i < run->count; i++) { free(buffers[i].shadow); free(buffers[i].round); }
  return 0;
}
