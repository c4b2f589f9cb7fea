// The kernels convert_gfx942 and convert_gfx950.
#include "kernels/gfx942_convert.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "kernels/families.h"
#include "kernels/kernarg.h"
#include "kernels/limits.h"
#include "problem/operations.h"

namespace attn {
namespace {

constexpr int hardware_bias(const SmallFloat& format, Fp8Hardware hardware) {
  const int fnuz = format.mantissa_bits == 3 ? 8 : 16;
  return hardware == Fp8Hardware::ocp ? fnuz - 1 : fnuz;
}
constexpr unsigned nan_byte = 0x80;  // as encode_4_fp8 has it before it knows the type
constexpr unsigned each_byte = 0x01010101;

// HIP's limits: a grid has fewer than 2^32 work items along x, 2^16 workgroups along y and z.
constexpr int64_t max_grid_y = (1 << 16) - 1;
constexpr int64_t max_grid_x = ((int64_t{1} << 32) - 1) / (64 * attn_convert_waves);
constexpr int64_t max_head_dim = int64_t{1} << 28;  // offsets in a row are 32 bits of bytes
constexpr int64_t rows_per_box = 8 * attn_convert_waves;

// What one workgroup does, and how the descale's index follows from the workgroup's.
struct Boxes {
  int64_t size[3];            // batch, seq, head
  int64_t grid[3];            // along seq, head, batch
  int64_t descale_stride[3];  // batch, seq, head
};

Boxes boxes_of(const QuantizeProblem& p) {
  const bool find = p.scale == ATTN_SCALE_AMAX, block = p.kind == ATTN_DESCALE_BLOCK;
  Boxes boxes{{1, rows_per_box, 1}, {}, {}};
  if (block) boxes.size[1] = p.descale_block_keys;
  if (find && !block) boxes.size[1] = std::max<int64_t>(p.seqlen, 1);
  if (find && p.kind == ATTN_DESCALE_TENSOR) boxes.size[0] = p.batch, boxes.size[2] = p.heads;
  const int64_t seq_boxes = (p.seqlen + boxes.size[1] - 1) / boxes.size[1];
  // A sequence without rows still has a descale, unless it has one per block.
  boxes.grid[0] = block ? seq_boxes : std::max<int64_t>(seq_boxes, 1);
  boxes.grid[1] = p.heads / boxes.size[2];
  boxes.grid[2] = p.batch / boxes.size[0];
  const int64_t per_head = block ? boxes.grid[0] : 1;
  if (p.kind != ATTN_DESCALE_TENSOR) {
    boxes.descale_stride[0] = p.heads * per_head;
    boxes.descale_stride[1] = block ? 1 : 0;
    boxes.descale_stride[2] = per_head;
  }
  return boxes;
}

// A lane can take four elements at a time.
bool in_fours(const attn_strides& stride) {
  return stride.batch % 4 == 0 && stride.seq % 4 == 0 && stride.head % 4 == 0;
}
bool in_fours(const void* memory, attn_dtype type) {
  const uintptr_t alignment = uintptr_t(std::min<int64_t>(dtype_bytes(type, 4), 16));
  return reinterpret_cast<uintptr_t>(memory) % alignment == 0;
}

int convert_scale(attn_scale_source scale) {
  switch (scale) {
    case ATTN_SCALE_GIVEN:
      return attn_convert_divide;
    case ATTN_SCALE_AMAX:
      return attn_convert_find;
    case ATTN_SCALE_ONE:
      break;
  }
  return attn_convert_one;
}

attn_convert_kernarg constants(const QuantizeProblem& p, const Boxes& boxes, Fp8Hardware hardware) {
  attn_convert_kernarg a{};
  const auto set = [](long long* to, const attn_strides& from, int64_t bytes) {
    to[0] = from.batch * bytes, to[1] = from.seq * bytes, to[2] = from.head * bytes;
  };
  set(a.src_stride, p.src_stride, dtype_bytes(p.src_type));
  set(a.dst_stride, p.dst_stride, dtype_bytes(p.dst_type));
  for (int i = 0; i < 3; ++i) {
    a.descale_stride[i] = int(boxes.descale_stride[i]);
    a.box[i] = int(boxes.size[i]);
  }
  a.seqlen = int(p.seqlen);
  a.head_dim = int(p.head_dim);
  a.scale = convert_scale(p.scale);
  a.src_row_bytes = int(dtype_bytes(p.src_type, p.head_dim));
  a.dst_row_bytes = int(dtype_bytes(p.dst_type, p.head_dim));
  const bool fours = p.head_dim % 4 == 0 && in_fours(p.src_stride) && in_fours(p.dst_stride);
  a.log2_per_lane = fours ? 2 : 0;
  set_formats(p.src_type, p.dst_type, p.saturate != 0, hardware, &a);
  return a;
}

void patch(const QuantizeProblem& p, const attn_quantize_args& args, void*,
           attn_convert_kernarg& a) {
  a.src = args.src;
  a.dst = args.dst;
  a.descale = args.descale;
  if (!in_fours(args.src, p.src_type) || !in_fours(args.dst, p.dst_type)) a.log2_per_lane = 0;
}

template <Text name, Fp8Hardware hardware>
Status make_recipe(const QuantizeProblem& p, const DeviceInfo&, Recipe* recipe) {
  constexpr const char* kernel = name_of<name>.text;
  if (p.head_dim > max_head_dim)
    return unsupported(kernel, ": head_dim ", p.head_dim, "; accepted: up to ", max_head_dim);
  const Boxes boxes = boxes_of(p);
  if (boxes.grid[0] > max_grid_x || boxes.grid[1] > max_grid_y || boxes.grid[2] > max_grid_y)
    return unsupported(kernel, ": batch ", p.batch, ", heads ", p.heads, ", seqlen ", p.seqlen,
                       "; accepted: batch and heads up to ", max_grid_y);
  if (p.batch * p.heads * std::max<int64_t>(boxes.grid[0], 1) >= int64_t{1} << 31)
    return unsupported(kernel, ": 2^31 or more blocks of rows");
  recipe->steps.push_back({
      .image = kernel,
      .static_shared_bytes = 4 * attn_convert_waves,
      .launch = {.grid = {uint32_t(boxes.grid[0]), uint32_t(boxes.grid[1]),
                          uint32_t(boxes.grid[2])},
                 .block = {64 * attn_convert_waves, 1, 1}},
      .arguments = arguments_of<patch>(constants(p, boxes, hardware)),
  });
  return {};
}

template <Text name, Fp8Hardware hardware>
constexpr Kernel row = {.name = name_of<name>.text,
                        .op = Op::quantize,
                        .backend = ATTN_BACKEND_HIP,
                        .limits = {.in_types = float_types, .out_types = device_fp8_types},
                        .recipe = recipe_of<make_recipe<name, hardware>>};
constexpr Kernel rows[] = {row<"convert_gfx942", Fp8Hardware::fnuz>,
                           row<"convert_gfx950", Fp8Hardware::ocp>};

}  // namespace

attn_gfx942_fp8_codes fp8_codes(attn_dtype type, bool saturate, Fp8Hardware hardware) {
  const SmallFloat& f = fp8_format(type);
  attn_gfx942_fp8_codes c{};
  c.to_hardware = float(detail::pow2(f.bias - hardware_bias(f, hardware)));
  // Unsaturated values stop at the code after the largest finite one, which for OCP types is what
  // overflow gives; for FNUZ NaN is.
  SmallFloat beyond = f;
  beyond.max_code = 0x7f, beyond.inf_code = 0;
  const unsigned code = saturate ? f.max_code : f.max_code + 1;
  c.limit = code == nan_byte ? std::numeric_limits<float>::infinity()
                             : float(value_of(beyond, code)) * c.to_hardware;
  const unsigned drop = nan_byte - f.nan_code;  // 0, 1 or 2
  c.nan_shift = drop == 2 ? 6 : 7;
  c.nan_mask = drop * each_byte;
  c.sign_always = f.signed_zero_and_nan ? nan_byte * each_byte : 0;
  return c;
}

void set_formats(attn_dtype src_type, attn_dtype dst_type, bool saturate, Fp8Hardware hardware,
                 attn_convert_kernarg* a) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  a->src_type = src_type;
  a->dst_type = dst_type;
  if (dtype_is_fp8(dst_type)) {
    a->codes = fp8_codes(dst_type, saturate, hardware);
    int exponent;
    a->max_mantissa = float(std::frexp(type_info(dst_type).max_finite, &exponent));
    a->max_inverse = 1 / a->max_mantissa;
    a->max_exponent = exponent;
  }
  if (dtype_is_fp8(src_type)) {
    const SmallFloat& f = fp8_format(src_type);
    a->from_hardware = float(detail::pow2(hardware_bias(f, hardware) - f.bias));
    a->code_mask = f.signed_zero_and_nan || hardware == Fp8Hardware::ocp ? 0x7f * each_byte : ~0u;
    a->inf_value = a->nan_value = infinity;
    if (hardware == Fp8Hardware::ocp) {
      // What 0x80 and 0x7f mean, which the hardware reads as -0 and NaN.
      const float nan = std::numeric_limits<float>::quiet_NaN();
      a->inf_value = f.signed_zero_and_nan ? -0.0f : nan;
      a->nan_value = f.signed_zero_and_nan ? nan : float(value_of(f, f.max_code));
    } else if (f.signed_zero_and_nan) {
      SmallFloat beyond = f;
      beyond.max_code = 0x7f, beyond.inf_code = 0;
      if (f.inf_code != 0) a->inf_value = float(value_of(beyond, f.inf_code));
      a->nan_value = float(value_of(beyond, f.inf_code != 0 ? f.inf_code + 1 : f.max_code + 1));
    }
  }
}

std::span<const Kernel> gfx942_convert_rows() {
  return rows;
}

}  // namespace attn
