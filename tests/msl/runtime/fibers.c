/* Who runs when: one fiber per Metal thread, collectives, barriers, threadgroup arrays.
 *
 * A lane runs until it meets a collective, a barrier or its end; then the next lane of its simdgroup runs.
 * When the last lane has stopped, all must have stopped at the same place, or the dispatch is divergent and
 * is abandoned.
 */
#include "runtime.h"

Position msl_position[MAX_LANES];
int msl_lane;
Lane msl_lanes[MAX_LANES];
Group msl_groups[WIDTH];
int msl_group_count, msl_array_count;
Array msl_arrays[MAX_ARRAYS];
size_t msl_arena_used;
uint32_t msl_random_state;
static Slot slots[MAX_LANES];
static int current_group;
static void* main_sp;

void msl_switch(void** save, void* to);
__asm__(
    ".text\n.globl msl_switch\nmsl_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");

static uint32_t next_random(void) {
  msl_random_state ^= msl_random_state << 13;
  msl_random_state ^= msl_random_state >> 17;
  msl_random_state ^= msl_random_state << 5;
  return msl_random_state;
}

void msl_order_lanes(Group* g) {
  for (int i = 0; i < g->width; i++) g->order[i] = g->first + (msl_run->schedule == 1 ? g->width - 1 - i : i);
  if (msl_run->schedule == 2)
    for (int i = g->width - 1; i > 0; i--) {
      int j = next_random() % (i + 1), t = g->order[i];
      g->order[i] = g->order[j];
      g->order[j] = t;
    }
}

static int pick_group(int after) { /* a simdgroup that can run, or -1 */
  int start = msl_run->schedule == 2 ? (int)(next_random() % msl_group_count) : after;
  for (int i = 0; i < msl_group_count; i++) {
    int g = (msl_run->schedule == 1 ? start - i + msl_group_count : start + i) % msl_group_count;
    if (msl_groups[g].state == RUNNABLE) return g;
  }
  return -1;
}

static int first_group(void) { return msl_run->schedule == 1 ? msl_group_count - 1 : 0; }

static void leave(void) { /* back to the dispatcher */
  void* ignored;
  msl_switch(&ignored, main_sp);
}

void msl_abandon(void) {
  msl_report->aborted = 1;
  leave();
}

static void release_barrier(void) {
  int waiting = 0, flags = 0;
  for (int g = 0; g < msl_group_count; g++) {
    if (msl_groups[g].state == AT_BARRIER) waiting++;
    flags |= msl_groups[g].state == AT_BARRIER ? msl_lanes[msl_groups[g].first].flags : 0;
  }
  if (!waiting) leave();
  if (waiting < msl_group_count) {
    msl_find("divergence: threadgroup_barrier reached by %d of %d simdgroups", waiting, msl_group_count);
    msl_abandon();
  }
  msl_report->barriers++;
  if (flags & MEM_THREADGROUP) msl_tg_epoch++;
  if (flags & MEM_DEVICE) msl_device_epoch++;
  for (int g = 0; g < msl_group_count; g++) {
    msl_groups[g].state = RUNNABLE;
    for (int i = 0; i < msl_groups[g].width; i++) msl_lanes[msl_groups[g].first + i].state = RUNNABLE;
  }
}

static void finish_round(Group* g) { /* every lane of g has stopped: do what they wait for */
  Lane* first = &msl_lanes[g->first];
  for (int i = 1; i < g->width; i++) {
    Lane* l = first + i;
    if (l->state != first->state || (l->state == AT_SIMD && (l->combine != first->combine ||
                                                             l->is_simd_barrier != first->is_simd_barrier))) {
      msl_find("divergence: lanes %d and %d of simdgroup %d stopped at different operations", 0, i,
               (int)(g - msl_groups));
      msl_abandon();
    }
  }
  msl_round++;
  g->position = 0;
  if (msl_run->schedule == 2) msl_order_lanes(g);
  if (first->state == AT_SIMD) {
    if (first->is_simd_barrier) {
      g->epoch += first->flags != 0;
    } else {
      first->combine(slots + g->first, g->width);
      msl_report->simd_ops++;
    }
    for (int i = 0; i < g->width; i++) first[i].state = RUNNABLE;
    if (msl_run->schedule != 2) return;
  } else
    g->state = first->state;
  int next = pick_group(g - msl_groups);
  if (next < 0) {
    release_barrier();
    next = pick_group(first_group());
  }
  current_group = next;
}

static void stop(Lane* self) { /* the running lane waits (or ends): run whoever is next */
  Group* g = &msl_groups[current_group];
  if (++g->position == g->width) {
    finish_round(g);
    g = &msl_groups[current_group];
  }
  int next = g->order[g->position];
  if (next == self->index && self->state == RUNNABLE) return;
  msl_lane = next;
  msl_switch(&self->sp, msl_lanes[next].sp);
}

static void lane_main(void) {
  msl_run->entry(msl_run->buffers);
  msl_lanes[msl_lane].state = FINISHED;
  stop(&msl_lanes[msl_lane]);
  __builtin_trap();
}

void msl_run_lanes(void) {
  current_group = pick_group(first_group());
  msl_lane = msl_groups[current_group].order[0];
  msl_switch(&main_sp, msl_lanes[msl_lane].sp);
}

void* msl_new_stack(int lane) {
  void** sp = (void**)(msl_stacks + (size_t)(lane + 1) * STACK_BYTES - 16);
  *--sp = 0;                /* keeps the stack 16-byte aligned at lane_main's entry */
  *--sp = (void*)lane_main; /* popped by ret */
  for (int r = 0; r < 6; r++) *--sp = 0;
  return sp;
}

/* ---- what the shim calls ---- */
Slot* msl_slot(void) { return &slots[msl_lane]; }

void msl_collective(Combine combine) {
  Lane* l = &msl_lanes[msl_lane];
  l->state = AT_SIMD;
  l->combine = combine;
  l->is_simd_barrier = 0;
  stop(l);
}
void msl_simdgroup_barrier(int flags) {
  Lane* l = &msl_lanes[msl_lane];
  l->state = AT_SIMD;
  l->combine = 0;
  l->is_simd_barrier = 1;
  l->flags = flags;
  stop(l);
}
void msl_threadgroup_barrier(int flags) {
  Lane* l = &msl_lanes[msl_lane];
  l->state = AT_BARRIER;
  l->flags = flags;
  stop(l);
}
void msl_count_mma(void) { msl_report->mma_ops++; }

/* Address of a threadgroup array, the same for all lanes. key: the array's declaration. */
void* msl_threadgroup_array(const void* key, size_t bytes) {
  for (int i = 0; i < msl_array_count; i++)
    if (msl_arrays[i].key == key) return msl_arrays[i].at;
  size_t at = (msl_arena_used + 15) & ~(size_t)15;
  if (at + bytes > ARENA_BYTES || msl_array_count == MAX_ARRAYS) {
    msl_find("threadgroup memory: %zu bytes needed, %d allowed", at + bytes, ARENA_BYTES);
    msl_abandon();
  }
  msl_arena_used = at + bytes;
  if ((int64_t)msl_arena_used > msl_report->threadgroup_bytes) msl_report->threadgroup_bytes = msl_arena_used;
  msl_arrays[msl_array_count].key = key;
  msl_arrays[msl_array_count].bytes = bytes;
  msl_arrays[msl_array_count].at = msl_arena + at;
  return msl_arrays[msl_array_count++].at;
}
