//# architectures sm_80 sm_90 compute_80 local_bytes=64
// The gradient of a bias: ds of every score, or sums of it where the bias repeats. A thread block
// has a tile of d_bias, or a part of its sum, in registers in float32. It goes over the tiles of
// scores that the sum consists of in ascending order, and computes S = Q K^T and dP = dO V^T of
// each anew. So no two blocks add to the same element.
#include <type_traits>

#include "../common/convert.cuh"
#include "../forward_sm80/load.cuh"
#include "../ptx/address.h"
#include "../ptx/ldmatrix.h"
#include "bias_args.h"
#include "items.cuh"
#include "weigh.cuh"

namespace {

using namespace attn::bwd_sm80;
namespace sm80 = attn::sm80;
namespace ptx = attn::ptx;
using Arguments = attn_backward_bias_kernarg;

constexpr int rows = bias_tile, keys = bias_tile, row_pitch = 128;
constexpr int ahead = bias_stages - 1;  // chunks that are copied before they are needed
constexpr int sum_pitch = keys + 1;     // floats; odd, so that rows begin in different banks
static_assert(rows * sum_pitch * sizeof(float) <= bias_shared_bytes);

// As seen_columns takes it.
struct Columns {
  static constexpr int keys = ::keys;
  static constexpr bool masked = true;
};

// A tile of scores.
struct Scores {
  Item item;    // its queries, as rows that stay
  Walked keys;  // count 0: there is no such tile
  bool full;    // all pairs are visible, as far as masks go
};

// The tiles of scores of a block's sum that are still to come. Divisions take long, so they find
// the first one only.
struct Coming {
  long long count;
  int at[4];  // the next one, from the tile of d_bias on

  __device__ Coming(const BiasSums& sums, int part) : count(sums.begin(part + 1)) {
    const long long first = sums.begin(part);
    count -= first;
    BiasSums::split(sums.summed, first, at);
  }
  __device__ void advance(const int (&extent)[4]) {
    --count;
    for (int i = 3; i >= 0; --i) {
      if (++at[i] < extent[i]) return;
      at[i] = 0;
    }
  }
};

// The next tile of the block's sum of which a pair is visible. By one thread.
__device__ __forceinline__ void find_visible(const attn_bwd_sm80_kernarg& a, const BiasSums& sums,
                                             const int (&tile)[4], Coming& coming, Scores& s) {
  while (coming.count > 0) {
    int at[4];
    for (int i = 0; i < 4; ++i) at[i] = tile[i] + coming.at[i];
    coming.advance(sums.summed);
    const attn::device::Span span = segment_span(a.kv, at[0]);
    const attn::KeyBand band = a.mask.band(a.rows.seqlen_q, span.length);
    s.item.b = at[0];
    s.item.head = at[1];
    s.item.row = rows * at[2];
    s.item.length = a.rows.seqlen_q;
    s.item.walked = span.length;
    s.item.from = band.lower;
    s.item.to = band.upper;
    s.item.first_walked = span.begin;
    s.item.stats = attn_backward_tile * a.rows.first_tile(at[0], 0);
    s.keys = {at[1], keys * at[3], min(keys, span.length - keys * at[3]), attn::device::mask_full};
    const int last = min(s.item.row + rows, s.item.length) - 1;
    if (s.keys.count <= 0 || band.lower >= band.upper ||
        s.item.row + band.lower >= s.keys.first + s.keys.count || last + band.upper <= s.keys.first)
      continue;
    if (a.block_mask.kinds)
      s.keys.mask = mask_of<Of::queries>(a, s.item, s.item.head, s.item.row, last + 1 - s.item.row,
                                         s.keys.first, s.keys.count);
    s.full = s.keys.mask == attn::device::mask_full && s.keys.count == keys &&
             s.item.row + rows <= s.item.length &&
             s.item.row + rows - 1 + band.lower <= s.keys.first &&
             s.item.row + band.upper >= s.keys.first + keys;
    if (s.keys.mask != attn::device::mask_empty) return;
  }
  s.keys.count = 0;
}

// Copies 64 columns of a tile's queries and keys: chunks of Q and K come first, then those of dO
// and V.
struct Copier {
  const attn_bwd_sm80_kernarg& a;
  unsigned shared;
  int first_chunks, chunks;  // of Q and K; of all

