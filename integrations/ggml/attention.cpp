#include "attention.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cfloat>
#include <cmath>
#include <cstring>

namespace attn::ggml {
namespace {

// Enough for the lengths of a few contexts: llama.cpp lets K grow in steps of 256 keys.
constexpr std::size_t most_plans = 512;

attn_dtype type_of(const ggml_tensor* t) {
  switch (t->type) {
    case GGML_TYPE_F32:
      return ATTN_F32;
    case GGML_TYPE_F16:
      return ATTN_F16;
    case GGML_TYPE_BF16:
      return ATTN_BF16;
    case GGML_TYPE_Q8_0:
      return ATTN_Q8_0;
    case GGML_TYPE_Q4_0:
      return ATTN_Q4_0;
    case GGML_TYPE_Q4_1:
      return ATTN_Q4_1;
    case GGML_TYPE_Q5_0:
      return ATTN_Q5_0;
    case GGML_TYPE_Q5_1:
      return ATTN_Q5_1;
    case GGML_TYPE_IQ4_NL:
      return ATTN_IQ4_NL;
    default:
      return ATTN_DTYPE_NONE;
  }
}
bool has_blocks(const ggml_tensor* t) {
  return ggml_blck_size(t->type) > 1;
}

// ggml's strides count bytes, libattn's count elements.
bool strides_are_whole(const ggml_tensor* t) {
  const std::size_t unit = ggml_type_size(t->type);
  return t->nb[0] == unit && t->nb[1] % unit == 0 && t->nb[2] % unit == 0 && t->nb[3] % unit == 0;
}
std::int64_t stride(const ggml_tensor* t, int dimension) {
  return std::int64_t(t->nb[dimension] / ggml_type_size(t->type)) * ggml_blck_size(t->type);
}

// Dimension 0 is that of a row's elements, 3 the batch's. ggml has the tokens of q, k and v in
// dimension 1 and their heads in 2, those of out the other way round.
struct Operands {
  const ggml_tensor *q, *k, *v, *mask, *sinks, *out;
  explicit Operands(const ggml_tensor* op)
      : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]), out(op) {}
};

float parameter(const ggml_tensor* op, int index) {
  float value;
  std::memcpy(&value, op->op_params + index, sizeof value);
  return value;
}
float scale_of(const ggml_tensor* op) {
  const float scale = parameter(op, 0);
  return scale == 0 ? FLT_MIN : scale;  // 0 is libattn's default, 1 / sqrt(head_dim)
}
float max_bias_of(const ggml_tensor* op) {
  return parameter(op, 1);
}
float softcap_of(const ggml_tensor* op) {
  return parameter(op, 2);
}

// ALiBi's slopes as ggml_soft_max_ext defines them: of the largest power of two of heads a
// geometric series that ends at 2^-max_bias, of the other heads every second member of a series
// half as steep.
std::vector<float> slopes_of(float max_bias, std::int64_t heads) {
  std::int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  std::vector<float> slopes;
  for (std::int64_t h = 0; h < heads; ++h) {
    const double exponent = h < power ? double(h + 1) : (double(h - power) + 0.5);
    slopes.push_back(float(std::exp2(-double(max_bias) * exponent / double(power))));
  }
  return slopes;
}

}  // namespace

// ggml computes one that is as small sooner than its threads leave its graph and come back, twice
// 2 to 3 us: a token's attention to 256 keys in a model of 135 M parameters has 3e5
// multiply-adds, and two threads of ggml do 10 of them in a nanosecond.
bool is_small(const ggml_tensor* op) {
  constexpr std::int64_t least_work = 1 << 19;
  const Operands o(op);
  return ggml_nrows(o.q) * o.k->ne[1] * (o.k->ne[0] + o.v->ne[0]) < least_work;
}

bool serves(const ggml_tensor* op) {
  const Operands o(op);
  if (op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op)) return false;
  for (const ggml_tensor* t : {o.q, o.k, o.v}) {
    if (type_of(t) == ATTN_DTYPE_NONE || !strides_are_whole(t)) return false;
  }
  if (has_blocks(o.q)) return false;
  if (o.k->ne[2] != o.v->ne[2] || o.q->ne[2] % o.k->ne[2] != 0) return false;
  if (o.k->ne[3] != o.q->ne[3] || o.v->ne[3] != o.q->ne[3]) return false;
  if (o.mask) {
    const auto one_or_all = [&](int i) {
      return o.mask->ne[i] == 1 || o.mask->ne[i] == o.q->ne[i];
    };
    if (o.mask->type != GGML_TYPE_F16 || !strides_are_whole(o.mask)) return false;
    if (o.mask->ne[1] < o.q->ne[1] || !one_or_all(2) || !one_or_all(3)) return false;
  }
  return !o.sinks || o.sinks->type == GGML_TYPE_F32;
}

struct Attention::Call {
  attn_problem problem;
  attn_segment segment;
  attn_args args = make<attn_args>();
  attn_segment_args segment_args = make<attn_segment_args>();
  std::optional<Ranges> ranges;
  std::vector<float> slopes;

