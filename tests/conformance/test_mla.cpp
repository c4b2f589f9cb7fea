// Random latent caches and lists of keys in memory of exactly their size, with garbage in lists and
// in the entries of tables that nobody may read: cpu and lists_cuda beside the reference, which
// tests/python/test_mla.py holds against formulas. Sanitized builds find what reads beyond an
// array.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../catch.h"
#include "api/handles.h"
#include "attn/attn.hpp"
#include "backend.h"
#include "core/cache_format.h"
#include "core/ggml.h"
#include "forward_case.h"

namespace attn::test {
namespace {

template <class T>
struct Array {
  std::vector<T> values;  // one more than a C array may have, so that data() is never null
  explicit Array(int64_t count) : values(size_t(std::max<int64_t>(1, count))) {}
  T* data() { return values.data(); }
};

// Rows of finite numbers of a type, and its scales.
void fill_rows(Draw& draw, attn_dtype type, int64_t rows, int64_t dim, char* to, char* scales) {
  const int64_t scale_bytes = scales_of_row(type_info(type), dim) * type_info(type).scale_bytes;
  for (int64_t row = 0; row < rows; ++row) {
    char* const at = to + row * dtype_bytes(type, dim);
    char* const scale = scales + row * scale_bytes;
    std::vector<double> x(static_cast<size_t>(dim));
    for (double& value : x) value = double(draw(2001)) / 1000 - 1;
    if (dtype_is_cache(type)) {
      const float of_token = 1 / 448.0f;
      if (type == ATTN_F8_E4M3FN_TOKEN) std::memcpy(scale, &of_token, sizeof of_token);
      encode_cache(type, at, scale, 0, dim, x.data());
    } else if (dtype_is_ggml(type)) {
      for (int64_t d = 0; d < dim; d += 32) {
        float block[32];
        for (int64_t i = 0; i < 32; ++i) block[i] = float(x[size_t(d + i)]);
        encode_block(type, block, at + dtype_bytes(type, d), true);
      }
    } else if (type == ATTN_I8) {
      const uint16_t hundredth = f16_code(0.01);
      std::memcpy(scale, &hundredth, sizeof hundredth);
      for (int64_t d = 0; d < dim; ++d) at[d] = char(100 * x[size_t(d)]);
    } else {
      for (int64_t d = 0; d < dim; ++d) encode_element(type, at, d, x[size_t(d)], true);
    }
  }
}

struct Shape {
  attn_dtype type;
  int64_t dim, dim_v;
};
constexpr Shape shapes[] = {{ATTN_F32, 40, 24},       {ATTN_BF16, 576, 512},
                            {ATTN_F16, 320, 256},     {ATTN_F8_E4M3FN, 576, 512},
                            {ATTN_MLA_656, 576, 512}, {ATTN_MLA_584, 512, 512},
                            {ATTN_NVFP4, 64, 48},     {ATTN_F8_E4M3FN_TOKEN, 33, 33},
                            {ATTN_I8, 48, 40},        {ATTN_Q8_0, 64, 32}};

struct PartOptions {
  int64_t longest = 90;
  int64_t least_listed = 0;  // above 0: lists of keys have as many entries, or up to twice as many
  bool bad_pages = true;
  bool v_in_k = true;       // else V has an array of its own
  bool lists = true;        // or keys without positions, perhaps
  int64_t packed_rows = 0;  // above 0: of packed q
};

// One segment and its arrays.
struct Part {
  attn_segment s = make<attn_segment>();
  attn_segment_args a = make<attn_segment_args>();
  Array<char> k{0}, scales{0}, v{0}, v_scales{0};
  Array<float> k_descale{0};
  Array<int32_t> table{0}, seqlens{0}, list{0}, list_lengths{0};

