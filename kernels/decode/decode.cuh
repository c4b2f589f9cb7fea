// Attention of a few queries against many keys. K and V are read once for all query heads of their
// head: these, and the queries, are the columns of S^T = K Q^T and O^T = V^T P^T, up to 16. One or
// two producer warps of a block load units of 64 keys into a ring buffer. Each of four warps has 16
// keys of a unit and its own softmax state. They merge at the end of a head's units.
#pragma once
#include "../common/tanh.cuh"
#include "../ptx/convert_fp8.h"
#include "../ptx/movmatrix.h"
#if __CUDA_ARCH__ >= 900
#include "../ptx/grid.h"
#endif
#include "codes.cuh"
#include "load.cuh"
#include "merge.cuh"
#include "query.cuh"
#include "variants.h"
#if __CUDA_ARCH__ >= 900
#include "swapped.cuh"
#endif

namespace attn::decode {

// A warp's part of the work.
template <class T, class KV, DecodeTile tile, int rows>
struct Decoder {
  using Product = typename KV::Product;
  static constexpr int head_dim = tile.head_dim, head_dim_v = tile.head_dim_v;
  static constexpr int q_tiles = rows / 8, k_steps = head_dim / 16, v_tiles = head_dim_v / 16;
  static constexpr int q_pitch = (head_dim + 63) / 64 * 128;
  // Of own_types Q lies there as K of each kind takes it: of its type, in blocks, i8, i4.
  static constexpr int q_bytes = rows * q_pitch, block_q = q_bytes,
                       all_q = KV::own_types ? 4 * q_bytes : q_bytes;
  static_assert(all_q <= tile.merge_bytes());

  const attn_decode_kernarg& a;
  DecodeShared<tile>& shared;
  GroupShared& group;
  float* merge;  // in shared memory: Q, and when a head's units end the warps' sums
  Head at;
  int all_begin, all_end;  // keys that all queries see
  float o[v_tiles][q_tiles][4];
  float reference[q_tiles][2];  // log2 domain; -inf: nothing seen yet
  float sum[q_tiles][2];        // of the weights of the lane's keys
  // Of own_types: weights count 2^lift times in o, so that those of small scales are f16 with all
  // their bits; and whether these are of bf16.
  int lift = 0;
  bool bf16_weights = false;

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int used_rows() const {
    const int used = at.seqlen_q * a.group - at.first_row;
    return tile.tiled ? min(used, rows) : used;
  }
  __device__ __forceinline__ int lane_row(int n, int i) const { return 8 * n + lane() % 4 * 2 + i; }

  __device__ __forceinline__ void begin_head() {
    const KeyBand seen = a.mask.band(at.seqlen_q, at.seqlen_kv);
    const auto keys_of = [&](int query) {
      return make_int2(clamp(query + seen.lower, 0, at.seqlen_kv),
                       clamp(query + seen.upper, 0, at.seqlen_kv));
    };
    const int last = Row(a, at, used_rows() - 1).query;
    all_begin = keys_of(last).x;
    all_end = keys_of(Row(a, at, 0).query).y;
    if (threadIdx.x < rows) {
      const int query = min(Row(a, at, threadIdx.x).query, last);
      group.keys[threadIdx.x] = keys_of(query);
      if (a.tree) group.tree[threadIdx.x] = tree_words(a, at, query);
    }
    if (a.tree) all_end = min(all_end, at.seqlen_kv - int(a.tree_mask.keys));
    load_q();
    meet();
    if (KV::own_types) lift = max_lift;
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        reference[n][i] = -infinity();
        sum[n][i] = 0;
      }
#pragma unroll
      for (int v = 0; v < v_tiles; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[v][n][i] = 0;
    }
  }

