#include "gfx9/shipped.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>

#include "asm/gfx942/forward_args.h"
#include "asm/gfx942/prepare_args.h"
#include "gfx9/maker.h"
#include "gfx9emu/model.h"
#include "kernels/gfx942_convert.h"
#include "kernels/limits.h"
#include "problem/operations.h"

namespace attn::test {
namespace {

using gfx9emu::Memory;

// [batch, seq, heads, dim] without gaps; `sign` -1: the last row first, so that offsets are
// negative and all 64 bits of them count.
attn_strides packed(int64_t seqs, int64_t heads, int64_t dim, int sign) {
  attn_strides s{};
  s.batch = sign * seqs * heads * dim;
  s.seq = sign * heads * dim;
  s.head = sign * dim;
  return s;
}
void* first_row(void* memory, int sign, int64_t rows, int64_t row_bytes) {
  return static_cast<char*>(memory) + (sign < 0 ? (rows - 1) * row_bytes : 0);
}

ShippedProblem merge_problem(Memory& memory, uint32_t data, attn_dtype part, attn_dtype out,
                             int parts, int64_t dim, bool want_lse, int sign) {
  Maker m(memory, data);
  MergeProblem p;
  p.batch = 2, p.heads_q = 3, p.seqlen_q = 6, p.head_dim_v = dim;
  p.num_parts = parts;
  p.part_type = part, p.out_type = out;
  p.part_stride = p.out_stride = packed(p.seqlen_q, p.heads_q, dim, sign);
  const size_t rows = p.batch * p.heads_q * p.seqlen_q;
  std::vector<const void*> outs;
  std::vector<const float*> lses;
  for (int s = 0; s < parts; ++s) {
    outs.push_back(
        first_row(m.input(m.values(part, rows * dim, 64)), sign, rows, dim * dtype_bytes(part)));
    std::vector<float> lse(rows);
    for (size_t r = 0; r < rows; ++r) {
      lse[r] = float(m.rng()() % 1000) / 100;
      if (m.rng()() % 4 == 0 || r % 7 == 0) lse[r] = -std::numeric_limits<float>::infinity();
    }
    std::vector<uint8_t> bytes(rows * 4);
    std::memcpy(bytes.data(), lse.data(), bytes.size());
    lses.push_back(static_cast<const float*>(m.input(bytes)));
  }
  attn_merge_args args{};
  args.num_parts = parts;
  args.outs = outs.data();
  args.lses = lses.data();
  args.out = first_row(m.output(rows * dim * dtype_bytes(out)), sign, rows, dim * dtype_bytes(out));
  args.lse = want_lse ? static_cast<float*>(m.output(rows * 4)) : nullptr;
  fill(recipe_of("merge_gfx942", p).steps[0], p, &args, nullptr, &m.problem);
  return std::move(m.problem);
}

struct Convert {
  attn_dtype from, to;
  attn_scale_source scale;
  attn_descale_kind kind;
  bool saturate;
  int64_t dim;
  int sign, dst_sign;
  bool ties = false;
  double size = 1;          // of the values
  bool short_rows = false;  // many heads of few values, some of them 0
  bool exact = false;       // descales of few bits, so that quotients are exact
};

ShippedProblem convert_problem(Memory& memory, uint32_t data, const Convert& c) {
  Maker m(memory, data);
  QuantizeProblem p;
  p.batch = p.heads = c.kind == ATTN_DESCALE_BLOCK || c.dim > 64 ? 1 : 3;
  p.seqlen = c.kind == ATTN_DESCALE_BLOCK ? 137 : 9;
  if (c.short_rows) p.batch = 4, p.heads = 5, p.seqlen = 1;
  p.head_dim = c.dim;
  const bool back = dtype_is_fp8(c.from);  // only the kernel knows that way
  p.src_type = back ? ATTN_F32 : c.from;
  p.dst_type = back ? c.from : c.to;
  p.src_stride = packed(p.seqlen, p.heads, c.dim, back ? c.dst_sign : c.sign);
  p.dst_stride = packed(p.seqlen, p.heads, c.dim, back ? c.sign : c.dst_sign);
  p.kind = c.kind;
  p.descale_block_keys = 64;
  p.scale = c.scale;
  p.saturate = c.saturate;
  const attn_dtype from = c.from, to = c.to;
  const int64_t rows = p.batch * p.seqlen * p.heads, count = rows * c.dim;
  std::vector<float> descale(64);
  for (float& d : descale) {
    const unsigned n = m.rng()();
    // Of few bits where it multiplies, so that products lie halfway between two numbers of 16 bits.
    d = back || c.exact ? float(257 + n % 256) / 256 : 0.01f * float(1 + n % 1000);
  }
  std::vector<uint8_t> src =
      c.ties ? m.near_ties(to, count, descale[0])
             : m.values(from, count, c.dim % 8 == 0 ? 4 : 16, c.size, c.scale != ATTN_SCALE_AMAX);
  if (c.short_rows) std::fill(src.begin() + src.size() / 4, src.begin() + src.size() / 2, 0);
  attn_quantize_args args{};
  args.src = first_row(m.input(src), c.sign, rows, c.dim * dtype_bytes(from));
  args.dst =
      first_row(m.output(count * dtype_bytes(to)), c.dst_sign, rows, c.dim * dtype_bytes(to));
  if (c.scale == ATTN_SCALE_GIVEN) {
    std::vector<uint8_t> bytes(descale.size() * 4);
    std::memcpy(bytes.data(), descale.data(), bytes.size());
    args.descale = static_cast<float*>(m.input(bytes));
  } else {
    args.descale = static_cast<float*>(m.output(64 * 4));
  }
  fill(recipe_of("convert_gfx942", p).steps[0], p, &args, nullptr, &m.problem);
  if (back) {
    attn_convert_kernarg a;
    std::memcpy(&a, m.problem.kernarg.data(), sizeof a);
    set_formats(from, to, c.saturate, making_for_gfx950 ? Fp8Hardware::ocp : Fp8Hardware::fnuz, &a);
    for (int i = 0; i < 3; ++i) {
      std::swap(a.src_stride[i], a.dst_stride[i]);
      if (to != ATTN_F32) a.dst_stride[i] /= 2;
    }
    a.src_row_bytes = int(c.dim * dtype_bytes(from));
    a.dst_row_bytes = int(c.dim * dtype_bytes(to));
    a.scale = c.scale == ATTN_SCALE_GIVEN ? attn_convert_multiply : attn_convert_one;
    std::memcpy(m.problem.kernarg.data(), &a, sizeof a);
  }
  return std::move(m.problem);
}

std::vector<MakeProblem> merge_problems(const std::string&) {
  std::vector<MakeProblem> all;
  const auto add = [&](auto... problem) {
    all.push_back(
        [=](Memory& memory, uint32_t data) { return merge_problem(memory, data, problem...); });
  };
  add(ATTN_F32, ATTN_F32, 3, 300, true, 1);
  add(ATTN_F16, ATTN_F16, 5, 300, true, -1);
  add(ATTN_BF16, ATTN_BF16, 16, 260, false, 1);
  add(ATTN_F32, ATTN_BF16, 1, 300, false, -1);
  add(ATTN_F32, ATTN_F16, 1, 8, true, -1);
  add(ATTN_BF16, ATTN_F16, 2, 70, true, 1);
  add(ATTN_F16, ATTN_BF16, 2, 70, true, 1);
  add(ATTN_BF16, ATTN_F32, 9, 256, true, -1);
  return all;
}

std::vector<MakeProblem> convert_problems(const std::string&) {
  constexpr attn_dtype f32 = ATTN_F32, f16 = ATTN_F16, bf16 = ATTN_BF16, e4m3 = ATTN_F8_E4M3FN,
                       e5m2 = ATTN_F8_E5M2, fnuz = ATTN_F8_E4M3FNUZ;
  constexpr auto one = ATTN_SCALE_ONE, given = ATTN_SCALE_GIVEN, amax = ATTN_SCALE_AMAX;
  constexpr auto tensor = ATTN_DESCALE_TENSOR, head = ATTN_DESCALE_HEAD, block = ATTN_DESCALE_BLOCK;
  std::vector<MakeProblem> all;
  for (const Convert& c : std::initializer_list<Convert>{
           {f32, e4m3, given, tensor, true, 68, -1, -1, true},
           {f32, e4m3, given, tensor, true, 68, 1, 1, true, 1, false, true},
           {f16, e5m2, given, head, false, 36, 1, 1},
           {bf16, e5m2, amax, head, false, 8, 1, -1},
           {f16, e4m3, amax, tensor, true, 12, -1, -1},
           {e5m2, f16, given, head, false, 16, 1, -1},
           {fnuz, bf16, given, tensor, false, 128, -1, 1},
           {f32, fnuz, given, tensor, false, 69, 1, 1, true},
           {f32, e4m3, one, tensor, false, 260, 1, 1},
           {f32, fnuz, given, block, true, 8, -1, -1},
           {f16, fnuz, one, head, false, 16, -1, 1},
           {f32, e5m2, amax, block, true, 4, -1, -1},
           {f32, e4m3, given, tensor, false, 68, 1, -1, false, 0x1p40},
           {f32, e5m2, given, tensor, false, 68, -1, 1, false, 0x1p-45},
           {e4m3, f32, one, tensor, false, 64, -1, -1},
           {e5m2, f32, one, tensor, false, 68, 1, 1},
           {f32, e4m3, given, head, true, 7, 1, -1, true},
           {f16, fnuz, amax, head, false, 7, -1, 1},
           {bf16, e5m2, one, tensor, false, 69, 1, 1},
           {e4m3, f32, one, tensor, false, 5, -1, 1},
           {e5m2, f16, given, tensor, false, 67, 1, -1},
           {fnuz, bf16, one, tensor, false, 67, 1, 1},
           {f32, e4m3, amax, head, false, 8, 1, 1, false, 0x1p-124, true},
           {f32, fnuz, amax, head, true, 8, -1, -1, false, 0x1p-130, true},
           {f32, e4m3, amax, head, true, 8, -1, -1, false, 0x1p-153, true},
       }) {
    all.push_back([c](Memory& memory, uint32_t data) { return convert_problem(memory, data, c); });
  }
  return all;
}

// Of the forward kernels and of what prepares K and V for them. Workgroup 0 has the last queries of
// head 0.
constexpr int64_t largest = INT64_MAX;  // head_dim: what the kernel takes

struct Forward {
  int64_t batch = 1, group = 1, heads_kv = 1, dim, dim_v, seqlen_q, seqlen_kv;
  uint32_t flags = 0;
  attn_dtype q_type = ATTN_F8_E4M3FNUZ, kv_type = ATTN_F8_E4M3FNUZ, out_type = ATTN_F32;
  int64_t left = -1, right = -1;
  std::vector<int32_t> lengths_q = {}, lengths_kv = {};  // given: packed
  std::vector<int32_t> cu_seqlens_q = {};                // given: packed q of 130 tokens
  std::vector<int32_t> seqlens = {};
  std::vector<int32_t> kv_begins = {};
  attn_descale_kind descale = ATTN_DESCALE_NONE;
  float scale = 0;
  float sink = 1;  // about the size of sinks
  bool want_lse = true, nan = false;
  // One key's V has NaN in some dims, which results then have.
  enum { no_nan, in_one_of_four, in_every_other_eight } nan_v = no_nan;
  std::vector<uint8_t> kinds = {};  // given: a block mask of these over and over, for each head
  int32_t block_q = 64, block_k = 64;
  int64_t partials = 3;
  float softcap = 0;
  bool bias = false;
  bool single = false;              // of a bias: see there
  attn_dtype bias_type = ATTN_F32;  // else q's
  bool paged = false;
  int64_t empty_tiles = 0;  // the first ones, which no block shows and which are not in memory
  float out_scale = 64;     // about; some results become the largest of their type
  bool uneven = false;      // of q: every other row is 2^14 times less
  std::vector<int64_t> more_segments = {};  // keys of those behind the first
  std::vector<float> v_factors = {};        // of tiles, from the last one on, over and over
  bool backwards = false;  // of prepare_*: negative strides, which only the kernel takes
};

// Codes of rows of `dim`, now and then of larger values, so that maxima move. If wanted, 16 rows of
// 32 have a NaN, each in other 4 dims, and where there is one, the other 16 have a -0.
std::vector<uint8_t> codes(Maker& m, size_t count, int64_t dim, attn_dtype type, bool nan) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) {
    uint8_t code = uint8_t(m.rng()() % 0x50 | (m.rng()() % 2 << 7));
    if ((code & 0x7f) == 0) code = 0;
    if (i / 4096 % 3 == 1 && code % 4 == 1) code += 0x10;
    const size_t row = i / size_t(dim), special = 4 * (row % 16 + row / 32 * 16);
    if (nan && i % size_t(dim) == special % size_t(dim)) {
      const bool ocp = type == ATTN_F8_E4M3FN;
      if (row % 32 < 16) code = !ocp ? 0x80 : row % 2 ? 0x7f : 0xff;
      if (row % 32 >= 16 && ocp) code = 0x80;
    }
    bytes[i] = code;
  }
  return bytes;
}

