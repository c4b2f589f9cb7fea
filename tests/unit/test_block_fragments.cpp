// kernels/decode/own_elements.cuh on the host, lane by lane: what the matrix unit gets of ggml's
// blocks, and of i8, i4 and nvfp4.
// Instructions are as the PTX manual describes them.
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "catch.h"
#include "core/dtype.h"
#include "core/types.h"

#define __device__
#define __forceinline__ inline

struct float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
};

namespace {
struct {
  unsigned x = 0;
} threadIdx;
std::vector<unsigned char> shared;  // memory

// Byte i of the result is byte selector[i] of b:a, counted from a's lowest.
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = a | uint64_t{b} << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((low | uint64_t{high} << 32) >> (by & 31));
}
float __int_as_float(int bits) {
  return std::bit_cast<float>(bits);
}
}  // namespace

// In place of the headers with inline assembly.
#define ATTN_KERNELS_PTX_CONVERT_H
#define ATTN_KERNELS_PTX_CONVERT_FP8_H
#define ATTN_KERNELS_PTX_MMA_H
#define ATTN_KERNELS_PTX_F16X2_H
#define ATTN_KERNELS_PTX_LDMATRIX_H
#define ATTN_KERNELS_PTX_LOAD_SHARED_H
#define ATTN_KERNELS_PTX_LOP3_H
#define ATTN_KERNELS_PTX_BIT_SELECT_H
namespace attn::ptx {
namespace {
using Fragment = unsigned[4];
void mma_f16(float (&)[4], const Fragment&, unsigned, unsigned) {}
void mma_bf16(float (&)[4], const Fragment&, unsigned, unsigned) {}
unsigned pack_f16(float low, float high) {
  return f16_code(low) | unsigned(f16_code(high)) << 16;
}
unsigned pack_bf16(float low, float high) {
  return bf16_code(low) | unsigned(bf16_code(high)) << 16;
}
unsigned f16_of_e4m3(unsigned short pair) {
  return pack_f16(e4m3fn_values[pair & 0xff], e4m3fn_values[pair >> 8]);
}
unsigned f16_of_e5m2(unsigned short pair) {
  return pack_f16(e5m2_values[pair & 0xff], e5m2_values[pair >> 8]);
}
void f16_of_e4m3_word(unsigned word, unsigned* low, unsigned* high) {
  *low = f16_of_e4m3(uint16_t(word)), *high = f16_of_e4m3(uint16_t(word >> 16));
}
void f16_of_e5m2_word(unsigned word, unsigned* low, unsigned* high) {
  *low = f16_of_e5m2(uint16_t(word)), *high = f16_of_e5m2(uint16_t(word >> 16));
}
float unpack_f16(unsigned short code) {
  return f16_value(code);
}
float unpack_bf16(unsigned short code) {
  return bf16_value(code);
}
// A first round over all lanes notes the addresses that they give, a second one reads.
std::vector<unsigned> given[32];
size_t next_given = 0;
bool noting = false;
void ldmatrix(Fragment& d, unsigned from) {
  const size_t lane = threadIdx.x, n = next_given++;
  if (noting) given[lane].push_back(from);
  for (size_t m = 0; m < 4 && !noting; ++m) {
    REQUIRE(given[8 * m + lane / 4].at(n) % 16 == 0);
    std::memcpy(&d[m], &shared.at(given[8 * m + lane / 4][n] + lane % 4 * 4), 4);
  }
}
void ldmatrix_transposed(Fragment& d, unsigned from) {
  const size_t lane = threadIdx.x, n = next_given++;
  if (noting) given[lane].push_back(from);
  for (size_t m = 0; m < 4 && !noting; ++m) {
    d[m] = 0;
    for (size_t i = 0; i < 2; ++i) {
      uint16_t x;
      std::memcpy(&x, &shared.at(given[8 * m + lane % 4 * 2 + i].at(n) + lane / 4 * 2), 2);
      d[m] |= unsigned(x) << 16 * i;
    }
  }
}
unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  const auto one = [&](int shift) {  // exact in float64 before it is rounded
    return f16_code(double(f16_value(uint16_t(a >> shift))) * f16_value(uint16_t(b >> shift)) +
                    f16_value(uint16_t(c >> shift)));
  };
  return one(0) | unsigned(one(16)) << 16;
}
unsigned add_f16x2(unsigned a, unsigned b) {
  return fma_f16x2(a, 0x3c003c00, b);
}
unsigned mul_f16x2(unsigned a, unsigned b) {
  return fma_f16x2(a, b, 0x80008000);
}
unsigned and_or(unsigned a, unsigned b, unsigned c) {
  return (a & b) | c;
}
unsigned and_xor(unsigned a, unsigned b, unsigned c) {
  return (a & b) ^ c;
}
unsigned bit_select(unsigned of_a, unsigned a, unsigned b) {
  return (a & of_a) | (b & ~of_a);
}
unsigned load_shared(unsigned from) {
  REQUIRE(from % 4 == 0);
  unsigned x;
  std::memcpy(&x, &shared.at(from), sizeof x);
  return x;
}
uint2 load_shared_pair(unsigned from) {
  REQUIRE(from % 8 == 0);
  return {load_shared(from), load_shared(from + 4)};
}
unsigned load_shared_half(unsigned from) {
  REQUIRE(from % 2 == 0);
  uint16_t x;
  std::memcpy(&x, &shared.at(from), sizeof x);
  return x;
}
}  // namespace
}  // namespace attn::ptx