  // Q to shared memory, 8 threads per row, two neighbouring columns at once.
  __device__ __forceinline__ void load_q() {
    const int r = threadIdx.x / 8, t = threadIdx.x % 8;
    if (r >= rows) return;
    const bool used = r < used_rows();
    const char* const from = q_address(a, at, Row(a, at, used ? r : 0));
    unsigned q[k_steps];  // columns 16 * step + 2t and the one behind
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      const int column = 16 * step + 2 * t;
      q[step] =
          used && column < a.head_dim ? *reinterpret_cast<const unsigned*>(from + 2 * column) : 0;
    }
    float scale = a.scale;
    // Where they go is not known ahead: there are few registers.
    if constexpr (KV::own_types)
      return store_q_images(q, int(ptx::recompute(r)), int(ptx::recompute(t)));
    if (KV::scaled) scale *= to_f16(q);
    if (t == 0) group.q_scale[r] = scale;
    const int chunk = KV::scaled ? t % 2 : t / 4, word = KV::scaled ? t / 2 : t % 4;
#pragma unroll
    for (int step = 0; step < k_steps; ++step)
      *reinterpret_cast<unsigned*>(reinterpret_cast<char*>(merge) +
                                   chunk_offset<q_pitch>(r, 2 * step + chunk) + 4 * word) = q[step];
  }

  __device__ __forceinline__ float to_f16(unsigned (&q)[k_steps]) const {
    return q_to_f16(a.q_type, [&](auto&& each) {
#pragma unroll
      for (unsigned& pair : q) each(pair);
    });
  }

  // Rows scaled by the same powers of two in both types.
  __device__ __forceinline__ void store_q_images(unsigned (&q)[k_steps], int r, int t) {
    unsigned plain[k_steps];
#pragma unroll
    for (int step = 0; step < k_steps; ++step) plain[step] = q[step];
    const float undo = to_f16(q), factor = 1 / undo;
    if (t == 0) group.q_scale[r] = a.scale * undo;
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      if (a.q_type == attn_element_f16)
        plain[step] = q[step];
      else
        plain[step] = BF16::pack(BF16::unpack(plain[step] & 0xffff) * factor,
                                 BF16::unpack(plain[step] >> 16) * factor);
      const auto store = [&](int image, int chunk, int at, auto x) {
        *reinterpret_cast<decltype(x)*>(reinterpret_cast<char*>(merge) + image +
                                        chunk_offset<q_pitch>(r, chunk) + int(sizeof x) * at) = x;
      };
      store(0, 2 * step + t / 4, t % 4, plain[step]);
      const int place = place_of_pair(step / 2, t);
      store(block_q, 2 * step + place % 2, place / 2, q[step]);
      using OfI8 = I8<head_dim>;
      using OfI4 = I4<head_dim>;
      store(OfI8::image * q_bytes, OfI8::q_chunk(step, t), OfI8::q_word(t), q[step]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = step % 2 * 16 + 2 * t + i;
        store(OfI4::image * q_bytes, step / 2 * 4 + OfI4::q_chunk(e), OfI4::q_half(e),
              (unsigned short)(q[step] >> 16 * i));
      }
    }
  }

  // The warp's keys of a unit.
  __device__ __forceinline__ void take(unsigned stage, const Unit& unit) {
    const int warp = this->warp();
    unsigned valid = unit.valid[warp / 2] >> 16 * (warp % 2) & 0xffff;
    if (valid == 0) return;
    const float k_descale = KV::scaled && !KV::own_types ? unit.k_descale : 1;
    float s[q_tiles][4] = {};
    if constexpr (KV::own_types)
      multiply_own_k(s, stage, unit.k_type, unit.k_shift);
    else
      multiply_k<KV, Product>(s, stage);

    const int first = unit.first + warp_keys * warp;
    change_scores(s, first, k_descale);
    if (valid != 0xffff || first < all_begin || first + warp_keys > all_end) {
      hide(s, first, valid);
      if (a.tree) valid = hide_by_tree(s, first);
    }
    if constexpr (KV::own_types && rows <= 8) {
      weigh_own_v(s, stage, unit, valid);
    } else if constexpr (KV::own_types) {
      weigh_own_v_in_turn(s, stage, unit, valid);
    } else {
      unsigned p[q_tiles][2];
#pragma unroll
      for (int n = 0; n < q_tiles; ++n) weigh(s[n], n, p[n]);
      add_v(p, stage + tile.k_bytes() + warp * warp_keys * panel_pitch, valid,
            KV::scaled ? unit.v_descale : 1);
    }
  }

  // Values of keys that are not valid may be anything: the lane's keys are 2t and 2t + 8, and those
  // behind them.
  __device__ __forceinline__ uint2 there_of(unsigned valid) const {
    const auto mask = [](unsigned two) {
      return (two & 1 ? 0xffff : 0) | (two & 2 ? 0xffff0000 : 0);
    };
    const unsigned own = valid >> lane() % 4 * 2;
    return make_uint2(mask(own), mask(own >> 8));
  }

  __device__ __forceinline__ void add_v(const unsigned (&p)[q_tiles][2], unsigned v_rows,
                                        unsigned valid, float v_descale) {
    const bool all = valid == 0xffff;
    const unsigned v_lane = v_rows + KV::v_lane(lane());
    const uint2 there = there_of(valid);
#pragma unroll
    for (int v = 0; v < v_tiles; v += 2) {
      unsigned columns[2][4];
      KV::load_v(columns, v_lane, v);
      if (!all) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) columns[i][j] &= j < 2 ? there.x : there.y;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < q_tiles; ++n) {
          if (KV::scaled) {
            float sums[4] = {0, 0, 0, 0};
            Product::mma(sums, columns[i], p[n][0], p[n][1]);
#pragma unroll
            for (int j = 0; j < 4; ++j) o[v + i][n][j] = fmaf(sums[j], v_descale, o[v + i][n][j]);
          } else {
            Product::mma(o[v + i][n], columns[i], p[n][0], p[n][1]);
          }
        }
    }
  }

  // Products of the warp's keys, whose rows lie `pitch` apart, and Q of this image.
  template <class K, class Product, int image = 0, int pitch = panel_pitch>
  __device__ __forceinline__ void multiply_k(float (&s)[q_tiles][4], unsigned stage) const {
    float odd[q_tiles][4] = {};  // two chains of products
    const unsigned k_lane = stage + warp() * warp_keys * pitch + K::k_lane(lane());
    const unsigned q_lane = ptx::recompute(address(merge) + image * q_bytes +
                                           chunk_offset<q_pitch>(lane() % 8, lane() / 8));
#pragma unroll
    for (int step = 0; step < k_steps; step += 2) {
      unsigned k[2][4], q[q_tiles][4];
      K::load_k(k, k_lane, step);
#pragma unroll
      for (int n = 0; n < q_tiles; ++n) load_q_columns(q[n], q_lane, step, n);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < q_tiles; ++n)
          Product::mma(i == 0 ? s[n] : odd[n], k[i], q[n][2 * i], q[n][2 * i + 1]);
    }