// The type of q, k and v that a forward kernel's name tells where it is no fp8.
std::optional<attn_dtype> type_in(const std::string& kernel) {
  if (kernel.find("_bf16_") != kernel.npos) return ATTN_BF16;
  if (kernel.find("_f16_") != kernel.npos) return ATTN_F16;
  return {};
}

// FNUZ codes as what they mean in a 16-bit type; of fp8 types as they are.
std::vector<uint8_t> in_type(const std::vector<uint8_t>& codes, attn_dtype type) {
  if (dtype_is_fp8(type)) return codes;
  const SmallFloat& fnuz = fp8_format(ATTN_F8_E4M3FNUZ);
  std::vector<uint8_t> bytes(codes.size() * 2);
  for (size_t i = 0; i < codes.size(); ++i) {
    const double value = codes[i] == 0x80 ? std::nan("") : value_of(fnuz, codes[i]);
    const uint32_t code = encode(type == ATTN_F16 ? f16_format : bf16_format, value, false);
    std::memcpy(&bytes[i * 2], &code, 2);
  }
  return bytes;
}

// One key in four of a tile; with a shift, another one.
bool hidden(int key, int shift = 0) {
  return (key + shift) % 4 == key / 4 % 4;
}

bool is_nan_in_v(const Forward& f, size_t d) {
  return f.nan_v == Forward::in_one_of_four ? hidden(int(d))
                                            : f.nan_v && d / 8 % 2;  // of a lane four neighbours
}

// The arrays of a block mask. PARTIAL blocks hide `hidden` keys of 64 from all queries; some have
// an index that means nothing.
void set_block_mask(Maker& m, const attn::Problem& p, const Forward& f, Args* args) {
  const size_t cells =
      size_t(p.mask_batch * p.mask_heads * ((p.seqlen_q + p.block_q - 1) / p.block_q) *
             ((p.seqlen_kv + p.block_k - 1) / p.block_k));
  std::vector<uint8_t> kinds(cells), index(4 * cells);
  for (size_t n = 0; n < cells; ++n) {
    const int32_t bad[] = {-1, int32_t(f.partials), 1 << 20};
    const int32_t i = n % 3 == 2 ? bad[n / 3 % 3] : int32_t(n / 3 % 3);
    kinds[n] = f.kinds[n % f.kinds.size()];
    std::memcpy(&index[4 * n], &i, 4);
  }
  args->block_kinds = static_cast<const uint8_t*>(m.input(kinds));
  if (f.partials == 0) return;
  std::vector<uint8_t> bits(size_t(f.partials * p.block_q * p.block_k / 8));
  for (size_t n = 0; n < bits.size(); n += 8) {
    uint64_t keys = uint64_t{m.rng()()} << 32 | m.rng()();
    if (n / (bits.size() / size_t(f.partials)) == 1) keys &= uint64_t{m.rng()()} << 32 | m.rng()();
    for (int key = 0; key < 64; ++key)
      if (hidden(key)) keys &= ~(uint64_t{1} << key);
    std::memcpy(&bits[n], &keys, 8);
  }
  args->block_index = static_cast<const int32_t*>(m.input(index));
  args->block_bits = static_cast<const uint32_t*>(m.input(bits));
}

