#include "arrays.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "exchange.h"

namespace attn::python {
namespace {

enum DlpackCode : uint8_t {
  Int = 0,
  UInt = 1,
  Float = 2,
  Bfloat = 4,
  Bool = 6,
  E4M3FN = 10,
  E4M3FNUZ = 11,
  E5M2 = 12
};

// What frameworks have arrays of.
constexpr struct {
  const char *name, *numpy;
  nb::dlpack::dtype dlpack;
} array_types[] = {
    {"f32", "float32", {Float, 32, 1}},
    {"f16", "float16", {Float, 16, 1}},
    {"bf16", "bfloat16", {Bfloat, 16, 1}},
    {"f8_e4m3fn", "float8_e4m3fn", {E4M3FN, 8, 1}},
    {"f8_e5m2", "float8_e5m2", {E5M2, 8, 1}},
    {"f8_e4m3fnuz", "float8_e4m3fnuz", {E4M3FNUZ, 8, 1}},
    {"f64", "float64", {Float, 64, 1}},
    {"i8", "int8", {Int, 8, 1}},
    {"u8", "uint8", {UInt, 8, 1}},
    {"bool", "bool", {Bool, 8, 1}},
    {"i32", "int32", {Int, 32, 1}},
    {"u32", "uint32", {UInt, 32, 1}},
    {"i64", "int64", {Int, 64, 1}},
    {"u64", "uint64", {UInt, 64, 1}},
};

constexpr ElementType another = {"another type", ""};

const ElementType& from_dlpack(nb::dlpack::dtype dtype) {
  for (const ElementType& type : types())
    if (type.dlpack.bits > 0 && type.dlpack == dtype) return type;
  return another;
}

// Looked up once: an import takes longer than all else here. Lives as long as the interpreter.
nb::handle once(PyObject*& slot, const char* module, const char* name) {
  if (!slot) slot = nb::object(nb::module_::import_(module).attr(name)).release().ptr();
  return slot;
}
PyObject *captured_function, *empty_function, *torch_empty_like, *full_function, *no_backward,
    *stream_function, *unreadable_function, *torch_fp8, *to_dlpack, *torch_uint8, *torch_tensor,
    *torch_grad, *numpy_array;
constexpr const char* helpers = "attn._frameworks";

// A name of an attribute, made once.
nb::handle word(PyObject*& slot, const char* text) {
  if (!slot) slot = PyUnicode_InternFromString(text);
  return slot;
}
PyObject *requires_grad_word, *is_neg_word, *new_empty_word;

nb::tuple tuple_of(const Sizes& sizes) {
  nb::list list;
  for (int64_t n : sizes) list.append(n);
  return nb::tuple(list);
}

bool is_numpy_array(nb::handle value) {
  return value.type().ptr() == once(numpy_array, "numpy", "ndarray").ptr();
}
// Not before a tensor has come, and PyTorch with it.
bool is_torch_tensor(nb::handle value) {
  return torch_tensor && value.type().ptr() == torch_tensor;
}

// Of a dimension, so that sums and products of sizes do not overflow before libattn checks them.
constexpr int64_t most_elements = int64_t{1} << 40;
constexpr size_t longest_text = 200;

// DLPack's number of the host and of GPUs' stream that all others wait for.
constexpr int dl_cpu = 1, dl_cuda = 2, dl_cuda_host = 3, dl_rocm = 10, dl_rocm_host = 11,
              dl_cuda_managed = 13;

Device device_of(const std::string& name, int64_t type, int64_t number) {
  const auto index = int32_t(number);
  if (index != number)
    refuse(name + " is on device " + std::to_string(number) + "; accepted: below 2^31");
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
  refuse(name + " is on a device of DLPack type " + std::to_string(type) +
         "; accepted: host, CUDA and ROCm memory");
}

// By the module that a class comes from.
Framework framework_of_class(nb::handle type) {
  const nb::object module = nb::getattr(type, "__module__", nb::none());
  if (!nb::isinstance<nb::str>(module)) return Framework::other;
  const char* name = PyUnicode_AsUTF8AndSize(module.ptr(), nullptr);
  PyErr_Clear();
  const auto begins = [&](const char* prefix) {
    const size_t n = std::strlen(prefix);
    return name && !std::strncmp(name, prefix, n) && (name[n] == 0 || name[n] == '.');
  };
  if (begins("numpy")) return Framework::numpy;
  if (begins("torch")) return Framework::torch;
  if (begins("cupy")) return Framework::cupy;
  if (begins("jaxlib") || begins("jax")) return Framework::jax;
  return Framework::other;
}

// Refuses an array whose memory is not its value, with the reason.
void refuse_hidden(const Array& a) {
  const nb::object reason =
      once(unreadable_function, helpers, "unreadable")(framework_name(a.framework), a.source);
  if (!reason.is_none()) refuse(a.name + " " + text_of(reason));
}

// A type that attn has no name for goes by its framework's: "complex64", "<U5", "int4".
void name_type(Array* array, nb::handle dtype) {
  std::string text = text_of(dtype);
  if (text.starts_with("torch.")) text.erase(0, std::strlen("torch."));
  if (!nb::cast<bool>(nb::getattr(dtype, "isnative", nb::bool_(true))))
    text += " (not this machine's byte order)";
  array->foreign_type = std::make_shared<const std::string>(std::move(text));
  array->type = another;
  array->type.name = array->foreign_type->c_str();
}

// Refuses what DLPack says nothing of: gradients, and memory that is not the value.
void refuse_unreadable(const Array& a) {
  const nb::handle value = a.source;
  if (is_numpy_array(value)) return;
  const bool plain = is_torch_tensor(value);  // other classes may answer every question themselves
  if (!plain) refuse_hidden(a);
  if (nb::bool_(nb::getattr(value, word(requires_grad_word, "requires_grad"), Py_False)) &&
      !(a.framework == Framework::torch &&
        !nb::bool_(once(torch_grad, "torch", "is_grad_enabled")())))
    refuse(a.name + " " + text_of(once(no_backward, helpers, "NO_BACKWARD")));
  if (plain && nb::bool_(value.attr(word(is_neg_word, "is_neg"))())) refuse_hidden(a);
}

}  // namespace

void refuse(const std::string& text) {
  throw error(ATTN_INVALID_ARGUMENT, text.c_str());
}

const std::vector<ElementType>& types() {
  static const std::vector<ElementType> all = [] {
    std::vector<ElementType> list;
    for (const attn_dtype_properties& p : dtypes()) {
      ElementType& type = list.emplace_back(ElementType{p.name, p.name, {}, p.type, p.kind});
      type.block_elements = p.block_elements, type.block_bytes = p.block_bytes;
      type.has_scales = p.has_scales, type.output_only = p.output_only;
      type.scale_bytes = p.scale_bytes, type.scale_elements = p.scale_elements;
    }
    for (const auto& a : array_types) {
      const auto same = [&](const ElementType& t) { return !std::strcmp(t.name, a.name); };
      auto at = std::find_if(list.begin(), list.end(), same);
      if (at == list.end()) at = list.insert(at, ElementType{a.name});
      at->numpy = a.numpy, at->dlpack = a.dlpack;
    }
    return list;
  }();
  return all;
}

std::string text_of(nb::handle value) {
  PyObject* text = PyObject_Str(value.ptr());
  const nb::object keep = nb::steal(text);
  const char* characters = text ? PyUnicode_AsUTF8AndSize(text, nullptr) : nullptr;
  PyErr_Clear();
  if (!characters) return "not text";
  std::string cut = characters;
  std::replace(cut.begin(), cut.end(), '\n', ' ');
  if (cut.size() <= longest_text) return cut;
  size_t end = longest_text;
  while ((cut[end] & 0xc0) == 0x80) --end;  // between two characters
  return cut.substr(0, end) + "...";
}

void refuse_type(nb::handle value, const std::string& name, const char* accepted) {
  const std::string type = text_of(nb::getattr(value.type(), "__name__", nb::none()));
  throw nb::type_error((name + " is a " + type + "; accepted: " + accepted).c_str());
}

bool boolean(nb::handle value, const std::string& name) {
  if (value.ptr() == Py_True) return true;
  if (value.ptr() == Py_False) return false;
  // numpy.bool's, and arrays of one without dimensions.
  const nb::object shape = nb::getattr(value, "shape", nb::none());
  const nb::object dtype = nb::getattr(value, "dtype", nb::none());
  int truth = -1;
  if (nb::isinstance<nb::tuple>(shape) && nb::len(shape) == 0 && !dtype.is_none()) {
    const ElementType* type = find_type(dtype);
    if (type && !std::strcmp(type->name, "bool")) truth = PyObject_IsTrue(value.ptr());
  }
  if (truth >= 0) return truth;
  PyErr_Clear();
  refuse_type(value, name, "a bool");
}

float number(nb::handle value, const std::string& name, const char* accepted) {
  const double wide = PyFloat_AsDouble(value.ptr());
  const bool failed = wide == -1 && PyErr_Occurred();
  const bool large = failed && PyErr_ExceptionMatches(PyExc_OverflowError);
  PyErr_Clear();
  if (failed && !large) refuse_type(value, name, accepted);
  if (large || (std::isfinite(wide) && std::abs(wide) > FLT_MAX) || (wide != 0 && float(wide) == 0))
    refuse(name + " is " + text_of(value) + "; accepted: " + accepted + " that f32 can hold");
  return float(wide);
}

std::string text(nb::handle value, const std::string& name, const char* accepted) {
  if (!nb::isinstance<nb::str>(value)) refuse_type(value, name, accepted);
  Py_ssize_t size;
  const char* characters = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (characters && std::strlen(characters) == size_t(size)) return characters;
  PyErr_Clear();
  refuse(name + " has characters that no name has; accepted: " + accepted);
}

int64_t integer(nb::handle value, const std::string& name, const char* accepted, int64_t low,
                int64_t high, const char* range) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  PyErr_Clear();
  if (!index) refuse_type(value, name, accepted);
  int overflow;
  const long long result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow || result < low || result > high)
    refuse(name + " is " + text_of(index) +
           "; accepted: " + (range ? range : std::to_string(low) + " to " + std::to_string(high)));
  return result;
}

