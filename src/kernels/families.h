// The catalog rows of each family of kernels. Within a family they are in order of preference; the
// order of families is in src/catalog/catalog.cpp.
#pragma once
#include "kernels/kernel.h"

namespace attn {

std::span<const Kernel> host_forward_rows();   // host.cpp: reference, cpu_*
std::span<const Kernel> host_backward_rows();  // host.cpp: bwd_reference, bwd_cpu_*
std::span<const Kernel> sm90_backward_rows();  // sm90_backward.cpp: bwd_sm90_*
std::span<const Kernel> sm80_backward_rows();  // sm80_backward.cpp: bwd_sm80_*
std::span<const Kernel>
sm90_dequantised_mixed_rows();                    // sm90_mixed.cpp: fwd_sm90_*_dequantised_mixed
std::span<const Kernel> sm90_dequantised_rows();  // sm90_dequantised.cpp: fwd_sm90_*_dequantised
std::span<const Kernel> decode_forward_rows();    // decode.cpp: decode_*
std::span<const Kernel> mla_forward_rows();       // mla.cpp: mla_*
std::span<const Kernel> sm90_mixed_rows();        // sm90_mixed.cpp: fwd_sm90_*_mixed
std::span<const Kernel> sm90_forward_rows();      // sm90_forward.cpp: fwd_sm90_*
std::span<const Kernel> sm90_fp8_rows();          // sm90_fp8.cpp: fwd_sm90_fp8_*
std::span<const Kernel> sm80_forward_rows();      // sm80_forward.cpp: fwd_sm80_*
std::span<const Kernel> gfx942_decode_rows();     // gfx942_decode.cpp: decode_gfx942_*, _gfx950_*
std::span<const Kernel> gfx942_forward_rows();    // gfx942_forward.cpp: fwd_gfx942_*, _gfx950_*
std::span<const Kernel> merge_rows();             // merge.cpp: merge_*
std::span<const Kernel> quantize_rows();          // quantize.cpp: quantize_*
std::span<const Kernel> kv_append_rows();         // kv_append.cpp: kv_append_*, kv_roll_*
std::span<const Kernel> gfx942_convert_rows();    // gfx942_convert.cpp: convert_gfx942, _gfx950
std::span<const Kernel> block_mask_rows();        // block_mask.cpp: mask_cuda
std::span<const Kernel> prefix_rows();            // prefix.cpp: prefix_*
std::span<const Kernel> lists_rows();             // gather.cpp: lists_cuda
std::span<const Kernel> shards_rows();            // shards.cpp: shards_cuda

}  // namespace attn
