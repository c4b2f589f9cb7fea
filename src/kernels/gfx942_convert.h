// What convert_gfx942 and convert_gfx950 have to know of the fp8 types.
#pragma once
#include "asm/gfx942/convert_args.h"
#include "attn/attn.h"

namespace attn {

// The fp8 formats that a device converts to and from: gfx942 FNUZ, gfx950 OCP.
enum class Fp8Hardware { fnuz, ocp };

// The codes of an fp8 type. With `saturate` what is beyond its range becomes its largest value.
attn_gfx942_fp8_codes fp8_codes(attn_dtype type, bool saturate, Fp8Hardware hardware);

// Sets src_type, dst_type and the fields from codes on. The fp8 types on either side may be of
// the OCP or the FNUZ kind; `saturate` acts on an fp8 dst_type.
void set_formats(attn_dtype src_type, attn_dtype dst_type, bool saturate, Fp8Hardware hardware,
                 attn_convert_kernarg* a);

}  // namespace attn
