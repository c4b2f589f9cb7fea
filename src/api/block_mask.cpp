// Block masks: built on the host, kept in the memory of the context's backend.
#include <cstddef>
#include <cstring>

#include "api/error.h"
#include "api/handles.h"
#include "masks/device_mask.h"
#include "plan/plan.h"
#include "problem/problem.h"
#include "problem/rules.h"

using namespace attn;

struct attn_block_mask {
  std::shared_ptr<Context> context;
  HostMask host;           // on device backends only its shape
  void* memory = nullptr;  // device backends: what the three pointers point into
  const uint8_t* kinds = nullptr;
  const int32_t* index = nullptr;
  const uint32_t* bits = nullptr;
  int64_t partials = 0;

  ~attn_block_mask() {
    if (memory) (void)context->driver->free(memory);
  }
};

namespace {

// Takes over host.shape, kinds, index and bits.
Status place(attn_block_mask* mask) {
  HostMask& host = mask->host;
  mask->partials = host.partials();
  if (mask->context->host_memory()) {
    mask->kinds = host.kinds.data();
    mask->index = host.index.data();
    mask->bits = host.bits.data();
    return {};
  }
  Driver& driver = *mask->context->driver;
  const size_t cells = host.kinds.size(), index_at = aligned_bytes(cells),
               bits_at = index_at + aligned_bytes(4 * cells), size = bits_at + 4 * host.bits.size();
  if (size == 0) return {};
  ATTN_TRY(driver.alloc(size, &mask->memory));
  auto* base = static_cast<unsigned char*>(mask->memory);
  ATTN_TRY(driver.copy_in(base, host.kinds.data(), cells, nullptr));
  ATTN_TRY(driver.copy_in(base + index_at, host.index.data(), 4 * cells, nullptr));
  if (mask->partials > 0)
    ATTN_TRY(driver.copy_in(base + bits_at, host.bits.data(), 4 * host.bits.size(), nullptr));
  mask->kinds = base;
  mask->index = reinterpret_cast<const int32_t*>(base + index_at);
  mask->bits = reinterpret_cast<const uint32_t*>(base + bits_at);
  HostMask shape_only;
  shape_only.shape = host.shape;
  host = std::move(shape_only);
  return {};
}

Status needed(const char* name, const void* address, const char* what) {
  return address ? Status{} : invalid(name, " is NULL; accepted: ", what);
}

// make(mask) fills host or, on devices, memory; the shape is there.
attn_status create(attn_context* context, const attn_block_mask_shape* shape,
                   attn_block_mask** mask, auto&& make) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: a context");
    if (!mask) return invalid("mask is NULL; accepted: where to put the block mask");
    auto made = std::make_unique<attn_block_mask>();
    made->context = context->context;
    ATTN_TRY(make_mask_shape(shape, made->context->host_memory(), &made->host.shape));
    ATTN_TRY(make(made.get()));
    if (!made->memory) ATTN_TRY(place(made.get()));
    *mask = made.release();
    return {};
  });
}
// make(shape, interrupt, host mask) builds in host memory.
attn_status create_on_host(attn_context* context, const attn_block_mask_shape* shape,
                           attn_block_mask** mask, auto&& make) {
  return create(context, shape, mask, [&](attn_block_mask* made) -> Status {
    Interrupt interrupt = made->context->interrupt();
    return make(MaskShape(made->host.shape), interrupt, &made->host);
  });
}

// A mask from arrays in the backend's memory: on_host(shape, interrupt, host mask), or
// built on the device where they are.
attn_status create_from(attn_context* context, const attn_block_mask_shape* shape, void* stream,
                        attn_block_mask** mask, const MaskArgs& source, auto&& on_host) {
  return create(context, shape, mask, [&](attn_block_mask* made) -> Status {
    const MaskShape s = made->host.shape;
    const bool dense = source.num_intervals == 0;
    if (s.cells() > 0)
      ATTN_TRY(dense ? needed("dense", source.dense, "u8 [batch, heads, Sq, Skv]")
                     : needed("intervals", source.intervals,
                              "i32 [batch, heads, Skv, num_intervals, 2]"));
    if (made->context->host_memory()) {
      if (stream) return invalid("stream is ", stream, "; accepted on reference and cpu: NULL");
      Interrupt interrupt = made->context->interrupt();
      return on_host(s, interrupt, &made->host);
    }
    if (s.cells() == 0) return {};
    const DeviceMask at = device_mask(s);
    ATTN_TRY(made->context->driver->alloc(at.bytes, &made->memory));
    auto* base = static_cast<unsigned char*>(made->memory);
    made->kinds = base + at.kinds;
    made->index = reinterpret_cast<const int32_t*>(base + at.index);
    made->bits = reinterpret_cast<const uint32_t*>(base + at.bits);
    made->partials = s.cells();
    std::unique_ptr<Plan> plan;
    ATTN_TRY(make_plan(made->context, std::make_unique<MaskProblem>(s), &plan));
    MaskArgs args = source;
    args.memory = made->memory;
    return run_block_mask(*plan, args, stream);
  });
}

