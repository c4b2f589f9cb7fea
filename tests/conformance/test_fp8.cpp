// Problems made for the FP8 forward kernels of devices: e4m3 codes of both kinds and e5m2, head
// dimensions in steps of 16, lengths around the edges of tiles of 64 and 128 keys and of 128 and
// 256 queries.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <set>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

constexpr attn_dtype fnuz = ATTN_F8_E4M3FNUZ, ocp = ATTN_F8_E4M3FN, e5m2 = ATTN_F8_E5M2;

std::vector<const Kernel*> fp8_kernels() {
  std::vector<const Kernel*> found;
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (kernel->recipe && (kernel->limits.in_types & (type_bit(fnuz) | type_bit(ocp))))
      found.push_back(kernel);
  }
  return found;
}

Case shape(std::string name, int64_t dim, int64_t sq, int64_t skv, attn_dtype type = fnuz) {
  Case c;
  c.name = std::move(name);
  c.head_dim = c.head_dim_v = dim;
  c.seqlen_q = sq;
  c.q_type = type;
  c.out_type = ATTN_F32;
  SegmentCase s;
  s.k_type = s.v_type = type;
  s.capacity = skv;
  c.segments = {s};
  return c;
}

// fnuz, unless only cuda's kernels are here.
attn_dtype type_here(const std::vector<const Kernel*>& kernels) {
  const bool taken = std::any_of(kernels.begin(), kernels.end(), [](const Kernel* k) {
    return k->limits.in_types & type_bit(fnuz);
  });
  return taken ? fnuz : ocp;
}

// Where no kernel takes FNUZ, as on gfx950, q, k and v are of the OCP kind instead.
Case taken_here(Case c) {
  static const bool is_fnuz_taken = type_here(fp8_kernels()) == fnuz;
  if (is_fnuz_taken) return c;
  const auto change = [](attn_dtype& type) { type = type == fnuz ? ocp : type; };
  change(c.q_type);
  for (SegmentCase& s : c.segments) {
    change(s.k_type);
    change(s.v_type);
  }
  return c;
}

// The largest of each.
std::set<int64_t> dims_here(const std::vector<const Kernel*>& kernels) {
  std::set<int64_t> found;
  for (const Kernel* kernel : kernels) found.insert(kernel->limits.head_dim.max);
  return found;
}

std::string name_of(const char* what, std::initializer_list<int64_t> numbers) {
  std::string name = what;
  for (int64_t n : numbers) name.append("-").append(std::to_string(n));
  return name;
}

TEST_CASE("fp8: boundary shapes") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  int64_t n = 0;
  for (int64_t dim : largest_head_dims(type_bit(fnuz) | type_bit(ocp))) {
    for (int64_t sq : {1, 31, 33, 255, 257}) {
      for (int64_t skv : {1, 63, 64, 65, 127, 129, 191, 257, 449}) {
        Case c =
            taken_here(shape(name_of("fp8", {dim, sq, skv}), dim, sq, skv, n % 2 ? fnuz : ocp));
        constexpr uint32_t masks[] = {0, ATTN_CAUSAL, ATTN_WINDOW, ATTN_CAUSAL_TOP_LEFT};
        constexpr attn_dtype outs[] = {ATTN_F32, ATTN_BF16, ATTN_F16};
        c.flags = masks[n % 4];
        c.out_type = outs[n % 3];
        if (c.has(ATTN_WINDOW)) c.window_left = 70, c.window_right = n % 8 == 2 ? 3 : -1;
        c.thinning = one_of_many(uint64_t(154 + n++));
        check_case(c, kernels);
      }
    }
  }
}

