#include "backward_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>

#include "core/dtype.h"
#include "cpu/host_kernel.h"
#include "problem/backward.h"

namespace attn::test {
namespace {

enum Tag : uint64_t { tag_d_out = 101, tag_d_lse, tag_before };

bool packed(const Case& c) {
  return !c.lengths_q.empty();
}
int64_t total_q(const Case& c) {
  return std::accumulate(c.lengths_q.begin(), c.lengths_q.end(), int64_t{0}) + c.tokens_of_nobody;
}
int64_t row_of(const Case& c, int64_t b, int64_t h, int64_t i) {
  return (b * c.heads_q + h) * c.seqlen_q + i;
}
// Where a row of a query tensor is: the entry of the batch and the token.
std::pair<int64_t, int64_t> query_place(const Case& c, int64_t b, int64_t i) {
  if (!packed(c)) return {b, i};
  return {0, std::accumulate(c.lengths_q.begin(), c.lengths_q.begin() + b, i)};
}
std::pair<int64_t, int64_t> key_place(const Case& c, int64_t b, int64_t j) {
  if (c.segments[0].layout != ATTN_PACKED) return {b, j};
  for (int64_t before = 0; before < b; ++before) j += c.keys(before);
  return {0, j};
}
int64_t lse_place(const Case& c, int64_t b, int64_t h, int64_t i) {
  const auto [entry, token] = query_place(c, b, i);
  return packed(c) ? h * total_q(c) + token : (entry * c.heads_q + h) * c.seqlen_q + token;
}
attn_dtype type_or(attn_dtype type, attn_dtype usual) {
  return type == ATTN_DTYPE_NONE ? usual : type;
}

template <class Visit>
void for_each_query(const Case& c, Visit&& visit) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads_q; ++h)
      for (int64_t i = 0; i < c.queries(b); ++i) visit(b, h, i);
}

// Sizes of d_bias and which element is that of a score.
struct BiasShape {
  std::array<int64_t, 4> extent;
  int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t index[4] = {b, h, i, j};
    int64_t at = 0;
    for (int n = 0; n < 4; ++n) at = at * extent[n] + (extent[n] == 1 ? 0 : index[n]);
    return at;
  }
  int64_t count() const { return extent[0] * extent[1] * extent[2] * extent[3]; }
};
BiasShape bias_shape(const BackwardCase& bc, const Data& data) {
  const Case& c = bc.c;
  BiasShape shape{{c.batch, c.heads_q, c.seqlen_q, c.capacity()}};
  for (int n = 0; n < 4; ++n)
    if (bc.sums ? (*bc.sums)[size_t(n)] : data.bias_stride[n] == 0) shape.extent[size_t(n)] = 1;
  return shape;
}

double score_scale(const Case& c) {
  return c.scale != 0 ? double(c.scale) : 1 / std::sqrt(double(c.head_dim));
}

struct Score {
  double s, slope;  // of softcap
};
Score score_of(const Case& c, const Data& data, int64_t b, int64_t h, int64_t i, int64_t j) {
  const auto& q = data.q_real[size_t(row_of(c, b, h, i))];
  const int64_t kv_head = h / (c.heads_q / c.heads_kv);
  const auto& k = data.k_real[size_t((b * c.heads_kv + kv_head) * data.most_keys + j)];
  Score score{score_scale(c) * std::inner_product(q.begin(), q.end(), k.begin(), 0.0), 1};
  if (c.softcap > 0) {
    const double t = std::tanh(score.s / c.softcap);
    score = {c.softcap * t, 1 - t * t};
  }
  score.s += bias_at(c, data, b, h, i, j);
  if (c.has(ATTN_ALIBI))
    score.s -= data.slopes.as<float>()[h] * std::abs(double(i + c.keys(b) - c.queries(b) - j));
  return score;
}

// An array that a kernel writes: rows somewhere in a buffer.
struct Written {
  View view;
  Buffer buffer;
  std::vector<double> before;  // accumulate: of each element of the buffer, else empty
  int64_t elements = 0;

