#include "rows.h"

#include <cstring>
#include <vector>

namespace attn::onnx {
namespace {

constexpr size_t most_plans = 64;

template <class T>
void clear(T* value) {  // its padding too: its bytes are a key
  std::memset(static_cast<void*>(value), 0, sizeof *value);
  value->struct_size = sizeof *value;
}

}  // namespace

const int32_t* Rows::zeros(int64_t batch, void* stream) {
  const size_t bytes = size_t(batch) * sizeof(int32_t);
  if (zeros_.bytes() < bytes) {
    zeros_ = buffer(*owner_, bytes);
    zeros_.copy_in(std::vector<char>(bytes).data(), bytes, stream);
  }
  return static_cast<const int32_t*>(zeros_.data());
}

void Rows::append(attn_dtype type, const Heads& heads, const void* from, const Cache& to,
                  void* stream) {
  // An append is of keys and values. The values are the rows' beginnings, whole vectors if the rows
  // are, and nobody reads where they go.
  const int64_t beside = heads.dim % 8 == 0 ? 8 : 1;
  attn_kv_append_problem p;
  clear(&p);
  clear(&p.segment);
  p.batch = heads.batch;
  p.heads_kv = heads.heads;
  p.head_dim = heads.dim;
  p.head_dim_v = beside;
  p.seqlen_new = heads.seqlen;
  p.new_type = p.segment.k_type = p.segment.v_type = type;
  p.k_new_stride = p.v_new_stride = heads.strides;
  p.segment.seqlen = to.capacity;
  p.segment.has_seqlens = 1;
  p.segment.k_stride = to.strides;
  p.segment.v_stride = packed_strides(heads.heads, to.capacity, beside);
  p.advance_seqlens = to.lengths_out != nullptr;
  const std::string key(reinterpret_cast<const char*>(&p), sizeof p);
  if (plans_.size() > most_plans) plans_.clear();
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(key, plan(*owner_, p)).first;

  const size_t unread =
      size_t(heads.batch * p.segment.v_stride.batch) * size_t(attn_dtype_info(type)->block_bytes);
  if (unread_.bytes() < unread) unread_ = buffer(*owner_, unread);
  attn_kv_append_args args;
  clear(&args);
  clear(&args.cache);
  args.k_new = args.v_new = from;
  args.cache.k = to.data;
  args.cache.v = unread_.data();
  args.cache.seqlens = to.lengths;
  args.seqlens_out = to.lengths_out;
  found->second.run(args, stream);
}

void Rows::copy(attn_dtype type, const Heads& heads, const void* from, void* to,
                const attn_strides& to_strides, void* stream) {
  if (heads.batch * heads.heads * heads.seqlen == 0) return;
  std::lock_guard lock(mutex_);
  append(type, heads, from, {to, to_strides, heads.seqlen, zeros(heads.batch, stream), nullptr},
         stream);
}

void Rows::join(attn_dtype type, const Heads& first, const void* from_first, const Heads& second,
                const void* from_second, void* to, void* stream) {
  const int64_t total = first.seqlen + second.seqlen;
  const attn_strides strides = packed_strides(second.heads, total, second.dim);
  if (first.seqlen == 0) return copy(type, second, from_second, to, strides, stream);
  if (second.seqlen == 0) return copy(type, first, from_first, to, strides, stream);
  if (first.batch * first.heads == 0) return;
  std::lock_guard lock(mutex_);
  buffer& kept = lengths_[stream];
  const size_t bytes = size_t(first.batch) * sizeof(int32_t);
  if (kept.bytes() < bytes) kept = buffer(*owner_, bytes);
  const auto lengths = static_cast<int32_t*>(kept.data());
  append(type, first, from_first, {to, strides, total, zeros(first.batch, stream), lengths},
         stream);
  append(type, second, from_second, {to, strides, total, lengths, nullptr}, stream);
}

}  // namespace attn::onnx
