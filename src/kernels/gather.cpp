// The kernel lists_cuda: attention over lists of keys, and over caches whose types no other kernel
// of CUDA reads, by tables of the keys or a copy of them, and a kernel that knows nothing of lists
// (plan/gather.h). What it takes here is what the copy allows; the other kernel decides the rest.
#include "kernels/gather.h"

#include "kernels/cache/gather_args.h"
#include "kernels/families.h"
#include "kernels/kv_args.h"
#include "kernels/limits.h"

namespace attn {
namespace {

constexpr uint32_t scaled_rows = type_bit(ATTN_F8_E4M3FN_TOKEN) | type_bit(ATTN_MLA_656);
// That mla_*_656 and mla_*_e4m3 read.
constexpr uint32_t types_of_codes = type_bit(ATTN_F8_E4M3FN) | scaled_rows;
constexpr uint32_t gathered_types =
    type_bit(ATTN_F16) | type_bit(ATTN_BF16) | type_bit(ATTN_F8_E4M3FN) | scaled_rows;

constinit const Kernel rows[] = {
    {.name = "lists_cuda",
     .op = Op::forward,
     .backend = ATTN_BACKEND_CUDA,
     .limits = {.in_types = type_bit(ATTN_F16) | type_bit(ATTN_BF16),
                .kv_types = gathered_types,
                .out_types = float_types,
                .flags = forward_flags | ATTN_SPLIT_INVARIANT,
                .features = forward_features | feature_softcap | feature_paged_kv |
                            feature_segments | feature_mixed_kv_types | kv_descale_features |
                            feature_fixed_split | feature_v_in_k | feature_lists |
                            feature_no_positions,
                .head_dim = {.multiple = attn_gather_elements},
                .head_dim_v = {.multiple = attn_gather_elements},
                .floats_as_q = true},
     .first_images = {gather_image, list_slots_image, gather_lse_image},
     .composed = Composed::lists},
};

// The most keys of a segment that a query visits.
int64_t visited(const Problem& p, const attn_segment& s) {
  if (s.list_size > 0) return s.list_size * s.list_block;
  const int64_t right = p.keys_right();
  if (s.no_positions || !p.by_query || !p.has(ATTN_WINDOW) || p.window_left < 0 ||
      right == INT64_MAX)
    return s.seqlen;
  return std::min(s.seqlen, p.window_left + right + 1);
}

attn_gather_tensor tensor(const Problem& p, const attn_segment& s, attn_dtype type,
                          const attn_strides& stride, const attn_strides& scale_stride,
                          attn_descale_kind kind) {
  attn_gather_tensor t{};
  t.src_stride[0] = dtype_bytes(type, stride.batch);
  t.src_stride[1] = dtype_bytes(type, stride.seq);
  t.src_stride[2] = dtype_bytes(type, stride.head);
  set(t.scale_stride, scale_stride);
  t.descale = descale(kind, p.heads_kv, s);
  t.type = type;
  return t;
}

// The keys of one segment that a query visits.
attn_visited_segment visited_segment(const attn_segment& from) {
  attn_visited_segment s{};
  s.lengths = kv_lengths(from);
  s.pages = pages(from);
  s.list_size = int(from.list_size);
  s.list_heads = int(from.list_heads);
  s.list_block = from.list_block;
  s.list_queries = from.list_queries;
  s.of_pool = from.list_of_pool;
  s.no_positions = from.no_positions;
  return s;
}
attn_visits visits(const Problem& p, int64_t first, int64_t head) {
  attn_visits v{};
  for (int32_t i = 0; i < p.num_segments; ++i) v.segment[i] = visited_segment(p.segment[i]);
  v.total_q = p.total_q;
  v.first = first;
  v.mask = p.range_mask();
  v.batch = int(p.batch);
  v.seqlen_q = int(p.seqlen_q);
  v.num_segments = p.num_segments;
  v.by_sequence = !p.by_query;
  v.first_head = int(head);
  return v;
}
void patch_visits(const Problem& p, const Args& args, attn_visits* v) {
  v->cu_seqlens_q = args.cu_seqlens_q;
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = args.segment[i];
    patch_lengths(of, &v->segment[i].lengths);
    v->segment[i].pages.block_table = of.block_table;
    v->segment[i].list = of.list;
    v->segment[i].list_lengths = of.list_lengths;
  }
}

void patch(const Problem& p, const Args& args, void* workspace, attn_gather_kernarg& a) {
  patch_visits(p, args, &a.visits);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = args.segment[i];
    attn_gather_tensor(&tensor)[2] = a.tensor[i];
    tensor[0].src = of.k;
    tensor[0].scale = static_cast<const float*>(of.k_scale);
    tensor[0].descale.at = of.k_descale;
    tensor[1].src = of.v;
    tensor[1].scale = static_cast<const float*>(of.v_scale);
    tensor[1].descale.at = of.v_descale;
  }
  rebase(workspace, a.dst[0], a.lengths);
  if (a.dst[1]) rebase(workspace, a.dst[1]);
}