Case random_case(uint64_t seed) {
  Case c;
  c.name = "fp8-" + std::to_string(seed);
  c.thinning = one_of_many(seed + 157);
  c.seed = seed;
  Draw draw{seed, 78};
  const auto type = [&] { return draw.chance(2) ? fnuz : ocp; };

  c.batch = 1 + draw(3);
  c.heads_kv = 1 + draw(3);
  const int64_t groups[] = {1, 1, 2, 4, 8};
  c.heads_q = c.heads_kv * draw.pick(groups);
  static const auto dims = head_dims(type_bit(fnuz));
  draw_head_dims(draw, dims, draw.chance(4), &c);
  const int64_t queries[] = {1, 2, 31, 32, 33, 64, 100, 255, 256, 257, 300};
  c.seqlen_q = draw.pick(queries);
  if (c.heads_q > 6) c.seqlen_q = std::min<int64_t>(c.seqlen_q, 40);
  c.q_type = type();
  const attn_dtype out_types[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
  c.out_type = draw.pick(out_types);
  const Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major};
  c.q_arrange = draw.pick(arranges);
  c.out_arrange = draw.pick(arranges);
  if (draw.chance(3)) {
    for (int64_t b = 0; b < c.batch; ++b)
      c.lengths_q.push_back(int32_t(draw.chance(5) ? 0 : draw(uint64_t(c.seqlen_q) + 1)));
    c.lengths_q[size_t(draw(uint64_t(c.batch)))] = int32_t(c.seqlen_q);
  }
  const attn_descale_kind kinds[] = {ATTN_DESCALE_NONE, ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD};
  c.q_descale = draw.pick(kinds);
  SegmentCase s;
  const int64_t capacities[] = {1, 31, 64, 65, 127, 128, 200, 333, 512, 600};
  s.capacity = draw.pick(capacities);
  s.k_type = type();
  s.v_type = draw.chance(3) ? type() : s.k_type;
  s.layout = draw.chance(3) ? ATTN_PACKED : ATTN_PADDED;
  if (s.layout == ATTN_PACKED || draw.chance(2)) {
    for (int64_t b = 0; b < c.batch; ++b)
      s.lengths.push_back(int32_t(draw.chance(5) ? 0 : draw(uint64_t(s.capacity) + 1)));
  }
  s.k_descale = draw.pick(kinds);
  s.v_descale = draw.pick(kinds);
  s.arrange = draw.pick(arranges);
  if (s.k_type == s.v_type && c.head_dim == c.head_dim_v && draw.chance(5))
    s.arrange = Arrange::interleaved;
  c.segments.push_back(s);
  if (draw.chance(2)) c.flags |= draw.chance(3) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(3)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(200) - 1;
    c.window_right = draw(60) - 1;
  }
  if (draw.chance(4)) c.flags |= ATTN_SINKS;
  if (draw.chance(5)) c.scale = draw.chance(2) ? 0.25f : -0.1f;
  const double sigmas[] = {0.5, 1, 3};
  c.sigma = draw.pick(sigmas);
  if (draw.chance(8)) c.values = draw.chance(2) ? Values::uniform : Values::one_hot;
  if (c.lengths_q.empty() && draw.chance(3)) {
    c.flags |= ATTN_BLOCK_MASK;
    c.block_q = draw.chance(2) ? 64 : 128;
    c.block_k = draw.chance(2) ? 64 : 128;
    c.mask_per_batch = draw.chance(2);
    c.mask_per_head = draw.chance(2);
    c.mask_garbage = draw.chance(4);
  }
  return taken_here(std::move(c));
}

const AddRandomFamily added("fp8", random_case);

TEST_CASE("fp8: random problems") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  constexpr uint64_t first_seed = 7000, count = 100;
  std::cout << "fp8: random problems: seeds " << first_seed << " to " << first_seed + count - 1
            << std::endl;
  int ran = 0;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed)
    ran += check_case(random_case(seed), kernels);
  // Most by both head dimensions' kernels, where all are here.
  CHECK(ran > (type_here(kernels) == fnuz && !sanitized ? int(count) : 0));
}

// With what only cuda's kernels take beside: K and V of e5m2, larger head dimensions, out of fp8;
// softcap, ALiBi, segments and descales of blocks.
Case random_ocp_case(uint64_t seed) {
  Case c = random_case(seed);
  c.name = "fp8-ocp-" + std::to_string(seed);
  Draw draw{seed, 79};
  c.q_type = ocp;
  const int64_t kind = draw(3);  // masks of ranges alone, what _score kernels take, a block mask
  if (kind == 2 && c.lengths_q.empty())
    c.flags |= ATTN_BLOCK_MASK;
  else
    c.flags &= ~uint32_t(ATTN_BLOCK_MASK);
  SegmentCase& s = c.segments[0];
  s.k_type = s.v_type = kind > 0 || draw.chance(2) ? ocp : e5m2;
  static const auto dims = head_dims(type_bit(ocp));
  draw_head_dims(draw, dims, draw.chance(4), &c);
  if (c.head_dim != c.head_dim_v && s.arrange == Arrange::interleaved)
    s.arrange = Arrange::contiguous;
  if (kind == 1) {
    if (draw.chance(3)) c.softcap = 3;
    if (draw.chance(3)) c.flags |= ATTN_ALIBI;
    const auto of_blocks = [&](SegmentCase& of) {
      of.descale_block_keys = draw.chance(2) ? 64 : 128;
      if (draw.chance(2)) of.k_descale = ATTN_DESCALE_BLOCK;
      if (draw.chance(2)) of.v_descale = ATTN_DESCALE_BLOCK;
    };
    of_blocks(s);
    for (int64_t more = draw(3); more > 0; --more) {
      SegmentCase other = c.segments[0];
      const int64_t capacities[] = {1, 40, 64, 128, 150, 333};
      other.capacity = draw.pick(capacities);
      if (!other.lengths.empty()) {
        other.lengths.clear();
        draw_lengths(draw, c.batch, &other);
      }
      of_blocks(other);
      c.segments.push_back(other);
    }
  }
  if (draw.chance(3)) {
    c.out_type = draw.chance(2) ? ocp : e5m2;
    if (draw.chance(2)) c.flags |= ATTN_OUT_SCALE;
  }
  return c;
}