  Part(Draw& draw, const Shape& shape, int64_t batch, int64_t queries, int64_t heads_kv,
       const PartOptions& options = {}) {
    s.k_type = shape.type;
    s.v_in_k = options.v_in_k;
    const int64_t keys = 1 + draw(uint64_t(options.longest));
    int64_t rows = batch * keys;
    s.seqlen = keys;
    if (draw.chance(2)) {
      const int32_t sizes[] = {1, 3, 16, 64};
      s.layout = ATTN_PAGED;
      s.page_size = draw.pick(sizes);
      s.max_pages = int32_t((keys + s.page_size - 1) / s.page_size);
      s.num_pages = 1 + draw(8);
      rows = s.num_pages * s.page_size;
      table = Array<int32_t>(batch * s.max_pages);
      for (int32_t& page : table.values)
        page = draw.chance(20) && options.bad_pages ? int32_t(draw(1u << 31))
                                                    : int32_t(draw(uint64_t(s.num_pages)));
      a.block_table = table.data();
    }
    if (draw.chance(2)) {
      s.has_seqlens = 1;
      seqlens = Array<int32_t>(batch);
      for (int32_t& length : seqlens.values) length = int32_t(draw(uint64_t(keys) + 1));
      a.seqlens = seqlens.data();
    }
    if (options.lists && draw.chance(4)) s.no_positions = 1;
    if (options.lists && !draw.chance(3)) {
      const int32_t sizes[] = {1, 1, 64, 128};
      s.list_block = draw.pick(sizes);
      s.list_size = 1 + draw(options.longest == PartOptions{}.longest ? 40
                             : s.list_block > 1                       ? 10
                             : draw.chance(2)                         ? 700
                                                                      : 40);
      if (options.least_listed > 0) {
        s.list_block = 1;
        s.list_size = options.least_listed + draw(uint64_t(options.least_listed));
      }
      s.list_queries = options.packed_rows > 0 ? 1 : draw.pick(sizes);
      s.list_heads = draw.chance(2) ? heads_kv : 1;
      if (s.layout == ATTN_PAGED && draw.chance(3)) {
        s.list_of_pool = s.no_positions = 1;
        s.list_block = 1;
        s.has_seqlens = s.max_pages = 0;
        s.seqlen = 0;
        a.seqlens = a.block_table = nullptr;
      }
      const int64_t of_head = options.packed_rows > 0
                                  ? options.packed_rows
                                  : batch * ((queries + s.list_queries - 1) / s.list_queries);
      const int64_t lists = of_head * s.list_heads;
      list = Array<int32_t>(lists * s.list_size);
      for (int32_t& entry : list.values)
        entry = draw.chance(8) ? int32_t(draw(uint64_t{1} << 32))
                               : int32_t(draw(uint64_t(rows) / s.list_block + 2)) - 1;
      a.list = list.data();
      if (draw.chance(2)) {
        s.has_list_lengths = 1;
        list_lengths = Array<int32_t>(lists);
        for (int32_t& n : list_lengths.values) n = int32_t(draw(uint64_t(s.list_size) + 1));
        a.list_lengths = list_lengths.data();
      }
    }
    rows *= heads_kv;
    const TypeInfo& type = type_info(shape.type);
    k = Array<char>(rows * dtype_bytes(shape.type, shape.dim));
    scales = Array<char>(rows * scales_of_row(type, shape.dim) * type.scale_bytes);
    fill_rows(draw, shape.type, rows, shape.dim, k.data(), scales.data());
    a.k = k.data();
    if (type.has_scales) a.k_scale = scales.data();
    if (s.v_in_k) return;
    s.v_type = shape.type;
    v = Array<char>(rows * dtype_bytes(shape.type, shape.dim_v));
    v_scales = Array<char>(rows * scales_of_row(type, shape.dim_v) * type.scale_bytes);
    fill_rows(draw, shape.type, rows, shape.dim_v, v.data(), v_scales.data());
    a.v = v.data();
    if (type.has_scales) a.v_scale = v_scales.data();
  }
};

TEST_CASE("mla: cpu and reference on random caches and lists") {
  const context reference(ATTN_BACKEND_REFERENCE), cpu(ATTN_BACKEND_CPU);
  int rows_with_keys = 0;
  const uint64_t seeds = sanitized ? 40 : 150;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Draw draw{seed, 77};
    const Shape& shape = shapes[seed % std::size(shapes)];
    const int64_t batch = 1 + draw(3), heads_kv = draw.chance(4) ? 2 : 1;
    const int64_t groups[] = {1, 3, 8, 16, 70};
    const int64_t queries_of[] = {1, 1, 2, 5, 70};
    const int64_t heads = heads_kv * draw.pick(groups), queries = draw.pick(queries_of);
    std::vector<std::unique_ptr<Part>> parts;
    std::vector<attn_segment> segments;
    std::vector<attn_segment_args> args_of;
    for (uint64_t n = 1 + draw(2); n > 0; --n) {
      parts.push_back(std::make_unique<Part>(draw, shape, batch, queries, heads_kv));
      segments.push_back(parts.back()->s);
      args_of.push_back(parts.back()->a);
    }
    auto p = make<attn_problem>();
    p.batch = batch;
    p.heads_q = heads;
    p.heads_kv = heads_kv;
    p.head_dim = shape.dim;
    p.head_dim_v = shape.dim_v;
    p.seqlen_q = queries;
    p.q_type = p.out_type = ATTN_F32;
    p.num_segments = int32_t(segments.size());
    p.segments = segments.data();
    if (draw.chance(2)) p.flags |= ATTN_CAUSAL;
    if (draw.chance(3)) {
      p.flags |= ATTN_WINDOW;
      p.window_left = draw(50);
      p.window_right = -1;
    }
    if (draw.chance(3)) p.softcap = 3;
    if (draw.chance(4)) p.fixed_split = 512;
    Array<float> q(batch * queries * heads * shape.dim), sinks(heads);
    for (float& x : q.values) x = float(draw(2001)) / 1000 - 1;
    if (draw.chance(3)) p.flags |= ATTN_SINKS;
    std::vector<float> outs[2], lses[2];
    for (int n = 0; n < 2; ++n) {
      const context& on = n == 0 ? reference : cpu;
      outs[n].resize(size_t(batch * queries * heads * shape.dim_v), NAN);
      lses[n].resize(size_t(batch * heads * queries), NAN);
      auto args = make<attn_args>();
      args.q = q.data();
      args.out = outs[n].data();
      args.lse = lses[n].data();
      args.num_segments = p.num_segments;
      args.segments = args_of.data();
      if (p.flags & ATTN_SINKS) args.sinks = sinks.data();
      const plan made(on, p);
      const buffer workspace = made.make_workspace(on);
      made.run(args, workspace);
    }
    INFO("seed " << seed << " " << dtype_name(shape.type));
    size_t wrong = 0;
    for (size_t i = 0; i < outs[0].size(); ++i)
      wrong += !(std::abs(outs[0][i] - outs[1][i]) <= 3e-5f);
    for (size_t i = 0; i < lses[0].size(); ++i) {
      rows_with_keys += std::isfinite(lses[0][i]);
      wrong += !(lses[0][i] == lses[1][i] || std::abs(lses[0][i] - lses[1][i]) <= 3e-5f);
    }
    CHECK(wrong == 0);
  }
  CHECK(rows_with_keys > 60 * int(seeds));
}

// What lists_cuda takes, or parts of it on some devices. Only bf16 holds codes times their scales.
constexpr Shape gathered_shapes[] = {{ATTN_BF16, 576, 512},
                                     {ATTN_F16, 576, 512},
                                     {ATTN_MLA_656, 576, 512},
                                     {ATTN_F8_E4M3FN, 576, 512},
                                     {ATTN_BF16, 128, 128},
                                     {ATTN_F8_E4M3FN_TOKEN, 64, 64},
                                     {ATTN_F8_E4M3FN_TOKEN, 576, 512},
                                     {ATTN_F16, 128, 64}};

// A problem of lists on two backends: the reference's arrays are copied to the device.
struct Lists {
  const Shape* shape;
  std::vector<std::unique_ptr<Part>> parts;
  std::vector<attn_segment> segments;
  attn_problem p = make<attn_problem>();
  Buffer q, sinks, cu_seqlens_q;
  int64_t rows = 0;       // of q
  bool by_query = false;  // else the sequences' keys are copied
  bool bad_pages = false;

