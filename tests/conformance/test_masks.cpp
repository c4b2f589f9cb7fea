// Block masks in every forward kernel of the catalog that takes them.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "head_dims.h"

namespace attn::test {
namespace {

constexpr uint8_t empty = ATTN_BLOCK_EMPTY, causal = ATTN_BLOCK_CAUSAL, full = ATTN_BLOCK_FULL,
                  partial = ATTN_BLOCK_PARTIAL;

// The largest of kernels of any type.
const std::vector<int64_t> dims = largest_head_dims(~0u);

struct Blocks {
  int32_t q, k;
};
constexpr Blocks blocks[] = {{64, 64}, {128, 128}, {64, 128}, {128, 64}};

Case masked(std::string name, int64_t heads_q, int64_t heads_kv, int64_t dim, int64_t sq,
            int64_t skv, attn_dtype type, Blocks size) {
  Case c;
  c.name = std::move(name);
  c.heads_q = heads_q;
  c.heads_kv = heads_kv;
  c.head_dim = c.head_dim_v = dim;
  c.seqlen_q = sq;
  c.q_type = c.out_type = type;
  SegmentCase keys;
  keys.k_type = keys.v_type = type;
  keys.capacity = skv;
  c.segments = {keys};
  c.flags = ATTN_BLOCK_MASK;
  c.block_q = size.q;
  c.block_k = size.k;
  return c;
}

std::string name_of(const char* what, std::initializer_list<int64_t> numbers) {
  std::string name = what;
  for (int64_t n : numbers) name.append("-").append(std::to_string(n));
  return name;
}

std::vector<const Kernel*> kernels_with_masks() {
  std::vector<const Kernel*> found;
  for (const Kernel* kernel : kernels_here(Op::forward, true))
    if (kernel->limits.flags & ATTN_BLOCK_MASK) found.push_back(kernel);
  return found;
}

// Shapes and types that differ only for kernels of devices.
constexpr Thinning shapes_for_devices(uint64_t number) {
  return {.sanitized = 2, .without_device = 5, .number = number};
}

// What Values::identity shows: the mask itself, over the number of keys that the row sees.
struct Shown {
  std::vector<double> out, lse;
  Shown(const Case& c, const Data& data) {
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t i = 0; i < c.seqlen_q; ++i)
        for (int64_t h = 0; h < c.heads_q; ++h) {
          const size_t row = out.size();
          out.resize(row + size_t(c.head_dim_v));
          double seen = 0;
          for (int64_t j = 0; j < c.keys(b); ++j) {
            if (!visible(c, data, b, h, i, j)) continue;
            ++seen;
            ++out[row + size_t(j % c.head_dim_v)];
          }
          for (size_t n = row; n < out.size(); ++n) out[n] /= std::max(seen, 1.0);
          lse.push_back(std::log(seen));
        }
  }
};

void check_shown(const Case& shaped, const std::vector<const Kernel*>& kernels) {
  for (attn_dtype type : {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FNUZ}) {
    std::optional<Data> data;
    std::optional<Shown> want;
    const Case c = with_type(shaped, type);
    for (const Kernel* kernel : kernels) {
      if (float_type_of(*kernel) != type) continue;
      if (c.head_dim % kernel->limits.head_dim.multiple != 0) continue;
      if (!share(*kernel, c)) continue;
      if (!data) want.emplace(c, data.emplace(make_data(c)));
      const Outputs got =
          run_forward(backend_of(kernel->backend), c, *data, kernel->name, ATTN_F32);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      REQUIRE(got.out.size() == want->out.size());
      size_t wrong = 0;
      for (size_t n = 0; n < got.out.size(); ++n)
        wrong += !(std::abs(got.out[n] - want->out[n]) < 1e-6);
      for (size_t n = 0; n < got.lse.size(); ++n)
        wrong += !(got.lse[n] == want->lse[n] || std::abs(got.lse[n] - want->lse[n]) < 1e-6);
      CHECK(wrong == 0);
    }
  }
}

// One visible element, then all but one, for each element of a block of 64 x 64. K and V of keys
// that nobody sees are NaN.
TEST_CASE("block masks: each element of a block") {
  const auto kernels = kernels_with_masks();
  uint64_t number = 0;
  for (bool inverted : {false, true})
    for (int64_t first = 0; first < 64 * 64; first += 512) {
      Case c = masked(name_of("element", {first, inverted}), 64, 64, 8, 64, 64, ATTN_F32, {64, 64});
      c.thinning = shapes_for_devices(number++);
      c.batch = 8;
      c.head_dim_v = 64;
      c.values = Values::identity;
      c.mask_per_batch = c.mask_per_head = true;
      c.mask_bits = MaskBits::one_element;
      c.mask_inverted = inverted;
      c.mask_first = first;
      check_shown(c, kernels);
    }
}

// Every element of larger blocks: each row sees one key, or all but one.
TEST_CASE("block masks: each element of blocks of other sizes") {
  uint64_t number = 0;
  for (int64_t dim : dims) {
    auto kernels = kernels_with_masks();
    if (dim > 64)  // one code for all dimensions there, or slow
      std::erase_if(kernels,
                    [](const Kernel* kernel) { return kernel->host || emulated(*kernel); });
    for (Blocks size : blocks)
      for (bool inverted : {false, true}) {
        Case c = masked(name_of("elements", {size.q, size.k, inverted, dim}), 16, 16, dim, size.q,
                        size.k, ATTN_F32, size);
        c.thinning = fifth_of_many(number++, 80);
        c.batch = size.k / 16;
        c.values = Values::identity;
        c.mask_per_batch = c.mask_per_head = true;
        c.mask_bits = MaskBits::one_per_row;
        c.mask_inverted = inverted;
        check_shown(c, kernels);
      }
  }
}

// The same kernel, or the one of the same name but "_mask" that a problem without a mask needs.
std::string unmasked_name(const Kernel& kernel) {
  std::string name = kernel.name;
  if (kernel.limits.demands & ATTN_BLOCK_MASK)
    name.resize(name.size() - std::string("_mask").size());
  return name;
}

// Where the keys that queries see begin at a block of the mask, as they do here.
TEST_CASE("block masks: all FULL gives the bits of no mask") {
  size_t ran = 0;
  const auto kernels = kernels_with_masks();
  uint64_t number = 0;
  for (attn_dtype type : {ATTN_F32, ATTN_F16, ATTN_BF16})
    for (int64_t dim : dims)
      for (uint32_t flags :
           {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_WINDOW | ATTN_SINKS | ATTN_SPLIT_INVARIANT)})
        for (auto [sq, skv] : {std::pair{200, 300}, std::pair{65, 128}, std::pair{1, 513}}) {
          Case c = masked(name_of("all-full", {type, dim, flags, sq, skv}), 4, 2, dim, sq, skv,
                          type, blocks[size_t(dim + sq) % 4]);
          c.thinning.number = number++;
          c.batch = 2;
          c.mask_kinds = {full};
          c.segments[0].lengths = {skv, skv / 2};
          c.flags |= flags;
          if (flags & ATTN_WINDOW) c.window_left = -1, c.window_right = 20;
          Case without = c;
          without.flags &= ~uint32_t(ATTN_BLOCK_MASK);
          std::optional<Data> data, data_without;
          for (const Kernel* kernel : kernels) {
            // One code for all.
            if (kernel->host ? type != ATTN_F32 || dim != 64 : float_type_of(*kernel) != type)
              continue;
            if (!share(*kernel, c)) continue;
            if (!data) data = make_data(c), data_without = make_data(without);
            Backend& backend = backend_of(kernel->backend);
            const Outputs got = run_forward(backend, c, *data, kernel->name, type);
            if (declined(*kernel, got)) continue;
            const Outputs want =
                run_forward(backend, without, *data_without, unmasked_name(*kernel).c_str(), type);
            INFO(kernel->name << " " << describe(c));
            REQUIRE(got.error == "");
            REQUIRE(want.error == "");
            CHECK(got.bits == want.bits);
            CHECK(got.lse == want.lse);
            ++ran;
          }
        }
  CHECK(ran > 0);
}

