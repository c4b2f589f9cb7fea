// Caches as servers have them, in every forward kernel that takes them: pages that sequences share,
// segments that are empty, no token yet, one token at a time.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"

namespace attn::test {
namespace {

// Types of q and of K and V that the kernel takes together; none if it takes no float type.
struct Types {
  attn_dtype q, kv;
};
std::vector<Types> types_of(const Kernel& kernel) {
  std::vector<Types> found;
  for (const attn_dtype q : {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FNUZ}) {
    if (!(kernel.limits.in_types & type_bit(q))) continue;
    for (const attn_dtype kv : {q, ATTN_F8_E4M3FN})
      if (kernel.limits.kv_types & type_bit(kv)) found.push_back({q, kv});
  }
  return found;
}

Case cache_case(const char* name, Types types, std::vector<int64_t> capacities) {
  Case c = small(name, 1, 0);
  c.heads_q = 4;
  c.q_type = types.q;
  c.out_type = ATTN_F32;
  c.flags = ATTN_CAUSAL;
  SegmentCase s;
  s.k_type = s.v_type = types.kv;
  c.segments.assign(capacities.size(), s);
  for (size_t n = 0; n < capacities.size(); ++n) c.segments[n].capacity = capacities[n];
  return c;
}

// check(kernel, types) on every kernel and its types; it returns false if the kernel has declined.
template <class Check>
void on_every_kernel_of(uint32_t features, Check&& check) {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if ((kernel->limits.features & features) != features) continue;
    for (const Types types : types_of(*kernel)) {
      Case any = cache_case("any", types, {1});
      any.thinning = on_all_kernels;
      if (!share(*kernel, any)) continue;
      INFO(kernel->name << " " << dtype_name(types.q) << " " << dtype_name(types.kv));
      ran += check(*kernel, types);
    }
  }
  CHECK(ran > 0);
}

// ---- pages of two sequences ---------------------------------------------------------------------

// What sequence 1 has in its first pages is what sequence 0 has: as copies, or as the same pages.
TEST_CASE("caches: shared pages give the bits of separate copies") {
  on_every_kernel_of(feature_paged_kv, [](const Kernel& kernel, Types types) {
    bool ran = false;
    const int32_t page_sizes[] = {16, 3, 64};
    const size_t turn = hash_of_names({kernel.name}) % 3;
    for (const int32_t page_size : page_sizes) {
      if ((sanitized || emulated(kernel)) && page_size != page_sizes[turn]) continue;
      Case c = cache_case("shared-pages", types, {sanitized ? 210 : 400});
      c.batch = 2;
      c.segments[0].layout = ATTN_PAGED;
      c.segments[0].page_size = page_size;
      c.segments[0].lengths = {int32_t(c.segments[0].capacity), sanitized ? 193 : 331};
      Data separate = make_data(c);
      SegmentData& s = separate.segments[0];
      int32_t* table = s.block_table.as<int32_t>();
      const int64_t shared_pages = 192 / page_size;
      const auto page = [&](Buffer& buffer, const View& view, int64_t b, int64_t n) {
        return buffer.data() +
               dtype_bytes(types.kv, table[b * s.max_pages + n] * view.stride.batch);
      };
      const auto page_bytes = [&](const View& view) {
        return size_t(dtype_bytes(types.kv, view.stride.batch));
      };
      for (int64_t n = 0; n < shared_pages; ++n) {
        std::memcpy(page(s.k, s.k_view, 1, n), page(s.k, s.k_view, 0, n), page_bytes(s.k_view));
        std::memcpy(page(s.v, s.v_view, 1, n), page(s.v, s.v_view, 0, n), page_bytes(s.v_view));
      }
      Data shared = separate;
      table = s.block_table.as<int32_t>();
      for (int64_t n = 0; n < shared_pages; ++n) {
        SegmentData& to = shared.segments[0];
        std::memset(page(to.k, s.k_view, 1, n), poison_of(types.kv), page_bytes(s.k_view));
        std::memset(page(to.v, s.v_view, 1, n), poison_of(types.kv), page_bytes(s.v_view));
        to.block_table.as<int32_t>()[s.max_pages + n] = table[n];
      }
      Backend& backend = backend_of(kernel.backend);
      const Outputs copies = run_forward(backend, c, separate, kernel.name, c.out_type);
      if (declined(kernel, copies)) continue;
      INFO("page_size " << page_size);
      REQUIRE(copies.error == "");
      CHECK(compare(c, separate, kernel, copies, reference_answer(c, separate)) == "");
      const Outputs got = run_forward(backend, c, shared, kernel.name, c.out_type);
      REQUIRE(got.error == "");
      CHECK((got.bits == copies.bits));
      CHECK(got.lse == copies.lse);
      ran = true;
    }
    return ran;
  });
}

// ---- nothing there ------------------------------------------------------------------------------

TEST_CASE("caches: empty segments among others") {
  on_every_kernel_of(feature_segments, [](const Kernel& kernel, Types types) {
    Case c = cache_case("empty-segments", types, {40, 130, 70, 64, 33});
    c.batch = 3;
    c.seqlen_q = 2;
    const std::vector<int32_t> lengths[] = {
        {0, 0, 40}, {130, 1, 0}, {0, 0, 0}, {0, 64, 0}, {33, 2, 0}};
    for (size_t n = 0; n < c.segments.size(); ++n) {
      c.segments[n].lengths = lengths[n];
      if (kernel.limits.features & feature_paged_kv)
        c.segments[n].layout = n % 2 ? ATTN_PAGED : ATTN_PADDED;
    }
    const Data data = make_data(c);
    const Outputs got = run_forward(backend_of(kernel.backend), c, data, kernel.name, c.out_type);
    if (declined(kernel, got)) return false;
    REQUIRE(got.error == "");
    CHECK(compare(c, data, kernel, got, reference_answer(c, data)) == "");
    return true;
  });
}

TEST_CASE("caches: over an empty cache out is 0 and lse the sink") {
  on_every_kernel_of(0, [](const Kernel& kernel, Types types) {
    bool ran = false;
    for (const attn_layout layout : {ATTN_PADDED, ATTN_PAGED}) {
      Case c = cache_case("sinks-alone", types, {200});
      c.batch = 2;
      c.flags |= ATTN_SINKS;
      c.segments[0].layout = layout;
      c.segments[0].lengths = {0, 0};
      const Data data = make_data(c);
      const Outputs got = run_forward(backend_of(kernel.backend), c, data, kernel.name, c.out_type);
      if (declined(kernel, got)) continue;
      INFO("layout " << layout);
      REQUIRE(got.error == "");
      for (const double x : got.out) CHECK(x == 0);
      for (size_t n = 0; n < got.lse.size(); ++n)
        CHECK(std::abs(got.lse[n] - data.sinks.as<float>()[n % size_t(c.heads_q)]) < 1e-5);
      ran = true;
    }
    return ran;
  });
}

// ---- a token by hand ----------------------------------------------------------------------------

// q = (1, 0, ...), k_j = (c_j, 0, ...) and a scale of ln 2 make the weights 2^c_j. With c = 0, 1,
// 2, 0, 3 and v_j = 0, 1, 2, 3, 4 for each five keys, and 1 more in odd columns,
//   out = (0 * 1 + 1 * 2 + 2 * 4 + 3 * 1 + 4 * 8) / (1 + 2 + 4 + 1 + 8) = 45 / 16
// and over 26 times five keys lse = ln(26 * 16).
constexpr int64_t keys_by_hand = 130;
constexpr double out_by_hand = 2.8125, lse_by_hand = 6.030685260261263;
constexpr double exponents[] = {0, 1, 2, 0, 3};

Case case_by_hand(Types types, const std::vector<int64_t>& capacities, uint32_t flags) {
  Case c = cache_case("by-hand", types, capacities);
  c.flags = flags;
  c.scale = 0.6931471805599453f;
  return c;
}

// `first`: the number of the first key.
Data data_by_hand(const Case& c, int64_t first) {
  Data data = make_data(c);
  for (int64_t h = 0; h < c.heads_q; ++h)
    for (int64_t d = 0; d < c.head_dim; ++d)
      encode_element(c.q_type, data.q.data(), data.q_view.at(0, 0, h) + d, d == 0, false);
  int64_t j = first;
  for (size_t n = 0; n < c.segments.size(); ++n) {
    const SegmentCase& s = c.segments[n];
    SegmentData& to = data.segments[n];
    for (int64_t key = 0; key < s.capacity; ++key, ++j) {
      const bool paged = s.layout == ATTN_PAGED;
      const int64_t entry = paged ? to.block_table.as<int32_t>()[key / s.page_size] : 0,
                    at = paged ? key % s.page_size : key;
      for (int64_t h = 0; h < c.heads_kv; ++h)
        for (int64_t d = 0; d < c.head_dim; ++d) {
          encode_element(s.k_type, to.k.data(), to.k_view.at(entry, at, h) + d,
                         d == 0 ? exponents[j % 5] : 0, false);
          encode_element(s.v_type, to.v.data(), to.v_view.at(entry, at, h) + d,
                         double(j % 5 + d % 2), false);
        }
    }
  }
  return data;
}

// "" or the first number that is not the one found by hand.
std::string check_by_hand(const Case& c, const Outputs& got) {
  for (size_t n = 0; n < got.out.size(); ++n)
    if (!(std::abs(got.out[n] - out_by_hand - double(n % size_t(c.head_dim) % 2)) < 1e-4))
      return join("out[", n, "] is ", got.out[n]);
  for (size_t n = 0; n < got.lse.size(); ++n)
    if (!(std::abs(got.lse[n] - lse_by_hand) < 1e-4)) return join("lse[", n, "] is ", got.lse[n]);
  return got.out.size() == size_t(c.heads_q * c.head_dim) ? "" : "rows are missing";
}

// The parts' outs and lses by the backend's merge.
Outputs merged(attn_context* context, const Case& c, const std::vector<Outputs>& parts) {
  attn_merge_problem p{};
  p.struct_size = sizeof p;
  p.batch = p.seqlen_q = 1;
  p.heads_q = c.heads_q;
  p.head_dim_v = c.head_dim;
  p.num_parts = int32_t(parts.size());
  p.part_type = p.out_type = ATTN_F32;
  attn_plan* made = nullptr;
  REQUIRE(attn_plan_create_merge(context, &p, &made) == ATTN_OK);
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
  const auto floats = [](const std::vector<double>& values) {
    Buffer buffer(values.size() * sizeof(float), 0xff);
    std::copy(values.begin(), values.end(), buffer.as<float>());
    return buffer;
  };
  Arena arena(context);
  std::vector<Buffer> buffers;
  buffers.reserve(2 * parts.size());  // the arena keeps their addresses
  std::vector<const void*> outs;
  std::vector<const float*> lses;
  for (const Outputs& part : parts) {
    outs.push_back(arena.add(buffers.emplace_back(floats(part.out))));
    lses.push_back(static_cast<float*>(arena.add(buffers.emplace_back(floats(part.lse)))));
  }
  const Buffer out(parts[0].out.size() * sizeof(float), 0xff),
      lse(parts[0].lse.size() * sizeof(float), 0xff);
  attn_merge_args args{};
  args.struct_size = sizeof args;
  args.num_parts = p.num_parts;
  args.outs = outs.data();
  args.lses = lses.data();
  args.out = arena.add(out);
  args.lse = static_cast<float*>(arena.add(lse));
  const uint64_t launches = attn_launch_count(attn_plan_kernel(made));
  REQUIRE(attn_run_merge(made, &args, nullptr) == ATTN_OK);
  REQUIRE(attn_synchronize(context, nullptr) == ATTN_OK);
  CHECK(attn_launch_count(attn_plan_kernel(made)) > launches);
  const Buffer got = arena.fetch(out, args.out), got_lse = arena.fetch(lse, args.lse);
  Outputs result;
  result.out.assign(got.as<float>(), got.as<float>() + parts[0].out.size());
  result.lse.assign(got_lse.as<float>(), got_lse.as<float>() + parts[0].lse.size());
  return result;
}

// The last query of a causal mask sees every key, whichever path takes it and however the keys are
// cut.
TEST_CASE("caches: a token over a cache, full and causal, is what it is by hand") {
  on_every_kernel_of(0, [](const Kernel& kernel, Types types) {
    bool ran = false;
    uint64_t number = 0;
    Backend& backend = backend_of(kernel.backend);
    for (const uint32_t flags : {uint32_t{0}, uint32_t{ATTN_CAUSAL}})
      for (const std::vector<int64_t>& cut :
           {std::vector<int64_t>{130}, std::vector<int64_t>{1, 129}, std::vector<int64_t>{64, 66},
            std::vector<int64_t>{100, 3, 27}}) {
        REQUIRE(std::accumulate(cut.begin(), cut.end(), int64_t{0}) == keys_by_hand);
        Case cut_case = case_by_hand(types, cut, flags);
        cut_case.thinning = fifth_of_many(number++, 3);
        if (!share(kernel, cut_case)) continue;
        INFO("flags " << flags << " segments " << cut.size() << " of " << cut[0] << " ...");
        for (const bool paged : {false, true}) {
          Case c = case_by_hand(types, cut, flags);
          for (SegmentCase& s : c.segments) s.layout = paged ? ATTN_PAGED : ATTN_PADDED;
          const Data data = data_by_hand(c, 0);
          const Outputs got = run_forward(backend, c, data, kernel.name, c.out_type);
          if (declined(kernel, got)) continue;
          INFO("paged " << paged);
          REQUIRE(got.error == "");
          CHECK(check_by_hand(c, got) == "");
          ran = true;
        }
        if (cut.size() == 1) continue;
        std::vector<Outputs> parts;
        int64_t first = 0;
        for (const int64_t keys : cut) {
          const Case c = case_by_hand(types, {keys}, flags);
          const Data data = data_by_hand(c, first);
          parts.push_back(run_forward(backend, c, data, kernel.name, c.out_type));
          if (declined(kernel, parts.back())) break;
          REQUIRE(parts.back().error == "");
          first += keys;
        }
        if (first < keys_by_hand) continue;
        const Case whole = case_by_hand(types, cut, flags);
        CHECK(check_by_hand(whole, merged(backend.context, whole, parts)) == "");
      }
    return ran;
  });
}

}  // namespace
}  // namespace attn::test
