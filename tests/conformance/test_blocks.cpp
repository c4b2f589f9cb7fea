// ggml's blocks, i8, i4 and nvfp4 as K and V, alone and in one call with segments of q's type: a
// cache whose new tokens are f16 or bf16 and whose old ones are quantised.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "../catch.h"
#include "../types.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

// Of which every segment of decode_sm90_blocks_* may be.
constexpr uint32_t block_types =
    ggml_types | scaled_types | type_bit(ATTN_F8_E4M3FN_TOKEN) | type_bit(ATTN_NVFP4);

// Of few rows, or (prefill) of more than 16, where segments may be of other types too.
Case random_case(uint64_t seed, bool prefill = false) {
  Case c;
  c.name = (prefill ? "prefill-blocks-" : "blocks-") + std::to_string(seed);
  c.thinning = for_devices(prefill ? seed - 1 : seed + 1);
  c.seed = seed;
  Draw draw{seed, 977};
  c.batch = 1 + draw(prefill ? 3 : 4);
  const int64_t heads[] = {1, 2, 2, 4, 8};  // rows of few heads are no multiple of 16 bytes
  c.heads_kv = prefill ? 1 + draw(3) : draw.pick(heads);
  const int64_t groups[] = {1, 2, 3, 4, 8, 16};
  const int64_t group = groups[draw(prefill ? 4 : std::size(groups))];
  c.heads_q = c.heads_kv * group;
  c.seqlen_q = draw.chance(2) ? 1 : 1 + draw(uint64_t(16 / group));
  if (prefill) c.seqlen_q += 16 / group + draw(150);
  static const auto dims =  // of whole blocks
      head_dims(~0u, type_bit(ATTN_Q8_0) | type_bit(ATTN_Q4_0) | type_bit(ATTN_I8), 32);
  draw_head_dims(draw, dims, prefill && draw.chance(4), &c);
  c.q_type = draw.chance(2) ? ATTN_F16 : ATTN_BF16;
  const attn_dtype out_types[] = {ATTN_F32, c.q_type, c.q_type};
  c.out_type = draw.pick(out_types);
  if (draw.chance(3)) draw_lengths_q(draw, &c);
  const attn_dtype types[] = {ATTN_NVFP4, ATTN_F8_E4M3FN_TOKEN,
                              ATTN_Q8_0,  ATTN_Q4_0,
                              ATTN_I8,    ATTN_I4,
                              ATTN_Q4_1,  ATTN_Q5_0,
                              ATTN_Q5_1,  ATTN_IQ4_NL,
                              c.q_type,   ATTN_F8_E4M3FN};
  const bool same = draw.chance(3);
  const attn_dtype k_type = types[draw(10)], v_type = types[draw(10)];
  const int64_t segments = draw.chance(2) ? 2 + draw(4) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 15, 63, 64, 65, 200, 257, 600, 1500};
    s.capacity = capacities[draw(std::size(capacities) - (prefill ? 2 : 0))];
    const uint64_t taken = std::size(types) - (prefill ? 0 : 1);
    s.k_type = same ? k_type : types[draw(taken)];
    s.v_type = same ? v_type : types[draw(taken)];
    if (s.k_type == ATTN_NVFP4) s.k_descale = attn_descale_kind(draw(3));
    if (s.v_type == ATTN_NVFP4) s.v_descale = attn_descale_kind(draw(3));
    s.layout = attn_layout(draw.chance(2) ? 2 : draw(3));
    const int32_t page_sizes[] = {16, 32, 48, 64, 128, 256};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    const Arrange arranges[] = {Arrange::contiguous, Arrange::contiguous, Arrange::padded,
                                Arrange::head_major, Arrange::interleaved};
    s.arrange = draw.pick(arranges);
    // Between each other's heads v is not at a multiple of 16 bytes.
    if ((s.k_type != s.v_type || c.head_dim < 256 || prefill) && s.arrange == Arrange::interleaved)
      s.arrange = Arrange::padded;
    if (prefill && dtype_is_ggml(s.k_type) && dtype_is_ggml(s.v_type) && draw.chance(4))
      s.arrange = Arrange::odd;
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
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(5)) c.softcap = 3;
  if (draw.chance(6)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(3)) c.max_sms = int32_t(1 + draw(40));
  const double sigmas[] = {0.5, 1, 1, 3};
  c.sigma = draw.pick(sigmas);
  if (draw.chance(8)) c.tree_keys = prefill ? 0 : 1 + draw(128);
  if (!prefill || !c.lengths_q.empty() || !draw.chance(3)) return c;
  for (SegmentCase& s : c.segments)
    if (s.layout == ATTN_PAGED) s.layout = ATTN_PADDED;
  c.flags = (c.flags & ~uint32_t(ATTN_ALIBI | ATTN_SPLIT_INVARIANT)) | ATTN_BLOCK_MASK;
  c.softcap = 0;
  c.block_q = draw.chance(2) ? 64 : 128;
  c.block_k = draw.chance(2) ? 64 : 128;
  c.mask_per_head = draw.chance(2);
  return c;
}

