// Arrays read without DLPack's Python methods, in a tenth of their time.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>

namespace attn::python {

namespace nb = nanobind;

// More than any argument has.
constexpr size_t most_dims = 8;

// A number for each dimension.
class Sizes {
 public:
  Sizes() = default;
  Sizes(const int64_t* begin, const int64_t* end) : count_(size_t(end - begin)) {
    std::copy(begin, end, values_);
  }
  Sizes(std::initializer_list<int64_t> values) : Sizes(values.begin(), values.end()) {}
  Sizes(size_t count, int64_t value) : count_(count) { std::fill_n(values_, count, value); }

  size_t size() const { return count_; }
  int64_t* begin() { return values_; }
  int64_t* end() { return values_ + count_; }
  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + count_; }
  int64_t& operator[](size_t i) { return values_[i]; }
  int64_t operator[](size_t i) const { return values_[i]; }
  int64_t& back() { return values_[count_ - 1]; }
  void pop_back() { --count_; }

 private:
  size_t count_ = 0;
  int64_t values_[most_dims];
};

// An array's memory, in DLPack's words; strides are elements.
struct View {
  void* address = nullptr;
  Sizes sizes, strides;
  nb::dlpack::dtype type{};
  int32_t device_type = nb::device::cpu::value, device_id = 0;
  bool writable = true;  // as far as its framework says

  size_t ndim() const { return sizes.size(); }
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
nb::object new_numpy(const Sizes& sizes, nb::dlpack::dtype type, View* view);

}  // namespace attn::python
