// The module attn._attn. The package's Python files state what each function takes.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "call.h"

namespace attn::python {
namespace {

// ---- plans --------------------------------------------------------------------------------------

// The first difference that a caller can see between the problem of a call and that of its plan, as
// "q: batch is 2, the plan's 1"; "" if it is in something else, such as strides.
std::string difference(const attn_problem& is, const attn_problem& was) {
  std::string found;
  const auto compare = [&](const std::string& what, const auto& now, const auto& then) {
    if (found.empty() && now != then)
      found = what + " is " + std::to_string(now) + ", the plan's " + std::to_string(then);
  };
  const auto compare_types = [&](const std::string& what, attn_dtype now, attn_dtype then) {
    const auto name = [](attn_dtype type) {
      return type == ATTN_DTYPE_NONE ? "none" : find_type(type).name;
    };
    if (found.empty() && now != then)
      found = what + " is " + name(now) + ", the plan's " + name(then);
  };
  const auto compare_given = [&](const std::string& what, bool now, bool then) {
    if (found.empty() && now != then)
      found = what + (now ? " is given, the plan was made without"
                          : " is not given, the plan was made with it");
  };
  compare_types("q: type", is.q_type, was.q_type);
  compare("q: layout", int(is.q_layout), int(was.q_layout));
  compare("q: batch", is.batch, was.batch);
  compare("q: queries of a sequence", is.seqlen_q, was.seqlen_q);
  compare("q: tokens", is.total_q, was.total_q);
  compare("q: heads", is.heads_q, was.heads_q);
  compare("q: head_dim", is.head_dim, was.head_dim);
  compare("number of segments", is.num_segments, was.num_segments);
  for (int32_t i = 0; i < is.num_segments && found.empty(); ++i) {
    const attn_segment &a = is.segments[i], &b = was.segments[i];
    const std::string at = is.num_segments > 1 ? "[" + std::to_string(i) + "]" : "";
    compare_types("k" + at + ": type", a.k_type, b.k_type);
    compare_types("v" + at + ": type", a.v_type, b.v_type);
    compare("k" + at + ": layout", int(a.layout), int(b.layout));
    compare("k" + at + ": heads", is.heads_kv, was.heads_kv);
    compare("v" + at + ": head_dim_v", is.head_dim_v, was.head_dim_v);
    compare("k" + at + ": pages", a.num_pages, b.num_pages);
    compare("k" + at + ": page_size", a.page_size, b.page_size);
    compare("block_table" + at + ": pages of a sequence", a.max_pages, b.max_pages);
    compare("k" + at + ": keys of a sequence", a.seqlen, b.seqlen);
    compare("k" + at + ": tokens", a.total, b.total);
    compare_given("seqlens_kv" + at, a.has_seqlens, b.has_seqlens);
    compare_given("lists" + at, a.list_size > 0, b.list_size > 0);
    compare("lists" + at + ": entries", a.list_size, b.list_size);
    compare_given("list_lengths" + at, a.has_list_lengths, b.has_list_lengths);
    compare_given("k_descale" + at, a.k_descale, b.k_descale);
    compare_given("v_descale" + at, a.v_descale, b.v_descale);
    compare_given("key_start" + at, a.has_key_start, b.has_key_start);
    compare_given("ready" + at, a.has_ready, b.has_ready);
  }
  for (const auto& [name, flag] : {std::pair{"sinks", ATTN_SINKS},
                                   {"alibi_slopes", ATTN_ALIBI},
                                   {"block_mask", ATTN_BLOCK_MASK},
                                   {"bias_slopes", ATTN_BIAS_SLOPES},
                                   {"query_start", ATTN_QUERY_POSITIONS},
                                   {"out_scale", ATTN_OUT_SCALE}})
    compare_given(name, is.flags & flag, was.flags & flag);
  compare_given("kv_begin", is.has_kv_begin, was.has_kv_begin);
  compare_given("causal_sequences", is.has_causal_sequences, was.has_causal_sequences);
  compare_given("q_descale", is.q_descale, was.q_descale);
  compare_types("bias: type", is.bias_type, was.bias_type);
  compare_types("out: type", is.out_type, was.out_type);
  return found;
}

struct PlanObject {
  explicit PlanObject(const Arguments& arguments) {
    const Call call(arguments);
    for (size_t i = 0; i < size_t(Name::count); ++i)  // the arrays are examples and not kept
      if (const auto name = Name(i); kind_of(name) != Kind::run) keep(name, arguments.find(name));
    const nb::int_ threads(call.threads());  // its calls are of the same context
    keep(Name::num_threads, threads);
    make(call);
  }
  nb::object run(Arguments arguments);