  Written() = default;
  Written(attn_dtype type, Arrange arrange, int64_t batch, int64_t seq, int64_t heads, int64_t dim,
          bool add, uint64_t seed, uint64_t salt) {
    view = arrange_view(type, arrange, batch, seq, heads, dim, &elements);
    fill(add, seed, salt);
  }
  void fill(bool add, uint64_t seed, uint64_t salt) {
    buffer = Buffer(size_t(dtype_bytes(view.type, elements)), poison_of(view.type));
    if (!add) return;
    before.resize(size_t(elements));
    for (int64_t n = 0; n < elements; ++n) {
      encode_element(view.type, buffer.data(), n, normal(hash(seed, tag_before, salt, uint64_t(n))),
                     false);
      before[size_t(n)] = decode_element(view.type, buffer.data(), n);
    }
  }
  // Takes a row out of `now`, less what it had, and puts back what it had.
  void take(Buffer* now, int64_t at, int64_t dim, double* to, std::vector<unsigned char>* bits) {
    decode_row(view.type, now->data(), at, dim, to);
    for (int64_t d = 0; d < dim && !before.empty(); ++d) to[d] -= before[size_t(at + d)];
    const size_t first = size_t(dtype_bytes(view.type, at)),
                 bytes = size_t(dtype_bytes(view.type, dim));
    bits->insert(bits->end(), now->data() + first, now->data() + first + bytes);
    std::memcpy(now->data() + first, buffer.data() + first, bytes);
  }
};

}  // namespace

std::string describe(const BackwardCase& bc) {
  std::ostringstream out;
  out << describe(bc.c) << " | gradients " << bc.gradients << " accumulate " << bc.accumulate
      << " d_out " << dtype_name(type_or(bc.d_out_type, bc.c.out_type)) << " in "
      << dtype_name(type_or(bc.gradient_type, bc.c.q_type)) << " arrange " << int(bc.d_out_arrange)
      << int(bc.gradient_arrange) << (bc.d_lse ? " d_lse" : "");
  if (bc.sums) out << " sums " << (*bc.sums)[0] << (*bc.sums)[1] << (*bc.sums)[2] << (*bc.sums)[3];
  return out.str();
}

BackwardCase backward_of(Case c) {
  BackwardCase bc;
  if (c.has(ATTN_SINKS)) bc.gradients |= ATTN_GRAD_SINKS;
  if (c.bias_type != ATTN_DTYPE_NONE) bc.gradients |= ATTN_GRAD_BIAS;
  bc.c = std::move(c);
  return bc;
}

BackwardData make_backward_data(const BackwardCase& bc) {
  const Case& c = bc.c;
  BackwardData data;
  data.forward = make_data(c);
  const int64_t outer = packed(c) ? 1 : c.batch, tokens = packed(c) ? total_q(c) : c.seqlen_q;
  int64_t elements;
  data.d_out_view = arrange_view(type_or(bc.d_out_type, c.out_type), bc.d_out_arrange, outer,
                                 tokens, c.heads_q, c.head_dim_v, &elements);
  const attn_dtype type = data.d_out_view.type;
  data.d_out = Buffer(size_t(dtype_bytes(type, elements)), poison_of(type));
  if (bc.d_lse) data.d_lse = Buffer(size_t(outer * tokens * c.heads_q) * 4, 0xff);
  const size_t rows = size_t(c.batch * c.heads_q * c.seqlen_q);
  data.d_out_real.resize(rows);
  data.d_lse_real.resize(rows);
  data.sees.resize(rows);
  for_each_query(c, [&](int64_t b, int64_t h, int64_t i) {
    const size_t row = size_t(row_of(c, b, h, i));
    for (int64_t j = 0; j < c.keys(b) && !data.sees[row]; ++j)
      data.sees[row] = visible(c, data.forward, b, h, i, j);
    const auto [entry, token] = query_place(c, b, i);
    if (bc.d_lse) {
      // Without sinks nothing depends on the lse of a row that sees no key.
      float& x = data.d_lse.as<float>()[lse_place(c, b, h, i)];
      if (data.sees[row] || c.has(ATTN_SINKS))
        x = float(normal(hash(c.seed, tag_d_lse, uint64_t(row))));
      data.d_lse_real[row] = x;
    }
    if (!data.sees[row]) {
      const View& q = data.forward.q_view;
      std::memset(data.forward.q.data() + dtype_bytes(q.type, q.at(entry, token, h)),
                  poison_of(q.type), size_t(dtype_bytes(q.type, c.head_dim)));
      return;
    }
    auto& real = data.d_out_real[row];
    real.resize(size_t(c.head_dim_v));
    const int64_t at = data.d_out_view.at(entry, token, h);
    for (int64_t d = 0; d < c.head_dim_v; ++d)
      encode_element(type, data.d_out.data(), at + d,
                     normal(hash(c.seed, tag_d_out, uint64_t(row), uint64_t(d))), false);
    decode_row(type, data.d_out.data(), at, c.head_dim_v, real.data());
  });
  return data;
}