#include "kernels/decode/own_elements.cuh"

using namespace attn;
using namespace attn::decode;

namespace {

// 16 keys of random blocks whose scales, and minima, are a number of their own each.
void fill(attn_dtype type, int columns, int pitch, int shift) {
  shared.assign(size_t(16 * pitch + 64), 0);
  uint32_t state = 1;
  for (unsigned char& byte : shared) byte = (state = state * 1664525 + 1013904223) >> 24;
  for (int key = 0; key < 16; ++key)
    for (int block = 0; block < columns / 32; ++block) {
      const uint16_t scale = f16_code(1 + (key * 8 + block) / 128.0);
      unsigned char* const to = &shared[size_t(key * pitch + shift + block * dtype_bytes(type))];
      std::memcpy(to, &scale, 2);
      const uint16_t min = f16_code(-2 - (key * 8 + block) / 128.0);
      if (block_layout(type).has_min) std::memcpy(to + 2, &min, 2);
    }
}
double scale_of(int key, int block) {
  return f16_value(f16_code(1 + (key * 8 + block) / 128.0));
}
double min_of(int key, int block) {
  return f16_value(f16_code(-2 - (key * 8 + block) / 128.0));
}

float half_of(unsigned pair, int i) {
  return f16_value(uint16_t(pair >> 16 * i));
}
// K's operands of 32 columns of keys g and g + 8, in the order that Q has too. code(key, column).
template <class Code>
void check_k(const unsigned (&a)[2][4], attn_dtype type, int lane, Code&& code,
             std::vector<int>* seen) {
  const KeyOrder order = key_order(type);
  for (int word = 0; word < 4; ++word)
    for (int i = 0; i < 2; ++i) {
      const int column =
          lane % 4 * order.lane + word % 2 * order.odd + word / 2 * order.upper + i * order.other;
      ++seen->at(size_t(column));
      for (int half = 0; half < 2; ++half) {
        const double got = half_of(a[word / 2][word % 2 * 2 + half], i),
                     want = code(lane / 4 + 8 * half, column);
        if (below_normal(type))
          REQUIRE(got * column_factor(type, word / 2) * scores_factor == want + code_offset(type));
        else
          REQUIRE(got == want);
      }
    }
}
// V's of 32 columns of keys 2t, 2t + 1, 2t + 8 and 2t + 9.
template <class Code>
void check_v(const unsigned (&a)[2][4], int lane, Code&& code) {
  for (int tile = 0; tile < 2; ++tile)
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 2; ++i)
        REQUIRE(half_of(a[tile][j], i) ==
                code(lane % 4 * 2 + i + j / 2 * 8, 16 * tile + lane / 4 * 2 + j % 2));
}

