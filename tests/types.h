// Lists of the types of core/types.h.
#pragma once
#include <vector>

#include "core/types.h"

namespace attn::test {

// Those of `types`, bits of type_bit.
inline std::vector<attn_dtype> list_of(uint32_t types) {
  std::vector<attn_dtype> list;
  for (int t = ATTN_F32; t < end_of_dtypes; ++t)
    if (types & type_bit(attn_dtype(t))) list.push_back(attn_dtype(t));
  return list;
}

}  // namespace attn::test
