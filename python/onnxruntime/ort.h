// The part of onnxruntime's C interface that a custom operator needs, declared here so that
// building takes none of its headers: OrtApi is a table of functions whose order never changes (new
// ones are put at its end; its sources assert the place of ReleaseCustomOpDomain, 101, and of
// ReleaseModelMetadata, 118), and OrtCustomOp a table that the operator fills in, as long as its
// `version` says.
#pragma once
#include <cstddef>
#include <cstdint>

namespace attn::ort {

constexpr uint32_t api_version = 17;  // of onnxruntime 1.17, the first with all that is used here

struct Status;
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;

enum Code : int { fail = 1, invalid_argument = 2, not_implemented = 9 };
enum ElementType : int {
  undefined = 0,
  f32 = 1,
  i64 = 7,
  boolean = 9,
  f16 = 10,
  bf16 = 16,
};

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

// A function by its place in OrtApi.
template <class Function, int place>
struct Slot;
template <class Result, class... Parameters, int place>
struct Slot<Result(Parameters...), place> {
  const void* const* api;
  Result operator()(Parameters... arguments) const {
    return reinterpret_cast<Result (*)(Parameters...)>(const_cast<void*>(api[place]))(arguments...);
  }
};

struct Api {
  explicit Api(const void* const* table)
      : create_status{table},
        create_domain{table},
        add_op{table},
        add_domain{table},
        data{table},
        element_type{table},
        dimensions_count{table},
        dimensions{table},
        type_and_shape{table},
        attribute_float{table},
        attribute_int{table},
        input_count{table},
        output_count{table},
        input{table},
        output{table},
        release_status{table},
        release_info{table},
        stream{table} {}
  Slot<Status*(Code, const char*), 0> create_status;
  Slot<Status*(const char*, Domain**), 26> create_domain;
  Slot<Status*(Domain*, const void*), 27> add_op;
  Slot<Status*(SessionOptions*, Domain*), 28> add_domain;
  Slot<Status*(Value*, void**), 51> data;
  Slot<Status*(const TensorInfo*, ElementType*), 60> element_type;
  Slot<Status*(const TensorInfo*, size_t*), 61> dimensions_count;
  Slot<Status*(const TensorInfo*, int64_t*, size_t), 62> dimensions;
  Slot<Status*(const Value*, TensorInfo**), 65> type_and_shape;
  Slot<Status*(const KernelInfo*, const char*, float*), 85> attribute_float;
  Slot<Status*(const KernelInfo*, const char*, int64_t*), 86> attribute_int;
  Slot<Status*(const KernelContext*, size_t*), 88> input_count;
  Slot<Status*(const KernelContext*, size_t*), 89> output_count;
  Slot<Status*(const KernelContext*, size_t, const Value**), 90> input;
  Slot<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**), 91> output;
  Slot<void(Status*), 93> release_status;
  Slot<void(TensorInfo*), 99> release_info;
  Slot<Status*(const KernelContext*, void**), 193> stream;
};

struct CustomOp {  // OrtCustomOp
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const void* const* api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);  // null: the host's
  ElementType (*input_type)(const CustomOp*, size_t);
  size_t (*inputs)(const CustomOp*);
  ElementType (*output_type)(const CustomOp*, size_t);
  size_t (*outputs)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  int (*input_kind)(const CustomOp*, size_t);  // 0 required, 1 optional
  int (*output_kind)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);  // 0: the provider's, -2: the host's
  int (*variadic_inputs)(const CustomOp*);
  int (*variadic_inputs_alike)(const CustomOp*);
  int (*variadic_outputs)(const CustomOp*);
  int (*variadic_outputs_alike)(const CustomOp*);
  // In the place of create_kernel and compute.
  Status* (*create_kernel_checked)(const CustomOp*, const void* const* api, const KernelInfo*,
                                   void** kernel);
  Status* (*compute_checked)(void* kernel, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*first_version)(const CustomOp*);
  int (*last_version)(const CustomOp*);
};

}  // namespace attn::ort
