// Builders of block masks, and the class Mask.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "call.h"

namespace attn::python {
namespace {

// One integer, or one for queries and one for keys.
std::pair<int32_t, int32_t> read_block_size(nb::handle value) {
  const nb::object one = nb::steal(PyNumber_Index(value.ptr()));
  PyErr_Clear();
  if (one) {
    const int32_t size = integer32(one, "block_size");
    return {size, size};
  }
  const auto [q, k] = integers(value, "block_size", "an integer or a pair of them");
  for (int64_t size : {q, k})
    if (size < INT32_MIN || size > INT32_MAX)
      refuse("block_size is " + text_of(value) + "; accepted: below 2^31");
  return {int32_t(q), int32_t(k)};
}

// Of a builder that is told the lengths.
std::pair<int64_t, int64_t> read_lengths(nb::handle seqlen_q, nb::handle seqlen_kv) {
  return {integer(seqlen_q, "seqlen_q"), integer(seqlen_kv, "seqlen_kv")};
}

attn_block_mask_shape mask_shape(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_kv,
                                 std::pair<int32_t, int32_t> block_size) {
  auto shape = make<attn_block_mask_shape>();
  shape.batch = batch;
  shape.heads = heads;
  shape.seqlen_q = seqlen_q;
  shape.seqlen_kv = seqlen_kv;
  shape.block_q = block_size.first;
  shape.block_k = block_size.second;
  return shape;
}

// "cpu", "cuda", "cuda:1", "hip", "hip:1"; torch.device as text is one of these.
Device parse_device(nb::handle value) {
  const std::string text = text_of(value);
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  const std::string index = colon == std::string::npos ? "0" : text.substr(colon + 1);
  Device device;
  device.backend = kind == "cuda"  ? ATTN_BACKEND_CUDA
                   : kind == "hip" ? ATTN_BACKEND_HIP
                                   : ATTN_BACKEND_CPU;
  const bool number = !index.empty() && index.size() < 5 &&
                      index.find_first_not_of("0123456789") == std::string::npos;
  if (!number || (kind != "cpu" && device.host()))
    refuse("device is " + text + "; accepted: cpu, cuda, cuda:N, hip, hip:N");
  if (!device.host()) device.index = std::stoi(index);
  return device;
}

template <class Build>
Mask make_mask(Device device, const attn_block_mask_shape& shape, Build&& build) {
  std::shared_ptr<context> owner = context_for("auto", device);
  nb::gil_scoped_release release;
  block_mask made = build(*owner);
  return Mask{std::move(owner), device, shape, std::move(made)};
}

// [batch, heads, ...], or without these two. 0, which attn.h takes for 1, is none of them.
std::pair<int64_t, int64_t> mask_batch_heads(const Array& a, size_t dims, const char* form) {
  if (a.tensor.ndim() == dims) return {1, 1};
  a.need_shape(Sizes(dims + 2, -1), form);
  if (a.size(0) == 0 || a.size(1) == 0)
    refuse(a.name + " has shape " + shape_text(a.shape()) +
           "; accepted: 1 or more in the first two dimensions, " + form);
  return {a.size(0), a.size(1)};
}

Mask mask_from_dense(nb::handle value, nb::handle size) {
  const auto block_size = read_block_size(size);
  Reader reader;
  const Array dense = reader.first(value, "dense");
  if (std::strcmp(dense.type.name, "u8") && std::strcmp(dense.type.name, "bool"))
    refuse(std::string("dense is ") + dense.type.name + "; accepted: bool, u8");
  const auto [batch, heads] = mask_batch_heads(dense, 2, "[Sq, Skv] or [B or 1, Hq or 1, Sq, Skv]");
  dense.need_contiguous();
  const size_t n = dense.tensor.ndim();
  const auto shape = mask_shape(batch, heads, dense.size(n - 2), dense.size(n - 1), block_size);
  return make_mask(dense.device, shape, [&](const context& owner) {
    block_mask made = block_mask::from_dense(
        owner, shape, static_cast<const uint8_t*>(dense.address()), reader.stream());
    if (reader.waits()) owner.synchronize(reader.stream());
    return made;
  });
}

Mask mask_from_intervals(nb::handle value, nb::handle length, nb::handle size) {
  const auto block_size = read_block_size(size);
  const int64_t seqlen_q = integer(length, "seqlen_q");
  Reader reader;
  const Array a = reader.first(value, "intervals");
  a.need_type("i32");
  const char* form = "[Skv, 1 or 2, 2] or [B or 1, Hq or 1, Skv, 1 or 2, 2]";
  const auto [batch, heads] = mask_batch_heads(a, 3, form);
  const size_t n = a.tensor.ndim();
  Sizes want(n, -1);
  want.back() = 2;
  if (a.size(n - 2) != 2) want[n - 2] = 1;
  a.need_shape(want, form);
  a.need_contiguous();
  const auto shape = mask_shape(batch, heads, seqlen_q, a.size(n - 3), block_size);
  return make_mask(a.device, shape, [&](const context& owner) {
    block_mask made =
        block_mask::from_intervals(owner, shape, static_cast<const int32_t*>(a.address()),
                                   int32_t(a.size(n - 2)), reader.stream());
    if (reader.waits()) owner.synchronize(reader.stream());
    return made;
  });
}

Mask mask_from_documents(const std::vector<nb::object>& values, nb::handle causal_value,
                         nb::handle size, nb::handle device) {
  const auto block_size = read_block_size(size);
  const bool causal = boolean(causal_value, "causal");
  std::vector<int64_t> lengths;
  int64_t total = 0;
  for (const nb::object& value : values) {
    const std::string name = "lengths[" + std::to_string(lengths.size()) + "]";
    lengths.push_back(integer(value, name));
    if (lengths.back() < 0)
      refuse(name + " is " + std::to_string(lengths.back()) + "; accepted: 0 and above");
    if (__builtin_add_overflow(total, lengths.back(), &total))
      refuse("lengths add up to more than 64 bits hold");
  }
  const auto shape = mask_shape(1, 1, total, total, block_size);
  return make_mask(parse_device(device), shape, [&](const context& owner) {
    return block_mask::from_documents(owner, shape, lengths, causal);
  });
}

Mask mask_from_window(nb::handle length_q, nb::handle length_kv, nb::handle window_value,
                      nb::handle global_value, nb::handle prefix_value, nb::handle size,
                      nb::handle device) {
  const auto [seqlen_q, seqlen_kv] = read_lengths(length_q, length_kv);
  const auto window =
      integers(window_value, "window", "a pair of integers (left, right), -1 = unbounded");
  const int64_t global_tokens = integer(global_value, "global_tokens");
  const int64_t prefix_tokens = integer(prefix_value, "prefix_tokens");
  const auto shape = mask_shape(1, 1, seqlen_q, seqlen_kv, read_block_size(size));
  return make_mask(parse_device(device), shape, [&](const context& owner) {
    return block_mask::from_window(owner, shape, window.first, window.second, global_tokens,
                                   prefix_tokens);
  });
}

// bool [P, bq, bk] as words, bit c % 32 of word c / 32.
std::vector<uint32_t> pack_bits(const Array& bits) {
  const int64_t words = (bits.size(2) + 31) / 32;
  std::vector<uint32_t> packed(size_t(bits.size(0) * bits.size(1) * words));
  const auto* from = static_cast<const uint8_t*>(bits.data());
  for (int64_t p = 0, row = 0; p < bits.size(0); ++p)
    for (int64_t i = 0; i < bits.size(1); ++i, ++row)
      for (int64_t c = 0; c < bits.size(2); ++c) {
        const int64_t at =
            p * bits.tensor.stride(0) + i * bits.tensor.stride(1) + c * bits.tensor.stride(2);
        packed[size_t(row * words + c / 32)] |= uint32_t{from[at] != 0} << c % 32;
      }
  return packed;
}

// The first array of a call, which is in host memory.
Array first_of_host(Reader& reader, nb::handle value, const char* name, const char* type) {
  const Array array = reader.first(value, name);
  if (!array.device.host())
    refuse(std::string(name) + " is in " + array.device.text() + "; accepted: host memory");
  array.need_type(type);
  return array;
}

// kinds u8 [rows, columns] or [B or 1, Hq or 1, rows, columns], index i32 of the same shape, bits
// bool [P, bq, bk] or u32 [P, bq, words], on the host.
Mask mask_from_kinds(nb::handle kinds_value, nb::handle index_value, nb::handle bits_value,
                     nb::handle length_q, nb::handle length_kv, nb::handle size,
                     nb::handle device) {
  const auto [seqlen_q, seqlen_kv] = read_lengths(length_q, length_kv);
  const auto block_size = read_block_size(size);
  Reader reader;
  const Array kinds = first_of_host(reader, kinds_value, "kinds", "u8");
  const auto blocks = [](const char* name, int64_t size) {
    if (size < 1)
      refuse(std::string(name) + " is " + std::to_string(size) + "; accepted: 1 or more");
    return size;
  };
  const int64_t bq = blocks("block_size[0]", block_size.first);
  const int64_t bk = blocks("block_size[1]", block_size.second);
  for (int64_t length : {seqlen_q, seqlen_kv})
    if (length < 0 || length > INT32_MAX)
      refuse("seqlen_q is " + std::to_string(seqlen_q) + ", seqlen_kv " +
             std::to_string(seqlen_kv) + "; accepted: 0 to 2^31 - 1");
  const char* form = "[rows, columns] or [B or 1, Hq or 1, rows, columns]";
  const auto [batch, heads] = mask_batch_heads(kinds, 2, form);
  Sizes grid(kinds.tensor.ndim(), -1);
  grid.end()[-2] = (seqlen_q + bq - 1) / bq;
  grid.end()[-1] = (seqlen_kv + bk - 1) / bk;
  kinds.need_shape(grid, form);
  kinds.need_contiguous();
  Array index, bits;
  if (!index_value.is_none()) {
    index = reader.next(index_value, "index");
    index.need_type("i32");
    index.need_shape(kinds.shape(), "the shape of kinds");
    index.need_contiguous();
  }
  int64_t partials = 0;
  std::vector<uint32_t> packed;
  const uint32_t* words = nullptr;
  if (!bits_value.is_none()) {
    bits = reader.next(bits_value, "bits");
    if (!std::strcmp(bits.type.name, "bool")) {
      bits.need_shape({-1, bq, bk}, "[P, bq, bk]");
      packed = pack_bits(bits);
      words = packed.data();
    } else {
      if (std::strcmp(bits.type.name, "u32"))
        refuse(std::string("bits is ") + bits.type.name + "; accepted: bool, u32");
      bits.need_shape({-1, bq, (bk + 31) / 32}, "[P, bq, ceil(bk / 32)]");
      bits.need_contiguous();
      words = static_cast<const uint32_t*>(bits.data());
    }
    partials = bits.size(0);
  }
  const auto shape = mask_shape(batch, heads, seqlen_q, seqlen_kv, block_size);
  return make_mask(parse_device(device), shape, [&](const context& owner) {
    return block_mask::from_kinds(
        owner, shape, static_cast<const uint8_t*>(kinds.address()),
        index_value.is_none() ? nullptr : static_cast<const int32_t*>(index.address()),
        partials ? words : nullptr, partials);
  });
}

// lists i32 [rows, entries] or [B or 1, Hq or 1, rows, entries], on the host.
Mask mask_from_lists(nb::handle value, nb::handle length_q, nb::handle length_kv, nb::handle size,
                     nb::handle device) {
  const auto [seqlen_q, seqlen_kv] = read_lengths(length_q, length_kv);
  const auto block_size = read_block_size(size);
  Reader reader;
  const Array lists = first_of_host(reader, value, "lists", "i32");
  const char* form = "[rows, entries] or [B or 1, Hq or 1, rows, entries]";
  const auto [batch, heads] = mask_batch_heads(lists, 2, form);
  const auto shape = mask_shape(batch, heads, seqlen_q, seqlen_kv, block_size);
  Sizes want(lists.tensor.ndim(), -1);
  if (shape.block_q > 0) want.end()[-2] = (seqlen_q + shape.block_q - 1) / shape.block_q;
  lists.need_shape(want, form);
  lists.need_contiguous();
  return make_mask(parse_device(device), shape, [&](const context& owner) {
    return block_mask::from_lists(owner, shape, static_cast<const int32_t*>(lists.address()),
                                  lists.size(lists.tensor.ndim() - 1));
  });
}

Mask combine(const Mask& a, const Mask& b, bool unite) {
  if (a.device != b.device)
    refuse("the other mask is in " + b.device.text() + "; accepted: " + a.device.text());
  auto shape = a.shape;
  shape.batch = std::max(a.shape.batch, b.shape.batch);
  shape.heads = std::max(a.shape.heads, b.shape.heads);
  return make_mask(a.device, shape, [&](const context& owner) {
    return unite ? block_mask::union_of(owner, a.mask, b.mask)
                 : block_mask::intersection(owner, a.mask, b.mask);
  });
}

// (kinds, index, bits) as mask_from_kinds takes them, as bytes.
nb::tuple mask_arrays(const Mask& mask) {
  auto args = make<attn_args>();
  mask.mask.apply(nullptr, &args);
  const attn_block_mask_shape& s = mask.shape;
  const int64_t rows = (s.seqlen_q + s.block_q - 1) / s.block_q;
  const int64_t columns = (s.seqlen_kv + s.block_k - 1) / s.block_k;
  const auto cells = size_t(s.batch * s.heads * rows * columns);
  std::vector<uint8_t> kinds(cells);
  std::vector<int32_t> index(cells, -1);
  std::vector<uint32_t> bits;
  const auto copy = [&](auto& to, const void* from) {
    const size_t bytes = to.size() * sizeof to[0];
    if (bytes > 0 && from) check(attn_copy_out(mask.owner->get(), to.data(), from, bytes, nullptr));
  };
  {
    nb::gil_scoped_release release;
    copy(kinds, args.block_kinds);
    copy(index, args.block_index);
    // A mask that was built on a device has room for more blocks than there are.
    int32_t last = -1;
    for (size_t i = 0; i < cells; ++i) {
      if (kinds[i] != ATTN_BLOCK_PARTIAL) index[i] = -1;
      last = std::max(last, index[i]);
    }
    bits.resize(size_t(last + 1) * size_t(s.block_q) * size_t((s.block_k + 31) / 32));
    copy(bits, args.block_bits);
  }
  const auto bytes = [](const auto& of) { return nb::bytes(of.data(), of.size() * sizeof of[0]); };
  return nb::make_tuple(bytes(kinds), bytes(index), bytes(bits));
}

}  // namespace

void add_block_masks(nb::module_& m) {
  const auto any = nb::arg().none();  // nanobind's own sentence for None names no argument
  nb::class_<Mask>(m, "Mask")
      .def_prop_ro("shape",
                   [](const Mask& mask) {
                     const attn_block_mask_shape& s = mask.shape;
                     return std::make_tuple(s.batch, s.heads, s.seqlen_q, s.seqlen_kv);
                   })
      .def_prop_ro(
          "block_size",
          [](const Mask& mask) { return std::pair(mask.shape.block_q, mask.shape.block_k); })
      .def_prop_ro("device", [](const Mask& mask) {
        if (mask.device.host()) return std::string("cpu");
        return std::string(attn_backend_string(mask.device.backend)) + ":" +
               std::to_string(mask.device.index);
      });
  m.def("mask_from_dense", &mask_from_dense, any, any);
  m.def("mask_from_intervals", &mask_from_intervals, any, any, any);
  m.def("mask_from_documents", &mask_from_documents, nb::arg(), any, any, nb::arg());
  m.def("mask_from_window", &mask_from_window, any, any, any, any, any, any, nb::arg());
  m.def("mask_from_lists", &mask_from_lists, any, any, any, any, nb::arg());
  m.def("mask_from_kinds", &mask_from_kinds, any, any, any, any, any, any, nb::arg());
  m.def("mask_combine", &combine);
  m.def("mask_arrays", &mask_arrays);
}

}  // namespace attn::python