TEST_CASE("block masks: mixtures of kinds meet the bounds of the design") {
  for (Blocks size : {Blocks{64, 64}, Blocks{128, 128}}) {
    Case c = masked(name_of("mixture", {size.q}), 4, 4, 128, 128, 1024, ATTN_F16, size);
    c.thinning = on_all_kernels;
    c.sigma = 0.5;
    // Each row has 256 visible keys or more: an eighth EMPTY, half FULL.
    c.mask_kinds = {full, partial, full, full, causal, full, empty, full, partial, full, partial};
    const Data data = make_data(c);
    for (int64_t i = 0; i < c.seqlen_q; ++i) {
      int64_t seen = 0;
      for (int64_t j = 0; j < 1024; ++j) seen += visible(c, data, 0, 0, i, j);
      REQUIRE(seen >= 256);
    }
    const Outputs want = reference_answer(c, data);
    for (const Kernel* kernel : kernels_with_masks()) {
      if (kernel->backend == ATTN_BACKEND_REFERENCE || !share(*kernel, c)) continue;
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F16);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      const Distance off = distance(got, want);
      CHECK(off.max < 1e-3);
      CHECK(off.mean < 1e-5);
    }
  }
}

TEST_CASE("block masks: mixtures of kinds") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t seed = 0;
  for (Blocks size : blocks)
    for (auto [sq, skv] : {std::pair{64, 64}, std::pair{129, 257}, std::pair{300, 77},
                           std::pair{1, 500}, std::pair{200, 400}, std::pair{70, 1300}})
      for (int64_t dim : dims) {
        ++seed;
        const attn_dtype type = seed % 2 ? ATTN_F16 : ATTN_BF16;
        Case c =
            masked(name_of("mix", {size.q, size.k, dim, sq, skv}), 2, 1, dim, sq, skv, type, size);
        c.thinning = shapes_for_devices(seed);
        c.seed = seed;
        c.batch = 2;
        c.mask_per_batch = seed % 2;
        c.mask_per_head = seed % 3 == 0;
        check_case(c, kernels);
        c.name += "-more";
        c.segments[0].lengths = {skv, skv - skv / 3};
        c.flags |= ATTN_SINKS;
        if (seed % 2) c.flags |= ATTN_CAUSAL;
        if (seed % 5 == 0) c.flags |= ATTN_WINDOW, c.window_left = 90, c.window_right = 40;
        if (seed % 3 == 0) c.softcap = 2;
        if (seed % 4 == 0) c.flags |= ATTN_ALIBI;
        if (seed % 7 == 0) c.bias_type = type;
        if (seed % 4 == 1) c.flags |= ATTN_SPLIT_INVARIANT;
        if (skv > 100) {  // three segments, the second at an odd place and shorter than a block
          SegmentCase second = c.segments[0], third = c.segments[0];
          c.segments[0].capacity = 37;
          second.capacity = 50;
          third.capacity = skv - 87;
          c.segments[0].lengths = {37, 11};
          second.lengths = {3, 50};
          third.lengths = {skv - 87, skv - 87};
          c.segments.push_back(second);
          c.segments.push_back(third);
        }
        check_case(c, kernels);
      }
}