// Segments and pages, of which one may be bad, descales and types of each, and out in fp8.
Case random_gathered_case(uint64_t seed) {
  Case c = random_case(seed);
  c.name = "fp8-gathered-" + std::to_string(seed);
  c.thinning = for_devices(seed + 135);
  Draw draw{seed, 80};
  c.flags &= ~uint32_t(ATTN_BLOCK_MASK);
  const attn_dtype out_types[] = {ocp, fnuz, e5m2, ATTN_BF16};
  c.out_type = draw.pick(out_types);
  if (dtype_is_fp8(c.out_type) && draw.chance(2)) c.flags |= ATTN_OUT_SCALE;
  SegmentCase& s = c.segments[0];
  const auto make_paged = [&](SegmentCase& of) {
    const int32_t sizes[] = {1, 5, 16, 64, 100};
    of.layout = ATTN_PAGED;
    of.page_size = draw.pick(sizes);
    of.arrange = Arrange::contiguous;
    if (draw.chance(3)) of.bad_pages = {int32_t(draw(3))};
  };
  if (draw.chance(2)) make_paged(s);
  const bool alike = draw.chance(3);  // of one type each, without descales
  const auto draw_descales = [&](SegmentCase& of) {
    of.k_descale = attn_descale_kind(draw(4));
    of.v_descale = attn_descale_kind(draw(4));
    of.descale_block_keys = draw.chance(2) ? 64 : 128;
  };
  if (draw.chance(3)) {
    if (!alike) draw_descales(s);
    return c;
  }
  if (alike)
    s.k_descale = s.v_descale = ATTN_DESCALE_NONE;
  else
    draw_descales(s);
  for (uint64_t more = 1 + draw(3); more > 0; --more) {
    SegmentCase next = c.segments[0];
    next.bad_pages.clear();
    next.layout = ATTN_PADDED;
    if (draw.chance(2)) make_paged(next);
    const int64_t capacities[] = {1, 40, 64, 100, 200};
    next.capacity = draw.pick(capacities);
    next.lengths.clear();
    for (int64_t b = 0; b < c.batch; ++b)
      next.lengths.push_back(int32_t(draw(uint64_t(next.capacity) + 1)));
    if (!alike) {
      draw_descales(next);
      next.k_type = draw.chance(2) ? fnuz : ocp;
      next.v_type = draw.chance(2) ? fnuz : ocp;
      if (next.k_type != next.v_type && next.arrange == Arrange::interleaved)
        next.arrange = Arrange::contiguous;
    }
    c.segments.push_back(next);
  }
  return taken_here(std::move(c));
}

const AddRandomFamily added_gathered("fp8, gathered", random_gathered_case);

TEST_CASE("fp8: segments, pages and out in fp8") {
  std::vector<const Kernel*> kernels = fp8_kernels();
  std::erase_if(kernels, [](const Kernel* k) { return k->backend != ATTN_BACKEND_HIP; });
  if (kernels.empty()) ATTN_SKIP("no device here has kernels of FP8 with segments");
  constexpr uint64_t first_seed = 7900;
  constexpr uint64_t count = 100;
  std::cout << "fp8: segments, pages and out in fp8: seeds " << first_seed << " to "
            << first_seed + count - 1 << std::endl;
  int ran = 0, cases = 0;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    const Case c = random_gathered_case(seed);
    cases += !sharing(kernels, c).empty();
    ran += check_case(c, kernels);
  }
  CHECK(ran > cases / 2);
}

TEST_CASE("fp8: random problems of OCP's types") {
  std::vector<const Kernel*> kernels = fp8_kernels();
  std::erase_if(kernels, [](const Kernel* k) { return k->backend != ATTN_BACKEND_CUDA; });
  if (kernels.empty()) ATTN_SKIP("no CUDA device here has FP8 kernels");
  constexpr uint64_t first_seed = 7500, count = 400;
  std::cout << "fp8: random problems of OCP's types: seeds " << first_seed << " to "
            << first_seed + count - 1 << std::endl;
  int ran = 0;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed)
    ran += check_case(random_ocp_case(seed), kernels);
  CHECK(ran > (kernel_file() ? 0 : int(count) / 2));
}

