#include <iterator>
#include <type_traits>

#include "exchange.h"

namespace attn::python {
namespace {

// What NumPy's C ABI fixes: the fields of its objects, and the places of its functions.
struct Type {  // PyArray_Descr
  PyObject head;
  PyObject* scalar;
  char kind, letter, byte_order, reserved;
  int number;
};
struct Object {  // PyArrayObject_fields
  PyObject head;
  char* data;
  int dims;
  intptr_t* sizes;
  intptr_t* strides;  // bytes
  PyObject* base;
  Type* type;
  int flags;
};
static_assert(std::is_same_v<intptr_t, int64_t>);
constexpr int writeable = 0x400;
constexpr unsigned abi_1 = 0x1000009, abi_2 = 0x2000000;
constexpr size_t version_place = 0, array_place = 2, new_place = 93;
using New = PyObject* (*)(void* type, int dims, const intptr_t* sizes, int number,
                          const intptr_t* strides, void* data, int bytes, int flags, PyObject*);

// NumPy's types by number, those of the same size under the one that the platform prefers.
constexpr uint8_t integer = 0, natural = 1, real = 2, truth = 6;
struct Known {
  int number;
  nb::dlpack::dtype type;
};
constexpr Known known[] = {
    {11, {real, 32, 1}},   {23, {real, 16, 1}},   {12, {real, 64, 1}},   {5, {integer, 32, 1}},
    {7, {integer, 64, 1}}, {9, {integer, 64, 1}}, {2, {natural, 8, 1}},  {1, {integer, 8, 1}},
    {0, {truth, 8, 1}},    {6, {natural, 32, 1}}, {8, {natural, 64, 1}}, {10, {natural, 64, 1}},
};

// NumPy's functions; null if it has another ABI.
void* const* functions() {
  static void* const* found = []() -> void* const* {
    PyObject* module = PyImport_ImportModule("numpy._core._multiarray_umath");
    if (!module) {  // before 2.0
      PyErr_Clear();
      module = PyImport_ImportModule("numpy.core._multiarray_umath");
    }
    const nb::object keep = nb::steal(module);
    const nb::object capsule =
        nb::steal(module ? PyObject_GetAttrString(module, "_ARRAY_API") : nullptr);
    auto* table =
        capsule ? static_cast<void* const*>(PyCapsule_GetPointer(capsule.ptr(), nullptr)) : nullptr;
    PyErr_Clear();
    if (!table) return nullptr;
    const unsigned version = reinterpret_cast<unsigned (*)()>(table[version_place])();
    return version == abi_1 || version == abi_2 ? table : nullptr;
  }();
  return found;
}

}  // namespace

bool read_numpy(nb::handle array, View* view) {
  if (!functions()) return false;
  const auto* a = reinterpret_cast<const Object*>(array.ptr());
  if (a->dims > int(most_dims) || a->type->byte_order == '>') return false;
  const Known* type = known;
  while (type != std::end(known) && type->number != a->type->number) ++type;
  if (type == std::end(known)) return false;
  const intptr_t bytes = type->type.bits / 8;
  view->address = a->data;
  view->sizes = {a->sizes, a->sizes + a->dims};
  view->strides = {a->strides, a->strides + a->dims};
  for (int64_t& stride : view->strides) {
    if (stride % bytes != 0) return false;
    stride /= bytes;
  }
  view->type = type->type;
  view->writable = a->flags & writeable;
  return true;
}

nb::object new_numpy(const Sizes& sizes, nb::dlpack::dtype type, View* view) {
  const Known* found = known;
  while (found != std::end(known) && found->type != type) ++found;
  if (!functions() || found == std::end(known)) return nb::none();
  const auto make = reinterpret_cast<New>(functions()[new_place]);
  PyObject* made = make(functions()[array_place], int(sizes.size()), sizes.begin(), found->number,
                        nullptr, nullptr, 0, 0, nullptr);
  if (!made) nb::raise_python_error();
  read_numpy(made, view);
  return nb::steal(made);
}

}  // namespace attn::python
