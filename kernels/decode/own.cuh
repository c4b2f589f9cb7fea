// Decode over K and V of which each segment has types of its own: ggml's blocks, i8, i4,
// f8_e4m3fn_token, nvfp4 or q's type. S^T = K Q^T and O^T = V^T P^T, as in swapped.cuh, but by
// mma.sync, so that any device from sm_90 on has it, and each of the four warps has its own 16 keys
// of a unit and its own softmax. Their sums are added when a part ends.
#pragma once
#include "../ptx/movmatrix.h"
#include "own_load.cuh"
#include "swapped.cuh"

namespace attn::decode {

template <DecodeTile tile>
struct Own : Swapped<OwnTypes, tile> {
  using Base = Swapped<OwnTypes, tile>;
  using Base::a, Base::shared, Base::ring, Base::q_place, Base::at, Base::sum;
  using Base::elements, Base::head_dim, Base::head_dim_v, Base::row_tiles, Base::rows;
  using Base::lane, Base::lane_row, Base::plain, Base::used_rows, Base::warp;
  static constexpr int steps = head_dim / 32;  // of K's columns
  static constexpr int v_tiles = head_dim_v / 16;

  // Weights are 2^(x - base), x in the log2 domain: at most 2^max_top, and 2^slack below when the
  // base moves. So f16 holds them times small scales of V; if scales are large, `top` is less.
  static constexpr int max_top = 15, slack = own_slack;
  static constexpr float nothing = -3.4028235e38f;  // no base yet
  float base[row_tiles][2];
  float top;
  float o[v_tiles][row_tiles][4];
  // What the lane reads of a unit of the types before: places in the stage, of V's scales of i8 and
  // i4 which halves. Q lies in shared memory as K's type takes it.
  unsigned types = 0, k_at, v_at;
  int q_at;  // the lane's words of Q, behind q_place
  union {
    unsigned k_scale_at;
    unsigned k_pitch8;  // of blocks: between keys g and g + 8
  };
  union {
    unsigned v_scale_halves;
    unsigned v_pitch;
  };

  // Each warp has one of the block's K/V heads; those of one head share the keys of a unit.
  __device__ __forceinline__ int heads() const { return 1 << a.heads_log2; }
  __device__ __forceinline__ int warps_of_head() const { return decode_warps >> a.heads_log2; }
  __device__ __forceinline__ int warp_head() const {
    return (warp() << a.heads_log2) / decode_warps;
  }
  __device__ __forceinline__ int stage_keys() const { return unit_keys >> a.heads_log2; }
  __device__ __forceinline__ Head of_head(int head) const {
    Head of = at;
    of.h = (at.h << a.heads_log2) + head;
    return of;
  }