// Lane g, t holds A(g, 2t..), A(g+8, 2t..), A(g, 2t+8..), A(g+8, 2t+8..) of each 16 columns.
template <class Block, int columns>
void check(int shift, int pitch = block_pitch(Block::type, columns)) {
  using Rows = BlockRows<Block, columns>;
  constexpr attn_dtype type = attn_dtype(Block::type);
  constexpr bool has_min = Block::layout.has_min;
  fill(type, columns, pitch, shift);
  const auto code = [&](int key, int column) {
    const double value = decode_element(type, &shared[size_t(key * pitch + shift)], column),
                 min = has_min ? min_of(key, column / 32) : 0;
    return (value - min) / scale_of(key, column / 32);
  };
  for (int n = 0; n < Rows::blocks; ++n) {
    std::vector<int> columns_seen(32);
    const auto of_block = [&](int key, int column) { return code(key, 32 * n + column); };
    for (int lane = 0; lane < 32; ++lane) {
      threadIdx.x = unsigned(lane);
      const int g = lane / 4, t = lane % 4;
      unsigned a[2][4];
      const unsigned rows[2] = {unsigned(g * pitch + shift), unsigned((g + 8) * pitch + shift)};
      Rows::load_k(a, rows, n, t);
      const KeyScales keys = Rows::k_scales(rows, n);
      REQUIRE(keys.scale.x == scale_of(g, n));
      REQUIRE(keys.scale.y == scale_of(g + 8, n));
      REQUIRE(keys.min.x == (has_min ? min_of(g, n) : 0));
      REQUIRE(keys.min.y == (has_min ? min_of(g + 8, n) : 0));
      check_k(a, type, lane, of_block, &columns_seen);
      unsigned v_rows[4];
      for (int i = 0; i < 4; ++i) v_rows[i] = unsigned((2 * t + v_key(i)) * pitch + shift);
      Rows::load_v(a, v_rows, n, g);
      check_v(a, lane, of_block);
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
          const int key = 2 * t + j + 8 * i;
          REQUIRE(half_of(Rows::v_scales(v_rows, n, i), j) == scale_of(key, n));
          if (has_min) REQUIRE(half_of(Rows::v_scales(v_rows, n, i, 2), j) == min_of(key, n));
        }
    }
    for (const int seen : columns_seen) REQUIRE(seen == 8);  // lanes g
  }
}

template <class Block>
void check_block() {
  for (const int shift : {0, 4, 8, 12}) check<Block, 64>(shift);
  for (const int shift : {0, 8}) check<Block, 128>(shift);
  check<Block, 256>(0);
  // The second head of a row of several.
  const OwnPlace d64 = own_place(Block::type, 64, 4), d128 = own_place(Block::type, 128, 4);
  if (d64.heads > 1) check<Block, 64>(d64.head_bytes, d64.pitch);
  if (d128.heads > 1) check<Block, 128>(d128.head_bytes, d128.pitch);
}

}  // namespace

TEST_CASE("decode blocks: what lanes get of codes and scales", "[kernels]") {
  int types = 0;
  for (int type = 0; type < end_of_dtypes; ++type)
    types += with_block(type, [](auto block) { check_block<decltype(block)>(); });
  CHECK(types == std::popcount(ggml_types));
}

// of(lane, note) for a warp's lanes: those that note addresses, then those that read.
template <class Of>
void with_lanes(Of&& of) {
  for (const bool note : {true, false})
    for (unsigned lane = 0; lane < 32; ++lane) {
      ptx::noting = note;
      ptx::next_given = 0;
      if (note) ptx::given[lane].clear();
      threadIdx.x = lane;
      of(int(lane), note);
    }
}