const AddRandomFamily added("blocks", [](uint64_t seed) { return random_case(seed); });

TEST_CASE("blocks: random segments of ggml's types, i8, i4, nvfp4 and q's type") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 120; ++seed) check_case(random_case(seed), kernels);
}

TEST_CASE("blocks: random segments of any types, many rows") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 80; ++seed) check_case(random_case(seed, true), kernels);
}

// Few heads, one query, many keys.
Case token_case(const char* name, attn_dtype k_type, attn_dtype v_type, int64_t keys) {
  Case c;
  c.name = name;
  c.thinning = on_all_kernels;
  c.heads_q = 8;
  c.heads_kv = 4;
  c.head_dim = c.head_dim_v = 64;
  c.q_type = ATTN_F16;
  c.out_type = ATTN_F32;
  SegmentCase s;
  s.k_type = k_type;
  s.v_type = v_type;
  s.capacity = keys;
  c.segments = {s};
  return c;
}

void check_cut(uint64_t number, attn_dtype type, double sigma, uint32_t mask) {
  Case whole = token_case("whole", type, type, 700);
  whole.batch = 2;
  whole.seqlen_q = 3;
  whole.sigma = sigma;
  whole.flags = mask | ATTN_SINKS | ATTN_SPLIT_INVARIANT;
  if (mask & ATTN_WINDOW) whole.window_left = 330;
  Case pieces = whole;
  pieces.thinning = on_all_kernels_in_turn(number);
  pieces.segments.clear();
  Draw draw{uint64_t(sigma * 10), 19};
  for (int64_t left = 700; left > 0;) {
    SegmentCase s = whole.segments[0];
    s.capacity = pieces.segments.size() == 4 ? left : std::min<int64_t>(left, draw(300));
    left -= s.capacity;
    s.layout = attn_layout(draw(3));
    s.page_size = 16 << draw(3);
    s.lengths.assign(2, int32_t(s.capacity));
    s.capacity = std::max<int64_t>(1, s.capacity);
    pieces.segments.push_back(s);
  }
  const Data data_of_whole = make_data(whole), data_of_pieces = make_data(pieces);
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!share(*kernel, pieces)) continue;
    Backend& backend = backend_of(kernel->backend);
    const Outputs uncut = run_forward(backend, whole, data_of_whole, kernel->name, ATTN_F32);
    if (declined(*kernel, uncut)) continue;
    INFO(kernel->name << " " << describe(pieces));
    const Outputs got = run_forward(backend, pieces, data_of_pieces, kernel->name, ATTN_F32);
    REQUIRE(got.error == "");
    CHECK(largest_difference(got, uncut) < 1e-4);
  }
}

TEST_CASE("blocks: a cut into segments changes nothing") {
  uint64_t number = 0;
  for (const attn_dtype type : list_of(block_types)) {
    for (const double sigma : {0.5, 1.0, 3.0}) check_cut(number++, type, sigma, ATTN_CAUSAL);
    check_cut(number++, type, 1, ATTN_CAUSAL | ATTN_WINDOW);
  }
}