  // Q as products with K of a type take it: of 32 columns and 8 rows a lane's four words.
  __device__ __forceinline__ void load_q(int type) {
    constexpr int lanes = 4 * steps;  // of a row
    const int step = threadIdx.x % lanes / 4, t = threadIdx.x % 4;
    const KeyOrder order = key_order(type);
#pragma unroll 1
    for (int i0 = threadIdx.x / lanes; i0 < heads() * rows; i0 += group_threads / lanes) {
      const int head = i0 / rows, r = i0 % rows;
      const bool used = r < used_rows();
      const Head of = of_head(head);
      const char* const from = q_address(a, of, Row(a, of, used ? r : 0)) + 2 * 32 * step;
      unsigned char* const image = q_place + head * tile.merge_bytes();
      float x[4][2], most = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column =
              t * order.lane + i % 2 * order.odd + i / 2 * order.upper + half * order.other;
          const unsigned short bits =
              used ? *reinterpret_cast<const unsigned short*>(from + 2 * column) : 0;
          x[i][half] = a.q_type == attn_element_f16 ? F16::unpack(bits) : BF16::unpack(bits);
          most = fmaxf(most, fabsf(x[i][half]));
        }
#pragma unroll
      for (int other = 1; other < lanes; other *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, other));
      const QueryFactor factor(most);
      const bool codes = below_normal(type);
      if (threadIdx.x % lanes == 0)
        store_row(image, r, row_tiles * steps + r / 8,
                  a.scale * factor.undo * log2_e * (codes ? scores_factor : 1));
      float columns = 0;  // the sum of a block's, of i4 of a row's
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float more = codes ? column_factor(type, i / 2) : 1;
        const float low = x[i][0] * factor.value, high = x[i][1] * factor.value;
        columns += low + high;
        words[i] = type == attn_element_bf16 ? BF16::pack(low * more, high * more)
                                             : F16::pack(low * more, high * more);
      }
      ptx::store_shared(address(image) + ((r / 8 * steps + step) * 32 + r % 8 * 4 + t) * 16, words);
      if (!codes) continue;
#pragma unroll
      for (int other = 1; other < lanes; other *= 2)
        if (other < 4 || type == attn_element_i4)
          columns += __shfl_xor_sync(0xffffffff, columns, other);
      if (t == 0) store_row(image, r, r / 8 * steps + step, columns * columns_factor(type));
    }
  }
  // Behind Q's words are numbers of rows, for four lanes as accumulators are: of 8 rows and 32
  // columns sums of Q's columns, then the factors of scores.
  static __device__ __forceinline__ void store_row(unsigned char* image, int r, int place,
                                                   float value) {
    float* const to =
        reinterpret_cast<float*>(image + tile.q_bytes()) + (place * 4 + r % 8 / 2) * 4 + r % 2;
    to[0] = to[2] = value;
  }
  __device__ __forceinline__ float4 of_rows(int place) const {
    return *reinterpret_cast<const float4*>(q_place + q_at - lane() / 4 * 64 + tile.q_bytes() +
                                            place * 64);
  }
  __device__ __forceinline__ void load_column_sums(float (&x)[row_tiles][4], int step) const {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      const float4 sums = of_rows(n * steps + step);
      x[n][0] = sums.x, x[n][1] = sums.y, x[n][2] = sums.z, x[n][3] = sums.w;
    }
  }
  __device__ __forceinline__ uint4 q_words(int n, int step) const {
    return *reinterpret_cast<const uint4*>(q_place + q_at + (n * steps + step) * 512);
  }

  __device__ __forceinline__ void begin_part() {
    types = 0;
    this->note_seen_keys();
    if (a.alibi_slopes && threadIdx.x < heads() * rows)
      shared.slope[threadIdx.x] = a.alibi_slopes[Row(a, of_head(threadIdx.x / rows),
                                                     min(int(threadIdx.x % rows), used_rows() - 1))
                                                     .head] *
                                  log2_e;
    if (a.alibi_slopes) this->note_first_query();
    this->key_warp = warp() & (warps_of_head() - 1);
    this->rows_before = warp_head() * rows;
    q_at = warp_head() * tile.merge_bytes() + lane() * 16;
    top = max_top;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) base[n][i] = nothing, sum[n][i] = 0;
