// The body of the kv_roll operation, for every kernel of the catalog that runs here: beside the
// same keys gathered by hand and appended by kv_append of that backend's kind, byte for byte.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

#include "../catch.h"
#include "backend.h"
#include "core/ceil_div.h"
#include "core/dtype.h"

namespace attn::test {
namespace {

template <class T>
Buffer buffer_of(const std::vector<T>& values) {
  Buffer buffer(values.size() * sizeof(T), 0xff);
  std::memcpy(buffer.data(), values.data(), values.size() * sizeof(T));
  return buffer;
}
template <class T>
std::vector<T> values_of(const Buffer& buffer, size_t count) {
  return {buffer.as<T>(), buffer.as<T>() + count};
}

struct RollCase {
  uint64_t seed = 1;
  int64_t batch = 3, heads = 2, dim = 64, dim_v = 32;
  int32_t page_size = 16, max_pages = 5, old_page_size = 8;
  bool old_paged = false;
  int64_t keep = 20, old_capacity = 70;
  attn_dtype type = ATTN_F16, k_type = ATTN_Q8_0, v_type = ATTN_Q4_0;
  std::vector<int32_t> recent = {80, 37, 5}, old = {0, 9, 3};

  int64_t moved(int64_t b) const {
    const int64_t above = std::max<int64_t>(recent[size_t(b)] - keep, 0),
                  room = old_capacity - old[size_t(b)];
    return std::min(above, room) / page_size * page_size;
  }
};

std::string describe(const RollCase& c) {
  return join("seed ", c.seed, " B", c.batch, " H", c.heads, " D", c.dim, " Dv", c.dim_v, " ",
              dtype_name(c.type), " -> ", dtype_name(c.k_type), " ", dtype_name(c.v_type),
              " pages ", c.page_size, " old ", c.old_paged ? c.old_page_size : 0, " keep ", c.keep);
}

attn_segment segment_of(attn_dtype k_type, attn_dtype v_type) {
  attn_segment s{};
  s.struct_size = sizeof s;
  s.k_type = k_type;
  s.v_type = v_type;
  s.has_seqlens = 1;
  return s;
}

void run_roll_case(const RollCase& c, const Kernel& kernel) {
  INFO(kernel.name << " " << describe(c));
  Backend& backend = backend_of(kernel.backend);
  const int64_t recent_pages = c.batch * c.max_pages;
  // Pages from the last to the first; columns behind a sequence's keys are no pages.
  std::vector<int32_t> table;
  for (int64_t n = 0; n < recent_pages; ++n) table.push_back(int32_t(recent_pages - 1 - n));
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t n = ceil_div(int64_t{c.recent[size_t(b)]}, int64_t{c.page_size}); n < c.max_pages;
         ++n)
      table[size_t(b * c.max_pages + n)] = -7 - int32_t(n);
  const auto pool = [&](int64_t dim, uint64_t which) {
    Buffer buffer(size_t(dtype_bytes(c.type, recent_pages * c.page_size * c.heads * dim)), 0xff);
    for (int64_t n = 0; n < recent_pages * c.page_size * c.heads * dim; ++n)
      encode_element(c.type, buffer.data(), n, normal(hash(c.seed, which, uint64_t(n))), false);
    return buffer;
  };
  const Buffer k_recent = pool(c.dim, 1), v_recent = pool(c.dim_v, 2), tables = buffer_of(table),
               recent_lengths = buffer_of(c.recent), old_lengths = buffer_of(c.old);
  const int64_t old_columns = ceil_div(c.old_capacity, int64_t{c.old_page_size});
  std::vector<int32_t> old_table;
  old_table.resize(size_t(c.batch * old_columns));
  std::iota(old_table.begin(), old_table.end(), 0);
  std::reverse(old_table.begin(), old_table.end());
  const int64_t rows =
      c.old_paged ? c.batch * old_columns * c.old_page_size : c.batch * c.old_capacity;
  const auto cache = [&](attn_dtype type, int64_t dim) {
    return Buffer(size_t(dtype_bytes(type, rows * c.heads * dim)), 0xa5);
  };
  const auto scales = [&](attn_dtype type, int64_t dim) {
    const TypeInfo& of = type_info(type);
    const int64_t bytes = rows * c.heads * scales_of_row(of, dim) * of.scale_bytes;
    return dtype_has_scales(type) ? Buffer(size_t(bytes), 0xa5) : Buffer();
  };
  const Buffer k_old = cache(c.k_type, c.dim), v_old = cache(c.v_type, c.dim_v),
               k_scale = scales(c.k_type, c.dim), v_scale = scales(c.v_type, c.dim_v),
               old_tables = c.old_paged ? buffer_of(old_table) : Buffer();

