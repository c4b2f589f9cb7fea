// Segments of K/V in the emulator's memory. Everything that must not be read is NaN.
#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "core/ggml.h"
#include "gfx9/maker.h"

namespace attn::test {

struct Keys {
  int64_t capacity;
  attn_layout layout = ATTN_PADDED;
  std::vector<int32_t> lengths = {};  // given: seqlens, or cu_seqlens of packed ones
  int32_t page_size = 16;
  int bad_page = -1;  // of each sequence
};

// Types of a problem of the kernel.
struct Types {
  attn_dtype q, k, v;
  attn_descale_kind q_descale, k_descale, v_descale;
  bool special = false;  // some codes of e4m3fn are NaN or -0
};
inline uint32_t nan_of(attn_dtype type) {
  return type == ATTN_F8_E4M3FNUZ ? 0x80 : type == ATTN_F8_E4M3FN ? 0xff : 0x7fff;
}
inline uint32_t code_of(attn_dtype type, double x) {
  return dtype_is_fp8(type) ? encode(fp8_format(type), x, true)
                            : encode(type == ATTN_F16 ? f16_format : bf16_format, x, false);
}

inline void put(std::vector<uint8_t>* bytes, size_t at, const void* from, size_t size) {
  std::memcpy(bytes->data() + at, from, size);
}

// Rows of normal numbers where `there(row)` says so, NaN elsewhere.
template <class There>
std::vector<uint8_t> rows(Maker& m, attn_dtype type, int64_t count, int64_t dim, double sigma,
                          bool special, There&& there) {
  const int64_t row_bytes = dtype_bytes(type, dim);
  std::vector<uint8_t> bytes(size_t(count * row_bytes), 0xff);
  std::normal_distribution<double> normal(0, sigma);
  for (int64_t row = 0; row < count; ++row) {
    const bool real = there(row);
    if (dtype_is_ggml(type)) {
      for (int64_t d = 0; real && d < dim; d += 32) {
        float x[32];
        for (float& value : x) value = float(normal(m.rng()));
        encode_block(type, x, bytes.data() + row * row_bytes + dtype_bytes(type, d), true);
      }
      continue;
    }
    for (int64_t d = 0; d < dim; ++d) {
      uint32_t code = real ? code_of(type, normal(m.rng())) : nan_of(type);
      if (real && special && type == ATTN_F8_E4M3FN && m.rng()() % 8 == 0) {
        constexpr uint32_t some[] = {0x7f, 0xff, 0x80};
        code = some[m.rng()() % 3];
      }
      put(&bytes, size_t(row * row_bytes + dtype_bytes(type, d)), &code, size_t(dtype_bytes(type)));
    }
  }
  return bytes;
}

inline std::vector<uint8_t> bytes_of(const std::vector<int32_t>& values) {
  std::vector<uint8_t> bytes(values.size() * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
inline std::vector<uint8_t> floats(Maker& m, int64_t count, float size) {
  std::vector<uint8_t> bytes(size_t(count) * 4);
  for (int64_t i = 0; i < count; ++i) {
    const float x = size * float(int(m.rng()() % 64) - 32) / 32;
    put(&bytes, size_t(i) * 4, &x, 4);
  }
  return bytes;
}

// sigma: of K.
inline void add_segment(Maker& m, int64_t batch, int64_t heads_kv, const Types& types,
                        const Keys& keys, attn_segment* segment, attn_segment_args* args,
                        int64_t dim, int64_t dim_v, double sigma = 1) {
  segment->struct_size = sizeof *segment;
  segment->k_type = types.k, segment->v_type = types.v;
  segment->k_descale = types.k_descale, segment->v_descale = types.v_descale;
  segment->descale_block_keys = 128;
  const size_t descales = size_t(batch * heads_kv * ((keys.capacity + 127) / 128));
  args->k_descale = static_cast<float*>(m.input(floats(m, int64_t(descales), 1)));
  args->v_descale = static_cast<float*>(m.input(floats(m, int64_t(descales), 1)));
  segment->seqlen = keys.capacity;
  segment->layout = keys.layout;
  int64_t count = batch * keys.capacity;
  const auto length = [&](int64_t b) {
    return keys.lengths.empty() ? keys.capacity
                                : std::clamp<int64_t>(keys.lengths[size_t(b)], 0, keys.capacity);
  };
  std::vector<bool> there;
  if (keys.layout == ATTN_PACKED) {
    std::vector<int32_t> cu = {-5};  // is clamped
    int32_t end = 0;
    for (const int32_t n : keys.lengths) cu.push_back(end += n);
    segment->total = count = end;
    there.assign(size_t(count), true);
    args->cu_seqlens = static_cast<int32_t*>(m.input(bytes_of(cu)));
  } else if (keys.layout == ATTN_PAGED) {
    const int64_t pages = (keys.capacity + keys.page_size - 1) / keys.page_size;
    segment->page_size = keys.page_size;
    segment->max_pages = int32_t(pages);
    segment->num_pages = batch * pages + 1;
    count = segment->num_pages * keys.page_size;
    there.assign(size_t(count), false);
    std::vector<int32_t> table, order(size_t(segment->num_pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), m.rng());
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t page = 0; page < pages; ++page) {
        const int32_t id = order[size_t(b * pages + page)];
        const bool bad = page == keys.bad_page;
        table.push_back(bad ? int32_t(segment->num_pages) + int32_t(b) : id);
        for (int64_t slot = 0; slot < keys.page_size; ++slot)
          there[size_t(id * keys.page_size + slot)] =
              !bad && page * keys.page_size + slot < length(b);
      }
    args->block_table = static_cast<int32_t*>(m.input(bytes_of(table)));
  } else {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t j = 0; j < keys.capacity; ++j) there.push_back(j < length(b));
  }
  if (keys.layout != ATTN_PACKED && !keys.lengths.empty()) {
    segment->has_seqlens = 1;
    args->seqlens = static_cast<int32_t*>(m.input(bytes_of(keys.lengths)));
  }
  const auto is_there = [&](int64_t row) { return bool(there[size_t(row / heads_kv)]); };
  args->k = m.input(rows(m, types.k, count * heads_kv, dim, sigma, types.special, is_there));
  args->v = m.input(rows(m, types.v, count * heads_kv, dim_v, 1, types.special, is_there));
}

}  // namespace attn::test
