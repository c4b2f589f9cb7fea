// Few queries against many keys, in every forward kernel that takes them: what a step of a server
// asks for.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

constexpr attn_dtype q_types[] = {ATTN_BF16, ATTN_BF16, ATTN_F16, ATTN_F32};
constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major,
                                Arrange::interleaved};

// Any combination of what decode kernels take; long enough for heads to be shared by blocks. Or of
// more rows than they have at once, over fp8.
Case random_case(uint64_t seed, bool prefill = false) {
  Case c;
  c.name = (prefill ? "prefill-" : "decode-") + std::to_string(seed);
  c.thinning = for_devices(seed + 49);
  c.seed = seed;
  Draw draw{seed, 131};

  c.batch = 1 + draw(prefill ? 3 : 5);
  c.heads_kv = 1 + draw(prefill ? 2 : 3);
  const int64_t groups[] = {1, 1, 2, 3, 4, 5, 8, 16};
  const int64_t group = groups[draw(prefill ? 6 : std::size(groups))];
  c.heads_q = c.heads_kv * group;
  c.seqlen_q = draw.chance(2) ? 1 : 1 + draw(uint64_t(16 / group));
  if (prefill) c.seqlen_q += 48 / group + draw(150);
  c.q_type = q_types[draw(prefill ? 3 : 4)];
  const uint32_t fp8 = type_bit(ATTN_F8_E4M3FN);  // of q of f32, which hosts alone take
  static const auto of_16_bits = head_dims(type_bit(ATTN_F16) | type_bit(ATTN_BF16)),
                    over_fp8 = head_dims(type_bit(ATTN_F16) | type_bit(ATTN_BF16), fp8);
  draw_head_dims(draw, prefill ? over_fp8 : of_16_bits, draw.chance(5), &c);
  const attn_dtype out_types[] = {ATTN_F32, c.q_type, c.q_type, ATTN_F16, ATTN_BF16};
  c.out_type = draw.pick(out_types);
  c.q_arrange = arranges[draw(3)];
  c.out_arrange = arranges[draw(3)];
  if (draw.chance(3)) draw_lengths_q(draw, &c);
  const attn_dtype kv_type = !prefill && draw.chance(2) ? c.q_type
                             : draw.chance(2)           ? ATTN_F8_E4M3FN
                                                        : ATTN_F8_E5M2;
  const int64_t segments = draw.chance(4) ? 2 + draw(3) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 15, 63, 64, 65, 200, 257, 600, 1500};
    s.capacity = draw.pick(capacities);
    s.k_type = s.v_type = kv_type;
    if (prefill && draw.chance(6)) s.v_type = ATTN_F8_E4M3FN;
    s.layout = attn_layout(draw.chance(2) ? 2 : draw(3));
    const int32_t page_sizes[] = {1, 3, 8, 16, 24, 32, 48, 64, 100, 128, 256};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    if (dtype_is_fp8(kv_type)) {
      const bool any = !prefill || c.q_type == ATTN_BF16;  // f16 of many rows takes none
      s.k_descale = attn_descale_kind(any ? draw(4) : 0);
      s.v_descale = attn_descale_kind(any ? draw(4) : 0);
      s.descale_block_keys = draw.chance(2) ? 64 : 128;
    }
    s.arrange = draw.pick(arranges);
    if (c.head_dim != c.head_dim_v && s.arrange == Arrange::interleaved)
      s.arrange = Arrange::padded;
    if (s.layout == ATTN_PAGED && draw.chance(6)) s.bad_pages = {int32_t(draw(4))};
    c.segments.push_back(s);
  }
  if (!draw.chance(3)) c.flags |= draw.chance(5) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(4)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(300) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(5)) c.flags |= ATTN_ALIBI;
  if (draw.chance(4)) c.flags |= ATTN_SINKS;
  if (draw.chance(5)) c.softcap = 3;
  if (draw.chance(5)) c.scale = draw.chance(2) ? 0.25f : -0.1f;
  if (draw.chance(6)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(3)) c.max_sms = int32_t(1 + draw(40));
  const double sigmas[] = {0.5, 1, 1, 3};
  c.sigma = draw.pick(sigmas);
  if (draw.chance(8)) c.values = draw.chance(2) ? Values::uniform : Values::one_hot;
  if (draw.chance(6)) c.tree_keys = 1 + draw(128);
  return c;
}

const AddRandomFamily added("decode", [](uint64_t seed) { return random_case(seed); });

TEST_CASE("decode: random problems") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 400; ++seed) check_case(random_case(seed), kernels);
}