// Warp 1's keys of i8 and i4, whose chunks are swizzled as the PTX manual says for panels of so
// many bytes: of an address in them bits 4.. are exclusive-ored with bits 7.., 1 of 32 bytes, 2 of
// 64, 3 of 128. Rows have `heads` heads, of which the keys are of number `head`.
template <class Codes, attn_dtype type, int columns>
void check_codes(int heads = 1, int head = 0) {
  using P = typename Codes::P;
  constexpr int row_bytes = type == ATTN_I4 ? columns / 2 : columns;
  const int pitch = heads * P::pitch, panel_size = unit_keys * pitch;
  constexpr int first = 16;
  shared.assign(size_t(heads * row_bytes * unit_keys), 0);
  std::vector<std::vector<unsigned char>> rows(16, std::vector<unsigned char>(row_bytes));
  uint32_t state = 5;
  for (int key = 0; key < 16; ++key)
    for (int byte = 0; byte < row_bytes; ++byte) {
      rows[key][byte] = (state = state * 1664525 + 1013904223) >> 24;
      if (type == ATTN_F8_E4M3FN_TOKEN && rows[key][byte] % 128 == 127) --rows[key][byte];  // NaN
      unsigned at = unsigned((first + key) * pitch + head * P::pitch + byte % P::pitch);
      at ^= (at >> 7 & unsigned(pitch / 16 - 1)) << 4;
      shared[size_t(byte / P::pitch * panel_size) + at] = rows[key][byte];
    }
  const auto code = [&](int key, int column) {
    return decode_element(type, rows[key].data(), column);
  };
  const unsigned warp_rows = unsigned(first * pitch);
  std::vector<int> columns_seen(columns);
  with_lanes([&](int lane, bool note) {
    const unsigned k_lane = lane_of_matrices(warp_rows, lane, pitch, head * P::pitch);
    for (int n = 0; n < columns / 64; ++n) {
      unsigned a[2][2][4];
      Codes::load_k(a, k_lane, n);
      for (int i = 0; i < 2 && !note; ++i) {
        std::vector<int> seen(32);
        const int from = 64 * n + 32 * i;
        check_k(
            a[i], type, lane, [&](int key, int column) { return code(key, from + column); }, &seen);
        for (int column = 0; column < 32; ++column)
          columns_seen[size_t(from + column)] += seen[size_t(column)];
      }
    }
    if constexpr (type == ATTN_I4) {
      for (int two = 0; two < columns / 64; ++two) {
        unsigned a[2][2][4];
        Codes::load_v_by_fours(a, k_lane, two);
        for (int tile = 0; tile < 4 && !note; ++tile)
          for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 2; ++i)
              REQUIRE(half_of(a[tile / 2][tile % 2][j], i) ==
                      code(lane % 4 * 2 + i + j / 2 * 8,
                           64 * two + tile / 2 * 32 + lane / 4 * 4 + tile % 2 * 2 + j % 2));
      }
      if (heads > 1) return;
    }
    const unsigned v_lane = type == ATTN_I4 ? I4<columns>::v_lane(warp_rows, lane) : k_lane;
    for (int n = 0; n < columns / 32; ++n) {
      unsigned a[2][4];
      Codes::load_v(a, v_lane, n, lane / 4);
      if (!note) check_v(a, lane, [&](int key, int column) { return code(key, 32 * n + column); });
    }
  });
  for (const int seen : columns_seen) REQUIRE(seen == 8);
}

