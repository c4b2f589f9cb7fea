// safetensors files: u64 header length, JSON header, tensor bytes; all little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "result.h"

namespace attn::tools {

enum class Dtype {
  boolean,
  u8,
  i8,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  f64,
  i64,
  u64,
  f8_e4m3,
  f8_e5m2
};

std::string_view dtype_name(Dtype dtype);  // as in the file: "F32"
size_t dtype_bytes(Dtype dtype);           // 1, 2, 4 or 8
std::optional<Dtype> dtype_from_name(std::string_view name);

// Product of the dimensions, or nothing if one is negative or it passes 2^62.
std::optional<int64_t> element_count(std::span<const int64_t> shape);
std::string shape_text(std::span<const int64_t> shape);  // "[2, 3]"

// A name from a file made fit for a one-line message: quoted, control bytes escaped, cut when long.
std::string quote(std::string_view name);

// A 64-byte aligned block of bytes. Shared, so that a Tensor can be copied at no cost.
using Bytes = std::shared_ptr<std::byte[]>;
Bytes allocate_bytes(size_t count);  // not initialised; throws std::bad_alloc

struct Tensor {
  Dtype dtype = Dtype::f32;
  std::vector<int64_t> shape;
  Bytes data;  // dense, row-major, 64-byte aligned
  size_t bytes = 0;

  int64_t elements() const { return static_cast<int64_t>(bytes / dtype_bytes(dtype)); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data.get());
  }
};

Tensor make_tensor(Dtype dtype, std::vector<int64_t> shape);  // not initialised

struct TensorFile {
  std::string label;  // what messages call the file
  std::map<std::string, Tensor, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;

  const Tensor* find(std::string_view name) const;
};

// Both check everything the format demands before a tensor byte is touched: header length, JSON,
// field types, known dtypes, byte sizes, offsets without gap or overlap, no name twice.
Result<TensorFile> read_tensors(const std::string& path);
Result<TensorFile> parse_tensors(std::span<const std::byte> file, std::string label);

Status write_tensors(const std::string& path, const TensorFile& file);

// Writes path.tmp-<pid> next to `path`, syncs it and renames it, so that a failure leaves what was
// there. A path that exists must be a regular file.
Status write_file(const std::string& path, const std::vector<std::span<const std::byte>>& parts);

}  // namespace attn::tools
