// RegisterCustomOps(), which onnxruntime calls: the operator Attention in the domain "libattn", for
// the types of Q, of host tensors and of CUDA's.
#include <exception>
#include <memory>
#include <string>

#include "attention.h"
#include "ort.h"

namespace attn::ort {
namespace {

enum Input { q, k, v, mask, past_key, past_value, lengths, inputs };
constexpr size_t outputs = 4;  // Y, present_key, present_value, qk_matmul_output

Status* status_of(const Api& api, std::exception_ptr caught) {
  try {
    std::rethrow_exception(caught);
  } catch (const error& e) {
    const Code code = e.status() == ATTN_INVALID_ARGUMENT ? invalid_argument
                      : e.status() == ATTN_UNSUPPORTED    ? not_implemented
                                                          : fail;
    return api.create_status(code, (std::string("libattn: ") + e.what()).c_str());
  } catch (const std::exception& e) {
    return api.create_status(fail, (std::string("libattn: ") + e.what()).c_str());
  }
}

// onnxruntime's own error, which it gets back as it is.
struct Failed {
  Status* status;
};
void check(Status* status) {
  if (status) throw Failed{status};
}

attn_dtype type_of(ElementType type) {
  return type == f32    ? ATTN_F32
         : type == f16  ? ATTN_F16
         : type == bf16 ? ATTN_BF16
                        : ATTN_DTYPE_NONE;
}

class Kernel {
 public:
  Kernel(const void* const* table, const KernelInfo* info, bool cuda) : api_(table) {
    onnx::Attributes a;
    integer(info, "is_causal", &a.is_causal);
    integer(info, "q_num_heads", &a.q_num_heads);
    integer(info, "kv_num_heads", &a.kv_num_heads);
    integer(info, "left_window_size", &a.left_window);
    integer(info, "right_window_size", &a.right_window);
    integer(info, "softmax_precision", &a.softmax_precision);
    if (Status* none = api_.attribute_float(info, "scale", &a.scale)) api_.release_status(none);
    if (Status* none = api_.attribute_float(info, "softcap", &a.softcap)) api_.release_status(none);
    operation_ = std::make_unique<onnx::Attention>(
        std::make_shared<context>(cuda ? ATTN_BACKEND_CUDA : ATTN_BACKEND_CPU), a);
    cuda_ = cuda;
  }

  Status* compute(KernelContext* context) {
    try {
      onnx::Inputs in;
      size_t given = 0;
      check(api_.input_count(context, &given));
      onnx::Tensor* const tensors[] = {&in.q,        &in.k,          &in.v,      &in.mask,
                                       &in.past_key, &in.past_value, &in.lengths};
      for (size_t i = 0; i < inputs && i < given; ++i) read(context, i, tensors[i]);
      void* stream = nullptr;
      if (cuda_) check(api_.stream(context, &stream));
      size_t wanted = 0;
      check(api_.output_count(context, &wanted));
      const int64_t none = 0;
      Value* scores = nullptr;
      if (wanted == outputs) check(api_.output(context, 3, &none, 1, &scores));
      if (scores)
        throw error(ATTN_UNSUPPORTED,
                    "qk_matmul_output is wanted; accepted: no fourth output, attn.onnx has it");
      operation_->run(
          in,
          [&](onnx::Output which, const std::vector<int64_t>& shape) -> void* {
            if (size_t(which) >= wanted) return nullptr;
            Value* value = nullptr;
            check(api_.output(context, size_t(which), shape.data(), shape.size(), &value));
            void* data = nullptr;
            if (value) check(api_.data(value, &data));
            return data;
          },
          stream);
      return nullptr;
    } catch (const Failed& failed) {
      return failed.status;
    } catch (...) {
      return status_of(api_, std::current_exception());
    }
  }

 private:
  void integer(const KernelInfo* info, const char* name, int64_t* value) {
    if (Status* none = api_.attribute_int(info, name, value)) api_.release_status(none);
  }

