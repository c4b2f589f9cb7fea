// What calls that write a cache have in common: arguments by name, and the cache.
#pragma once
#include <memory>
#include <vector>

#include "call.h"

namespace attn::python {

class CacheCall {
 public:
  CacheCall(const CacheCall&) = delete;

 protected:
  static constexpr const char* writable = "arrays of NumPy, PyTorch or CuPy";
  // Names of arguments; dims_of: what has the heads and their dimensions.
  struct CacheNames {
    const char *k, *v, *block_table, *dims_of;
    bool slots = false;  // pages without a table
  };
  struct CacheDims {
    int64_t batch, heads_kv, head_dim, head_dim_v;
    bool v_in_k;  // there are no values but those in k
  };

  explicit CacheCall(const nb::dict& arguments) : arguments_(arguments) {}

  nb::object argument(const char* name) const { return nb::object(arguments_[name]); }
  bool given(const char* name) const { return !argument(name).is_none(); }
  const Array& keep(Array array);
  const Array& next(const char* name) { return keep(reader_.next(argument(name), name)); }
  const Array& output(const char* name, const char* accepted) {
    return keep(reader_.output(argument(name), name, accepted));
  }
  // k and v, with k_type, v_type, k_scale, v_scale, and the pages if there is a block table.
  void read_cache(const CacheNames& names, const CacheDims& dims, attn_segment* segment,
                  attn_segment_args* args);
  // k_descale and v_descale.
  void read_descales(const CacheDims& dims, attn_segment* segment, attn_segment_args* args);
  // Of `batch` sequences.
  int32_t* lengths_of(const Array& lengths, int64_t batch) const;

  Reader reader_;

 private:
  attn_dtype read_rows(const Array& a, int64_t batch, int64_t rows, const char* form,
                       int64_t heads_kv, int64_t dim, const char* type_name, const char* dims_of);
  const void* read_row_scales(const char* name, const Array& of, attn_dtype type, int64_t dim,
                              attn_strides* stride);
  attn_descale_kind read_descale(const char* name, const CacheDims& dims, attn_segment* segment,
                                 const float** pointer);

  nb::dict arguments_;
  std::vector<std::unique_ptr<Array>> arrays_;
};

}  // namespace attn::python