TEST_CASE("decode: random problems over ggml blocks") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Case c = random_case(1000 + seed);
    c.thinning = for_devices(seed + 212);
    c.head_dim = (c.head_dim + 31) / 32 * 32;
    c.head_dim_v = (c.head_dim_v + 31) / 32 * 32;
    for (SegmentCase& s : c.segments) {
      s.k_type = s.v_type = seed % 2 ? ATTN_Q8_0 : ATTN_Q4_0;
      s.k_descale = s.v_descale = ATTN_DESCALE_NONE;
      // V would begin behind a row of blocks, no multiple of 16 bytes.
      if (s.arrange == Arrange::interleaved) s.arrange = Arrange::padded;
    }
    check_case(c, kernels);
  }
}

// A q8_0 block has 34 bytes, a q4_0 block 18: rows of an odd number of heads are no multiple of 16
// bytes, nor of 4 where a head has one block.
TEST_CASE("decode: ggml blocks of odd numbers of heads") {
  const auto kernels = kernels_here(Op::forward, false);
  std::vector<const Kernel*> taken;
  uint64_t n = 0;
  for (const attn_dtype type : {ATTN_Q8_0, ATTN_Q4_0}) {
    for (const int64_t heads : {1, 3, 5, 7}) {
      for (const int64_t dim : {32, 64, 96, 128}) {  // one to four blocks
        for (const attn_layout layout : {ATTN_PADDED, ATTN_PACKED, ATTN_PAGED}) {
          constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::odd, Arrange::padded,
                                          Arrange::head_major};
          Case c;
          c.seed = ++n;
          c.name = "decode-odd-" + std::to_string(n);
          c.thinning = one_of_many(n);
          c.batch = 2;
          c.heads_q = 2 * heads;
          c.heads_kv = heads;
          c.head_dim = c.head_dim_v = dim;
          c.seqlen_q = 1 + int64_t(n % 3);
          c.q_type = c.out_type = n % 2 ? ATTN_BF16 : ATTN_F16;
          c.flags = ATTN_CAUSAL;
          SegmentCase s;
          s.k_type = s.v_type = type;
          s.layout = layout;
          s.page_size = n % 4 == 0 ? 64 : 7;
          s.capacity = 200;
          s.lengths = {200, 131};
          s.arrange = layout == ATTN_PAGED ? Arrange::contiguous : arranges[n % 4];
          c.segments = {s};
          check_case(c, kernels, &taken);
        }
      }
    }
  }
  for (const Kernel* kernel : kernels) {
    if (kernel->backend != ATTN_BACKEND_HIP || sanitized || kernel_file()) continue;
    const uint32_t blocks = type_bit(ATTN_Q8_0) | type_bit(ATTN_Q4_0);
    if (!(kernel->limits.kv_types & blocks)) continue;
    INFO(kernel->name);
    CHECK(std::count(taken.begin(), taken.end(), kernel) > 10);
  }
}

TEST_CASE("decode: random problems of many rows over fp8") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 100; ++seed) check_case(random_case(seed, true), kernels);
}

Case long_case(const char* name, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t keys,
               attn_dtype type = ATTN_BF16) {
  Case c;
  c.name = name;
  c.batch = batch;
  c.heads_q = heads_q;
  c.heads_kv = heads_kv;
  c.head_dim = c.head_dim_v = 128;
  c.q_type = c.out_type = type;
  c.flags = ATTN_CAUSAL;
  SegmentCase s;
  s.k_type = s.v_type = type;
  s.capacity = keys;
  c.segments = {s};
  return c;
}

// Blocks that share a head count their arrivals in the workspace, and leave it as they found it.
TEST_CASE("decode: a workspace serves run after run") {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    const Limits& limits = kernel->limits;
    if (emulated(*kernel) || !std::string(kernel->name).starts_with("decode_")) continue;
    const attn_dtype type = limits.in_types & type_bit(ATTN_BF16) ? ATTN_BF16 : ATTN_F16;
    Case c = long_case("again", 1, std::min<int64_t>(limits.group.max, 64), 1, 4097, type);
    c.head_dim = limits.head_dim.max;
    c.head_dim_v = limits.head_dim_v.max;
    if (!(limits.kv_types & type_bit(type)))
      c.segments[0].k_type = c.segments[0].v_type = ATTN_F8_E4M3FN;
    ran += repeat(*kernel, c, make_data(c), 3);
  }
  if (ran == 0) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
}

// One head that all blocks of a device share, so that parts of its result are added up in groups.
TEST_CASE("decode: one head for all blocks") {
  const auto kernels = kernels_here(Op::forward, false);
  for (const int64_t keys : {1025, 20000}) {
    for (const int32_t max_sms : {0, 1, 9, 33}) {
      if (sanitized && max_sms != 9) continue;
      Case c = long_case("shared-head", 1, 8, 1, keys);
      c.name += "-" + std::to_string(keys) + "-" + std::to_string(max_sms);
      c.max_sms = max_sms;
      check_case(c, kernels);
    }
  }
}

