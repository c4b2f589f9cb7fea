#include "exchange.h"

namespace attn::python {
namespace {

struct Tensor {  // DLTensor
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  nb::dlpack::dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Table {  // DLPackExchangeAPI, version 1
  uint32_t major, minor;
  Table* previous;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*to_tensor)(void* object, Tensor* out);  // may be null
  int (*stream)(int device_type, int32_t device_id, void** out);
};
static_assert(sizeof(Tensor) == 48 && sizeof(Table) == 56);

// Looked up once; null if this PyTorch has none.
const Table* table() {
  static const Table* found = [] {
    const nb::object type = nb::module_::import_("torch").attr("Tensor");
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    void* pointer =
        capsule.is_none() ? nullptr : PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    PyErr_Clear();
    const auto* t = static_cast<const Table*>(pointer);
    while (t && t->major != 1) t = t->previous;
    return t && t->to_tensor && t->stream ? t : nullptr;
  }();
  return found;
}

}  // namespace

std::optional<nb::ndarray<nb::ro>> read_torch(nb::handle tensor, bool heads_first) {
  const Table* t = table();
  if (!t) return std::nullopt;
  Tensor read;
  if (t->to_tensor(tensor.ptr(), &read) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  static_assert(sizeof(size_t) == sizeof(int64_t));
  int64_t shape[4], strides[4];
  if (heads_first && read.ndim == 4) {
    for (int i = 0; i < 4; ++i) {
      const int from = i == 1 ? 2 : i == 2 ? 1 : i;
      shape[i] = read.shape[from];
      strides[i] = read.strides[from];
    }
    read.shape = shape;
    read.strides = strides;
  }
  return nb::ndarray<nb::ro>(static_cast<char*>(read.data) + read.byte_offset, size_t(read.ndim),
                             reinterpret_cast<const size_t*>(read.shape), tensor, read.strides,
                             read.dtype, read.device_type, read.device_id);
}

std::optional<void*> torch_stream(int device_type, int device_id) {
  const Table* t = table();
  void* stream = nullptr;
  if (!t || t->stream(device_type, device_id, &stream) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return stream;
}

}  // namespace attn::python