// Rows of blocks of which none, the last, or the first and the last are live.
TEST_CASE("block masks: rows with little to see") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t number = 0;
  for (Blocks size : blocks)
    for (uint8_t live : {causal, full, partial})
      for (attn_dtype type : {ATTN_F16, ATTN_BF16})
        for (int64_t dim : dims) {
          if ((type + dim / 64 + live + size.q / 64) % 2) continue;
          // Three rows of blocks of 21 columns, more than a kernel finds at once.
          const int64_t sq = 3 * size.q - 5, skv = 21 * size.k - 3;
          Case c = masked(name_of("little", {size.q, size.k, live, type, dim}), 2, 1, dim, sq, skv,
                          type, size);
          c.thinning = shapes_for_devices(number++);
          c.mask_kinds.assign(63, empty);
          c.mask_kinds[2 * 21 - 1] = live;
          c.mask_kinds[2 * 21] = c.mask_kinds[3 * 21 - 1] = live;
          check_case(c, kernels);
          if (type == ATTN_BF16 || dim != 64) continue;
          c.name += "-none";
          c.mask_kinds = {empty};
          check_case(c, kernels);
          c.name += "-sinks";
          c.flags |= ATTN_SINKS;
          check_case(c, kernels);
        }
}

TEST_CASE("block masks: a long row of blocks") {
  const auto kernels = kernels_here(Op::forward, false);
  for (attn_dtype type : {ATTN_F16, ATTN_BF16}) {
    Case c = masked(name_of("long", {type}), 1, 1, 64, 65, 64 * 300, type, {64, 64});
    c.mask_kinds.assign(600, empty);
    for (size_t n : {7, 140, 141, 299, 300, 520}) c.mask_kinds[n] = n % 2 ? full : partial;
    check_case(c, kernels);
    c.name += "-all";
    c.mask_kinds = {full};
    check_case(c, kernels);
  }
}