std::pair<int64_t, int64_t> integers(nb::handle pair, const std::string& name,
                                     const char* accepted) {
  const bool two = PyObject_Size(pair.ptr()) == 2;
  PyErr_Clear();
  const nb::object first =
      nb::steal(two ? PyObject_GetItem(pair.ptr(), nb::int_(0).ptr()) : nullptr);
  PyErr_Clear();
  const nb::object second =
      nb::steal(two ? PyObject_GetItem(pair.ptr(), nb::int_(1).ptr()) : nullptr);
  PyErr_Clear();
  if (!first || !second) refuse_type(pair, name, accepted);
  return {integer(first, name + "[0]", accepted), integer(second, name + "[1]", accepted)};
}

const ElementType* find_type(nb::handle dtype) {
  nb::object named = nb::borrow(dtype);  // text, or torch.float16
  if (!nb::isinstance<nb::str>(dtype)) {
    named = nb::getattr(dtype, "name", nb::none());                           // a numpy.dtype
    if (named.is_none()) named = nb::getattr(dtype, "__name__", nb::none());  // numpy.float16
    if (named.is_none()) named = nb::borrow(dtype);
  }
  std::string name = text_of(named);
  if (const size_t dot = name.rfind('.'); dot != std::string::npos) name.erase(0, dot + 1);
  for (const ElementType& type : types())
    if (name == type.name || name == type.numpy) return &type;
  return nullptr;
}