// NaN in V of a key of a tile, in the order that prepare_gfx942_* gives a type.
void put_nan_in_v(attn_dtype type, size_t tile, size_t dim, size_t key, size_t d,
                  std::vector<uint8_t>* prepared) {
  uint8_t* v = prepared->data() + (128 * tile + 64 + key / 32 * 32) * dim;
  const size_t half = key / 16 % 2;
  v[d / 32 * 1024 + (dtype_is_fp8(type) ? half * 512 + d % 32 * 16 + key % 16
                                        : key / 8 % 2 * 512 + half * 256 + d % 32 * 8 + key % 8)] =
      type == ATTN_F8_E4M3FN ? 0x7f : 0x80;
}

// That in V of the `hidden` keys of a tile.
void hide_nan(attn_dtype type, size_t tile, size_t dim, std::vector<uint8_t>* prepared,
              int shift = 0) {
  for (size_t key = 0; key < 64; ++key)
    for (size_t d = 0; d < dim && hidden(int(key), shift); ++d)
      put_nan_in_v(type, tile, dim, key, d, prepared);
}

// And in K, of 16 bits.
void hide_nan_in_k(size_t tile, size_t dim, std::vector<uint8_t>* prepared, int shift) {
  for (size_t key = 0; key < 64; ++key) {
    const size_t row = key % 16 / 4 * 8 + key / 16 % 2 * 4 + key % 4;
    if (hidden(int(key), shift)) (*prepared)[(128 * tile + key / 32 * 32) * dim + row * 8] = 0x80;
  }
}

// That in tiles that no block shows but PARTIAL ones: of one head, blocks of 64 keys.
void hide_nan_in_blocks(const Forward& f, int64_t dim, std::vector<uint8_t>* prepared) {
  const size_t columns = size_t((f.seqlen_kv + 63) / 64);
  for (size_t column = 0; column < columns; ++column) {
    bool shown = false;
    for (size_t n = column; n < f.kinds.size(); n += columns)
      shown |= f.kinds[n] == ATTN_BLOCK_FULL || f.kinds[n] == ATTN_BLOCK_CAUSAL;
    if (!shown) hide_nan(f.kv_type, column, size_t(dim), prepared);
  }
}

// Keys of each of `count` tiles, about half of them, at random.
std::vector<uint64_t> half_of_keys(Maker& m, size_t count) {
  std::vector<uint64_t> keys(2 * count);
  for (uint64_t& k : keys) k = m.rng()();
  for (size_t tile = 0; tile < count; ++tile) keys[tile] |= keys[count + tile] << 32;
  keys.resize(count);
  return keys;
}

// What prepare_gfx942_*_segments leaves behind the tiles of a workspace: of three tiles in four
// half of the keys are missing, of the next sequence the others, and no sequence is shorter than
// all may be.
void set_missing(Maker& m, const Forward& f, std::vector<uint8_t>* workspace) {
  const size_t batch = size_t(f.batch), tiles = batch * size_t((f.seqlen_kv + 63) / 64);
  const std::vector<uint64_t> missing = half_of_keys(m, tiles / batch);
  uint8_t* to = workspace->data() + workspace->size() - 4 * batch - 8 * tiles;
  for (size_t tile = 0; tile < tiles; ++tile) {
    const size_t of_sequence = tile % (tiles / batch);
    const uint64_t half = missing[of_sequence], keys = of_sequence % 4 == 2         ? 0
                                                       : tile / (tiles / batch) % 2 ? ~half
                                                                                    : half;
    std::memcpy(to + 8 * tile, &keys, 8);
  }
  for (size_t b = 0; b < batch; ++b) {
    const int32_t length = int32_t(f.seqlen_kv);
    std::memcpy(to + 8 * tiles + 4 * b, &length, 4);
  }
}

// What prepare_gfx942_fp8_descaled leaves behind the tiles of a workspace: of two tiles in three
// half of the keys are missing, for the next head the others, factors are of few bits, and that of
// V is the same for two tiles.
void set_records(Maker& m, Memory& memory, const Forward& f,
                 const std::vector<std::byte>& kernarg) {
  attn_gfx942_descaled_kernarg a;
  std::memcpy(&a, kernarg.data(), sizeof a);
  std::vector<int64_t> segments = {f.seqlen_kv};
  segments.insert(segments.end(), f.more_segments.begin(), f.more_segments.end());
  size_t tiles = 0;
  for (const int64_t length : segments) tiles += size_t((length + 63) / 64);
  const std::vector<uint64_t> missing = half_of_keys(m, tiles);
  std::vector<attn_gfx942_tile_record> records;
  std::vector<int32_t> lengths;
  for (int64_t n = 0; n < f.heads_kv * f.batch; ++n) {
    const size_t begin = records.size();
    int64_t first = 0;
    for (const int64_t length : segments) {
      for (int64_t key = 0; key < length; key += 64) {
        attn_gfx942_tile_record r{};
        const size_t tile = records.size() - begin;
        if (tile % 3 != 0) r.missing = n % 2 ? ~missing[tile] : missing[tile];
        if (length - key < 64) r.missing |= ~uint64_t{0} << (length - key);
        r.k_factor = float(33 + m.rng()() % 16 * 2) / 64;
        r.first_key = int32_t(first + key);
        r.v_factor = tile % 2 == 1 ? records.back().v_factor : float(33 + m.rng()() % 16 * 2) / 64;
        r.v_doublings = tile % 4 > 1;
        records.push_back(r);
      }
      first += length;
    }
    for (size_t r = begin; r < records.size(); ++r) {
      records[r].tiles = int32_t(records.size() - begin);
      if (!f.v_factors.empty())
        records[r].v_factor = f.v_factors[(records.size() - 1 - r) % f.v_factors.size()];
    }
    if (n < f.batch) lengths.push_back(f.seqlens.empty() ? int32_t(first) : f.seqlens[size_t(n)]);
  }
  memory.write(reinterpret_cast<uint64_t>(a.tile_records), std::as_bytes(std::span(records)));
  memory.write(reinterpret_cast<uint64_t>(a.forward.seqlens_kv), std::as_bytes(std::span(lengths)));
}

// -inf for the `hidden` keys of every other tile, for all queries, and for some keys of some; or
// for one key of each 16, another one in each tile, of one query in 32.
std::vector<uint8_t> bias(Maker& m, size_t rows, int64_t seqlen_kv, attn_dtype type, bool single) {
  std::vector<uint8_t> bytes = m.alike(type, rows * size_t(seqlen_kv), 4);
  for (size_t row = 0; row < rows; ++row) {
    for (int64_t key = 0; key < seqlen_kv; ++key) {
      if (single && (row % 32 != 5 || key % 16 != key / 64 % 16)) continue;
      const bool by_all = key / 64 % 2 == 1 && hidden(int(key % 64), int(key / 128));
      if (!single && !by_all && (key / 64 % 3 != 0 || m.rng()() % 8 != 0)) continue;
      encode_element(type, bytes.data(), int64_t(row) * seqlen_kv + key,
                     -std::numeric_limits<double>::infinity(), false);
    }
  }
  return bytes;
}

// K or V of _direct, in rows of 128 codes. Keys of padded sequences that no query sees are NaN.
std::vector<uint8_t> direct_rows(Maker& m, const Forward& f, int64_t tokens, int64_t heads) {
  constexpr int64_t dim = 128;
  std::vector<uint8_t> all = codes(m, size_t(tokens * heads * dim), dim, f.kv_type, false);
  const int64_t seen = f.flags & ATTN_CAUSAL_TOP_LEFT ? f.seqlen_q : f.seqlen_kv;
  for (int64_t token = 0; f.lengths_kv.empty() && token < tokens; ++token) {
    const size_t b = size_t(token / f.seqlen_kv);
    const int64_t length = f.seqlens.empty() ? f.seqlen_kv : f.seqlens[b];
    if (token % f.seqlen_kv >= std::min(seen, length))
      std::fill_n(all.begin() + token * heads * dim, heads * dim, uint8_t{0x7f});
  }
  return all;
}