  std::shared_ptr<Compiled> compiled;

 private:
  void make(const Call& call) {
    const std::shared_ptr<context> owner = call.owner();
    std::string key = key_of(*owner, call.problem());
    const int now = forks();
    auto made = [&] {
      nb::gil_scoped_release release;
      return std::make_shared<Compiled>(owner, plan(*owner, call.problem()), std::move(key));
    }();
    compiled = std::move(made);
    made_at_ = now;
    made_for_ = call.problem();
    segments_.assign(made_for_.segments, made_for_.segments + made_for_.num_segments);
    made_for_.segments = segments_.data();
  }
  bool takes(const Call& call) const {
    return call.owner()->backend() == compiled->owner->backend() &&
           key_of(*compiled->owner, call.problem()) == compiled->key;
  }
  void keep(Name name, nb::handle value) {
    options_.set(name, value);
    kept_.push_back(nb::borrow(value));
  }
  Arguments options_;
  std::vector<nb::object> kept_;
  int made_at_ = 0;  // forks() of the process that made `compiled`
  attn_problem made_for_{};
  std::vector<attn_segment> segments_;  // of made_for_
};

nb::object PlanObject::run(Arguments arguments) {
  const bool forked = made_at_ != forks();
  if (forked && compiled->owner->threads() == 0)
    refuse(std::string("the plan of ") + attn_backend_string(compiled->owner->backend()) +
           " was made before a fork; accepted in this process: a plan that it made itself");
  arguments.complete(options_);
  Call call(arguments);
  if (!takes(call) || (!forked && call.owner() != compiled->owner)) {
    const std::string what = difference(call.problem(), made_for_);
    refuse("the arrays are not as those that the plan was made for" +
           (what.empty() ? what : ": " + what) +
           "; accepted: the same shapes, types, strides and device, and the same arguments given");
  }
  if (forked) make(call);  // the parent's would run, on one thread
  const std::shared_ptr<Compiled> kept = compiled;
  return call.run(*kept);
}

nb::object forward(const Arguments& arguments) {
  Call call(arguments);
  const std::shared_ptr<Compiled> compiled = cached(call.owner(), call.in_steps());
  return call.run(*compiled);
}

// As torch.nn.functional has it, of tensors with four dimensions; the mask is one that is added.
// `causal` counts from the top left, `lower_right` is causal from the other end. One head of k and
// v broadcasts to all of q, as PyTorch's does.
nb::object scaled_dot_product_attention(nb::handle query, nb::handle key, nb::handle value,
                                        nb::handle mask, nb::handle causal, nb::handle scale,
                                        nb::handle enable_gqa, nb::handle lower_right) {
  static const nb::handle automatic = nb::str("auto").release();
  Arguments arguments;
  arguments.set(Name::q, query);
  arguments.set(Name::k, key);
  arguments.set(Name::v, value);
  arguments.set(Name::attn_mask, mask);
  arguments.set(Name::causal_top_left, causal);
  arguments.set(Name::causal, lower_right);
  arguments.set(Name::scale, scale);
  arguments.set(Name::backend, automatic);
  Call call(arguments);
  const attn_problem& p = call.problem();
  if (p.heads_q != p.heads_kv && p.heads_kv != 1 && !boolean(enable_gqa, "enable_gqa"))
    refuse("enable_gqa is False with " + std::to_string(p.heads_q) + " heads of q and " +
           std::to_string(p.heads_kv) + " of k and v; accepted: True");
  const std::shared_ptr<Compiled> compiled = cached(call.owner(), p);
  return call.run(*compiled);
}

nb::object check_call(const Arguments& arguments) {
  Call call(arguments);
  const std::shared_ptr<Compiled> compiled = cached(call.owner(), call.in_steps());
  call.check(*compiled);
  return nb::none();
}

nb::object explain_call(const Arguments& arguments) {
  Call call(arguments);
  return nb::cast(explain(*call.owner(), call.in_steps()));  // the plan that a call makes
}

// ---- block masks --------------------------------------------------------------------------------

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

// ---- merge and quantize -------------------------------------------------------------------------

nb::object merge(const std::vector<std::pair<nb::object, nb::object>>& parts, nb::handle out_dtype,
                 nb::handle backend) {
  if (parts.empty()) refuse("parts is empty; accepted: one (out, lse) or more");
  attn_merge_problem p;
  clear(&p);
  Reader reader;
  std::vector<Array> outs, lses;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "parts[" + std::to_string(i) + "]";
    Array out = i == 0 ? reader.first(parts[i].first, name + "[0]")
                       : reader.next(parts[i].first, name + "[0]");
    if (i == 0) {
      const size_t n = out.tensor.ndim();
      if (n != 3) out.need_shape({-1, -1, -1, -1}, "[B, Sq, Hq, Dv], or packed [total_q, Hq, Dv]");
      p.batch = n == 3 ? 1 : out.size(0);
      p.seqlen_q = out.size(n - 3);
      p.heads_q = out.size(n - 2);
      p.head_dim_v = out.size(n - 1);
      out.need_floats();
      p.part_type = out.type.type;
      p.part_stride = strides_of(out);
    } else {
      out.need_shape(outs[0].shape(), "the shape of parts[0][0]");
      out.need_type(outs[0].type.name);
      const attn_strides s = strides_of(out), &want = p.part_stride;
      if (s.batch != want.batch || s.seq != want.seq || s.head != want.head)
        refuse(out.name + " has other strides than parts[0][0]; accepted: the same");
    }
    Array lse = reader.next(parts[i].second, name + "[1]");
    lse.need_type("f32");
    if (out.tensor.ndim() == 3)
      lse.need_shape({p.heads_q, p.seqlen_q}, "[Hq, total_q]");
    else
      lse.need_shape({p.batch, p.heads_q, p.seqlen_q}, "[B, Hq, Sq]");
    lse.need_contiguous();
    outs.push_back(std::move(out));
    lses.push_back(std::move(lse));
  }
  const ElementType* type = out_dtype.is_none() ? &outs[0].type : find_type(out_dtype);
  if (!type || !type->is_float())
    refuse("out_dtype is " + text_of(out_dtype) +
           "; accepted: " + names_of(&ElementType::is_float));
  p.out_type = type->type;
  p.num_parts = int32_t(parts.size());