  Lists() = default;
  explicit Lists(uint64_t seed, int64_t least_listed = 0) {
    Draw draw{seed, 78};
    shape = &gathered_shapes[seed % std::size(gathered_shapes)];
    const bool latent = shape->dim == 576;
    const int64_t groups[] = {1, 3, 8, 16, 32, 128}, queries_of[] = {1, 1, 2, 5, 70};
    p.batch = 1 + draw(3);
    p.heads_kv = draw.chance(3) ? 2 : 1;
    const int64_t group = latent ? draw.pick(groups) : 1 + draw(8);
    p.heads_q = p.heads_kv * group;
    p.head_dim = shape->dim;
    p.head_dim_v = shape->dim_v;
    p.seqlen_q = group > 3 ? 1 + draw(group > 16 ? 2 : 5) : draw.pick(queries_of);
    p.q_type = shape->type == ATTN_F16 ? ATTN_F16 : ATTN_BF16;
    p.out_type = ATTN_F32;
    PartOptions options{.longest = draw.chance(3) ? 1500 : 150,
                        .least_listed = least_listed,
                        .bad_pages = draw.chance(2),
                        .v_in_k = latent || draw.chance(2)};
    bad_pages = options.bad_pages;
    rows = p.batch * p.seqlen_q;
    if (draw.chance(3)) {  // packed, with rows of nobody
      std::vector<int32_t> ends = {0};
      for (int64_t b = 0; b < p.batch; ++b)
        ends.push_back(ends.back() + int32_t(draw(uint64_t(p.seqlen_q) + 1)));
      rows = ends.back() + 1 + draw(2);
      options.packed_rows = rows;
      p.q_layout = ATTN_PACKED;
      p.total_q = rows;
      cu_seqlens_q = buffer(ends.data(), ends.size() * sizeof(int32_t));
    }
    for (uint64_t n = 1 + draw(2); n > 0; --n) {
      parts.push_back(
          std::make_unique<Part>(draw, *shape, p.batch, p.seqlen_q, p.heads_kv, options));
      segments.push_back(parts.back()->s);
      by_query |= segments.back().list_size > 0 || segments.back().no_positions;
    }
    p.num_segments = int32_t(segments.size());
    p.segments = segments.data();
    if (draw.chance(2)) p.flags |= ATTN_CAUSAL;
    if (draw.chance(3)) {
      p.flags |= ATTN_WINDOW;
      p.window_left = draw(50);
      p.window_right = draw.chance(2) ? -1 : draw(9);
    }
    if (draw.chance(3)) p.softcap = 3;
    if (draw.chance(5)) p.fixed_split = 512;
    if (draw.chance(3)) p.flags |= ATTN_SINKS;
    fill_q(draw);
  }
  // add() adds the segment, fill_q() what else there is.
  Lists(const Shape& shape, int64_t batch, int64_t heads, int64_t queries) : shape(&shape) {
    p.batch = batch;
    p.heads_q = heads;
    p.heads_kv = 1;
    p.head_dim = shape.dim;
    p.head_dim_v = shape.dim_v;
    p.seqlen_q = queries;
    p.q_type = ATTN_BF16;
    p.out_type = ATTN_F32;
    rows = batch * queries;
  }
  void add(std::unique_ptr<Part> part) {
    by_query |= part->s.list_size > 0;
    segments = {part->s};
    parts.push_back(std::move(part));
    p.num_segments = 1;
    p.segments = segments.data();
  }
  // Of its latent columns and its others.
  void fill_q(Draw& draw, double latent = 1, double rope = 1) {
    q = Buffer(size_t(rows * p.heads_q * p.head_dim) * 2, 0xff);
    for (int64_t i = 0; i < rows * p.heads_q * p.head_dim; ++i)
      encode_element(
          p.q_type, q.data(), i,
          (double(draw(2001)) / 1000 - 1) * (i % p.head_dim < p.head_dim_v ? latent : rope), true);
    std::vector<float> of_head(size_t(p.heads_q), 0.5f);
    if (p.flags & ATTN_SINKS) sinks = buffer(of_head.data(), of_head.size() * sizeof(float));
  }
  static Buffer buffer(const void* from, size_t bytes) {
    Buffer to(bytes, 0xff);
    std::memcpy(to.data(), from, bytes);
    return to;
  }
  template <class T>
  static Buffer buffer(Array<T>& from) {
    return buffer(from.data(), from.values.size() * sizeof(T));
  }
};

struct ListsAnswer {
  attn_status status = ATTN_OK;
  std::string kernel, error;
  bool slots = false;     // keys are read where they are
  std::string attends;    // the kernel that does, or that reads the copies
  uint64_t launches = 0;  // of it
  std::vector<float> out, lse;
};
// What attn_explain says of the parts of lists_cuda: two, or none if there are no queries.
void note_parts(attn_context* on, const attn_problem& p, ListsAnswer* to) {
  std::string text(1 << 20, '\0');
  size_t size = 0;
  REQUIRE(attn_explain(on, &p, text.data(), text.size(), &size) == ATTN_OK);
  size_t at = text.find("\"parts\":[");
  REQUIRE(at != std::string::npos);
  const auto next = [&] {
    const std::string key = "\"kernel\":\"";
    at = text.find(key, at);
    REQUIRE(at != std::string::npos);
    at += key.size();
    return text.substr(at, text.find('"', at) - at);
  };
  const std::string first = next();
  to->slots = first == "list_slots_cuda";
  CHECK((to->slots || first == "gather_cuda"));
  to->attends = next();
}
// Run twice: equal calls give equal bits.
ListsAnswer answer(attn_context* on, const Lists& in, const char* kernel) {
  ListsAnswer to;
  attn_problem p = in.p;
  p.kernel = kernel;
  attn_plan* plan = nullptr;
  to.status = attn_plan_create(on, &p, &plan);
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> owned(plan, attn_plan_destroy);
  to.error = attn_last_error();
  if (to.status != ATTN_OK) return to;
  to.error.clear();
  to.kernel = attn_plan_kernel(plan);
  if (to.kernel == "lists_cuda")
    note_parts(on, p, &to);
  else
    to.attends = to.kernel;
  const uint64_t launches = attn_launch_count(to.attends.c_str());
  Arena arena(on);
  std::vector<Buffer> buffers;
  buffers.reserve(16 * in.parts.size());
  std::vector<attn_segment_args> segments;
  for (const auto& part : in.parts) {
    attn_segment_args a = part->a;
    const auto move = [&](auto& address, auto& array) {
      if (!address) return;
      buffers.push_back(Lists::buffer(array));
      address = static_cast<std::remove_reference_t<decltype(address)>>(arena.add(buffers.back()));
    };
    move(a.k, part->k), move(a.k_scale, part->scales);
    move(a.v, part->v), move(a.v_scale, part->v_scales), move(a.k_descale, part->k_descale);
    move(a.block_table, part->table), move(a.seqlens, part->seqlens);
    move(a.list, part->list), move(a.list_lengths, part->list_lengths);
    segments.push_back(a);
  }
  const Buffer out(size_t(in.rows * p.heads_q * p.head_dim_v) * sizeof(float), 0xff),
      lse(size_t(in.rows * p.heads_q) * sizeof(float), 0xff);
  auto args = make<attn_args>();
  args.q = arena.add(in.q);
  args.sinks = static_cast<const float*>(arena.add(in.sinks));
  args.cu_seqlens_q = static_cast<const int32_t*>(arena.add(in.cu_seqlens_q));
  args.out = arena.add(out);
  args.lse = static_cast<float*>(arena.add(lse));
  args.num_segments = p.num_segments;
  args.segments = segments.data();
  const size_t bytes = attn_plan_workspace(plan);
  void* const workspace = arena.workspace(bytes);
  to.status = attn_workspace_init(plan, workspace, bytes, nullptr);
  for (int n = 0; n < 2 && to.status == ATTN_OK; ++n) {
    to.status = attn_run(plan, &args, workspace, bytes, nullptr);
    if (to.status == ATTN_OK) to.status = attn_synchronize(on, nullptr);
    if (to.status != ATTN_OK) break;
    const auto read = [&](const Buffer& shape, void* from, std::vector<float>& values) {
      const Buffer got = arena.fetch(shape, from);
      const std::vector<float> before = values;
      values.assign(got.as<float>(), got.as<float>() + got.size() / sizeof(float));
      if (n > 0 && std::memcmp(before.data(), values.data(), got.size()) != 0)
        to.error = "equal calls gave other bits";
    };
    read(out, args.out, to.out);
    read(lse, args.lse, to.lse);
  }
  to.launches = attn_launch_count(to.attends.c_str()) - launches;
  if (to.status != ATTN_OK) to.error = attn_last_error();
  if (to.error.empty()) to.error = arena.check_unchanged({args.out, args.lse});
  return to;
}

constexpr attn_dtype types_of_codes[] = {ATTN_MLA_656, ATTN_F8_E4M3FN, ATTN_F8_E4M3FN_TOKEN};
// rows: of Q, of a sequence.
const char* kernel_of(attn_dtype type, int64_t rows) {
  const bool own = type == ATTN_MLA_656;
  if (rows > 16) return own ? "mla_sm90_bf16_d576_r64_656" : "mla_sm90_bf16_d576_r64_e4m3";
  if (rows > 8) return own ? "mla_sm90_bf16_d576_r16_656" : "mla_sm90_bf16_d576_r16_e4m3";
  return own ? "mla_sm90_bf16_d576_r8_656" : "mla_sm90_bf16_d576_r8_e4m3";
}

// Of which `least` must be taken, and on a Hopper `least_slots` without copies.
void check_lists(uint64_t first, uint64_t last, uint64_t least, uint64_t least_slots,
                 int64_t least_listed = 0) {
  Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (!cuda.context) ATTN_SKIP(cuda.reason);
  Backend& reference = backend_of(ATTN_BACKEND_REFERENCE);
  const uint64_t launches = attn_launch_count("lists_cuda");
  // With all of its kernels.
  const bool hopper =
      cuda.context->context->driver->device().arch == "sm_90" && !std::getenv("ATTN_KERNEL_FILE");
  uint64_t ran = 0, slots = 0;
  int rows_with_keys = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    const Lists in(seed, least_listed);
    // Without lists a page that does not exist is no key, but has positions.
    if (!in.by_query && in.bad_pages) continue;
    INFO("seed " << seed << " " << dtype_name(in.shape->type) << " " << in.shape->dim);
    const ListsAnswer got = answer(cuda.context, in, "lists_cuda");
    INFO(got.error);
    if (got.status == ATTN_UNSUPPORTED) continue;
    REQUIRE(got.status == ATTN_OK);
    CHECK(got.error == "");
    ++ran;
    slots += got.slots;
    INFO((got.slots ? "places for " : "copies for ") << got.attends);
    CHECK(got.launches >= 2);
    const bool as_q = in.shape->type == in.p.q_type,
               codes = !as_q && in.shape->dim == 576 && in.p.q_type == ATTN_BF16;
    if (!in.by_query || !(as_q || codes)) CHECK(!got.slots);
    // Of latent rows up to 16 heads; more of them, in one segment.
    const int64_t group = in.p.heads_q / in.p.heads_kv;
    const bool few = group <= 16,
               plain = in.parts.size() == 1 && in.p.softcap == 0 && in.p.fixed_split == 0;
    if (hopper && in.by_query && as_q && in.shape->dim == 576 && (few || plain)) {
      CHECK(got.slots);
      const std::string rows = !few ? "_r64" : group > 8 ? "_r16" : "_r8";
      CHECK(got.attends == std::string("mla_sm90_") + (in.p.q_type == ATTN_F16 ? "f16" : "bf16") +
                               "_d576" + rows + (plain ? "_pages" : ""));
    }
    if (hopper && in.by_query && codes) {
      CHECK(got.slots == plain);
      if (plain) CHECK(got.attends == kernel_of(in.shape->type, group));
    }
    if (stand_in()) continue;
    const ListsAnswer want = answer(reference.context, in, nullptr);
    REQUIRE(want.status == ATTN_OK);
    // Weights are of 8 bits or more, and so are codes times scales that are no powers of two.
    const bool inexact = in.shape->type == ATTN_F8_E4M3FN_TOKEN || in.p.softcap > 0;
    const float out_error = 8e-3f, lse_error = inexact ? 4e-3f : 3e-4f;
    size_t wrong = 0;
    for (size_t i = 0; i < want.out.size(); ++i)
      wrong += !(std::abs(got.out[i] - want.out[i]) <= out_error);
    for (size_t i = 0; i < want.lse.size(); ++i) {
      rows_with_keys += std::isfinite(want.lse[i]);
      wrong += !(got.lse[i] == want.lse[i] || std::abs(got.lse[i] - want.lse[i]) <= lse_error);
    }
    CHECK(wrong == 0);
  }
  CHECK(attn_launch_count("lists_cuda") - launches == 2 * ran);
  INFO("lists_cuda took " << ran << ", " << slots << " without copies");
  CHECK(ran >= least);
  if (hopper) CHECK(slots >= least_slots);
  if (!stand_in()) CHECK(rows_with_keys > 10 * int(least));
}