TEST_CASE("decode: many short sequences") {
  const auto kernels = kernels_here(Op::forward, false);
  Case c = long_case("short", sanitized ? 170 : 600, 2, 1, 70);
  c.head_dim = c.head_dim_v = 64;
  c.out_type = ATTN_F32;
  for (int64_t b = 0; b < c.batch; ++b) c.segments[0].lengths.push_back(int32_t(b * 37 % 71));
  check_case(c, kernels);
  c.name = "short-fp8";
  c.segments[0].k_type = c.segments[0].v_type = ATTN_F8_E4M3FN;
  check_case(c, kernels);
}

TEST_CASE("decode: a cut of KV into segments and pages changes nothing") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!(kernel->limits.features & feature_segments) ||
        !(kernel->limits.flags & ATTN_SPLIT_INVARIANT))
      continue;
    const attn_dtype type = float_type_of(*kernel);
    Case whole = long_case("whole", 2, 4, 2, sanitized ? 150 : 700,
                           type == ATTN_DTYPE_NONE ? ATTN_BF16 : type);
    whole.head_dim = whole.head_dim_v = 64;
    whole.seqlen_q = 3;
    whole.out_type = ATTN_F32;
    whole.segments[0].k_type = whole.segments[0].v_type = kv_type_of(*kernel, whole.q_type);
    whole.flags |= ATTN_SINKS | ATTN_SPLIT_INVARIANT;
    Backend& backend = backend_of(kernel->backend);
    Outputs uncut;
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      Case pieces = whole;
      pieces.thinning = fifth_of_many(seed - 1);
      pieces.segments.clear();
      Draw draw{seed, 17};
      int64_t left = whole.segments[0].capacity;
      while (left > 0) {
        SegmentCase s = whole.segments[0];
        s.capacity = std::min<int64_t>(left, 1 + draw(sanitized ? 70 : 300));
        left -= s.capacity;
        if (kernel->limits.features & feature_paged_kv) s.layout = attn_layout(draw(3));
        const int32_t page_sizes[] = {1, 16, 20, 64};
        s.page_size = draw.pick(page_sizes);
        s.lengths.assign(2, int32_t(s.capacity));
        pieces.segments.push_back(s);
      }
      if (!share(*kernel, pieces)) continue;
      if (uncut.out.empty())
        uncut = run_forward(backend, whole, make_data(whole), kernel->name, ATTN_F32);
      if (declined(*kernel, uncut)) break;
      const Outputs got = run_forward(backend, pieces, make_data(pieces), kernel->name, ATTN_F32);
      if (declined(*kernel, got)) continue;  // of too many segments
      INFO(kernel->name << " " << describe(pieces));
      REQUIRE(got.error == "");
      CHECK(largest_difference(got, uncut) < 1e-5);
    }
  }
}

// However often, whatever else the device's blocks do in between.
TEST_CASE("decode: the same plan gives the same bits") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    const attn_dtype type = float_type_of(*kernel);
    const bool few = sanitized || emulated(*kernel);  // where blocks come in one order
    const int64_t keys = sanitized ? 300 : few ? 600 : 3000;
    Case c = long_case("repeat", 3, 8, 2, keys, type == ATTN_DTYPE_NONE ? ATTN_BF16 : type);
    c.head_dim = c.head_dim_v = 64;
    c.segments[0].k_type = c.segments[0].v_type = kv_type_of(*kernel, c.q_type);
    if (!share(*kernel, c)) continue;
    const Data data = make_data(c);
    const Outputs first =
        run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
    if (declined(*kernel, first)) continue;
    INFO(kernel->name);
    REQUIRE(first.error == "");
    for (int n = 0; n < (few ? 1 : 5); ++n) {
      const Outputs again =
          run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
      CHECK(again.bits == first.bits);
      CHECK(again.lse == first.lse);
    }
  }
}

// A full mask and a causal one say the same of a single token, on whatever path.
TEST_CASE("decode: a single token sees all keys, causal or not") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    const attn_dtype type = float_type_of(*kernel);
    if (type == ATTN_DTYPE_NONE || dtype_is_fp8(type)) continue;
    Case c = long_case("token", 1, 4, 2, sanitized ? 130 : 333, type);
    c.head_dim = c.head_dim_v = 64;
    c.sigma = 0.5;
    c.thinning = on_all_kernels;
    if (!(kernel->limits.kv_types & type_bit(type)) || !share(*kernel, c)) continue;
    const Data data = make_data(c);
    Outputs causal = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
    if (declined(*kernel, causal)) continue;
    INFO(kernel->name);
    REQUIRE(causal.error == "");
    Case full = c;
    full.flags = 0;
    const Outputs without =
        run_forward(backend_of(kernel->backend), full, data, kernel->name, ATTN_F32);
    REQUIRE(without.error == "");
    const Outputs want = reference_answer(c, data);
    for (size_t n = 0; n < causal.out.size(); ++n) {
      const double bound = type == ATTN_BF16 ? 4e-4 : 1e-4;
      CHECK(std::abs(causal.out[n] - without.out[n]) < bound);
      CHECK(std::abs(causal.out[n] - want.out[n]) < bound);
    }
  }
}

