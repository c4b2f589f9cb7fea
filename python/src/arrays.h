// Arrays of Python's frameworks as libattn needs them: address, element type, shape, strides, where
// the memory is.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attn/attn.hpp"
#include "exchange.h"

namespace attn::python {

namespace nb = nanobind;

// An argument that breaks a rule: attn.InvalidArgument in Python.
[[noreturn]] void refuse(const std::string& text);

// The types of attn_dtype_info and the integers that small arrays have.
struct ElementType {
  const char* name = "none";      // attn's: "bf16", "i32"
  const char* numpy = "none";     // NumPy's, ml_dtypes' and torch's: "bfloat16"
  nb::dlpack::dtype dlpack = {};  // no bits: DLPack does not know it
  attn_dtype type = {};           // NONE, and so kind: no type of q, k, v
  attn_dtype_kind kind = {};
  int block_elements = 1, block_bytes = 0;
  bool has_scales = false, output_only = false;
  int scale_bytes = 0, scale_elements = 0;

  bool is_float() const { return kind == ATTN_KIND_FLOAT && !output_only; }
  bool is_fp8() const { return kind == ATTN_KIND_FP8; }
  bool is_out() const { return kind == ATTN_KIND_FLOAT || is_fp8(); }
  bool is_input() const { return kind != attn_dtype_kind{} && !output_only; }
  // Whether arrays have its bytes, as u8.
  bool in_bytes() const { return is_input() && dlpack.bits == 0; }
};
const std::vector<ElementType>& types();
// Of those for which `wanted` is true: "f32, f16, bf16".
template <class Wanted>
std::string names_of(const Wanted& wanted) {
  std::string names;
  for (const ElementType& type : types())
    if (std::invoke(wanted, type)) names += (names.empty() ? "" : ", ") + std::string(type.name);
  return names;
}
// By either name, by a dtype object of a framework, or null.
const ElementType* find_type(nb::handle dtype);
const ElementType& find_type(attn_dtype type);
const ElementType& find_type(const char* name);  // one of attn's
// "[1, 2, 3]"
std::string shape_text(const Sizes& shape);

enum class Framework { numpy, torch, cupy, jax, other };
Framework framework_of(nb::handle array);
// The name in attn._frameworks.
const char* framework_name(Framework framework);
bool is_array(nb::handle value);

// str(value), for sentences: one line, not too much of it.
std::string text_of(nb::handle value);

// Python's values, NumPy's scalars and arrays without dimensions. Another kind is a TypeError,
// whose sentence asks for what is `accepted`; a number that does not fit is refused, not rounded to
// 0 or infinity.
[[noreturn]] void refuse_type(nb::handle value, const std::string& name, const char* accepted);
bool boolean(nb::handle value, const std::string& name);
float number(nb::handle value, const std::string& name, const char* accepted);
std::string text(nb::handle value, const std::string& name, const char* accepted);
int64_t integer(nb::handle value, const std::string& name, const char* accepted = "an integer",
                int64_t low = INT64_MIN, int64_t high = INT64_MAX, const char* range = nullptr);
// `range`: of its values, if not all of 32 bits.
inline int32_t integer32(nb::handle value, const std::string& name, const char* range = nullptr) {
  return int32_t(integer(value, name, "an integer", INT32_MIN, INT32_MAX, range));
}
std::pair<int64_t, int64_t> integers(nb::handle pair, const std::string& name,
                                     const char* accepted);

// Where memory is. A backend of ATTN_BACKEND_CPU is host memory.
struct Device {
  attn_backend backend = ATTN_BACKEND_CPU;
  int32_t index = 0;
  bool host() const { return backend == ATTN_BACKEND_CPU; }
  bool operator==(const Device&) const = default;
  std::string text() const;
};

// Keeps the memory alive.
struct Array {
  std::string name;  // the argument's
  nb::object source;
  nb::ndarray<nb::ro> held;  // what DLPack's methods made
  View tensor;
  Framework framework = Framework::numpy;
  Device device;
  ElementType type{};
  std::shared_ptr<const std::string>
      foreign_type;  // the text of `type` where attn has no name for it

  void* data() const { return tensor.address; }
  // Not null, also of an array without elements.
  const void* address() const;
  bool empty() const;
  int64_t size(size_t i) const { return tensor.sizes[i]; }
  const Sizes& shape() const { return tensor.sizes; }
  // Refuses another shape; -1 is any size. `form` names the dimensions: "[B, Sq, Hq, D]".
  void need_shape(const Sizes& want, const char* form) const;
  void need_type(const char* type) const;
  void need_floats() const;  // f32, f16, bf16
  bool contiguous() const;
  void need_contiguous() const;
  // Element strides of the dimensions before the last, which must be contiguous; all 0, which
  // attn.h takes as "contiguous", if the array is. For types of blocks: a block's bytes and
  // elements.
  Sizes outer_strides(int64_t block_bytes = 1, int64_t block_elements = 1) const;
};

// Reads arrays of one call. The first one (q) decides the framework, device and stream of the run;
// arrays of the same framework are used in the order of its current stream, others are told the
// stream by DLPack.
class Reader {
 public:
  // PyTorch's order of dimensions in arrays that are read from now on: [B, H, S, D].
  bool heads_first = false;
  Array first(nb::handle value, const std::string& name);
  Array next(nb::handle value, const std::string& name);
  // One that is written; `accepted` in the place of JAX's, which cannot be.
  Array output(nb::handle value, const std::string& name, const char* accepted = "None");
  // A new one with the first one's type, shape and order in memory, but for the last dimension.
  Array like_first(const std::string& name, int64_t last);
  // New arrays of the first one's framework on its device; `source` is what Python gets.
  Array empty(const std::string& name, const Sizes& shape, const ElementType& type);
  Array full(const std::string& name, const Sizes& shape, float value);

  const Array& origin() const { return first_; }
  void* stream() const { return stream_; }
  // While PyTorch captures the stream: `bytes` of its graph's memory, a tensor. Else None.
  nb::object captured(size_t bytes) const;
  // Whether a call returns only when the result is there: JAX and frameworks unknown here do not
  // know the stream, and may use an array's memory again as soon as nothing holds it.
  bool waits() const { return waits_; }

 private:
  Array read(nb::handle value, const std::string& name);
  void import(Array* array);
  // Whether the array's type is one that attn does not know; then it becomes one without memory,
  // that whoever looks at its type refuses.
  bool is_foreign(Array* array) const;
  Array made(nb::handle value, const std::string& name, const Sizes& shape,
             const ElementType& type);
  bool started_ = false, waits_ = false;
  bool fresh_ = false;  // what is read was made for this call: its framework has nothing to refuse
  Array first_;
  void* stream_ = nullptr;
};

}  // namespace attn::python