#pragma unroll
    for (int n = 0; n < q_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
  }
  // Of 8 rows of Q, columns of two steps.
  static __device__ __forceinline__ void load_q_columns(unsigned (&q)[4], unsigned q_lane, int step,
                                                        int n) {
    ptx::ldmatrix(q, (q_lane ^ 2 * step % 8 * 16) + 2 * step / 8 * 128 + 8 * n * q_pitch);
  }

  // Each block's products are summed up for themselves, for they have a scale.
  template <class Block>
  __device__ __forceinline__ void multiply_block_k(float (&s)[q_tiles][4], unsigned stage) const {
    using Rows = BlockRows<Block, head_dim>;
    const unsigned row = stage + warp() * warp_keys * Rows::pitch + lane() / 4 * Rows::pitch,
                   k_lane = row + lane() % 4 * 4;
    const unsigned q_lane =
        ptx::recompute(address(merge) + block_q + chunk_offset<q_pitch>(lane() % 8, lane() / 8));
#pragma unroll
    for (int block = 0; block < Rows::blocks; ++block) {
      unsigned k[2][4];
      Rows::load_k(k, k_lane, block);
      const float2 scale = Rows::k_scales(row, block);
#pragma unroll
      for (int n = 0; n < q_tiles; ++n) {
        unsigned q[4];
        load_q_columns(q, q_lane, 2 * block, n);
        float sums[4] = {0, 0, 0, 0};
        F16::mma(sums, k[0], q[0], q[1]);
        F16::mma(sums, k[1], q[2], q[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = fmaf(sums[i], i < 2 ? scale.x : scale.y, s[n][i]);
      }
    }
  }
  __device__ __forceinline__ void multiply_own_k(float (&s)[q_tiles][4], unsigned stage, int type,
                                                 unsigned shift) const {
    if (type == attn_element_q8_0)
      multiply_block_k<Q8_0>(s, stage + shift);
    else if (type == attn_element_q4_0)
      multiply_block_k<Q4_0>(s, stage + shift);
    else if (type == attn_element_i8)
      multiply_code_k<I8<head_dim>>(s, stage, shift);
    else if (type == attn_element_i4)
      multiply_code_k<I4<head_dim>>(s, stage, shift);
    else if (type == attn_element_f16)
      multiply_k<Same<F16>, F16>(s, stage);
    else
      multiply_k<Same<BF16>, BF16>(s, stage);
  }
  __device__ __forceinline__ KeyScales key_scales(unsigned stage, int which, int halves) const {
    return {stage + a.scales_at + which * scale_bytes + 4 * warp() * warp_keys, halves};
  }
  template <class K>
  __device__ __forceinline__ void multiply_code_k(float (&s)[q_tiles][4], unsigned stage,
                                                  int halves) const {
    multiply_k<K, F16, K::image, K::P::pitch>(s, stage);
    const float2 scale = key_scales(stage, 0, halves).k_scales(lane());
#pragma unroll
    for (int n = 0; n < q_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= i < 2 ? scale.x : scale.y;
  }

  // 2^lift times the largest weight is the largest power of two in f16.
  static constexpr int max_lift = 15;
  __device__ __forceinline__ static float power_of_two(int exponent) {
    return __int_as_float((127 + exponent) << 23);
  }
  __device__ __forceinline__ void lower_lift(int most) {
    if (most >= lift) return;
    const float factor = power_of_two(most - lift);
    lift = most;
#pragma unroll
    for (int v = 0; v < v_tiles; ++v)
#pragma unroll
      for (int n = 0; n < q_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[v][n][i] *= factor;
  }
  // The lane's scales of V, of this many blocks, 0 of keys that are not valid. Weights times scales
  // stay below 2^15.
  template <int blocks, class Load>
  __device__ __forceinline__ void load_v_scales(unsigned (&scales)[v_tiles / 2][2], unsigned valid,
                                                const Load& load) {
#pragma unroll
    for (int block = 0; block < blocks; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[block][i] = load(block, i);
    if (valid != 0xffff) {
      const uint2 there = there_of(valid);
#pragma unroll
      for (int block = 0; block < blocks; ++block)
        scales[block][0] &= there.x, scales[block][1] &= there.y;
    }
    unsigned most = 0;
#pragma unroll
    for (int block = 0; block < blocks; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i) most = ptx::max_abs_f16x2(most, scales[block][i]);
    most = __reduce_max_sync(0xffffffff, max(most & 0xffff, most >> 16));
    // The largest is below 2^(exponent - 14); infinity and NaN stay what they are.
    const int exponent = min(int(most >> 10), 30);
    lower_lift(min(max_lift, 29 - exponent));
  }
  template <class Block>
  __device__ __forceinline__ void add_block_v(const unsigned (&p)[q_tiles][2],
                                              const unsigned (&scales)[v_tiles / 2][2],
                                              unsigned v_rows) {
#pragma unroll
    for (int block = 0; block < v_tiles / 2; ++block) {
      unsigned v[2][4];
      BlockRows<Block, head_dim_v>::load_v(v, v_rows, block, lane());
#pragma unroll
      for (int n = 0; n < q_tiles; ++n) {
        const unsigned low = ptx::mul_f16x2(p[n][0], scales[block][0]),
                       high = ptx::mul_f16x2(p[n][1], scales[block][1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) F16::mma(o[2 * block + i][n], v[i], low, high);
      }
    }
  }
  template <class V>
  __device__ __forceinline__ void add_code_v(const unsigned (&p)[q_tiles][2],
                                             const unsigned (&scales)[2], unsigned v_rows) {
    unsigned weights[q_tiles][2];
#pragma unroll
    for (int n = 0; n < q_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) weights[n][i] = ptx::mul_f16x2(p[n][i], scales[i]);
    const uint2 v_lane = V::v_lane(v_rows + warp() * warp_keys * V::P::pitch, lane());
#pragma unroll
    for (int block = 0; block < v_tiles / 2; ++block) {
      unsigned v[2][4];
      V::load_v(v, v_lane, block, lane());
#pragma unroll
      for (int n = 0; n < q_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          F16::mma(o[2 * block + i][n], v[i], weights[n][0], weights[n][1]);
    }
  }
  template <class Product>
  __device__ __forceinline__ void add_plain_v(const unsigned (&p)[q_tiles][2], unsigned v_rows,
                                              uint2 there) {
#pragma unroll
    for (int block = 0; block < v_tiles / 2; ++block) {
      unsigned v[2][4];
      PlainRows::load_v(v, v_rows, block, lane());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] &= j < 2 ? there.x : there.y;
#pragma unroll
        for (int n = 0; n < q_tiles; ++n) Product::mma(o[2 * block + i][n], v[i], p[n][0], p[n][1]);
      }
    }
  }
  __device__ __forceinline__ void weigh_all(const float (&s)[q_tiles][4], unsigned (&p)[q_tiles][2],
                                            bool bf16) {
    bf16_weights = bf16;
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) weigh(s[n], n, p[n]);
  }
  template <class Block>
  __device__ __forceinline__ void weigh_block_v(const float (&s)[q_tiles][4], unsigned v_rows,
                                                unsigned valid) {
    using Rows = BlockRows<Block, head_dim_v>;
    unsigned scales[v_tiles / 2][2], p[q_tiles][2];
    const unsigned from = v_rows + warp() * warp_keys * Rows::pitch + Rows::lane_v(lane());
    load_v_scales<v_tiles / 2>(scales, valid,
                               [&](int block, int i) { return Rows::v_scales(from, block, i); });
    weigh_all(s, p, false);
    add_block_v<Block>(p, scales, from);
  }
  template <class V>
  __device__ __forceinline__ void weigh_code_v(const float (&s)[q_tiles][4], unsigned stage,
                                               int halves, unsigned valid) {
    unsigned scales[v_tiles / 2][2], p[q_tiles][2];
    const KeyScales of_keys = key_scales(stage, 1, halves);
    load_v_scales<1>(scales, valid, [&](int, int i) { return of_keys.v_scales(lane(), i); });
    weigh_all(s, p, false);
    add_code_v<V>(p, scales[0], stage + a.k_bytes);
  }
  template <class Product>
  __device__ __forceinline__ void weigh_plain_v(const float (&s)[q_tiles][4], unsigned v_rows,
                                                unsigned valid) {
    unsigned p[q_tiles][2];
    weigh_all(s, p, std::is_same_v<Product, BF16>);
    add_plain_v<Product>(p, v_rows + warp() * warp_keys * panel_pitch, there_of(valid));
  }
  // What each type's values need at once, in one branch of the warp.
  __device__ __forceinline__ void weigh_own_v(const float (&s)[q_tiles][4], unsigned stage,
                                              const Unit& unit, unsigned valid) {
    const int type = unit.v_type, shift = unit.v_shift;
    const unsigned v_rows = stage + a.k_bytes;
    if (type == attn_element_q8_0)
      weigh_block_v<Q8_0>(s, v_rows + shift, valid);
    else if (type == attn_element_q4_0)
      weigh_block_v<Q4_0>(s, v_rows + shift, valid);
    else if (type == attn_element_i8)
      weigh_code_v<I8<head_dim_v>>(s, stage, shift, valid);
    else if (type == attn_element_i4)
      weigh_code_v<I4<head_dim_v>>(s, stage, shift, valid);
    else if (type == attn_element_f16)
      weigh_plain_v<F16>(s, v_rows, valid);
    else
      weigh_plain_v<BF16>(s, v_rows, valid);
  }
  // The same of 16 rows: six times all of that would leave it too few registers.
  __device__ __forceinline__ void weigh_own_v_in_turn(const float (&s)[q_tiles][4], unsigned stage,
                                                      const Unit& unit, unsigned valid) {
    const int type = unit.v_type;
    const unsigned v_rows = stage + a.k_bytes;
    const auto rows_of = [&](auto of) {
      using Rows = decltype(of);
      return v_rows + unit.v_shift + warp() * warp_keys * Rows::pitch + Rows::lane_v(lane());
    };
    const unsigned q8_0_rows = rows_of(BlockRows<Q8_0, head_dim_v>{}),
                   q4_0_rows = rows_of(BlockRows<Q4_0, head_dim_v>{});
    unsigned scales[v_tiles / 2][2], p[q_tiles][2];
    const auto load_block_scales = [&](auto of, unsigned from) {
      load_v_scales<v_tiles / 2>(
          scales, valid, [&](int block, int i) { return decltype(of)::v_scales(from, block, i); });
    };
    if (type == attn_element_q8_0) load_block_scales(BlockRows<Q8_0, head_dim_v>{}, q8_0_rows);
    if (type == attn_element_q4_0) load_block_scales(BlockRows<Q4_0, head_dim_v>{}, q4_0_rows);
    if (has_row_scale(type)) {
      const KeyScales of_keys = key_scales(stage, 1, unit.v_shift);
      load_v_scales<1>(scales, valid, [&](int, int i) { return of_keys.v_scales(lane(), i); });
    }
    weigh_all(s, p, type == attn_element_bf16);
    const unsigned plain_rows = v_rows + warp() * warp_keys * panel_pitch;
    if (type == attn_element_q8_0)
      add_block_v<Q8_0>(p, scales, q8_0_rows);
    else if (type == attn_element_q4_0)
      add_block_v<Q4_0>(p, scales, q4_0_rows);
    else if (type == attn_element_i8)
      add_code_v<I8<head_dim_v>>(p, scales[0], v_rows);
    else if (type == attn_element_i4)
      add_code_v<I4<head_dim_v>>(p, scales[0], v_rows);
    else if (type == attn_element_f16)
      add_plain_v<F16>(p, plain_rows, there_of(valid));
    else
      add_plain_v<BF16>(p, plain_rows, there_of(valid));
  }

  // Weights as the second product takes them, and what these are.
  __device__ __forceinline__ unsigned pack_weights(float x, float y) const {
    if constexpr (!KV::own_types) return Product::pack(x, y);
    const float factor = power_of_two(lift);
    return bf16_weights ? BF16::pack(x * factor, y * factor) : F16::pack(x * factor, y * factor);
  }
  __device__ __forceinline__ float unpack_weight(unsigned short bits) const {
    if constexpr (!KV::own_types) return Product::unpack(bits);
    return (bf16_weights ? BF16::unpack(bits) : F16::unpack(bits)) * power_of_two(-lift);
  }

  // Products become scores in the log2 domain.
  __device__ __forceinline__ void change_scores(float (&s)[q_tiles][4], int first,
                                                float k_descale) const {
    const bool plain = a.softcap == 0 && !a.alibi_slopes;
#pragma unroll
    for (int n = 0; n < q_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = group.q_scale[lane_row(n, i)] * k_descale;
        if (plain) {
          s[n][i] *= factor * log2_e, s[n][2 + i] *= factor * log2_e;
          continue;
        }
        const int r = lane_row(n, i);
        const Row row(a, at, r < used_rows() ? r : 0);
        const int diagonal = row.query + at.seqlen_kv - at.seqlen_q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = s[n][2 * half + i] * factor;
          if (a.softcap > 0) x = a.softcap * tanh_accurate(x / a.softcap);
          if (a.alibi_slopes)
            x -=
                a.alibi_slopes[row.head] * fabsf(float(diagonal - (first + 8 * half + lane() / 4)));
          s[n][2 * half + i] = x * log2_e;
        }
      }
  }

  // Scores of keys that their queries do not see.
  __device__ __forceinline__ void hide(float (&s)[q_tiles][4], int first, unsigned valid) const {
#pragma unroll
    for (int n = 0; n < q_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int2 keys = group.keys[lane_row(n, i)];
        const int begin = clamp(keys.x - first, 0, warp_keys),
                  end = clamp(keys.y - first, begin, warp_keys);
        const unsigned seen = valid & ((1u << end) - (1u << begin));
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (!(seen >> (8 * half + lane() / 4) & 1)) s[n][2 * half + i] = -infinity();
      }
  }

  // The same of the tree's keys, after hide(). Returns a bit for each key that some row sees.
  __device__ __forceinline__ unsigned hide_by_tree(float (&s)[q_tiles][4], int first) const {
    unsigned any = 0;
#pragma unroll
    for (int n = 0; n < q_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const ulonglong2 words = group.tree[lane_row(n, i)];
        const unsigned seen = unsigned(a.tree_mask.seen(words.x, words.y, first, at.seqlen_kv));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned key = 1u << (8 * half + lane() / 4);
          if (!(seen & key)) s[n][2 * half + i] = -infinity();
          if (s[n][2 * half + i] != -infinity()) any |= key;
        }
      }
    return __reduce_or_sync(0xffffffff, any);
  }

  // Weights 2^(s - reference) of the rows of tile n, as the second product takes them.
  // split_invariant: references are integers, so that sums against different ones differ by an
  // exact power of two.
  __device__ __forceinline__ void weigh(const float (&s)[4], int n, unsigned (&p)[2]) {
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) most[i] = fmaxf(s[i], s[2 + i]);
    if (__any_sync(0xffffffff, most[0] > reference[n][0] || most[1] > reference[n][1])) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffff, most[i], step));
        const float top = a.split_invariant ? ceilf(most[i]) : most[i];
        const float next = fmaxf(reference[n][i], top);
        const float shrink = next == -infinity() ? 1 : ptx::ex2(reference[n][i] - next);
        reference[n][i] = next;
        sum[n][i] *= shrink;
