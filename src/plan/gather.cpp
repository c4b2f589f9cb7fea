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
                        const ChoosePart& choose, ComposedPart* part) {
  const auto made = [&](bool in_k) {
    attn_segment segment;
    attn_problem in = attention(p, shape, count, &segment);
    if (!shape.own_v && !in_k) {
      const int64_t row = p.head_dim * shape.heads;
      segment.v_in_k = 0;
      segment.v_stride = {shape.rows * row, row, p.head_dim};
    }
    auto problem = std::make_unique<Problem>();
    ATTN_TRY(make_problem(&in, problem.get()));
    part->problem = std::move(problem);
    return choose(*part->problem, &part->choice);
  };
  Status status = made(true);
  if (!status.ok() && !shape.own_v && made(false).ok()) return {};
  if (status.code == ATTN_INVALID_ARGUMENT || status.code == ATTN_UNSUPPORTED)
    return unsupported("attention to the copied keys: ", status.text);
  return status;
}

}  // namespace

Status gather(const Problem& p, const ChoosePart& choose, Choice* choice) {
  ATTN_TRY(check_gather(p));
  auto gathered = std::make_shared<Gathered>();
  Gathered& g = *gathered;
  g.shape = gather_shape(p);
  const int64_t columns = p.head_dim + (g.shape.own_v ? p.head_dim_v : 0);
  const double bytes =  // which integers may not hold
      double(g.shape.rows) * double(g.shape.heads) * double(dtype_bytes(p.q_type, columns));
  if (bytes > double(item_bytes))
    return unsupported("the keys of a ", g.shape.by_sequence ? "sequence" : "query",
                       " take a workspace of ", bytes, " bytes; accepted: up to ", item_bytes);
  const int64_t most = std::clamp<int64_t>(int64_t(double(pass_bytes) / bytes), 1,
                                           std::max<int64_t>(1, g.shape.items));
  const int64_t heads = g.shape.by_head ? p.heads_kv : 1;
  const int64_t passes = ceil_div(g.shape.items, most) * heads;
  if (passes > most_passes)
    return unsupported("copies of ", double(g.shape.items) * bytes * double(heads), " bytes take ",
                       passes, " passes; accepted: up to ", most_passes);
  const auto& q = p.q_stride;
  const auto& out = p.out_stride;
  g.q_row = dtype_bytes(p.q_type, g.shape.by_sequence ? q.batch : row_stride(p, q));
  g.out_row = dtype_bytes(p.out_type, g.shape.by_sequence ? out.batch : row_stride(p, out));
  g.orders_lse =
      !g.shape.by_sequence && (p.q_layout == ATTN_PACKED || p.seqlen_q > 1 || g.shape.by_head);

  size_t end = 0;
  const auto take = [&](size_t size) {
    const size_t at = end;
    end += aligned_bytes(size);
    return at;
  };
  if (g.shape.items > 0) {
    ATTN_TRY(choose_attention(p, g.shape, most, choose, &g.attend));
    if (const int64_t rest = g.shape.items % most; rest > 0 && g.shape.items > most)
      ATTN_TRY(choose_attention(p, g.shape, rest, choose, &g.attend_last));
  }
  for (ComposedPart* part : {&g.attend, &g.attend_last})
    if (part->problem) part->workspace_at = take(part->choice.recipe.workspace);
  const size_t row = size_t(most * g.shape.rows * g.shape.heads);
  g.place.k = take(row * size_t(dtype_bytes(p.q_type, p.head_dim)));
  g.place.v = g.shape.own_v ? take(row * size_t(dtype_bytes(p.q_type, p.head_dim_v))) : g.place.k;
  g.place.lengths = take(size_t(most) * sizeof(int));
  if (g.orders_lse) g.lse = take(size_t(g.shape.items * p.heads_q) * sizeof(float));

  for (int64_t head = 0; head < heads; ++head)
    for (int64_t first = 0; first < g.shape.items; first += most) {
      const int64_t count = std::min(most, g.shape.items - first);
      g.passes.push_back({first, count, head});
      choice->recipe.steps.push_back(gather_step(p, g.shape, g.place, first, count, head));
    }
  if (g.orders_lse && g.shape.items > 0)
    choice->recipe.steps.push_back(gather_lse_step(p, g.shape, g.lse));
  choice->recipe.workspace = end;
  choice->gathered = std::move(gathered);
  return {};
}

}  // namespace attn
