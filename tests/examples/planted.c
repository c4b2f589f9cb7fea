/* Preloaded into a program, makes a mistake of a server in front of libattn's kv_append on the
 * host. PLANTED=lengths: lengths are not advanced. PLANTED=pages: slot 1 has the first page of slot
 * 0. */
#define _GNU_SOURCE
#include <attn/attn.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int32_t max_pages;

static int planted(const char* mistake) {
  const char* value = getenv("PLANTED");
  return value != NULL && strcmp(value, mistake) == 0;
}

attn_status attn_plan_create_kv_append(attn_context* context, const attn_kv_append_problem* problem,
                                       attn_plan** plan) {
  attn_status (*next)(attn_context*, const attn_kv_append_problem*, attn_plan**);
  *(void**)&next = dlsym(RTLD_NEXT, "attn_plan_create_kv_append");
  max_pages = problem->segment.max_pages;
  return next(context, problem, plan);
}

attn_status attn_run_kv_append(const attn_plan* plan, const attn_kv_append_args* args,
                               void* stream) {
  attn_status (*next)(const attn_plan*, const attn_kv_append_args*, void*);
  attn_kv_append_args changed = *args;
  *(void**)&next = dlsym(RTLD_NEXT, "attn_run_kv_append");
  if (planted("pages")) {
    int32_t* table = (int32_t*)args->cache.block_table;
    table[max_pages] = table[0];
  }
  if (planted("lengths")) {
    static int32_t lost[64];
    changed.seqlens_out = lost;
  }
  return next(plan, &changed, stream);
}
