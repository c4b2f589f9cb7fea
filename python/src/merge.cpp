// merge().
#include <string>
#include <vector>

#include "call.h"

namespace attn::python {

nb::object merge(const std::vector<std::pair<nb::object, nb::object>>& parts, nb::handle out_dtype,
                 nb::handle backend) {
  if (parts.empty()) refuse("parts is empty; accepted: one (out, lse) or more");
  attn_merge_problem p;
  clear(&p);
  Reader reader;
  std::vector<Array> outs, lses;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "parts[" + std::to_string(i) + "]";
    Array out = i == 0 ? reader.first(parts[i].first, name + "[0]")
                       : reader.next(parts[i].first, name + "[0]");
    if (i == 0) {
      const Sizes sizes = sizes_of(out, "[B, Sq, Hq, Dv], or packed [total_q, Hq, Dv]");
      p.batch = sizes[0], p.seqlen_q = sizes[1], p.heads_q = sizes[2], p.head_dim_v = sizes[3];
      out.need_floats();
      p.part_type = out.type.type;
      p.part_stride = strides_of(out);
    } else {
      out.need_shape(outs[0].shape(), "the shape of parts[0][0]");
      out.need_type(outs[0].type.name);
      const attn_strides s = strides_of(out), &want = p.part_stride;
      if (s.batch != want.batch || s.seq != want.seq || s.head != want.head)
        refuse(out.name + " has other strides than parts[0][0]; accepted: the same");
    }
    Array lse = reader.next(parts[i].second, name + "[1]");
    lse.need_type("f32");
    if (out.tensor.ndim() == 3)
      lse.need_shape({p.heads_q, p.seqlen_q}, "[Hq, total_q]");
    else
      lse.need_shape({p.batch, p.heads_q, p.seqlen_q}, "[B, Hq, Sq]");
    lse.need_contiguous();
    outs.push_back(std::move(out));
    lses.push_back(std::move(lse));
  }
  const ElementType* type = out_dtype.is_none() ? &outs[0].type : find_type(out_dtype);
  if (!type || !type->is_float())
    refuse("out_dtype is " + text_of(out_dtype) +
           "; accepted: " + names_of(&ElementType::is_float));
  p.out_type = type->type;
  p.num_parts = int32_t(parts.size());

  const std::shared_ptr<Compiled> compiled =
      cached(context_for(backend, reader.origin().device), p);
  const Array out = reader.empty("out", outs[0].shape(), *type);
  const Array lse = reader.empty("lse", lses[0].shape(), lses[0].type);
  std::vector<const void*> out_pointers;
  std::vector<const float*> lse_pointers;
  for (size_t i = 0; i < parts.size(); ++i) {
    out_pointers.push_back(outs[i].data());
    lse_pointers.push_back(static_cast<const float*>(lses[i].data()));
  }
  auto args = make<attn_merge_args>();
  args.num_parts = p.num_parts;
  args.outs = out_pointers.data();
  args.lses = lse_pointers.data();
  args.out = out.data();
  args.lse = static_cast<float*>(lse.data());
  {
    nb::gil_scoped_release release;
    compiled->made.run(args, reader.stream());
    if (reader.waits()) compiled->owner->synchronize(reader.stream());
  }
  return nb::make_tuple(out.source, lse.source);
}

}  // namespace attn::python