// The last sequence and head of K and V first: all 64 bits of their offsets count.
void turn_around(const Forward& f, std::vector<std::byte>* kernarg) {
  attn_gfx942_prepare_kernarg a;
  const size_t bytes = std::min(sizeof a, kernarg->size());
  std::memcpy(&a, kernarg->data(), bytes);
  attn_gfx942_kv_segment& segment = a.segment[0];
  const auto turn = [&](const void** first, long long* strides) {
    *first = static_cast<const char*>(*first) + (f.batch - 1) * strides[0];
    *first = static_cast<const char*>(*first) + (f.heads_kv - 1) * strides[2];
    strides[0] *= -1, strides[2] *= -1;
  };
  turn(&segment.k, segment.k_stride);
  turn(&segment.v, segment.v_stride);
  std::memcpy(kernarg->data(), &a, bytes);
}

ShippedProblem forward_problem(Memory& memory, uint32_t data, const std::string& kernel,
                               bool prepare, int64_t most_dim, Forward f) {
  if (const auto type = type_in(kernel)) {
    f.q_type = f.kv_type = *type;
    f.descale = ATTN_DESCALE_NONE;
  } else if (making_for_gfx950) {
    f.q_type = f.kv_type = ATTN_F8_E4M3FN;
  }
  Maker m(memory, data);
  const bool descaled = kernel.ends_with("_descaled"), direct = kernel.ends_with("_direct");
  std::vector<attn_segment> segments(1 + f.more_segments.size());
  for (size_t n = 0; n < segments.size(); ++n) {
    segments[n].struct_size = sizeof segments[n];
    segments[n].k_type = segments[n].v_type = f.kv_type;
    segments[n].seqlen = n == 0 ? f.seqlen_kv : f.more_segments[n - 1];
    segments[n].k_descale = segments[n].v_descale = f.descale;
  }
  attn_segment& segment = segments[0];
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = f.batch, in.heads_kv = f.heads_kv, in.heads_q = f.group * f.heads_kv;
  in.head_dim = std::min(f.dim, most_dim), in.head_dim_v = std::min(f.dim_v, most_dim);
  in.seqlen_q = f.seqlen_q;
  in.q_type = f.q_type, in.out_type = f.out_type, in.q_descale = f.descale;
  in.flags = f.flags;
  if (f.flags & ATTN_WINDOW) in.window_left = f.left, in.window_right = f.right;
  if (!f.kinds.empty()) {
    in.flags |= ATTN_BLOCK_MASK;
    in.block_q = f.block_q, in.block_k = f.block_k;
    in.mask_batch = in.batch, in.mask_heads = in.heads_q;
    in.mask_partials = f.partials;
  }
  in.scale = f.scale;
  in.softcap = f.softcap;
  if (f.bias) in.bias_type = f.bias_type == ATTN_F32 ? ATTN_F32 : f.q_type;
  in.num_segments = int32_t(segments.size()), in.segments = segments.data();
  const auto ints = [&](std::vector<int32_t> values, bool cumulative) {
    if (cumulative) {
      values.insert(values.begin(), 0);
      for (size_t i = 1; i < values.size(); ++i) values[i] += values[i - 1];
      values.front() = -3, values.back() = INT32_MAX;  // are clamped
    }
    std::vector<uint8_t> bytes(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return static_cast<int32_t*>(m.input(bytes));
  };
  const auto sum = [](const std::vector<int32_t>& v) {
    int64_t total = 0;
    for (int32_t n : v) total += n;
    return total;
  };
  std::vector<attn_segment_args> args_of_segments(segments.size());
  attn_segment_args& segment_args = args_of_segments[0];
  Args args{};
  args.segment = args_of_segments.data();
  int64_t rows_q = f.batch * f.seqlen_q, rows_kv = f.batch * f.seqlen_kv;
  if (!f.lengths_q.empty()) {
    in.q_layout = ATTN_PACKED;
    in.total_q = rows_q = sum(f.lengths_q);
    args.cu_seqlens_q = ints(f.lengths_q, true);
  }
  if (!f.cu_seqlens_q.empty()) {
    in.q_layout = ATTN_PACKED;
    in.total_q = rows_q = 130;
    args.cu_seqlens_q = ints(f.cu_seqlens_q, false);
  }
  if (!f.lengths_kv.empty()) {
    segment.layout = ATTN_PACKED;
    segment.total = rows_kv = sum(f.lengths_kv);
    segment_args.cu_seqlens = ints(f.lengths_kv, true);
  }
  if (f.paged) {
    segment.layout = ATTN_PAGED;
    segment.page_size = 8;
    segment.max_pages = int32_t((f.seqlen_kv + 7) / 8);
    segment.num_pages = f.batch * segment.max_pages;
  }
  if (!f.seqlens.empty()) {
    segment.has_seqlens = 1;
    segment_args.seqlens = ints(f.seqlens, false);
  }
  if (!f.kv_begins.empty()) {
    in.has_kv_begin = 1;
    args.kv_begin = ints(f.kv_begins, false);
  }
  attn::Problem p;
  require(make_problem(&in, &p));
  const Recipe recipe = recipe_of(kernel, p);
  const size_t workspace = recipe.workspace;
  const auto floats = [&](size_t count, float size = 1) {
    std::vector<uint8_t> bytes(count * 4);
    for (size_t i = 0; i < count; ++i) {
      // Of few bits, so that what it multiplies lies halfway between two numbers of 16 bits.
      const float x = size * float(33 + m.rng()() % 16 * 2) / 64;
      std::memcpy(&bytes[i * 4], &x, 4);
    }
    return static_cast<float*>(m.input(bytes));
  };
  const size_t descales = f.descale == ATTN_DESCALE_HEAD ? size_t(f.batch * f.heads_kv) : size_t(1);
  const auto tensor = [&](int64_t rows, int64_t dim, attn_dtype type) {
    return m.input(in_type(codes(m, size_t(rows * dim), dim, type, f.nan), type));
  };
  if (f.uneven) {
    const size_t count = size_t(rows_q * in.heads_q * in.head_dim);
    std::vector<uint8_t> q = in_type(codes(m, count, in.head_dim, f.q_type, false), f.q_type);
    for (size_t i = 0; i < count; ++i)
      if (i / size_t(in.head_dim) % 2 == 1)
        encode_element(f.q_type, q.data(), int64_t(i),
                       decode_element(f.q_type, q.data(), int64_t(i)) / (1 << 14), false);
    args.q = m.input(q);
  } else {
    args.q = tensor(rows_q * in.heads_q, in.head_dim, f.q_type);
  }
  args.q_descale = floats(descales);
  segment_args.k_descale = floats(descales);
  segment_args.v_descale = floats(descales);
  args.sinks = floats(size_t(in.heads_q), f.sink);
  args.out_scale = floats(1, f.out_scale);
  if (f.bias) {
    const int64_t rows = in.batch * in.heads_q * in.seqlen_q;
    args.bias = m.input(bias(m, size_t(rows), f.seqlen_kv, in.bias_type, f.single));
  }
  if (f.flags & ATTN_ALIBI) args.alibi_slopes = floats(size_t(in.heads_q), 0.1f);
  keep_wanted(p, &args, &args_of_segments);
  if (prepare) {
    const int64_t rows = rows_kv * in.heads_kv;
    segment_args.k = tensor(rows, in.head_dim, f.kv_type);
    segment_args.v = tensor(rows, in.head_dim_v, f.kv_type);
    fill(recipe.steps[0], p, &args, m.output(workspace), &m.problem);
    if (f.backwards) turn_around(f, &m.problem.kernarg);
    return std::move(m.problem);
  }
  args.out = m.output(size_t(rows_q * in.heads_q * in.head_dim_v) * dtype_bytes(f.out_type));
  args.lse = f.want_lse ? static_cast<float*>(m.output(size_t(rows_q * in.heads_q) * 4)) : nullptr;
  if (direct) {
    segment_args.k = m.input(direct_rows(m, f, rows_kv, in.heads_kv));
    std::vector<uint8_t> v = direct_rows(m, f, rows_kv, in.heads_kv);
    for (size_t d = 0; d < 128; ++d)
      if (is_nan_in_v(f, d)) v[5 * size_t(in.heads_kv) * 128 + d] = 0x7f;
    segment_args.v = m.input(v);
    fill(recipe.steps[0], p, &args, nullptr, &m.problem);
    return std::move(m.problem);
  }
  const size_t empty = size_t(f.empty_tiles * 128 * most_dim * dtype_bytes(f.kv_type));
  std::vector<uint8_t> tiles =
      codes(m, std::max<size_t>(workspace - empty, 16) / size_t(dtype_bytes(f.kv_type)),
            in.head_dim, f.kv_type, false);
  if (!f.kinds.empty()) {
    set_block_mask(m, p, f, &args);
    if (f.kinds.size() > 20 && !f.empty_tiles) hide_nan_in_blocks(f, most_dim, &tiles);
  }
  for (size_t d = 0; d < size_t(most_dim); ++d)
    if (is_nan_in_v(f, d)) put_nan_in_v(f.kv_type, 0, size_t(most_dim), 5, d, &tiles);
  const size_t columns = size_t((f.seqlen_kv + 63) / 64);
  for (size_t tile = 0; f.bias && !f.single && tile < columns * size_t(f.batch); ++tile) {
    if (tile % columns % 2 == 0) continue;
    const int shift = int(tile % columns / 2);
    hide_nan(f.kv_type, tile, size_t(most_dim), &tiles, shift);
    hide_nan_in_k(tile, size_t(most_dim), &tiles, shift);
  }
  std::vector<uint8_t> bytes = in_type(tiles, f.kv_type);
  if (f.paged && !descaled) set_missing(m, f, &bytes);
  void* prepared = static_cast<char*>(m.input(bytes)) - empty;
  fill(recipe.steps[1], p, &args, prepared, &m.problem);
  if (descaled) set_records(m, memory, f, m.problem.kernarg);
  return std::move(m.problem);
}

std::vector<Forward> forwards() {
  constexpr attn_dtype ocp = ATTN_F8_E4M3FN;
  std::vector<Forward> all;
  // All tiles count.
  all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 40, .seqlen_kv = 520});
  all.back().flags = ATTN_SINKS;
  all.back().scale = 0.02f;

  all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 150, .seqlen_kv = 330});
  all.back().flags = ATTN_CAUSAL;
  all.back().out_type = ATTN_BF16;
  all.back().descale = ATTN_DESCALE_TENSOR;
  all.back().scale = -0.05f;

  // All weights count in tiles that hide keys, and beside rows that are NaN.
  for (const bool nan : {false, true}) {
    all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 250, .seqlen_kv = 330});
    all.back().flags = ATTN_CAUSAL;
    all.back().scale = 0.02f;
    all.back().nan = nan;
  }

  // And where the first key that a row sees is in an even or an odd tile, the last one or not.
  for (const int64_t keys : {60, 120, 190, 260})
    for (const bool nan : {false, true}) {
      all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 64, .seqlen_kv = keys});
      all.back().scale = 0.02f;
      all.back().nan = nan;
    }
  for (const bool nan : {false, true}) {
    all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 250, .seqlen_kv = 250});
    all.back().flags = ATTN_CAUSAL | ATTN_WINDOW;
    all.back().left = 50;
    all.back().scale = 0.02f;
    all.back().nan = nan;
  }

  all.push_back({.dim = 48, .dim_v = 80, .seqlen_q = 70, .seqlen_kv = 200});
  all.back().batch = all.back().group = all.back().heads_kv = 2;
  all.back().flags = ATTN_CAUSAL | ATTN_WINDOW;
  all.back().left = 70;
  all.back().q_type = all.back().kv_type = ocp;
  all.back().out_type = ATTN_F16;
  all.back().lengths_q = {70, 33};
  all.back().lengths_kv = {200, 130};
  all.back().descale = ATTN_DESCALE_HEAD;
  all.back().want_lse = false;
  all.back().nan = true;

  all.push_back({.dim = largest, .dim_v = 80, .seqlen_q = 33, .seqlen_kv = 600});
  all.back().flags = ATTN_WINDOW;
  all.back().left = 400;
  all.back().right = 0;
  all.back().nan = true;

  all.push_back({.dim = largest, .dim_v = 48, .seqlen_q = 64, .seqlen_kv = 64});
  all.back().flags = ATTN_CAUSAL_TOP_LEFT;
  all.back().q_type = all.back().kv_type = ocp;
  all.back().nan = true;

  all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 300, .seqlen_kv = 128});
  all.back().batch = 2;
  all.back().flags = ATTN_SINKS;
  all.back().seqlens = {-1, 1000};  // are clamped
  all.back().sink = 60;

  // Three tiles, the last of which is seen fully.
  all.push_back({.dim = 112, .dim_v = 16, .seqlen_q = 20, .seqlen_kv = 192});
  all.back().nan = true;

  // A query sees one key: out is V times a descale.
  all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 40, .seqlen_kv = 40});
  all.back().flags = ATTN_WINDOW;
  all.back().left = all.back().right = 0;
  all.back().out_type = ATTN_BF16;
  all.back().descale = ATTN_DESCALE_TENSOR;
  all.back().nan = true;

  all.push_back({.dim = 96, .dim_v = 48, .seqlen_q = 40, .seqlen_kv = 40});
  all.back().out_type = ATTN_F16;
  all.back().descale = ATTN_DESCALE_TENSOR;

  // Keys behind the last that a query sees, and sequences longer than all may be.
  all.push_back({.dim = 64, .dim_v = 32, .seqlen_q = 40, .seqlen_kv = 100});
  all.back().batch = all.back().heads_kv = 2;
  all.back().flags = ATTN_CAUSAL_TOP_LEFT;
  all.push_back({.dim = 32, .dim_v = 64, .seqlen_q = 20, .seqlen_kv = 70});
  all.back().batch = 3;
  all.back().lengths_kv = {90, 30, 100};

  // Hidden first keys: whole tiles, a part of one, less than none, and all.
  for (const uint32_t flags : {0u, uint32_t(ATTN_CAUSAL | ATTN_WINDOW)}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 150, .seqlen_kv = 200});
    all.back().batch = 4;
    all.back().flags = flags;
    all.back().left = 60;
    all.back().kv_begins = {70, 9, -5, 1000};
  }

  // More queries than all may have, of which some keys beyond would be seen.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 40, .seqlen_kv = 100});
  all.back().flags = ATTN_CAUSAL_TOP_LEFT;
  all.back().lengths_q = {90};

  // Rows of nobody: in front of the first sequence, behind the last one, and between two where one
  // is longer than all may be.
  for (const attn_dtype out_type : {ATTN_F32, ATTN_F16}) {
    all.push_back({.dim = 32, .dim_v = 48, .seqlen_q = 33, .seqlen_kv = 70});
    all.back().batch = 4;
    all.back().group = 2;
    all.back().flags = ATTN_SINKS;
    all.back().cu_seqlens_q = {5, 25, 70, 100, 90};
    all.back().out_type = out_type;
    all.back().want_lse = out_type == ATTN_F32;
  }
  // First sequences of one query.
  all.push_back({.dim = 32, .dim_v = 48, .seqlen_q = 64, .seqlen_kv = 70});
  all.back().batch = 4;
  all.back().cu_seqlens_q = {0, 1, 2, 60, 70};

  // Scores so large that the maximum is taken off them first, from the first tile on and from a
  // later one.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 40, .seqlen_kv = 520});
  all.back().scale = 3e7f;
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 200, .seqlen_kv = 330});
  all.back().flags = ATTN_CAUSAL | ATTN_SINKS;
  all.back().scale = 1e6f;

  // The maximum that is taken off is at each key of a tile: an even or an odd one, before one that
  // is seen fully, before one that is not, and the last.
  for (const int64_t keys : {64, 100, 128, 192, 230}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 64, .seqlen_kv = keys});
    all.back().batch = all.back().heads_kv = 4;
    all.back().scale = 3e7f;
  }

  // Rows that have seen no key have a large shift, the others of their wave none.
  for (const int64_t keys : {330, 100, 60}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 200, .seqlen_kv = keys});
    all.back().flags = ATTN_CAUSAL;
    all.back().scale = 1;
  }

  // Addresses carry into their high halves with the first, the second or the third step from tile
  // to tile.
  for (const int64_t tiles : {2, 4, 6})
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 20, .seqlen_kv = 64 * tiles});

  // lse of several heads of a group.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 40, .seqlen_kv = 70});
  all.back().batch = all.back().group = all.back().heads_kv = 2;

  for (const int64_t dim_v : {48, 80}) {
    all.push_back({.dim = 16, .dim_v = dim_v, .seqlen_q = 1, .seqlen_kv = 10});
    all.back().out_type = ATTN_BF16;
  }
  return all;
}