void patch_slots(const Problem& p, const Args& args, void* workspace, attn_list_slots_kernarg& a) {
  patch_visits(p, args, &a.visits);
  for (int32_t i = 0; i < p.num_segments; ++i)
    rebase(workspace, a.segment[i].table, a.segment[i].lengths);
}

void patch_lse(const Problem&, const Args& args, void* workspace, attn_gather_lse_kernarg& a) {
  rebase(workspace, a.from);
  a.to = args.lse;
  a.cu_seqlens_q = args.cu_seqlens_q;
}

}  // namespace

bool gathers(const AnyProblem& problem) {
  const Needs& needs = problem.needs;
  return problem.op == Op::forward &&
         (needs.features & (feature_lists | feature_no_positions) ||
          (needs.k_types | needs.v_types) & scaled_rows ||
          (needs.features & feature_v_in_k && needs.k_types & type_bit(ATTN_F8_E4M3FN)));
}

GatherShape gather_shape(const Problem& p) {
  GatherShape shape{};
  shape.by_sequence = !p.by_query;
  for (const attn_segment& s : p.segment) {
    shape.by_head |= s.list_heads > 1;
    shape.own_v |= !s.v_in_k;
    shape.rows += visited(p, s);
  }
  shape.items = shape.by_sequence           ? p.batch
                : p.q_layout == ATTN_PACKED ? p.total_q
                                            : p.batch * p.seqlen_q;
  shape.rows = round_up(std::max<int64_t>(1, shape.rows), 64);
  shape.heads = shape.by_head ? 1 : p.heads_kv;
  return shape;
}

Status check_gather(const Problem& p) {
  static_assert(gather_max_segments == attn_gather_max_segments);
  if (p.num_segments > gather_max_segments)
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       gather_max_segments);
  if (p.q_descale != ATTN_DESCALE_NONE)
    return unsupported("q_descale is ", int(p.q_descale), "; accepted: none (0)");
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const Segment& s = p.segment[i];
    if (s.shared) return unsupported("segments[", i, "].shared is 1; accepted: 0");
    if (s.v_in_k != p.segment[0].v_in_k)
      return unsupported("segments[", i, "].v_in_k is ", s.v_in_k,
                         "; accepted: that of segment 0, ", p.segment[0].v_in_k);
    const bool scaled = (type_bit(s.k_type) | type_bit(s.v_type)) & scaled_rows ||
                        s.k_descale != ATTN_DESCALE_NONE || s.v_descale != ATTN_DESCALE_NONE;
    if (scaled && p.q_type == ATTN_F16)
      return unsupported("segments[", i, "] has scales with q of f16, whose range the product may ",
                         "leave; accepted: q of bf16");
  }
  // Queries follow each other as if each were a sequence.
  if (p.by_query && p.q_layout == ATTN_PADDED && p.batch > 1 && p.seqlen_q > 1)
    for (const auto& [name, stride] :
         {std::pair{"q_stride", p.q_stride}, {"out_stride", p.out_stride}})
      if (stride.batch != p.seqlen_q * stride.seq)
        return unsupported(name, ".batch is ", stride.batch, "; accepted with lists: seqlen_q * ",
                           name, ".seq = ", p.seqlen_q * stride.seq);
  return {};
}

namespace {

// Slots between entries of a tensor, sequences or pages; -1: it is no whole number.
int64_t entry_slots(const attn_strides& stride) {
  return stride.seq > 0 && stride.batch >= 0 && stride.batch % stride.seq == 0
             ? stride.batch / stride.seq
             : -1;
}

}  // namespace

