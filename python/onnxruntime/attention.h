// ONNX's operator Attention on tensors that lie in the memory of one context: the rules of opsets
// 23 to 25, from shapes to one call of libattn.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "attn/attn.hpp"
#include "rows.h"

namespace attn::onnx {

struct Tensor {
  void* data = nullptr;  // null: not given
  attn_dtype type = ATTN_DTYPE_NONE;
  bool boolean = false;
  std::vector<int64_t> shape;
  bool given() const { return data || !shape.empty(); }
};

struct Attributes {
  int64_t is_causal = 0, q_num_heads = 0, kv_num_heads = 0, left_window = -1, right_window = -1;
  int64_t softmax_precision = 0;  // of TensorProto.DataType
  float scale = 0, softcap = 0;
};

struct Inputs {
  Tensor q, k, v, mask, past_key, past_value;
  Tensor lengths;  // i64 [B], nonpad_kv_seqlen
};

// Memory of an output with a shape; null if nobody wants it.
enum class Output { y, present_key, present_value };
using MakeOutput = std::function<void*(Output, const std::vector<int64_t>& shape)>;

// What one node needs at run time. Calls may come from several threads.
class Attention {
 public:
  Attention(std::shared_ptr<context> owner, const Attributes& attributes)
      : owner_(std::move(owner)), rows_(owner_), attributes_(attributes) {}
  // Throws attn::error.
  void run(const Inputs& inputs, const MakeOutput& output, void* stream);

 private:
  struct Memory {
    buffer workspace;
    buffer scratch;  // rows of q, keys, values and out that are too short; 0 behind them
  };
  struct Planned {
    plan made;
    std::mutex mutex;
    std::vector<std::pair<void*, Memory>> idle;  // each of a stream
    explicit Planned(plan&& of) : made(std::move(of)) {}
    Memory take(void* stream);
    void give(void* stream, Memory&& memory);
  };
  std::shared_ptr<Planned> planned(const attn_problem& problem);

  std::shared_ptr<context> owner_;
  Rows rows_;
  Attributes attributes_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Planned>> plans_;  // by the problem's bytes
};

}  // namespace attn::onnx