// With block masks: some of their own, then the others with blocks that are all FULL.
std::vector<Forward> masked_forwards() {
  std::vector<Forward> all;
  std::mt19937 rng(7);
  // Four rows of blocks over more than 64 tiles; what a row does not see, another one may.
  for (const auto& [columns, scale] : {std::pair{72, 0.02f}, {14, 0.02f}, {14, 3e7f}}) {
    all.push_back(
        {.dim = largest, .dim_v = largest, .seqlen_q = 250, .seqlen_kv = 64 * columns - 30});
    all.back().nan = columns == 72;
    all.back().scale = scale;
    all.back().kinds.resize(size_t(4 * columns));
    for (int column = 0; column < columns; ++column) {
      const unsigned what = column + 8 > columns ? 7 : rng() % 8;
      for (int row = 0; row < 4; ++row) {
        constexpr uint8_t any[] = {0, 1, 2, 2, 3, 1, 0, 77}, hides[] = {0, 3};
        uint8_t& kind = all.back().kinds[size_t(row * columns + column)];
        kind = what < 3 ? 0 : what < 5 ? hides[rng() % 2] : any[rng() % 8];
        // The last tile of the walk hides keys, behind 46 others and behind 9; one row sees none of
        // it.
        if (column == 0) kind = row < 3 ? 3 : 0;
        if (column == 1 && columns == 14) kind = 0;
        if (column == columns - 1 && row == 0) kind = 3;  // its index means nothing in one of both
      }
    }
  }

  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 300, .seqlen_kv = 400});
  all.back().batch = all.back().group = 2;
  all.back().flags = ATTN_CAUSAL | ATTN_WINDOW | ATTN_SINKS;
  all.back().left = 200;
  all.back().lengths_kv = {400, 170};
  all.back().block_q = all.back().block_k = 128;
  all.back().kinds = {3, 2, 1, 0, 3, 1, 2};

  // Each kind of tile comes after a PARTIAL one that is even or odd in the walk, and ends an even
  // or an odd walk, with weights that count in all head dims.
  for (const size_t columns : {28, 29}) {
    all.push_back(
        {.dim = largest, .dim_v = largest, .seqlen_q = 128, .seqlen_kv = 64 * int64_t(columns)});
    all.back().scale = columns == 28 ? 1e-4f : 0.02f;
    all.back().kinds.resize(2 * columns);
    for (size_t column = 0; column < columns; ++column) {
      const bool partial = column == 0 || rng() % 2;
      const unsigned rows = column == 0 ? 3 : 1 + rng() % 3;
      for (const size_t row : {0, 1})
        if (rows >> row & 1)
          all.back().kinds[row * columns + column] = partial ? ATTN_BLOCK_PARTIAL : ATTN_BLOCK_FULL;
    }
  }

  // PARTIAL tiles alone, even and odd ones, while no maximum grows.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 40, .seqlen_kv = 520});
  all.back().kinds = {3};
  all.back().scale = 1e-4f;

  // Packed K/V, of which all tiles are loaded.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 70, .seqlen_kv = 520});
  all.back().lengths_kv = {520};
  all.back().kinds = {2};

  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 130, .seqlen_kv = 300});
  all.back().block_k = 128;
  all.back().kinds = {3, 2, 1};
  all.back().partials = 0;

  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 70, .seqlen_kv = 130});
  all.back().block_q = 128;
  all.back().kinds = {0};

  // Tiles so many that their offsets have high halves.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 70, .seqlen_kv = 0});
  all.back().empty_tiles = 1 << 19;
  all.back().seqlen_kv = 64 * (all.back().empty_tiles + 3);
  all.back().kinds.resize(size_t(all.back().empty_tiles + 3));
  std::fill_n(all.back().kinds.end() - 3, 3, uint8_t{ATTN_BLOCK_FULL});
  all.back().partials = 0;

  // The first 64 tiles that are looked at have as many as the queue of 16 bits, or of FP8; the next
  // have none.
  for (const size_t columns : {130, 133}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 128, .seqlen_kv = 64 * int64_t(columns)});
    all.back().kinds.resize(2 * columns);
    for (const size_t column : {size_t{0}, size_t{5}, size_t{63}})
      all.back().kinds[column] = ATTN_BLOCK_FULL;
    std::fill(all.back().kinds.begin() + 128, all.back().kinds.begin() + columns,
              uint8_t{ATTN_BLOCK_FULL});
    all.back().kinds[columns + 62] = all.back().kinds[2 * columns - 1] = ATTN_BLOCK_PARTIAL;
  }

  for (Forward& f : forwards()) {
    f.lengths_q.clear();
    f.cu_seqlens_q.clear();
    f.kinds = {2};
    all.push_back(f);
  }
  return all;
}