TEST_CASE("decode blocks: what lanes get of codes of 8 and 4 bits", "[kernels]") {
  check_codes<E4m3Codes<64>, ATTN_F8_E4M3FN_TOKEN, 64>();
  check_codes<E4m3Codes<128>, ATTN_F8_E4M3FN_TOKEN, 128>();
  check_codes<E4m3Codes<256>, ATTN_F8_E4M3FN_TOKEN, 256>();
  check_codes<I8<64>, ATTN_I8, 64>();
  check_codes<I8<128>, ATTN_I8, 128>();
  check_codes<I8<256>, ATTN_I8, 256>();
  check_codes<E4m3Codes<64>, ATTN_F8_E4M3FN_TOKEN, 64>(2, 1);
  check_codes<I8<64>, ATTN_I8, 64>(2, 1);
  for (const int head : {0, 1}) check_codes<I4<64>, ATTN_I4, 64>(2, head);
  for (const int head : {0, 1, 3}) check_codes<I4<64>, ATTN_I4, 64>(4, head);
  for (const int head : {0, 1}) check_codes<I4<128>, ATTN_I4, 128>(2, head);
  check_codes<I4<64>, ATTN_I4, 64>();
  check_codes<I4<128>, ATTN_I4, 128>();
  check_codes<I4<256>, ATTN_I4, 256>();
}

// Elements of nvfp4, exactly: each code times the scale of its 16 columns and no other's.
template <int columns>
void check_nvfp4() {
  using Codes = NvFp4<columns>;
  using P = typename Codes::P;
  constexpr int row_bytes = columns / 2, panel_size = unit_keys * P::pitch, first = 16;
  constexpr int scales_at = row_bytes * unit_keys, scale_row = columns / 16;
  shared.assign(size_t(scales_at + 16 * scale_row), 0);
  std::vector<std::vector<double>> real(16, std::vector<double>(columns));
  uint32_t state = 9;
  const auto next = [&] { return uint8_t((state = state * 1664525 + 1013904223) >> 24); };
  for (int key = 0; key < 16; ++key) {
    std::vector<uint8_t> codes(row_bytes);
    for (int byte = 0; byte < row_bytes; ++byte) {
      codes[size_t(byte)] = next();
      unsigned at = unsigned((first + key) * P::pitch + byte % P::pitch);
      at ^= (at >> 7 & (P::pitch / 16 - 1)) << 4;
      shared[size_t(byte / P::pitch * panel_size) + at] = codes[size_t(byte)];
    }
    for (int n = 0; n < scale_row; ++n) {
      const uint8_t code = next();
      const uint8_t scale = code % 128 == 127 ? 1 : code;  // no NaN
      shared[size_t(scales_at + key * scale_row + n)] = scale;
      for (int column = 16 * n; column < 16 * (n + 1); ++column)
        real[size_t(key)][size_t(column)] =
            decode_element(ATTN_NVFP4, codes.data(), column) * e4m3fn_values[scale];
    }
  }
  const unsigned warp_rows = first * P::pitch;
  std::vector<int> columns_seen(columns);
  with_lanes([&](int lane, bool note) {
    const int g = lane / 4, t = lane % 4;
    const unsigned k_lane = P::of_matrices(warp_rows, lane),
                   v_lane = I4<columns>::v_lane(warp_rows, lane);
    for (int two = 0; two < columns / 64; ++two) {
      unsigned of_keys[2][2], w[4];
      for (int i = 0; i < 2; ++i)
        Codes::k_scales(of_keys[i],
                        ptx::load_shared(unsigned(scales_at + (g + 8 * i) * scale_row + 4 * two)),
                        t);
      ptx::ldmatrix(w, P::chunk(k_lane, 2 * two));
      for (int i = 0; i < 2 && !note; ++i) {
        unsigned a[2][4];
        Codes::take_k(a, w[2 * i], w[2 * i + 1], of_keys[0][i], of_keys[1][i]);
        std::vector<int> seen(32);
        const int from = 64 * two + 32 * i;
        check_k(
            a, ATTN_NVFP4, lane,
            [&](int key, int column) { return real[size_t(key)][size_t(from + column)]; }, &seen);
        for (int column = 0; column < 32; ++column)
          columns_seen[size_t(from + column)] += seen[size_t(column)];
      }
    }
    for (int block = 0; block < columns / 32 && !note; ++block) {
      unsigned a[2][4], of_keys[4];
      for (int i = 0; i < 4; ++i)
        of_keys[i] = ptx::load_shared(
            unsigned(scales_at + (2 * t + v_key(i)) * scale_row + 4 * (block / 2)));
      Codes::load_v(a, v_lane, of_keys, block, g);
      check_v(a, lane, [&](int key, int column) {
        return real[size_t(key)][size_t(32 * block + column)] / nvfp4_factor;
      });
    }
  });
  for (const int seen : columns_seen) REQUIRE(seen == 8);
  with_lanes([&](int lane, bool note) {
    const int g = lane / 4, t = lane % 4;
    for (int two = 0; two < columns / 64; ++two) {
      unsigned a[2][2][4], of_keys[4];
      for (int i = 0; i < 4; ++i)
        of_keys[i] =
            ptx::load_shared(unsigned(scales_at + (2 * t + v_key(i)) * scale_row + 4 * two));
      Codes::load_v_by_fours(a, P::of_matrices(warp_rows, lane), of_keys, two, g);
      for (int tile = 0; tile < 4 && !note; ++tile)
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < 2; ++i)
            REQUIRE(half_of(a[tile / 2][tile % 2][j], i) * nvfp4_factor ==
                    real[size_t(2 * t + i + j / 2 * 8)]
                        [size_t(64 * two + tile / 2 * 32 + 4 * g + tile % 2 * 2 + j % 2)]);
    }
  });
}

