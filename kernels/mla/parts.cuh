// How mla_*_r64 share work, and the parts of row tiles that several blocks have. Units of 64 keys
// are counted as if each row tile saw all keys of its sequence. The blocks of a column share the
// units of its row tiles, each with as many or one more; blocks of neighbouring columns read the
// same keys.
#pragma once
#include "../common/lengths.cuh"
#include "../decode/query.cuh"
#include "many_args.h"

namespace attn::mla {

using decode::address, decode::Barrier, decode::wait, decode::q_address, device::segment_span;
using decode::Head, decode::Row, decode::Share, decode::unit_keys, device::Span;

// Of a row tile of up to `rows` rows.
__device__ __forceinline__ int used_rows(const attn_decode_kernarg& a, const Head& at, int rows) {
  return min(at.seqlen_q * a.group - at.first_row, rows);
}

__device__ __forceinline__ int units_of(int keys) {
  return max((keys + unit_keys - 1) / unit_keys, 1);
}
// The neighbouring sequences whose units a lane counts. Loops over them are not unrolled: a line of
// memory has several lengths, and instructions take long to load where nothing hides it.
struct Run {
  int begin, end;
  __device__ __forceinline__ explicit Run(int batch) {
    const int length = (batch + 31) / 32, lane = threadIdx.x % 32;
    begin = min(lane * length, batch), end = min(begin + length, batch);
  }
};
__device__ __forceinline__ unsigned units_of_sequence(const attn_decode_kernarg& a, int b) {
  return units_of(segment_span(a.segment[0].lengths, b).length);
}
// Of all sequences and of those before b. By all lanes of a warp.
struct Counted {
  unsigned all, before;
};
__device__ __forceinline__ Counted count_units(const attn_decode_kernarg& a, int b) {
  Counted counted = {0, 0};
  const Run run(a.batch);
#pragma unroll 1
  for (int i = run.begin; i < run.end; ++i) {
    const unsigned units = units_of_sequence(a, i);
    counted.all += units;
    if (i < b) counted.before += units;
  }
  return {__reduce_add_sync(0xffffffff, counted.all),
          __reduce_add_sync(0xffffffff, counted.before)};
}

// The first lane up to which there are more than `unit` units; there is one.
__device__ __forceinline__ int find_lane(unsigned up_to, unsigned unit) {
  return __ffs(__ballot_sync(0xffffffff, up_to > unit)) - 1;
}

// What a block has: units [begin, end) of its column, of which the first is unit `unit` of a row
// tile of sequence b.
struct Found {
  Share share;
  unsigned begin, end;
  int b, tile, unit;
};
// Of block `row` of a column. By all lanes of a warp, each of which counts the units of a run of
// sequences, so that only those of one run are looked at one by one.
__device__ __forceinline__ Found find_share(const attn_decode_kernarg& a, int column, int row) {
  const unsigned tiles = a.heads_kv * a.row_tiles, lane = threadIdx.x % 32;
  const unsigned first = column * tiles / a.columns, last = (column + 1) * tiles / a.columns;
  const Run run(a.batch);
  unsigned own = 0;
#pragma unroll 1
  for (int b = run.begin; b < run.end; ++b) own += units_of_sequence(a, b);
  decode::Scan sums = decode::scan<32>(own);
  const unsigned all = sums.all;
  Found found;
  found.share = {all * (last - first), unsigned(a.splits)};
  found.begin = found.share.begin(row), found.end = found.share.begin(row + 1);
  found.tile = first + found.begin / all;
  unsigned before = found.begin % all;  // units up to the wanted one
  const int at = find_lane(sums.up_to_here, before);
  found.b = __shfl_sync(0xffffffff, run.begin, at);
  before -= __shfl_sync(0xffffffff, sums.up_to_here - own, at);
  for (const int end = __shfl_sync(0xffffffff, run.end, at);;) {
    const int b = found.b + lane;
    own = b < end ? units_of_sequence(a, b) : 0;
    sums = decode::scan<32>(own);
    if (before < sums.all) {
      const int there = find_lane(sums.up_to_here, before);
      found.b += there;
      before -= __shfl_sync(0xffffffff, sums.up_to_here - own, there);
      break;
    }
    before -= sums.all;
    found.b += 32;
  }
  found.unit = int(before);
  return found;
}

// The parts of a row tile whose units are [begin, begin + units) of its column.
struct Parts {
  const attn_decode_kernarg& a;
  unsigned first, count;  // of the column's blocks
  __device__ __forceinline__ Parts(const attn_decode_kernarg& a, const Share& share, unsigned begin,
                                   unsigned units)
      : a(a), first(share.block_of(begin)), count(share.block_of(begin + units - 1) - first + 1) {}
  // A block has at most one part that others began, and one that others go on with.
  __device__ __forceinline__ unsigned slot(unsigned number, int column) const {
    return 2 * ((first + number) * a.columns + column) + (number == 0);
  }
  // A block has two slots, so there are some hundreds, and places have 32 bits.
  __device__ __forceinline__ float* sums(unsigned slot, int r) const {
    return a.sums + (slot * tile_rows + r) * latent_columns;
  }
  __device__ __forceinline__ float2* stats(unsigned slot, int r) const {
    return reinterpret_cast<float2*>(a.stats) + (slot * tile_rows + r);
  }
};

// A row of the result. of: the reference of its weights and their sum.
struct OutRow {
  const attn_decode_kernarg& a;
  long long out, lse;
  float2 of;
  float sink, factor;

  __device__ __forceinline__ OutRow(const attn_decode_kernarg& a, const Head& at, int r, float2 of)
      : a(a), of(of) {
    const Row row(a, at, r);
    sink = a.sinks ? a.sinks[row.head] : -device::infinity();
    factor = device::row_factor(of.x, of.y, sink);
    out = at.b * a.out_stride[0] + row.query * a.out_stride[1] + row.head * a.out_stride[2];
    lse = (at.b * (long long)a.heads_q + row.head) * a.seqlen_q + row.query;
  }
  __device__ __forceinline__ void store_pair(int column, float x, float y) const {
    x = factor == 0 ? 0 : x * factor;
    y = factor == 0 ? 0 : y * factor;
    if (a.out_type == attn_element_f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(a.out) + out + column) = make_float2(x, y);
    } else {
      *reinterpret_cast<unsigned*>(static_cast<unsigned short*>(a.out) + out + column) =
          a.out_type == attn_element_f16 ? device::F16::pack(x, y) : device::BF16::pack(x, y);
    }
  }
  __device__ __forceinline__ void store_lse() const {
    if (a.lse) a.lse[lse] = device::row_lse(of.x, of.y, sink);
  }
};

}  // namespace attn::mla