// Kernels that find 64 tiles at a time find more of them while they are at work: before the first
// tile, behind it, or later, as many as they know ahead; and of 64 there may be none.
TEST_CASE("block masks: more than 64 tiles") {
  const auto kernels = kernels_with_masks();
  constexpr size_t columns = 150;
  for (int live = 0; live < 8; ++live) {  // of the first tiles that are walked, 149 .. 128
    Case shaped = masked(name_of("tiles", {live}), 1, 1, 64, 65, 64 * columns, ATTN_F32, {64, 64});
    shaped.thinning = many_on_all_kernels(uint64_t(15 + live));
    shaped.mask_kinds.assign(2 * columns, empty);
    for (size_t n = 0; n < 2 * columns; ++n) {
      const size_t column = n % columns;
      uint8_t& kind = shaped.mask_kinds[n];
      if (live == 0) {
        if (n % 7 == 2 || n % 11 == 4) kind = n % 7 == 2 ? full : partial;
      } else if (column >= 128) {
        const size_t from_last = columns - 1 - column;
        if (from_last % 3 != 0 || int(from_last / 3) >= live) continue;
        kind = (n / columns + column) % 2 ? partial : column % 4 ? full : empty;
      } else if (column >= 64 ? column == 64 && live % 2 : column % 9 == 0) {
        kind = n % 2 ? full : causal;
      }
    }
    for (attn_dtype type : {ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FNUZ, ATTN_F32}) {
      if (type == ATTN_F32 && live > 0) continue;
      const Case c = with_type(shaped, type);
      const auto of_case = sharing(kernels, c);
      if (of_case.empty()) continue;
      const Data data = make_data(c);
      const Outputs want = reference_answer(c, data);
      REQUIRE(want.error == "");
      for (const Kernel* kernel : of_case) {
        const Outputs got =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " " << describe(c));
        REQUIRE(got.error == "");
        CHECK(compare(c, data, *kernel, got, want) == "");
      }
    }
  }
}

// Long runs of FULL blocks, broken by others and by segments that end where blocks and tiles do,
// and within them.
TEST_CASE("block masks: runs of FULL blocks") {
  auto kernels = kernels_here(Op::forward, false);
  std::erase_if(kernels, [](const Kernel* kernel) { return emulated(*kernel); });  // slow
  for (int64_t dim : dims) {
    if (dim > 64) std::erase_if(kernels, [](const Kernel* kernel) { return kernel->host; });
    if (kernels.empty()) continue;
    for (uint32_t flags : {0u, uint32_t(ATTN_CAUSAL)})
      for (bool cut : {false, true}) {
        const attn_dtype type = (dim / 64 + flags) % 2 ? ATTN_F16 : ATTN_BF16;
        constexpr int64_t columns = 37;
        Case c = masked(name_of("runs", {dim, flags, cut}), 1, 1, dim, 130, 128 * columns - 9, type,
                        {128, 128});
        c.flags |= flags;
        c.mask_kinds.assign(2 * columns, full);
        for (size_t n : {5, 22, 33}) c.mask_kinds[n] = c.mask_kinds[n + 2] = empty;
        for (size_t n : {7, 31, 36, 40}) c.mask_kinds[n] = partial;
        if (cut) {
          SegmentCase second = c.segments[0], third = c.segments[0];
          c.segments[0].capacity = 1280;  // a multiple of all tiles
          second.capacity = 1000;
          third.capacity = 128 * columns - 9 - 2280;
          c.segments.push_back(second);
          c.segments.push_back(third);
        }
        check_case(c, kernels);
      }
  }
}

// In device memory the arrays are not trusted: kinds that mean nothing and indices out of range
// hide their blocks.
TEST_CASE("block masks: garbage in kinds and index hides blocks") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t number = 0;
  for (Blocks size : blocks)
    for (attn_dtype type : {ATTN_F16, ATTN_BF16})
      for (int64_t dim : dims) {
        if ((type + dim / 64 + size.k / 64) % 2) continue;
        Case c = masked(name_of("garbage", {size.q, size.k, type, dim}), 1, 1, dim, 300, 700, type,
                        size);
        c.thinning = shapes_for_devices(number++);
        c.seed = uint64_t(dim + size.q);
        c.mask_garbage = true;
        check_case(c, kernels);
      }
}

}  // namespace
}  // namespace attn::test