double formula_loss(const BackwardCase& bc, const BackwardData& data) {
  const Case& c = bc.c;
  double loss = 0;
  for_each_query(c, [&](int64_t b, int64_t h, int64_t i) {
    const size_t row = size_t(row_of(c, b, h, i));
    const int64_t kv_head = h / (c.heads_q / c.heads_kv);
    std::vector<std::pair<double, int64_t>> seen;
    double max = c.has(ATTN_SINKS) ? data.forward.sinks.as<float>()[h] : -INFINITY;
    for (int64_t j = 0; j < c.keys(b); ++j) {
      if (!visible(c, data.forward, b, h, i, j)) continue;
      seen.emplace_back(score_of(c, data.forward, b, h, i, j).s, j);
      max = std::max(max, seen.back().first);
    }
    double sum = c.has(ATTN_SINKS) ? std::exp(data.forward.sinks.as<float>()[h] - max) : 0;
    for (const auto& [s, j] : seen) sum += std::exp(s - max);
    for (const auto& [s, j] : seen) {
      const auto& v =
          data.forward.v_real[size_t((b * c.heads_kv + kv_head) * data.forward.most_keys + j)];
      loss += std::exp(s - max) / sum *
              std::inner_product(v.begin(), v.end(), data.d_out_real[row].begin(), 0.0);
    }
    if (bc.d_lse && sum > 0) loss += data.d_lse_real[row] * (max + std::log(sum));
  });
  return loss;
}

BackwardTruth formula_backward(const BackwardCase& bc, const BackwardData& data,
                               const Outputs& forward) {
  const Case& c = bc.c;
  const Data& of = data.forward;
  const BiasShape bias = bias_shape(bc, of);
  BackwardTruth truth;
  for (Gradients* g : {&truth.exact, &truth.magnitude}) {
    g->dq.resize(size_t(c.batch * c.heads_q * c.seqlen_q * c.head_dim));
    g->dk.resize(size_t(c.batch * c.heads_kv * of.most_keys * c.head_dim));
    g->dv.resize(size_t(c.batch * c.heads_kv * of.most_keys * c.head_dim_v));
    if (c.has(ATTN_SINKS)) g->d_sinks.resize(size_t(c.heads_q));
    if (c.bias_type != ATTN_DTYPE_NONE) g->d_bias.resize(size_t(bias.count()));
  }
  // Forward's rows are in the order of batch entry, query, head.
  int64_t first = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      const int64_t kv_head = h / (c.heads_q / c.heads_kv);
      for (int64_t i = 0; i < c.queries(b); ++i) {
        const size_t row = size_t(row_of(c, b, h, i));
        const size_t at = size_t(first + i * c.heads_q + h);
        const double lse = forward.lse[at];
        const double* out = &forward.out[at * size_t(c.head_dim_v)];
        const double d_lse = bc.d_lse ? data.d_lse_real[row] : 0;
        double delta = -d_lse, delta_size = std::abs(d_lse);
        const auto& d_out = data.d_out_real[row];
        for (size_t d = 0; d < d_out.size(); ++d) {
          delta += d_out[d] * out[d];
          delta_size += std::abs(d_out[d] * out[d]);
        }
        if (std::isfinite(lse)) truth.largest_lse = std::max(truth.largest_lse, std::abs(lse));
        if (c.has(ATTN_SINKS) && lse != -INFINITY) {
          const double p = std::exp(of.sinks.as<float>()[h] - lse);
          truth.exact.d_sinks[size_t(h)] -= p * delta;
          truth.magnitude.d_sinks[size_t(h)] += p * delta_size;
        }
        for (int64_t j = 0; j < c.keys(b); ++j) {
          if (lse == -INFINITY || !visible(c, of, b, h, i, j)) continue;
          const size_t key = size_t((b * c.heads_kv + kv_head) * of.most_keys + j);
          const auto &q = of.q_real[row], &k = of.k_real[key], &v = of.v_real[key];
          const Score score = score_of(c, of, b, h, i, j);
          const double p = std::exp(score.s - lse);
          double dp = 0, dp_size = 0;
          for (size_t d = 0; d < v.size(); ++d) {
            dp += d_out[d] * v[d];
            dp_size += std::abs(d_out[d] * v[d]);
            truth.exact.dv[key * v.size() + d] += p * d_out[d];
            truth.magnitude.dv[key * v.size() + d] += p * std::abs(d_out[d]);
          }
          const double ds = p * (dp - delta), ds_size = p * (dp_size + delta_size);
          const double dx = score_scale(c) * score.slope * ds,
                       dx_size = std::abs(score_scale(c)) * ds_size;
          for (size_t d = 0; d < q.size(); ++d) {
            truth.exact.dq[row * q.size() + d] += dx * k[d];
            truth.magnitude.dq[row * q.size() + d] += dx_size * std::abs(k[d]);
            truth.exact.dk[key * q.size() + d] += dx * q[d];
            truth.magnitude.dk[key * q.size() + d] += dx_size * std::abs(q[d]);
          }
          if (c.bias_type != ATTN_DTYPE_NONE) {
            const double slope = c.has(ATTN_BIAS_SLOPES) ? of.bias_slopes.as<float>()[h] : 1;
            truth.exact.d_bias[size_t(bias.at(b, h, i, j))] += slope * ds;
            truth.magnitude.d_bias[size_t(bias.at(b, h, i, j))] += std::abs(slope) * ds_size;
          }
        }
      }
    }
    first += c.queries(b) * c.heads_q;
    truth.most_terms = std::max(
        {truth.most_terms, double(c.keys(b)), double(c.queries(b) * c.heads_q / c.heads_kv)});
  }
  return truth;
}

