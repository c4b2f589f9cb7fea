//# architectures sm_80 sm_90 compute_80
// Block masks from dense masks and from intervals of queries per key, in device memory. Blocks of
// threads take the blocks of the mask one after the other: bits into shared memory, their number
// and a hash, and for a PARTIAL block the place of an equal one or a new place. Where dense masks
// can be read 16 bytes at a time, the next block of the mask is on its way while one is worked on,
// and shared memory and hash are for PARTIAL blocks alone.
#include "../shared/block_mask.h"
#include "../shared/mask_args.h"

namespace {

constexpr unsigned all_lanes = 0xffffffff;
constexpr int warps = attn_mask_threads / 32;

struct Cell {
  long long plane;
  int i, j;           // first query and key
  int rows, columns;  // that exist
};
__device__ Cell cell_of(const attn_mask_kernarg& a, unsigned n) {
  Cell c;
  const unsigned row = n / unsigned(a.columns), plane = row / unsigned(a.rows);
  c.plane = plane;
  c.i = int(row - plane * a.rows) * a.block_q;
  c.j = int(n - row * a.columns) * a.block_k;
  c.rows = min(a.block_q, a.seqlen_q - c.i);
  c.columns = min(a.block_k, a.seqlen_kv - c.j);
  return c;
}

// A bit per byte that is not 0.
__device__ unsigned gather_bits(unsigned bytes) {
  return ((__vcmpne4(bytes, 0) & 0x01010101) * 0x01020408) >> 24;
}

// Whether chunks of 16 keys can be loaded at once.
__device__ bool in_chunks(const attn_mask_kernarg& a) {
  return a.dense && a.seqlen_kv % 16 == 0 &&
         reinterpret_cast<unsigned long long>(a.dense) % 16 == 0;
}
constexpr int most_chunks = 128 * 128 / 16 / attn_mask_threads;  // of a thread
// The n-th chunk of the thread in a block of the mask.
struct Chunk {
  int number;  // in the order of the bits, which are half a word
  int i, j;
  __device__ Chunk(const attn_mask_kernarg& a, int n)
      : number(threadIdx.x + n * attn_mask_threads) {
    const int log2 = a.block_k == 128 ? 3 : 2;
    i = number >> log2;
    j = (number & ((1 << log2) - 1)) * 16;
  }
  __device__ bool exists(const Cell& c) const { return i < c.rows && j < c.columns; }
};
__device__ void load_chunks(const attn_mask_kernarg& a, const Cell& c, uint4 (&x)[most_chunks]) {
  const unsigned char* from = a.dense + (c.plane * a.seqlen_q + c.i) * a.seqlen_kv + c.j;
#pragma unroll
  for (int n = 0; n < most_chunks; ++n) {
    const Chunk at(a, n);
    x[n] = make_uint4(0, 0, 0, 0);
    if (at.exists(c))
      x[n] = __ldcs(reinterpret_cast<const uint4*>(from + (long long)at.i * a.seqlen_kv + at.j));
  }
}

__device__ void read_dense(const attn_mask_kernarg& a, const Cell& c, unsigned* words) {
  const int row_words = a.block_k / 32;
  const unsigned char* from = a.dense + (c.plane * a.seqlen_q + c.i) * a.seqlen_kv + c.j;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int n = warp; n < a.block_q * row_words; n += warps) {
    const int i = n / row_words, j = n % row_words * 32 + lane;
    const bool sees = i < c.rows && j < c.columns && from[(long long)i * a.seqlen_kv + j] != 0;
    const unsigned word = __ballot_sync(all_lanes, sees);
    if (lane == 0) words[n] = word;
  }
}

__device__ void read_intervals(const attn_mask_kernarg& a, const Cell& c, unsigned* words) {
  __shared__ int2 see[2][128];
  for (int n = threadIdx.x; n < 2 * a.block_k; n += attn_mask_threads) {
    const int key = n / 2, k = n % 2;
    int2 interval = {0, 0};
    if (key < c.columns && k < a.num_intervals) {
      const int* from =
          a.intervals + ((c.plane * a.seqlen_kv + c.j + key) * a.num_intervals + k) * 2;
      interval = make_int2(from[0], from[1]);
    }
    see[k][key] = interval;
  }
  __syncthreads();
  const int row_words = a.block_k / 32;
  for (int n = threadIdx.x; n < a.block_q * row_words; n += attn_mask_threads) {
    const int row = n / row_words, i = c.i + row, first = n % row_words * 32;
    unsigned word = 0;
    if (row < c.rows) {
#pragma unroll 4
      for (int j = 0; j < 32; ++j) {
        const int2 x = see[0][first + j], y = see[1][first + j];
        const bool sees = (i >= x.x && i < x.y) || (i >= y.x && i < y.y);
        word |= unsigned(sees) << j;
      }
    }
    words[n] = word;
  }
}