// The mask in host memory: its own, or a copy in `copy`.
Status fetch(const attn_block_mask& mask, HostMask* copy, const HostMask** host) {
  *host = &mask.host;
  if (mask.context->host_memory()) return {};
  const MaskShape& shape = copy->shape = mask.host.shape;
  copy->kinds.resize(shape.cells());
  copy->index.resize(shape.cells());
  copy->bits.resize(mask.partials * shape.block_words());
  *host = copy;
  Driver& driver = *mask.context->driver;
  if (shape.cells() == 0) return {};
  ATTN_TRY(driver.copy_out(copy->kinds.data(), mask.kinds, copy->kinds.size(), nullptr));
  ATTN_TRY(driver.copy_out(copy->index.data(), mask.index, 4 * copy->index.size(), nullptr));
  if (mask.partials == 0) return {};
  return driver.copy_out(copy->bits.data(), mask.bits, 4 * copy->bits.size(), nullptr);
}

Status equal(const char* name, int64_t mask, int64_t problem) {
  if (mask == problem) return {};
  return invalid("the mask has ", name, " ", mask, "; accepted for this problem: ", problem);
}

// The fields of a caller's struct up to `end` are written.
Status has_room(const char* name, const void* versioned, size_t end) {
  size_t size;
  std::memcpy(&size, versioned, sizeof size);
  if (size >= end) return {};
  return invalid(name, ".struct_size is ", size, "; accepted: ", end, " or more");
}

// Whether the mask's grid is that of the problem, whose shapes are set.
Status check_grid(const MaskShape& s, const attn_problem& in) {
  attn_problem p;
  ATTN_TRY(copy_versioned("problem", &in, &p));
  if (p.num_segments < 1 || !p.segments)
    return invalid("problem.num_segments is ", p.num_segments,
                   "; accepted: 1 or more, the problem's shapes are set before the mask");
  int64_t seqlen_kv = 0;
  size_t step;
  std::memcpy(&step, p.segments, sizeof step);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    attn_segment segment;
    ATTN_TRY(copy_versioned("segments", reinterpret_cast<const char*>(p.segments) + i * step,
                            &segment, sizeof segment));
    const int64_t capacity = segment_capacity(segment);
    ATTN_TRY(in_range("segments' seqlen", capacity, 0, max_extent));
    seqlen_kv += capacity;
  }
  ATTN_TRY(equal("seqlen_q", s.seqlen_q, p.seqlen_q));
  ATTN_TRY(equal("seqlen_kv", s.seqlen_kv, seqlen_kv));
  if (s.batch != 1) ATTN_TRY(equal("batch", s.batch, p.batch));
  return s.heads == 1 ? Status{} : equal("heads", s.heads, p.heads_q);
}

}  // namespace

attn_status attn_block_mask_from_dense(attn_context* context, const attn_block_mask_shape* shape,
                                       const uint8_t* dense, void* stream, attn_block_mask** mask) {
  return create_from(context, shape, stream, mask, {.dense = dense},
                     [&](const MaskShape& s, Interrupt& interrupt, HostMask* out) {
                       return mask_from_dense(s, dense, interrupt, out);
                     });
}

attn_status attn_block_mask_from_documents(attn_context* context,
                                           const attn_block_mask_shape* shape,
                                           const int64_t* lengths, int64_t num_documents,
                                           int32_t causal, attn_block_mask** mask) {
  return create_on_host(
      context, shape, mask, [&](const MaskShape& s, Interrupt& interrupt, HostMask* out) -> Status {
        if (num_documents > 0) ATTN_TRY(needed("lengths", lengths, "i64 [num_documents]"));
        return mask_from_documents(s, lengths, num_documents, causal, interrupt, out);
      });
}

attn_status attn_block_mask_from_window(attn_context* context, const attn_block_mask_shape* shape,
                                        int64_t window_left, int64_t window_right,
                                        int64_t global_tokens, int64_t prefix_tokens,
                                        attn_block_mask** mask) {
  return create_on_host(context, shape, mask,
                        [&](const MaskShape& s, Interrupt& interrupt, HostMask* out) {
                          return mask_from_window(s, window_left, window_right, global_tokens,
                                                  prefix_tokens, interrupt, out);
                        });
}

