#ifndef ATTN_KERNELS_MLA_WGMMA_WIDE_H
#define ATTN_KERNELS_MLA_WGMMA_WIDE_H

#include "../ptx/wgmma_wide.h"

namespace attn::mla {
using ptx::wgmma_wide;
}

#endif