#pragma unroll
      for (int v = 0; v < v_tiles; ++v)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[v][n][j] = 0;
    }
  }

  using Scores = float[row_tiles][4];

  // x += the products of 32 columns of K and of Q.
  template <class Product>
  __device__ __forceinline__ void multiply(float (&even)[row_tiles][4], float (&odd)[row_tiles][4],
                                           const unsigned (&k)[2][4], int step) const {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      const uint4 words = q_words(n, step);
      Product::mma(even[n], k[0], words.x, words.y);
      Product::mma(odd[n], k[1], words.z, words.w);
    }
  }
  static __device__ __forceinline__ void add(Scores& x, const Scores& y) {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[n][j] += y[n][j];
  }
  template <class Product>
  __device__ __forceinline__ void multiply_plain_k(Scores& x, unsigned from) const {
    Scores odd = {};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      unsigned f[2][4];
      Same<Product>::load_k(f, from, 2 * step);
      multiply<Product>(x, odd, f, step);
    }
    add(x, odd);
  }
  // Of keys g and g + 8, the first one's at `from`.
  static __device__ __forceinline__ float2 key_scales_f32(unsigned from) {
    return make_float2(__uint_as_float(ptx::load_shared(from)),
                       __uint_as_float(ptx::load_shared(from + 32)));
  }
  template <class K>
  __device__ __forceinline__ void multiply_code_k(Scores& x, unsigned from, unsigned scales) const {
    Scores odd = {};
    if (std::is_same_v<K, I4<head_dim>>) load_column_sums(x, 0);
    const float2 scale =
        std::is_same_v<K, E4m3Codes<head_dim>> ? key_scales_f32(scales) : k_key_scales(scales);
#pragma unroll
    for (int two = 0; two < steps / 2; ++two) {
      unsigned f[2][2][4];
      K::load_k(f, from, two);
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply<F16>(x, odd, f[i], 2 * two + i);
    }
    add(x, odd);
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[n][j] *= j < 2 ? scale.x : scale.y;
  }
  __device__ __forceinline__ void multiply_nvfp4_k(Scores& x, unsigned from,
                                                   unsigned scales) const {
    using K = NvFp4<head_dim>;
    Scores odd = {};
    const int t = here(lane() % 4);
    typename K::Scales rows[2];
    K::load_scales(rows[0], scales);
    K::load_scales(rows[1], scales + 8 * K::scale_pitch(types >> 16));
#pragma unroll
    for (int two = 0; two < steps / 2; ++two) {
      unsigned x_scales[2], y_scales[2], w[4];
      K::k_scales(x_scales, rows[0][two], t);
      K::k_scales(y_scales, rows[1][two], t);
      ptx::ldmatrix(w, K::P::chunk(from, 2 * two));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned f[2][4];
        K::take_k(f, w[2 * i], w[2 * i + 1], x_scales[i], y_scales[i]);
        multiply<F16>(x, odd, f, 2 * two + i);
      }
    }
    const float descale = descales()[0];
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[n][j] = (x[n][j] + odd[n][j]) * descale;
  }
  // x += scale y, of keys g and g + 8.
  static __device__ __forceinline__ void add_scaled(Scores& x, const Scores& y,
                                                    const float2& scale) {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[n][j] = fmaf(y[n][j], j < 2 ? scale.x : scale.y, x[n][j]);
  }
  // So that what follows from it has no registers where other types are at work.
  static __device__ __forceinline__ int here(int x) { return int(ptx::recompute(unsigned(x))); }
  // Each block's products are summed up for themselves, for they have a scale.
  template <class Block>
  __device__ __forceinline__ void multiply_block_k(Scores& x, unsigned row) const {
    using Rows = BlockRows<Block, head_dim>;
    const unsigned both[2] = {row, row + k_pitch8};
    const int t = here(lane() % 4);
#pragma unroll
    for (int block = 0; block < steps; ++block) {
      unsigned f[2][4];
      Rows::load_k(f, both, block, t);
      const KeyScales key = Rows::k_scales(both, block);
      Scores products = {}, columns;
      if (code_offset(Block::type) > 0) load_column_sums(products, block);
      multiply<F16>(products, products, f, block);
      add_scaled(x, products, key.scale);
      if (Block::layout.has_min) {
        load_column_sums(columns, block);
        add_scaled(x, columns, key.min);
      }
    }
  }
  __device__ __forceinline__ void multiply_k(Scores& x, unsigned stage) const {
    const int type = types & 0xff;
    const unsigned from = stage + k_at;
    if (type == attn_element_i8)
      multiply_code_k<I8<head_dim>>(x, from, stage + k_scale_at);
    else if (type == attn_element_i4)
      multiply_code_k<I4<head_dim>>(x, from, stage + k_scale_at);
    else if (with_block(type, [&](auto block) { multiply_block_k<decltype(block)>(x, from); }))
      return;
    else if (type == attn_element_nvfp4)
      multiply_nvfp4_k(x, from, stage + k_scale_at);
    else if (type == attn_element_f8_e4m3fn_token)
      multiply_code_k<E4m3Codes<head_dim>>(x, from, stage + k_scale_at);
    else if (type == attn_element_f16)
      multiply_plain_k<F16>(x, from);
    else
      multiply_plain_k<BF16>(x, from);
  }

  // Of the warp's keys and head, in rows of codes.
  __device__ __forceinline__ unsigned lane_of_codes(int type, int columns, int more) const {
    const int head_pitch = row_place(type, columns).pitch;
    const OwnPlace place =
        own_place(type, columns, heads(), more & own_joint_heads ? head_pitch : 0);
    const int head = warp_head(), of_row = head & (place.heads - 1);
    return lane_of_matrices(place.at(head - of_row, this->key_warp * warp_keys, stage_keys()),
                            lane(), place.pitch, of_row * place.head_bytes);
  }

  // Where scales of key `key` of the warp's are, in an array whose rows have several heads.
  template <int columns>
  __device__ __forceinline__ unsigned joint_scales(int key) const {
    constexpr int heads = heads_of_scales(columns);
    return 16 * (warp_head() / heads * stage_keys() + this->key_warp * warp_keys + key) +
           warp_head() % heads * (16 / heads);
  }

  // The first unit of a part, or one of other types.
  __device__ __forceinline__ void begin_types(unsigned next) {
    const int k_type = next & 0xff, v_type = next >> 8 & 0xff, g = lane() / 4, t = lane() % 4,
              keys = warp() * warp_keys, k_more = next >> 16 & 0xff, v_more = next >> 24;
    if ((types & 0xff) != k_type) {
      meet();  // all have done with Q, and with what the part before wrote
      load_q(k_type);
      meet();
    }
    types = next;
    if (is_ggml(k_type)) {
      const OwnPlace place = own_place(k_type, head_dim, heads());
      k_at = place.at(warp_head(), this->key_warp * warp_keys + g, stage_keys()) + 4 * k_more;
      k_pitch8 = 8 * place.pitch;
    } else {
      k_at = has_scale_array(k_type)
                 ? lane_of_codes(k_type, head_dim, k_more)
                 : keys * row_place(k_type, head_dim).pitch + Same<F16>::k_lane(lane());
      k_scale_at = a.scales_at + key_scale_bytes(k_type, head_dim) * (keys + g);
      if (k_type == attn_element_nvfp4 && k_more & own_joint_scales)
        k_scale_at = a.scales_at + joint_scales<head_dim>(g);
      if (has_row_scale(k_type)) k_scale_at += 2 * half_of_key(k_more, g, warp_head());
      if (k_type == attn_element_nvfp4)
        note_descale(0, a.segment[k_more % own_joint_heads].k_nvfp4_descale);
    }
    v_at = a.k_bytes;
    if (is_ggml(v_type)) {
      const OwnPlace place = own_place(v_type, head_dim_v, heads());
      v_at += place.at(warp_head(), this->key_warp * warp_keys + 2 * t, stage_keys()) + 4 * v_more;
      v_pitch = place.pitch;
    } else {
      const int pitch = row_place(v_type, head_dim_v).pitch;
      if (!has_scale_array(v_type))
        v_at += keys * pitch;
      else if (a.v_by_fours || v_type == attn_element_i8 || v_type == attn_element_f8_e4m3fn_token)
        v_at += lane_of_codes(v_type, head_dim_v, v_more);
      else
        v_at += I4<head_dim_v>::v_lane(keys * pitch, lane());
      v_scale_halves = select_of_halves(v_more, warp_head());
      if (v_type == attn_element_nvfp4)
        note_descale(1, a.segment[v_more % own_joint_heads].v_nvfp4_descale);
    }
  }
  // Whether every row sees these keys. From shared memory: in registers the limits were spilled,
  // and cp.async of scales drove spilled registers out of L1, so that each unit read them from L2.
  __device__ __forceinline__ bool all_see(int begin, int end) const {
    if (a.tree && end > at.seqlen_kv - int(a.tree_mask.keys)) return false;
    return begin >= shared.keys[rows - 1].x && end <= shared.keys[0].y;
  }
  __device__ __forceinline__ void take(unsigned stage, const OwnUnit& unit) {
    const int first = unit.first;
    const unsigned long long seen = unit.valid;  // keys that some row sees
    if (seen == 0) return;
    if (unit.types != types) begin_types(unit.types);
    const bool some_hidden = seen != ~0ull || !all_see(first, first + stage_keys());
    float x[elements];
    {
      Scores products = {};
      multiply_k(products, stage);
#pragma unroll
      for (int n = 0; n < row_tiles; ++n) {
        const float4 factor = of_rows(row_tiles * steps + n);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[4 * n + j] = products[n][j] * (j % 2 ? factor.y : factor.x);
      }
    }
    if (!plain()) this->modify(x, first);
    unsigned valid = unsigned(seen >> warp_keys * this->key_warp) & 0xffff;
    if (some_hidden) {
      this->hide(x, first, seen);
      if (a.tree) {
        valid = unsigned(this->hide_by_tree(x, first) >> warp_keys * warp()) & 0xffff;
        meet();  // before a warp goes on to the next unit
      }
    }
    move_base(x);
    add_v(x, stage, valid);
  }

  // To the largest scores of rows that are above what the base allows. split_invariant: bases are
  // integers, so that sums against different ones differ by an exact power of two.
  __device__ __forceinline__ void move_base(const float (&x)[elements]) {
    const float allowed = a.split_invariant ? top - slack : top;
    bool above = false;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        above = above || fmaxf(x[4 * n + i], x[4 * n + 2 + i]) > base[n][i] + allowed;
    if (!__any_sync(0xffffffff, above)) return;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(x[4 * n + i], x[4 * n + 2 + i]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
        if (!(most > base[n][i] + allowed)) continue;
        const float next = (a.split_invariant ? ceilf(most) : most) - (top - slack),
                    shrink = ptx::ex2(base[n][i] - next);
        base[n][i] = next;
        sum[n][i] *= shrink;
#pragma unroll
        for (int v = 0; v < v_tiles; ++v) o[v][n][i] *= shrink, o[v][n][2 + i] *= shrink;
      }
  }
  // Weights, as the second product takes them. times_factor: those of keys g and g + 8 so many
  // times as large.
  using Weights = unsigned[row_tiles][2];
  template <class Product, bool times_factor = false>
  __device__ __forceinline__ void weigh(Weights& p, const float (&x)[elements],
                                        float2 factor = {1, 1}) {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) y[i] = ptx::ex2(x[4 * n + 2 * half + i] - base[n][i]);
        unsigned pair = Product::pack(y[0], y[1]);
        if (a.split_invariant) {  // then sums have the weights as rounded
          y[0] = Product::unpack(pair & 0xffff);
          y[1] = Product::unpack(pair >> 16);
        }
        if (times_factor) {
          const float by = half == 0 ? factor.x : factor.y;
          pair = Product::pack(y[0] * by, y[1] * by);
        }
        sum[n][0] += y[0];
        sum[n][1] += y[1];
        p[n][half] = ptx::transpose_8x8(pair);
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
  // The lane's scales of V, 0 of keys that are not valid.
  template <int blocks>
  using VScales = unsigned[blocks][2];
  template <int blocks>
  __device__ __forceinline__ void use_v_scales(VScales<blocks>& scales, Weights& p,
                                               unsigned valid) {
    if (valid != 0xffff) {
      const uint2 there = there_of(valid);
#pragma unroll
      for (int block = 0; block < blocks; ++block)
        scales[block][0] &= there.x, scales[block][1] &= there.y;
    }
    unsigned any = 0;
#pragma unroll
    for (int block = 0; block < blocks; ++block) any |= scales[block][0] | scales[block][1];
    // Of 2 and more, infinity and NaN among them.
    if (__any_sync(0xffffffff, any & 0x40004000)) lower_top(scales, p);
  }
  // Weights times scales stay below 2^16.
  template <int blocks>
  __device__ __forceinline__ void lower_top(const VScales<blocks>& scales, Weights& p) {
    unsigned most = 0;
#pragma unroll
    for (int block = 0; block < blocks; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i) most = ptx::max_abs_f16x2(most, scales[block][i]);
    most = __reduce_max_sync(0xffffffff, max(most & 0xffff, most >> 16));
    // The largest is below 2^(exponent - 14); infinity and NaN stay what they are.
    const int exponent = min(int(most >> 10), 30), down = int(top) - (30 - exponent);
    if (down <= 0) return;
    const float factor = __int_as_float((127 - down) << 23);
    const unsigned pair = F16::pack(factor, factor);
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) p[n][i] = ptx::mul_f16x2(p[n][i], pair);
    lower_top(down);
  }
  // down: at most 126.
  __device__ __forceinline__ void lower_top(int down) {
    const float factor = __int_as_float((127 - down) << 23);
    top -= down;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[n][i] *= factor;
        if (base[n][i] != nothing) base[n][i] += down;
      }
