#include "arrays.h"

#include <algorithm>
#include <cstring>

namespace attn::python {
namespace {

constexpr ElementType types[] = {
    {"f32", "float32", ATTN_F32},
    {"f16", "float16", ATTN_F16},
    {"bf16", "bfloat16", ATTN_BF16},
    {"f8_e4m3fn", "float8_e4m3fn", ATTN_F8_E4M3FN},
    {"f8_e5m2", "float8_e5m2", ATTN_F8_E5M2},
    {"f8_e4m3fnuz", "float8_e4m3fnuz", ATTN_F8_E4M3FNUZ},
    {"f64", "float64", ATTN_F64},
    {"q8_0", "q8_0", ATTN_Q8_0},
    {"q4_0", "q4_0", ATTN_Q4_0},
    {"u8", "uint8", ATTN_DTYPE_NONE},
    {"bool", "bool", ATTN_DTYPE_NONE},
    {"i32", "int32", ATTN_DTYPE_NONE},
    {"u32", "uint32", ATTN_DTYPE_NONE},
    {"i64", "int64", ATTN_DTYPE_NONE},
};

ElementType named(const char* name) {
  for (const ElementType& type : types)
    if (!std::strcmp(type.name, name)) return type;
  return {name, name, ATTN_DTYPE_NONE};
}

ElementType from_dlpack(nb::dlpack::dtype dtype) {
  enum Code {
    Int = 0,
    UInt = 1,
    Float = 2,
    Bfloat = 4,
    Bool = 6,
    E4M3FN = 10,
    E4M3FNUZ = 11,
    E5M2 = 12
  };
  const auto is = [&](Code code, int bits) {
    return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(Float, 32)) return named("f32");
  if (is(Float, 16)) return named("f16");
  if (is(Float, 64)) return named("f64");
  if (is(Bfloat, 16)) return named("bf16");
  if (is(E4M3FN, 8)) return named("f8_e4m3fn");
  if (is(E5M2, 8)) return named("f8_e5m2");
  if (is(E4M3FNUZ, 8)) return named("f8_e4m3fnuz");
  if (is(UInt, 8)) return named("u8");
  if (is(Bool, 8)) return named("bool");
  if (is(Int, 32)) return named("i32");
  if (is(UInt, 32)) return named("u32");
  if (is(Int, 64)) return named("i64");
  return {"another type", "", ATTN_DTYPE_NONE};
}

// Looked up once: an import takes longer than all else here. Lives as long as the interpreter.
nb::handle once(PyObject*& slot, const char* module, const char* name) {
  if (!slot) slot = nb::object(nb::module_::import_(module).attr(name)).release().ptr();
  return slot;
}
PyObject *empty_function, *full_function, *stream_function, *torch_fp8, *to_dlpack, *torch_uint8;
constexpr const char* helpers = "attn._frameworks";

// DLPack's number of the host and of GPUs' stream that all others wait for.
constexpr int dl_cpu = 1, dl_cuda = 2, dl_cuda_host = 3, dl_rocm = 10, dl_rocm_host = 11,
              dl_cuda_managed = 13;

Device device_of(const std::string& name, int type, int index) {
  switch (type) {
    case dl_cpu:
    case dl_cuda_host:
    case dl_rocm_host:
      return {};
    case dl_cuda:
    case dl_cuda_managed:
      return {ATTN_BACKEND_CUDA, index};
    case dl_rocm:
      return {ATTN_BACKEND_HIP, index};
  }
  refuse(name + " lies on a device of DLPack type " + std::to_string(type) +
         "; accepted: host, CUDA and ROCm memory");
}

}  // namespace

void refuse(const std::string& text) {
  throw error(ATTN_INVALID_ARGUMENT, text.c_str());
}

void refuse_type(nb::handle value, const std::string& name, const char* accepted) {
  const std::string type = nb::cast<std::string>(nb::str(value.type().attr("__name__")));
  throw nb::type_error((name + " is a " + type + "; accepted: " + accepted).c_str());
}

const ElementType* find_type(nb::handle dtype) {
  std::string name;
  if (nb::isinstance<nb::str>(dtype)) {
    name = nb::cast<std::string>(dtype);
  } else if (nb::hasattr(dtype, "name")) {  // a numpy.dtype
    name = nb::cast<std::string>(nb::str(dtype.attr("name")));
  } else if (nb::hasattr(dtype, "__name__")) {  // a scalar type: numpy.float16
    name = nb::cast<std::string>(nb::str(dtype.attr("__name__")));
  } else {  // torch.float16
    name = nb::cast<std::string>(nb::str(dtype));
  }
  if (const size_t dot = name.rfind('.'); dot != std::string::npos) name.erase(0, dot + 1);
  for (const ElementType& type : types)
    if (name == type.name || name == type.numpy) return &type;
  return nullptr;
}

const char* type_name(attn_dtype type) {
  for (const ElementType& t : types)
    if (t.type == type) return t.name;
  return "none";
}

bool is_fp8(attn_dtype type) {
  return type == ATTN_F8_E4M3FN || type == ATTN_F8_E5M2 || type == ATTN_F8_E4M3FNUZ;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

Framework framework_of(nb::handle array) {
  nb::object module = nb::getattr(array.type(), "__module__", nb::none());
  const char* name = nb::isinstance<nb::str>(module) ? nb::borrow<nb::str>(module).c_str() : "";
  const auto begins = [&](const char* prefix) {
    const size_t n = std::strlen(prefix);
    return !std::strncmp(name, prefix, n) && (name[n] == 0 || name[n] == '.');
  };
  if (begins("numpy")) return Framework::numpy;
  if (begins("torch")) return Framework::torch;
  if (begins("cupy")) return Framework::cupy;
  if (begins("jaxlib") || begins("jax")) return Framework::jax;
  return Framework::other;
}

const char* framework_name(Framework framework) {
  switch (framework) {
    case Framework::torch:
      return "torch";
    case Framework::cupy:
      return "cupy";
    case Framework::jax:
      return "jax";
    default:
      return "numpy";
  }
}

bool is_array(nb::handle value) {
  return nb::hasattr(value, "__dlpack_device__");  // a tracer of JAX has none
}

std::string Device::text() const {
  return host() ? "host memory"
                : std::string(attn_backend_string(backend)) + " device " + std::to_string(index);
}

std::vector<int64_t> Array::shape() const {
  std::vector<int64_t> shape;
  for (size_t i = 0; i < tensor.ndim(); ++i) shape.push_back(size(i));
  return shape;
}

void Array::need_shape(const std::vector<int64_t>& want, const char* form) const {
  bool good = tensor.ndim() == want.size();
  for (size_t i = 0; good && i < want.size(); ++i) good = want[i] < 0 || size(i) == want[i];
  if (good) return;
  std::string sizes;
  for (int64_t n : want) sizes += (sizes.empty() ? "" : ", ") + (n < 0 ? "any" : std::to_string(n));
  refuse(name + " has shape " + shape_text(shape()) + "; accepted: " + form + " = [" + sizes + "]");
}

void Array::need_type(const char* want) const {
  if (std::strcmp(type.name, want) != 0) refuse(name + " is " + type.name + "; accepted: " + want);
}

bool Array::contiguous() const {
  if (tensor.size() == 0) return true;  // strides of no elements are anything
  int64_t stride = 1;
  for (size_t i = tensor.ndim(); i-- > 0; stride *= size(i))
    if (size(i) > 1 && tensor.stride(i) != stride) return false;
  return true;
}

void Array::need_contiguous() const {
  if (!contiguous()) refuse(name + " is not contiguous; accepted: a contiguous array");
}

std::vector<int64_t> Array::outer_strides(int64_t block_bytes, int64_t block_elements) const {
  const size_t last = tensor.ndim() - 1;
  std::vector<int64_t> strides(last, 0);
  if (contiguous()) return strides;
  if (size(last) > 1 && tensor.stride(last) != 1)
    refuse(name + ": the last dimension has stride " + std::to_string(tensor.stride(last)) +
           "; accepted: 1");
  bool any = false;
  for (size_t i = 0; i < last; ++i) {
    const int64_t stride = size(i) > 1 ? tensor.stride(i) : block_bytes;
    if (stride % block_bytes != 0)
      refuse(name + ": dimension " + std::to_string(i) + " has stride " + std::to_string(stride) +
             "; accepted for this type: multiples of " + std::to_string(block_bytes));
    strides[i] = stride / block_bytes * block_elements;
    any |= size(i) > 1 && stride != 0;
  }
  if (!any) refuse(name + ": all strides are 0; accepted: an array that does not repeat one row");
  return strides;
}

Array Reader::read(nb::handle value, const std::string& name) {
  Array a;
  a.name = name;
  a.framework = framework_of(value);
  a.source = nb::borrow(value);
  if (!is_array(value))
    refuse_type(value, name,
                "an array of NumPy, PyTorch, CuPy or JAX, or any other with __dlpack__");
  if (a.framework != Framework::numpy &&
      nb::bool_(nb::getattr(value, "requires_grad", nb::bool_(false))))
    refuse(name + " requires grad; accepted: arrays that do not, attn has no backward");

  // What DLPack cannot name goes as bytes of that size.
  const ElementType* hidden = nullptr;
  nb::object shown = a.source;
  if (a.framework == Framework::numpy) {
    nb::object dtype = value.attr("dtype");
    if (nb::cast<int>(dtype.attr("num")) >= 256) {  // ml_dtypes'
      hidden = find_type(dtype);
      if (!hidden)
        refuse(name + " is " + nb::cast<std::string>(nb::str(dtype)) +
               "; accepted of ml_dtypes: bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz");
      shown = value.attr("view")(nb::cast<int>(dtype.attr("itemsize")) == 2 ? "uint16" : "uint8");
    }
  } else if (a.framework == Framework::torch) {
    if (!torch_fp8) torch_fp8 = nb::module_::import_(helpers).attr("torch_fp8")().release().ptr();
    if (PyObject* found = PyDict_GetItemWithError(torch_fp8, value.attr("dtype").ptr())) {
      hidden = find_type(found);
      shown = value.attr("view")(once(torch_uint8, "torch", "uint8"));
    }
  }

  nb::object capsule = shown;  // NumPy's are taken as they are, read-only ones too
  if (a.framework != Framework::numpy) {
    const bool of_first = started_ && a.framework == first_.framework;
    if (a.framework == Framework::torch && (!started_ || of_first)) {
      capsule = once(to_dlpack, "torch.utils.dlpack", "to_dlpack")(shown);
    } else {
      nb::object at = shown.attr("__dlpack_device__")();
      const int device_type = nb::cast<int>(nb::int_(at[0]));
      const Device device = device_of(name, device_type, nb::cast<int>(nb::int_(at[1])));
      if (a.framework == Framework::jax) shown.attr("block_until_ready")();
      nb::object method = shown.attr("__dlpack__");
      if (device.host() || a.framework == Framework::jax) {
        capsule = method();
      } else if (a.framework == Framework::cupy && (!started_ || of_first)) {
        capsule = method(nb::arg("stream") = -1);
      } else {
        const intptr_t at_null = device.backend == ATTN_BACKEND_CUDA ? 1 : 0;
        capsule =
            method(nb::arg("stream") = stream_ ? reinterpret_cast<intptr_t>(stream_) : at_null);
      }
    }
  }
  if (!nb::try_cast(capsule, a.tensor, false))
    refuse(name +
           " cannot be read by DLPack; accepted: strided arrays whose strides are whole elements");
  a.device = device_of(name, a.tensor.device_type(), a.tensor.device_id());
  waits_ |= !a.device.host() && (a.framework == Framework::jax || a.framework == Framework::other);
  a.type = hidden ? *hidden : from_dlpack(a.tensor.dtype());
  return a;
}

Array Reader::first(nb::handle value, const std::string& name) {
  first_ = read(value, name);
  started_ = true;
  if (!first_.device.host())
    stream_ = reinterpret_cast<void*>(nb::cast<intptr_t>(
        once(stream_function, helpers, "stream")(framework_name(first_.framework), first_.source)));
  return first_;
}

Array Reader::next(nb::handle value, const std::string& name) {
  Array a = read(value, name);
  if (a.device != first_.device)
    refuse(name + " lies in " + a.device.text() + "; accepted: " + first_.device.text() +
           ", where " + first_.name + " is");
  return a;
}

Array Reader::output(nb::handle value, const std::string& name) {
  Array a = next(value, name);
  if (a.framework == Framework::jax)
    refuse(name + " is a JAX array, which does not change; accepted: None");
  if (a.framework != first_.framework)
    refuse(name + " is of another framework than " + first_.name + "; accepted: the same");
  if (a.framework == Framework::numpy && !nb::cast<bool>(value.attr("flags").attr("writeable")))
    refuse(name + " is read-only; accepted: an array that can be written");
  return a;
}

nb::object Reader::empty(const std::vector<int64_t>& shape, const ElementType& type) const {
  nb::list sizes;
  for (int64_t n : shape) sizes.append(n);
  if (first_.framework == Framework::other && !first_.device.host())
    refuse(std::string(
        "out is None; accepted for GPU arrays of this framework: an array for the result"));
  return once(empty_function, helpers, "empty")(framework_name(first_.framework), nb::tuple(sizes),
                                                type.numpy, first_.source);
}

nb::object Reader::full(const std::vector<int64_t>& shape, float value) const {
  nb::list sizes;
  for (int64_t n : shape) sizes.append(n);
  return once(full_function, helpers, "full")(framework_name(first_.framework), nb::tuple(sizes),
                                              value, first_.source);
}

}  // namespace attn::python
