// What convert_gfx942 has to know of the fp8 types.
#pragma once
#include "asm/gfx942/convert_args.h"
#include "attn/attn.h"

namespace attn {

// Sets src_type, dst_type and the fields from nan_shift on. The fp8 types on either side may be of
// the OCP or the FNUZ kind; `saturate` acts on an fp8 dst_type.
void set_formats(attn_dtype src_type, attn_dtype dst_type, bool saturate, attn_convert_kernarg* a);

}  // namespace attn