// Few multiprocessors have many units each, so a block of decode_sm90_blocks_* has 2 or 4 K/V heads
// at once, if heads are where it can read them together. test_decode_blocks.cpp has that it does.
Case heads_case(uint64_t seed, int64_t dim, attn_dtype k_type) {
  const auto types = list_of(block_types | type_bit(ATTN_F16));
  Draw draw{seed, 431};
  const attn_dtype v_type = types[draw(std::size(types))];
  Case c = token_case("heads", k_type, v_type, 0);
  c.name += "-" + std::to_string(seed);
  c.seed = seed;
  c.thinning = for_devices(seed);
  // Four heads, and with an odd number of pairs two.
  const int64_t heads[] = {4, 6, 8};
  c.heads_kv = draw.pick(heads);
  const int64_t group = 1 + draw(2);
  c.heads_q = group * c.heads_kv;
  c.seqlen_q = 1 + draw(uint64_t(16 / group));
  c.head_dim = c.head_dim_v = dim;
  c.batch = 2 + draw(2);
  c.max_sms = 1;
  c.flags = ATTN_CAUSAL | ATTN_SINKS | (draw.chance(2) ? ATTN_ALIBI : 0);
  if (draw.chance(3)) c.tree_keys = 1 + draw(100);
  c.segments.clear();
  for (int n = 0; n < 3; ++n) {
    SegmentCase of;
    of.k_type = n == 1 ? v_type : k_type;
    of.v_type = n == 1 ? k_type : v_type;
    if (of.k_type == ATTN_NVFP4) of.k_descale = ATTN_DESCALE_HEAD;
    if (of.v_type == ATTN_NVFP4) of.v_descale = ATTN_DESCALE_HEAD;
    of.capacity = 900;
    of.layout = attn_layout(draw(3));
    of.page_size = 16 << draw(4);
    draw_lengths(draw, c.batch, &of);
    c.segments.push_back(of);
  }
  return c;
}

TEST_CASE("blocks: several heads at once") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t seed = 0;
  for (const int64_t dim : {64, 128, 256})
    for (const attn_dtype k_type : list_of(block_types | type_bit(ATTN_F16)))
      check_case(heads_case(++seed, dim, k_type), kernels);
}

// For compute-sanitizer, whose racecheck takes more than five minutes for those above. Capacities
// make a block have several heads, and lengths the units that it has.
TEST_CASE("blocks: several heads of few keys") {
  auto kernels = kernels_here(Op::forward, false);
  std::erase_if(kernels, [](const Kernel* kernel) {
    return kernel->backend != ATTN_BACKEND_CPU &&
           std::string(kernel->name).find("decode_sm90_blocks_") != 0;
  });
  uint64_t seed = 100;
  for (const auto& [dim, k_type] : {std::pair(64, ATTN_I4),
                                    {128, ATTN_Q5_1},
                                    {256, ATTN_Q8_0},
                                    {64, ATTN_NVFP4},
                                    {128, ATTN_NVFP4},
                                    {256, ATTN_NVFP4}}) {
    Case c = heads_case(++seed, dim, k_type);
    for (SegmentCase& s : c.segments)
      for (int32_t& length : s.lengths) length %= 130;
    check_case(c, kernels);
  }
}

// A thread block has one sequence after the other, and scales and descales are those of each.
TEST_CASE("blocks: scales of sequence after sequence") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t seed = 0;
  for (const attn_dtype type : {ATTN_I8, ATTN_I4, ATTN_F8_E4M3FN_TOKEN, ATTN_NVFP4}) {
    for (const attn_layout layout : {ATTN_PADDED, ATTN_PACKED, ATTN_PAGED}) {
      for (const int64_t heads : {1, 4}) {
        Case c = token_case("sequences", type, type, 150);
        c.name += "-" + std::to_string(++seed);
        c.seed = seed;
        c.thinning = for_devices(seed);
        c.batch = 6;
        c.heads_kv = heads;
        c.heads_q = 2 * heads;
        c.max_sms = 1;
        c.flags = ATTN_CAUSAL;
        c.segments[0].layout = layout;
        c.segments[0].lengths = {150, 64, 1, 0, 97, 128};
        if (type == ATTN_NVFP4)
          c.segments[0].k_descale = c.segments[0].v_descale = ATTN_DESCALE_HEAD;
        check_case(c, kernels);
      }
    }
  }
}

