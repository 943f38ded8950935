/* The second half of fused.h: walks through time, of the steps that there are. */

INLINE real *row_at(const fused_args *a, real *block, int part, long r) { return block + r * padded(a, part); }

static void load_whole(const fused_args *a, const group *g, real *const *blocks, const real *from, int by_sequence) {
  for (int part = 0; part < PARTS; part++)
    for (long r = 0; r < g->count; r++) {
      const long row = by_sequence ? a->seq[g->first + r] : g->first + r;
      memcpy(row_at(a, blocks[part], part, r), from + row * SIZE + part_offset(a, part), sizeof(real) * part_width(a, part));
    }
}
static void save_whole(const fused_args *a, const group *g, real *const *blocks, real *to) {
  for (int part = 0; part < PARTS; part++)
    for (long r = 0; r < g->count; r++)
      memcpy(to + (g->first + r) * SIZE + part_offset(a, part), row_at(a, blocks[part], part, r), sizeof(real) * part_width(a, part));
}
/* A part that keeps nothing of itself has decayed to zero after any step, and over no steps it is what it was. */
static void save_decay(const fused_args *a, group *g) {
  if (!a->decay) return;
  for (int part = 0; part < PARTS; part++)
    if (!(DECAYING >> part & 1))
      for (long r = 0; r < g->count; r++)
        for (long i = 0; i < part_width(a, part); i++)
          row_at(a, g->decay[part], part, r)[i] = a->end[g->first + r] > a->begin[g->first + r] ? 0 : 1;
  save_whole(a, g, g->decay, a->decay);
}
static void start_decay(const fused_args *a, group *g) {
  for (int part = 0; part < PARTS; part++)
    for (long i = 0; i < g->count * padded(a, part); i++) g->decay[part][i] = 1;
}
/* Rows that made no step keep what they had; then what is next is now. */
static void swap_in(const fused_args *a, group *g, real **now, real **next) {
  int copied = 0;
  for (int part = 0; part < PARTS; part++) {
    for (long r = 0; r < g->count; r++) {
      if (g->steps[r]) continue;
      if (leads(g)) memcpy(row_at(a, next[part], part, r), row_at(a, now[part], part, r), sizeof(real) * part_width(a, part));
      copied = 1;
    }
    real *before = now[part];
    now[part] = next[part], next[part] = before;
  }
  if (copied) meet(g);
}
static void forget(const fused_args *a, group *g, long r) {
  for (int part = 0; part < PARTS; part++) memset(row_at(a, g->decay[part], part, r), 0, sizeof(real) * padded(a, part));
}

/* Whether a thread goes on behind a step: not if a team is given up, which leaves all units to its first member. */
INLINE int goes_on(group *g) {
  if (!g->others || !atomic_load_explicit(&g->others->given_up, memory_order_relaxed)) return 1;
  g->others = NULL, g->members = 1;
  return leads(g);
}

#ifdef FORWARD_STEP
static void walk_forward(const fused_args *a, group *g) {
  if (leads(g)) {
    if (a->lead) load_whole(a, g, g->state, a->origin, 1);
    else load_whole(a, g, g->state, a->ends, 0);
    start_decay(a, g);
  }
  meet(g);
  for (long step = 0; step <= a->lead + g->longest; step++) {
    if (a->lead && step == a->lead && leads(g)) save_whole(a, g, g->state, a->starts);
    if (step == a->lead + g->longest) break;
    const int real_step = step >= a->lead;
    int reset = 0;
    for (long r = 0; r < g->count; r++) {
      const long row = g->first + r, b = a->seq[row], t = a->begin[row] - a->lead + step;
      g->steps[r] = t >= 0 && t < a->end[row] && a->end[row] > a->begin[row];
      g->token[r] = g->steps[r] ? t * a->batch + b : 0;
      if (!g->steps[r] || !a->resets || !a->resets[g->token[r]]) continue;
      reset = 1;
      if (!leads(g)) continue;
      for (int part = 0; part < PARTS; part++)
        memcpy(row_at(a, g->state[part], part, r), a->origin + b * SIZE + part_offset(a, part), sizeof(real) * part_width(a, part));
      if (real_step) forget(a, g, r);
    }
    if (reset) meet(g);
    FORWARD_STEP(a, g, real_step && a->decay, real_step && a->states);
    g->turned = !g->turned;
    swap_in(a, g, g->state, g->next);
    if (!goes_on(g)) return;
  }
  if (!leads(g)) return;
  save_whole(a, g, g->state, a->ends);
  save_decay(a, g);
}

#endif

#ifdef ADJOINT_STEP
/* Where the state before the step lies, if not at a reset; and, unless the step does it, what the loss itself adds to the
 * gradient behind it. */