attn_status attn_block_mask_from_intervals(attn_context* context,
                                           const attn_block_mask_shape* shape,
                                           const int32_t* intervals, int32_t num_intervals,
                                           void* stream, attn_block_mask** mask) {
  if (const Status status = check_num_intervals(num_intervals); !status.ok()) return report(status);
  return create_from(context, shape, stream, mask,
                     {.intervals = intervals, .num_intervals = num_intervals},
                     [&](const MaskShape& s, Interrupt& interrupt, HostMask* out) {
                       return mask_from_intervals(s, intervals, num_intervals, interrupt, out);
                     });
}

attn_status attn_block_mask_from_kinds(attn_context* context, const attn_block_mask_shape* shape,
                                       const uint8_t* kinds, const int32_t* index,
                                       const uint32_t* bits, int64_t num_partials,
                                       attn_block_mask** mask) {
  return create_on_host(
      context, shape, mask, [&](const MaskShape& s, Interrupt& interrupt, HostMask* out) -> Status {
        if (s.cells() > 0) ATTN_TRY(needed("kinds", kinds, "a kind for each block"));
        return mask_from_kinds(s, kinds, index, bits, num_partials, interrupt, out);
      });
}

attn_status attn_block_mask_from_lists(attn_context* context, const attn_block_mask_shape* shape,
                                       const int32_t* lists, int64_t list_size,
                                       attn_block_mask** mask) {
  return create_on_host(
      context, shape, mask, [&](const MaskShape& s, Interrupt& interrupt, HostMask* out) -> Status {
        ATTN_TRY(in_range("list_size", list_size, 0, max_extent));
        if (list_size > 0 && s.cells() > 0)
          ATTN_TRY(needed("lists", lists, "i32 [batch, heads, ceil(Sq / block_q), list_size]"));
        return mask_from_lists(s, lists, list_size, interrupt, out);
      });
}

attn_status attn_block_mask_combine(attn_context* context, const attn_block_mask* a,
                                    const attn_block_mask* b, int32_t combine,
                                    attn_block_mask** mask) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: a context");
    ATTN_TRY(needed("a", a, "a block mask"));
    ATTN_TRY(needed("b", b, "a block mask"));
    ATTN_TRY(needed("mask", mask, "where to put the block mask"));
    for (const attn_block_mask* one : {a, b})
      if (one->context->host_memory() != context->context->host_memory())
        return invalid(one == a ? "a" : "b", " belongs to backend ",
                       attn_backend_string(one->context->backend), "; the context is ",
                       attn_backend_string(context->context->backend));
    auto made = std::make_unique<attn_block_mask>();
    made->context = context->context;
    HostMask copy_a, copy_b;
    const HostMask *host_a, *host_b;
    ATTN_TRY(check_same_grid(a->host.shape, b->host.shape));
    ATTN_TRY(fetch(*a, &copy_a, &host_a));
    ATTN_TRY(fetch(*b, &copy_b, &host_b));
    Interrupt interrupt = made->context->interrupt();
    ATTN_TRY(combine_masks(*host_a, *host_b, combine, interrupt, &made->host));
    ATTN_TRY(place(made.get()));
    *mask = made.release();
    return {};
  });
}

attn_status attn_block_mask_apply(const attn_block_mask* mask, attn_problem* problem,
                                  attn_args* args) {
  return guarded([&]() -> Status {
    ATTN_TRY(needed("mask", mask, "a block mask"));
    const MaskShape& s = mask->host.shape;
    if (problem) {
      ATTN_TRY(has_room("problem", problem, offsetof(attn_problem, fixed_split)));
      ATTN_TRY(check_grid(s, *problem));
    }
    if (args) ATTN_TRY(has_room("args", args, offsetof(attn_args, tree)));
    if (problem) {
      problem->flags |= ATTN_BLOCK_MASK;
      problem->block_q = s.block_q;
      problem->block_k = s.block_k;
      problem->mask_batch = s.batch;
      problem->mask_heads = s.heads;
      problem->mask_partials = mask->partials;
    }
    if (args) {
      static const uint8_t no_blocks = 0;  // an address that nothing is read from
      args->block_kinds = mask->kinds ? mask->kinds : &no_blocks;
      args->block_index = mask->partials > 0 ? mask->index : nullptr;
      args->block_bits = mask->partials > 0 ? mask->bits : nullptr;
    }
    return {};
  });
}

void attn_block_mask_destroy(attn_block_mask* mask) {
  delete mask;
}