BackwardRun run_backward(Backend& backend, const BackwardCase& bc, const BackwardData& data,
                         const char* kernel, attn_dtype out_type, const Data* garbage) {
  const Case& c = bc.c;
  const Data& of = data.forward;
  BackwardRun run;
  Gradients& got = run.got;
  const auto fail = [&](const char* call, attn_status status) {
    got.status = status;
    got.error = join(call, ": ", attn_status_string(status), ": ", attn_last_error());
    return run;
  };
  Forward forward(backend, c, of, nullptr, out_type);
  forward.launch(nullptr);
  run.forward = forward.read();
  if (!run.forward.error.empty()) {
    got.status = run.forward.status;
    got.error = "forward: " + run.forward.error;
    return run;
  }

  if (garbage) forward.fill(c, *garbage);

  attn_backward_problem p{};
  p.struct_size = sizeof p;
  p.forward = &forward.problem();
  p.d_out_type = data.d_out_view.type;
  p.d_out_stride = data.d_out_view.given;
  p.gradients = bc.gradients;
  p.accumulate = bc.accumulate;
  p.dq_type = p.dk_type = p.dv_type = bc.gradient_type;
  p.d_bias_type = bc.d_bias_type;
  p.kernel = kernel;
  const attn_dtype type = type_or(bc.gradient_type, c.q_type);
  const int64_t outer = packed(c) ? 1 : c.batch, tokens = packed(c) ? total_q(c) : c.seqlen_q;
  const SegmentCase& s = c.segments[0];
  const bool packed_kv = s.layout == ATTN_PACKED;
  const int64_t kv_outer = packed_kv ? 1 : c.batch,
                kv_tokens = packed_kv ? of.segments[0].total : s.capacity;
  Written dq, dk, dv, d_sinks, d_bias;
  const BiasShape bias = bias_shape(bc, of);
  if (bc.wants(ATTN_GRAD_Q))
    dq = Written(type, bc.gradient_arrange, outer, tokens, c.heads_q, c.head_dim,
                 bc.adds(ATTN_GRAD_Q), c.seed, 1);
  if (bc.wants(ATTN_GRAD_K))
    dk = Written(type, bc.gradient_arrange, kv_outer, kv_tokens, c.heads_kv, c.head_dim,
                 bc.adds(ATTN_GRAD_K), c.seed, 2);
  if (bc.wants(ATTN_GRAD_V))
    dv = Written(type, bc.gradient_arrange, kv_outer, kv_tokens, c.heads_kv, c.head_dim_v,
                 bc.adds(ATTN_GRAD_V), c.seed, 3);
  if (bc.wants(ATTN_GRAD_SINKS))
    d_sinks = Written(ATTN_F32, Arrange::contiguous, 1, 1, c.heads_q, 1, bc.adds(ATTN_GRAD_SINKS),
                      c.seed, 4);
  if (bc.wants(ATTN_GRAD_BIAS)) {
    // Its strides are given unless they are those that zeros mean.
    d_bias.view.type = type_or(bc.d_bias_type, c.bias_type);
    d_bias.elements = bias.count();
    d_bias.fill(bc.adds(ATTN_GRAD_BIAS), c.seed, 5);
    int64_t stride = 1;
    for (int n = 3; n >= 0 && bc.sums; --n) {
      p.d_bias_stride[n] = (*bc.sums)[size_t(n)] ? 0 : stride;
      stride *= bias.extent[size_t(n)];
    }
  }
  p.dq_stride = dq.view.given;
  p.dk_stride = dk.view.given;
  p.dv_stride = dv.view.given;

  attn_plan* made = nullptr;
  if (const attn_status status = attn_plan_create_backward(backend.context, &p, &made))
    return fail("attn_plan_create_backward", status);
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
  run.kernel = attn_plan_kernel(made);
  if (!kernel) kernel = run.kernel.c_str();
  if (run.kernel != kernel) {
    got.error = join("the plan has chosen ", run.kernel, ", not ", kernel);
    return run;
  }
  Arena arena(backend.context);
  const size_t bytes = attn_plan_workspace(made);
  void* workspace = arena.workspace(bytes);
  const std::vector<unsigned char> nan(bytes, 0xff);
  if (const attn_status status =
          attn_copy_in(backend.context, workspace, nan.data(), bytes, nullptr))
    return fail("attn_copy_in", status);
  attn_backward_args args{};
  args.struct_size = sizeof args;
  args.forward = &forward.args();
  args.d_out = address_of(arena.add(data.d_out), data.d_out_view);
  args.d_lse = static_cast<const float*>(arena.add(data.d_lse));
  std::vector<void*> outputs;
  const auto place = [&](const Written& w) {
    void* at = arena.add(w.buffer);
    if (at) outputs.push_back(at);
    return address_of(at, w.view);
  };
  args.dq = place(dq);
  args.dk = place(dk);
  args.dv = place(dv);
  args.d_sinks = static_cast<float*>(place(d_sinks));
  args.d_bias = place(d_bias);
  const uint64_t launches = attn_launch_count(kernel);
  if (const attn_status status = attn_workspace_init(made, workspace, bytes, nullptr))
    return fail("attn_workspace_init", status);
  // On devices twice, unless it adds: what a run leaves in the workspace is nothing to the next.
  const bool twice = !bc.accumulate && !find_kernel(kernel)->host;
  for (int runs = 0; runs < (twice ? 2 : 1); ++runs)
    if (const attn_status status = attn_run_backward(made, &args, workspace, bytes, nullptr))
      return fail("attn_run_backward", status);
  if (const attn_status status = attn_synchronize(backend.context, nullptr))
    return fail("attn_synchronize", status);
  if (attn_launch_count(kernel) == launches) got.error = join(kernel, " was not launched");
  if (got.error.empty()) got.error = arena.check_unchanged(outputs);
  // out, lse and all other arguments of forward.
  const Outputs again = forward.read();
  if (got.error.empty() && (!garbage || again.error.starts_with("input"))) got.error = again.error;
  if (got.error.empty() && !garbage && again.bits != run.forward.bits)
    got.error = "out was written";
  if (!got.error.empty()) return run;

  const auto read = [&](const char* name, Written& w, void* address, auto&& take_rows) {
    if (!w.buffer.given) return;
    void* data_at = static_cast<char*>(address) - dtype_bytes(w.view.type, w.view.offset);
    Buffer now = arena.fetch(w.buffer, data_at);
    take_rows(now);
    if (now.bytes != w.buffer.bytes && got.error.empty())
      got.error = join(name, ": bytes outside its rows were written");
  };
  const auto zero_row = [&](const char* name, Written& w, Buffer& now, int64_t at, int64_t dim,
                            int64_t row) {
    std::vector<double> values(static_cast<size_t>(dim));
    w.take(&now, at, dim, values.data(), &got.bits);
    for (const double x : values)
      if (x != 0 && !garbage) got.error = join(name, ": row ", row, " of nobody is ", x);
  };
  read("dq", dq, args.dq, [&](Buffer& now) {
    got.dq.resize(size_t(c.batch * c.heads_q * c.seqlen_q * c.head_dim));
    for_each_query(c, [&](int64_t b, int64_t h, int64_t i) {
      const auto [entry, token] = query_place(c, b, i);
      dq.take(&now, dq.view.at(entry, token, h), c.head_dim,
              &got.dq[size_t(row_of(c, b, h, i) * c.head_dim)], &got.bits);
    });
    for (int64_t row = packed(c) ? tokens - c.tokens_of_nobody : tokens; row < tokens; ++row)
      for (int64_t h = 0; h < c.heads_q; ++h)
        zero_row("dq", dq, now, dq.view.at(0, row, h), c.head_dim, row);
  });
  const auto read_keys = [&](const char* name, Written& w, void* address, int64_t dim,
                             std::vector<double>& to) {
    read(name, w, address, [&](Buffer& now) {
      to.resize(size_t(c.batch * c.heads_kv * of.most_keys * dim));
      for (int64_t h = 0; h < c.heads_kv; ++h) {
        int64_t used = 0;
        for (int64_t b = 0; b < c.batch; ++b) {
          for (int64_t j = 0; j < c.keys(b); ++j) {
            const auto [entry, token] = key_place(c, b, j);
            w.take(&now, w.view.at(entry, token, h), dim,
                   &to[size_t(((b * c.heads_kv + h) * of.most_keys + j) * dim)], &got.bits);
          }
          used += c.keys(b);
          for (int64_t j = c.keys(b); !packed_kv && j < kv_tokens; ++j)
            zero_row(name, w, now, w.view.at(b, j, h), dim, j);
        }
        for (int64_t j = used; packed_kv && j < kv_tokens; ++j)
          zero_row(name, w, now, w.view.at(0, j, h), dim, j);
      }
    });
  };
  read_keys("dk", dk, args.dk, c.head_dim, got.dk);
  read_keys("dv", dv, args.dv, c.head_dim_v, got.dv);
  read("d_sinks", d_sinks, args.d_sinks, [&](Buffer& now) {
    got.d_sinks.resize(size_t(c.heads_q));
    d_sinks.take(&now, 0, c.heads_q, got.d_sinks.data(), &got.bits);
  });
  read("d_bias", d_bias, args.d_bias, [&](Buffer& now) {
    got.d_bias.resize(size_t(bias.count()));
    d_bias.take(&now, 0, bias.count(), got.d_bias.data(), &got.bits);
  });
  return run;
}

