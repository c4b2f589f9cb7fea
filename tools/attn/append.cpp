// attn append: k_new and v_new of IN after what its k and v hold.
#include <cstdio>
#include <iostream>

#include "attn/io.h"
#include "core/dtype.h"

namespace attn::tools {
namespace {

constexpr const char* append_help =
    "IN holds what attn run reads, q of the new tokens and a cache: k and v [B, S, Hkv, D], or "
    "paged\n"
    "with block_table, and seqlens_kv; k_descale and v_descale where they are wanted; and\n"
    "  k_new, v_new   F32 F16 BF16 [B, Sq, Hkv, D] and [B, Sq, Hkv, Dv]; packed as q\n"
    "and where they are wanted\n"
    "  rotary_cos, rotary_sin\n"
    "                 F32 [S or more positions, R / 2]; rotate k_new and q\n"
    "OUT has the same without these, with the new tokens in k and v, seqlens_kv as it is then, and "
    "q\n"
    "rotated: attn run OUT --causal attends from the new tokens.";

struct AppendOptions {
  std::string in, out, kernel;
  BackendOptions backend;
  bool interleaved = false, as_json = false;
};

void append(const AppendOptions& options) {
  Progress progress;
  progress.say("reading " + options.in);
  const auto input = make_input(need(read_tensors(options.in)));
  TensorFile& file = input->file;
  const auto fail = [&](const std::string& text) { throw InputError(file.label + ": " + text); };
  const attn_problem& q = input->problem;
  if (q.num_segments != 1)
    fail("there are " + std::to_string(q.num_segments) + " segments; 1 is accepted");
  const bool numbered = numbered_segments(file) > 0;
  const auto named = [&](const char* name) { return segment_name(name, 0, numbered); };
  need_tensor(file, named("seqlens_kv"));

  auto p = make<attn_kv_append_problem>();
  p.batch = q.batch;
  p.heads_kv = q.heads_kv;
  p.head_dim = q.head_dim;
  p.head_dim_v = q.head_dim_v;
  p.seqlen_new = q.seqlen_q;
  p.total_new = q.total_q;
  p.new_layout = q.q_layout;
  p.new_type = element_type(file, "k_new");
  p.segment = input->segments[0];
  p.advance_seqlens = 1;
  p.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  const Tensor &k_new = need_tensor(file, "k_new"), &v_new = need_tensor(file, "v_new");
  std::vector<int64_t> shape = need_tensor(file, "q").shape;
  const std::string meaning = shape.size() == 4 ? "[B, Sq, Hkv, D]" : "[total_q, Hkv, D]";
  shape.end()[-2] = p.heads_kv;
  need_shape(file, "k_new", k_new, k_new.dtype, shape, meaning);
  shape.back() = p.head_dim_v;
  need_shape(file, "v_new", v_new, k_new.dtype, shape, meaning);
  const bool rotates = file.find("rotary_cos") || file.find("rotary_sin");
  if (rotates) {
    const Tensor& cos = need_tensor(file, "rotary_cos");
    need_shape(file, "rotary_cos", cos, Dtype::f32, {-1, -1}, "[positions, R / 2]");
    need_shape(file, "rotary_sin", need_tensor(file, "rotary_sin"), Dtype::f32, cos.shape,
               "rotary_cos's shape");
    if (cos.shape[1] == 0) fail("rotary_cos has no columns; R / 2 from 1 up is expected");
    if (q.q_type != p.new_type)
      fail(std::string("q is ") + attn::dtype_name(q.q_type) + "; " + attn::dtype_name(p.new_type) +
           " as k_new is expected with rotary_cos");
    p.rotary_positions = cos.shape[0];
    p.rotary_dim = 2 * cos.shape[1];
    p.rotary_interleaved = options.interleaved;
    p.heads_q = q.heads_q;
  } else if (options.interleaved) {
    fail("rotary_cos and rotary_sin are missing; --interleaved goes with them");
  }

  const context device = options.backend.open();
  const plan chosen(device, p);
  Arrays arrays(device);
  input->stage(arrays);
  const auto copy = [&](const char* name) {
    const Tensor& tensor = need_tensor(file, name);
    return arrays.copy_of(tensor.data.get(), tensor.bytes);
  };
  auto args = make<attn_kv_append_args>();
  args.cache = input->segment_args[0];
  args.k_new = copy("k_new");
  args.v_new = copy("v_new");
  args.cu_seqlens_new = input->args.cu_seqlens_q;
  args.seqlens_out = const_cast<int32_t*>(args.cache.seqlens);
  if (rotates) {
    args.rotary_cos = static_cast<const float*>(copy("rotary_cos"));
    args.rotary_sin = static_cast<const float*>(copy("rotary_sin"));
    args.q = input->args.q;
    args.q_out = const_cast<void*>(args.q);
  }
  progress.say(std::string("running ") + chosen.kernel());
  chosen.run(args);
  device.synchronize();
  const auto fetch = [&](const std::string& name, const void* from) {
    Tensor& tensor = file.tensors[name];
    copy_out(device, tensor.data.get(), from, tensor.bytes);
  };
  fetch(named("k"), args.cache.k);
  fetch(named("v"), args.cache.v);
  fetch(named("seqlens_kv"), args.seqlens_out);
  if (rotates) fetch("q", args.q_out);
  for (const char* name : {"k_new", "v_new", "rotary_cos", "rotary_sin"}) file.tensors.erase(name);
  progress.say("writing " + options.out);
  need(write_tensors(options.out, file));
  progress.say("");

  const Tensor& lengths = *file.find(named("seqlens_kv"));
  if (options.as_json) {
    Json report = options.backend.report(device);
    report["kernel"] = chosen.kernel();
    report["seqlens_kv"] =
        std::vector<int32_t>(lengths.as<int32_t>(), lengths.as<int32_t>() + lengths.elements());
    std::cout << report.dump(2) << "\n";
  } else {
    std::printf("%s: k_new, v_new to %s, %s of %lld sequences, written to %s\n",
                options.backend.ran(chosen.kernel(), device).c_str(), named("k").c_str(),
                named("v").c_str(), static_cast<long long>(p.batch), options.out.c_str());
  }
}

}  // namespace

void add_append(CLI::App& app, int&) {
  auto* command =
      app.add_subcommand("append", "Append k_new and v_new of IN to its k and v; writes OUT");
  auto o = std::make_shared<AppendOptions>();
  command->footer(append_help);
  command->add_option("IN", o->in)->required();
  command->add_option("OUT", o->out)->required();
  command->add_flag("--interleaved", o->interleaved,
                    "rotate pairs of neighbours, not of elements R / 2 apart");
  o->backend.add_to(*command);
  command->add_option("--kernel", o->kernel, "demand this kernel")->type_name("NAME");
  add_json(*command, o->as_json);
  command->callback([o] { append(*o); });
}

}  // namespace attn::tools