// V of i4 is read by fours where every segment's is i4 or nvfp4, else byte by byte.
TEST_CASE("blocks: i4 beside another type") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t seed = 0;
  for (const int64_t dim : {64, 128, 256}) {
    for (const attn_dtype type : {ATTN_Q4_0, ATTN_F16}) {
      Case c = token_case("beside", ATTN_I4, ATTN_I4, 100);
      c.name += "-" + std::to_string(++seed);
      c.seed = seed;
      c.thinning = for_devices(seed);
      c.head_dim = c.head_dim_v = dim;
      SegmentCase other = c.segments[0];
      other.k_type = other.v_type = type;
      c.segments.push_back(other);
      check_case(c, kernels);
    }
  }
}

// ---- bytes worked by hand ----------------------------------------------------------------------

constexpr uint16_t half_code = 0x3800, one_code = 0x3c00;  // 0.5 and 1 as f16

// The block of number n among those of a segment's K or V.
unsigned char* block_of(Buffer& buffer, attn_dtype type, int64_t n) {
  return buffer.data() + n * dtype_bytes(type);
}
void set_scale(unsigned char* block, uint16_t scale) {
  std::memcpy(block, &scale, 2);
}
bool has_min(attn_dtype type) {
  return type == ATTN_Q4_1 || type == ATTN_Q5_1;
}

// Fills a block with codes and sets its scale of 0.5 or 1, and a minimum.
void fill_block(unsigned char* block, attn_dtype type, int64_t n, int factor, int more) {
  for (int64_t i = 0; i < dtype_bytes(type); ++i)
    block[i] = uint8_t(factor * i + (2 * factor + 13) / 7 * n + more);
  set_scale(block, n % 3 == 0 ? half_code : one_code);
  if (has_min(type)) set_scale(block + 2, n % 2 ? 0xc100 : 0x4280);  // -2.5, 3.25
}
// What ggml's bytes say: block n has d = 0.5 or 1, and m = -2.5 or 3.25 for q4_1 and q5_1. Code i
// of q8_0 is a byte as it is. Others have the low half of a byte for i < 16, the high half of byte
// i - 16 above; of five bits bit i of the word before is 16. d multiplies the code less 8 (q4_0) or
// 16 (q5_0), or what iq4_nl has for it.
double value_of(const unsigned char* block, attn_dtype type, int64_t n, int i) {
  constexpr int iq4_nl[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};
  const bool has_bit = type == ATTN_Q5_0 || type == ATTN_Q5_1;
  const unsigned char* const bits = block + (has_min(type) ? 4 : 2);
  const unsigned char* const codes = bits + (has_bit ? 4 : 0);
  const double d = n % 3 == 0 ? 0.5 : 1, m = !has_min(type) ? 0 : n % 2 ? -2.5 : 3.25;
  if (type == ATTN_Q8_0) return d * (codes[i] < 128 ? codes[i] : codes[i] - 256);
  int code = i < 16 ? codes[i] % 16 : codes[i - 16] / 16;
  if (has_bit && bits[i / 8] >> i % 8 & 1) code += 16;
  if (type == ATTN_Q4_0) code -= 8;
  if (type == ATTN_Q5_0) code -= 16;
  return d * (type == ATTN_IQ4_NL ? iq4_nl[code] : code) + m;
}

