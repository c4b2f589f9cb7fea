// quantize().
#include <cmath>
#include <string>

#include "call.h"

namespace attn::python {

nb::object quantize(nb::handle value, nb::handle dtype, nb::handle scale, nb::handle per,
                    nb::handle saturate, nb::handle backend) {
  attn_quantize_problem p;
  clear(&p);
  Reader reader;
  const Array x = reader.first(value, "x");
  const Sizes sizes = sizes_of(x, "[B, S, H, D], or packed [total, H, D]");
  p.batch = sizes[0], p.seqlen = sizes[1], p.heads = sizes[2], p.head_dim = sizes[3];
  x.need_floats();
  p.src_type = x.type.type;
  p.src_stride = strides_of(x);
  const ElementType* type = find_type(dtype);
  const auto quantized = [](const ElementType& t) { return t.is_input() && !t.is_float(); };
  if (!type || !quantized(*type))
    refuse("dtype is " + text_of(dtype) + "; accepted: " + names_of(quantized));
  const bool beside = type->has_scales;  // a scale of each token and head
  const bool own_scales = !type->is_fp8() && type->type != ATTN_NVFP4;
  p.dst_type = type->type;
  p.saturate = boolean(saturate, "saturate");

  Sizes descale_shape = {1};
  const std::string per_text = text_of(per);
  if (per_text == "head") {
    p.kind = ATTN_DESCALE_HEAD;
    descale_shape = {p.batch, p.heads};
  } else if (per_text == "64" || per_text == "128") {
    p.kind = ATTN_DESCALE_BLOCK;
    p.descale_block_keys = per_text == "64" ? 64 : 128;
    descale_shape = {p.batch, p.heads,
                     (p.seqlen + p.descale_block_keys - 1) / p.descale_block_keys};
  } else if (per_text != "tensor") {
    refuse("per is " + per_text + "; accepted: tensor, head, 64, 128 (keys of a block)");
  } else {
    p.kind = ATTN_DESCALE_TENSOR;
  }

  Array descale;
  descale.source = nb::none();
  const char* scales = "a number, amax, or an array of f32";
  if (nb::isinstance<nb::str>(scale)) {
    if (text_of(scale) != "amax") refuse("scale is " + text_of(scale) + "; accepted: " + scales);
    p.scale = ATTN_SCALE_AMAX;
    descale = reader.empty("descale", descale_shape, find_type("f32"));
  } else if (is_array(scale)) {
    p.scale = ATTN_SCALE_GIVEN;
    descale = reader.next(scale, "scale");
    descale.need_type("f32");
    descale.need_shape(descale_shape, "the shape that `per` asks for");
    descale.need_contiguous();
  } else {
    const float factor = number(scale, "scale", scales);
    if (factor == 0 || !std::isfinite(factor))
      refuse("scale is " + text_of(scale) + "; accepted: finite numbers other than 0");
    p.scale = factor == 1 ? ATTN_SCALE_ONE : ATTN_SCALE_GIVEN;
    if (!(own_scales && factor == 1)) descale = reader.full("descale", descale_shape, factor);
  }

  Sizes shape = x.shape();
  const ElementType& bytes = find_type("u8");
  Array scale_array;
  if (beside) {
    Sizes of_rows = shape;
    if (type->scale_elements > 0)
      of_rows.back() = shape.back() / type->scale_elements;
    else
      of_rows.pop_back();
    scale_array = reader.empty("scale", of_rows,
                               find_type(type->scale_bytes == 4   ? "f32"
                                         : type->scale_bytes == 2 ? "f16"
                                                                  : "u8"));
  }
  if (type->in_bytes()) shape.back() = shape.back() / type->block_elements * type->block_bytes;
  const std::shared_ptr<Compiled> compiled =
      cached(context_for(backend, reader.origin().device), p);
  const Array stored = reader.empty("stored", shape, type->in_bytes() ? bytes : *type);
  auto args = make<attn_quantize_args>();
  args.src = x.data();
  args.dst = stored.data();
  if (beside) args.scale = const_cast<void*>(scale_array.address());
  if (!descale.source.is_none())
    args.descale = static_cast<float*>(const_cast<void*>(descale.address()));
  {
    nb::gil_scoped_release release;
    compiled->made.run(args, reader.stream());
    if (reader.waits()) compiled->owner->synchronize(reader.stream());
  }
  if (!beside) return nb::make_tuple(stored.source, descale.source);
  if (descale.source.is_none() || own_scales)
    return nb::make_tuple(stored.source, scale_array.source);
  return nb::make_tuple(stored.source, scale_array.source, descale.source);
}

}  // namespace attn::python