TEST_CASE("mla: lists_cuda and reference on few problems") {  // which sanitizers run
  check_lists(1, 16, 4, 2);
}
TEST_CASE("mla: lists_cuda and reference on random caches and lists") {
  check_lists(17, 130, 20, 20);
}

// More entries than list_slots_cuda looks at once, and several units of the kernels that attend.
TEST_CASE("mla: lists_cuda and reference on long lists") {
  check_lists(201, 240, 10, 5, 1100);
}

// Numbers that differ from the reference's by more than `error`, or in being NaN.
size_t differ(const std::vector<float>& got, const std::vector<float>& want, double error) {
  size_t wrong = got.size() != want.size();
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i)
    wrong += !(got[i] == want[i] || std::abs(double(got[i]) - double(want[i])) <= error ||
               (std::isnan(got[i]) && std::isnan(want[i])));
  return wrong;
}

// A list that list_slots_cuda goes through in more than two passes.
TEST_CASE("mla: lists_cuda and reference on a list of 5000 keys") {
  Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (!cuda.context) ATTN_SKIP(cuda.reason);
  for (const attn_dtype type : {ATTN_BF16, ATTN_MLA_656}) {
    Draw draw{uint64_t(type), 80};
    const Shape shape{type, 576, 512};
    Lists in(shape, 1, 20, 2);
    auto part = std::make_unique<Part>(draw, shape, 1, 2, 1, PartOptions{.lists = false});
    part->s.list_block = part->s.list_queries = 1;
    part->s.list_heads = 1;
    part->s.list_size = 5000;
    part->list = Array<int32_t>(2 * 5000);
    for (int32_t& entry : part->list.values)
      entry = int32_t(draw(uint64_t(part->s.seqlen) + 40)) - 20;
    part->a.list = part->list.data();
    in.add(std::move(part));
    in.fill_q(draw);
    INFO(dtype_name(type));
    const ListsAnswer got = answer(cuda.context, in, "lists_cuda");
    INFO(got.error << " " << got.attends);
    if (got.status == ATTN_UNSUPPORTED) continue;  // by kernels of a file
    REQUIRE(got.status == ATTN_OK);
    CHECK(got.error == "");
    CHECK(got.launches >= 2);
    if (stand_in()) continue;
    const ListsAnswer want = answer(backend_of(ATTN_BACKEND_REFERENCE).context, in, nullptr);
    REQUIRE(want.status == ATTN_OK);
    CHECK(differ(got.out, want.out, 8e-3) == 0);
    CHECK(differ(got.lse, want.lse, 3e-4) == 0);
  }
}

