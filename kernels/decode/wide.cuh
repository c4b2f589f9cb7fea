// Decoder of decode.cuh for 64 rows: S = Q K^T and O = P V by wgmma. One or two warpgroups take
// turns at the units of a share, each with its own softmax state, and merge at its end. A warp has
// 16 of the rows and all keys of a unit. 8-bit K and V become f16 in shared memory first.
#pragma once
#include "../common/tanh.cuh"
#include "../ptx/tma.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma.h"
#include "load.cuh"
#include "query.cuh"

namespace attn::decode {

template <class T, class KV, DecodeTile tile>
struct WideDecoder {
  using Product = typename KV::Product;
  static constexpr bool bf16 = Product::type == attn_element_bf16;
  static constexpr int head_dim = tile.head_dim, head_dim_v = tile.head_dim_v;
  static constexpr int groups = tile.compute_groups();
  static constexpr int scores = unit_keys / 2;  // of a lane

  const attn_decode_kernarg& a;
  DecodeShared<tile>& shared;
  WideShared& group;
  const int index;  // of the warpgroup
  const unsigned ring;
  const unsigned q;  // in shared memory: Q, then 8-bit K and V as f16, for each warpgroup
  Head at;
  int2 keys[2];            // that the lane's rows see: from, to
  int all_begin, all_end;  // keys that all rows see
  float q_scale[2];        // what products of the lane's rows are multiplied with
  float o[head_dim_v / 2];
  float reference[2];  // log2 domain; -inf: nothing seen yet
  float sum[2];        // of the weights in the lane's columns

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int thread() const { return threadIdx.x % group_threads; }
  __device__ __forceinline__ int warp() const { return thread() / 32; }
  // The threads of the warpgroup, and of both.
  __device__ __forceinline__ void meet() const { ptx::barrier_wait(1 + index, group_threads); }
  __device__ __forceinline__ void meet_all() const {
    ptx::barrier_wait(1 + groups, groups * group_threads);
  }
  __device__ __forceinline__ int used_rows() const {
    return min(at.seqlen_q * a.group - at.first_row, tile.rows());
  }
  __device__ __forceinline__ int lane_row(int half) const {
    return 16 * warp() + lane() / 4 + 8 * half;
  }
  __device__ __forceinline__ Row used_row(int r) const { return {a, at, min(r, used_rows() - 1)}; }
  __device__ __forceinline__ const unsigned long long* tree_words(int half) const {
    const long long first = a.cu_seqlens_q ? at.q_begin : (long long)at.b * a.seqlen_q;
    return a.tree + 2 * (first + used_row(lane_row(half)).query);
  }

  __device__ __forceinline__ void begin_head() {
    const KeyBand seen = a.mask.band(at.seqlen_q, at.seqlen_kv);
    const auto keys_of = [&](int r) {
      const int query = used_row(r).query;
      return make_int2(clamp(query + seen.lower, 0, at.seqlen_kv),
                       clamp(query + seen.upper, 0, at.seqlen_kv));
    };
    all_begin = keys_of(tile.rows() - 1).x;
    all_end = keys_of(0).y;
    if (a.tree) all_end = min(all_end, at.seqlen_kv - int(a.tree_mask.keys));
    load_q();
    ptx::fence_async_shared();
    meet_all();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      keys[half] = keys_of(lane_row(half));
      q_scale[half] = KV::scaled ? group.q_scale[lane_row(half)] : a.scale;
      reference[half] = -infinity();
      sum[half] = 0;
    }
#pragma unroll
    for (float& x : o) x = 0;
  }