bool make_slots(const Problem& p, SlotsShape* shape) {
  if (!p.by_query) return false;  // the queries of a sequence visit the same keys
  for (const Segment& s : p.segment) {
    const bool codes = s.v_in_k && type_bit(s.k_type) & types_of_codes;
    if (!codes && (s.k_type != p.q_type || s.v_type != p.q_type)) return false;
    // One for all sequences.
    const auto takes = [&](attn_descale_kind kind) {
      return kind == ATTN_DESCALE_NONE || (codes && kind == ATTN_DESCALE_TENSOR);
    };
    if (!takes(s.k_descale) || !takes(s.v_descale)) return false;
    SlotsShape::OfSegment of{};
    of.capacity = std::max<int64_t>(1, visited(p, s));
    const int64_t rows = s.layout == ATTN_PAGED    ? s.page_size
                         : s.layout == ATTN_PACKED ? s.total
                                                   : s.seqlen,
                  entries = s.layout == ATTN_PAGED    ? s.num_pages
                            : s.layout == ATTN_PACKED ? 1
                                                      : p.batch;
    of.entry_slots = entries > 1 ? entry_slots(s.k_stride) : 0;
    if (of.entry_slots < 0 || (entries > 1 && of.entry_slots != entry_slots(s.v_stride)) ||
        s.k_stride.seq <= 0 || s.v_stride.seq <= 0)
      return false;
    if (s.k_type == ATTN_F8_E4M3FN_TOKEN && entries > 1 &&
        s.k_scale_stride.batch != of.entry_slots * s.k_scale_stride.seq)
      return false;
    const double slots = double(entries) * double(of.entry_slots) + double(rows);
    if (slots >= INT32_MAX || of.capacity >= INT32_MAX) return false;
    of.slots = std::max<int64_t>(0, entries - 1) * of.entry_slots + rows;
    shape->item_bytes += (of.capacity + 1) * int64_t{sizeof(int32_t)};
    shape->segment.push_back(of);
  }
  return true;
}

Step slots_step(const Problem& p, const DeviceInfo& device, const SlotsShape& shape,
                const std::vector<SlotsPlace>& to, int64_t first, int64_t count, int64_t head) {
  attn_list_slots_kernarg a{};
  a.visits = visits(p, first, head);
  for (size_t i = 0; i < shape.segment.size(); ++i)
    a.segment[i] = {offset_of<int>(to[i].table), offset_of<int>(to[i].lengths),
                    shape.segment[i].entry_slots, int(shape.segment[i].capacity)};
  return {.image = list_slots_image,
          .static_shared_bytes = attn_list_slots_shared_bytes,
          .launch = {.grid = {uint32_t(count), 1, 1},
                     .block = {attn_list_slots_threads, 1, 1},
                     .starts_early = device.arch == "sm_90"},
          .arguments = arguments_of<patch_slots>(a)};
}

Step gather_step(const Problem& p, const GatherShape& shape, const GatherPlace& to, int64_t first,
                 int64_t count, int64_t head) {
  attn_gather_kernarg a{};
  a.visits = visits(p, first, head);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& s = p.segment[i];
    a.tensor[i][0] = tensor(p, s, s.k_type, s.k_stride, s.k_scale_stride, s.k_descale);
    a.tensor[i][1] = tensor(p, s, s.v_type, s.v_stride, s.v_scale_stride, s.v_descale);
  }
  a.dst[0] = offset_of<void>(to.k);
  if (shape.own_v) a.dst[1] = offset_of<void>(to.v);
  a.dim[0] = int(p.head_dim);
  a.dim[1] = shape.own_v ? int(p.head_dim_v) : 0;
  a.lengths = offset_of<int>(to.lengths);
  a.heads = int(shape.heads);
  a.rows = int(shape.rows);
  a.dst_type = p.q_type;
  a.parts = unsigned(ceil_div(shape.rows, int64_t{attn_gather_threads}));
  return {
      .image = gather_image,
      .static_shared_bytes = attn_gather_shared_bytes,
      .launch = {.grid = {uint32_t(count * a.parts), 1, 1}, .block = {attn_gather_threads, 1, 1}},
      .arguments = arguments_of<patch>(a)};
}

Step gather_lse_step(const Problem& p, const GatherShape& shape, size_t from) {
  attn_gather_lse_kernarg a{};
  a.from = offset_of<float>(from);
  a.rows = shape.items;
  a.batch = int(p.batch);
  a.seqlen_q = int(p.q_layout == ATTN_PACKED ? p.total_q : p.seqlen_q);
  a.heads = int(p.heads_q);
  a.group = int(shape.heads * p.group());
  return {
      .image = gather_lse_image,
      .launch = {.grid = {uint32_t(ceil_div(a.rows * a.heads, int64_t{attn_gather_lse_threads})), 1,
                          1},
                 .block = {attn_gather_lse_threads, 1, 1}},
      .arguments = arguments_of<patch_lse>(a)};
}

std::span<const Kernel> lists_rows() {
  return rows;
}

}  // namespace attn
