// Arrays read without DLPack's Python methods, in a tenth of their time.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>

namespace attn::python {

namespace nb = nanobind;

// More than any argument has.
constexpr size_t most_dims = 8;

// An array's memory, in DLPack's words; strides are elements.
struct View {
  void* address = nullptr;
  size_t dims = 0;
  int64_t sizes[most_dims], strides[most_dims];
  nb::dlpack::dtype type{};
  int32_t device_type = nb::device::cpu::value, device_id = 0;
  bool writable = true;  // as far as its framework says

  size_t ndim() const { return dims; }
  int64_t shape(size_t i) const { return sizes[i]; }
  int64_t stride(size_t i) const { return strides[i]; }
  void swap(size_t i, size_t j) {
    std::swap(sizes[i], sizes[j]);
    std::swap(strides[i], strides[j]);
  }
};

// PyTorch's C functions for tensors, as DLPack 1.3 lays them out (DLPackExchangeAPI), found at run
// time. False for older versions of PyTorch, which lack them, and tensors that they refuse.
bool read_torch(nb::handle tensor, View* view);
// The stream that is current on a device of DLPack's numbers.
std::optional<void*> torch_stream(int device_type, int device_id);

// NumPy's C ABI, of 1.x and 2.x. `array` is a numpy.ndarray itself. False for another ABI, and
// types and strides that DLPack does not have.
bool read_numpy(nb::handle array, View* view);
// A new one, contents undefined, and what there is to read of it. None for a type that is not
// NumPy's own.
nb::object new_numpy(const int64_t* sizes, size_t dims, nb::dlpack::dtype type, View* view);

}  // namespace attn::python