  explicit Call(const ggml_tensor* op) {
    const Operands o(op);
    std::memset(&problem, 0, sizeof problem);  // padding too: plans are found by bytes
    std::memset(&segment, 0, sizeof segment);
    problem.struct_size = sizeof problem;
    segment.struct_size = sizeof segment;

    problem.batch = o.q->ne[3];
    problem.heads_q = o.q->ne[2];
    problem.heads_kv = o.k->ne[2];
    problem.head_dim = o.k->ne[0];
    problem.head_dim_v = o.v->ne[0];
    problem.seqlen_q = o.q->ne[1];
    problem.q_type = type_of(o.q);
    problem.out_type = ATTN_F32;
    problem.q_stride = {stride(o.q, 3), stride(o.q, 1), stride(o.q, 2)};
    problem.out_stride = {stride(o.out, 3), stride(o.out, 2), stride(o.out, 1)};
    problem.num_segments = 1;
    problem.scale = scale_of(op);
    problem.softcap = softcap_of(op);
    if (o.sinks) problem.flags |= ATTN_SINKS;
    segment.k_type = type_of(o.k);
    segment.v_type = type_of(o.v);
    segment.layout = ATTN_PADDED;
    segment.seqlen = o.k->ne[1];
    segment.k_stride = {stride(o.k, 3), stride(o.k, 1), stride(o.k, 2)};
    segment.v_stride = {stride(o.v, 3), stride(o.v, 1), stride(o.v, 2)};

    args.q = o.q->data;
    args.out = o.out->data;
    args.num_segments = 1;
    args.segments = &segment_args;
    segment_args.k = o.k->data;
    segment_args.v = o.v->data;
    if (o.sinks) args.sinks = static_cast<const float*>(o.sinks->data);
    if (o.mask) add_mask(o.mask, max_bias_of(op));
  }
  Call(const Call&) = delete;

 private:
  void add_mask(const ggml_tensor* mask, float max_bias) {
    const bool per_head = mask->ne[2] > 1, per_batch = mask->ne[3] > 1;
    const auto* data = static_cast<const std::uint16_t*>(mask->data);
    if (!per_head) {  // 0 and -inf stay what they are under any slope
      ranges = ranges_of({data, problem.batch, problem.seqlen_q, segment.seqlen,
                          per_batch ? stride(mask, 3) : 0, stride(mask, 1)});
    }
    if (ranges) {
      segment.has_seqlens = 1;
      segment_args.seqlens = ranges->end.data();
      for (const std::int32_t begin : ranges->begin) problem.has_kv_begin |= begin > 0;
      if (problem.has_kv_begin) args.kv_begin = ranges->begin.data();
      if (ranges->causal) problem.flags |= ATTN_CAUSAL;
      if (ranges->window_left >= 0) {
        problem.flags |= ATTN_WINDOW;
        problem.window_left = ranges->window_left;
        problem.window_right = -1;
      }
      return;
    }
    problem.bias_type = ATTN_F16;
    problem.bias_stride[0] = per_batch ? stride(mask, 3) : 0;
    problem.bias_stride[1] = per_head ? stride(mask, 2) : 0;
    problem.bias_stride[2] = stride(mask, 1);
    problem.bias_stride[3] = 1;
    args.bias = data;
    if (max_bias <= 0) return;
    problem.flags |= ATTN_BIAS_SLOPES;
    slopes = slopes_of(max_bias, problem.heads_q);
    args.bias_slopes = slopes.data();
  }
};

namespace {

// As a part of a graph in ggml's CPU backend: the same threads, which wait awake between parts. A
// team of another size would end some of them. `user` is that size.
void run_on_openmp(void* user, int32_t threads, attn_work work, void* data) {
#ifdef _OPENMP
#pragma omp parallel num_threads(*static_cast<const int*>(user))
  if (const int thread = omp_get_thread_num(); thread < threads) work(data, thread);
#else
  (void)user;
  (void)threads;
  work(data, 0);
#endif
}

context make_context(const int& threads, bool ggml_threads) {
  auto options = make<attn_context_options>();
  options.cpu_threads = threads;
  if (ggml_threads && threads > 1) {
    options.run_threads = run_on_openmp;
    options.run_threads_user = const_cast<int*>(&threads);
  }
  return context(ATTN_BACKEND_CPU, &options);
}

}  // namespace

Attention::Attention(int threads, bool ggml_threads)
    : threads_(threads), context_(make_context(threads_, ggml_threads)) {}

const plan& Attention::plan_of(const Call& call) {
  std::string key(reinterpret_cast<const char*>(&call.problem), sizeof call.problem);
  key.append(reinterpret_cast<const char*>(&call.segment), sizeof call.segment);
  if (const auto known = plans_.find(key); known != plans_.end()) return known->second;
  if (plans_.size() == most_plans) plans_.clear();
  attn_problem problem = call.problem;
  problem.segments = &call.segment;
  return plans_.try_emplace(std::move(key), context_, problem).first->second;
}

void Attention::run(const ggml_tensor* op) {
  const Call call(op);
  const plan& plan = plan_of(call);
  // A workspace on the host needs no initialisation.
  if (plan.workspace() > workspace_.bytes()) workspace_ = buffer(context_, plan.workspace());
  plan.run(call.args, workspace_);
}

}  // namespace attn::ggml