// The row sum has P as rounded, and lse is its logarithm: docs/numerics.md, "FP8 weights".
// less_cut: but for what a matrix unit cuts off scores.
void check_lse(uint64_t count, bool less_cut) {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  double worst = 0, largest = 0;
  size_t rows = 0;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    const Case c = random_case(seed);
    const Data data = make_data(c);
    const Outputs want = formula(c, data);
    for (const Kernel* kernel : kernels) {
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      double most = 0;
      for (size_t n = 0; n < want.lse.size(); ++n) {
        if (!std::isfinite(want.lse[n])) continue;
        most = std::max(most, std::abs(got.lse[n] - want.lse[n]));
        ++rows;
      }
      CHECK(most <= std::log(17.0 / 16));  // three bits of mantissa
      worst = std::max(worst, most);
      largest = std::max(largest, most - (less_cut ? cut_off(c, data, *kernel) : 0));
    }
  }
  std::cout << "fp8: lse of " << rows << " rows is off by up to " << worst << std::endl;
  CHECK((rows > 0 || sanitized));  // where kernels of one head_dim are here
  CHECK(largest <= 0.0274);
}
TEST_CASE("fp8: how far lse is off") {
  check_lse(sanitized ? 3 : 10, false);
}
TEST_CASE("fp8: how far lse is off, in long", "[.][long]") {
  check_lse(120, true);
}

TEST_CASE("fp8: exact inputs give exact outputs") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  for (const Kernel* kernel : kernels) {
    uint64_t number = 0;
    for (attn_dtype type : {fnuz, ocp}) {
      for (Values values : {Values::uniform, Values::one_hot}) {
        for (int64_t skv : {1, 64, 128, 512}) {
          if (values == Values::one_hot && skv > 64) continue;  // D one-hot keys
          Case c = shape(name_of("fp8-exact", {int64_t(values), skv}), 64, 40, skv, type);
          c.thinning = on_all_kernels_in_turn(number++);
          c.values = values;
          c.scale = 1;
          if (share(*kernel, c)) check_exact(c, *kernel);
        }
      }
    }
  }
}

// ---- block masks -------------------------------------------------------------------------------

struct Blocks {
  int32_t q, k;
};
constexpr Blocks blocks[] = {{64, 64}, {128, 128}, {64, 128}, {128, 64}};

std::vector<const Kernel*> masking_fp8_kernels() {
  std::vector<const Kernel*> found = fp8_kernels();
  std::erase_if(found, [](const Kernel* k) { return !(k->limits.flags & ATTN_BLOCK_MASK); });
  return found;
}

Case masked(std::string name, int64_t dim, int64_t sq, int64_t skv, attn_dtype type, Blocks size) {
  Case c = shape(std::move(name), dim, sq, skv, type);
  c.flags = ATTN_BLOCK_MASK;
  c.block_q = size.q, c.block_k = size.k;
  return c;
}

// All kinds, with everything that may come together with a mask.
TEST_CASE("fp8: block masks, mixtures of kinds") {
  const auto kernels = masking_fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels with block masks");
  uint64_t n = 0;
  for (Blocks size : blocks) {
    for (auto [sq, skv] : {std::pair{64, 64}, std::pair{129, 257}, std::pair{300, 77},
                           std::pair{1, 500}, std::pair{200, 400}, std::pair{70, 900}}) {
      for (int64_t dim : dims_here(kernels)) {
        ++n;
        Case c = masked(name_of("fp8-mix", {size.q, size.k, dim, sq, skv}), dim, sq, skv,
                        n % 5 < 2 ? ocp : type_here(kernels), size);
        c.seed = n;
        c.heads_q = 2;
        c.mask_per_head = n % 3 == 0;
        c.thinning = one_of_many(n);
        if (n / 2 % 2) {
          check_case(c, kernels);
          continue;
        }
        c.name += "-more";
        c.batch = 2;
        c.heads_kv = 1 + n % 2;
        c.heads_q = 2;
        c.mask_per_batch = n % 2;
        c.segments[0].lengths = {int32_t(skv), int32_t(skv - skv / 3)};
        if (n / 4 % 2) c.segments[0].layout = ATTN_PACKED;
        if (n % 3 == 1) c.flags |= ATTN_SINKS;
        if (n % 3 == 2) c.flags |= ATTN_CAUSAL;
        if (n % 5 == 0) c.flags |= ATTN_WINDOW, c.window_left = 90, c.window_right = 40;
        constexpr attn_dtype outs[] = {ATTN_F32, ATTN_BF16, ATTN_F16};
        c.out_type = outs[n % 3];
        check_case(c, kernels);
      }
    }
  }
}

// Long rows of blocks, more than the 64 tiles that a kernel finds at once, few of them live.
TEST_CASE("fp8: block masks, little to see") {
  const auto kernels = masking_fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels with block masks");
  constexpr uint8_t live[] = {ATTN_BLOCK_CAUSAL, ATTN_BLOCK_FULL, ATTN_BLOCK_PARTIAL};
  uint64_t n = 0;
  for (Blocks size : blocks) {
    const int64_t columns = 150 * 64 / size.k, sq = 3 * size.q - 5, skv = columns * size.k - 3;
    Case c = masked(name_of("fp8-little", {size.q, size.k}), n % 2 ? 64 : 128, sq, skv,
                    type_here(kernels), size);
    c.mask_kinds.assign(size_t(3 * columns), ATTN_BLOCK_EMPTY);
    c.mask_kinds[size_t(2 * columns - 1)] = live[n % 3];
    c.mask_kinds[size_t(2 * columns)] = c.mask_kinds[size_t(3 * columns - 1)] = live[(n + 1) % 3];
    for (int64_t column : {columns / 3, columns / 2})
      c.mask_kinds[size_t(columns + column)] = live[(n + 2) % 3];
    c.thinning = one_of_many(n++);
    check_case(c, kernels);
    c.name += "-none";
    c.mask_kinds = {ATTN_BLOCK_EMPTY};
    c.flags |= n % 2 ? ATTN_SINKS : 0;
    check_case(c, kernels);
  }
}