static void fetch(const fused_args *a, group *g, long r) {
  const int reset = a->resets && a->resets[g->token[r]];
  for (int part = 0; part < PARTS; part++) {
    const long width = part_width(a, part);
    if (!reset) g->before[part][r] = a->states[part] + g->token[r] * width;
    for (long at = 0; !LOSS_IN_STEP && leads(g) && at < width; at += WIDE)
      *(V *)(row_at(a, g->grad[part], part, r) + at) += loss_of(a, g, part, r, at, width - at);
  }
}
/* Rows write to memory, or for the sums, or nowhere: to the first of the places that are kept in cache. */
static void place_written(const fused_args *a, group *g, long slot, int real_step) {
  for (long r = 0; r < g->count; r++) {
    const int kept = a->written && real_step && g->steps[r];
    g->out[r] = kept ? a->written + g->token[r] * WRITTEN : g->ring + (slot * g->count + r) * WRITTEN_STRIDE;
  }
}
static void wait_for_sums(const fused_args *a, group *g, waiting *w) {
  const long widths[] = COPIED_WIDTHS, from[] = COPIED_FROM, to[] = COPIED_TO;
  for (long r = 0; r < g->count; r++) {
    if (!g->steps[r]) continue;
    for (int part = 0; part < PARTS; part++) w->before[part][w->count] = g->before[part][r];
    w->inputs[w->count] = a->inputs + g->token[r] * a->input_stride;
    w->written[w->count++] = g->out[r];
    for (int i = 0; leads(g) && a->input_grads && i < COPIED; i++)
      memcpy(a->input_grads + g->token[r] * a->input_stride + to[i], g->out[r] + from[i], sizeof(real) * widths[i]);
  }
}
static void divert_reset(const fused_args *a, group *g, long r, int real_step) {
  for (int part = 0; part < PARTS; part++) {
    real *grad = row_at(a, g->grad[part], part, r);
    real *to = a->reset_grads ? a->reset_grads + (g->first + r) * SIZE + part_offset(a, part) : NULL;
    if (real_step && to)
      for (long i = 0; i < part_width(a, part); i++) to[i] += grad[i];
    memset(grad, 0, sizeof(real) * padded(a, part));
  }
  if (real_step) forget(a, g, r);
}
static void enter_adjoint(const fused_args *a, group *g) {
  load_whole(a, g, g->grad, a->final, 1);
  for (long r = 0; r < g->count; r++)
    if (a->end[g->first + r] + a->lead < a->lengths[a->seq[g->first + r]])
      for (int part = 0; part < PARTS; part++) memset(row_at(a, g->grad[part], part, r), 0, sizeof(real) * padded(a, part));
}

static void walk_adjoint(const fused_args *a, group *g) {
  waiting w = {.count = 0};
  long slot = 0;
  if (leads(g)) {
    if (a->lead) enter_adjoint(a, g);
    else load_whole(a, g, g->grad, a->ends, 0);
    start_decay(a, g);
  }
  meet(g);
  for (long step = 0; step <= a->lead + g->longest; step++) {
    if (a->lead && step == a->lead && leads(g)) save_whole(a, g, g->grad, a->starts);
    if (step == a->lead + g->longest) break;
    const int real_step = step >= a->lead, summed = real_step && a->sums;
    for (long r = 0; r < g->count; r++) {
      const long row = g->first + r, b = a->seq[row], t = a->end[row] - 1 + a->lead - step;
      g->steps[r] = t >= a->begin[row] && a->end[row] > a->begin[row] && (!a->lead || t < a->lengths[b]);
      g->token[r] = g->steps[r] ? t * a->batch + b : 0;
      for (int part = 0; part < PARTS; part++) g->before[part][r] = a->origin + b * SIZE + part_offset(a, part);
      if (g->steps[r]) fetch(a, g, r);
    }
    place_written(a, g, slot, real_step);
    if (ADDED && leads(g))
      for (int part = 0; part < PARTS; part++) memset(g->next[part], 0, sizeof(real) * g->count * padded(a, part));
    if (ADDED || !LOSS_IN_STEP) meet(g);
    ADJOINT_STEP(a, g, real_step && a->decay, real_step);
    g->turned = !g->turned;
    swap_in(a, g, g->grad, g->next);
    int reset = 0;
    for (long r = 0; a->resets && r < g->count; r++)
      if (g->steps[r] && a->resets[g->token[r]]) {
        reset = 1;
        if (leads(g)) divert_reset(a, g, r, real_step);
      }
    if (reset) meet(g);
    if (!goes_on(g)) return;
    if (!summed) continue;
    wait_for_sums(a, g, &w);
    slot = (slot + 1) % g->slots_of_ring;
    if (slot) continue;
    sum_steps(a, g, &w);
    w.count = 0;
    meet(g); /* what is summed is written over */
  }
  if (w.count) sum_steps(a, g, &w);
  if (!leads(g)) return;
  save_whole(a, g, g->grad, a->ends);
  save_decay(a, g);
}