// One key, so that out is its value, whatever the scores are.
TEST_CASE("blocks: values are what ggml's bytes say") {
  for (const attn_dtype type : list_of(ggml_types)) {
    for (const int64_t dim : largest_head_dims(~0u)) {
      Case c = token_case("one-key", type, type, 1);
      c.head_dim = c.head_dim_v = dim;
      Data data = make_data(c);
      std::vector<double> want;
      for (int64_t n = 0; n < c.heads_kv * dim / 32; ++n) {
        unsigned char* block = block_of(data.segments[0].v, type, n);
        fill_block(block, type, n, 37, 5);
        for (int i = 0; i < 32; ++i) want.push_back(value_of(block, type, n, i));
      }
      for (const Kernel* kernel : kernels_here(Op::forward, true)) {
        if (!share(*kernel, c)) continue;
        const Outputs got =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " " << dtype_name(type) << " head_dim " << dim);
        REQUIRE(got.error == "");
        for (int64_t h = 0; h < c.heads_q; ++h)
          for (int64_t d = 0; d < dim; ++d)
            REQUIRE(within_a_step(got.out[size_t(h * dim + d)], want[size_t(h / 2 * dim + d)]));
      }
    }
  }
}

// nvfp4's bytes: the even element's code in the lower half, e2m1; e4m3 scales of 16 elements, 2^-6
// to 2^8 and subnormal ones, of which one is NaN, for its own elements alone.
TEST_CASE("blocks: values are what nvfp4's bytes say") {
  constexpr double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (const int64_t dim : {64, 128, 256}) {
    Case c = token_case("one-key", ATTN_NVFP4, ATTN_NVFP4, 1);
    c.head_dim = c.head_dim_v = dim;
    Data data = make_data(c);
    std::vector<double> want;
    for (int64_t n = 0; n < c.heads_kv * dim / 16; ++n) {
      const uint8_t code = n == 5 ? 0x7f : n % 4 == 3 ? uint8_t(n % 8) : uint8_t(8 * (n % 15 + 1));
      const double scale = n == 5     ? NAN
                           : code < 8 ? std::ldexp(code, -9)
                                      : std::ldexp(1, code / 8 - 7);
      data.segments[0].v_scale.data()[n] = code;
      for (int i = 0; i < 16; i += 2) {
        const auto byte = uint8_t(37 * i + 11 * n + 5);
        data.segments[0].v.data()[8 * n + i / 2] = byte;
        for (const int nibble : {byte % 16, byte / 16})
          want.push_back((nibble < 8 ? 1 : -1) * e2m1[nibble % 8] * scale);
      }
    }
    for (const Kernel* kernel : kernels_here(Op::forward, true)) {
      if (!share(*kernel, c)) continue;
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " head_dim " << dim);
      REQUIRE(got.error == "");
      for (int64_t h = 0; h < c.heads_q; ++h)
        for (int64_t d = 0; d < dim; ++d) {
          const double x = got.out[size_t(h * dim + d)], y = want[size_t(h / 2 * dim + d)];
          INFO("head " << h << " column " << d << ": " << x << ", expected " << y);
          // The weight's base is a score in float32; another code or scale is 2^-4 away or more.
          REQUIRE((std::isnan(y) ? std::isnan(x) : std::abs(x - y) <= 2e-6 * std::abs(y)));
        }
    }
  }
}

// One key and a query that is 1 at one column and 0 elsewhere: lse is the key's value there. All
// columns in turn.
TEST_CASE("blocks: keys are what ggml's bytes say") {
  uint64_t number = 0;
  for (const attn_dtype type : list_of(ggml_types)) {
    for (int64_t first = 0; first < 128; first += 16) {
      Case c = token_case("one-key", type, type, 1);
      c.thinning = on_all_kernels_in_turn(number++);
      c.head_dim = c.head_dim_v = 128;
      c.heads_kv = 2;
      c.heads_q = 32;
      c.scale = 1;
      Data data = make_data(c);
      for (int64_t n = 0; n < c.heads_kv * 4; ++n)
        fill_block(block_of(data.segments[0].k, type, n), type, n, 41, 3);
      std::memset(data.q.data(), 0, data.q.size());
      for (int64_t h = 0; h < c.heads_q; ++h)
        data.q.as<uint16_t>()[h * 128 + first + h % 16] = one_code;
      for (const Kernel* kernel : kernels_here(Op::forward, true)) {
        if (!share(*kernel, c)) continue;
        const Outputs got =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " " << dtype_name(type) << " columns from " << first);
        REQUIRE(got.error == "");
        for (int64_t h = 0; h < c.heads_q; ++h) {
          const int64_t column = h / 16 * 128 + first + h % 16, n = column / 32;
          const double want =
              value_of(block_of(data.segments[0].k, type, n), type, n, int(column % 32));
          CHECK(std::abs(got.lse[size_t(h)] - want) <= 1e-7 + 1e-6 * std::abs(want));
        }
      }
    }
  }
}

