#include "attention.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <tuple>

namespace attn::onnx {
namespace {

constexpr int64_t precision_double = 11;  // TensorProto.DOUBLE
constexpr size_t most_plans = 64;

[[noreturn]] void refuse(attn_status status, const std::string& text) {
  throw error(status, text.c_str());
}
[[noreturn]] void invalid(const std::string& text) {
  refuse(ATTN_INVALID_ARGUMENT, text);
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

// [B, H, S, D], or [B, S, H * D] with the heads of an attribute.
Heads heads_of(const char* name, const Tensor& t, size_t dims, const char* attribute,
               int64_t heads) {
  const std::vector<int64_t>& s = t.shape;
  if (s.size() != dims || dims < 3 || dims > 4)
    invalid(std::string(name) + " has shape " + text_of(s) +
            "; accepted: 3 or 4 dimensions, as many as Q's");
  if (dims == 4) return {s[0], s[1], s[2], s[3], packed_strides(s[1], s[2], s[3])};
  if (heads <= 0 || s[2] % heads != 0)
    invalid(std::string(attribute) + " is " + std::to_string(heads) + "; accepted for " + name +
            " of shape " + text_of(s) + ": heads that divide its last dimension");
  const int64_t dim = s[2] / heads;
  return {s[0], heads, s[1], dim, {s[1] * s[2], s[2], dim}};
}

size_t bytes_of(attn_dtype type) {
  return size_t(attn_dtype_info(type)->block_bytes);
}

float number(const Tensor& t, size_t i) {
  if (t.type == ATTN_F32) return static_cast<const float*>(t.data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(t.data)[i];
  uint32_t wide = uint32_t{bits} << 16;
  if (t.type == ATTN_F16) {
    const uint32_t sign = uint32_t{bits} >> 15 << 31, magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00)
      wide = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
    else if (magnitude >= 0x400)
      wide = sign | ((magnitude << 13) + (uint32_t{112} << 23));
    else
      return (sign ? -1.f : 1.f) * std::ldexp(float(magnitude), -24);
  }
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// What query i sees besides the mask: keys from i + low[b] on, before i + high[b], before end[b].
struct Rule {
  int64_t left = -1, right = -1;  // around the diagonal i + offset
  int64_t keys;                   // that any query may see
  bool window = false;            // attn_problem says it, over `keys`
  bool bias = false;              // nothing in attn_problem says it
  int64_t window_left = -1, window_right = -1;
};
// attn.h counts from the end of the keys, i + keys - Sq; the operator from a past.
Rule rule_of(const Attributes& a, int64_t seqlen_q, int64_t total, int64_t past, bool lengths) {
  Rule r;
  r.left = a.left_window;
  r.right = a.is_causal ? 0 : a.right_window;
  r.keys = total;
  if (r.left < 0 && r.right < 0) return r;
  if (!lengths && r.right >= 0) r.keys = std::min(total, past + seqlen_q + r.right);
  const int64_t surplus = lengths ? 0 : r.keys - seqlen_q - past;
  if (r.left >= 0 && r.left + surplus < 0) {
    r.keys = total;
    r.bias = true;
    return r;
  }
  r.window = true;
  r.window_left = r.left < 0 ? -1 : r.left + surplus;
  r.window_right = r.right < 0 ? -1 : r.right - surplus;
  return r;
}

// The mask with four dimensions, as NumPy broadcasts; the last one is not broadcast: keys after it
// are not visible.
std::array<int64_t, 4> shape_of_mask(const Tensor& mask, const Heads& q, int64_t total) {
  std::array<int64_t, 4> shape = {1, 1, 1, 1};
  const size_t n = mask.shape.size();
  bool good = n >= 1 && n <= 4;
  for (size_t i = 0; good && i < n; ++i) shape[4 - n + i] = mask.shape[i];
  const int64_t full[] = {q.batch, q.heads, q.seqlen};
  for (int i = 0; good && i < 3; ++i) good = shape[i] == 1 || shape[i] == full[i];
  if (!good || shape[3] > total)
    invalid("attn_mask has shape " + text_of(mask.shape) +
            "; accepted: what broadcasts to [B, Hq, Sq, past + Skv] = " +
            text_of({q.batch, q.heads, q.seqlen, total}) + ", the last dimension shorter at most");
  return shape;
}

// The mask and, where nothing else says it, the rule as f32 that is added: [.., .., .., keys], its
// first dimensions in *shape. Host memory.
std::vector<float> bias_of(const Tensor& mask, std::array<int64_t, 4>* shape, int64_t seqlen_q,
                           int64_t keys, const Rule& rule, int64_t past) {
  const std::array<int64_t, 4> from = *shape;
  if (rule.bias) (*shape)[2] = seqlen_q;
  (*shape)[3] = keys;
  const auto [batch, heads, rows, columns] = *shape;
  std::vector<float> bias(size_t(batch * heads * rows * columns));
  size_t at = 0;
  for (int64_t block = 0; block < batch * heads; ++block)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j, ++at) {
        const int64_t row = block * from[2] + (from[2] == 1 ? 0 : i);
        float x = 0;
        if (mask.given() && j >= from[3]) {
          x = -INFINITY;
        } else if (mask.given()) {
          const auto element = size_t(row * from[3] + j);
          if (mask.boolean)
            x = static_cast<const uint8_t*>(mask.data)[element] ? 0 : -INFINITY;
          else
            x = number(mask, element);
        }
        const int64_t place = i + past;
        if (rule.bias && ((rule.left >= 0 && j < place - rule.left) ||
                          (rule.right >= 0 && j > place + rule.right)))
          x = -INFINITY;
        bias[at] = x;
      }
  return bias;
}

// A tensor that the run reads or writes: where it lies, or a part of the scratch memory whose rows
// are longer.
struct Operand {
  void* data = nullptr;
  attn_dtype type = ATTN_DTYPE_NONE;
  Heads heads{};
  attn_strides strides{};  // of what the run sees
  int64_t dim = 0;         // likewise
  size_t at = 0;           // in the scratch memory
  bool widened() const { return dim != heads.dim; }
};

template <class T>
void clear(T* value) {  // its padding too: its bytes are a key
  std::memset(static_cast<void*>(value), 0, sizeof *value);
  value->struct_size = sizeof *value;
}

}  // namespace

std::shared_ptr<Attention::Planned> Attention::planned(const attn_problem& problem) {
  attn_problem plain;
  std::memcpy(static_cast<void*>(&plain), &problem, sizeof plain);
  plain.segments = nullptr;
  std::string key(reinterpret_cast<const char*>(&plain), sizeof plain);
  key.append(reinterpret_cast<const char*>(problem.segments),
             size_t(problem.num_segments) * sizeof(attn_segment));
  std::lock_guard lock(mutex_);
  auto& slot = plans_[key];
  if (slot) return slot;
  auto made = std::make_shared<Planned>(plan(*owner_, problem));
  if (plans_.size() > most_plans) {  // lengths that grow with every call, say
    plans_.clear();
    plans_[key] = made;
    return made;
  }
  return slot = made;
}

Attention::Memory Attention::Planned::take(void* stream) {
  std::lock_guard lock(mutex);
  const auto found =
      std::find_if(idle.begin(), idle.end(), [&](const auto& m) { return m.first == stream; });
  if (found == idle.end()) return {};
  Memory memory = std::move(found->second);
  idle.erase(found);
  return memory;
}
void Attention::Planned::give(void* stream, Memory&& memory) {
  if (memory.workspace.bytes() + memory.scratch.bytes() == 0) return;
  std::lock_guard lock(mutex);
  idle.emplace_back(stream, std::move(memory));
}

void Attention::run(const Inputs& in, const MakeOutput& output, void* stream) {
  const Attributes& a = attributes_;
  const bool host = owner_->backend() == ATTN_BACKEND_CPU;
  if (a.softmax_precision == precision_double)
    refuse(ATTN_UNSUPPORTED, "softmax_precision is DOUBLE; accepted: FLOAT, FLOAT16, BFLOAT16");
  const size_t dims = in.q.shape.size();
  const Heads q = heads_of("Q", in.q, dims, "q_num_heads", a.q_num_heads);
  const Heads k = heads_of("K", in.k, dims, "kv_num_heads", a.kv_num_heads);
  const Heads v = heads_of("V", in.v, dims, "kv_num_heads", a.kv_num_heads);
  if (v.batch != k.batch || v.heads != k.heads || v.seqlen != k.seqlen || k.batch != q.batch ||
      k.dim != q.dim)
    invalid("V has shape " + text_of(in.v.shape) + ", K " + text_of(in.k.shape) + ", Q " +
            text_of(in.q.shape) +
            "; accepted: the same batch, K's head size as Q's, and V as K except its head size");
  int64_t past = 0;
  if (in.past_key.given() != in.past_value.given())
    invalid("one of past_key and past_value is given; accepted: both, or neither");
  if (in.past_key.given()) {
    if (in.lengths.given()) invalid("nonpad_kv_seqlen is given; accepted without past_key");
    if (in.past_key.shape.size() == 4) past = in.past_key.shape[2];
    for (const auto& [name, t, like] :
         {std::tuple{"past_key", &in.past_key, &k}, std::tuple{"past_value", &in.past_value, &v}}) {
      const std::vector<int64_t> want = {like->batch, like->heads, past, like->dim};
      if (t->shape != want)
        invalid(std::string(name) + " has shape " + text_of(t->shape) +
                "; accepted: [B, Hkv, past, D] = " + text_of(want));
    }
  }
  const int64_t total = past + k.seqlen;
  std::vector<int64_t> out_shape = {q.batch, q.heads, q.seqlen, v.dim};
  attn_strides out_strides = packed_strides(q.heads, q.seqlen, v.dim);
  if (dims == 3) {
    out_shape = {q.batch, q.seqlen, q.heads * v.dim};
    out_strides = {q.seqlen * q.heads * v.dim, q.heads * v.dim, v.dim};
  }

  // Rows that no kernel takes lie in scratch memory, with zeros behind them.
  size_t scratch_bytes = 0;
  const auto operand = [&](void* data, const Heads& heads) {
    Operand o{data, in.q.type, heads, heads.strides, heads.dim};
    if (host || heads.dim % 8 == 0) return o;
    o.dim = (heads.dim + 7) / 8 * 8;
    o.strides = packed_strides(heads.heads, heads.seqlen, o.dim);
    o.at = scratch_bytes;
    scratch_bytes += size_t(heads.batch * o.strides.batch) * bytes_of(o.type);
    scratch_bytes = (scratch_bytes + 255) / 256 * 256;
    return o;
  };
  const auto kept_keys = [&](const Heads& h) {
    return Heads{h.batch, h.heads, past, h.dim, packed_strides(h.heads, past, h.dim)};
  };
  Operand queries = operand(in.q.data, q), keys = operand(in.k.data, k);
  Operand values = operand(in.v.data, v), past_keys = operand(in.past_key.data, kept_keys(k));
  Operand past_values = operand(in.past_value.data, kept_keys(v));
  Operand out = operand(nullptr, {q.batch, q.heads, q.seqlen, v.dim, out_strides});
  const Rule rule = rule_of(a, q.seqlen, total, past, in.lengths.given());

  attn_problem p;
  clear(&p);
  p.batch = q.batch;
  p.heads_q = q.heads;
  p.heads_kv = k.heads;
  p.head_dim = queries.dim;
  p.head_dim_v = values.dim;
  p.seqlen_q = q.seqlen;
  p.q_type = p.out_type = in.q.type;
  p.q_stride = queries.strides;
  p.out_stride = out.strides;
  p.scale = a.scale == 0 && queries.widened() ? 1 / std::sqrt(float(q.dim)) : a.scale;
  p.softcap = a.softcap;
  if (rule.window) {
    if (rule.window_right == 0) p.flags |= ATTN_CAUSAL;
    if (rule.window_left >= 0 || rule.window_right > 0) {
      p.flags |= ATTN_WINDOW;
      p.window_left = rule.window_left;
      p.window_right = rule.window_right == 0 ? -1 : rule.window_right;
    }
  }

  // The past and what is new are segments: nothing is copied to be attended to.
  attn_segment segments[2];
  attn_segment_args parts[2];
  int32_t count = 0;
  std::vector<Operand*> inputs = {&queries};
  const auto add = [&](Operand& key, Operand& value, int64_t seqlen) {
    attn_segment& s = segments[count];
    clear(&s);
    clear(&parts[count++]);
    s.k_type = key.type;
    s.v_type = value.type;
    s.seqlen = seqlen;
    s.k_stride = key.strides;
    s.v_stride = value.strides;
    inputs.insert(inputs.end(), {&key, &value});
  };
  if (past > 0) add(past_keys, past_values, std::min(past, rule.keys));
  if (rule.keys > past || past == 0) add(keys, values, std::max<int64_t>(rule.keys - past, 0));
  p.num_segments = count;
  p.segments = segments;

  std::vector<int32_t> lengths;
  if (in.lengths.given()) {
    if (!host) refuse(ATTN_UNSUPPORTED, "nonpad_kv_seqlen is given; accepted on GPUs: none");
    if (in.lengths.shape != std::vector<int64_t>{q.batch})
      invalid("nonpad_kv_seqlen has shape " + text_of(in.lengths.shape) +
              "; accepted: [B] = " + text_of({q.batch}));
    for (int64_t b = 0; b < q.batch; ++b) {
      const int64_t n = static_cast<const int64_t*>(in.lengths.data)[b];
      if (n < 0 || n > total)
        invalid("nonpad_kv_seqlen[" + std::to_string(b) + "] is " + std::to_string(n) +
                "; accepted: 0 to " + std::to_string(total));
      lengths.push_back(int32_t(n));
    }
    segments[0].has_seqlens = 1;
    parts[0].seqlens = lengths.data();
  }

  attn_args args;
  clear(&args);
  args.num_segments = count;
  args.segments = parts;
  std::vector<float> bias;
  if (in.mask.given() || rule.bias) {
    std::array<int64_t, 4> shape = {1, 1, 1, 1};
    if (in.mask.given()) shape = shape_of_mask(in.mask, q, total);
    const bool as_it_is = in.mask.given() && !in.mask.boolean && !rule.bias && shape[3] == total &&
                          (in.mask.type == ATTN_F32 || in.mask.type == in.q.type) && total > 1;
    int64_t columns = shape[3];
    if (as_it_is) {
      p.bias_type = in.mask.type;
      args.bias = in.mask.data;
    } else {
      if (!host)
        refuse(ATTN_UNSUPPORTED,
               "attn_mask: accepted on GPUs: a float of Q's type, as long as all keys");
      bias = bias_of(in.mask, &shape, q.seqlen, rule.keys, rule, past);
      columns = rule.keys;
      p.bias_type = ATTN_F32;
      args.bias = bias.empty() ? nullptr : bias.data();
    }
    const int64_t full[] = {q.batch, q.heads, q.seqlen, rule.keys};
    int64_t stride = columns;
    p.bias_stride[3] = 1;
    for (int i = 2; i >= 0; --i) {
      p.bias_stride[i] = full[i] <= 1 ? 1 : shape[size_t(i)] == 1 ? 0 : stride;
      stride *= shape[size_t(i)];
    }
  }

  out.data = output(Output::y, out_shape);
  const std::vector<int64_t> key_shape = {k.batch, k.heads, total, k.dim};
  const std::vector<int64_t> value_shape = {v.batch, v.heads, total, v.dim};
  void* present_key = output(Output::present_key, key_shape);
  void* present_value = output(Output::present_value, value_shape);
  if (present_key)
    rows_.join(in.q.type, past_keys.heads, past_keys.data, keys.heads, keys.data, present_key,
               stream);
  if (present_value)
    rows_.join(in.q.type, past_values.heads, past_values.data, values.heads, values.data,
               present_value, stream);
  if (q.batch == 0 || q.seqlen == 0) return;

  const std::shared_ptr<Planned> kept = planned(p);
  Memory memory = kept->take(stream);
  if (kept->made.workspace() > memory.workspace.bytes())
    memory.workspace = kept->made.make_workspace(*owner_, stream);
  if (scratch_bytes > memory.scratch.bytes()) {
    memory.scratch = buffer(*owner_, scratch_bytes);
    memory.scratch.copy_in(std::vector<char>(scratch_bytes).data(), scratch_bytes, stream);
  }
  const auto seen = [&](const Operand& o) {  // by the run
    return o.widened() ? static_cast<void*>(static_cast<char*>(memory.scratch.data()) + o.at)
                       : o.data;
  };
  for (const Operand* o : inputs)
    if (o->widened()) rows_.copy(o->type, o->heads, o->data, seen(*o), o->strides, stream);
  args.q = seen(queries);
  args.out = seen(out);
  for (int32_t i = 0; i < count; ++i) {
    parts[i].k = seen(*inputs[size_t(2 * i + 1)]);
    parts[i].v = seen(*inputs[size_t(2 * i + 2)]);
  }
  kept->made.run(args, memory.workspace, stream);
  if (out.widened()) {
    Heads wide = out.heads;
    wide.strides = out.strides;
    rows_.copy(out.type, wide, args.out, out.data, out.heads.strides, stream);
  }
  kept->give(stream, std::move(memory));
}

}  // namespace attn::onnx