  __device__ void copy(const Scores& s, int chunk, unsigned stage) const {
    if (s.keys.count == 0) return;
    const bool first = chunk < first_chunks;
    const int column = 64 * (first ? chunk : chunk - first_chunks);
    const int columns = (first ? a.head_dim : a.head_dim_v) - column;
    const unsigned to = shared + stage * (2 * bias_chunk_bytes);
    const auto copy_rows = [&](unsigned to, const void* base, const long long(&stride)[3], int b,
                               long long row, int head, int count) {
      const long long at = b * stride[0] + row * stride[1] + head * stride[2] + column;
      sm80::copy_tile<bias_threads, bias_tile, row_pitch>(
          to, static_cast<const char*>(base) + 2 * at, 2 * stride[1], count, columns);
    };
    const int kv_batch = a.kv.cu_seqlens ? 0 : s.item.b, kv_head = s.item.head / a.group;
    const long long key = s.item.first_walked + s.keys.first;
    copy_rows(to, first ? a.q : a.d_out, first ? a.q_stride : a.d_out_stride, s.item.b, s.item.row,
              s.item.head, s.item.length - s.item.row);
    copy_rows(to + bias_chunk_bytes, first ? a.k : a.v, first ? a.k_stride : a.v_stride, kv_batch,
              key, kv_head, s.keys.count);
  }
};

// x += a chunk of 16 rows of queries times one of 64 keys.
template <class Element>
__device__ __forceinline__ void multiply(float (&x)[keys / 8][4], unsigned rows_at,
                                         unsigned keys_at) {
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    unsigned of_rows[4];
    ptx::ldmatrix(of_rows, rows_at ^ sm80::line_step(d));
#pragma unroll
    for (int n = 0; n < keys / 8; n += 2) {
      unsigned of_keys[4];
      ptx::ldmatrix(of_keys, (keys_at ^ sm80::line_step(d)) + n * 8 * row_pitch);
      Element::mma(x[n], of_rows, of_keys[0], of_keys[1]);
      Element::mma(x[n + 1], of_rows, of_keys[2], of_keys[3]);
    }
  }
}

// What a lane needs of its two rows beside the products, which is loaded before them.
struct Rows {
  float lse2[2], delta[2];
  bool pairs;                  // the bias is in `bias`
  unsigned bias[keys / 8][2];  // of neighbouring keys, in 16 bits each
};

// row: the warp's first one.
__device__ __forceinline__ void begin_rows(Rows& rows, const attn_bwd_sm80_kernarg& a,
                                           bool in_pairs, const Scores& tile, int row) {
  const int lane = threadIdx.x % 32, head = tile.item.head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = row + fragment_row(half, lane);
    const bool exists = query < tile.item.length;
    const long long at = a.rows.first_row(head) + tile.item.stats + query;
    rows.lse2[half] = exists ? a.lse2[at] : infinity(), rows.delta[half] = exists ? a.delta[at] : 0;
  }
  rows.pairs = in_pairs && tile.keys.count == keys;
  if (!rows.pairs) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = min(row + fragment_row(half, lane), tile.item.length - 1);
    const auto* const from = reinterpret_cast<const unsigned*>(
        static_cast<const unsigned short*>(a.bias) + tile.item.b * a.bias_stride[0] +
        head * a.bias_stride[1] + query * a.bias_stride[2] + tile.keys.first +
        fragment_column(0, lane));
#pragma unroll
    for (int n = 0; n < keys / 8; ++n) rows.bias[n][half] = from[4 * n];
  }
}