  // Q to shared memory, 8 threads per row.
  __device__ __forceinline__ void load_q() {
    constexpr int panels = head_dim / 64;
    const int chunk = threadIdx.x % 8;
#pragma unroll 1
    for (int r = threadIdx.x / 8; r < tile.rows(); r += groups * group_threads / 8) {
      const bool used = r < used_rows();
      const Row row = used_row(r);
      const char* from = static_cast<const char*>(a.q) +
                         2 * ((a.cu_seqlens_q ? at.q_begin * a.q_stride[1] : at.b * a.q_stride[0]) +
                              row.query * a.q_stride[1] + row.head * a.q_stride[2]);
      unsigned words[panels][4];
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        const int column = 64 * panel + 8 * chunk;
        const uint4 x = used && column < a.head_dim
                            ? *reinterpret_cast<const uint4*>(from + 2 * column)
                            : uint4{0, 0, 0, 0};
        words[panel][0] = x.x, words[panel][1] = x.y, words[panel][2] = x.z, words[panel][3] = x.w;
      }
      if (KV::scaled) {
        const float undo = q_to_f16(a.q_type, [&](auto&& each) {
#pragma unroll
          for (auto& panel : words)
#pragma unroll
            for (unsigned& pair : panel) each(pair);
        });
        if (chunk == 0) group.q_scale[r] = a.scale * undo;
      }
#pragma unroll
      for (int panel = 0; panel < panels; ++panel)
        ptx::store_shared(q + panel * panel_bytes + chunk_offset<panel_pitch>(r, chunk),
                          words[panel]);
    }
  }

  // Computed where it is used, once for all lanes.
  static __device__ __forceinline__ unsigned long long descriptor(unsigned at,
                                                                  unsigned panel_bytes) {
    return ptx::wgmma_descriptor(ptx::uniform(ptx::recompute(at) / 16), panel_bytes);
  }

  // K and V of a unit as wgmma takes them, in shared memory.
  struct Matrices {
    unsigned k, v;
  };
  // 8 bits to f16. V of keys that are not valid becomes 0.
  __device__ __forceinline__ Matrices convert(unsigned stage, unsigned long long valid) const {
    const unsigned k = q + tile.group_merge_bytes() + index * tile.converted_bytes(),
                   v = k + unit_keys * tile.columns_16bit(head_dim);
    convert_tile<head_dim>(stage, k, ~0ull);
    convert_tile<head_dim_v>(stage + tile.k_bytes(), v, valid);
    return {k, v};
  }
  template <int columns>
  __device__ __forceinline__ void convert_tile(unsigned from, unsigned to,
                                               unsigned long long valid) const {
    constexpr unsigned chunks = columns / 16;
    const unsigned thread = ptx::recompute(this->thread());
#pragma unroll 2
    for (unsigned i = 0; i < unit_keys * chunks / group_threads; ++i) {
      const unsigned at = i * group_threads + thread, r = at / chunks, chunk = at % chunks;
      unsigned codes[4], values[2][4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
                   : "r"(from + chunk / 8 * panel_bytes + chunk_offset<panel_pitch>(r, chunk % 8)));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (!(valid >> r & 1)) codes[n] = 0;
        values[n / 2][n % 2 * 2] = KV::pair(codes[n] & 0xffff);
        values[n / 2][n % 2 * 2 + 1] = KV::pair(codes[n] >> 16);
      }
      // Of 8 lanes each other four begin with the second half, so that all banks are written.
      const int flip = chunk / 4 % 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        unsigned half[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) half[j] = flip == n ? values[0][j] : values[1][j];
        ptx::store_shared(
            to + chunk / 4 * panel_bytes + chunk_offset<panel_pitch>(r, chunk % 4 * 2 + (n ^ flip)),
            half);
      }
    }
  }
  // V of keys that are not valid may be anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear(unsigned v, unsigned long long valid) const {
    const unsigned zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = thread(); i < unit_keys * 8; i += group_threads) {
      if (valid >> i / 8 & 1) continue;
#pragma unroll
      for (int panel = 0; panel < head_dim_v / 64; ++panel)
        ptx::store_shared(v + panel * panel_bytes + 16 * i, zeros);
    }
    ptx::fence_async_shared();
    meet();
  }

  // leave: gives the unit's place in the ring back.
  template <class Leave>
  __device__ __forceinline__ void take(unsigned stage, const Unit& unit, Leave&& leave) {
    unsigned long long valid = unit.valid[0] | (unsigned long long)unit.valid[1] << 32;
    const int first = unit.first;
    const float k_descale = KV::scaled ? unit.k_descale : 1,
                v_descale = KV::scaled ? unit.v_descale : 1;
    if (valid == 0) return leave();
    Matrices of = {stage, stage + tile.k_bytes()};
    if constexpr (KV::scaled) {
      meet();  // all have done with what is overwritten
      of = convert(stage, valid);
      ptx::fence_async_shared();
      leave();
      meet();
    } else if (valid != ~0ull) {
      clear(of.v, valid);
    }
    float s[scores];
    const unsigned long long q_matrix = descriptor(q, 0), k_matrix = descriptor(of.k, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
      const unsigned offset = (step / 4 * panel_bytes + step % 4 * 32) >> 4;
      ptx::wgmma<bf16>(s, q_matrix + offset, k_matrix + offset, step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(s);

    change_scores(s, first, k_descale);
    if (valid != ~0ull || first < all_begin || first + unit_keys > all_end) {
      hide(s, first, valid);
      if (a.tree) clear(of.v, hide_by_tree(s, first));
    }
    unsigned p[unit_keys / 16][4];
    weigh(s, p);
    add_sums(p, of.v, v_descale, s);
    if constexpr (!KV::scaled) leave();
  }

  // o += P V. free: registers.
  __device__ __forceinline__ void add_sums(const unsigned (&p)[unit_keys / 16][4], unsigned v,
                                           float v_descale, float (&free)[32]) {
    const auto multiply = [&](auto& sums, unsigned v, bool add) {
      const unsigned long long v_matrix = descriptor(v, panel_bytes);
      ptx::pin(sums);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < unit_keys / 16; ++step)
        ptx::wgmma<bf16, true>(sums, p[step], v_matrix + (step * 16 * panel_pitch >> 4),
                               step > 0 || add);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(sums);
    };
    if constexpr (!KV::scaled) {
      multiply(o, v, true);
    } else {
#pragma unroll
      for (int panel = 0; panel < head_dim_v / 64; ++panel) {
        multiply(free, v + panel * panel_bytes, false);
#pragma unroll
        for (int i = 0; i < 32; ++i)
          o[32 * panel + i] = fmaf(free[i], v_descale, o[32 * panel + i]);
      }
    }
  }

  // Products become scores in the log2 domain.
  __device__ __forceinline__ void change_scores(float (&s)[scores], int first,
                                                float k_descale) const {
    const bool plain = a.softcap == 0 && !a.alibi_slopes;
    const float limit = a.softcap * log2_e, into_limit = a.softcap > 0 ? 1 / a.softcap : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = q_scale[half] * k_descale;
      if (plain) {
#pragma unroll
        for (int n = 0; n < unit_keys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) s[4 * n + 2 * half + i] *= factor * log2_e;
        continue;
      }
      const Row row = used_row(lane_row(half));
      const float slope = a.alibi_slopes ? a.alibi_slopes[row.head] * log2_e : 0;
      const int away = row.query + at.seqlen_kv - at.seqlen_q - first - lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < unit_keys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x *= factor;
          x = a.softcap > 0 ? limit * tanh_accurate(x * into_limit) : x * log2_e;
          if (a.alibi_slopes) x -= slope * fabsf(float(away - 8 * n - i));
        }
    }
  }

  // Scores of keys that their queries do not see.
  __device__ __forceinline__ void hide(float (&s)[scores], int first,
                                       unsigned long long valid) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = clamp(keys[half].x - first, 0, unit_keys),
                end = clamp(keys[half].y - first, begin, unit_keys);
      hide_but(s, half, valid & low_keys(end) & ~low_keys(begin));
    }
  }
  static __device__ __forceinline__ unsigned long long low_keys(int count) {
    return count >= 64 ? ~0ull : (1ull << count) - 1;
  }
  __device__ __forceinline__ void hide_but(float (&s)[scores], int half,
                                           unsigned long long seen) const {
    const unsigned long long own = seen >> lane() % 4 * 2;
    const unsigned word[2] = {unsigned(own), unsigned(own >> 32)};
#pragma unroll
    for (int n = 0; n < unit_keys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (!(word[n / 4] >> (8 * (n % 4) + i) & 1)) s[4 * n + 2 * half + i] = -infinity();
  }
  // The same of the tree's keys, after hide(). Returns a bit for each key that some row sees.
  __device__ __forceinline__ unsigned long long hide_by_tree(float (&s)[scores], int first) {
    unsigned any[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned long long* words = tree_words(half);
      hide_but(s, half, a.tree_mask.seen(words[0], words[1], first, at.seqlen_kv));
#pragma unroll
      for (int n = 0; n < unit_keys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (s[4 * n + 2 * half + i] != -infinity())
            any[n / 4] |= 1u << (8 * (n % 4) + lane() % 4 * 2 + i);
    }
    const unsigned low = __reduce_or_sync(0xffffffff, any[0]),
                   high = __reduce_or_sync(0xffffffff, any[1]);
    if (lane() == 0) group.seen[index][warp()] = low | (unsigned long long)high << 32;
    meet();
    unsigned long long all = 0;
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) all |= group.seen[index][w];
    return all;
  }

  // Weights 2^(s - reference), as Decoder::weigh, but that a reference stays until a score exceeds
  // it by more than `slack`: weights are up to 2^8 then, and o is rarely multiplied.
  __device__ __forceinline__ void weigh(float (&s)[scores], unsigned (&p)[unit_keys / 16][4]) {
    float most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = -infinity();
#pragma unroll
      for (int n = 0; n < unit_keys / 8; ++n)
        most[half] = fmaxf(most[half], fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    }
    const float slack = a.split_invariant ? 0 : 8;
    if (__any_sync(0xffffffff, most[0] > reference[0] + slack || most[1] > reference[1] + slack)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffff, most[half], 1));
        most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffff, most[half], 2));
        const float top = a.split_invariant ? ceilf(most[half]) : most[half];
        const float next = most[half] > reference[half] + slack ? top : reference[half];
        const float shrink = next == -infinity() ? 1 : ptx::ex2(reference[half] - next);
        reference[half] = next;
        sum[half] *= shrink;