TEST_CASE("mla: lists_cuda on a list in any order") {
  Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (!cuda.context) ATTN_SKIP(cuda.reason);
  if (stand_in()) ATTN_SKIP("needs kernels");
  for (const attn_dtype type : {ATTN_F16, ATTN_BF16, ATTN_MLA_656, ATTN_F8_E4M3FN})
    for (const int64_t heads : {8, 16, 64}) {
      // Weights are rounded against references that the order moves: to 8 bits, in f16 to 11.
      const double error = type == ATTN_F16 ? 1e-4 : 4e-4;
      Draw draw{uint64_t(type), 81};
      const Shape shape{type, 576, 512};
      Lists in(shape, 1, heads, 1);
      if (type == ATTN_F16) in.p.q_type = ATTN_F16;
      const PartOptions options{.longest = 1500, .bad_pages = false, .lists = false};
      std::unique_ptr<Part> part;
      do part = std::make_unique<Part>(draw, shape, 1, 1, 1, options);
      while (part->s.seqlen < 500 || part->s.has_seqlens);
      part->s.list_block = part->s.list_queries = 1;
      part->s.list_heads = 1;
      part->s.list_size = 2048;
      part->list = Array<int32_t>(2048);
      for (int32_t& entry : part->list.values) entry = int32_t(draw(uint64_t(part->s.seqlen)));
      part->a.list = part->list.data();
      std::vector<int32_t>& list = part->list.values;
      in.add(std::move(part));
      in.fill_q(draw);
      INFO(dtype_name(type) << " " << heads << " heads");
      const ListsAnswer first = answer(cuda.context, in, "lists_cuda");
      INFO(first.error << " " << first.attends);
      if (first.status == ATTN_UNSUPPORTED) continue;  // by kernels of a file
      REQUIRE(first.status == ATTN_OK);
      for (int n = 0; n < 5; ++n) {
        for (size_t i = list.size() - 1; i > 0; --i) std::swap(list[i], list[draw(i + 1)]);
        const ListsAnswer next = answer(cuda.context, in, "lists_cuda");
        REQUIRE(next.status == ATTN_OK);
        CHECK(differ(next.out, first.out, error) == 0);
        CHECK(differ(next.lse, first.lse, 1e-4) == 0);
      }
      std::fill_n(list.begin(), 1024, -1);  // others have another answer
      CHECK(differ(answer(cuda.context, in, "lists_cuda").out, first.out, error) > 0);
    }
}

// Where row `key` of sequence b is, or -1.
int64_t row_of(const Part& part, int64_t b, int64_t key) {
  if (part.s.layout != ATTN_PAGED) return b * part.s.seqlen + key;
  const int32_t page = part.table.values[size_t(b * part.s.max_pages + key / part.s.page_size)];
  if (page < 0 || page >= part.s.num_pages) return -1;
  return page * int64_t{part.s.page_size} + key % part.s.page_size;
}
int64_t length_of(const Part& part, int64_t b) {
  return part.s.has_seqlens ? part.seqlens.values[size_t(b)] : part.s.seqlen;
}