// In segments, and the others.
std::vector<Forward> descaled_forwards() {
  std::vector<Forward> all;
  for (const uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_CAUSAL | ATTN_WINDOW)}) {
    all.push_back({.dim = largest, .dim_v = 80, .seqlen_q = 150, .seqlen_kv = 200});
    all.back().batch = all.back().heads_kv = 2;
    all.back().flags = flags;
    all.back().left = 150;
    all.back().descale = ATTN_DESCALE_HEAD;
    all.back().more_segments = {1, 130, 64};
    all.back().scale = flags == 0 ? 3e7f : 0.05f;
  }
  for (const auto& [queries, keys] : {std::pair{32, 64}, {64, 32}, {64, 224}, {32, 192}}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = queries, .seqlen_kv = keys});
    all.back().flags = ATTN_CAUSAL | ATTN_WINDOW;
    all.back().left = 96;
  }
  for (Forward f : forwards()) {
    f.lengths_kv.clear();
    all.push_back(f);
  }
  // Factors of V too far apart for one unit of O, by their exponents or by what no reciprocal has:
  // rows get their own at the second or third tile, which is the last one or not; walks that end
  // with either parity, and rows that have seen no key by then.
  const std::vector<float> walks[] = {{0.75f, 1e-30f},
                                      {0.75f, 1, 1.25e30f},
                                      {0.75f, 1, 1e30f, 0, 0, 1},
                                      {0.75f, 1.25e30f, 0},
                                      {0.75f, 1.25e30f, 2, 0},
                                      {0.75f, 1e-30f, 0, 1.25e30f, -3e-41f, 2, 2},
                                      {1.5e-36f, 1.5e-36f, 3e-36f, 1e-39f}};
  for (const std::vector<float>& factors : walks) {
    all.push_back({.dim = largest, .dim_v = 112, .seqlen_q = 40, .seqlen_kv = 0});
    all.back().seqlen_kv = 64 * int64_t(factors.size()) - 10;
    all.back().v_factors = factors;
  }
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 200, .seqlen_kv = 400});
  all.back().flags = ATTN_CAUSAL;
  all.back().v_factors = walks[5];
  return all;
}