std::string compare(const BackwardCase& bc, const BackwardData& data, const Kernel& kernel,
                    const Gradients& got, const BackwardTruth& want) {
  const Case& c = bc.c;
  // Relative to the sum of the absolute values of all terms. u: what one operation rounds off. A
  // score is off by its products' sum and by the rounding of lse, of bias and of itself; P by as
  // much, relatively; d_out v and delta by their sums; and every sum by the number of its terms.
  const bool exact = kernel.backend == ATTN_BACKEND_REFERENCE;
  const double u = exact ? 0x1p-53 : 0x1p-24;
  const double score = u * (double(c.head_dim + 4) * data.forward.dot_bound +
                            6 * data.forward.logit_bound + 4 * want.largest_lse);
  double eps = 2 * score + u * (double(c.head_dim_v) + want.most_terms + 32);
  if (c.softcap > 0) eps += 2 * score / c.softcap;  // softcap's slope
  // P and ds as operands of the matrix unit: rounded, of f16 with an absolute part.
  const attn_dtype weights = kernel.numerics.weights;
  const double narrow = weights == ATTN_DTYPE_NONE ? 0 : half_ulp(weights, 1);
  // Matrix units and exponentials take subnormal float32 as zero.
  const double tiny = weights == ATTN_DTYPE_NONE ? 0
                      : weights == ATTN_F16 ? half_ulp(weights, 0) * want.most_terms * 6 * c.sigma
                                            : 0x1p-120;
  eps += narrow;
  const attn_dtype type = type_or(bc.gradient_type, c.q_type);
  std::ostringstream text;
  text.precision(9);
  const auto check = [&](const char* name, uint32_t gradient, attn_dtype type,
                         const std::vector<double>& a, const std::vector<double>& b,
                         const std::vector<double>& size) {
    if (!bc.wants(gradient) || !text.str().empty()) return;
    if (a.size() != b.size()) {
      text << name << " has " << a.size() << " elements, expected " << b.size();
      return;
    }
    double error2 = 0, rounding2 = 0, size2 = 0;
    for (size_t n = 0; n < b.size(); ++n) {
      // Accumulated: the sum is rounded at its own size, N(0, 1) having been there.
      const double before = bc.adds(gradient) ? 8 : 0;
      const double rounding = half_ulp(type, std::abs(b[n]) + before) * 1.0001;
      const double bound = rounding + eps * size[n] + tiny;
      if (std::isfinite(b[n]) ? !(std::abs(a[n] - b[n]) <= bound) : std::isfinite(a[n])) {
        text << name << "[" << n << "] is " << a[n] << ", expected " << b[n] << " +- " << bound;
        return;
      }
      if (!std::isfinite(b[n])) continue;
      error2 += (a[n] - b[n]) * (a[n] - b[n]);
      rounding2 += (rounding + tiny) * (rounding + tiny);
      size2 += size[n] * size[n];
    }
    // Roundings are not all to one side: over all elements they add up as a random walk does.
    const double walk = 8 * (2 * score / std::sqrt(double(c.head_dim)) +
                             u * (std::sqrt(double(c.head_dim_v) + want.most_terms) + 8)) +
                        narrow;
    if (error2 > rounding2 + walk * walk * size2)
      text << name << ": the root of all squared errors is " << std::sqrt(error2) << ", expected "
           << std::sqrt(rounding2 + walk * walk * size2);
  };
  check("dq", ATTN_GRAD_Q, type, got.dq, want.exact.dq, want.magnitude.dq);
  check("dk", ATTN_GRAD_K, type, got.dk, want.exact.dk, want.magnitude.dk);
  check("dv", ATTN_GRAD_V, type, got.dv, want.exact.dv, want.magnitude.dv);
  check("d_sinks", ATTN_GRAD_SINKS, ATTN_F32, got.d_sinks, want.exact.d_sinks,
        want.magnitude.d_sinks);
  check("d_bias", ATTN_GRAD_BIAS, type_or(bc.d_bias_type, c.bias_type), got.d_bias,
        want.exact.d_bias, want.magnitude.d_bias);
  return text.str();
}