// Rows of codes where they are, with any scales, NaN in all that nobody may read and, in some
// problems, one NaN that each query of a sequence sees.
struct RowsOfCodes {
  Shape shape;
  Lists in;
  double size;  // of the largest value
  bool exact;   // codes times scales are numbers of bf16
  bool nans = false;
  bool nans_behind = false;  // the last key of a sequence, in its unit of 64

  // Of Q, of a sequence.
  int64_t rows() const { return in.p.heads_q / in.p.heads_kv * in.p.seqlen_q; }

  RowsOfCodes(uint64_t seed, attn_dtype type) : shape{type, 576, 512} {
    Draw draw{seed, uint64_t(type)};
    const int64_t heads[] = {1, 3, 8, 16, 20, 64, 128};
    const int64_t batch = 1 + draw(4), group = draw.pick(heads);
    in = Lists(shape, batch, group, 1 + draw(8));
    const PartOptions options{
        .longest = draw.chance(3) ? 150 : 1500, .bad_pages = draw.chance(2), .lists = false};
    auto part = std::make_unique<Part>(draw, shape, batch, in.p.seqlen_q, 1, options);
    const int64_t bytes = dtype_bytes(type, shape.dim);
    const int64_t rows = int64_t(part->k.values.size()) / bytes;
    const int mode = int(seed % 4);
    exact = mode != 1 && type != ATTN_F8_E4M3FN_TOKEN;
    const double factor = mode == 2 ? 0x1p40 : mode == 3 ? 0x1p-40 : 1;
    size = factor * (mode == 1 ? 3 : 1);
    constexpr float factors[] = {1.0f / 64, 0.3f, 1, 3};
    const auto draw_factor = [&] { return mode == 1 ? draw.pick(factors) : float(factor); };
    const auto scale = [&](char* at) {
      float x;
      std::memcpy(&x, at, sizeof x);
      x *= draw_factor();
      std::memcpy(at, &x, sizeof x);
    };
    if (type == ATTN_MLA_656) {
      for (int64_t row = 0; row < rows; ++row)
        for (int n = 0; n < 4; ++n) scale(part->k.data() + row * bytes + 512 + 4 * n);
    } else if (type == ATTN_F8_E4M3FN_TOKEN) {
      for (int64_t row = 0; row < rows; ++row) scale(part->scales.data() + 4 * row);
    } else if (mode > 0) {
      const attn_descale_kind kinds[] = {ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD,
                                         ATTN_DESCALE_BLOCK};
      part->s.k_descale = draw.pick(kinds);
      if (part->s.k_descale == ATTN_DESCALE_BLOCK) part->s.descale_block_keys = 64;
      part->k_descale = Array<float>(part->s.k_descale == ATTN_DESCALE_TENSOR ? 1
                                     : part->s.k_descale == ATTN_DESCALE_HEAD
                                         ? batch
                                         : batch * ((part->s.seqlen + 63) / 64));
      for (float& x : part->k_descale.values) x = draw_factor();
      part->a.k_descale = part->k_descale.data();
    }
    std::vector<bool> read(size_t(rows), false);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t key = 0; key < length_of(*part, b); ++key)
        if (const int64_t row = row_of(*part, b, key); row >= 0) read[size_t(row)] = true;
    for (int64_t row = 0; row < rows; ++row)
      if (!read[size_t(row)]) std::memset(part->k.data() + row * bytes, 0xff, size_t(bytes));
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t length = length_of(*part, b);
      if (length == 0 || length % 64 == 0 || length == part->s.seqlen) continue;
      const int64_t row = row_of(*part, b, length);
      nans_behind |= row >= 0 && !read[size_t(row)];
    }
    if (seed % 5 == 0 && part->s.layout != ATTN_PAGED)  // pages may be others' too
      for (int64_t b = 0; b < batch; b += 2)
        if (length_of(*part, b) >= in.p.seqlen_q) {
          part->k.values[size_t(row_of(*part, b, 0) * bytes + draw(512))] = 0x7f;
          nans = true;
        }
    in.add(std::move(part));
    if (draw.chance(2)) in.p.flags |= ATTN_CAUSAL;
    if (draw.chance(3)) in.p.flags |= ATTN_SINKS;
    if (draw.chance(2)) in.p.max_sms = int32_t(1 + draw(40));
    // Scores do not depend on the factor.
    in.fill_q(draw, 1 / factor, type == ATTN_MLA_656 ? 1 : 1 / factor);
  }
};

void check_codes(attn_dtype type, uint64_t first, uint64_t last) {
  Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (!cuda.context) ATTN_SKIP(cuda.reason);
  const bool hopper = cuda.context->context->driver->device().arch == "sm_90";
  bool nans = false, nans_behind = false;
  for (uint64_t seed = first; seed <= last; ++seed) {
    const RowsOfCodes of(seed, type);
    nans_behind |= of.nans_behind;
    INFO("seed " << seed << " " << dtype_name(type));
    const ListsAnswer got = answer(cuda.context, of.in, nullptr);
    INFO(got.error << " " << got.kernel);
    if (!hopper && got.status == ATTN_UNSUPPORTED) continue;
    REQUIRE(got.status == ATTN_OK);
    CHECK(got.error == "");
    if (hopper) CHECK(got.kernel == kernel_of(type, of.rows()));
    if (!hopper || stand_in()) continue;
    CHECK(got.launches >= 2);
    const ListsAnswer want = answer(backend_of(ATTN_BACKEND_REFERENCE).context, of.in, nullptr);
    REQUIRE(want.status == ATTN_OK);
    CHECK(differ(got.out, want.out, 8e-3 * of.size) == 0);
    CHECK(differ(got.lse, want.lse, of.exact ? 3e-4 : 4e-3) == 0);
    CHECK(std::any_of(got.lse.begin(), got.lse.end(), [](float x) { return std::isnan(x); }) ==
          of.nans);
    nans |= of.nans;
  }
  if (hopper && !stand_in() && last > 20) CHECK(nans);
  if (last > 20) CHECK(nans_behind);
}
TEST_CASE("mla: rows of 656 bytes on few problems") {  // which sanitizers run
  check_codes(ATTN_MLA_656, 1, 10);
}
TEST_CASE("mla: rows of 656 bytes on random problems") {
  check_codes(ATTN_MLA_656, 11, 90);
}
TEST_CASE("mla: rows of e4m3 on few problems") {
  check_codes(ATTN_F8_E4M3FN, 1, 10);
}
TEST_CASE("mla: rows of e4m3 on random problems") {
  check_codes(ATTN_F8_E4M3FN, 11, 60);
  check_codes(ATTN_F8_E4M3FN_TOKEN, 11, 60);
}

