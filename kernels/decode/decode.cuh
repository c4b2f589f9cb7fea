// Attention of a few queries against many keys. K and V are read once for all query heads of their
// head: these, and the queries, are the columns of S^T = K Q^T and O^T = V^T P^T, 16 to a row
// group. One warp of a block loads units of 64 keys into a ring; of the four of a row group each
// has 16 keys of a unit and its own state of the softmax. They meet where a head's units end.
#pragma once
#include "../common/tanh.cuh"
#include "../ptx/movmatrix.h"
#if __CUDA_ARCH__ >= 900
#include "../ptx/grid.h"
#endif
#include "load.cuh"
#include "merge.cuh"
#if __CUDA_ARCH__ >= 900
#include "wide.cuh"
#endif

namespace attn::decode {

// A warp's part of the work.
template <class T, class KV, DecodeTile tile, int rows>
struct Decoder {
  using Product = typename KV::Product;
  using Group = RowGroup<tile.row_groups>;
  static constexpr int head_dim = tile.head_dim, head_dim_v = tile.head_dim_v;
  static constexpr int q_tiles = rows / 8, k_steps = head_dim / 16, v_tiles = head_dim_v / 16;
  static constexpr int q_pitch = (head_dim + 63) / 64 * 128;
  static_assert(rows * q_pitch <= tile.group_merge_bytes());

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
  __device__ __forceinline__ int thread() const {
    return tile.row_groups > 1 ? threadIdx.x % group_threads : threadIdx.x;
  }
  __device__ __forceinline__ int warp() const { return thread() / 32; }
  __device__ __forceinline__ int used_rows() const {
    const int used = at.seqlen_q * a.group - at.first_row;
    return tile.row_groups > 1 ? min(used, rows) : used;
  }
  __device__ __forceinline__ bool idle() const { return tile.row_groups > 1 && used_rows() <= 0; }
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
    if (thread() < rows) {
      const int query = min(Row(a, at, thread()).query, last);
      group.keys[thread()] = keys_of(query);
      if (a.tree) {
        const long long row = a.cu_seqlens_q ? at.q_begin : (long long)at.b * a.seqlen_q;
        const unsigned long long* words = a.tree + 2 * (row + query);
        group.tree[thread()] = make_ulonglong2(words[0], words[1]);
      }
    }
    if (a.tree) all_end = min(all_end, at.seqlen_kv - int(a.tree_mask.keys));
    load_q();
    Group::meet();
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
    const int r = thread() / 8, t = threadIdx.x % 8;
    if (r >= rows) return;
    const bool used = r < used_rows();
    const Row row(a, at, used ? r : 0);
    const char* from = static_cast<const char*>(a.q) +
                       2 * ((a.cu_seqlens_q ? at.q_begin * a.q_stride[1] : at.b * a.q_stride[0]) +
                            row.query * a.q_stride[1] + row.head * a.q_stride[2]);
    unsigned q[k_steps];  // columns 16 * step + 2t and the one behind
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      const int column = 16 * step + 2 * t;
      q[step] =
          used && column < a.head_dim ? *reinterpret_cast<const unsigned*>(from + 2 * column) : 0;
    }
    float scale = a.scale;
    if (KV::scaled)
      scale *= q_to_f16(a.q_type, [&](auto&& each) {
#pragma unroll
        for (unsigned& pair : q) each(pair);
      });
    if (t == 0) group.q_scale[r] = scale;
    const int chunk = KV::scaled ? t % 2 : t / 4, word = KV::scaled ? t / 2 : t % 4;
#pragma unroll
    for (int step = 0; step < k_steps; ++step)
      *reinterpret_cast<unsigned*>(reinterpret_cast<char*>(merge) +
                                   chunk_offset<q_pitch>(r, 2 * step + chunk) + 4 * word) = q[step];
  }

  // The warp's keys of a unit.
  __device__ __forceinline__ void take(unsigned stage, const Unit& unit) {
    const int warp = this->warp();
    unsigned valid = unit.valid[warp / 2] >> 16 * (warp % 2) & 0xffff;
    if (valid == 0) return;
    const float k_descale = KV::scaled ? unit.k_descale : 1,
                v_descale = KV::scaled ? unit.v_descale : 1;
    float s[q_tiles][4] = {}, odd[q_tiles][4] = {};  // two chains of products
    const unsigned k_lane = stage + warp * warp_keys * panel_pitch + KV::k_lane(lane());
    const unsigned q_lane =
        recompute(address(merge) + chunk_offset<q_pitch>(lane() % 8, lane() / 8));
#pragma unroll
    for (int step = 0; step < k_steps; step += 2) {
      unsigned k[2][4], q[q_tiles][4];
      KV::load_k(k, k_lane, step);
#pragma unroll
      for (int n = 0; n < q_tiles; ++n)
        ptx::ldmatrix(q[n], (q_lane ^ 2 * step % 8 * 16) + 2 * step / 8 * 128 + 8 * n * q_pitch);
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

    const int first = unit.first + warp_keys * warp;
    change_scores(s, first, k_descale);
    if (valid != 0xffff || first < all_begin || first + warp_keys > all_end) {
      hide(s, first, valid);
      if (a.tree) valid = hide_by_tree(s, first);
    }
    const bool all = valid == 0xffff;
    unsigned p[q_tiles][2];
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) weigh(s[n], n, p[n]);

    const unsigned v_lane =
        stage + tile.k_bytes() + warp * warp_keys * panel_pitch + KV::v_lane(lane());
    // Values of keys that are not valid may be anything: the lane's keys are 2t and 2t + 8, and
    // those behind them.
    unsigned there[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned two = valid >> (8 * i + lane() % 4 * 2);
      there[i] = (two & 1 ? 0xffff : 0) | (two & 2 ? 0xffff0000 : 0);
    }
#pragma unroll
    for (int v = 0; v < v_tiles; v += 2) {
      unsigned columns[2][4];
      KV::load_v(columns, v_lane, v);
      if (!all) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) columns[i][j] &= j < 2 ? there[0] : there[1];
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

  // A part ends: to the result, or to the workspace.
  // final: of the block, whose ring is free then.
  __device__ __forceinline__ void end_part(const Share& share, const Part& part, bool final,
                                           unsigned ring) {
    const int warp = this->warp();
    // In shared memory where registers are few.
    PlacedPart own;
    if (tile.row_groups == 1 || thread() == 0) own = place_of<tile>(a, at, share, part);
    if (tile.row_groups > 1 && thread() == 0) group.part = own;
    const PlacedPart& placed = tile.row_groups > 1 ? group.part : own;
    const Parts<tile> parts = {a, placed};
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) {
      Group::meet();  // all have done with Q, or with the rows before
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
      const int here = int(recompute(lane()));
#pragma unroll
      for (int v = 0; v < v_tiles; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          merge[place(warp, here % 4 * 2 + i % 2, KV::v_column(v, i / 2, here))] = o[v][n][i];
      Group::meet();
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
        else if (tile.split && a.whole_heads)
          parts.fold(at, 8 * n + r, row);
        else if (8 * n + r < used_rows())
          parts.write(parts.slot(placed.number), 8 * n + r, row);
      }
    }
    if (!placed.alone() && !(tile.split && a.whole_heads)) {
      constexpr int place_bytes = 16 * group_threads;
      const int bytes = final ? a.stages * tile.stage_bytes() : tile.group_merge_bytes();
      parts.arrive(at, used_rows(), final ? ring : address(merge), bytes / place_bytes);
    }
    Group::meet();  // before the next part's Q comes where the sums are
  }

  __device__ __forceinline__ void run(const Work<tile>& work, unsigned ring) {
    Stage stage;
    // The first head is known before its first unit is there.
    const Cursor<tile>& first = work.first;
    const int own_rows = Group::index() * group_rows;
    at = {first.b,
          first.h,
          first.sequence.first_row + own_rows,
          first.sequence.seqlen_q,
          first.sequence.seqlen_kv,
          first.sequence.q_begin};
#pragma unroll 1
    while (true) {
      if (!idle()) begin_head();
      const auto leave = [&] {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(address(&shared.empty[stage.number]));
        stage.next(a.stages);
      };
#pragma unroll 1
      while (true) {
        wait(shared.full[stage.number], stage.parity);
        const Unit& unit = shared.unit[stage.number];
        if (!idle()) take(ring + stage.number * tile.stage_bytes(), unit);
        if (unit.last) break;
        leave();
      }
      const Part part = shared.unit[stage.number].part;
      const bool final = shared.unit[stage.number].final;
      leave();
      if (!idle()) end_part(work.share, part, final, ring);
      if (final) return;
      wait(shared.full[stage.number], stage.parity);
      const Unit& unit = shared.unit[stage.number];
      at = {unit.b, unit.h, unit.first_row + own_rows, unit.seqlen_q, unit.seqlen_kv, unit.q_begin};
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
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), row_group = warp / decode_warps;
  const bool loads = row_group == tile.compute_groups();
  if (threadIdx.x == 0) {
    if (engine) ptx::mbarrier_init(address(&shared.early), a.stages);
    for (int i = 0; i < a.stages; ++i) {
      ptx::mbarrier_init(address(&shared.full[i]), engine ? 1 : 32 + 1);
      ptx::mbarrier_init(address(&shared.empty[i]), tile.compute_groups() * decode_warps);
    }
  }
  const unsigned ring = address(shared_memory);
  Loader<KV, tile, M> loader{a, maps, shared, ring, int(threadIdx.x % 32)};
  Work<tile> guessed;
  int early = 0;  // units that are loaded before what is in front has ended
#if __CUDA_ARCH__ >= 900
  if (engine) ptx::mbarrier_init_fence();
  ptx::grid_let_next_start();
  if constexpr (loader.takes_promise)
    if (a.prefix_stable && a.seqlen_q > 0) {
      guessed = find_work<tile>(a);
      if (loads && guessed.begin < guessed.end) early = loader.load_early(guessed);
    }
  ptx::grid_wait();  // before any other access to memory
  if (loader.takes_promise && a.prefix_stable)
    __threadfence();  // L1 may have what was there before
#endif
  if (a.cu_seqlens_q) {
    if (warp == 0) store_rows_of_nobody<long long>(a, blockIdx.x, gridDim.x);
    if (a.seqlen_q == 0) return;
  }
  const Work<tile> work = find_work<tile>(a);  // all meet there
  if (early > 0) wait(shared.early, 0);
  if (work.begin == work.end) return;
  auto& group = shared.group[tile.row_groups > 1 ? row_group : 0];
  float* merge =
      reinterpret_cast<float*>(shared_memory + a.stages * tile.stage_bytes() +
                               (tile.row_groups > 1 ? row_group * tile.group_merge_bytes() : 0));
  if (loads) {
    if (early > 0 && !loader.same(work, guessed, early)) early = 0;
    loader.run(work, early);
#if __CUDA_ARCH__ >= 900
  } else if constexpr (tile.wide) {
    WideDecoder<T, KV, tile>{a, shared, group, row_group, ring, address(merge)}.run(work);
#endif
  } else if (tile.row_groups == 1 && a.rows_taken <= 8) {
    Decoder<T, KV, tile, 8>{a, shared, group, merge}.run(work, ring);
  } else {
    Decoder<T, KV, tile, 16>{a, shared, group, merge}.run(work, ring);
  }
}

}  // namespace attn::decode

