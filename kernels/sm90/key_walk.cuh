// The walk over the keys that an item sees, in tiles of `keys`, which begin where the item's keys
// or a segment's begin. Under a causal mask it goes down: then what an item asks for when it begins
// is what longer ones that began before are about to ask for, and comes from the L2 once
// (docs/hopper.md). Item: the item of forward.cuh.
#pragma once

namespace attn::sm90 {

template <int keys>
struct KeyWalk {
  int step;     // from one tile to the next: keys or -keys
  int segment;  // that the tile is of
  int first;    // position of the tile's first key
  int last;     // the same of the segment's last tile on the way
  int end;      // behind the segment's last key that the item sees

  // At the first tile of an item that sees some key.
  template <class Item>
  __device__ __forceinline__ KeyWalk(const Item& item, bool down)
      : step(down ? -keys : keys), segment(0) {
    enter(item, down ? item.high - 1 : item.low);
  }
  // Whether there is none behind it.
  template <class Item>
  __device__ __forceinline__ bool ends(const Item& item) const {
    return first == last && (step < 0 ? first <= item.low : end >= item.high);
  }
  // Not behind the last one.
  template <class Item>
  __device__ __forceinline__ void next(const Item& item) {
    if (first != last) [[likely]]
      first += step;
    else
      enter(item, step < 0 ? first - 1 : end);
  }
  // The tile's, that the item sees.
  __device__ __forceinline__ int count() const { return min(end - first, keys); }

 private:
  // The segment that has this position, which the item sees.
  template <class Item>
  __device__ __forceinline__ void enter(const Item& item, int position) {
    if (step < 0) segment = 0;
    while (item.segment[segment].end <= position) ++segment;
    const int begin = max(item.low, segment > 0 ? item.segment[segment - 1].end : 0);
    end = min(item.high, item.segment[segment].end);
    const int top = begin + (end - 1 - begin) / keys * keys;
    first = step < 0 ? top : begin;
    last = step < 0 ? begin : top;
  }
};

}  // namespace attn::sm90