#pragma unroll
      for (int v = 0; v < v_tiles; ++v)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[v][n][j] *= factor;
    }
  }
  // o += V^T P^T of 32 columns from 32 * block on.
  template <class Product>
  __device__ __forceinline__ void add_columns(int block, const unsigned (&v)[2][4],
                                              const Weights& p) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < row_tiles; ++n) Product::mma(o[2 * block + i][n], v[i], p[n][0], p[n][1]);
  }
  template <int blocks>
  static __device__ __forceinline__ void scaled(Weights& to, const Weights& p,
                                                const VScales<blocks>& scales, int block) {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) to[n][i] = ptx::mul_f16x2(p[n][i], scales[block][i]);
  }
  template <class Block>
  __device__ __forceinline__ void add_block_v(const float (&x)[elements], unsigned row,
                                              unsigned valid) {
    using Rows = BlockRows<Block, head_dim_v>;
    constexpr int blocks = Rows::blocks;
    const int g = here(lane() / 4);
    const unsigned rows_of[4] = {row, row + v_pitch, row + 8 * v_pitch, row + 9 * v_pitch};
    VScales<blocks> scales;
#pragma unroll
    for (int block = 0; block < blocks; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[block][i] = Rows::v_scales(rows_of, block, i);
    Weights p;
    weigh<F16>(p, x);
    use_v_scales<blocks>(scales, p, valid);
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      unsigned columns[2][4];
      Rows::load_v(columns, rows_of, block, g);
      Weights own;
      scaled<blocks>(own, p, scales, block);
      add_columns<F16>(block, columns, own);
      if constexpr (Block::layout.has_min) {
        // The same for all columns, as another product: so p is not rounded once more.
        const uint2 there = there_of(valid);
        const unsigned first = Rows::v_scales(rows_of, block, 0, 2) & there.x,
                       second = Rows::v_scales(rows_of, block, 1, 2) & there.y;
        const unsigned minima[2][4] = {{first, first, second, second},
                                       {first, first, second, second}};
        add_columns<F16>(block, minima, p);
      }
    }
  }
  template <class V>
  __device__ __forceinline__ void add_code_v(const float (&x)[elements], unsigned stage,
                                             unsigned valid) {
    const unsigned from = stage + v_at,
                   of_keys = stage + a.v_scales_at + 4 * (warp() * warp_keys + lane() % 4 * 2);
    VScales<1> scales = {
        {v_key_scales(of_keys, v_scale_halves, 0), v_key_scales(of_keys, v_scale_halves, 1)}};
    Weights p;
    weigh<F16>(p, x);
    use_v_scales<1>(scales, p, valid);
    scaled<1>(p, p, scales, 0);
    if constexpr (std::is_same_v<V, I4<head_dim_v>>) {
      if (a.v_by_fours) {
#pragma unroll
        for (int two = 0; two < v_tiles / 4; ++two) {
          unsigned columns[2][2][4];
          V::load_v_by_fours(columns, from, two);
#pragma unroll
          for (int i = 0; i < 2; ++i) add_columns<F16>(2 * two + i, columns[i], p);
        }
        return;
      }
    }
#pragma unroll
    for (int block = 0; block < v_tiles / 2; ++block) {
      unsigned columns[2][4];
      V::load_v(columns, from, block, lane() / 4);
      add_columns<F16>(block, columns, p);
    }
  }
  // nvfp4's descales of K and V in the segment of the warp's unit. There are few registers, so they
  // are in shared memory, where other kernels have Q's scales.
  __device__ __forceinline__ float* descales() const { return shared.q_scale + 2 * warp(); }
  __device__ __forceinline__ void note_descale(int which, const attn_descale& descale) const {
    __syncwarp();
    if (lane() == 0)
      descales()[which] = descale.at ? *descale_at(descale, at.b, of_head(warp_head()).h, 0) : 1;
    __syncwarp();
  }
  // By how much `top` is too high for weights times `factor` to stay below 2^16: that is below
  // 2^(exponent - 126). Infinity and NaN stay what they are.
  __device__ __forceinline__ int too_high(float factor) const {
    const int exponent = min(int(__float_as_uint(factor) >> 23 & 0xff), 240);
    return int(top) - (126 + max_top - exponent);
  }
  // f8_e4m3fn_token.
  __device__ __forceinline__ void add_e4m3_v(const float (&x)[elements], unsigned stage,
                                             unsigned valid) {
    const int g = here(lane() / 4);
    float2 scales = key_scales_f32(stage + a.v_scales_at + 4 * (warp() * warp_keys + g));
    if (!(valid >> g & 1)) scales.x = 0;
    if (!(valid >> (g + 8) & 1)) scales.y = 0;
    const int down = max(too_high(scales.x), too_high(scales.y));
    if (__any_sync(0xffffffff, down > 0))
      lower_top(int(__reduce_max_sync(0xffffffff, unsigned(max(down, 0)))));
    Weights p;
    weigh<F16, true>(p, x, scales);
    const uint2 there = there_of(valid);
#pragma unroll
    for (int block = 0; block < v_tiles / 2; ++block) {
      unsigned columns[2][4];
      E4m3Codes<head_dim_v>::load_v(columns, stage + v_at, block, 0);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[i][j] &= j < 2 ? there.x : there.y;
      add_columns<F16>(block, columns, p);
    }
  }
  __device__ __forceinline__ void add_nvfp4_v(const float (&x)[elements], unsigned stage,
                                              unsigned valid) {
    using V = NvFp4<head_dim_v>;
    const int g = here(lane() / 4), two_t = here(lane() % 4 * 2);
    const unsigned from = stage + v_at, pitch = V::scale_pitch(types >> 24),
                   of_keys = stage + a.v_scales_at +
                             (pitch == V::scale_row ? V::scale_row * (warp() * warp_keys + two_t)
                                                    : joint_scales<head_dim_v>(two_t));
    // V's descale, and what makes elements of products, are in the weights.
    const float factor = descales()[1] * nvfp4_factor;
    const int down = too_high(factor);
    if (down > 0) lower_top(down);
    Weights p;
    weigh<F16, true>(p, x, make_float2(factor, factor));
    typename V::Scales rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) V::load_scales(rows[i], of_keys + pitch * v_key(i));