// With softcap, ALiBi, both, or pages, and the others.
std::vector<Forward> scored_forwards() {
  std::vector<Forward> all;
  for (int terms = 1; terms < 4; ++terms) {
    all.push_back({.dim = largest, .dim_v = 80, .seqlen_q = 300, .seqlen_kv = 520});
    all.back().group = 2;
    all.back().flags = terms == 2 ? ATTN_CAUSAL : ATTN_SINKS;
    if (terms & 1) all.back().flags |= ATTN_ALIBI;
    all.back().softcap = terms & 2 ? 3 : 0;
    all.back().scale = terms == 2 ? -0.3f : 0.05f;
  }
  // A high cap: the last bits of a score's tanh are many of its weight.
  for (const float scale : {0.3f, 1.3f, 4.0f}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 256, .seqlen_kv = 64});
    all.back().softcap = 100;
    all.back().scale = scale;
  }
  all.push_back({.dim = largest, .dim_v = 80, .seqlen_q = 150, .seqlen_kv = 500});
  all.back().batch = 2;
  all.back().flags = ATTN_CAUSAL;
  all.back().paged = true;
  for (const Forward& f : forwards()) all.push_back(f);
  return all;
}

// With a bias of both types, and the others.
std::vector<Forward> biased_forwards() {
  std::vector<Forward> all;
  for (const attn_dtype type : {ATTN_F32, ATTN_F16}) {
    all.push_back({.dim = largest, .dim_v = 112, .seqlen_q = 300, .seqlen_kv = 520});
    all.back().batch = all.back().group = 2;
    all.back().flags = type == ATTN_F32 ? uint32_t(ATTN_CAUSAL) : 0u;
    all.back().scale = 0.05f;
    all.back().bias = true;
    all.back().bias_type = type;
  }
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 64, .seqlen_kv = 1024});
  all.back().bias = all.back().single = true;
  // Keys hidden from all in the first tile of the walk, and in the last.
  for (const uint32_t flags : {0u, uint32_t(ATTN_WINDOW)}) {
    all.push_back({.dim = 64, .dim_v = largest, .seqlen_q = 64, .seqlen_kv = 250});
    all.back().bias = true;
    all.back().flags = flags;
    all.back().left = 100;
  }
  for (const Forward& f : scored_forwards()) all.push_back(f);
  return all;
}

std::vector<MakeProblem> forward_problems(const std::string& kernel, bool prepare, int64_t dim,
                                          const std::vector<Forward>& list) {
  std::vector<MakeProblem> all;
  for (const Forward& f : list) {
    all.push_back([kernel, prepare, dim, f](Memory& memory, uint32_t data) {
      return forward_problem(memory, data, kernel, prepare, dim, f);
    });
  }
  return all;
}
// What 16-bit kernels have beyond those in fp8: lse of the weights as rounded; for their half 1,
// scores of which the maximum is taken off, that grow afterwards, beside rows with fractions;
// results halfway between two numbers of bf16, as means of two values; edges of masks at each key
// of a lane; and head dims that end within 16.
std::vector<Forward> forwards_in_16_bits() {
  std::vector<Forward> all;
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 64, .seqlen_kv = 128});
  all.back().flags = ATTN_SPLIT_INVARIANT;
  all.back().scale = 3e7f;
  all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 150, .seqlen_kv = 200});
  all.back().flags = ATTN_SPLIT_INVARIANT | ATTN_SINKS;
  all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 64, .seqlen_kv = 64});
  all.back().flags = ATTN_WINDOW;
  all.back().left = 1;
  all.back().right = 0;
  all.back().scale = 1e-30f;
  all.back().out_type = ATTN_BF16;

  for (const uint32_t mask : {uint32_t(ATTN_CAUSAL), 0u}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 64, .seqlen_kv = 520});
    all.back().flags = mask;
    all.back().scale = 3e7f;
    all.back().uneven = true;
  }
  for (const auto& [queries, keys] :
       {std::pair{32, 64}, {64, 32}, {64, 64}, {64, 224}, {32, 192}}) {
    all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = queries, .seqlen_kv = keys});
    all.back().flags = ATTN_CAUSAL | ATTN_WINDOW;
    all.back().left = 96;
  }
  // No key, and results that go through the registers that Q is loaded to.
  all.push_back({.dim = 64, .dim_v = 64, .seqlen_q = 150, .seqlen_kv = 64});
  all.back().seqlens = {0};
  all.back().out_type = ATTN_BF16;
  for (const attn_dtype out_type : {ATTN_F32, ATTN_F16, ATTN_BF16}) {
    for (const int64_t dim_v : {int64_t{8}, int64_t{40}, int64_t{72}, int64_t{104}, largest}) {
      all.push_back({.dim = 24, .dim_v = dim_v, .seqlen_q = 40, .seqlen_kv = 30});
      all.back().out_type = out_type;
      if (dim_v % 64 == 40) all.back().nan_v = Forward::in_one_of_four;
    }
    all.push_back(all.back());
    all.back().nan_v = Forward::in_every_other_eight;
  }
  return all;
}

// What fp8 kernels have beyond those in 16 bits: out in fp8, pages without block masks, and head
// dims that end within 32 for each type of out.
std::vector<Forward> forwards_in_fp8(bool masked) {
  std::vector<Forward> all;
  for (const attn_dtype out_type : {ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ}) {
    all.push_back({.dim = largest, .dim_v = largest, .seqlen_q = 70, .seqlen_kv = 130});
    all.back().flags = ATTN_OUT_SCALE;
    all.back().out_type = out_type;
    all.back().nan = true;
    // Results of both signs that become 0.
    all.push_back(all.back());
    all.back().out_scale = out_type == ATTN_F8_E5M2 ? 0x1p-17f : 0x1p-10f;
  }
  for (const attn_dtype out_type :
       {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ})
    for (const int64_t dim_v : {int64_t{16}, int64_t{48}, int64_t{80}, int64_t{112}, largest}) {
      all.push_back({.dim = 16, .dim_v = dim_v, .seqlen_q = 40, .seqlen_kv = 30});
      all.back().out_type = out_type;
      if (dim_v % 64 == 48) all.back().nan_v = Forward::in_one_of_four;
      if (dim_v == largest) all.back().nan_v = Forward::in_every_other_eight;
    }
  if (masked) return all;
  all.push_back({.dim = 32, .dim_v = 48, .seqlen_q = 33, .seqlen_kv = 70});
  all.back().batch = 2;
  all.back().cu_seqlens_q = {5, 25, 70};
  all.back().out_type = ATTN_F8_E4M3FN;
  // Pages, of which the walk's first tile lacks some keys, and lacks none (set_missing).
  for (const int64_t keys : {500, 190}) {
    all.push_back({.dim = largest, .dim_v = 80, .seqlen_q = 150, .seqlen_kv = keys});
    all.back().batch = 2;
    all.back().flags = ATTN_CAUSAL;
    all.back().paged = true;
  }
  return all;
}

// With keys that no query sees, and those of `others` that have what _direct takes.
std::vector<Forward> direct_forwards(const std::vector<Forward>& others) {
  std::vector<Forward> all;
  for (const uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_CAUSAL_TOP_LEFT)})
    for (const int32_t keys : {360, 430}) {
      all.push_back({.dim = 128, .dim_v = 128, .seqlen_q = 250, .seqlen_kv = 430});
      all.back().batch = 4;
      all.back().group = all.back().heads_kv = 2;
      all.back().flags = flags;
      all.back().seqlens = {keys, 430, 0, 61};
      all.back().nan = flags == ATTN_CAUSAL;
      if (keys == 430) all.back().scale = 0.02f;
    }
  for (const attn_dtype out_type : {ATTN_F16, ATTN_BF16}) {
    all.push_back({.dim = 128, .dim_v = 128, .seqlen_q = 70, .seqlen_kv = 130});
    all.back().out_type = out_type;
    all.back().nan = true;
  }
  for (Forward f : others) {
    if (f.flags & ATTN_WINDOW || !f.kv_begins.empty() || f.paged) continue;
    f.dim = f.dim_v = 128;
    all.push_back(f);
  }
  return all;
}

