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

bool read_torch(nb::handle tensor, View* view) {
  const Table* t = table();
  if (!t) return false;
  Tensor read;
  if (t->to_tensor(tensor.ptr(), &read) != 0) {
    PyErr_Clear();
    return false;
  }
  if (read.ndim > int(most_dims)) return false;
  view->address = static_cast<char*>(read.data) + read.byte_offset;
  view->sizes = {read.shape, read.shape + read.ndim};
  view->strides = {read.strides, read.strides + read.ndim};
  view->type = read.dtype;
  view->device_type = read.device_type;
  view->device_id = read.device_id;
  return true;
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
