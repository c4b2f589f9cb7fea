// Which keys queries see, as positions.
#ifndef ATTN_KERNELS_COMMON_SEEN_KEYS_H
#define ATTN_KERNELS_COMMON_SEEN_KEYS_H

namespace attn::device {

struct alignas(16) SeenKeys {
  int some_begin, some_end;  // by some of the queries
  int all_begin, all_end;    // by all
};

}  // namespace attn::device
#endif
