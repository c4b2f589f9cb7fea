/* A serving loop in C: requests share a paged K/V cache, a step takes one token of each running
 * one.
 *
 *   cc -std=c99 examples/loop.c -o loop $(pkg-config --cflags --libs attn) -lm && ./loop
 *
 * Two plans serve every step: kv_append writes the new keys and values into pages, attn_run attends
 * over them. What changes from step to step is in arrays: lengths, the block table, whose rows
 * have a token. q, k and v are a formula's, in the place of a model's; each output is held against
 * attention in double over the request's own keys. It runs on the host in float32; on a device the
 * same calls take f16 or bf16 and memory by attn_alloc, with a stream. */
#include <attn/attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { slots = 4, requests = 14, heads = 4, heads_kv = 2, head_dim = 32 };
enum { page_size = 8, max_pages = 6, num_pages = 18, row = heads_kv * head_dim };

static void need(attn_status status) {
  if (status == ATTN_OK) return;
  fprintf(stderr, "%s: %s\n", attn_status_string(status), attn_last_error());
  exit(1);
}

/* Of q (0), k (1) or v (2) of a request's token: an element in [-1, 1). */
static float element(int which, int request, int token, int head, int i) {
  unsigned x = (((which * 131u + request) * 257u + token) * 31u + head) * 61u + i;
  x = (x ^ (x >> 15)) * 2654435761u;
  x = (x ^ (x >> 13)) * 2246822519u;
  return (float)(x >> 8) / 8388608.0f - 1;
}

static int tokens_of(int request) {
  return 1 + request * 17 % (page_size * max_pages);
}

/* The largest error of a token's output [heads, head_dim]. */
static double error_of(const float* out, int request, int token) {
  double worst = 0;
  for (int h = 0; h < heads; ++h) {
    double weights[page_size * max_pages], total = 0;
    const int hkv = h / (heads / heads_kv);
    for (int t = 0; t <= token; ++t) {
      double dot = 0;
      for (int i = 0; i < head_dim; ++i)
        dot += (double)element(0, request, token, h, i) * element(1, request, t, hkv, i);
      total += weights[t] = exp(dot / sqrt(head_dim));
    }
    for (int i = 0; i < head_dim; ++i) {
      double sum = 0;
      for (int t = 0; t <= token; ++t) sum += weights[t] * element(2, request, t, hkv, i);
      worst = fmax(worst, fabs(out[h * head_dim + i] - sum / total));
    }
  }
  return worst;
}

