// The walk over the keys that an item sees, in tiles of `keys`, which begin where the item's keys
// or a segment's begin. Under a causal mask it goes down: then what an item asks for when it begins
// is what longer ones that began before are about to ask for, and comes from the L2 once
// (docs/hopper.md). Item: the item of control.cuh. Host code includes this too.
#ifndef ATTN_KERNELS_FORWARD_SM90_KEY_WALK_H
#define ATTN_KERNELS_FORWARD_SM90_KEY_WALK_H

#include "../shared/host_device.h"

#ifndef __CUDACC__
#include <algorithm>
#endif

namespace attn::sm90 {

#ifndef __CUDACC__
using std::max;
using std::min;
#endif

template <int keys>
struct KeyWalk {
  int step;     // from one tile to the next: keys or -keys
  int segment;  // that the tile is of
  int first;    // position of the tile's first key
  int last;     // the same of the segment's last tile on the way
  int end;      // after the segment's last key that the item sees

  // At the first tile of an item that sees some key.
  template <class Item>
  ATTN_HOST_DEVICE KeyWalk(const Item& item, bool down) : step(down ? -keys : keys), segment(0) {
    enter(item, down ? item.high - 1 : item.low);
  }
  // Whether it is the last one.
  template <class Item>
  ATTN_HOST_DEVICE bool ends(const Item& item) const {
    return first == last && (step < 0 ? first <= item.low : end >= item.high);
  }
  // Must not be called at the last one.
  template <class Item>
  ATTN_HOST_DEVICE void next(const Item& item) {
    if (first != last) [[likely]]
      first += step;
    else
      enter(item, step < 0 ? first - 1 : end);
  }
  // The tile's, that the item sees.
  ATTN_HOST_DEVICE int count() const { return min(end - first, keys); }

 private:
  // The segment that has this position, which the item sees.
  template <class Item>
  ATTN_HOST_DEVICE void enter(const Item& item, int position) {
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
#endif