  attn_segment recent = segment_of(c.type, c.type), old = segment_of(c.k_type, c.v_type);
  recent.layout = ATTN_PAGED;
  recent.page_size = c.page_size;
  recent.max_pages = c.max_pages;
  recent.num_pages = recent_pages;
  old.seqlen = c.old_capacity;
  if (c.old_paged) {
    old.layout = ATTN_PAGED;
    old.page_size = c.old_page_size;
    old.max_pages = int32_t(old_columns);
    old.num_pages = c.batch * old_columns;
  }
  Arena arena(backend.context);
  struct Old {
    void *k, *v, *k_scale, *v_scale, *lengths;
    attn_segment_args args;
  };
  const auto place_old = [&] {
    Old o{arena.add(k_old),   arena.add(v_old),       arena.add(k_scale),
          arena.add(v_scale), arena.add(old_lengths), {}};
    o.args.struct_size = sizeof o.args;
    o.args.k = o.k;
    o.args.v = o.v;
    o.args.k_scale = o.k_scale;
    o.args.v_scale = o.v_scale;
    o.args.seqlens = static_cast<const int32_t*>(o.lengths);
    o.args.block_table = static_cast<const int32_t*>(arena.add(old_tables));
    return o;
  };
  const Old rolled = place_old(), appended = place_old();
  attn_segment_args from{};
  from.struct_size = sizeof from;
  from.k = arena.add(k_recent);
  from.v = arena.add(v_recent);
  void *const lengths = arena.add(recent_lengths), *const turned = arena.add(tables);
  from.seqlens = static_cast<const int32_t*>(lengths);
  from.block_table = static_cast<const int32_t*>(turned);

  attn_kv_roll_problem p{};
  p.struct_size = sizeof p;
  p.batch = c.batch;
  p.heads_kv = c.heads;
  p.head_dim = c.dim;
  p.head_dim_v = c.dim_v;
  p.recent = &recent;
  p.old = &old;
  p.keep = c.keep;
  p.kernel = kernel.name;
  attn_plan* plan = nullptr;
  const attn_status made = attn_plan_create_kv_roll(backend.context, &p, &plan);
  if (made == ATTN_UNSUPPORTED) return;
  INFO(attn_last_error());
  REQUIRE(made == ATTN_OK);
  attn_kv_roll_args args{};
  args.struct_size = sizeof args;
  args.recent = &from;
  args.old = &rolled.args;
  const uint64_t launches = attn_launch_count(kernel.name);
  const attn_status ran = attn_run_kv_roll(plan, &args, nullptr);
  attn_plan_destroy(plan);
  INFO(attn_last_error());
  REQUIRE(ran == ATTN_OK);
  REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);
  REQUIRE(attn_launch_count(kernel.name) > launches);