TEST_CASE("fp8: block masks, garbage in kinds and index hides blocks") {
  const auto kernels = masking_fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels with block masks");
  for (Blocks size : blocks) {
    for (int64_t dim : dims_here(kernels)) {
      Case c = masked(name_of("fp8-garbage", {size.q, size.k, dim}), dim, 300, 700,
                      type_here(kernels), size);
      c.seed = uint64_t(dim + size.q);
      c.mask_garbage = true;
      check_case(c, kernels);
    }
  }
}

// What a kernel makes of a case, and another kernel of the same device of a case.
void check_same_bits(const Kernel& kernel, const Case& c, const std::string& other,
                     const Case& of_other) {
  Backend& backend = backend_of(kernel.backend);
  const Outputs got = run_forward(backend, c, make_data(c), kernel.name, ATTN_F32);
  const Outputs want = run_forward(backend, of_other, make_data(of_other), other.c_str(), ATTN_F32);
  INFO(kernel.name << " " << describe(c));
  REQUIRE(got.error == "");
  REQUIRE(want.error == "");
  CHECK(got.bits == want.bits);
  CHECK(got.lse == want.lse);
}

// Also with what band and lengths hide.
TEST_CASE("fp8: block masks, all FULL gives the bits of no mask") {
  const auto kernels = masking_fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels with block masks");
  size_t ran = 0;
  for (const Kernel* kernel : kernels) {
    std::string plain = kernel->name;
    plain.resize(plain.size() - std::string("_mask").size());
    const attn_dtype type = type_here({kernel});
    const Kernel* unmasked = find_kernel(plain.c_str());
    REQUIRE(unmasked);
    if (unmasked->numerics.keys != kernel->numerics.keys) continue;  // sums in another order
    uint64_t number = 0;
    for (uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_WINDOW | ATTN_SINKS)}) {
      // There the tiles of cuda's kernels begin where windows do, with a block mask at blocks.
      if (kernel->backend == ATTN_BACKEND_CUDA && flags & ATTN_WINDOW) continue;
      for (auto [sq, skv] : {std::pair{200, 700}, std::pair{65, 128}, std::pair{300, 333}}) {
        Case c =
            masked(name_of("fp8-all-full", {flags, sq, skv}), 64, sq, skv, type, blocks[ran % 4]);
        c.thinning = on_all_kernels_in_turn(number++);
        if (!share(*kernel, c)) continue;
        c.heads_q = 2;
        c.batch = 2;
        c.mask_kinds = {ATTN_BLOCK_FULL};
        c.segments[0].lengths = {int32_t(skv), int32_t(skv / 2)};
        c.flags |= flags;
        if (flags & ATTN_WINDOW) c.window_left = 150, c.window_right = 20;
        Case without = c;
        without.flags &= ~uint32_t(ATTN_BLOCK_MASK);
        check_same_bits(*kernel, c, plain, without);
        ++ran;
      }
    }
  }
}

// K and V read where they are, and what a launch before has made of them: the same products in the
// same order. Memory behind the last key and between rows holds NaN.
TEST_CASE("fp8: rows read without a prepare launch give the bits of prepared ones") {
  size_t ran = 0;
  for (const Kernel* kernel : fp8_kernels()) {
    std::string prepared = kernel->name;
    if (!prepared.ends_with("_direct")) continue;
    prepared.resize(prepared.size() - std::string("_direct").size());
    REQUIRE(find_kernel(prepared.c_str()));
    for (const uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_CAUSAL_TOP_LEFT)})
      for (auto [sq, skv] : {std::pair{1, 2}, std::pair{70, 200}, std::pair{300, 577}}) {
        Case c = shape(name_of("fp8-direct", {flags, sq, skv}), 128, sq, skv, type_here({kernel}));
        c.heads_kv = 2;
        c.heads_q = 4;
        c.batch = 2;
        c.segments[0].arrange = Arrange::padded;
        c.flags |= flags;
        c.segments[0].lengths = {int32_t(skv), int32_t(skv / 2)};
        check_same_bits(*kernel, c, prepared, c);
        ++ran;
      }
  }
  if (ran == 0) ATTN_SKIP("no device here has FP8 kernels that need no prepare launch");
}