TEST_CASE("blocks: scales of 0, subnormal, infinite and NaN") {
  constexpr uint16_t zero = 0, subnormal = 0x0123, infinite = 0x7c00, nan = 0x7e01;
  uint64_t number = 0;
  for (const attn_dtype type : list_of(ggml_types)) {
    for (const bool of_v : {false, true}) {
      for (const uint16_t scale : {zero, subnormal, infinite, nan}) {
        if (!of_v && scale == infinite) continue;  // inf - inf, or a weight of 1: as it comes
        Case c = token_case("scales", type, type, 100);
        c.thinning = on_all_kernels_in_turn(number++);
        Data data = make_data(c);
        // Of K/V head 1, keys 7 and 90; all others as they are.
        Buffer& buffer = of_v ? data.segments[0].v : data.segments[0].k;
        for (const int64_t key : {7, 90}) {
          unsigned char* const block = block_of(buffer, type, (key * c.heads_kv + 1) * 2 + 1);
          set_scale(block, scale);
          if (has_min(type)) set_scale(block + 2, key == 7 ? scale : one_code);
        }
        const Outputs want = reference_answer(c, data);
        REQUIRE(want.error == "");
        for (const Kernel* kernel : kernels_here(Op::forward, true)) {
          if (!share(*kernel, c)) continue;
          const Outputs got =
              run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
          if (declined(*kernel, got)) continue;
          INFO(kernel->name << " " << dtype_name(type) << (of_v ? " v" : " k") << " scale "
                            << scale);
          REQUIRE(got.error == "");
          const auto agree = [](double x, double y) {
            if (!std::isfinite(y)) return !std::isfinite(x);
            return std::abs(x - y) < 2e-3;
          };
          for (size_t n = 0; n < want.out.size(); ++n) REQUIRE(agree(got.out[n], want.out[n]));
          for (size_t n = 0; n < want.lse.size(); ++n) REQUIRE(agree(got.lse[n], want.lse[n]));
        }
      }
    }
  }
}

// V of one size throughout: weights times scales must not fall below what f16 has.
TEST_CASE("blocks: values of any size keep their digits") {
  uint64_t number = 0;
  for (const attn_dtype type : list_of(ggml_types)) {
    for (const int exponent : {-20, -10, 0, 8}) {
      Case c = token_case("sizes", type, type, 300);
      c.thinning = on_all_kernels_in_turn(number++);
      Data data = make_data(c);
      for (const Kernel* kernel : kernels_here(Op::forward, true)) {
        if (!share(*kernel, c)) continue;
        const Outputs plain =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        if (declined(*kernel, plain)) continue;
        // One scale for all, and one minimum.
        const auto with_scales = [&](int of) {
          for (int64_t n = 0; n < 300 * c.heads_kv * 2; ++n) {
            unsigned char* const block = block_of(data.segments[0].v, type, n);
            set_scale(block, f16_code(std::exp2(of)));
            if (has_min(type)) set_scale(block + 2, f16_code(-5 * std::exp2(of)));
          }
          return run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        };
        const Outputs unit = with_scales(0), got = with_scales(exponent);
        INFO(kernel->name << " " << dtype_name(type) << " 2^" << exponent);
        REQUIRE(got.error == "");
        for (size_t n = 0; n < got.out.size(); ++n) {
          const double want = unit.out[n] * std::exp2(exponent);
          REQUIRE(std::abs(got.out[n] - want) <= 1e-3 * std::exp2(exponent));
        }
      }
    }
  }
}

}  // namespace
}  // namespace attn::test