#pragma unroll
    for (int two = 0; two < v_tiles / 4; ++two) {
      unsigned scales[4] = {rows[0][two], rows[1][two], rows[2][two], rows[3][two]};
      if (valid != 0xffff) {  // else NaN would count, with a weight of 0 too
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!(valid >> (two_t + v_key(i)) & 1)) scales[i] = 0;
      }
      if (a.v_by_fours) {
        unsigned columns[2][2][4];
        V::load_v_by_fours(columns, from, scales, two, g);
#pragma unroll
        for (int i = 0; i < 2; ++i) add_columns<F16>(2 * two + i, columns[i], p);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned columns[2][4];
        V::load_v(columns, from, scales, 2 * two + i, g);
        add_columns<F16>(2 * two + i, columns, p);
      }
    }
  }
  template <class Product>
  __device__ __forceinline__ void add_plain_v(const float (&x)[elements], unsigned v,
                                              unsigned valid) {
    Weights p;
    weigh<Product>(p, x);
    const uint2 there = there_of(valid);
#pragma unroll
    for (int block = 0; block < v_tiles / 2; ++block) {
      unsigned columns[2][4];
      PlainRows::load_v(columns, v, block, lane());
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[i][j] &= j < 2 ? there.x : there.y;
      add_columns<Product>(block, columns, p);
    }
  }
  __device__ __forceinline__ void add_v(const float (&x)[elements], unsigned stage,
                                        unsigned valid) {
    const int type = types >> 8 & 0xff;
    const unsigned from = stage + v_at;
    if (type == attn_element_i8)
      add_code_v<I8<head_dim_v>>(x, stage, valid);
    else if (type == attn_element_i4)
      add_code_v<I4<head_dim_v>>(x, stage, valid);
    else if (with_block(type, [&](auto block) { add_block_v<decltype(block)>(x, from, valid); }))
      return;
    else if (type == attn_element_nvfp4)
      add_nvfp4_v(x, stage, valid);
    else if (type == attn_element_f8_e4m3fn_token)
      add_e4m3_v(x, stage, valid);
    else if (type == attn_element_f16)
      add_plain_v<F16>(x, from, valid);
    else
      add_plain_v<BF16>(x, from, valid);
  }

  // A part ends: to the result, or to the workspace. The warps' sums meet in the stage of its last
  // unit, four rows at a time, which is what the smallest stage has room for.
  __device__ __forceinline__ void end_part(const PlacedPart& placed, unsigned char* stage) {
    constexpr int pass_rows = 4, row_floats = head_dim_v;
    static_assert(decode_warps * pass_rows * head_dim_v * 4 <=
                  unit_keys * (head_dim + head_dim_v) / 2);
    float* const place = reinterpret_cast<float*>(stage);
    // Behind the sums: of each warp's rows base and sum of weights.
    float2* const stats = reinterpret_cast<float2*>(place + decode_warps * pass_rows * row_floats);
    // Two rows of a warp's store meet each bank once.
    const auto place_at = [](int w, int r, int column) {
      return (w * pass_rows + r) * row_floats + (column ^ r / 2 * 16);
    };
    const Parts<tile> parts = {a, placed};
    const unsigned slot = placed.alone() ? 0 : parts.slot(placed.number);
    const int here = int(ptx::recompute(lane()));
    // The column of row g of tile v.
    const bool fours = a.v_by_fours;
    const auto column_of = [&](int v) {
      return 32 * (v / 2) + here / 4 * (fours ? 4 : 2) + v % 2 * (fours ? 2 : 16);
    };
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          sum[n][i] += __shfl_xor_sync(0xffffffff, sum[n][i], step);
      }