  const std::shared_ptr<Compiled> compiled =
      cached(context_for(backend, reader.origin().device), p);
  const Array out = reader.empty("out", outs[0].shape(), *type);
  const Array lse = reader.empty("lse", lses[0].shape(), lses[0].type);
  std::vector<const void*> out_pointers;
  std::vector<const float*> lse_pointers;
  for (size_t i = 0; i < parts.size(); ++i) {
    out_pointers.push_back(outs[i].data());
    lse_pointers.push_back(static_cast<const float*>(lses[i].data()));
  }
  auto args = make<attn_merge_args>();
  args.num_parts = p.num_parts;
  args.outs = out_pointers.data();
  args.lses = lse_pointers.data();
  args.out = out.data();
  args.lse = static_cast<float*>(lse.data());
  {
    nb::gil_scoped_release release;
    compiled->made.run(args, reader.stream());
    if (reader.waits()) compiled->owner->synchronize(reader.stream());
  }
  return nb::make_tuple(out.source, lse.source);
}

// scale: 1, "amax", another number, or an array of f32. per: "tensor", "head", 64 or 128.
nb::object quantize(nb::handle value, nb::handle dtype, nb::handle scale, nb::handle per,
                    nb::handle saturate, nb::handle backend) {
  attn_quantize_problem p;
  clear(&p);
  Reader reader;
  const Array x = reader.first(value, "x");
  const size_t n = x.tensor.ndim();
  if (n != 3) x.need_shape({-1, -1, -1, -1}, "[B, S, H, D], or packed [total, H, D]");
  p.batch = n == 3 ? 1 : x.size(0);
  p.seqlen = x.size(n - 3);
  p.heads = x.size(n - 2);
  p.head_dim = x.size(n - 1);
  x.need_floats();
  p.src_type = x.type.type;
  p.src_stride = strides_of(x);
  const ElementType* type = find_type(dtype);
  const auto quantized = [](const ElementType& t) { return t.is_input() && !t.is_float(); };
  if (!type || !quantized(*type))
    refuse("dtype is " + text_of(dtype) + "; accepted: " + names_of(quantized));
  const bool beside = type->has_scales;  // a scale of each token and head
  const bool own_scales = !type->is_fp8() && type->type != ATTN_NVFP4;
  p.dst_type = type->type;
  p.saturate = boolean(saturate, "saturate");

  Sizes descale_shape = {1};
  const std::string per_text = text_of(per);
  if (per_text == "head") {
    p.kind = ATTN_DESCALE_HEAD;
    descale_shape = {p.batch, p.heads};
  } else if (per_text == "64" || per_text == "128") {
    p.kind = ATTN_DESCALE_BLOCK;
    p.descale_block_keys = per_text == "64" ? 64 : 128;
    descale_shape = {p.batch, p.heads,
                     (p.seqlen + p.descale_block_keys - 1) / p.descale_block_keys};
  } else if (per_text != "tensor") {
    refuse("per is " + per_text + "; accepted: tensor, head, 64, 128 (keys of a block)");
  } else {
    p.kind = ATTN_DESCALE_TENSOR;
  }

  Array descale;
  descale.source = nb::none();
  const char* scales = "a number, amax, or an array of f32";
  if (nb::isinstance<nb::str>(scale)) {
    if (text_of(scale) != "amax") refuse("scale is " + text_of(scale) + "; accepted: " + scales);
    p.scale = ATTN_SCALE_AMAX;
    descale = reader.empty("descale", descale_shape, find_type("f32"));
  } else if (is_array(scale)) {
    p.scale = ATTN_SCALE_GIVEN;
    descale = reader.next(scale, "scale");
    descale.need_type("f32");
    descale.need_shape(descale_shape, "the shape that `per` asks for");
    descale.need_contiguous();
  } else {
    const float factor = number(scale, "scale", scales);
    if (factor == 0 || !std::isfinite(factor))
      refuse("scale is " + text_of(scale) + "; accepted: finite numbers other than 0");
    p.scale = factor == 1 ? ATTN_SCALE_ONE : ATTN_SCALE_GIVEN;
    if (!(own_scales && factor == 1)) descale = reader.full("descale", descale_shape, factor);
  }

  Sizes shape = x.shape();
  const ElementType& bytes = find_type("u8");
  Array scale_array;
  if (beside) {
    Sizes of_rows = shape;
    if (type->scale_elements > 0)
      of_rows.back() = shape.back() / type->scale_elements;
    else
      of_rows.pop_back();
    scale_array = reader.empty("scale", of_rows,
                               find_type(type->scale_bytes == 4   ? "f32"
                                         : type->scale_bytes == 2 ? "f16"
                                                                  : "u8"));
  }
  if (type->in_bytes()) shape.back() = shape.back() / type->block_elements * type->block_bytes;
  const std::shared_ptr<Compiled> compiled =
      cached(context_for(backend, reader.origin().device), p);
  const Array stored = reader.empty("stored", shape, type->in_bytes() ? bytes : *type);
  auto args = make<attn_quantize_args>();
  args.src = x.data();
  args.dst = stored.data();
  if (beside) args.scale = const_cast<void*>(scale_array.address());
  if (!descale.source.is_none())
    args.descale = static_cast<float*>(const_cast<void*>(descale.address()));
  {
    nb::gil_scoped_release release;
    compiled->made.run(args, reader.stream());
    if (reader.waits()) compiled->owner->synchronize(reader.stream());
  }
  if (!beside) return nb::make_tuple(stored.source, descale.source);
  if (descale.source.is_none() || own_scales)
    return nb::make_tuple(stored.source, scale_array.source);
  return nb::make_tuple(stored.source, scale_array.source, descale.source);
}

// attn.types().
nb::dict types_dict() {
  static constexpr const char* kinds[] = {"", "float", "fp8", "ggml", "codes", "cache"};
  nb::dict all;
  for (const ElementType& t : types()) {
    if (t.type == ATTN_DTYPE_NONE) continue;
    nb::dict row;
    row["dtype"] = t.in_bytes() ? "uint8" : t.numpy;
    row["kind"] = kinds[t.kind];
    row["block_elements"] = t.block_elements;
    row["block_bytes"] = t.block_bytes;
    row["has_scales"] = t.has_scales;
    row["output_only"] = t.output_only;
    row["scale_bytes"] = t.scale_bytes;
    row["scale_elements"] = t.scale_elements;
    all[t.name] = row;
  }
  return all;
}

// attn.InvalidArgument and its siblings, by status.
void raise(const std::exception_ptr& caught, void*) {
  try {
    std::rethrow_exception(caught);
  } catch (const error& e) {
    if (e.status() == ATTN_INTERRUPTED && raise_of_signal()) return;
    nb::object type = nb::module_::import_("attn._errors").attr("error_type")(int(e.status()));
    PyErr_SetString(type.ptr(), e.what());
  }
}

// ---- functions of forward()'s arguments ---------------------------------------------------------

// Python calls these without nanobind, which would look for each argument's name.

// The library's error, with forward()'s names of its arguments.
void raise_with_names(const error& e) {
  if (e.status() == ATTN_INTERRUPTED && raise_of_signal()) return;
  nb::object made =
      nb::module_::import_("attn._errors").attr("forward_error")(int(e.status()), e.what());
  PyErr_SetObject(made.type().ptr(), made.ptr());
}

// What `call` returns, or Python's error for what it throws.
template <class Called>
PyObject* guarded(Called&& call) {
  try {
    return nb::object(call()).release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const nb::builtin_exception& e) {
    PyErr_SetString(
        e.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_RuntimeError,
        e.what());
  } catch (const error& e) {
    raise_with_names(e);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

constexpr char forward_name[] = "forward", check_name[] = "check", explain_name[] = "explain",
               plan_name[] = "Plan";

template <auto call, const char* name, Kind last>
PyObject* function(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return guarded([&] { return call(Arguments(name, last, values, size_t(count), names)); });
}

template <auto call, const char* name, Kind last>
PyMethodDef method(const char* documentation) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&function<call, name, last>)),
          METH_FASTCALL | METH_KEYWORDS, documentation};
}