#endif

/* Numbers of a group's scratch. */
static long scratch_of(const fused_args *a, const group *g) {
  long row_size = SLOT_STRIDE + TOTALS * SUMMED * WIDE;
  for (int part = 0; part < PARTS; part++) row_size += 4 * padded(a, part);
  /* vectors are read to the end of their last V, and beyond */
  return g->count * (row_size + g->slots_of_ring * WRITTEN_STRIDE) + (64 + 4 * PARTS) * WIDE;
}
static void lay_out(const fused_args *a, group *g, real *at) {
  for (int part = 0; part < PARTS; part++) {
    const long block = g->count * padded(a, part) + WIDE;
    g->state[part] = at, g->next[part] = at + block, g->grad[part] = at + 2 * block, g->decay[part] = at + 3 * block;
    at += 4 * block;
  }
  g->partial = (V *)at, at += g->count * TOTALS * SUMMED * WIDE;
  g->slots = at, at += g->count * SLOT_STRIDE + WIDE;
  g->ring = (real *)(((uintptr_t)at + 63) / 64 * 64);
}
typedef void walker(const fused_args *, group *);
/* One thread's part in the walk of up to `size` rows: all of it, or that of one of the members of a team. Returns 1 where
 * there is no memory. */
static int walk_group(walker *walk, const fused_args *a, long first, long size, real *sums, team *others, long member,
                      long members) {
  group g = {.first = first, .alone = size == 1, .sums = sums, .others = others, .member = member, .members = members};
  g.count = a->rows - first < size ? a->rows - first : size;
  for (long r = first; r < first + g.count; r++)
    if (a->end[r] - a->begin[r] > g.longest) g.longest = a->end[r] - a->begin[r];
  g.slots_of_ring = a->sums ? 1 + SUM_TOKENS / g.count : 1;
  void *scratch = NULL;
  if (leads(&g)) {
    const long bytes = sizeof(real) * scratch_of(a, &g);
    if (!posix_memalign(&scratch, 64, bytes)) memset(scratch, 0, bytes);
    else scratch = NULL;
    if (others) team_begin(others, scratch);
  }
  meet(&g);
  if (!leads(&g)) scratch = others->shared;
  if (!scratch) return 1;
  lay_out(a, &g, scratch);
  walk(a, &g);
  if (leads(&g)) free(scratch); /* behind the last meeting nobody else looks at it */
  return 0;
}

/* Which group a thread takes in its `i`th turn. Chunks of a backward sweep come in the opposite order: the thread that wrote
 * a chunk's states and tape has them in its cache, so it takes the same chunk again. `each`: groups of a chunk. */
static long group_of(const fused_args *a, long i, long groups, long size) {
  if (a->begin[0] <= a->begin[a->rows - 1]) return i;
  const long each = a->batch > size ? a->batch / size : 1;
  return groups % each ? i : (groups / each - 1 - i / each) * each + i % each;
}
/* Runs all groups on all threads. Returns 0, or 1 where memory for a group's scratch could not be had. */
static int run(walker *walk, const fused_args *a, int threads) {
  const long members = a->members > 1 ? a->members : 1;
  long size = (a->rows + threads - 1) / threads;
  size = size > GROUP ? GROUP : size > ROWS ? (size + ROWS - 1) / ROWS * ROWS : size;
  size = members > 1 ? a->together : size;
  const long groups = (a->rows + size - 1) / size;
  const int asked = members > 1 ? groups * members : threads;
  team teams[MOST_TEAMS];
  if (members > 1) memset(teams, 0, sizeof(team) * groups);
  int failed = 0;
#pragma omp parallel num_threads(asked) reduction(| : failed) if (threads > 1 && groups * members > 1)
  {
    const long here = omp_get_num_threads(), me = omp_get_thread_num();
    const long shared = here == asked ? members : 1; /* nobody is waited for who has not come */
    const uint64_t mode = take_tiny_for_zero();
    /* which thread sums what must not depend on the day */
    for (long i = me / shared; i < groups; i += here / shared) {
      real *sums = a->sums ? a->sums + SUMS * (shared > 1 ? i : me) : NULL;
      team *others = shared > 1 ? &teams[i] : NULL;
      failed |= walk_group(walk, a, group_of(a, i, groups, size) * size, size, sums, others, me % shared, shared);
    }
    set_float_mode(mode);
  }
  return failed;
}

#define EXPORTED_AS(name, direction) timeloom_##name##_##direction
#define EXPORTED(name, direction) EXPORTED_AS(name, direction)
#ifdef FORWARD_STEP
int EXPORTED(NAME, forward)(const fused_args *a, int threads) { return run(walk_forward, a, threads); }
#endif
#ifdef ADJOINT_STEP
int EXPORTED(NAME, adjoint)(const fused_args *a, int threads) { return run(walk_adjoint, a, threads); }
#endif