// All codes, -0 and NaN among them, as e4m3fn and as the FNUZ codes of half the values.
TEST_CASE("fp8: e4m3fn codes mean what their exact conversion means") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  for (const Kernel* kernel : kernels) {
    for (int nans = 0; nans < 2; ++nans) {
      Case c = shape("fp8-ocp", 64, 40, 150, ocp);
      Case converted = shape("fp8-converted", 64, 40, 150, fnuz);
      c.scale = 1 / 1024.0f;
      converted.scale = 4 / 1024.0f;
      Data data = make_data(c), same = make_data(converted);
      uint64_t counter = 0;
      const auto fill = [&](Buffer& from, Buffer& to, bool nan) {
        REQUIRE(from.bytes.size() == to.bytes.size());
        for (size_t n = Buffer::guard; n < from.bytes.size() - Buffer::guard; ++n) {
          uint8_t code = uint8_t(hash(3, ++counter));
          if ((code & 0x7f) == 0x7f && !(nan && hash(4, counter) % 16 == 0)) code = 0x80;
          from.bytes[n] = code;
          to.bytes[n] = (code & 0x7f) == 0x7f ? 0x80 : code == 0x80 ? 0 : code;
        }
      };
      fill(data.q, same.q, nans);
      fill(data.segments[0].k, same.segments[0].k, false);
      fill(data.segments[0].v, same.segments[0].v, nans);
      Backend& backend = backend_of(kernel->backend);
      const Outputs got = run_forward(backend, c, data, kernel->name, ATTN_F32);
      const Outputs half = run_forward(backend, converted, same, kernel->name, ATTN_F32);
      if (declined(*kernel, got) || declined(*kernel, half)) continue;
      INFO(kernel->name << " nans " << nans);
      REQUIRE(got.error == "");
      REQUIRE(half.error == "");
      size_t wrong = 0, numbers = 0;
      for (size_t n = 0; n < got.out.size(); ++n) {
        const bool nan = std::isnan(got.out[n]);
        wrong += nan ? !std::isnan(half.out[n]) : got.out[n] != 2 * half.out[n];
        numbers += !nan;
      }
      CHECK(wrong == 0);
      CHECK((nans ? numbers < got.out.size() : numbers == got.out.size()));
      // And it is what the reference says of both.
      Data plain = data;
      const Outputs want = reference_answer(c, data);
      size_t positions = 0;
      for (size_t n = 0; n < want.out.size(); ++n)
        positions += std::isnan(want.out[n]) != std::isnan(got.out[n]);
      if (!nans) CHECK(positions == 0);
    }
  }
}

// A NaN in a key is in the rows that see it and in no other; one in a value too, but in its column
// and perhaps in rows of the same query tile, as 0 * NaN.
TEST_CASE("fp8: NaN codes in visible keys reach their rows") {
  std::vector<const Kernel*> kernels = fp8_kernels();
  std::erase_if(kernels, [](const Kernel* k) { return emulated(*k); });
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  constexpr int64_t length = 300;
  const auto of_one_tile = [](int64_t i, int64_t j) {  // query tiles have 128 or 192 rows
    return i / 128 == j / 128 || i / 192 == j / 192;
  };
  for (const Kernel* kernel : kernels) {
    Case c = shape("fp8-nan", 64, length, length, type_here({kernel}));
    c.flags = ATTN_CAUSAL;
    if (kernel->limits.demands & ATTN_BLOCK_MASK) {
      c.flags |= ATTN_BLOCK_MASK;
      c.mask_kinds = {ATTN_BLOCK_FULL};
    }
    const Data data = make_data(c);
    Backend& backend = backend_of(kernel->backend);
    const Outputs want = run_forward(backend, c, data, kernel->name, ATTN_F32);
    if (declined(*kernel, want)) continue;
    REQUIRE(want.error == "");
    const unsigned char nan = c.q_type == fnuz ? 0x80 : 0x7f;
    for (int64_t key : {0, 63, 130, 299}) {
      for (bool in_key : {true, false}) {
        constexpr int64_t column = 5;
        Data with_nan = data;
        SegmentData& s = with_nan.segments[0];
        (in_key ? s.k : s.v).data()[(in_key ? s.k_view : s.v_view).at(0, key, 0) + column] = nan;
        const Outputs got = run_forward(backend, c, with_nan, kernel->name, ATTN_F32);
        INFO(kernel->name << (in_key ? " k " : " v ") << key);
        REQUIRE(got.error == "");
        size_t missing = 0, spread = 0;
        for (int64_t i = 0; i < length; ++i) {
          const bool sees = i >= key, may_see = sees || (!in_key && of_one_tile(i, key));
          for (int64_t d = 0; d < c.head_dim_v; ++d) {
            const size_t n = size_t(i * c.head_dim_v + d);
            const bool there = in_key || d == column;
            missing += sees && there && !std::isnan(got.out[n]);
            spread += !(may_see && there) && got.out[n] != want.out[n];
          }
          spread += !(sees && in_key) && got.lse[size_t(i)] != want.lse[size_t(i)];
        }
        CHECK(missing == 0);
        CHECK(spread == 0);
      }
    }
  }
}