int main(void) {
  /* The cache, and which pages are free. */
  static float k_pages[num_pages * page_size * row], v_pages[num_pages * page_size * row];
  int free_pages[num_pages], num_free = num_pages;
  for (int i = 0; i < num_pages; ++i) free_pages[i] = i;

  /* Of each slot: its request, -1 for none, how many tokens it has had, and what the plans read. */
  int request[slots], seen[slots] = {0}, next = 0, done = 0;
  int32_t lengths[slots] = {0}, table[slots][max_pages] = {{0}}, offsets[slots + 1] = {0};
  for (int s = 0; s < slots; ++s) request[s] = -1;
  static float q[slots * heads * head_dim], out[slots * heads * head_dim];
  static float k[slots * row], v[slots * row];

  attn_context* context;
  attn_plan *append, *attend;
  attn_segment cache = {sizeof cache};
  cache.k_type = cache.v_type = ATTN_F32;
  cache.layout = ATTN_PAGED;
  cache.has_seqlens = 1;
  cache.num_pages = num_pages;
  cache.page_size = page_size;
  cache.max_pages = max_pages;

  attn_kv_append_problem write = {sizeof write};
  write.batch = slots;
  write.heads_kv = heads_kv;
  write.head_dim = head_dim;
  write.seqlen_new = 1;
  write.total_new = slots;
  write.new_layout = ATTN_PACKED;
  write.new_type = ATTN_F32;
  write.segment = cache;
  write.advance_seqlens = 1;

  attn_problem read = {sizeof read};
  read.batch = slots;
  read.heads_q = heads;
  read.heads_kv = heads_kv;
  read.head_dim = head_dim;
  read.seqlen_q = 1;
  read.total_q = slots;
  read.q_layout = ATTN_PACKED;
  read.q_type = ATTN_F32;
  read.num_segments = 1;
  read.segments = &cache;

  need(attn_context_create(ATTN_BACKEND_CPU, NULL, &context));
  need(attn_plan_create_kv_append(context, &write, &append));
  need(attn_plan_create(context, &read, &attend));
  const size_t bytes = attn_plan_workspace(attend);
  void* workspace = NULL;
  if (bytes) {
    need(attn_alloc(context, bytes, &workspace));
    need(attn_workspace_init(attend, workspace, bytes, NULL));
  }

  attn_kv_append_args write_args = {sizeof write_args};
  write_args.k_new = k;
  write_args.v_new = v;
  write_args.cu_seqlens_new = offsets;
  write_args.cache.struct_size = sizeof write_args.cache;
  write_args.cache.k = k_pages;
  write_args.cache.v = v_pages;
  write_args.cache.seqlens = lengths;
  write_args.cache.block_table = &table[0][0];
  write_args.seqlens_out = lengths;
  attn_args read_args = {sizeof read_args};
  read_args.q = q;
  read_args.out = out;
  read_args.cu_seqlens_q = offsets;
  read_args.num_segments = 1;
  read_args.segments = &write_args.cache;

  int steps = 0, tokens = 0, waited = 0;
  double worst = 0;
  while (done < requests) {
    /* Requests come in where a slot is free and all their pages are. */
    int promised = 0;
    for (int s = 0; s < slots; ++s)
      if (request[s] >= 0)
        promised += (tokens_of(request[s]) + page_size - 1) / page_size -
                    (seen[s] + page_size - 1) / page_size;
    for (int s = 0; s < slots; ++s) {
      if (request[s] >= 0 || next == requests) continue;
      const int pages = (tokens_of(next) + page_size - 1) / page_size;
      if (promised + pages > num_free) {
        ++waited;
        break;
      }
      promised += pages;
      request[s] = next++;
      seen[s] = lengths[s] = 0;
    }
    /* A token of each; a page where the last one is full. */
    for (int s = 0; s < slots; ++s) {
      const int to = offsets[s], running = request[s] >= 0;
      offsets[s + 1] = to + running;
      if (!running) continue;
      if (seen[s] % page_size == 0) table[s][seen[s] / page_size] = free_pages[--num_free];
      for (int i = 0; i < heads * head_dim; ++i)
        q[to * heads * head_dim + i] = element(0, request[s], seen[s], i / head_dim, i % head_dim);
      for (int i = 0; i < row; ++i) {
        k[to * row + i] = element(1, request[s], seen[s], i / head_dim, i % head_dim);
        v[to * row + i] = element(2, request[s], seen[s], i / head_dim, i % head_dim);
      }
    }
    need(attn_run_kv_append(append, &write_args, NULL)); /* advances lengths */
    need(attn_run(attend, &read_args, workspace, bytes, NULL));
    ++steps;
    for (int s = 0; s < slots; ++s) {
      if (request[s] < 0) continue;
      ++tokens;
      ++seen[s];
      worst = fmax(worst, error_of(out + offsets[s] * heads * head_dim, request[s], seen[s] - 1));
      if (seen[s] < tokens_of(request[s])) continue;
      for (int i = 0; i * page_size < seen[s]; ++i) free_pages[num_free++] = table[s][i];
      request[s] = -1;
      ++done;
    }
  }
  printf("%d requests, %d tokens in %d steps, %d of which kept one waiting for pages\n", requests,
         tokens, steps, waited);
  printf("largest error: %.1e\n", worst);

  if (workspace) need(attn_free(context, workspace));
  attn_plan_destroy(attend);
  attn_plan_destroy(append);
  attn_context_destroy(context);
  return worst < 1e-5 && num_free == num_pages ? 0 : 1;
}
