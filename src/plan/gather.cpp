#include "plan/gather.h"

#include <algorithm>
#include <string_view>

#include "kernels/kernarg.h"

namespace attn {
namespace {

constexpr int64_t pass_bytes = int64_t{1} << 30;  // of copies, if an item has no more
constexpr int64_t item_bytes = int64_t{4} << 30;
constexpr int64_t most_passes = 4096;
static_assert(gather_max_segments <= int32_t(most_keys));

int64_t row_stride(const Problem& p, const attn_strides& stride) {
  return p.q_layout == ATTN_PADDED && p.seqlen_q == 1 ? stride.batch : stride.seq;
}

// Copies of an item's keys as one segment.
attn_segment segment_of_copies(const Problem& p, const GatherShape& shape) {
  attn_segment s{};
  s.struct_size = sizeof s;
  s.k_type = s.v_type = p.q_type;
  s.has_seqlens = 1;
  s.seqlen = shape.rows;
  s.v_in_k = !shape.own_v;
  return s;
}
// The keys of segment i where they are.
attn_segment segment_of_slots(const Problem& p, const SlotsShape& shape, int32_t i) {
  const Segment& from = p.segment[i];
  const SlotsShape::OfSegment& of = shape.segment[i];
  attn_segment s{};
  s.struct_size = sizeof s;
  s.k_type = from.k_type;
  s.v_type = from.v_type;
  s.layout = ATTN_PAGED;
  s.page_size = 1;
  s.num_pages = of.slots;
  s.max_pages = int32_t(of.capacity);
  s.has_seqlens = 1;
  s.v_in_k = from.v_in_k;
  const auto of_rows = [](const attn_strides& of) { return attn_strides{of.seq, of.seq, of.head}; };
  s.k_stride = of_rows(from.k_stride);
  s.k_scale_stride = of_rows(from.k_scale_stride);
  s.k_descale = from.k_descale;
  if (!s.v_in_k) s.v_stride = of_rows(from.v_stride);
  return s;
}

// What attends to these segments of `count` items.
attn_problem attention(const Problem& p, const GatherShape& shape, int64_t count,
                       const std::vector<attn_segment>& segments) {
  attn_problem in = p;
  in.struct_size = sizeof in;
  in.batch = count;
  in.heads_kv = shape.heads;
  in.heads_q = shape.heads * p.group();
  in.num_segments = int32_t(segments.size());
  in.segments = segments.data();
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

struct Attention {
  std::unique_ptr<Problem> problem;
  Choice choice;
};

// Where no kernel takes V in K, they are two arrays at one address.
Status choose_attention(const Problem& p, const GatherShape& shape, int64_t count,
                        std::vector<attn_segment> segments, const ChoosePart& choose,
                        Attention* to) {
  const auto choose_part = [&] {
    attn_problem in = attention(p, shape, count, segments);
    to->problem = std::make_unique<Problem>();
    ATTN_TRY(make_problem(&in, to->problem.get()));
    return choose(*to->problem, &to->choice);
  };
  const Status status = choose_part();
  if (status.ok() || shape.own_v) return status;
  const std::vector<Segment> of = to->problem->segment;
  if (of.size() != segments.size()) return status;
  for (size_t i = 0; i < segments.size(); ++i) {
    segments[i].v_in_k = 0;
    segments[i].v_stride = of[i].k_stride;
  }
  return choose_part().ok() ? Status{} : status;
}

Status attend_to_copies(const Problem& p, const GatherShape& shape, int64_t count,
                        const ChoosePart& choose, Attention* to) {
  return named("attention to the copied keys",
               choose_attention(p, shape, count, {segment_of_copies(p, shape)}, choose, to));
}

// Over the keys where they are. Kernels of many queries would compute as many for each.
Status attend_to_slots(const Problem& p, const GatherShape& shape, const SlotsShape& slots,
                       int64_t count, const ChoosePart& choose, Attention* to) {
  std::vector<attn_segment> segments;
  for (int32_t i = 0; i < p.num_segments; ++i) segments.push_back(segment_of_slots(p, slots, i));
  ATTN_TRY(choose_attention(p, shape, count, segments, choose, to));
  if (std::string_view(to->choice.kernel->name).starts_with("fwd_"))
    return unsupported("a kernel of many queries");
  if (to->choice.kernel->composed != Composed::no)
    return unsupported("a kernel that copies the keys");
  return {};
}

}  // namespace

Status compose_lists(const Problem& p, const Machine& machine, const ChoosePart& choose,
                     Choice* choice) {
  ATTN_TRY(check_gather(p));
  const GatherShape shape = gather_shape(p);
  const int64_t columns = p.head_dim + (shape.own_v ? p.head_dim_v : 0);
  SlotsShape slots;
  bool copies = !make_slots(p, &slots);
  // Kernels clear the rows of packed q that are of none of their sequences: a second pass would
  // clear those of the first.
  const bool packed = shape.by_sequence && p.q_layout == ATTN_PACKED;
  double bytes = 0;            // of an item, which integers may not hold
  int64_t most = 0, rest = 0;  // items of a pass, of the last one if that has fewer
  Attention part, part_of_rest;
  const auto choose_for = [&](double of_item) {
    bytes = of_item;
    const int64_t all = std::max<int64_t>(1, shape.items);
    most = packed ? all : std::clamp<int64_t>(int64_t(double(pass_bytes) / bytes), 1, all);
    rest = shape.items > most ? shape.items % most : 0;
    const auto choose_of = [&](int64_t count, Attention* of) {
      return copies ? attend_to_copies(p, shape, count, choose, of)
                    : attend_to_slots(p, shape, slots, count, choose, of);
    };
    if (shape.items == 0) return Status{};
    ATTN_TRY(choose_of(most, &part));
    return rest > 0 ? choose_of(rest, &part_of_rest) : Status{};
  };
  if (!copies) {
    const Status status = choose_for(double(slots.item_bytes));
    copies = status.code == ATTN_INVALID_ARGUMENT || status.code == ATTN_UNSUPPORTED;
    if (!copies) ATTN_TRY(status);
  }
  if (copies) {
    const double of_item =
        double(shape.rows) * double(shape.heads) * double(dtype_bytes(p.q_type, columns));
    const double least = packed ? of_item * double(shape.items) : of_item;
    if (least > double(item_bytes))
      return unsupported("the keys of ",
                         packed              ? "all sequences"
                         : shape.by_sequence ? "a sequence"
                                             : "a query",
                         " take a workspace of ", least, " bytes; accepted: up to ", item_bytes);
    part = {}, part_of_rest = {};
    ATTN_TRY(choose_for(of_item));
  }
  const int64_t heads = shape.by_head ? p.heads_kv : 1;
  const int64_t passes = ceil_div(shape.items, most) * heads;
  if (passes > most_passes)
    return unsupported(copies ? "copies of " : "tables of ",
                       double(shape.items) * bytes * double(heads), " bytes take ", passes,
                       " passes; accepted: up to ", most_passes);
  Composer to(choice);
  if (shape.items == 0) return {};

  // The part of all passes, and that of the last one where it has fewer items.
  const bool v_in_k = part.problem->segment[0].v_in_k;
  const char* const computes =
      copies ? "attention to the copies" : "attention to the keys where they are";
  const size_t attend = to.add(computes, std::move(part.problem), std::move(part.choice));
  const size_t attend_rest =
      rest > 0 ? to.add(computes, std::move(part_of_rest.problem), std::move(part_of_rest.choice))
               : 0;
  const size_t row = size_t(most * shape.rows * shape.heads), lengths = size_t(most) * sizeof(int);
  GatherPlace place{};
  std::vector<SlotsPlace> tables;
  if (copies) {
    place.k = to.take(row * size_t(dtype_bytes(p.q_type, p.head_dim)));
    place.v = shape.own_v ? to.take(row * size_t(dtype_bytes(p.q_type, p.head_dim_v))) : place.k;
    place.lengths = to.take(lengths);
  } else {
    for (const auto& of : slots.segment) {
      const size_t table = to.take(size_t(most * of.capacity) * sizeof(int));
      tables.push_back({table, to.take(lengths)});
    }
  }
  // What the part of a K/V head reads.
  const auto keys_of = [&](int64_t head) {
    constexpr Place none{Place::nowhere};
    std::vector<RunForward::Keys> keys;
    if (copies)
      keys.push_back({in_workspace(place.k), v_in_k ? none : in_workspace(place.v),
                      in_workspace(place.lengths), none});
    for (size_t i = 0; i < tables.size(); ++i) {
      const Segment& s = p.segment[i];
      const Place v{.bytes = dtype_bytes(s.v_type, head * s.v_stride.head)};
      keys.push_back({{.bytes = dtype_bytes(s.k_type, head * s.k_stride.head)},
                      v_in_k ? none : v,
                      in_workspace(tables[i].lengths),
                      in_workspace(tables[i].table)});
      if (s.k_type == ATTN_F8_E4M3FN_TOKEN)
        keys.back().k_scale = {.bytes = head * s.k_scale_stride.head * int64_t{sizeof(float)}};
      if (s.k_descale != ATTN_DESCALE_NONE) keys.back().k_descale = {};
    }
    return keys;
  };
  // Where items are the rows of an lse, that is in the workspace first.
  const bool orders_lse =
      !shape.by_sequence && (p.q_layout == ATTN_PACKED || p.seqlen_q > 1 || shape.by_head);
  const size_t lse = orders_lse ? to.take(size_t(shape.items * p.heads_q) * sizeof(float)) : 0;

  const int64_t group = p.group(), heads_q = shape.heads * group;
  // From one item to the next. Packed sequences, all in one pass, are found by their offsets.
  const auto stride = [&](attn_dtype type, const attn_strides& of) {
    return packed ? 0 : dtype_bytes(type, shape.by_sequence ? of.batch : row_stride(p, of));
  };
  const int64_t q_row = stride(p.q_type, p.q_stride), out_row = stride(p.out_type, p.out_stride);
  const int64_t lse_row =
      packed ? 0 : heads_q * (shape.by_sequence ? p.seqlen_q : 1) * int64_t{sizeof(float)};
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t first = 0; first < shape.items; first += most) {
      const int64_t count = std::min(most, shape.items - first), first_head = head * group;
      if (copies)
        to.add(gather_step(p, shape, place, first, count, head), "copies of keys");
      else
        to.add(slots_step(p, *machine.device, slots, tables, first, count, head), "places of keys");
      to.add(RunForward{
          .part = count == most ? attend : attend_rest,
          .keys = keys_of(head),
          .q = {.bytes = first * q_row + dtype_bytes(p.q_type, first_head * p.q_stride.head)},
          .out = {.bytes =
                      first * out_row + dtype_bytes(p.out_type, first_head * p.out_stride.head)},
          .lse = {.from = orders_lse ? Place::workspace : Place::caller,
                  .bytes = int64_t(lse) + (head * shape.items + first) * lse_row},
          .cu_seqlens_q = {.from = packed ? Place::caller : Place::nowhere},
          .sinks = {.bytes = first_head * int64_t{sizeof(float)}}});
    }
  if (orders_lse) to.add(gather_lse_step(p, shape, lse), "order of lse", true);
  // mla_* read one segment, decode_sm90_blocks_* several, and fwd_*_dequantised convert less.
  if (shape.by_sequence && (shape.own_v || p.num_segments == 1))
    choice->recipe.passed_over = "for rows that need no copy";
  return {};
}

}  // namespace attn