TEST_CASE("decode blocks: what lanes get of nvfp4", "[kernels]") {
  check_nvfp4<64>();
  check_nvfp4<128>();
  check_nvfp4<256>();
}

// Scales in words of which the first or the second half is meant.
TEST_CASE("decode blocks: which half of a word is a key's scale", "[kernels]") {
  for (int halves = 0; halves < 8; ++halves)
    for (const int head : {0, 1}) {
      shared.assign(16 * 4, 0xff);
      const auto scale = [](int key) { return f16_code(1 + key / 32.0); };
      for (int key = 0; key < 16; ++key) {
        const uint16_t code = scale(key);
        const int half = (halves + (halves & 2 ? key : 0) + (halves & 4 ? head : 0)) % 2;
        std::memcpy(&shared[size_t(4 * key + 2 * half)], &code, 2);
      }
      for (unsigned g = 0; g < 8; ++g) {
        const float2 scales = k_key_scales(4 * g + 2 * unsigned(half_of_key(halves, int(g), head)));
        REQUIRE(scales.x == f16_value(scale(int(g))));
        REQUIRE(scales.y == f16_value(scale(int(g) + 8)));
      }
      for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 2; ++i) {
          const int key = t * 2 + 8 * i;
          REQUIRE(v_key_scales(unsigned(8 * t), select_of_halves(halves, head), i) ==
                  (scale(key) | unsigned(scale(key + 1)) << 16));
        }
    }
}

// 16 bits in the same order of V's columns, from panels of 128 bytes whose chunks are swizzled.
TEST_CASE("decode blocks: what lanes get of 16-bit values", "[kernels]") {
  constexpr int columns = 128;
  shared.assign(size_t(columns / 64 * panel_bytes), 0);
  for (int key = 0; key < 16; ++key)
    for (int column = 0; column < columns; ++column) {
      const uint16_t value = uint16_t(key * columns + column);
      std::memcpy(
          &shared[size_t(column / 64) * panel_bytes +
                  device::chunk_offset<panel_pitch>(key, column % 64 / 8) + size_t(column % 8) * 2],
          &value, 2);
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < columns / 32; ++n) {
      unsigned a[2][4];
      PlainRows::load_v(a, 0, n, lane);
      for (int tile = 0; tile < 2; ++tile)
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < 2; ++i) {
            const int key = lane % 4 * 2 + i + j / 2 * 8,
                      column = 32 * n + 16 * tile + lane / 4 * 2 + j % 2;
            REQUIRE((a[tile][j] >> 16 * i & 0xffff) == unsigned(key * columns + column));
          }
    }
}
