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
#include "load.cuh"
#include "merge.cuh"
#include "query.cuh"
#include "variants.h"
#if __CUDA_ARCH__ >= 900
#include "own.cuh"
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
  static_assert(rows * q_pitch <= tile.merge_bytes());

  const attn_decode_kernarg& a;
  DecodeShared<tile>& shared;
  GroupShared& group;
  float* merge;  // in shared memory: Q, and when a head's units end the warps' sums
  Head at;
  int all_begin, all_end;  // keys that all queries see
  float o[v_tiles][q_tiles][4];
  float reference[q_tiles][2];  // log2 domain; -inf: nothing seen yet
  float sum[q_tiles][2];        // of the weights of the lane's keys

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int used_rows() const {
    const int used = at.seqlen_q * a.group - at.first_row;
    return tile.tiled ? min(used, rows) : used;
  }
  __device__ __forceinline__ int lane_row(int n, int i) const { return 8 * n + lane() % 4 * 2 + i; }

  __device__ __forceinline__ void begin_head() {
    const SeenPlaces seen =
        seen_places(a.mask, positions_of<tile>(a), at.b, at.seqlen_q, at.seqlen_kv);
    const auto keys_of = [&](int query) {
      return make_int2(keys_before(positions_of<tile>(a), query + seen.lower, at.seqlen_kv),
                       keys_before(positions_of<tile>(a), query + seen.upper, at.seqlen_kv));
    };
    if (threadIdx.x < rows) {
      const int query = Row(a, at, min(int(threadIdx.x), used_rows() - 1)).query;
      group.keys[threadIdx.x] = keys_of(query);
      if (a.tree) group.tree[threadIdx.x] = tree_words(a, at, query);
    }
    load_q();
    meet();
    all_begin = group.keys[rows - 1].x;
    all_end = group.keys[0].y;
    if (a.tree) all_end = min(all_end, at.seqlen_kv - int(a.tree_mask.keys));
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

  // The warp's keys of a unit.
  __device__ __forceinline__ void take(unsigned stage, const Unit& unit) {
    const int warp = this->warp();
    unsigned valid = unit.valid[warp / 2] >> 16 * (warp % 2) & 0xffff;
    if (valid == 0) return;
    float s[q_tiles][4] = {};
    multiply_k(s, stage);

    const int first = unit.first + warp_keys * warp;
    change_scores(s, first, KV::scaled ? unit.k_descale : 1);
    if (valid != 0xffff || first < all_begin || first + warp_keys > all_end) {
      hide(s, first, valid);
      if (a.tree) valid = hide_by_tree(s, first);
    }
    unsigned p[q_tiles][2];
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) weigh(s[n], n, p[n]);
    add_v(p, stage + tile.k_bytes() + warp * warp_keys * panel_pitch, valid,
          KV::scaled ? unit.v_descale : 1);
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

  // Products of the warp's keys and Q.
  __device__ __forceinline__ void multiply_k(float (&s)[q_tiles][4], unsigned stage) const {
    float odd[q_tiles][4] = {};  // two chains of products
    const unsigned k_lane = stage + warp() * warp_keys * panel_pitch + KV::k_lane(lane());
    const unsigned q_lane =
        ptx::recompute(address(merge) + chunk_offset<q_pitch>(lane() % 8, lane() / 8));
#pragma unroll
    for (int step = 0; step < k_steps; step += 2) {
      unsigned k[2][4], q[q_tiles][4];
      KV::load_k(k, k_lane, step);
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

  // Products become scores in the log2 domain.
  __device__ __forceinline__ void change_scores(float (&s)[q_tiles][4], int first,
                                                float k_descale) const {
    const bool plain = a.softcap == 0 && !a.alibi_slopes;
    const int first_query =
        plain ? 0 : near_first_query(positions_of<tile>(a), at.b, at.seqlen_q, at.seqlen_kv);
    int key[2];  // places of the lane's
#pragma unroll
    for (int half = 0; half < 2; ++half)
      key[half] = plain ? 0 : key_place(positions_of<tile>(a), first + 8 * half + lane() / 4);
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
        const int query = row.query + first_query;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = s[n][2 * half + i] * factor;
          if (a.softcap > 0) x = a.softcap * tanh_accurate(x / a.softcap);
          if (a.alibi_slopes) x -= a.alibi_slopes[row.head] * fabsf(float(query - key[half]));
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
      const unsigned pair = Product::pack(x, y);
      if (a.split_invariant) {  // then sums have the weights as rounded
        x = Product::unpack(pair & 0xffff);
        y = Product::unpack(pair >> 16);
      }
      sum[n][0] += x;
      sum[n][1] += y;
      p[half] = ptx::transpose_8x8(pair);
    }
  }

  // Adds another warp's sums of the rows of tile n, of which stats has references and sums. Those
  // of sum 0 may be anything.
  template <class Sums>
  __device__ __forceinline__ void join(int n, const float2 (&stats)[8], Sums&& sums) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 other = stats[lane_row(0, i)];
      const bool any = sum[n][i] != 0, other_any = other.y != 0;
      const float next =
          fmaxf(any ? reference[n][i] : -infinity(), other_any ? other.x : -infinity());
      const float shrink = next == -infinity() ? 1 : ptx::ex2(reference[n][i] - next),
                  grow = next == -infinity() ? 1 : ptx::ex2(other.x - next);
      reference[n][i] = next;
      sum[n][i] = (any ? sum[n][i] * shrink : 0) + (other_any ? other.y * grow : 0);
#pragma unroll
      for (int v = 0; v < v_tiles; ++v)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = o[v][n][2 * half + i];
          x = any ? x * shrink : 0;
          if (other_any) x = fmaf(sums(v, 2 * half + i), grow, x);
        }
      if (lane() < 4) group.stats[warp()][lane_row(0, i)] = make_float2(next, sum[n][i]);
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
      const auto store_sums = [&](int warp) {
#pragma unroll
        for (int v = 0; v < v_tiles; ++v)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            merge[place(warp, here % 4 * 2 + i % 2, KV::v_column(v, i / 2, here))] = o[v][n][i];
      };
      constexpr int warps = tile.merge_warps();
      if constexpr (warps < decode_warps) {
        if (warp >= warps) store_sums(warp - warps);
        meet();
        if (warp < warps) {
          join(n, group.stats[warp + warps], [&](int v, int i) {
            return merge[place(warp, here % 4 * 2 + i % 2, KV::v_column(v, i / 2, here))];
          });
          store_sums(warp);
        }
      } else {
        store_sums(warp);
      }
      meet();
#pragma unroll 1
      for (int r = RowPart<head_dim_v>::row(); r < 8; r += RowPart<head_dim_v>::rows) {
        RowPart<head_dim_v> row;
        row.template add<warps>(
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
      const int bytes = final ? a.stages * tile.stage_bytes() : tile.merge_bytes();
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
        take(ring + stage.number * tile.stage_bytes(), unit);
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

template <class T, class KV, DecodeTile tile>
__device__ __forceinline__ void decode(const attn_decode_kernarg& a) {
  static_assert(tile.element_bytes == KV::bytes);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  DecodeShared<tile>& shared = decode_shared<tile>();
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      ptx::mbarrier_init(address(&shared.full[i]), 32 + 1);
      ptx::mbarrier_init(address(&shared.empty[i]), decode_warps);
    }
  }
  const unsigned ring = address(shared_memory);
  Loader<KV, tile> loader{a, shared, ring, int(threadIdx.x % 32), warp - decode_warps};
#if __CUDA_ARCH__ >= 900
  ptx::grid_let_next_start();
  ptx::grid_wait();  // before any other access to memory
#endif
  if (a.cu_seqlens_q) {
    if (warp == 0) store_rows_of_nobody<long long>(a, blockIdx.x, gridDim.x);
    if (a.seqlen_q == 0) return;
  }
  const Work<tile> work = find_work<tile>(a, int(threadIdx.x));  // all meet there
  if (work.begin == work.end) return;
  float* merge = reinterpret_cast<float*>(shared_memory + a.stages * tile.stage_bytes());
  if (warp >= decode_warps) {
    loader.run(work);
  } else if (tile.rows() <= 8 || a.rows_taken <= 8) {
    Decoder<T, KV, tile, 8>{a, shared, shared.group, merge}.run(work, ring);
  } else if constexpr (tile.rows() > 8) {
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
  } else if constexpr (tile.own_types) {
    decode_own_types<tile>(a, maps);
  } else
#endif
      if constexpr (tile.element_bytes == 1) {
    if (a.kv_e5m2)
      decode<F16, Fp8<E5M2>, tile>(a);
    else
      decode<F16, Fp8<E4M3>, tile>(a);
  } else {
    using T = ElementOf<type>;
    decode<T, Same<T>, tile>(a);
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