  // By hand: keys gathered, packed, appended.
  std::vector<int32_t> offsets = {0}, recent_after, old_after, table_after = table;
  std::vector<int64_t> gathered;  // rows of the pool
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t moved = c.moved(b), pages = moved / c.page_size,
                  used = ceil_div(int64_t{c.recent[size_t(b)]}, int64_t{c.page_size});
    for (int64_t t = 0; t < moved; ++t)
      gathered.push_back(int64_t{table[size_t(b * c.max_pages + t / c.page_size)]} * c.page_size +
                         t % c.page_size);
    offsets.push_back(int32_t(gathered.size()));
    recent_after.push_back(int32_t(c.recent[size_t(b)] - moved));
    old_after.push_back(int32_t(c.old[size_t(b)] + moved));
    const auto row = table_after.begin() + b * c.max_pages;
    std::rotate(row, row + pages, row + used);
  }
  const auto gather = [&](const Buffer& pool, int64_t dim) {
    const size_t row = size_t(dtype_bytes(c.type, c.heads * dim));
    Buffer packed(row * gathered.size(), 0xff);
    for (size_t n = 0; n < gathered.size(); ++n)
      std::memcpy(packed.data() + n * row, pool.data() + size_t(gathered[n]) * row, row);
    return packed;
  };
  const Buffer k_new = gather(k_recent, c.dim), v_new = gather(v_recent, c.dim_v),
               offset_buffer = buffer_of(offsets);
  if (!gathered.empty()) {
    attn_kv_append_problem a{};
    a.struct_size = sizeof a;
    a.batch = c.batch;
    a.heads_kv = c.heads;
    a.head_dim = c.dim;
    a.head_dim_v = c.dim_v;
    a.new_layout = ATTN_PACKED;
    a.seqlen_new = a.total_new = int64_t(gathered.size());
    a.new_type = c.type;
    a.segment = old;
    a.advance_seqlens = 1;
    REQUIRE(attn_plan_create_kv_append(backend.context, &a, &plan) == ATTN_OK);
    attn_kv_append_args by_hand{};
    by_hand.struct_size = sizeof by_hand;
    by_hand.k_new = arena.add(k_new);
    by_hand.v_new = arena.add(v_new);
    by_hand.cu_seqlens_new = static_cast<const int32_t*>(arena.add(offset_buffer));
    by_hand.cache = appended.args;
    by_hand.seqlens_out = static_cast<int32_t*>(appended.lengths);
    const attn_status done = attn_run_kv_append(plan, &by_hand, nullptr);
    attn_plan_destroy(plan);
    INFO(attn_last_error());
    REQUIRE(done == ATTN_OK);
    REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);
  }
  for (const auto& [shape, got, want] :
       {std::tuple(&k_old, rolled.k, appended.k), std::tuple(&v_old, rolled.v, appended.v),
        std::tuple(&k_scale, rolled.k_scale, appended.k_scale),
        std::tuple(&v_scale, rolled.v_scale, appended.v_scale)})
    if (shape->given) CHECK(arena.fetch(*shape, got).bytes == arena.fetch(*shape, want).bytes);
  const size_t batch = size_t(c.batch);
  CHECK(values_of<int32_t>(arena.fetch(recent_lengths, lengths), batch) == recent_after);
  CHECK(values_of<int32_t>(arena.fetch(old_lengths, rolled.lengths), batch) == old_after);
  CHECK(values_of<int32_t>(arena.fetch(tables, turned), table.size()) == table_after);
  CHECK(arena.check_unchanged({rolled.k, rolled.v, rolled.k_scale, rolled.v_scale, rolled.lengths,
                               appended.k, appended.v, appended.k_scale, appended.v_scale,
                               appended.lengths, lengths, turned}) == "");
}

TEST_CASE("kv_roll: pages, lengths and tables as by hand") {
  const attn_dtype types[] = {ATTN_Q8_0,      ATTN_Q4_0,  ATTN_I8,
                              ATTN_I4,        ATTN_NVFP4, ATTN_F8_E4M3FN_TOKEN,
                              ATTN_F8_E4M3FN, ATTN_F16};
  for (const Kernel* kernel : kernels_here(Op::kv_roll, true)) {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      if (!share(seed - 1)) continue;
      Draw draw{seed, 31};
      RollCase c;
      c.seed = seed;
      c.batch = 1 + draw(3);
      c.heads = 1 + draw(3);
      c.dim = 32 * (1 + draw(4));
      c.dim_v = 32 * (1 + draw(4));
      c.page_size = int32_t(1 + draw(20));
      c.max_pages = int32_t(1 + draw(6));
      c.keep = draw(3) * draw(30);
      c.old_paged = draw.chance(2);
      c.old_page_size = int32_t(1 + draw(9));
      c.old_capacity = 1 + draw(150);
      const attn_dtype from[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
      c.type = draw.pick(from);
      c.k_type = draw.pick(types);
      c.v_type = draw.pick(types);
      c.recent.clear(), c.old.clear();
      for (int64_t b = 0; b < c.batch; ++b) {
        c.recent.push_back(int32_t(draw(uint64_t(c.page_size * c.max_pages + 1))));
        c.old.push_back(int32_t(draw(uint64_t(c.old_capacity + 1)) / 2));
      }
      run_roll_case(c, *kernel);
    }
  }
}

}  // namespace
}  // namespace attn::test
