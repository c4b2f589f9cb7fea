#include "attn/bench_case.h"

#include <algorithm>
#include <cstring>

#include "api/handles.h"
#include "attn/io.h"
#include "core/cache_format.h"
#include "core/dtype.h"
#include "core/ggml.h"
#include "cpu/host_kernel.h"
#include "kernels/shared/mask.h"

namespace attn::tools {
namespace {

attn_problem make_problem(const Case& c, std::vector<attn_segment>& segments, CaseTypes types,
                          const std::string& kernel) {
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = types.kv == ATTN_DTYPE_NONE ? types.q : types.kv;
  segment.seqlen = c.shared_keys;
  segment.shared = 1;
  if (c.shared_keys > 0) segments.push_back(segment);
  segment.seqlen = c.seqlen_kv ? c.seqlen_kv : c.seqlen_q;
  segment.shared = 0;
  segments.push_back(segment);
  auto p = make<attn_problem>();
  p.batch = c.batch;
  p.heads_q = c.heads;
  p.heads_kv = c.heads_kv ? c.heads_kv : c.heads;
  p.head_dim = p.head_dim_v = c.head_dim;
  p.seqlen_q = c.seqlen_q;
  p.q_type = types.q;
  p.out_type = types.out;
  p.num_segments = static_cast<int32_t>(segments.size());
  p.segments = segments.data();
  p.kernel = kernel.empty() ? nullptr : kernel.c_str();
  if (c.causal) p.flags |= ATTN_CAUSAL;
  if (!c.window.empty()) {
    const Window window = parse_window(c.window);
    p.flags |= ATTN_WINDOW;
    p.window_left = window.left;
    p.window_right = window.right;
  }
  return p;
}

// Launches that can be timed alone: a composed kernel's stages refer to each other.
std::vector<Step> steps_of(const Choice& choice) {
  return choice.composition ? std::vector<Step>{} : choice.recipe.steps;
}

}  // namespace

std::vector<Case> default_cases(attn_backend backend) {
  if (backend == ATTN_BACKEND_REFERENCE)
    return {{.heads = 4, .seqlen_q = 128, .head_dim = 64},
            {.heads = 4, .seqlen_q = 128, .head_dim = 64, .causal = true}};
  if (backend == ATTN_BACKEND_CPU)
    return {{},
            {.causal = true},
            {.heads = 12, .seqlen_q = 512, .head_dim = 32},
            {.batch = 4, .heads = 32, .heads_kv = 8, .seqlen_q = 1, .seqlen_kv = 4096}};
  return {{.batch = 4, .heads = 32, .seqlen_q = 4096},
          {.batch = 4, .heads = 32, .seqlen_q = 4096, .causal = true},
          {.seqlen_q = 512, .head_dim = 64},
          {.batch = 32, .heads = 32, .heads_kv = 8, .seqlen_q = 1, .seqlen_kv = 8192}};
}

// What is before byte `period`, again and again after it.
void repeat_from(Tensor& tensor, size_t period) {
  for (size_t at = period; at < tensor.bytes; at += period)
    std::memcpy(tensor.data.get() + at, tensor.data.get(), std::min(period, tensor.bytes - at));
}

Tensor random_tensor(attn_dtype type, std::vector<int64_t> shape, uint64_t seed) {
  Tensor tensor = make_typed(type, shape);
  const int64_t drawn = std::min(*element_count(shape), int64_t{1} << 22);
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  const auto next = [&] {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
  };
  if (attn::dtype_is_cache(type)) {
    const int64_t dim = shape.back(), rows = *element_count(shape) / dim;
    std::vector<double> x(static_cast<size_t>(dim));
    std::vector<char> scales(static_cast<size_t>(std::max<int64_t>(
        4, attn::scales_of_row(attn::type_info(type), dim) * attn::type_info(type).scale_bytes)));
    const float one = 1 / 448.0f;
    std::memcpy(scales.data(), &one, sizeof one);
    const auto row_bytes = static_cast<size_t>(attn::dtype_bytes(type, dim));
    const int64_t drawn_rows = std::min(rows, drawn / dim + 1);
    for (int64_t row = 0; row < drawn_rows; ++row) {
      for (double& value : x) value = next();
      attn::encode_cache(type, reinterpret_cast<char*>(tensor.data.get()) + row * row_bytes,
                         scales.data(), 0, dim, x.data());
    }
    repeat_from(tensor, static_cast<size_t>(drawn_rows) * row_bytes);
    return tensor;
  }
  if (attn::dtype_has_scales(type)) {
    for (size_t i = 0; i < tensor.bytes; ++i) tensor.data.get()[i] = std::byte(int(127 * next()));
    return tensor;
  }
  if (attn::dtype_is_ggml(type)) {
    float block[32];
    std::byte* to = tensor.data.get();
    for (int64_t i = 0; i < drawn / 32; ++i, to += attn::dtype_bytes(type)) {
      for (float& x : block) x = next();
      attn::encode_block(type, block, to, true);
    }
  } else {
    for (int64_t i = 0; i < drawn; ++i)
      attn::encode_element(type, tensor.data.get(), i, next(), true);
  }
  repeat_from(tensor, static_cast<size_t>(attn::dtype_bytes(type, drawn)));
  return tensor;
}

Ready::Ready(const context& device, const Case& c, CaseTypes types, const std::string& kernel,
             int64_t inputs_above)
    : problem_(make_problem(c, segments_, types, kernel)),
      plan_(device, problem_),
      steps_(steps_of(plan_.get()->plan->choice)),
      arrays_(device),
      workspace_(plan_.make_workspace(device)) {
  const attn_problem& p = problem_;
  const Tensor q = random_tensor(p.q_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, 1);
  // Of i8 and i4: scales by which they are as far from 0 as others.
  const auto scales_of = [](attn_dtype type, std::vector<int64_t> shape) {
    if (!attn::dtype_has_scales(type)) return Tensor();
    Tensor scales = make_tensor(scale_dtype(type), scales_shape(type, shape, shape.back()));
    if (type == ATTN_MLA_584) {  // 2^-8
      std::memset(scales.data.get(), 127 - 8, scales.bytes);
      return scales;
    }
    const double scale = 1 / attn::type_info(type).max_finite;
    for (int64_t i = 0; i < scales.elements(); ++i)
      attn::encode_element(attn::scale_element(type), scales.data.get(), i, scale, true);
    return scales;
  };
  struct Kv {
    Tensor k, v, k_scale, v_scale;
  };
  std::vector<Kv> kv;
  size_t inputs = q.bytes;
  for (const attn_segment& s : segments_) {
    const std::vector<int64_t> shape = {s.shared ? 1 : p.batch, s.seqlen, p.heads_kv, p.head_dim};
    kv.push_back({random_tensor(s.k_type, shape, 2), random_tensor(s.v_type, shape, 3),
                  scales_of(s.k_type, shape), scales_of(s.v_type, shape)});
    for (const Tensor* tensor :
         {&kv.back().k, &kv.back().v, &kv.back().k_scale, &kv.back().v_scale})
      inputs += tensor->bytes;
  }
  const attn_dtype out_type = p.out_type                     ? p.out_type
                              : attn::dtype_is_fp8(p.q_type) ? ATTN_BF16
                                                             : p.q_type;
  const int64_t rows = p.batch * p.seqlen_q * p.heads_q;
  const auto out_bytes = static_cast<size_t>(attn::dtype_bytes(out_type, rows * p.head_dim_v));
  const size_t lse_bytes = static_cast<size_t>(rows) * sizeof(float);
  bytes_ = static_cast<double>(inputs + out_bytes + lse_bytes);

  auto args = make<attn_args>();
  args.out = arrays_.room(out_bytes);
  args.lse = static_cast<float*>(arrays_.room(lse_bytes));
  args.num_segments = p.num_segments;
  const size_t sets = static_cast<size_t>(inputs_above) / inputs + 1;
  segment_args_.resize(sets);
  for (std::vector<attn_segment_args>& segments : segment_args_) {
    args.q = arrays_.copy_of(q.data.get(), q.bytes);
    for (const Kv& from : kv) {
      auto segment = make<attn_segment_args>();
      const auto copy = [&](const Tensor& tensor) {
        return tensor.bytes > 0 ? arrays_.copy_of(tensor.data.get(), tensor.bytes) : nullptr;
      };
      segment.k = copy(from.k);
      segment.v = copy(from.v);
      segment.k_scale = copy(from.k_scale);
      segment.v_scale = copy(from.v_scale);
      segments.push_back(segment);
    }
    args.segments = segments.data();
    args_.push_back(args);
  }
  device.synchronize();
}

attn::Status Ready::run(int set, void* stream) const {
  const attn_status code = attn_run(plan_.get(), &args_[static_cast<size_t>(set)],
                                    workspace_.data(), workspace_.bytes(), stream);
  return code == ATTN_OK ? attn::Status{} : attn::Status{code, attn_last_error()};
}

std::vector<std::string> Ready::launches() const {
  std::vector<std::string> names;
  for (const Step& step : steps_) names.push_back(step.image);
  return names;
}

void Ready::only(size_t launch) {
  plan_.get()->plan->choice.recipe.steps = {steps_[launch]};
}

int64_t Ready::seqlen_kv() const {
  int64_t sum = 0;
  for (const attn_segment& s : segments_) sum += s.seqlen;
  return sum;
}

double Ready::operations() const {
  const attn_problem& p = problem_;
  const RangeMask mask{(p.flags & ATTN_CAUSAL) != 0, false, (p.flags & ATTN_WINDOW) != 0,
                       p.window_left, p.window_right};
  double pairs = 0;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const KeyRange keys = mask.keys(i, p.seqlen_q, seqlen_kv());
    pairs += static_cast<double>(std::max(0ll, keys.end - keys.begin));
  }
  return 2 * pairs * static_cast<double>(p.batch * p.heads_q) *
         static_cast<double>(p.head_dim + p.head_dim_v);
}

std::string Ready::describe() const {
  const attn_problem& p = problem_;
  std::string text = "B" + std::to_string(p.batch) + " H" + std::to_string(p.heads_q);
  if (p.heads_kv != p.heads_q) text += "/" + std::to_string(p.heads_kv);
  text += " Sq" + std::to_string(p.seqlen_q) + " Skv";
  for (const attn_segment& s : segments_)
    text += std::to_string(s.seqlen) + (s.shared ? "+" : " D" + std::to_string(p.head_dim));
  if (p.flags & ATTN_CAUSAL) text += " causal";
  if (p.flags & ATTN_WINDOW)
    text += " window " + std::to_string(p.window_left) + "," + std::to_string(p.window_right);
  return text;
}

}  // namespace attn::tools