// Scores that grow by far more than the kernels' slack while a block has the sequence, the last key
// among the largest, and NaN behind it.
void check_growing(attn_dtype type) {
  Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (!cuda.context) ATTN_SKIP(cuda.reason);
  const Shape shape{type, 576, 512};
  const int64_t bytes = dtype_bytes(type, shape.dim), keys = 400;
  for (const int64_t heads : {8, 16, 64}) {
    Draw draw{uint64_t(heads), 82};
    Lists in(shape, 2, heads, 1);
    std::unique_ptr<Part> part;
    do
      part =
          std::make_unique<Part>(draw, shape, 2, 1, 1, PartOptions{.longest = 1, .lists = false});
    while (part->s.layout == ATTN_PAGED || !part->s.has_seqlens);
    part->s.seqlen = keys;
    part->seqlens.values = {330, 345};
    part->k = Array<char>(2 * keys * bytes);
    part->a.k = part->k.data();
    fill_rows(draw, type, 2 * keys, shape.dim, part->k.data(), part->scales.data());
    for (int64_t row = 0; row < 2 * keys; ++row) {
      char* const at = part->k.data() + row * bytes;
      const int64_t key = row % keys;
      // Times 64 and the scale of scores, 10 for each step.
      for (int64_t d = 512; d < 576; ++d) {
        const double x = 3.75 * double(key / 128);
        if (type == ATTN_MLA_656)
          encode_element(ATTN_BF16, at + 528, d - 512, x, true);
        else
          encode_element(type, at, d, x, true);
      }
      if (key >= length_of(*part, row / keys)) std::memset(at, 0xff, size_t(bytes));
    }
    in.add(std::move(part));
    in.p.max_sms = 1;
    in.fill_q(draw);
    for (int64_t i = 0; i < in.rows * heads * 576; ++i)
      if (i % 576 >= 512) encode_element(ATTN_BF16, in.q.data(), i, 1, true);
    INFO(dtype_name(type) << " " << heads << " heads");
    const ListsAnswer got = answer(cuda.context, in, nullptr);
    INFO(got.error << " " << got.kernel);
    if (got.status == ATTN_UNSUPPORTED) continue;  // no Hopper, or a file of other kernels
    REQUIRE(got.status == ATTN_OK);
    CHECK(got.error == "");
    CHECK(got.kernel == kernel_of(type, heads));
    if (stand_in()) continue;
    const ListsAnswer want = answer(backend_of(ATTN_BACKEND_REFERENCE).context, in, nullptr);
    REQUIRE(want.status == ATTN_OK);
    CHECK(std::all_of(want.lse.begin(), want.lse.end(), [](float x) { return x > 20; }));
    CHECK(differ(got.out, want.out, 8e-3) == 0);
    CHECK(differ(got.lse, want.lse, 3e-4) == 0);
  }
}
TEST_CASE("mla: rows of 656 bytes whose scores grow") {
  check_growing(ATTN_MLA_656);
}
TEST_CASE("mla: rows of e4m3 whose scores grow") {
  check_growing(ATTN_F8_E4M3FN);
}

TEST_CASE("mla: equal bits of rows of codes over 100 runs") {
  Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (!cuda.context) ATTN_SKIP(cuda.reason);
  if (cuda.context->context->driver->device().arch != "sm_90" || stand_in()) ATTN_SKIP("no Hopper");
  for (const attn_dtype type : types_of_codes) {
    std::set<std::string> kernels;
    for (uint64_t seed = 16; seed < 60; ++seed) {
      const RowsOfCodes of(seed, type);
      const char* const kernel = kernel_of(type, of.rows());
      if (!kernels.insert(kernel).second) continue;
      INFO(dtype_name(type) << " " << kernel);
      const ListsAnswer first = answer(cuda.context, of.in, kernel);
      REQUIRE(first.status == ATTN_OK);
      int other = 0;
      for (int n = 0; n < 50; ++n) {  // of two runs each
        const ListsAnswer next = answer(cuda.context, of.in, kernel);
        CHECK(next.error == "");
        other +=
            std::memcmp(next.out.data(), first.out.data(), next.out.size() * sizeof(float)) != 0;
      }
      CHECK(other == 0);
    }
    CHECK(kernels.size() == 3);
  }
}

// One query of each sequence over a cache of 576/512 columns that all heads share.
Case latent_case(const std::string& name, uint64_t seed) {
  Case c;
  c.name = name + "-" + std::to_string(seed);
  c.thinning = for_devices(seed);
  c.seed = seed;
  c.v_in_k = true;
  c.head_dim = 576;
  c.head_dim_v = 512;
  c.heads_kv = 1;
  c.seqlen_q = 1;
  return c;
}

// Any problem of latent caches that kernels of devices take; long enough for sequences to be shared
// by blocks.
Case device_case(uint64_t seed) {
  Case c = latent_case("mla", seed);
  Draw draw{seed, 719};
  c.batch = 1 + draw(4);
  c.heads_kv = draw.chance(6) ? 2 : 1;
  const int64_t groups[] = {1, 3, 8, 16, 16, 20, 64, 128}, group = draw.pick(groups);
  c.heads_q = c.heads_kv * group;
  c.seqlen_q = draw.chance(2) ? 1 : 1 + draw(uint64_t(std::max<int64_t>(2, 160 / group)));
  c.q_type = draw.chance(3) ? ATTN_F16 : ATTN_BF16;
  const attn_dtype out_types[] = {ATTN_F32, c.q_type, c.q_type, ATTN_F16};
  c.out_type = draw.pick(out_types);
  constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major};
  c.q_arrange = draw.pick(arranges);
  c.out_arrange = draw.pick(arranges);
  if (draw.chance(4)) draw_lengths_q(draw, &c);
  for (uint64_t n = draw.chance(5) ? 2 : 1; n > 0; --n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 63, 64, 65, 257, 700, 1900};
    s.capacity = draw.pick(capacities);
    s.k_type = s.v_type = c.q_type;
    s.layout = attn_layout(draw.chance(2) ? 2 : draw(3));
    const int32_t page_sizes[] = {1, 16, 24, 32, 64, 64, 64, 128};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    s.arrange = draw.pick(arranges);
    if (s.layout == ATTN_PAGED && draw.chance(6)) s.bad_pages = {int32_t(draw(4))};
    c.segments.push_back(s);
  }
  if (!draw.chance(3)) c.flags |= ATTN_CAUSAL;
  if (draw.chance(5)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(300) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(4)) c.flags |= ATTN_SINKS;
  if (draw.chance(6)) c.softcap = 3;
  if (draw.chance(8)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(6)) c.fixed_split = 128;
  if (draw.chance(3)) c.max_sms = int32_t(1 + draw(40));
  if (draw.chance(8)) c.values = draw.chance(2) ? Values::uniform : Values::one_hot;
  if (draw.chance(4)) draw_begins(draw, &c);
  return c;
}