// The kernel NAME, which is the name of its file, of a tile in braces. KV: of Q's type T, or fp8
// under f16 and bf16.
#define ATTN_DECODE(NAME, TILE, KERNARG, ...)                                               \
  constexpr attn::decode::DecodeTile NAME##_tile = TILE;                                    \
  extern "C" __global__ void __launch_bounds__(NAME##_tile.threads(), NAME##_tile.blocks()) \
      NAME(const __grid_constant__ KERNARG a) {                                             \
    using namespace attn::decode;                                                           \
    constexpr DecodeTile tile = NAME##_tile;                                                \
    __VA_ARGS__                                                                             \
  }
#define ATTN_TILE(...) \
  { __VA_ARGS__ }
#define ATTN_DECODE_SM80(NAME, T, ...)                           \
  ATTN_DECODE(NAME, ATTN_TILE(__VA_ARGS__), attn_decode_kernarg, \
              (decode<T, Same<T>, tile>(a, NoMaps{}));)
#define ATTN_DECODE_SM90(NAME, T, ...)                                \
  ATTN_DECODE(NAME, ATTN_TILE(__VA_ARGS__), attn_decode_sm90_kernarg, \
              (decode<T, Same<T>, tile>(a.a, a.map));)
#define ATTN_DECODE_SM89_FP8(NAME, ...)                                                   \
  ATTN_DECODE(NAME, ATTN_TILE(__VA_ARGS__), attn_decode_kernarg,                          \
              if (a.kv_e5m2) decode<F16, Fp8<attn::ptx::f16_of_e5m2>, tile>(a, NoMaps{}); \
              else decode<F16, Fp8<attn::ptx::f16_of_e4m3>, tile>(a, NoMaps{});)
#define ATTN_DECODE_SM90_FP8(NAME, ...)                                                    \
  ATTN_DECODE(NAME, ATTN_TILE(__VA_ARGS__), attn_decode_sm90_kernarg,                      \
              if (a.a.kv_e5m2) decode<F16, Fp8<attn::ptx::f16_of_e5m2>, tile>(a.a, a.map); \
              else decode<F16, Fp8<attn::ptx::f16_of_e4m3>, tile>(a.a, a.map);)
