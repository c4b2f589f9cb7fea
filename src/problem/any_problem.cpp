#include "problem/any_problem.h"

namespace attn {

const char* op_name(Op op) {
  switch (op) {
    case Op::forward:
      return "forward";
    case Op::backward:
      return "backward";
    case Op::merge:
      return "merge";
    case Op::quantize:
      return "quantize";
    case Op::kv_append:
      return "kv_append";
    case Op::kv_roll:
      return "kv_roll";
    case Op::block_mask:
      return "block_mask";
  }
  return "";
}

}  // namespace attn