#pragma unroll
        for (int v = 0; v < v_tiles; ++v) o[v][n][i] *= shrink, o[v][n][2 + i] *= shrink;
      }
    }
    float used[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) used[i] = reference[n][i] == -infinity() ? 0 : reference[n][i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = ptx::ex2(s[2 * half] - used[0]), y = ptx::ex2(s[2 * half + 1] - used[1]);
      const unsigned pair = pack_weights(x, y);
      if (a.split_invariant) {  // then sums have the weights as rounded
        x = unpack_weight(pair & 0xffff);
        y = unpack_weight(pair >> 16);
      }
      sum[n][0] += x;
      sum[n][1] += y;
      p[half] = ptx::transpose_8x8(pair);
    }
  }

  // A part ends: to the result, or to the workspace.
  // final: of the block, whose ring is free then.
  __device__ __forceinline__ void end_part(const Share& share, const Part& part, bool final,
                                           unsigned ring) {
    const int warp = this->warp();
    const PlacedPart placed = place_of<tile>(a, at, share, part);
    const Parts<tile> parts = {a, placed};
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) {
      meet();  // all have done with Q, or with the rows before
      // Row r's columns lie at ^ 8 (r / 2), so that a store of a warp meets each bank once.
      const auto place = [](int warp, int r, int column) {
        return (warp * 8 + r) * head_dim_v + (column ^ (r / 2 % 4 * 8));
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          sum[n][i] += __shfl_xor_sync(0xffffffff, sum[n][i], step);
        if (lane() < 4) group.stats[warp][lane_row(0, i)] = make_float2(reference[n][i], sum[n][i]);
      }
      const int here = int(ptx::recompute(lane()));
#pragma unroll
      for (int v = 0; v < v_tiles; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          merge[place(warp, here % 4 * 2 + i % 2, KV::v_column(v, i / 2, here))] =
              KV::own_types ? o[v][n][i] * power_of_two(-lift) : o[v][n][i];
      meet();
#pragma unroll 1
      for (int r = RowPart<head_dim_v>::row(); r < 8; r += RowPart<head_dim_v>::rows) {
        RowPart<head_dim_v> row;
        row.template add<decode_warps>(
            [&](int w) { return group.stats[w][r]; },
            [&](int w) {
              return *reinterpret_cast<const float4*>(merge + place(w, r, row.column()));
            });
        if (placed.alone())
          store_result(a, at, 8 * n + r, row);
        else if (8 * n + r < used_rows())
          parts.write(parts.slot(placed.number), 8 * n + r, row);
      }
    }
    if (!placed.alone()) {
      constexpr int place_bytes = 16 * group_threads;
      const int bytes = final ? a.stages * stage_bytes<tile>(a) : tile.merge_bytes();
      parts.arrive(at, used_rows(), final ? ring : address(merge), bytes / place_bytes);
    }
    meet();  // before the next part's Q comes where the sums are
  }

  __device__ __forceinline__ void run(const Work<tile>& work, unsigned ring) {
    Stage stage;
    // The first head is known before its first unit is there.
    const Cursor<tile>& first = work.first;
    at = {first.b,
          first.h,
          first.sequence.first_row,
          first.sequence.seqlen_q,
          first.sequence.seqlen_kv,
          first.sequence.q_begin};
#pragma unroll 1
    while (true) {
      begin_head();
      const auto leave = [&] {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(address(&shared.empty[stage.number]));
        stage.next(a.stages);
      };
#pragma unroll 1
      while (true) {
        wait(shared.full[stage.number], stage.parity);
        const Unit& unit = shared.unit[stage.number];
        take(ring + stage.number * stage_bytes<tile>(a), unit);
        if (unit.last) break;
        leave();
      }
      const Part part = shared.unit[stage.number].part;
      const bool final = shared.unit[stage.number].final;
      leave();
      end_part(work.share, part, final, ring);
      if (final) return;
      wait(shared.full[stage.number], stage.parity);
      const Unit& unit = shared.unit[stage.number];
      at = {unit.b, unit.h, unit.first_row, unit.seqlen_q, unit.seqlen_kv, unit.q_begin};
    }
  }
};