const ElementType& find_type(const char* name) {
  const ElementType* type = types().data();
  while (std::strcmp(type->name, name) != 0) ++type;
  return *type;
}

const ElementType& find_type(attn_dtype type) {
  for (const ElementType& t : types())
    if (t.type == type) return t;
  static constexpr ElementType none = {};
  return none;
}

std::string shape_text(const Sizes& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

Framework framework_of(nb::handle array) {
  if (is_numpy_array(array)) return Framework::numpy;
  if (is_torch_tensor(array)) return Framework::torch;
  Framework found = framework_of_class(array.type());
  if (found == Framework::torch) once(torch_tensor, "torch", "Tensor");
  if (found != Framework::other) return found;
  const nb::object classes = nb::getattr(array.type(), "__mro__", nb::none());
  if (!nb::isinstance<nb::tuple>(classes)) return found;
  for (nb::handle base : nb::borrow<nb::tuple>(classes))
    if (found == Framework::other) found = framework_of_class(base);
  return found;
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
  // A tracer of JAX has none; a class has, but is no array.
  return !PyType_Check(value.ptr()) && nb::hasattr(value, "__dlpack_device__");
}

std::string Device::text() const {
  return host() ? "host memory"
                : std::string(attn_backend_string(backend)) + " device " + std::to_string(index);
}

void Array::need_shape(const Sizes& want, const char* form) const {
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

void Array::need_floats() const {
  if (!type.is_float())
    refuse(name + " is " + type.name + "; accepted: " + names_of(&ElementType::is_float));
}

const void* Array::address() const {
  static const int64_t nothing = 0;
  return data() ? data() : &nothing;
}

bool Array::empty() const {
  for (size_t i = 0; i < tensor.ndim(); ++i)
    if (size(i) == 0) return true;
  return false;
}

bool Array::contiguous() const {
  if (empty()) return true;  // strides of no elements are anything
  int64_t stride = 1;
  for (size_t i = tensor.ndim(); i-- > 0;) {
    if (size(i) > 1 && tensor.stride(i) != stride) return false;
    if (__builtin_mul_overflow(stride, size(i), &stride)) return false;
  }
  return true;
}

void Array::need_contiguous() const {
  if (!contiguous()) refuse(name + " is not contiguous; accepted: a contiguous array");
}

Sizes Array::outer_strides(int64_t block_bytes, int64_t block_elements) const {
  const size_t last = tensor.ndim() - 1;
  Sizes strides(last, 0);
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

void Reader::import(Array* array) {
  Array& a = *array;
  const nb::handle value = a.source;
  if (!fresh_) refuse_unreadable(a);

  // A tensor of the first one's framework is used in that one's stream, as it is.
  const bool of_first = !started_ || a.framework == first_.framework;
  if ((is_numpy_array(value) && read_numpy(value, &a.tensor)) ||
      (is_torch_tensor(value) && of_first && read_torch(value, &a.tensor))) {
    if (heads_first && a.tensor.ndim() == 4) a.tensor.swap(1, 2);
    a.type = from_dlpack(a.tensor.type);
    return;
  }

  // What DLPack cannot name goes as bytes of that size.
  const ElementType* hidden = nullptr;
  nb::object shown = a.source;
  if (heads_first && nb::cast<int>(value.attr("ndim")) == 4) shown = value.attr("transpose")(1, 2);
  if (a.framework == Framework::numpy) {
    nb::object dtype = value.attr("dtype");
    if (nb::cast<int>(dtype.attr("num")) >= 256) {  // ml_dtypes'
      hidden = find_type(dtype);
      if (!hidden && is_foreign(&a)) return;
      shown = value.attr("view")(nb::cast<int>(dtype.attr("itemsize")) == 2 ? "uint16" : "uint8");
    }
  } else if (a.framework == Framework::torch) {
    if (!torch_fp8) torch_fp8 = nb::module_::import_(helpers).attr("torch_fp8")().release().ptr();
    if (PyObject* found = PyDict_GetItemWithError(torch_fp8, value.attr("dtype").ptr())) {
      hidden = find_type(found);
      shown = shown.attr("view")(once(torch_uint8, "torch", "uint8"));
    }
  }

  nb::object capsule = shown;  // NumPy's are taken as they are, read-only ones too
  if (a.framework != Framework::numpy) {
    if (a.framework == Framework::torch && of_first) {
      capsule = once(to_dlpack, "torch.utils.dlpack", "to_dlpack")(shown);
    } else {
      const auto [type, index] =
          integers(shown.attr("__dlpack_device__")(), a.name + "'s __dlpack_device__()",
                   "a pair of integers (type, index)");
      const Device device = device_of(a.name, type, index);
      if (a.framework == Framework::jax) shown.attr("block_until_ready")();
      nb::object method = shown.attr("__dlpack__");
      if (device.host() || a.framework == Framework::jax) {
        capsule = method();
      } else if (a.framework == Framework::cupy && of_first) {
        capsule = method(nb::arg("stream") = -1);
      } else {
        const intptr_t at_null = device.backend == ATTN_BACKEND_CUDA ? 1 : 0;
        capsule =
            method(nb::arg("stream") = stream_ ? reinterpret_cast<intptr_t>(stream_) : at_null);
      }
    }
  }
  if (!nb::try_cast(capsule, a.held, false)) {
    if (is_foreign(&a)) return;
    refuse(a.name +
           " cannot be read by DLPack; accepted: strided arrays whose strides are whole elements");
  }
  const size_t dims = a.held.ndim();
  if (dims > most_dims)
    refuse(a.name + " has " + std::to_string(dims) + " dimensions; accepted: at most " +
           std::to_string(most_dims));
  View& view = a.tensor;
  view.address = const_cast<void*>(a.held.data());
  view.sizes = view.strides = Sizes(dims, 0);
  for (size_t i = 0; i < dims; ++i) {
    view.sizes[i] = int64_t(a.held.shape(i));
    view.strides[i] = a.held.stride(i);
  }
  view.type = a.held.dtype();
  view.device_type = a.held.device_type();
  view.device_id = a.held.device_id();
  if (a.framework == Framework::numpy)
    view.writable = nb::cast<bool>(value.attr("flags").attr("writeable"));
  a.type = hidden ? *hidden : from_dlpack(view.type);
}

bool Reader::is_foreign(Array* array) const {
  Array& a = *array;
  const nb::object dtype = nb::getattr(a.source, "dtype", nb::none());
  std::vector<int64_t> shape;
  const bool native = nb::cast<bool>(nb::getattr(dtype, "isnative", nb::bool_(true)));
  if (dtype.is_none() || (native && find_type(dtype)) ||
      !nb::try_cast(nb::getattr(a.source, "shape", nb::none()), shape) || shape.size() > most_dims)
    return false;
  static int64_t nothing = 0;
  View& view = a.tensor;
  view = {};
  view.address = &nothing;
  view.sizes = Sizes(shape.data(), shape.data() + shape.size());
  view.strides = Sizes(shape.size(), 0);
  if (started_) {
    view.device_type = first_.tensor.device_type;
    view.device_id = first_.tensor.device_id;
  }
  name_type(&a, dtype);
  return true;
}

Array Reader::read(nb::handle value, const std::string& name) {
  Array a;
  a.name = name;
  a.framework = framework_of(value);
  a.source = nb::borrow(value);
  if (!is_numpy_array(value) && !is_torch_tensor(value) && !is_array(value))
    refuse_type(value, name,
                "an array of NumPy, PyTorch, CuPy or JAX, or any other with __dlpack__");
  try {
    import(&a);
  } catch (const nb::python_error& raised) {
    // The framework's: no memory, or more than one device.
    if (!raised.matches(PyExc_Exception) || raised.matches(PyExc_MemoryError)) throw;
    if (a.framework == Framework::torch) refuse_hidden(a);  // which knows it better
    if (!is_foreign(&a))
      refuse(name + " cannot be read: " + text_of(raised.value()) +
             "; accepted: strided arrays in the memory of one device");
  }
  // PyTorch says of its integers of 1 to 7 bits that they have 8.
  const bool bytes = a.framework == Framework::torch && a.tensor.type.bits == 8 && !a.foreign_type;
  if (a.type.name == another.name || (bytes && !find_type(value.attr("dtype"))))
    if (const nb::object dtype = nb::getattr(value, "dtype", nb::none()); !dtype.is_none())
      name_type(&a, dtype);
  for (size_t i = 0; i < a.tensor.ndim(); ++i)
    if (a.size(i) >= most_elements)
      refuse(name + " has shape " + shape_text(a.shape()) + "; accepted: dimensions below 2^40");
  if (!a.empty() && !a.data()) {
    if (a.framework == Framework::torch) refuse_hidden(a);
    refuse(name + " has no memory; accepted: arrays with memory of their own");
  }
  a.device = device_of(name, a.tensor.device_type, a.tensor.device_id);
  waits_ |= !a.device.host() && (a.framework == Framework::jax || a.framework == Framework::other);
  return a;
}

Array Reader::first(nb::handle value, const std::string& name) {
  first_ = read(value, name);
  started_ = true;
  if (first_.device.host()) return first_;
  std::optional<void*> found;
  if (first_.framework == Framework::torch)
    found = torch_stream(first_.tensor.device_type, first_.tensor.device_id);
  stream_ =
      found ? *found
            : reinterpret_cast<void*>(nb::cast<intptr_t>(once(stream_function, helpers, "stream")(
                  framework_name(first_.framework), first_.source)));
  return first_;
}

Array Reader::next(nb::handle value, const std::string& name) {
  Array a = read(value, name);
  if (a.device != first_.device)
    refuse(name + " is in " + a.device.text() + "; accepted: " + first_.device.text() + ", where " +
           first_.name + " is");
  return a;
}

Array Reader::output(nb::handle value, const std::string& name, const char* accepted) {
  Array a = next(value, name);
  if (a.framework == Framework::jax)
    refuse(name + " is a JAX array, which does not change; accepted: " + accepted);
  if (a.framework != first_.framework)
    refuse(name + " is of another framework than " + first_.name + "; accepted: the same");
  if (!a.tensor.writable) refuse(name + " is read-only; accepted: an array that can be written");
  return a;
}

Array Reader::like_first(const std::string& name, int64_t last) {
  const size_t n = first_.tensor.ndim();
  nb::object made;
  if (first_.size(n - 1) == last) {
    made = once(torch_empty_like, "torch", "empty_like")(first_.source);
  } else {
    Sizes shape = first_.shape();
    shape[n - 1] = last;
    if (heads_first) std::swap(shape[1], shape[2]);
    made = first_.source.attr(word(new_empty_word, "new_empty"))(tuple_of(shape));
  }
  fresh_ = true;
  Array a = next(made, name);
  fresh_ = false;
  return a;
}

nb::object Reader::captured(size_t bytes) const {
  if (first_.framework != Framework::torch || first_.device.host()) return nb::none();
  return once(captured_function, helpers, "captured")(bytes, first_.source);
}

// JAX may make f32 of f64.
Array Reader::made(nb::handle value, const std::string& name, const Sizes& shape,
                   const ElementType& type) {
  Array a =
      next(value, fresh_ ? name : name + " as " + framework_name(first_.framework) + " makes it");
  a.need_type(type.name);
  a.need_shape(shape, "the result's");
  a.need_contiguous();
  return a;
}

Array Reader::empty(const std::string& name, const Sizes& shape, const ElementType& type) {
  if (first_.framework == Framework::other && !first_.device.host())
    refuse(std::string(
        "out is None; accepted for GPU arrays of this framework: an array for the result"));
  if (!std::strcmp(framework_name(first_.framework), "numpy")) {
    Array a;
    a.name = name;
    a.type = type;
    a.source = new_numpy(shape, type.dlpack, &a.tensor);
    if (!a.source.is_none()) return a;
  }
  if (is_torch_tensor(first_.source) && !std::strcmp(type.name, first_.type.name)) {
    // Faster, and the same.
    const bool like =
        !heads_first && std::ranges::equal(shape, first_.shape()) && first_.contiguous();
    fresh_ = true;
    Array a = made(like ? once(torch_empty_like, "torch", "empty_like")(first_.source)
                        : first_.source.attr(word(new_empty_word, "new_empty"))(tuple_of(shape)),
                   name, shape, type);
    fresh_ = false;
    return a;
  }
  return made(once(empty_function, helpers, "empty")(framework_name(first_.framework),
                                                     tuple_of(shape), type.numpy, first_.source),
              name, shape, type);
}

Array Reader::full(const std::string& name, const Sizes& shape, float value) {
  return made(once(full_function, helpers, "full")(framework_name(first_.framework),
                                                   tuple_of(shape), value, first_.source),
              name, shape, find_type("f32"));
}

}  // namespace attn::python