// Sums over the block of threads, in every thread.
struct Sums {
  int seen;
  unsigned long long hash;
};
__device__ Sums sum_up(const unsigned* words, int count) {
  __shared__ Sums of_warp[warps];
  Sums sums = {0, 0};
  for (int n = threadIdx.x; n < count; n += attn_mask_threads) {
    sums.seen += __popc(words[n]);
    unsigned long long x = words[n] + (n + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    sums.hash += x ^ x >> 31;
  }
  for (int step = 16; step > 0; step /= 2) {
    sums.seen += __shfl_xor_sync(all_lanes, sums.seen, step);
    sums.hash += __shfl_xor_sync(all_lanes, sums.hash, step);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = {0, 0};
  for (int w = 0; w < warps; ++w) {
    sums.seen += of_warp[w].seen;
    sums.hash += of_warp[w].hash;
  }
  return sums;
}

// The place of a PARTIAL block in `bits`. An entry of the table is 0, or a part of the hash above
// the place + 1, which is `writing` until the bits are there. Who has claimed an entry waits for
// nobody, so waiting for it ends.
__device__ int place_of(const attn_mask_kernarg& a, const unsigned* words, int count,
                        unsigned long long hash) {
  constexpr unsigned writing = 0xffffffff;
  __shared__ unsigned found;
  __shared__ bool is_new;
  const unsigned long long tag = (hash >> 32 | 1) << 32;
  for (unsigned at = unsigned(hash) & (a.table_size - 1);; at = (at + 1) & (a.table_size - 1)) {
    if (threadIdx.x == 0) {
      unsigned long long entry = *const_cast<volatile unsigned long long*>(a.table + at);
      if (entry == 0) entry = atomicCAS(a.table + at, 0ull, tag | writing);
      is_new = entry == 0;
      found = 0;  // 0: another block
      if (entry == 0) {
        found = unsigned(atomicAdd(a.partials, 1)) + 1;
      } else if ((entry ^ tag) >> 32 == 0) {
        while (unsigned(entry) == writing)
          entry = *const_cast<volatile unsigned long long*>(a.table + at);
        found = unsigned(entry);
      }
      __threadfence();
    }
    __syncthreads();
    const unsigned place = found;
    const bool fresh = is_new;
    unsigned* bits = a.bits + (long long)(place - 1) * count;
    bool equal = place != 0;
    if (fresh) {
      for (int n = threadIdx.x; n < count; n += attn_mask_threads) bits[n] = words[n];
      __threadfence();
    } else if (equal) {
      for (int n = threadIdx.x; n < count; n += attn_mask_threads)
        equal = equal && __ldcg(bits + n) == words[n];
    }
    equal = __syncthreads_and(equal);
    if (fresh && threadIdx.x == 0) atomicExch(a.table + at, tag | place);
    if (equal) return int(place) - 1;
  }
}

__device__ void store(const attn_mask_kernarg& a, unsigned n, int kind, int place) {
  if (threadIdx.x != 0) return;
  a.kinds[n] = (unsigned char)kind;
  a.index[n] = place;
}

__device__ void from_chunks(const attn_mask_kernarg& a, unsigned* words, int count) {
  unsigned short* halves = reinterpret_cast<unsigned short*>(words);
  Cell c = cell_of(a, blockIdx.x);
  uint4 x[most_chunks];
  load_chunks(a, c, x);
  for (unsigned n = blockIdx.x; n < a.cells;) {
    unsigned bits[most_chunks];
    bool some = false, all = true;
#pragma unroll
    for (int k = 0; k < most_chunks; ++k) {
      bits[k] = gather_bits(x[k].x) | gather_bits(x[k].y) << 4 | gather_bits(x[k].z) << 8 |
                gather_bits(x[k].w) << 12;
      some |= bits[k] != 0;
      all &= bits[k] == (Chunk(a, k).exists(c) ? 0xffff : 0);
    }
    const unsigned next = n + gridDim.x;
    if (next < a.cells) {
      c = cell_of(a, next);
      load_chunks(a, c, x);
    }
    some = __syncthreads_or(some);
    all = __syncthreads_and(all);
    int place = -1;
    if (some && !all) {
#pragma unroll
      for (int k = 0; k < most_chunks; ++k) {
        const Chunk at(a, k);
        if (at.i < a.block_q) halves[at.number] = (unsigned short)bits[k];
      }
      __syncthreads();
      place = place_of(a, words, count, sum_up(words, count).hash);
    }
    store(a, n, all ? attn_kind_full : some ? attn_kind_partial : attn_kind_empty, place);
    n = next;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(attn_mask_threads, attn_mask_blocks)
    mask_cuda(const __grid_constant__ attn_mask_kernarg a) {
  __shared__ __align__(4) unsigned words[attn_mask_max_words];
  const int count = a.block_q * (a.block_k / 32);
  if (in_chunks(a)) return from_chunks(a, words, count);
  for (unsigned n = blockIdx.x; n < a.cells; n += gridDim.x) {
    const Cell c = cell_of(a, n);
    if (a.dense)
      read_dense(a, c, words);
    else
      read_intervals(a, c, words);
    __syncthreads();
    const Sums sums = sum_up(words, count);
    int kind = attn_kind_partial, place = -1;
    if (sums.seen == 0)
      kind = attn_kind_empty;
    else if (sums.seen == c.rows * c.columns)
      kind = attn_kind_full;
    else
      place = place_of(a, words, count, sums.hash);
    store(a, n, kind, place);
    __syncthreads();  // words and sums are read
  }
}