// K/V head 1 has another descale than head 0, whose query heads keep their bits.
TEST_CASE("fp8: descales of 0, inf and NaN are numbers") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  constexpr int64_t heads = 4, dim = 64;
  for (const Kernel* kernel : kernels) {
    Case c = shape("fp8-descales", dim, 9, 70, type_here({kernel}));
    c.heads_q = heads;
    c.heads_kv = 2;
    c.q_descale = c.segments[0].k_descale = c.segments[0].v_descale = ATTN_DESCALE_HEAD;
    if (kernel->limits.demands & ATTN_BLOCK_MASK) {
      c.flags |= ATTN_BLOCK_MASK;
      c.mask_kinds = {ATTN_BLOCK_FULL};
    }
    Backend& backend = backend_of(kernel->backend);
    const Data data = make_data(c);
    const Outputs usual = run_forward(backend, c, data, kernel->name, ATTN_F32);
    if (declined(*kernel, usual)) continue;
    INFO(kernel->name);
    REQUIRE(usual.error == "");
    uint64_t number = 0;
    for (const char* of : {"q", "k", "v"}) {
      for (const float descale : {0.0f, HUGE_VALF, std::nanf("")}) {
        c.thinning = on_all_kernels_in_turn(number++);
        if (!share(*kernel, c)) continue;
        INFO("descale of " << of << " " << descale);
        Data changed = data;
        Buffer& descales = *of == 'q'   ? changed.q_descale
                           : *of == 'k' ? changed.segments[0].k_descale
                                        : changed.segments[0].v_descale;
        std::memcpy(descales.data() + sizeof descale, &descale, sizeof descale);
        const Outputs got = run_forward(backend, c, changed, kernel->name, ATTN_F32);
        const Outputs want = reference_answer(c, changed);
        REQUIRE(got.error == "");
        size_t wrong = 0;
        for (size_t n = 0; n < got.out.size(); ++n) {
          const size_t row = n / dim;  // [query, head]
          if (row % heads < heads / 2)
            wrong += got.out[n] != usual.out[n] || got.lse[row] != usual.lse[row];
          else if (std::isfinite(want.out[n]))
            wrong += !(std::abs(got.out[n] - want.out[n]) <= 0.03 * data.v_max);
          else  // inf - inf, and 0 * inf: whichever of inf and NaN comes
            wrong += std::isfinite(got.out[n]);
        }
        CHECK(wrong == 0);
      }
    }
  }
}

// All codes are 1, so that an answer is what descales make of it: of K how much a block weighs, of
// V what it is worth.
TEST_CASE("fp8: descales of blocks of keys") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  constexpr int64_t dim = 64;
  struct {
    float k[2], v[2];  // of blocks in turn
  } const choices[] = {{{0.5, 0.75}, {1, 0.5}},     {{0.5, 0.25}, {0.25, 1}},
                       {{0.25, 0.5}, {1, 0.1f}},    {{0.5, 0.5}, {1, 1.0f / 64}},
                       {{0.25, 0.5}, {1, -1}},      {{0.5, 0.25}, {0, 1}},
                       {{-0.25, 0.25}, {-0.5, -1}}, {{0.5, 0.25}, {1e15f, 1e-15f}}};
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    uint64_t number = 0;
    for (const int32_t block : {64, 128}) {
      for (const int64_t seqlen : {64, 70, 128, 200, 500}) {
        Case c =
            shape(name_of("fp8-descaled", {block, seqlen}), dim, 9, seqlen, type_here({kernel}));
        c.heads_q = c.heads_kv = 1;
        SegmentCase& s = c.segments[0];
        s.k_descale = s.v_descale = ATTN_DESCALE_BLOCK;
        s.descale_block_keys = block;
        if (kernel->limits.demands & ATTN_BLOCK_MASK) {
          c.flags |= ATTN_BLOCK_MASK;
          c.mask_kinds = {ATTN_BLOCK_FULL};
        }
        Data data = make_data(c);
        const unsigned char one = uint8_t(attn::encode(attn::fp8_format(c.q_type), 1, false));
        for (Buffer* codes : {&data.q, &data.segments[0].k, &data.segments[0].v})
          std::memset(codes->data(), one, codes->size());
        for (const auto& [k, v] : choices) {
          for (int64_t n = 0; n < (seqlen + block - 1) / block; ++n) {
            data.segments[0].k_descale.as<float>()[n] = k[n % 2];
            data.segments[0].v_descale.as<float>()[n] = v[n % 2];
          }
          c.thinning = on_all_kernels_in_turn(number++);
          if (!share(*kernel, c)) continue;
          const Outputs got =
              run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
          if (declined(*kernel, got)) continue;
          INFO(kernel->name << " block " << block << " seqlen " << seqlen << " K " << k[0] << " "
                            << k[1] << " V " << v[0] << " " << v[1]);
          REQUIRE(got.error == "");
          double sum = 0, want = 0, weighed = 0;
          for (int64_t j = 0; j < seqlen; ++j) {
            const double weight = std::exp(std::sqrt(double(dim)) * k[j / block % 2]);
            sum += weight;
            want += weight * v[j / block % 2];
            weighed += weight * std::abs(v[j / block % 2]);
          }
          size_t wrong = 0;
          for (const double x : got.out)  // weights have three bits of mantissa
            wrong += !(std::abs(x - want / sum) <= 0.13 * weighed / sum);
          for (const double x : got.lse)
            wrong += !(std::abs(x - std::log(sum)) <= std::log(17.0 / 16));
          CHECK(wrong == 0);
          ++ran;
        }
      }
    }
  }
  CHECK((ran > 0 || sanitized || kernel_file()));
}