std::vector<MakeProblem> forward_problems_of(const std::string& kernel) {
  const bool masked = kernel.ends_with("_mask");
  std::vector<Forward> list = masked                          ? masked_forwards()
                              : kernel.ends_with("_score")    ? scored_forwards()
                              : kernel.ends_with("_bias")     ? biased_forwards()
                              : kernel.ends_with("_descaled") ? descaled_forwards()
                                                              : forwards();
  for (Forward f : type_in(kernel) ? forwards_in_16_bits() : forwards_in_fp8(masked)) {
    if (masked) f.kinds = {2};
    list.push_back(f);
  }
  if (kernel.ends_with("_direct")) list = direct_forwards(list);
  return forward_problems(kernel, false, kernel.find("_d64") != kernel.npos ? 64 : 128, list);
}
std::vector<MakeProblem> prepare_problems(const std::string& prepare) {
  std::vector<MakeProblem> all;
  for (const int64_t dim : {128, 64}) {
    const std::string type = prepare == "prepare_gfx942_fp8" ? "fp8" : "bf16";
    const std::string kernel = "fwd_gfx942_" + type + "_d" + std::to_string(dim);
    std::vector<Forward> list = forwards();
    list.push_back({.dim = dim, .dim_v = dim, .seqlen_q = 1, .seqlen_kv = 130});
    list.back().batch = list.back().heads_kv = 3;
    list.back().backwards = true;
    // Sequences that end in each of the 16 keys of a thread.
    for (int64_t keys = 1; keys < 16; ++keys)
      list.push_back({.dim = dim, .dim_v = dim, .seqlen_q = 1, .seqlen_kv = keys});
    for (const MakeProblem& make : forward_problems(kernel, true, dim, list)) all.push_back(make);
  }
  return all;
}

// To add a kernel: write the function that lists its problems, each made with a Maker, so that
// every instruction of it is reached (which the tests check), and name it here.
struct Shipped {
  const char* name;
  std::vector<MakeProblem> (*problems)(const std::string& name);
  bool slow = false;  // too slow for every run of the tests
};
constexpr Shipped all_shipped[] = {{"merge_gfx942", merge_problems},
                                   {"convert_gfx942", convert_problems},
                                   {"prepare_gfx942_fp8", prepare_problems},
                                   {"kv_append_gfx942", append_problems},
                                   {"prepare_gfx942_16bit", prepare_problems},
                                   {"prepare_gfx942_fp8_segments", segment_problems},
                                   {"prepare_gfx942_fp8_descaled", segment_problems},
                                   {"prepare_gfx942_16bit_segments", segment_problems},
                                   {"fwd_gfx942_fp8_d64", forward_problems_of, true},
                                   {"fwd_gfx942_fp8_d128", forward_problems_of, true},
                                   {"fwd_gfx942_fp8_d64_mask", forward_problems_of, true},
                                   {"fwd_gfx942_fp8_d128_mask", forward_problems_of, true},
                                   {"fwd_gfx942_fp8_d64_descaled", forward_problems_of, true},
                                   {"fwd_gfx942_fp8_d128_descaled", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d64", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d128", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d64_mask", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d128_mask", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d64", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d128", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d64_mask", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d128_mask", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d64_bias", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d128_bias", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d64_bias", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d128_bias", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d64_score", forward_problems_of, true},
                                   {"fwd_gfx942_bf16_d128_score", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d64_score", forward_problems_of, true},
                                   {"fwd_gfx942_f16_d128_score", forward_problems_of, true},
                                   {"decode_gfx942_bf16_d64", decode_problems, true},
                                   {"decode_gfx942_f16_d64", decode_problems, true},
                                   {"decode_gfx942_bf16_d128", decode_problems, true},
                                   {"decode_gfx942_f16_d128", decode_problems, true},
                                   {"decode_gfx942_fp8_d64", decode_problems, true},
                                   {"decode_gfx942_fp8_d128", decode_problems, true},
                                   {"decode_gfx942_q8_0_d64", decode_problems, true},
                                   {"decode_gfx942_q8_0_d128", decode_problems, true},
                                   {"decode_gfx942_q4_0_d128", decode_problems, true},
                                   {"fwd_gfx950_fp8_d128_direct", forward_problems_of, true}};

}  // namespace

std::vector<std::string> shipped_kernels(bool slow) {
  std::vector<std::string> names;
  for (const Shipped& s : all_shipped)
    if (s.slow == slow && s.name == named_for(s.name, "gfx942")) names.push_back(s.name);
  return names;
}

std::vector<std::string> shipped_on_gfx950() {
  std::vector<std::string> names;
  for (const Shipped& s : all_shipped)
    if (const std::string name = on_gfx950(s.name); name != "") names.push_back(name);
  return names;
}

std::string on_gfx950(const std::string& name) {
  const std::string other = named_for(name, "gfx950");
  return find_kernel(other.c_str()) || other.starts_with("prepare_gfx950_") ? other : "";
}

std::unique_ptr<gfx9emu::CodeObject> load_shipped(const std::string& name, Memory* memory) {
  const std::string arch = name.substr(name.find("gfx9"), 6);
  std::ifstream in(std::string(ATTN_GFX9_IMAGES_DIR) + "/" + arch + "/" + name + ".hsaco",
                   std::ios::binary);
  if (!in) return nullptr;
  const std::vector<char> chars((std::istreambuf_iterator<char>(in)), {});
  std::string error;
  return gfx9emu::CodeObject::load(std::as_bytes(std::span(chars)), memory, &error);
}

namespace {

std::vector<MakeProblem> problems_of(const std::string& name) {
  const std::string on_gfx942 = named_for(name, "gfx942");
  const auto* shipped =
      std::find_if(std::begin(all_shipped), std::end(all_shipped),
                   [&](const Shipped& s) { return on_gfx942 == named_for(s.name, "gfx942"); });
  return shipped->problems(shipped->name);
}

ShippedRun run_problem(const std::string& name, const MakeProblem& make,
                       const gfx9emu::CodeObject& object, Memory& memory,
                       const gfx9emu::Options& options, uint32_t data) {
  ShippedRun result;
  making_for_gfx950 = name != named_for(name, "gfx942");
  const ShippedProblem p = make(memory, data);
  making_for_gfx950 = false;
  const gfx9emu::Report report = gfx9emu::launch(
      memory, *object.kernel(name), {p.launch.grid[0], p.launch.grid[1], p.launch.grid[2]},
      {p.launch.block[0], p.launch.block[1], p.launch.block[2]}, p.kernarg, 0, options);
  for (const gfx9emu::Fault& f : report.faults) {
    if (!f.warning && result.fault.empty()) result.fault = f.to_string();
  }
  for (int c = 0; c < gfx9emu::class_count; ++c) {
    using enum gfx9emu::Class;
    const auto cls = gfx9emu::Class(c);
    if (cls != Wait && cls != Nop && cls != Barrier) result.work += report.counters.instructions[c];
  }
  if (options.trace && result.fault.empty())
    result.clocks = gfx9emu::run_model(gfx9emu::model_waves(object.program(), report.traces),
                                       gfx9emu::ModelSettings(object.arch()))
                        .clocks;
  for (const auto& trace : report.traces) {
    for (const gfx9emu::TraceEntry& e : trace) result.executed.insert(e.inst);
  }
  for (const auto& [at, bytes] : p.outputs) {
    const size_t before = result.outputs.size();
    result.outputs.resize(before + bytes);
    memory.read(at, std::span(result.outputs).subspan(before));
  }
  for (const uint64_t at : p.allocations) memory.free(at);
  return result;
}

}  // namespace

ShippedRun run_shipped(const std::string& name, const gfx9emu::CodeObject& object, Memory& memory,
                       const gfx9emu::Options& options, uint32_t data, const ShippedRun* right) {
  ShippedRun result;
  for (const MakeProblem& make : problems_of(name)) {
    ShippedRun one = run_problem(name, make, object, memory, options, data);
    result.fault = one.fault;
    result.outputs.insert(result.outputs.end(), one.outputs.begin(), one.outputs.end());
    result.work += one.work;
    result.executed.insert(one.executed.begin(), one.executed.end());
    result.clocks += one.clocks;
    const size_t number = result.problems.size();
    const bool differs = right && one.outputs != right->problems[number].outputs;
    result.problems.push_back(std::move(one));
    if (differs || !result.fault.empty()) break;
  }
  return result;
}

ShippedRun run_shipped_problem(const std::string& name, size_t number,
                               const gfx9emu::CodeObject& object, Memory& memory,
                               const gfx9emu::Options& options, uint32_t data) {
  return run_problem(name, problems_of(name)[number], object, memory, options, data);
}

}  // namespace attn::test