TEST_CASE("mla: random latent caches on every kernel") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 160; ++seed) check_case(device_case(seed), kernels);
}

// One that each kernel of latent caches takes that has as many rows.
Case repeated_case(const Kernel& kernel, int64_t heads) {
  Case c = latent_case("mla-repeat", 7);
  c.thinning = on_all_kernels;
  c.batch = 3;
  c.heads_q = heads;
  c.q_type = c.out_type = float_type_of(kernel);
  SegmentCase s;
  s.capacity = 700;
  s.k_type = s.v_type = c.q_type;
  s.layout = ATTN_PAGED;
  s.page_size = std::string(kernel.name).ends_with("_pages") ? 1 : 64;
  c.segments.push_back(s);
  return c;
}
// of(kernel, case, its data, its answer) for each kernel of latent caches that takes repeated_case
// with fixed_split, with as many heads as it takes. On a Hopper `least` kernels must.
template <class Of>
void with_repeated(int64_t fixed_split, int least, Of&& of) {
  int taken = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (!std::string(kernel->name).starts_with("mla_")) continue;
    for (const int64_t heads : {20, 16, 8}) {
      Case c = repeated_case(*kernel, heads);
      c.fixed_split = fixed_split;
      const Data data = make_data(c);
      const Outputs got =
          run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << heads << " heads");
      REQUIRE(got.error == "");
      of(*kernel, c, data, got);
      ++taken;
      break;
    }
  }
  const Backend& cuda = backend_of(ATTN_BACKEND_CUDA);
  if (cuda.context && cuda.context->context->driver->device().arch == "sm_90" &&
      !std::getenv("ATTN_KERNEL_FILE"))
    CHECK(taken >= least);
}

TEST_CASE("mla: equal bits over 100 runs") {
  if (stand_in()) ATTN_SKIP("needs kernels");
  with_repeated(0, 14,
                [](const Kernel& kernel, const Case& c, const Data& data, const Outputs& first) {
                  int other = 0;
                  for (int n = 1; n < (sanitized ? 2 : 100); ++n) {
                    const Outputs next =
                        run_forward(backend_of(kernel.backend), c, data, kernel.name, c.out_type);
                    other += next.bits != first.bits || next.lse != first.lse;
                  }
                  CHECK(other == 0);
                });
}

TEST_CASE("mla: fixed_split makes bits independent of the batch and of max_sms") {
  if (stand_in()) ATTN_SKIP("needs kernels");
  with_repeated(
      256, 6, [](const Kernel& kernel, const Case& c, const Data& data, const Outputs& first) {
        for (const int32_t sms : {1, 7, 40}) {
          Case fewer = c;
          fewer.max_sms = sms;
          CHECK(
              run_forward(backend_of(kernel.backend), fewer, data, kernel.name, c.out_type).bits ==
              first.bits);
        }
        Case one = c;
        one.batch = 1;
        one.segments[0].layout = ATTN_PADDED;  // the same keys for the first sequence
        Case many = one;
        many.batch = 5;
        const Outputs alone = run_forward(backend_of(kernel.backend), one, make_data(one),
                                          kernel.name, c.out_type),
                      among = run_forward(backend_of(kernel.backend), many, make_data(many),
                                          kernel.name, c.out_type);
        REQUIRE(alone.error == "");
        REQUIRE(among.error == "");
        CHECK(std::equal(alone.bits.begin(), alone.bits.end(), among.bits.begin()));
      });
}

// mla_*_r64 share these among few blocks: each has whole row tiles and parts of two.
TEST_CASE("mla: many more sequences than thread blocks") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Draw draw{seed, 720};
    Case c = latent_case("mla-many", seed);
    c.batch = 150 + draw(60);
    c.heads_q = seed % 2 ? 20 : 70;
    c.max_sms = 8;
    c.q_type = c.out_type = ATTN_BF16;
    SegmentCase s;
    s.capacity = 150;
    s.k_type = s.v_type = c.q_type;
    s.layout = ATTN_PAGED;
    s.page_size = seed > 2 ? 1 : 64;
    draw_lengths(draw, c.batch, &s);
    c.segments.push_back(s);
    check_case(c, kernels);
  }
}

// More of them than mla_merge_sm90 has at once: on a Hopper of 132 multiprocessors 11 parts of a
// row by a warp, and 132 or, of two row tiles, 66 by all warps of a block.
TEST_CASE("mla: row tiles in many parts") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const bool few_blocks = seed <= 2;
    Case c = latent_case("mla-parts", seed);
    c.batch = few_blocks ? 2 : 1;
    c.heads_q = seed % 2 ? 16 : 70;
    c.max_sms = few_blocks ? int32_t(c.heads_q > 64 ? 24 : 12) : 0;
    c.q_type = c.out_type = ATTN_BF16;
    SegmentCase s;
    s.capacity = few_blocks ? 1400 : 9000;
    if (few_blocks) s.lengths = {int32_t(s.capacity), 64};
    s.k_type = s.v_type = c.q_type;
    s.layout = ATTN_PAGED;
    s.page_size = 64;
    c.segments.push_back(s);
    check_case(c, kernels);
  }
}

}  // namespace
}  // namespace attn::test
