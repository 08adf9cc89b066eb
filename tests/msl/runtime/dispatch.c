/* Memory and launches: buffers that end at guard pages, one compute dispatch from start to report.
 *
 * Knows nothing about MSL text or about what any kernel computes. Driven from Python through ctypes
 * (emulator.py).
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

Buffer msl_buffers[MAX_BUFFERS];
Shadow msl_arena_shadow[ARENA_BYTES];
unsigned char *msl_stacks, *msl_arena;
Dispatch* msl_run;
Report* msl_report;
uint32_t msl_tg_epoch, msl_device_epoch, msl_round, msl_tg_index;
static int lane_count;
static unsigned char* arena_base;
static sigjmp_buf escape;

static size_t page_round(size_t n) {
  size_t page = sysconf(_SC_PAGESIZE);
  return (n + page - 1) / page * page;
}

/* A block of `bytes` that ends (up to 16-byte alignment) at an inaccessible page. */
void* msl_allocate(int64_t bytes) {
  size_t padded = ((size_t)bytes + 15) & ~(size_t)15, mapped = page_round(padded) + 2 * page_round(1);
  unsigned char* base = mmap(0, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return 0;
  mprotect(base, page_round(1), PROT_NONE);
  mprotect(base + mapped - page_round(1), page_round(1), PROT_NONE);
  return base + mapped - page_round(1) - padded;
}
void msl_free(void* p, int64_t bytes) {
  size_t padded = ((size_t)bytes + 15) & ~(size_t)15, mapped = page_round(padded) + 2 * page_round(1);
  munmap((unsigned char*)p + padded + page_round(1) - mapped, mapped);
}

static void on_fault(int signal_number, siginfo_t* info, void* context) {
  (void)context;
  unsigned char* p = info->si_addr;
  int named = 0;
  for (int i = 0; i < msl_run->count && signal_number == SIGSEGV; i++)
    if (p >= msl_buffers[i].base && p < msl_buffers[i].base + msl_buffers[i].mapped) {
      msl_find("out of bounds: buffer %d byte %td of %zu", i, p - msl_buffers[i].data, msl_buffers[i].bytes);
      named = 1;
    }
  if (!named) msl_find("fault: signal %d at address %p", signal_number, (void*)p);
  msl_report->aborted = 1;
  siglongjmp(escape, 1);
}

static int start(void) {
  if (msl_stacks) return 1;
  msl_stacks = mmap(0, (size_t)MAX_LANES * STACK_BYTES, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  arena_base =
      mmap(0, ARENA_BYTES + 2 * page_round(1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (msl_stacks == MAP_FAILED || arena_base == MAP_FAILED) return 0;
  msl_arena = arena_base + page_round(1);
  mprotect(arena_base, page_round(1), PROT_NONE);
  mprotect(msl_arena + ARENA_BYTES, page_round(1), PROT_NONE);
  return 1;
}

static void prepare_lane(int i, const uint32_t tg[3], const uint32_t count[3]) {
  const uint32_t* d = msl_run->group;
  uint32_t at[3] = {i % d[0], i / d[0] % d[1], i / (d[0] * d[1])};
  Position* p = &msl_position[i];
  for (int a = 0; a < 3; a++) {
    p->thread_in_group[a] = at[a];
    p->group_in_grid[a] = tg[a];
    p->thread_in_grid[a] = tg[a] * d[a] + at[a];
    p->threads_per_group[a] = d[a];
    p->groups[a] = count[a];
    p->grid[a] = msl_run->grid[a];
  }
  p->index = i;
  p->simdgroup = i / WIDTH;
  p->lane = i % WIDTH;
  p->simdgroups = msl_group_count;
  msl_lanes[i].sp = msl_new_stack(i);
  msl_lanes[i].state = RUNNABLE;
  msl_lanes[i].index = i;
  msl_lanes[i].flags = 0;
}

static void run_threadgroup(const uint32_t tg[3], const uint32_t count[3]) {
  memset(msl_arena, 0xff, msl_arena_used ? msl_arena_used : ARENA_BYTES); /* NaN in every float format */
  if (msl_run->check)
    memset(msl_arena_shadow, 0, sizeof(Shadow) * (msl_arena_used ? msl_arena_used : ARENA_BYTES));
  msl_array_count = 0;
  msl_arena_used = 0;
  msl_tg_epoch++;
  msl_device_epoch++;
  msl_round++;
  for (int g = 0; g < msl_group_count; g++) {
    Group* group = &msl_groups[g];
    group->first = g * WIDTH;
    group->width = lane_count - group->first < WIDTH ? lane_count - group->first : WIDTH;
    group->position = 0;
    group->state = RUNNABLE;
    group->epoch++;
    msl_order_lanes(group);
  }
  for (int i = 0; i < lane_count; i++) prepare_lane(i, tg, count);
  msl_run_lanes();
}

static void run_grid(void) {
  uint32_t count[3];
  for (int a = 0; a < 3; a++) {
    if (msl_run->group[a] == 0 || msl_run->grid[a] % msl_run->group[a]) {
      msl_find("grid %u is not a multiple of threadgroup %u", msl_run->grid[a], msl_run->group[a]);
      return;
    }
    count[a] = msl_run->grid[a] / msl_run->group[a];
  }
  uint64_t total = (uint64_t)count[0] * count[1] * count[2];
  for (uint64_t k = 0; k < total && !msl_report->aborted; k++) {
    uint64_t t = msl_run->schedule == 1 ? total - 1 - k : k;
    uint32_t tg[3] = {t % count[0], t / count[0] % count[1], t / ((uint64_t)count[0] * count[1])};
    msl_tg_index = t;
    run_threadgroup(tg, count);
    msl_report->threadgroups++;
  }
}

/* Runs one dispatch. Returns 0; what went wrong is in `out`. */
int msl_dispatch(Dispatch* dispatch, Report* out) {
  static unsigned char signal_stack[65536];
  msl_run = dispatch;
  msl_report = out;
  msl_random_state = dispatch->seed | 1;
  memset(msl_report, 0, sizeof *msl_report);
  if (!start()) {
    msl_find("no memory for fiber stacks");
    msl_report->aborted = 1;
    return 0;
  }
  uint64_t size = (uint64_t)msl_run->group[0] * msl_run->group[1] * msl_run->group[2];
  if (size == 0 || size > MAX_LANES) {
    msl_find("threadgroup of %llu threads, %d allowed", (unsigned long long)size, MAX_LANES);
    msl_report->aborted = 1;
    return 0;
  }
  lane_count = size;
  msl_group_count = (size + WIDTH - 1) / WIDTH;
  msl_arena_used = 0;
  for (int i = 0; i < msl_run->count; i++) {
    Buffer* b = &msl_buffers[i];
    size_t padded = ((size_t)msl_run->bytes[i] + 15) & ~(size_t)15;
    b->data = msl_run->buffers[i];
    b->bytes = msl_run->bytes[i];
    b->mapped = page_round(padded) + 2 * page_round(1);
    b->base = b->data + padded + page_round(1) - b->mapped;
    b->writable = msl_run->writable[i];
    b->shadow = msl_run->check && b->writable ? calloc(b->bytes + 16, sizeof(Shadow)) : 0;
    b->round = msl_run->check ? calloc(b->bytes + 16, 4) : 0;
  }
  stack_t alternate = {.ss_sp = signal_stack, .ss_size = sizeof signal_stack}, old_stack;
  struct sigaction action, old[3];
  int watched[3] = {SIGSEGV, SIGBUS, SIGFPE};
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaltstack(&alternate, &old_stack);
  for (int i = 0; i < 3; i++) sigaction(watched[i], &action, &old[i]);
  if (!sigsetjmp(escape, 1)) run_grid();
  for (int i = 0; i < 3; i++) sigaction(watched[i], &old[i], 0);
  sigaltstack(&old_stack, 0);
  for (int i = 0; i < msl_run->count; i++) {
    free(msl_buffers[i].shadow);
    free(msl_buffers[i].round);
  }
  return 0;
}