// With one key out is its value.
TEST_CASE("fp8: out in fp8 saturates") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  for (const Kernel* kernel : kernels) {
    for (const auto& [out_type, largest] :
         {std::pair{ocp, 448.0}, std::pair{fnuz, 240.0}, std::pair{e5m2, 57344.0}}) {
      Case c = shape("fp8-saturates", 64, 3, 1, type_here({kernel}));
      c.segments[0].v_descale = ATTN_DESCALE_TENSOR;
      Data data = make_data(c);
      const float before = [&] {
        float value;
        std::memcpy(&value, data.segments[0].v_descale.data(), sizeof value);
        return value;
      }();
      const float descale = float(largest);  // about half of the values are beyond it
      std::memcpy(data.segments[0].v_descale.data(), &descale, sizeof descale);
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, out_type);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " out " << dtype_name(out_type));
      REQUIRE(got.error == "");
      size_t wrong = 0, beyond = 0;
      for (size_t n = 0; n < got.out.size(); ++n) {
        const double value = data.v_real[0][n % 64] / before * descale;
        beyond += std::abs(value) > largest;
        wrong += std::abs(value) >= largest ? got.out[n] != std::copysign(largest, value)
                                            : !(std::abs(got.out[n] - value) <= largest / 8);
      }
      CHECK(beyond > 0);
      CHECK(wrong == 0);
    }
  }
}

// Lengths on a device are clamped, never trusted.
TEST_CASE("fp8: lengths out of range") {
  const auto kernels = fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no device here has FP8 kernels");
  for (const Kernel* kernel : kernels) {
    Case c = shape("fp8-lengths", 64, 40, 130, type_here({kernel}));
    c.batch = 4;
    c.segments[0].lengths = {0, 130, 130, 0};
    Data data = make_data(c);
    const Outputs want = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
    if (declined(*kernel, want)) continue;
    const int32_t lengths[] = {-7, 131, INT32_MAX, INT32_MIN};
    std::memcpy(data.segments[0].seqlens.data(), lengths, sizeof lengths);
    const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
    INFO(kernel->name);
    REQUIRE(want.error == "");
    REQUIRE(got.error == "");
    CHECK(got.bits == want.bits);
    CHECK(got.lse == want.lse);

    c.segments[0].layout = ATTN_PACKED;
    c.segments[0].lengths = {30, 50, 10, 40};
    data = make_data(c);
    const int32_t cu[] = {INT32_MIN, 20, 10, INT32_MAX, -3};  // clamped: all inside the buffer
    std::memcpy(data.segments[0].cu_seqlens.data(), cu, sizeof cu);
    const Outputs packed =
        run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
    CHECK(packed.error == "");
  }
}

// Waves and loads in a random order on the emulator change nothing.
TEST_CASE("fp8: any order of waves and loads") {
#ifndef ATTN_HIPEMU
  ATTN_SKIP("this build has no gfx9 emulator");
#else
  int ran = 0;
  for (const Kernel* kernel : fp8_kernels()) {
    if (!emulated(*kernel)) continue;
    for (int64_t dim : {kernel->limits.head_dim.max}) {
      for (uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_BLOCK_MASK)}) {
        Case c = shape("fp8-order", dim, 257, 700);
        c.flags = flags;
        const Data data = make_data(c);
        const auto run = [&](uint64_t seed) {
          const Emulated here({.order = seed});
          return run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        };
        const Outputs want = run(0);
        if (declined(*kernel, want)) continue;
        INFO(kernel->name << " " << describe(c));
        REQUIRE(want.error == "");
        for (uint64_t seed = 1; seed <= (sanitized ? 1 : 3); ++seed) {
          INFO("seed " << seed);
          const Outputs got = run(seed);
          REQUIRE(got.error == "");
          CHECK(got.bits == want.bits);
          CHECK(got.lse == want.lse);
        }
        ++ran;
      }
    }
  }
  if (ran == 0) ATTN_SKIP("no FP8 kernel runs on the emulator here");
#endif
}

}  // namespace
}  // namespace attn::test
