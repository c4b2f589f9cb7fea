#include "plan/gather.h"

#include <algorithm>

#include "kernels/kernarg.h"

namespace attn {
namespace {

constexpr int64_t pass_bytes = int64_t{1} << 30;  // of copies, if an item has no more
constexpr int64_t item_bytes = int64_t{4} << 30;
constexpr int64_t most_passes = 4096;

int64_t row_stride(const Problem& p, const attn_strides& stride) {
  return p.q_layout == ATTN_PADDED && p.seqlen_q == 1 ? stride.batch : stride.seq;
}

// What attends to the copies of `count` items.
attn_problem attention(const Problem& p, const GatherShape& shape, int64_t count,
                       attn_segment* segment) {
  *segment = {};
  segment->struct_size = sizeof *segment;
  segment->k_type = segment->v_type = p.q_type;
  segment->has_seqlens = 1;
  segment->seqlen = shape.rows;
  segment->v_in_k = !shape.own_v;
  attn_problem in = p;
  in.struct_size = sizeof in;
  in.batch = count;
  in.heads_kv = shape.heads;
  in.heads_q = shape.heads * p.group();
  in.num_segments = 1;
  in.segments = segment;
  if (shape.by_sequence) return in;
  in.seqlen_q = 1;
  in.total_q = 0;
  in.q_layout = ATTN_PADDED;
  for (attn_strides* stride : {&in.q_stride, &in.out_stride})
    stride->batch = stride->seq = row_stride(p, *stride);
  in.flags &= ATTN_SINKS | ATTN_SPLIT_INVARIANT;
  in.window_left = in.window_right = 0;
  return in;
}

// Where no kernel takes V in K, they are two arrays at one address.
Status choose_attention(const Problem& p, const GatherShape& shape, int64_t count,
                        const ChoosePart& choose, std::unique_ptr<Problem>* part, Choice* choice) {
  const auto made = [&](bool in_k) {
    attn_segment segment;
    attn_problem in = attention(p, shape, count, &segment);
    if (!shape.own_v && !in_k) {
      const int64_t row = p.head_dim * shape.heads;
      segment.v_in_k = 0;
      segment.v_stride = {shape.rows * row, row, p.head_dim};
    }
    *part = std::make_unique<Problem>();
    ATTN_TRY(make_problem(&in, part->get()));
    return choose(**part, choice);
  };
  Status status = made(true);
  if (!status.ok() && !shape.own_v && made(false).ok()) return {};
  return named("attention to the copied keys", status);
}

}  // namespace

Status compose_lists(const Problem& p, const Machine&, const ChoosePart& choose, Choice* choice) {
  ATTN_TRY(check_gather(p));
  Composer to(choice);
  const GatherShape shape = gather_shape(p);
  const int64_t columns = p.head_dim + (shape.own_v ? p.head_dim_v : 0);
  const double bytes =  // which integers may not hold
      double(shape.rows) * double(shape.heads) * double(dtype_bytes(p.q_type, columns));
  if (bytes > double(item_bytes))
    return unsupported("the keys of a ", shape.by_sequence ? "sequence" : "query",
                       " take a workspace of ", bytes, " bytes; accepted: up to ", item_bytes);
  const int64_t most = std::clamp<int64_t>(int64_t(double(pass_bytes) / bytes), 1,
                                           std::max<int64_t>(1, shape.items));
  const int64_t heads = shape.by_head ? p.heads_kv : 1;
  const int64_t passes = ceil_div(shape.items, most) * heads;
  if (passes > most_passes)
    return unsupported("copies of ", double(shape.items) * bytes * double(heads), " bytes take ",
                       passes, " passes; accepted: up to ", most_passes);
  if (shape.items == 0) return {};

  // The part of all passes, and that of the last one where it has fewer items.
  const int64_t rest = shape.items > most ? shape.items % most : 0;
  size_t attend = 0, attend_rest = 0;
  bool v_in_k = false;
  const auto add_part = [&](int64_t count, size_t* number) {
    std::unique_ptr<Problem> part;
    Choice of_part;
    ATTN_TRY(choose_attention(p, shape, count, choose, &part, &of_part));
    v_in_k = part->segment[0].v_in_k;
    *number = to.add("attention to the copies", std::move(part), std::move(of_part));
    return Status{};
  };
  ATTN_TRY(add_part(most, &attend));
  if (rest > 0) ATTN_TRY(add_part(rest, &attend_rest));

  const size_t row = size_t(most * shape.rows * shape.heads);
  GatherPlace place{};
  place.k = to.take(row * size_t(dtype_bytes(p.q_type, p.head_dim)));
  place.v = shape.own_v ? to.take(row * size_t(dtype_bytes(p.q_type, p.head_dim_v))) : place.k;
  place.lengths = to.take(size_t(most) * sizeof(int));
  // Where items are the rows of an lse, that is in the workspace first.
  const bool orders_lse =
      !shape.by_sequence && (p.q_layout == ATTN_PACKED || p.seqlen_q > 1 || shape.by_head);
  const size_t lse = orders_lse ? to.take(size_t(shape.items * p.heads_q) * sizeof(float)) : 0;

  const int64_t group = p.group(), heads_q = shape.heads * group;
  // From one item to the next. Packed sequences are found by their offsets.
  const bool packed = shape.by_sequence && p.q_layout == ATTN_PACKED;
  const auto stride = [&](attn_dtype type, const attn_strides& of) {
    return packed ? 0 : dtype_bytes(type, shape.by_sequence ? of.batch : row_stride(p, of));
  };
  const int64_t q_row = stride(p.q_type, p.q_stride), out_row = stride(p.out_type, p.out_stride);
  const int64_t lse_row =
      packed ? 0 : heads_q * (shape.by_sequence ? p.seqlen_q : 1) * int64_t{sizeof(float)};
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t first = 0; first < shape.items; first += most) {
      const int64_t count = std::min(most, shape.items - first), first_head = head * group;
      to.add(gather_step(p, shape, place, first, count, head), "copies of keys");
      to.add(RunForward{
          .part = count == most ? attend : attend_rest,
          .copies = {{.k = in_workspace(place.k),
                      .v = v_in_k ? Place{Place::nowhere} : in_workspace(place.v),
                      .seqlens = in_workspace(place.lengths)}},
          .q = {.bytes = first * q_row + dtype_bytes(p.q_type, first_head * p.q_stride.head)},
          .out = {.bytes =
                      first * out_row + dtype_bytes(p.out_type, first_head * p.out_stride.head)},
          .lse = {.from = orders_lse ? Place::workspace : Place::caller,
                  .bytes = int64_t(lse) + (head * shape.items + first) * lse_row},
          .cu_seqlens_q = {.from = packed ? Place::caller : Place::nowhere,
                           .bytes = first * int64_t{sizeof(int32_t)}},
          .sinks = {.bytes = first_head * int64_t{sizeof(float)}}});
    }
  if (orders_lse) to.add(gather_lse_step(p, shape, lse), "order of lse", true);
  return {};
}

}  // namespace attn