namespace {

// dq, dk and dv, every operator's result rounded by `round`, sums as exact as double is. given:
// whose out is taken as it is, or null.
template <class Round>
Gradients operators(const BackwardCase& bc, const BackwardData& data, const Outputs* given,
                    Round&& round) {
  const Case& c = bc.c;
  const Data& of = data.forward;
  Gradients g;
  g.dq.resize(size_t(c.batch * c.heads_q * c.seqlen_q * c.head_dim));
  g.dk.resize(size_t(c.batch * c.heads_kv * of.most_keys * c.head_dim));
  g.dv.resize(size_t(c.batch * c.heads_kv * of.most_keys * c.head_dim_v));
  const auto dot = [](const std::vector<double>& x, const std::vector<double>& y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  const auto add = [](std::vector<double>& to, size_t row, const std::vector<double>& x,
                      double by) {
    for (size_t d = 0; d < x.size(); ++d) to[row * x.size() + d] += by * x[d];
  };
  struct Seen {
    size_t key;
    double s, tanh, p, dp;
  };
  std::vector<Seen> seen;
  std::vector<int64_t> first(size_t(c.batch) + 1);  // rows of Outputs: of batch entry, query, head
  for (int64_t b = 0; b < c.batch; ++b)
    first[size_t(b) + 1] = first[size_t(b)] + c.queries(b) * c.heads_q;
  for_each_query(c, [&](int64_t b, int64_t h, int64_t i) {
    const size_t row = size_t(row_of(c, b, h, i));
    if (!data.sees[row]) return;
    const auto &q = of.q_real[row], &d_out = data.d_out_real[row];
    double max = c.has(ATTN_SINKS) ? of.sinks.as<float>()[h] : -INFINITY;
    seen.clear();
    for (int64_t j = 0; j < c.keys(b); ++j) {
      if (!visible(c, of, b, h, i, j)) continue;
      Seen x{size_t((b * c.heads_kv + h / (c.heads_q / c.heads_kv)) * of.most_keys + j), 0, 0, 0,
             0};
      x.s = round(score_scale(c) * round(dot(q, of.k_real[x.key])));
      if (c.softcap > 0) {
        x.tanh = round(std::tanh(round(x.s / c.softcap)));
        x.s = round(c.softcap * x.tanh);
      }
      if (c.bias_type != ATTN_DTYPE_NONE) x.s = round(x.s + bias_at(c, of, b, h, i, j));
      if (c.has(ATTN_ALIBI)) {
        const double distance = std::abs(double(i + c.keys(b) - c.queries(b) - j));
        x.s = round(x.s - round(of.slopes.as<float>()[h] * distance));
      }
      max = std::max(max, x.s);
      seen.push_back(x);
    }
    double sum = c.has(ATTN_SINKS) ? std::exp(of.sinks.as<float>()[h] - max) : 0;
    for (const Seen& x : seen) sum += std::exp(x.s - max);
    double delta = bc.d_lse ? -data.d_lse_real[row] : 0;
    for (Seen& x : seen) {
      x.p = round(std::exp(x.s - max) / sum);
      x.dp = round(dot(d_out, of.v_real[x.key]));
      if (!given) delta += x.p * x.dp;
      add(g.dv, x.key, d_out, x.p);
    }
    if (given) {
      const size_t at = size_t(first[size_t(b)] + i * c.heads_q + h) * d_out.size();
      for (size_t d = 0; d < d_out.size(); ++d) delta += d_out[d] * given->out[at + d];
    }
    for (const Seen& x : seen) {
      double ds = round(x.p * (x.dp - delta));
      if (c.softcap > 0) ds = round(ds * (1 - x.tanh * x.tanh));
      ds = round(ds * score_scale(c));
      add(g.dq, row, of.k_real[x.key], ds);
      add(g.dk, x.key, q, ds);
    }
  });
  for (std::vector<double>* all : {&g.dq, &g.dk, &g.dv})
    for (double& x : *all) x = round(x);
  return g;
}

}  // namespace

std::string compare_with_plain_operators(const BackwardCase& bc, const BackwardData& data,
                                         const BackwardRun& run) {
  const attn_dtype type = bc.c.q_type;
  const auto same = [](double x) { return x; };
  const Gradients exact = operators(bc, data, nullptr, same);
  const Gradients of_out = operators(bc, data, &run.forward, same);
  const Gradients plain = operators(bc, data, nullptr, [&](double x) {
    const double ulp = 2 * half_ulp(type, x);
    return std::nearbyint(x / ulp) * ulp;
  });
  std::string text;
  const auto check = [&](const char* name, uint32_t gradient, const std::vector<double>& x,
                         const std::vector<double>& exact, const std::vector<double>& of_out,
                         const std::vector<double>& plain) {
    if (!bc.wants(gradient) || bc.adds(gradient)) return;
    double error = 0, error_of_out = 0, allowed = 0, largest = 0;
    for (size_t n = 0; n < exact.size(); ++n) {
      if (!std::isfinite(x[n])) error = error_of_out = INFINITY;
      error = std::max(error, std::abs(x[n] - exact[n]));
      error_of_out = std::max(error_of_out, std::abs(x[n] - of_out[n]));
      allowed = std::max(allowed, std::abs(plain[n] - exact[n]));
      largest = std::max(largest, std::abs(exact[n]));
    }
    const double rounding = 2 * half_ulp(type, largest + 0.3);  // as x + 0.3 - 0.3 leaves it, twice
    if (std::min(error, error_of_out) > 2 * allowed + rounding)
      text += join(name, " is off by ", error, " and ", error_of_out, ", plain operators by ",
                   allowed, ", rounding ", rounding, "; ");
  };
  check("dq", ATTN_GRAD_Q, run.got.dq, exact.dq, of_out.dq, plain.dq);
  check("dk", ATTN_GRAD_K, run.got.dk, exact.dk, of_out.dk, plain.dk);
  check("dv", ATTN_GRAD_V, run.got.dv, exact.dv, of_out.dv, plain.dv);
  return text;
}

bool declined(const Kernel& kernel, const BackwardRun& run) {
  return !kernel.host && run.got.status == ATTN_UNSUPPORTED;
}

void check_backward(const BackwardCase& bc, const std::vector<const Kernel*>& kernels) {
  const BackwardData data = make_backward_data(bc);
  // Of kernels whose forward has the same result, which are those of a backend, the truth is one.
  Outputs forward;
  BackwardTruth truth;
  for (const Kernel* kernel : kernels) {
    INFO(kernel->name << " " << describe(bc));
    const BackwardRun run = run_backward(backend_of(kernel->backend), bc, data, kernel->name);
    if (declined(*kernel, run)) continue;
    REQUIRE(run.got.error == "");
    if (forward.out.empty() || forward.bits != run.forward.bits || forward.lse != run.forward.lse) {
      forward = run.forward;
      truth = formula_backward(bc, data, forward);
    }
    CHECK(compare(bc, data, *kernel, run.got, truth) == "");
  }
}

}  // namespace attn::test