// sum += ds of a warp's 16 rows, the first of which is number `row`. hiding: some of the pairs may
// not be visible. pairs: rows.pairs.
template <class Element, bool hiding, bool pairs>
__device__ __forceinline__ void add_ds(float (&sum)[keys / 8][4], float (&s)[keys / 8][4],
                                       const float (&dp)[keys / 8][4], const Rows& rows,
                                       const attn_bwd_sm80_kernarg& a, const Scores& tile,
                                       int row) {
  const int lane = threadIdx.x % 32, head = tile.item.head;
  const int column = fragment_column(0, lane);
  const auto &lse2 = rows.lse2, &delta = rows.delta;
  SeenColumns<Columns> seen[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = row + fragment_row(half, lane);
    if (hiding) seen[half] = seen_columns<Columns, Of::queries>(a, tile.item, tile.keys, query);
  }
  const ScoreRule rule(a, head);
  rule.cap(a, s);
  constexpr int at_once = pairs ? keys / 8 : 2;  // columns of 8 keys whose bias is loaded together
#pragma unroll
  for (int first = 0; first < keys / 8; first += at_once) {
    float bias[at_once][2][2];
    if constexpr (pairs) {
#pragma unroll
      for (int n = 0; n < at_once; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned pair = rows.bias[first + n][half];
          bias[n][half][0] = Element::unpack((unsigned short)pair);
          bias[n][half][1] = Element::unpack((unsigned short)(pair >> 16));
        }
    } else {
      load_bias<Of::queries>(a, tile.item, head, row + fragment_row(0, lane),
                             tile.keys.first + 8 * first + column, bias);
    }
#pragma unroll
    for (int n = first; n < first + at_once; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = 8 * n + column + i;
          const float score = rule.score(s[n][2 * half + i], bias[n - first][half][i],
                                         row + fragment_row(half, lane) + tile.item.walked -
                                             tile.item.length - tile.keys.first - key);
          const bool hidden = (hiding && (key < seen[half].begin || key >= seen[half].end ||
                                          !(seen[half].bits[n / 4] >> (8 * n % 32 + i) & 1))) ||
                              score == -infinity() || lse2[half] == infinity();
          const float p = ptx::ex2(score - lse2[half]);
          sum[n][2 * half + i] += hidden ? 0 : p * (dp[n][2 * half + i] - delta[half]);
        }
      }
    }
  }
}

__device__ void store(const Arguments& a, const int (&at)[4], float x) {
  long long to = 0;
  for (int i = 0; i < 4; ++i) to += at[i] * a.stride[i];
  if (a.add) x += attn::device::load_element(a.d_bias, a.type, to);
  if (a.type == attn_element_f32)
    static_cast<float*>(a.d_bias)[to] = x;
  else
    static_cast<unsigned short*>(a.d_bias)[to] =
        (unsigned short)(a.type == attn_element_bf16 ? BF16::pack(x, 0) : F16::pack(x, 0));
}

// The second launch: a thread for each element.
__device__ void add_parts(const Arguments& a) {
  const long long elements = BiasSums::count(a.sums.extent),
                  element = (long long)blockIdx.x * bias_threads + threadIdx.x;
  if (element >= elements) return;
  float sum = a.part_sums[element];
  for (int part = 1; part < a.sums.parts; ++part) sum += a.part_sums[part * elements + element];
  int at[4];
  BiasSums::split(a.sums.extent, element, at);
  store(a, at, sum);
}

// The block's sums, of its tile of d_bias. tile_sum: of its 64 x 64 places, those of a dimension
// with one element still to be added, which is done from the first to the last.
__device__ void store_sums(const Arguments& a, const int (&tile)[4], int part, float* tile_sum) {
  const bool adds_rows = a.sums.extent[2] == 1, adds_keys = a.sums.extent[3] == 1;
  if (adds_rows) {
    if (threadIdx.x < keys) {
      float sum = 0;
      for (int r = 0; r < rows; ++r) sum += tile_sum[r * sum_pitch + threadIdx.x];
      tile_sum[threadIdx.x] = sum;
    }
    __syncthreads();
  }
  if (adds_keys) {
    if (threadIdx.x < (adds_rows ? 1 : rows)) {
      float sum = 0;
      for (int k = 0; k < keys; ++k) sum += tile_sum[threadIdx.x * sum_pitch + k];
      tile_sum[threadIdx.x * sum_pitch] = sum;
    }
    __syncthreads();
  }
  const int width = adds_keys ? 1 : keys, height = adds_rows ? 1 : rows;
  for (int i = threadIdx.x; i < width * height; i += bias_threads) {
    const int r = i / width, k = i % width;
    const int at[4] = {tile[0], tile[1], rows * tile[2] + r, keys * tile[3] + k};
    if (at[2] >= a.sums.extent[2] || at[3] >= a.sums.extent[3]) continue;
    const float sum = tile_sum[r * sum_pitch + k];
    if (a.sums.parts == 1) {
      store(a, at, sum);
    } else {
      long long element = part;
      for (int n = 0; n < 4; ++n) element = element * a.sums.extent[n] + at[n];
      a.part_sums[element] = sum;
    }
  }
}