#pragma unroll
        for (int n = 0; n < head_dim_v / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) o[4 * n + 2 * half + i] *= shrink;
      }
    }
    if (a.split_invariant)
      weigh_against<true>(s, p);
    else
      weigh_against<false>(s, p);
  }
  // invariant: the sums have the weights as rounded, and how these are rounded depends on the score
  // alone, for the reference is whole.
  template <bool invariant>
  __device__ __forceinline__ void weigh_against(const float (&s)[scores],
                                                unsigned (&p)[unit_keys / 16][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float used = reference[half] == -infinity() ? 0 : reference[half];
      const auto weight = [&](float x) {
        if (!invariant) return ptx::ex2(x - used);
        const float whole = fmaxf(floorf(x), -1e30f);
        return ptx::ex2(x - whole) * ptx::ex2(whole - used);
      };
      float added[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < unit_keys / 8; ++n) {
        float x = weight(s[4 * n + 2 * half]), y = weight(s[4 * n + 2 * half + 1]);
        const unsigned pair = Product::pack(x, y);
        if (invariant) {
          x = Product::unpack(pair & 0xffff);
          y = Product::unpack(pair >> 16);
        }
        added[0] += x;
        added[1] += y;
        p[n / 2][n % 2 * 2 + half] = pair;
      }
      sum[half] += added[0] + added[1];
    }
  }

  // A part ends: to the result, or to the workspace. 16 rows at once, those of a warp of each
  // warpgroup, through the place of Q; the first warpgroup adds them up. final: of the block, whose
  // ring is free then.
  __device__ __forceinline__ void end_part(const Share& share, const Part& part, bool final) {
    // Row r's columns are at ^ 8 (r % 8), so that a warp's store uses each bank once.
    const auto place = [](int group, int r, int column) {
      return 4 * ((16 * group + r) * head_dim_v + (column ^ (r % 8 * 8)));
    };
    const int used = used_rows();
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = row_sum(sum[half]);
#pragma unroll 1
    for (int w = 0; 16 * w < used; ++w) {
      meet_all();  // all have done with Q, or with the rows before
      if (warp() == w) {
        const int here = int(ptx::recompute(lane()));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = here / 4 + 8 * half;
          if (here % 4 == 0) group.stats[index][r] = make_float2(reference[half], sum[half]);
#pragma unroll
          for (int n = 0; n < head_dim_v / 8; ++n)
            asm volatile(
                "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(q + place(index, r, 8 * n + here % 4 * 2)),
                "f"(o[4 * n + 2 * half]), "f"(o[4 * n + 2 * half + 1])
                : "memory");
        }
      }
      meet_all();
      if (index == 0) store_rows(place_of<tile>(a, at, share, part), w, used, place);
    }
    if (index == 0) {
      const PlacedPart placed = place_of<tile>(a, at, share, part);
      if (!placed.alone()) {
        constexpr int place_bytes = 16 * group_threads;
        const int bytes = final ? a.stages * tile.stage_bytes() : tile.group_merge_bytes();
        Parts<tile>{a, placed}.arrive(at, used, final ? ring : q, bytes / place_bytes);
      }
    }
    meet_all();  // before the next part's Q comes where the sums are
  }
  // Rows 16 w on, from where both warpgroups have put them.
  template <class Place>
  __device__ __forceinline__ void store_rows(const PlacedPart& placed, int w, int used,
                                             Place&& place) const {
    const Parts<tile> parts = {a, placed};
#pragma unroll 1
    for (int r = RowPart<head_dim_v>::row(); r < 16; r += RowPart<head_dim_v>::rows) {
      RowPart<head_dim_v> row;
      row.template add<groups>(
          [&](int i) { return group.stats[i][r]; },
          [&](int i) { return ptx::load_shared_floats(q + place(i, r, row.column())); });
      if (placed.alone())
        store_result(a, at, 16 * w + r, row);
      else if (16 * w + r < used)
        parts.write(parts.slot(placed.number), 16 * w + r, row);
    }
  }

  __device__ __forceinline__ void run(const Work<tile>& work) {
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
      Part part;
      bool last, final, mine = index == 0;  // the first unit is the first warpgroup's
#pragma unroll 1
      do {
        wait(shared.full[stage.number], stage.parity);
        const Unit& unit = shared.unit[stage.number];
        part = unit.part, last = unit.last, final = unit.final;
        const auto leave = [&] {
          __syncwarp();
          if (lane() == 0) ptx::mbarrier_arrive(address(&shared.empty[stage.number]));
        };
        if (mine)
          take(ring + stage.number * tile.stage_bytes(), unit, leave);
        else
          leave();
        mine = groups == 1 || !mine;
        stage.next(a.stages);
      } while (!last);
      end_part(work.share, part, final);
      if (final) return;
      wait(shared.full[stage.number], stage.parity);
      const Unit& unit = shared.unit[stage.number];
      at = {unit.b, unit.h, unit.first_row, unit.seqlen_q, unit.seqlen_kv, unit.q_begin};
    }
  }
};

}  // namespace attn::decode
