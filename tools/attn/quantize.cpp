// attn quantize: k, v (and q) of IN to fp8, ggml blocks, i8 or i4.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <tuple>

#include "attn/io.h"
#include "core/dtype.h"

namespace attn::tools {
namespace {

struct QuantizeOptions {
  std::string in, out, to, scale = "1", per = "tensor", kernel;
  BackendOptions backend;
  int64_t recent = 0;
  bool saturate = false, queries = false, as_json = false;
};

struct Scale {
  attn_scale_source source = ATTN_SCALE_ONE;
  float given = 1;
};

Scale parse_scale(const std::string& text) {
  if (text == "1") return {};
  if (text == "amax") return {ATTN_SCALE_AMAX, 1};
  Scale scale{ATTN_SCALE_GIVEN, 0};
  const auto end = text.data() + text.size();
  const auto got = std::from_chars(text.data(), end, scale.given);
  if (got.ec != std::errc() || got.ptr != end || !std::isfinite(scale.given) || scale.given <= 0)
    throw InputError("--scale " + quote(text) + " is not 1, amax or a finite value above 0");
  return scale;
}

class Quantizer {
 public:
  Quantizer(const QuantizeOptions& options, TensorFile& file, const context& device)
      : options_(options),
        file_(file),
        device_(device),
        type_(parse_dtype("--to", options.to)),
        scale_(parse_scale(options.scale)) {}

  // `batch` and `heads_kv` are those of the problem, which a descale per head is for.
  void quantize(const std::string& name, const std::string& descale_name,
                const std::string& scale_name, int64_t batch, int64_t heads_kv) {
    const Tensor source = need_tensor(file_, name);
    // Scales are in the blocks, or there is one for each token and head in another array.
    const bool scales_beside = attn::dtype_has_scales(type_);
    const bool of_rows = !attn::dtype_is_fp8(type_);
    const bool descaled = !of_rows || type_ == ATTN_NVFP4;
    const bool per_head = options_.per == "head" && !of_rows;
    if (file_.find(descale_name))
      throw InputError(file_.label + ": " + descale_name + " is there already; " + name +
                       " without a descale is expected");

    // Packed and paged arrays are one batch entry; q's heads are in groups of one kv head, whose
    // rows are quantised as one.
    const auto& shape = source.shape;
    const size_t dims = shape.size();
    auto p = make<attn_quantize_problem>();
    p.src_type = element_type(file_, name);
    p.dst_type = type_;
    const bool by_entry = dims == 4 && shape[0] == batch && !paged_;
    p.batch = by_entry ? batch : 1;
    p.seqlen = by_entry ? shape[1] : dims == 4 ? shape[0] * shape[1] : shape[0];
    p.heads = of_rows ? shape[dims - 2] : heads_kv;
    p.head_dim = shape[dims - 2] * shape[dims - 1] / p.heads;
    if (of_rows) p.head_dim = shape[dims - 1];
    p.kind = per_head ? ATTN_DESCALE_HEAD : ATTN_DESCALE_TENSOR;
    p.scale = scale_.source;
    p.saturate = options_.saturate;
    p.kernel = options_.kernel.empty() ? nullptr : options_.kernel.c_str();
    const plan chosen(device_, p);
    kernel_ = chosen.kernel();

    Tensor result = make_typed(type_, shape);
    const int64_t scales = per_head ? p.batch * p.heads : 1;
    std::vector<float> descale(static_cast<size_t>(scales), scale_.given);
    Arrays arrays(device_);
    auto args = make<attn_quantize_args>();
    args.src = arrays.copy_of(source.data.get(), source.bytes);
    args.dst = arrays.room(result.bytes);
    Tensor row_scales;
    if (scales_beside) {
      row_scales = make_tensor(scale_dtype(type_), scales_shape(type_, shape, p.head_dim));
      args.scale = arrays.room(row_scales.bytes);
    }
    if (descaled)
      args.descale =
          static_cast<float*>(arrays.copy_of(descale.data(), descale.size() * sizeof(float)));
    chosen.run(args);
    device_.synchronize();
    copy_out(device_, result.data.get(), args.dst, result.bytes);
    add_typed(file_, name, type_, std::move(result));
    if (scales_beside) {
      copy_out(device_, row_scales.data.get(), args.scale, row_scales.bytes);
      file_.tensors[scale_name] = std::move(row_scales);
    }
    if (!descaled) return;

    copy_out(device_, descale.data(), args.descale, descale.size() * sizeof(float));
    Tensor written =
        per_head ? make_tensor(Dtype::f32, {batch, heads_kv}) : make_tensor(Dtype::f32, {1});
    // One entry's scales serve every sequence of a packed or paged array.
    for (int64_t i = 0; i < written.elements(); ++i)
      written.as<float>()[i] = descale[static_cast<size_t>(i % scales)];
    file_.tensors[descale_name] = std::move(written);
  }

  attn_dtype type() const { return type_; }
  const std::string& kernel() const { return kernel_; }
  void set_paged(bool paged) { paged_ = paged; }