template <class T, class KV, DecodeTile tile, class M>
__device__ __forceinline__ void decode(const attn_decode_kernarg& a, const M& maps) {
  static_assert(tile.element_bytes == KV::bytes);
  constexpr bool engine = Loader<KV, tile, M>::engine;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  DecodeShared<tile>& shared = decode_shared<tile>();
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      ptx::mbarrier_init(address(&shared.full[i]), engine && !a.scales_at ? 1 : 32 + 1);
      ptx::mbarrier_init(address(&shared.empty[i]), decode_warps);
    }
  }
  const unsigned ring = address(shared_memory);
  Loader<KV, tile, M> loader{a, maps, shared, ring, int(threadIdx.x % 32), warp - decode_warps};
#if __CUDA_ARCH__ >= 900
  if (engine) ptx::mbarrier_init_fence();
  ptx::grid_let_next_start();
  ptx::grid_wait();  // before any other access to memory
#endif
  if (a.cu_seqlens_q) {
    if (warp == 0) store_rows_of_nobody<long long>(a, blockIdx.x, gridDim.x);
    if (a.seqlen_q == 0) return;
  }
  const Work<tile> work = find_work<tile>(a, int(threadIdx.x));  // all meet there
  if (work.begin == work.end) return;
  float* merge = reinterpret_cast<float*>(shared_memory + a.stages * stage_bytes<tile>(a));
  if (warp >= decode_warps) {
    loader.run(work);
  } else if (tile.rows_of_group == 8 || (!tile.own_types && a.rows_taken <= 8)) {
    Decoder<T, KV, tile, 8>{a, shared, shared.group, merge}.run(work, ring);
  } else if constexpr (tile.rows_of_group == group_rows) {
    Decoder<T, KV, tile, 16>{a, shared, shared.group, merge}.run(work, ring);
  }
}