  void read(const KernelContext* context, size_t i, onnx::Tensor* tensor) {
    const Value* value = nullptr;
    check(api_.input(context, i, &value));
    if (!value) return;
    TensorInfo* info = nullptr;
    check(api_.type_and_shape(value, &info));
    ElementType type = undefined;
    size_t dims = 0;
    Status* failed = api_.element_type(info, &type);
    if (!failed) failed = api_.dimensions_count(info, &dims);
    tensor->shape.resize(dims);
    if (!failed) failed = api_.dimensions(info, tensor->shape.data(), dims);
    api_.release_info(info);
    check(failed);
    tensor->type = type_of(type);
    tensor->boolean = type == boolean;
    if (i != lengths && tensor->type == ATTN_DTYPE_NONE && !tensor->boolean)
      throw error(ATTN_UNSUPPORTED, ("attn_mask is of ONNX's type " + std::to_string(type) +
                                     "; accepted: bool, float, float16, bfloat16")
                                        .c_str());
    check(api_.data(const_cast<Value*>(value), &tensor->data));
  }

  Api api_;
  bool cuda_ = false;
  std::unique_ptr<onnx::Attention> operation_;
};

struct Op : CustomOp {
  ElementType type;
  bool cuda;

  Op(ElementType of, bool on_cuda) : CustomOp{}, type(of), cuda(on_cuda) {
    version = api_version;
    name = [](const CustomOp*) { return "Attention"; };
    provider = [](const CustomOp* op) {
      return static_cast<const Op*>(op)->cuda ? "CUDAExecutionProvider" : nullptr;
    };
    CustomOp::inputs = [](const CustomOp*) { return size_t(Input::inputs); };
    CustomOp::outputs = [](const CustomOp*) { return ort::outputs; };
    input_type = [](const CustomOp* op, size_t i) {
      return i == mask ? undefined : i == lengths ? i64 : static_cast<const Op*>(op)->type;
    };
    output_type = [](const CustomOp* op, size_t) { return static_cast<const Op*>(op)->type; };
    input_kind = [](const CustomOp*, size_t i) { return int(i > v); };
    output_kind = [](const CustomOp*, size_t i) { return int(i > 0); };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    variadic_inputs = variadic_outputs = [](const CustomOp*) { return 0; };
    variadic_inputs_alike = variadic_outputs_alike = [](const CustomOp*) { return 0; };
    create_kernel = [](const CustomOp*, const void* const*, const KernelInfo*) -> void* {
      return nullptr;
    };
    create_kernel_checked = [](const CustomOp* op, const void* const* api, const KernelInfo* info,
                               void** kernel) -> Status* {
      try {
        *kernel = new Kernel(api, info, static_cast<const Op*>(op)->cuda);
        return nullptr;
      } catch (...) {
        return status_of(Api(api), std::current_exception());
      }
    };
    compute_checked = [](void* kernel, KernelContext* context) {
      return static_cast<Kernel*>(kernel)->compute(context);
    };
    destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    first_version = [](const CustomOp*) { return 1; };
    last_version = [](const CustomOp*) { return 1 << 30; };
  }
};

}  // namespace
}  // namespace attn::ort

extern "C" __attribute__((visibility("default"))) attn::ort::Status* RegisterCustomOps(
    attn::ort::SessionOptions* options, const attn::ort::ApiBase* base) {
  using namespace attn::ort;
  const void* const* table = base->get_api(api_version);
  if (!table) return nullptr;  // older than this; it finds no operator, and says so
  const Api api(table);
  Domain* domain = nullptr;
  if (Status* status = api.create_domain("libattn", &domain)) return status;
  static const Op ops[] = {Op(f32, false), Op(f16, false), Op(bf16, false), Op(f16, true),
                           Op(bf16, true)};
  for (const Op& op : ops)
    if (Status* status = api.add_op(domain, static_cast<const CustomOp*>(&op))) return status;
  return api.add_domain(options, domain);
}
