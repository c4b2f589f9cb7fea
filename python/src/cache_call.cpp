#include "cache_call.h"

#include <string>

namespace attn::python {

const Array& CacheCall::keep(Array array) {
  arrays_.push_back(std::make_unique<Array>(std::move(array)));
  return *arrays_.back();
}

// The type. Their shape is given but for the elements of a row, of which blocks have another number
// of bytes.
attn_dtype CacheCall::read_rows(const Array& a, int64_t batch, int64_t rows, const char* form,
                                int64_t heads_kv, int64_t dim, const char* type_name,
                                const char* dims_of) {
  a.need_shape({batch, rows, heads_kv, -1}, form);
  const auto [type, elements] = kv_type(a, dim, argument(type_name));
  if (elements != dim)
    refuse(a.name + ": a row has " + std::to_string(elements) +
           " elements; accepted: " + std::to_string(dim) + " as of " + dims_of);
  return type;
}

const void* CacheCall::read_row_scales(const char* name, const Array& of, attn_dtype type,
                                       int64_t dim, attn_strides* stride) {
  if (given(name) != find_type(type).has_scales)
    refuse(std::string(name) + (given(name) ? " is given" : " is None") + "; accepted for " +
           of.name + " in " + find_type(type).name +
           (given(name) ? ": None" : ": " + scales_form(type)));
  return given(name) ? read_scales(output(name, writable), of, type, dim, stride) : nullptr;
}

void CacheCall::read_cache(const CacheNames& names, const CacheDims& dims, attn_segment* segment,
                           attn_segment_args* args) {
  attn_segment& s = *segment;
  const Array& k = output(names.k, writable);
  const bool v_in_k = dims.v_in_k;
  segment->v_in_k = v_in_k;
  if (v_in_k && given(names.v))
    refuse(std::string(names.v) + " is given; accepted without new values: None");
  const bool paged = names.slots || given(names.block_table);
  s.k_type = read_rows(k, paged ? -1 : dims.batch, -1,
                       paged ? "[pages, page_size, Hkv, D]" : "[B, S, Hkv, D]", dims.heads_kv,
                       dims.head_dim, "k_type", names.dims_of);
  s.k_stride = strides_of(k, s.k_type);
  args->k = k.data();
  args->k_scale = read_row_scales("k_scale", k, s.k_type, dims.head_dim, &s.k_scale_stride);
  if (!v_in_k) {
    const Array& v = output(names.v, writable);
    const std::string v_form = std::string(names.k) + "'s shape except the last dimension";
    s.v_type = read_rows(v, k.size(0), k.size(1), v_form.c_str(), dims.heads_kv, dims.head_dim_v,
                         "v_type", names.dims_of);
    s.v_stride = strides_of(v, s.v_type);
    args->v = v.data();
    args->v_scale = read_row_scales("v_scale", v, s.v_type, dims.head_dim_v, &s.v_scale_stride);
  }
  if (names.slots)
    set_pages(k, &s);
  else if (paged)
    args->block_table = read_pages(k, next(names.block_table), dims.batch, &s);
  else
    s.seqlen = k.size(1);
}

attn_descale_kind CacheCall::read_descale(const char* name, const CacheDims& dims,
                                          attn_segment* segment, const float** pointer) {
  if (!given(name)) return ATTN_DESCALE_NONE;
  const Array& a = next(name);
  *pointer = static_cast<const float*>(a.address());
  return descale_kind(a, dims.batch, dims.heads_kv, segment);
}

void CacheCall::read_descales(const CacheDims& dims, attn_segment* segment,
                              attn_segment_args* args) {
  segment->k_descale = read_descale("k_descale", dims, segment, &args->k_descale);
  segment->v_descale = read_descale("v_descale", dims, segment, &args->v_descale);
}

int32_t* CacheCall::lengths_of(const Array& lengths, int64_t batch) const {
  lengths.need_type("i32");
  lengths.need_shape({batch}, "[B]");
  lengths.need_contiguous();
  return static_cast<int32_t*>(const_cast<void*>(lengths.address()));
}

}  // namespace attn::python