// ---- whether the checks above would see a mistake ----------------------------------------------

// What a decode kernel may get wrong of the case, by name; of those that there are keys for.
std::map<std::string, Planted> mistakes_of(const Case& c) {
  std::map<std::string, Planted> found;
  for (int64_t b = 0; b < c.batch; ++b) {
    int64_t begin = 0;
    for (const SegmentCase& s : c.segments) {
      const int64_t length = s.length(b), unit = length / 2 / 64 * 64, page = s.page_size;
      const Planted of = {b, c.heads_kv - 1};
      const auto keys = [&](int64_t from, int64_t to, int times) {
        Planted mistake = of;
        mistake.begin = begin + from;
        mistake.end = begin + std::min(to, length);
        mistake.times = times;
        return mistake;
      };
      if (length > 0) found["a unit dropped"] = keys(unit, unit + 64, 0);
      if (length > 0 && s.layout == ATTN_PAGED)
        found["a page twice"] = keys(length / 2 / page * page, length / 2 / page * page + page, 2);
      const int64_t neighbour = s.length((b + 1) % c.batch);
      if (neighbour < length) found["the neighbour's length"] = keys(neighbour, length, 0);
      if (c.has(ATTN_SINKS)) found["the sink twice"] = {b, c.heads_kv - 1, 0, 0, 1, 2};
      begin += length;
    }
  }
  return found;
}

// Half of each mistake is more than compare() lets pass, but where the keys in question hardly
// weigh anything.
TEST_CASE("decode: planted mistakes are found in problems of every kind") {
  const auto is_decode = [](const Kernel& k) { return std::string(k.name).starts_with("decode_"); };
  const auto kernel = std::find_if(catalog().begin(), catalog().end(), is_decode);
  REQUIRE(kernel != catalog().end());
  std::map<std::string, int> found, of_no_weight;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    if (!share(seed)) continue;
    const Case c = random_case(seed);
    const Data data = make_data(c);
    INFO(describe(c));
    const Outputs want = reference_answer(c, data), right = formula(c, data);
    REQUIRE(compare(c, data, *kernel, right, want) == "");
    for (const auto& [name, mistake] : mistakes_of(c)) {
      INFO(name);
      const Outputs wrong = formula_with(mistake, c, data);
      Outputs half = wrong;
      double change = 0;
      for (size_t n = 0; n < half.lse.size(); ++n) {
        const bool finite = std::isfinite(wrong.lse[n]) && std::isfinite(right.lse[n]);
        if (finite) half.lse[n] = (wrong.lse[n] + right.lse[n]) / 2;
        if (wrong.lse[n] != right.lse[n])
          change = std::max(change, finite ? std::abs(wrong.lse[n] - right.lse[n]) : INFINITY);
      }
      for (size_t n = 0; n < half.out.size(); ++n) half.out[n] = (wrong.out[n] + right.out[n]) / 2;
      // Sums of rounded weights make lse of split-invariant kernels less exact.
      if (change < (c.has(ATTN_SPLIT_INVARIANT) ? 1e-2 : 1e-4)) {
        ++of_no_weight[name];
        continue;
      }
      CHECK(compare(c, data, *kernel, wrong, want) != "");
      CHECK(compare(c, data, *kernel, half, want) != "");
      const SegmentCase& s = c.segments[0];
      ++found[name];
      ++found[name + ", " + dtype_name(s.k_type)];
      ++found[name + ", layout " + std::to_string(s.layout)];
      ++found[name + (c.segments.size() > 1 ? ", segments" : ", one segment")];
      ++found[name + (c.lengths_q.empty() ? ", padded q" : ", packed q")];
      ++found[name + (c.seqlen_q > 1 ? ", queries" : ", one query")];
    }
  }
  if (sanitized) return;  // too few for all kinds
  for (const char* name :
       {"a unit dropped", "a page twice", "the sink twice", "the neighbour's length"}) {
    INFO(name);
    CHECK(found[name] > 2 * of_no_weight[name]);
    for (const char* kind :
         {", f32", ", f16", ", bf16", ", f8_e4m3fn", ", f8_e5m2", ", layout 2", ", segments",
          ", one segment", ", padded q", ", packed q", ", queries", ", one query"}) {
      INFO(kind);
      CHECK(found[name + std::string(kind)] > 0);
    }
    for (const char* kind : {", layout 0", ", layout 1"})
      if (name != std::string("a page twice")) CHECK(found[name + std::string(kind)] > 0);
  }
}

}  // namespace
}  // namespace attn::test