template <class Element>
__device__ __forceinline__ void add_tiles(const Arguments& a, unsigned char* shared_memory) {
  const long long tiles = BiasSums::count(a.sums.kept);
  const int part = int(blockIdx.x / tiles);
  int tile[4];
  BiasSums::split(a.sums.kept, blockIdx.x % tiles, tile);
  Coming coming(a.sums, part);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned shared = ptx::address(shared_memory);
  const unsigned rows_at = shared + warp * (16 * row_pitch) +
                           attn::device::chunk_offset<row_pitch>(lane % 16, lane / 16);
  const unsigned keys_at =
      shared + bias_chunk_bytes +
      attn::device::chunk_offset<row_pitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);

  const int first_chunks = (a.of.head_dim + 63) / 64;
  const Copier copier{a.of, shared, first_chunks, first_chunks + (a.of.head_dim_v + 63) / 64};
  static_assert(ahead == 2);  // no more than the least number of chunks of a tile
  // A warp may still add ds of a tile when the one after the next is looked for.
  __shared__ Scores found[3];
  static_assert(sizeof found <= bias_static_shared_bytes);
  const auto find = [&](unsigned number) {
    if (threadIdx.x == 0) find_visible(a.of, a.sums, tile, coming, found[number % 3]);
  };
  find(0);
  __syncthreads();
  for (int chunk = 0; chunk < ahead; ++chunk) {
    copier.copy(found[0], chunk, chunk);
    ptx::cp_async_commit();
  }
  // Neighbouring keys' biases are 4 bytes, and at multiples of 4 bytes.
  const bool in_pairs = a.of.bias_type == Element::type && a.of.bias_stride[3] == 1 &&
                        reinterpret_cast<unsigned long long>(a.of.bias) % 4 == 0 &&
                        (a.of.bias_stride[0] | a.of.bias_stride[1] | a.of.bias_stride[2]) % 2 == 0;
  float sum[keys / 8][4] = {};
  unsigned stage = 0;
  for (unsigned number = 0; found[number % 3].keys.count > 0; ++number) {
    find(number + 1);
    const Scores& now = found[number % 3];
    float s[keys / 8][4] = {}, dp[keys / 8][4] = {};
    Rows of_rows;
    begin_rows(of_rows, a.of, in_pairs, now, now.item.row + 16 * warp);
#pragma unroll 1
    for (int chunk = 0; chunk < copier.chunks; ++chunk) {
      ptx::cp_async_wait<ahead - 1>();
      __syncthreads();
      const int later = chunk + ahead - copier.chunks;
      const unsigned free_stage = (stage + ahead) % bias_stages;
      if (later < 0)
        copier.copy(now, chunk + ahead, free_stage);
      else
        copier.copy(found[(number + 1) % 3], later, free_stage);
      ptx::cp_async_commit();
      const unsigned at = stage * (2 * bias_chunk_bytes);
      if (chunk < first_chunks)
        multiply<Element>(s, rows_at + at, keys_at + at);
      else
        multiply<Element>(dp, rows_at + at, keys_at + at);
      stage = (stage + 1) % bias_stages;
    }
    const auto add = [&](auto hiding, auto pairs) {
      add_ds<Element, hiding, pairs>(sum, s, dp, of_rows, a.of, now, now.item.row + 16 * warp);
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (of_rows.pairs)
      now.full ? add(no, yes) : add(yes, yes);
    else
      add(yes, no);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  float* const tile_sum = reinterpret_cast<float*>(shared_memory);
#pragma unroll
  for (int n = 0; n < keys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile_sum[(16 * warp + fragment_row(i / 2, lane)) * sum_pitch + 8 * n +
               fragment_column(i % 2, lane)] = sum[n][i];
  __syncthreads();
  store_sums(a, tile, part, tile_sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(bias_threads, 3)
    bwd_bias_cuda(const __grid_constant__ attn_backward_bias_kernarg a) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if (a.adds_parts)
    add_parts(a);
  else if (a.element == attn_element_bf16)
    add_tiles<BF16>(a, shared_memory);
  else
    add_tiles<F16>(a, shared_memory);
}