// forward() with its documentation, which begins with the signature that Python shows.
nb::object make_forward(nb::handle module, const char* documentation) {
  static std::string text;
  text = documentation;
  static PyMethodDef made = method<forward, forward_name, Kind::problem>(text.c_str());
  made.ml_doc = text.c_str();
  return nb::steal(PyCFunction_NewEx(&made, nullptr, module.ptr()));
}

PyObject* call_plan(PyObject* self, PyObject* tuple, PyObject* dict) {
  return guarded([&] {
    if (!nb::inst_ready(self)) throw nb::type_error("the Plan was not initialised");
    return nb::inst_ptr<PlanObject>(self)->run(Arguments("plan", Kind::run, tuple, dict));
  });
}

}  // namespace

NB_MODULE(_attn, m) {
  nb::set_leak_warnings(false);
  nb::register_exception_translator(raise);
  set_main_thread(nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident")));
  static PyMethodDef functions[] = {method<check_call, check_name, Kind::execution>(nullptr),
                                    method<explain_call, explain_name, Kind::execution>(nullptr),
                                    {}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) nb::raise_python_error();
  m.def("make_forward", &make_forward);
  m.def("info", [] { return info(); });
  m.def("types", &types_dict);
  m.def("version", [] { return attn_version(); });
  m.def("launch_count", [](const char* kernel) { return attn_launch_count(kernel); });
  m.def("cache_counts", [] {
    const CacheCounts counts = cache_counts();
    return std::make_tuple(counts.plans, counts.hits, counts.misses, counts.workspaces,
                           counts.workspace_bytes);
  });
  m.def("cache_clear", &cache_clear);
  m.def("num_threads", &num_threads);
  m.def(
      "set_num_threads", [](nb::handle n) { set_num_threads(integer32(n, "threads")); },
      nb::arg().none());
  m.def("forget_everything", &forget_everything);
  const auto any = nb::arg().none();  // nanobind's own sentence for None names no argument
  m.def("sdpa", &scaled_dot_product_attention, any, any, any, any, any, any, any, any);
  m.def("merge", &merge, nb::arg(), any, any);
  m.def("quantize", &quantize, any, any, any, any, any, any);
  m.def("backward", &backward);
  m.def("kv_append", &kv_append);
  m.def("kv_roll", &kv_roll);

  static const PyType_Slot plan_slots[] = {{Py_tp_call, reinterpret_cast<void*>(&call_plan)}, {}};
  nb::class_<PlanObject>(m, "Plan", nb::type_slots(plan_slots))
      .def("__init__",
           [](PlanObject* self, const nb::args& tuple, const nb::kwargs& dict) {
             try {
               new (self)
                   PlanObject(Arguments(plan_name, Kind::execution, tuple.ptr(), dict.ptr()));
             } catch (const error& e) {
               raise_with_names(e);
               nb::raise_python_error();
             }
           })
      .def_prop_ro("kernel",
                   [](const PlanObject& p) { return std::string(p.compiled->made.kernel()); })
      .def_prop_ro(
          "backend",
          [](const PlanObject& p) { return attn_backend_string(p.compiled->owner->backend()); })
      .def_prop_ro("workspace", [](const PlanObject& p) { return p.compiled->made.workspace(); });

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