 private:
  const QuantizeOptions& options_;
  TensorFile& file_;
  const context& device_;
  attn_dtype type_;
  Scale scale_;
  std::string kernel_;
  bool paged_ = false;
};

// The last `recent` keys and values become a segment of their own, which stays as it is.
void split(TensorFile& file, int64_t recent) {
  for (const char* name : {"seqlens_kv", "cu_seqlens_kv", "block_table", "k_descale", "v_descale"})
    if (file.find(name))
      throw InputError(file.label + ": --recent with " + name + "; k and v alone are accepted");
  for (const std::string name : {"k", "v"}) {
    const Tensor& all = need_tensor(file, name);
    const attn_dtype type = element_type(file, name);
    if (all.shape.size() != 4)
      throw InputError(file.label + ": " + name + " has shape " + shape_text(all.shape) +
                       "; [B, Skv, Hkv, D] is expected with --recent");
    const int64_t batch = all.shape[0], keys = all.shape[1];
    if (recent < 1 || recent >= keys)
      throw InputError("--recent is " + std::to_string(recent) + "; 1 to " +
                       std::to_string(keys - 1) + " keys of " + name + " are accepted");
    const size_t row = all.bytes / static_cast<size_t>(batch * keys);
    int64_t first = 0;
    for (const auto& [number, count] : {std::pair(0, keys - recent), {1, recent}}) {
      std::vector<int64_t> shape = all.shape;
      shape[1] = count;
      Tensor part = make_tensor(all.dtype, std::move(shape));
      const size_t bytes = row * static_cast<size_t>(count);
      for (int64_t b = 0; b < batch; ++b)
        std::memcpy(part.data.get() + static_cast<size_t>(b) * bytes,
                    all.data.get() + row * static_cast<size_t>(b * keys + first), bytes);
      add_typed(file, segment_name(name.c_str(), number, true), type, std::move(part));
      first += count;
    }
    file.metadata.erase(name);
    file.tensors.erase(name);
  }
}

void quantize(const QuantizeOptions& options) {
  Progress progress;
  progress.say("reading " + options.in);
  TensorFile file = need(read_tensors(options.in));
  if (options.recent != 0) split(file, options.recent);
  const auto input = make_input(file);  // finds what is wrong with the file before any work
  const attn_problem& p = input->problem;
  const context device = options.backend.open();
  Quantizer quantizer(options, file, device);
  if (options.queries && !attn::dtype_is_fp8(quantizer.type()))
    throw InputError("--q with --to " + options.to + "; q takes " + type_names(fp8_types, " and "));

  std::vector<std::string> names;
  const bool numbered = numbered_segments(file) > 0;
  for (int i = 0; i < (options.recent ? 1 : p.num_segments); ++i) {
    quantizer.set_paged(input->segments[static_cast<size_t>(i)].layout == ATTN_PAGED);
    for (const auto& [name, descale, scale] :
         {std::tuple("k", "k_descale", "k_scale"), std::tuple("v", "v_descale", "v_scale")}) {
      if (*name == 'v' && input->segments[static_cast<size_t>(i)].v_in_k) continue;
      names.push_back(segment_name(name, i, numbered));
      progress.say("quantising " + names.back());
      quantizer.quantize(names.back(), segment_name(descale, i, numbered),
                         segment_name(scale, i, numbered), p.batch, p.heads_kv);
    }
  }
  if (options.queries) {
    if (p.heads_q % p.heads_kv != 0)
      throw InputError(file.label + ": q has " + std::to_string(p.heads_q) +
                       " heads; a multiple of " + std::to_string(p.heads_kv) +
                       ", those of k, is expected");
    names.push_back("q");
    quantizer.set_paged(false);
    quantizer.quantize("q", "q_descale", "", p.batch, p.heads_kv);
  }
  need(write_tensors(options.out, file));
  progress.say("");

  if (options.as_json) {
    Json tensors = Json::object();
    for (const std::string& name : names) {
      const Tensor& tensor = *file.find(name);
      tensors[name] = {{"dtype", options.to}, {"shape", tensor.shape}, {"bytes", tensor.bytes}};
    }
    Json report = options.backend.report(device);
    report["kernel"] = quantizer.kernel();
    report["tensors"] = tensors;
    std::cout << report.dump(2) << "\n";
  } else {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
    std::printf("%s: %s to %s, written to %s\n",
                options.backend.ran(quantizer.kernel(), device).c_str(), list.c_str(),
                options.to.c_str(), options.out.c_str());
  }
}

}  // namespace

void add_quantize(CLI::App& app, int&) {
  auto* command =
      app.add_subcommand("quantize",
                         "Quantise IN's k and v to OUT; writes k_descale and v_descale for fp8, "
                         "k_scale and v_scale for types that have scales");
  auto o = std::make_shared<QuantizeOptions>();
  command->footer(input_help);
  command->add_option("IN", o->in)->required();
  command->add_option("OUT", o->out)->required();
  constexpr uint32_t accepted = kv_types & ~float_types;
  std::vector<std::string> names;
  for (int t = ATTN_F32; t < end_of_dtypes; ++t)
    if (accepted & type_bit(attn_dtype(t))) names.push_back(type_info(attn_dtype(t)).name);
  command->add_option("--to", o->to, type_names(accepted, " or "))
      ->required()
      ->check(CLI::IsMember(names))
      ->type_name("T");
  command
      ->add_option("--scale", o->scale,
                   "1: stored = round(x); amax: the largest |x| becomes the type's largest "
                   "value; X: stored = round(x / X), X is the descale")
      ->type_name("S");
  command->add_option("--per", o->per, "a descale per tensor, or per head [B, Hkv]")
      ->check(CLI::IsMember({"tensor", "head"}))
      ->type_name("P");
  command
      ->add_option("--recent", o->recent,
                   "keep the last N keys and values as they are, in a segment of their own")
      ->type_name("N");
  command->add_flag("--saturate", o->saturate, "clamp to the largest finite value");
  command->add_flag("--q", o->queries, "quantise q too");
  o->backend.add_to(*command);
  command->add_option("--kernel", o->kernel, "demand this kernel")->type_name("NAME");
  add_json(*command, o->as_json);
  command->callback([o] { quantize(*o); });
}

}  // namespace attn::tools