#pragma unroll
    for (int pass = 0; pass < rows / pass_rows; ++pass) {
      if (pass > 0 && pass * pass_rows >= used_rows()) break;
      meet();  // all have done with the stage, or with the rows before
      const int n = pass / 2;
      if (here % 4 / 2 == pass % 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = here % 2 * 2 + i;
          if (here < 4)
            stats[warp() * pass_rows + r] =
                make_float2(base[n][i] == nothing ? -infinity() : base[n][i], sum[n][i]);
#pragma unroll
          for (int v = 0; v < v_tiles; ++v)
            *reinterpret_cast<float2*>(place + place_at(warp(), r, column_of(v))) =
                make_float2(o[v][n][i], o[v][n][2 + i]);
        }
      }
      meet();
      using Row = RowPart<head_dim_v>;
#pragma unroll 1
      for (int i = Row::row(); i < heads() * pass_rows; i += Row::rows) {
        const int head = i / pass_rows, r = i % pass_rows, warps = warps_of_head();
        const auto warp_of = [&](int w) { return head * warps + (w & (warps - 1)); };
        Row row;
        row.template add<decode_warps>(
            [&](int w) {
              return w < warps ? stats[warp_of(w) * pass_rows + r] : make_float2(0, 0);
            },
            [&](int w) {
              return *reinterpret_cast<const float4*>(place +
                                                      place_at(warp_of(w), r, row.column()));
            });
        const int in_part = pass * pass_rows + r;
        if (placed.alone())
          store_result(a, of_head(head), in_part, row);
        else if (in_part < used_rows())
          parts.write(slot, head * rows + in_part, row);
      }
    }
    if (!placed.alone()) parts.arrive_with_all_rows(of_head(0), used_rows());
    ptx::fence_async_shared();  // the copy engine writes there next
  }

  __device__ __forceinline__ void run(unsigned char* ring_place) {
    Stage stage;
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
      const unsigned slot = number % 2;
      wait(shared.part_full[slot], number / 2 % 2);
      const SwappedPart& part = shared.part[slot];
      if (part.none) return;
      at = part.at;
      begin_part();
      const auto leave = [&] {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(address(&shared.empty[stage.number]));
        stage.next(a.stages);
      };
#pragma unroll 1
      while (true) {
        wait(shared.full[stage.number], stage.parity);
        const OwnUnit& unit = shared.unit[stage.number];
        take(ring + stage.number * a.stage_bytes, unit);
        if (unit.last) break;
        leave();
      }
      const bool final = shared.unit[stage.number].final;
      end_part(part.placed, ring_place + stage.number * a.stage_bytes);
      if (final) return;
      leave();
      meet();
      if (threadIdx.x == 0) ptx::mbarrier_arrive(address(&shared.part_empty[slot]));
    }
  }
};

template <DecodeTile tile>
__device__ __forceinline__ void decode_own_types(const attn_decode_kernarg& a, const Maps& maps) {
  SwappedShared<tile>& shared = swapped_shared<tile>();
  const auto load = [&](Work<tile>& work, unsigned ring) {
    OwnLoader<tile> loader{a, maps, shared, ring};
    loader.run(loader, work);
  };
  decode_with<tile>(a, maps, load, [&](unsigned char* ring, unsigned char* q) {
    Own<tile>{{a, shared, address(ring), q, address(q), 0}}.run(ring);
  });
}

}  // namespace attn::decode
