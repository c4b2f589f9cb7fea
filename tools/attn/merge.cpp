// attn merge: partial results over parts of KV become one.
#include <cstdio>
#include <iostream>

#include "attn/io.h"
#include "core/dtype.h"

namespace attn::tools {
namespace {

struct MergeOptions {
  std::string in, out, out_dtype, kernel;
  BackendOptions backend;
  bool as_json = false;
};

void merge(const MergeOptions& options) {
  Progress progress;
  progress.say("reading " + options.in);
  const TensorFile file = need(read_tensors(options.in));
  const auto name = [](const char* base, size_t i) { return base + ("." + std::to_string(i)); };
  size_t parts = 0;
  while (file.find(name("out", parts)) || file.find(name("lse", parts))) ++parts;
  const Tensor& first = need_tensor(file, "out.0");
  const size_t dims = first.shape.size();
  if (dims != 3 && dims != 4)
    throw InputError(file.label + ": out.0 has shape " + shape_text(first.shape) +
                     "; [B, Sq, Hq, Dv] or [total_q, Hq, Dv] is expected");
  for (const auto& [key, tensor] : file.tensors)
    if (key.starts_with("out.") || key.starts_with("lse."))
      if (const std::string_view tail = std::string_view(key).substr(4);
          tail.empty() || tail.find_first_not_of("0123456789") != std::string_view::npos ||
          tail.size() > 9 || std::stoul(std::string(tail)) >= parts)
        throw InputError(file.label + ": " + quote(key) + " follows no part " +
                         std::to_string(parts) + "; parts are numbered from 0 without gaps");

  // Packed results [total_q, Hq, Dv] with lse [Hq, total_q] are one batch entry.
  auto p = make<attn_merge_problem>();
  p.batch = dims == 4 ? first.shape[0] : 1;
  p.seqlen_q = first.shape[dims - 3];
  p.heads_q = first.shape[dims - 2];
  p.head_dim_v = first.shape[dims - 1];
  p.num_parts = static_cast<int32_t>(parts);
  p.part_type = element_type(file, "out.0");
  const std::vector<int64_t> lse_shape = dims == 4
                                             ? std::vector<int64_t>{p.batch, p.heads_q, p.seqlen_q}
                                             : std::vector<int64_t>{p.heads_q, p.seqlen_q};
  for (size_t i = 0; i < parts; ++i) {
    need_shape(file, name("out", i), need_tensor(file, name("out", i)), first.dtype, first.shape,
               "the shape of out.0");
    need_shape(file, name("lse", i), need_tensor(file, name("lse", i)), Dtype::f32, lse_shape,
               dims == 4 ? "[B, Hq, Sq]" : "[Hq, total_q]");
  }
  p.out_type = parse_dtype("--out-dtype", options.out_dtype);
  p.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();

  const context device = options.backend.open();
  if (p.out_type == ATTN_DTYPE_NONE)
    p.out_type = device.backend() == ATTN_BACKEND_REFERENCE ? ATTN_F32 : p.part_type;
  const plan chosen(device, p);
  Tensor out = make_typed(p.out_type, first.shape);
  Tensor lse = make_tensor(Dtype::f32, lse_shape);

  Arrays arrays(device);
  std::vector<const void*> outs;
  std::vector<const float*> lses;
  for (size_t i = 0; i < parts; ++i) {
    const Tensor& part = *file.find(name("out", i));
    const Tensor& part_lse = *file.find(name("lse", i));
    outs.push_back(arrays.copy_of(part.data.get(), part.bytes));
    lses.push_back(static_cast<float*>(arrays.copy_of(part_lse.data.get(), part_lse.bytes)));
  }
  auto args = make<attn_merge_args>();
  args.num_parts = p.num_parts;
  args.outs = outs.data();
  args.lses = lses.data();
  args.out = arrays.room(out.bytes);
  args.lse = static_cast<float*>(arrays.room(lse.bytes));
  progress.say(std::string("running ") + chosen.kernel());
  chosen.run(args);
  device.synchronize();
  copy_out(device, out.data.get(), args.out, out.bytes);
  copy_out(device, lse.data.get(), args.lse, lse.bytes);
  progress.say("writing " + options.out);
  write_result(options.out, p.out_type, std::move(out), std::move(lse));
  progress.say("");
  if (options.as_json) {
    Json report = options.backend.report(device);
    report["kernel"] = chosen.kernel();
    report["parts"] = parts;
    report["out"] = {{"dtype", attn::dtype_name(p.out_type)}, {"shape", first.shape}};
    std::cout << report.dump(2) << "\n";
  } else {
    std::printf("%s: %zu parts, out %s %s, written to %s\n",
                options.backend.ran(chosen.kernel(), device).c_str(), parts,
                attn::dtype_name(p.out_type), shape_text(first.shape).c_str(), options.out.c_str());
  }
}

}  // namespace

void add_merge(CLI::App& app, int&) {
  auto* command =
      app.add_subcommand("merge", "Merge out.0 lse.0 out.1 lse.1 ... of IN to out and lse in OUT");
  auto o = std::make_shared<MergeOptions>();
  command->footer(parts_help);
  command->add_option("IN", o->in)->required();
  command->add_option("OUT", o->out)->required();
  o->backend.add_to(*command);
  command
      ->add_option("--out-dtype", o->out_dtype,
                   "f32 f16 bf16; default: f32 on reference, else "
                   "the parts' type")
      ->type_name("T");
  command->add_option("--kernel", o->kernel, "demand this kernel")->type_name("NAME");
  add_json(*command, o->as_json);
  command->callback([o] { merge(*o); });
}

}  // namespace attn::tools
