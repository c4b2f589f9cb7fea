// Rows of heads, copied between tensors in the memory of one context: on GPUs in a stream, by
// attn_run_kv_append, which takes any strides and head sizes.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "attn/attn.hpp"

namespace attn::onnx {

// [B, H, S, D] with strides in elements; those of a head are next to each other.
struct Heads {
  int64_t batch, heads, seqlen, dim;
  attn_strides strides;
};

// Of tensors that lie as [B, H, S, D].
inline attn_strides packed_strides(int64_t heads, int64_t seqlen, int64_t dim) {
  return {heads * seqlen * dim, dim, seqlen * dim};
}

// Calls may come from several threads.
class Rows {
 public:
  explicit Rows(std::shared_ptr<context> owner) : owner_(std::move(owner)) {}
  // The rows of `from`, f32, f16 or bf16, to the same places of `to`. Throws attn::error.
  void copy(attn_dtype type, const Heads& heads, const void* from, void* to,
            const attn_strides& to_strides, void* stream);
  // [B, H, first + second, D] of two tensors with the same B, H and D, behind each other.
  void join(attn_dtype type, const Heads& first, const void* from_first, const Heads& second,
            const void* from_second, void* to, void* stream);

 private:
  struct Cache {
    void* data;
    attn_strides strides;
    int64_t capacity;        // tokens
    const int32_t* lengths;  // [B], how many lie in front
    int32_t* lengths_out;    // null: not wanted
  };
  void append(attn_dtype type, const Heads& heads, const void* from, const Cache& to, void* stream);
  const int32_t* zeros(int64_t batch, void* stream);

  std::shared_ptr<context> owner_;
  std::mutex mutex_;
  std::map<std::string, plan> plans_;  // by the problem's bytes
  buffer zeros_;
  std::map<void*, buffer> lengths_;  // each of a stream
  buffer unread_;                    // what is appended beside what is copied
};

}  // namespace attn::onnx