// The kernel that a variant is, once `maps` are told apart from the rest of its parameters.
template <int type, DecodeTile tile, class Maps>
__device__ __forceinline__ void run(const attn_decode_kernarg& a, const Maps& maps) {
#if __CUDA_ARCH__ >= 900
  if constexpr (tile.swapped) {
    if constexpr (tile.element_bytes == 2)
      decode_swapped<Same<ElementOf<type>>, tile>(a, maps);
    else
      decode_swapped<Words, tile>(a, maps);
  } else
#endif
      if constexpr (tile.own_types) {
    decode<F16, OwnTypes, tile>(a, maps);
  } else if constexpr (tile.element_bytes == 1) {
    if (a.kv_e5m2)
      decode<F16, Fp8<E5M2>, tile>(a, maps);
    else
      decode<F16, Fp8<E4M3>, tile>(a, maps);
  } else {
    using T = ElementOf<type>;
    decode<T, Same<T>, tile>(a, maps);
  }
}
template <int type, DecodeTile tile>
__device__ __forceinline__ void run(const attn_decode_kernarg& a) {
  run<type, tile>(a, NoMaps{});
}
template <int type, DecodeTile tile>
__device__ __forceinline__ void run(const attn_decode_sm90_kernarg& a) {
  run<type, tile>(a.a, a.map);
}

}  // namespace attn::decode

// The kernel of the variant NAME.
#define ATTN_DECODE(NAME)                                                                 \
  constexpr attn::decode::Variant NAME##_variant =                                        \
      attn::decode::variants[attn::find_variant(attn::decode::variants, #NAME)];          \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile.threads(),             \
                                               NAME##_variant.tile.blocks())              \
      NAME(const __grid_constant__ attn::decode::Kernarg<NAME##_variant.copy_engine> a) { \
    attn::decode::run<NAME##_variant.type, NAME##_variant.tile>(a);                       \
  }
