// PyTorch's C functions for tensors, as DLPack 1.3 lays them out (DLPackExchangeAPI): a tensor is
// read in a tenth of the time that __dlpack__ takes. Found at run time; older versions of PyTorch
// lack them.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

namespace attn::python {

namespace nb = nanobind;

// `heads_first`: of four dimensions the second and third change places.
std::optional<nb::ndarray<nb::ro>> read_torch(nb::handle tensor, bool heads_first);
// The stream that is current on a device of DLPack's numbers.
std::optional<void*> torch_stream(int device_type, int device_id);

}  // namespace attn::python
