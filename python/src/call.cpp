#include "call.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cfloat>
#include <cstring>

namespace attn::python {
namespace {

constexpr int64_t few_tokens = 64;  // with which kernels are chosen by the exact number
constexpr size_t few_keys = 64;

// A size that a field of 32 bits takes.
int32_t size32(const Array& a, size_t dimension) {
  if (a.size(dimension) > INT32_MAX)
    refuse(a.name + " has shape " + shape_text(a.shape()) + "; accepted: dimension " +
           std::to_string(dimension) + " below 2^31");
  return int32_t(a.size(dimension));
}

}  // namespace

std::pair<attn_dtype, int64_t> kv_type(const Array& a, int64_t dim, nb::handle named) {
  const int64_t last = a.size(a.tensor.ndim() - 1);
  const bool bytes = !std::strcmp(a.type.name, "u8");
  if (named.is_valid() && !named.is_none()) {
    const ElementType* type = find_type(named);
    if (!type || !type->in_bytes())
      refuse("the type of " + a.name + " is " + text_of(named) +
             "; accepted: " + names_of(&ElementType::in_bytes) + ", or None");
    const int64_t block = type->block_bytes;
    if (type->type == ATTN_F8_E4M3FN_TOKEN && a.type.type == ATTN_F8_E4M3FN)
      return {type->type, last};
    if (!bytes && block == 1 && type->block_elements > 1)
      refuse(a.name + " is " + a.type.name + "; accepted of " + type->name +
             ": u8, two elements a byte");
    if (!bytes || (block > 1 && (last <= 0 || last % block != 0)))
      refuse(a.name + " is " + a.type.name + " with a last dimension of " + std::to_string(last) +
             "; accepted of " + type->name + ": u8, multiples of " + std::to_string(block) +
             " bytes");
    return {type->type, last / block * type->block_elements};
  }
  if (a.type.is_input()) return {a.type.type, last};
  // Of these two types the size of a row tells which it is.
  const ElementType &q8_0 = find_type(ATTN_Q8_0), &q4_0 = find_type(ATTN_Q4_0);
  const bool q8 = last % q8_0.block_bytes == 0, q4 = last % q4_0.block_bytes == 0;
  if (bytes && last > 0 && (q8 || q4)) {
    const int64_t q8_dim = last / q8_0.block_bytes * q8_0.block_elements,
                  q4_dim = last / q4_0.block_bytes * q4_0.block_elements;
    if (q8 && q4 && q8_dim != dim && q4_dim != dim)
      refuse(a.name + " is u8 with a last dimension of " + std::to_string(last) + ", which is " +
             std::to_string(q8_dim) + " elements of q8_0 or " + std::to_string(q4_dim) +
             " of q4_0; accepted: " + std::to_string(dim) + " elements of either");
    if (q8 && (!q4 || q8_dim == dim)) return {ATTN_Q8_0, q8_dim};
    return {ATTN_Q4_0, q4_dim};
  }
  const auto in_arrays = [](const ElementType& t) { return t.is_input() && !t.in_bytes(); };
  refuse(a.name + " is " + a.type.name + " with a last dimension of " + std::to_string(last) +
         "; accepted: " + names_of(in_arrays) + ", u8 with blocks of q8_0 (" +
         std::to_string(q8_0.block_bytes) + " bytes) or q4_0 (" + std::to_string(q4_0.block_bytes) +
         " bytes), and of other types with k_type and v_type");
}

Sizes sizes_of(const Array& a, const char* form) {
  const size_t n = a.tensor.ndim();
  if (n != 3) a.need_shape({-1, -1, -1, -1}, form);
  return {n == 3 ? 1 : a.size(0), a.size(n - 3), a.size(n - 2), a.size(n - 1)};
}

attn_strides strides_of(const Array& a, attn_dtype type) {
  const ElementType& t = find_type(type);
  const Sizes s =
      t.in_bytes() ? a.outer_strides(t.block_bytes, t.block_elements) : a.outer_strides();
  return s.size() == 2 ? attn_strides{0, s[0], s[1]} : attn_strides{s[0], s[1], s[2]};
}

std::string scales_form(attn_dtype type) {
  const ElementType& t = find_type(type);
  const char* name = t.scale_bytes == 4 ? "f32" : t.scale_bytes == 2 ? "f16" : "u8";
  if (t.scale_elements == 0) return std::string(name) + " scales, one for each token and head";
  return std::string(name) + " scales, for each token and head one of " +
         std::to_string(t.scale_elements) + " elements";
}

const void* read_scales(const Array& a, const Array& of, attn_dtype type, int64_t dim,
                        attn_strides* stride) {
  const ElementType& t = find_type(type);
  if (t.scale_bytes > 1)
    a.need_type(t.scale_bytes == 4 ? "f32" : "f16");
  else if (std::strcmp(a.type.name, "u8") && std::strcmp(a.type.name, "f8_e4m3fn"))
    refuse(a.name + " is " + a.type.name + "; accepted: u8, f8_e4m3fn");
  Sizes shape = of.shape();
  if (t.scale_elements > 0)
    shape.back() = dim / t.scale_elements;
  else
    shape.pop_back();
  a.need_shape(shape, scales_form(type).c_str());
  if (t.scale_elements > 0) {
    const int64_t last = a.tensor.stride(shape.size() - 1);
    if (shape.back() > 1 && !a.empty() && last != 1)
      refuse(a.name + ": the last dimension has stride " + std::to_string(last) + "; accepted: 1");
    shape.pop_back();
  }
  const size_t dims = shape.size();
  int64_t* const to[] = {&stride->head, &stride->seq, &stride->batch};
  int64_t elements = 1;
  for (size_t i = 0; i < dims; ++i) {
    *to[i] = a.tensor.stride(dims - 1 - i);
    elements *= shape[dims - 1 - i];
  }
  if (elements > 1 && stride->head == 0 && stride->seq == 0 && stride->batch == 0)
    refuse(a.name + " has one number for all rows; accepted: one that varies");
  return a.data();
}

void set_pages(const Array& k, attn_segment* s) {
  s->layout = ATTN_PAGED;
  s->num_pages = k.size(0);
  s->page_size = size32(k, 1);
}

const int32_t* read_pages(const Array& k, const Array& table, int64_t batch, attn_segment* s) {
  set_pages(k, s);
  table.need_type("i32");
  table.need_shape({batch, -1}, "[B, pages of a sequence]");
  table.need_contiguous();
  s->max_pages = size32(table, 1);
  s->seqlen = int64_t{s->max_pages} * s->page_size;
  if (s->seqlen > INT32_MAX)
    refuse(table.name + " has shape " + shape_text(table.shape()) + " for pages of " +
           std::to_string(s->page_size) + " keys; accepted: below 2^31 keys in all");
  return static_cast<const int32_t*>(table.address());
}

attn_descale_kind descale_kind(const Array& a, int64_t batch, int64_t heads_kv,
                               attn_segment* segment) {
  a.need_type("f32");
  const size_t dims = a.tensor.ndim();
  // One number that repeats, as engines expand it.
  if (dims == 2 && a.size(0) == batch && a.size(1) == heads_kv && !a.empty() && !a.contiguous() &&
      a.tensor.stride(0) == 0 && a.tensor.stride(1) == 0)
    return ATTN_DESCALE_TENSOR;
  a.need_contiguous();
  if (dims == 1 && a.size(0) == 1) return ATTN_DESCALE_TENSOR;
  const bool heads = dims >= 2 && a.size(0) == batch && a.size(1) == heads_kv;
  if (heads && dims == 2) return ATTN_DESCALE_HEAD;
  if (heads && dims == 3 && segment) {
    // Up to 64 keys are one block of either size: keep what the other of k and v needs.
    for (const int32_t keys : {segment->descale_block_keys, 128, 64}) {
      if (keys == 0 || (segment->seqlen + keys - 1) / keys != a.size(2)) continue;
      if (segment->descale_block_keys != 0 && segment->descale_block_keys != keys) break;
      segment->descale_block_keys = keys;
      return ATTN_DESCALE_BLOCK;
    }
  }
  std::string accepted = "[1], [B, Hkv] = " + shape_text({batch, heads_kv});
  if (segment)
    accepted += ", [B, Hkv, blocks] with " + std::to_string((segment->seqlen + 63) / 64) + " or " +
                std::to_string((segment->seqlen + 127) / 128) +
                " blocks of 64 or 128 keys, the same for k and v";
  refuse(a.name + " has shape " + shape_text(a.shape()) + "; accepted: " + accepted);
}

Call::Call(const Arguments& arguments)
    : arguments_(arguments),
      bias_(arguments.find(Name::attn_mask).is_valid() ? Name::attn_mask : Name::bias) {
  reader_.heads_first = of_torch();
  clear(&problem_);
  clear(&args_);
  read_queries();
  const Device device = reader_.origin().device;
  constexpr const char* thread_range = "1 to 4096, or 0 for that of set_num_threads";
  if (given(Name::num_threads))
    threads_ = integer32(argument(Name::num_threads), "num_threads", thread_range);
  if (threads_ < 0 || threads_ > 4096)
    refuse("num_threads is " + std::to_string(threads_) + "; accepted: " + thread_range);
  if (!device.host())
    threads_ = 0;
  else if (threads_ == 0)
    threads_ = num_threads();
  const nb::handle backend = arguments_.find(Name::backend);
  owner_ = backend.is_valid() ? context_for(backend, device, threads_)
                              : context_for(std::string("auto"), device, threads_);

  nb::object k = argument(Name::k), v = argument(Name::v);
  const auto is_list = [](nb::handle x) {
    return nb::isinstance<nb::list>(x) || nb::isinstance<nb::tuple>(x);
  };
  several_ = is_list(k);
  if (several_ != is_list(v) && !v.is_none()) {
    const auto type = [](nb::handle x) { return text_of(x.type().attr("__name__")); };
    refuse(std::string(several_ ? "k" : "v") + " is a " + type(several_ ? k : v) + ", " +
           (several_ ? "v" : "k") + " a " + type(several_ ? v : k) +
           "; accepted: an array for each, or lists of segments for both");
  }
  const size_t count = several_ ? nb::len(k) : 1;
  if (count == 0) refuse("k is an empty list; accepted: one segment or more");
  segments_.resize(count);
  segment_args_.resize(count);
  int64_t shared = 0;
  if (given(Name::shared_segments))
    shared = integer(argument(Name::shared_segments), "shared_segments");
  if (shared < 0 || size_t(shared) > count)
    refuse("shared_segments is " + std::to_string(shared) + "; accepted: 0 to " +
           std::to_string(count) + (several_ ? ", the segments in k" : ""));
  for (size_t i = 0; i < count; ++i) {
    clear(&segments_[i]);
    clear(&segment_args_[i]);
    segments_[i].shared = i < size_t(shared);
    read_segment(i);
  }
  problem_.num_segments = args_.num_segments = int32_t(count);
  problem_.segments = segments_.data();
  args_.segments = segment_args_.data();
  read_scores();
  read_out_type();
  read_execution();
}

nb::object Call::argument(Name name) const {
  const nb::handle found = arguments_.find(name);
  return found.is_valid() ? nb::borrow(found) : nb::none();
}

nb::object Call::of_segment(Name what, size_t i, std::string* name) const {
  nb::object value = argument(what);
  *name = text_of(what);
  if (!several_ || value.is_none()) return value;
  if (!nb::isinstance<nb::list>(value) && !nb::isinstance<nb::tuple>(value))
    refuse(*name +
           " is not a list; accepted where k is a list: a list with an element or None for each");
  if (nb::len(value) != segments_.size())
    refuse(*name + " has " + std::to_string(nb::len(value)) +
           " elements; accepted: " + std::to_string(segments_.size()) + ", as k has");
  *name += "[" + std::to_string(i) + "]";
  return nb::object(value[i]);
}

const Array& Call::keep(Array array) {
  arrays_.push_back(std::make_unique<Array>(std::move(array)));
  return *arrays_.back();
}

const void* Call::vector_of(const char* name, nb::handle value, const char* type,
                            const Sizes& shape, const char* form) {
  const Array& a = keep(reader_.next(value, name));
  a.need_type(type);
  a.need_shape(shape, form);
  a.need_contiguous();
  return a.address();
}

void Call::read_queries() {
  attn_problem& p = problem_;
  const Array& q = keep(reader_.first(argument(Name::q), "q"));
  const bool packed = given(Name::cu_seqlens_q);
  const size_t dims = packed ? 3 : 4;
  if (q.tensor.ndim() != dims)
    refuse("q has shape " + shape_text(q.shape()) +
           (packed ? "; accepted with cu_seqlens_q: [total_q, Hq, D]"
                   : "; accepted: [B, Sq, Hq, D], or packed with cu_seqlens_q"));
  const auto is_q = [](const ElementType& t) { return t.is_float() || t.is_fp8(); };
  if (!is_q(q.type)) refuse(std::string("q is ") + q.type.name + "; accepted: " + names_of(is_q));
  p.q_type = q.type.type;
  p.heads_q = q.size(dims - 2);
  p.head_dim = q.size(dims - 1);
  const Sizes strides = q.outer_strides();
  if (packed) {
    p.q_layout = ATTN_PACKED;
    p.total_q = q.size(0);
    p.q_stride = {0, strides[0], strides[1]};
    const Array& offsets = keep(reader_.next(argument(Name::cu_seqlens_q), "cu_seqlens_q"));
    offsets.need_type("i32");
    offsets.need_shape({-1}, "[B + 1]");
    offsets.need_contiguous();
    if (offsets.size(0) < 1) refuse("cu_seqlens_q has shape [0]; accepted: [B + 1]");
    p.batch = offsets.size(0) - 1;
    p.seqlen_q = given(Name::max_seqlen_q) ? integer(argument(Name::max_seqlen_q), "max_seqlen_q")
                                           : p.total_q;
    args_.cu_seqlens_q = static_cast<const int32_t*>(offsets.data());
  } else {
    if (given(Name::max_seqlen_q))
      refuse("max_seqlen_q is given; accepted without cu_seqlens_q: None");
    p.batch = q.size(0);
    p.seqlen_q = q.size(1);
    p.q_stride = {strides[0], strides[1], strides[2]};
  }
  args_.q = q.data();
}

void Call::read_segment(size_t i) {
  attn_problem& p = problem_;
  attn_segment& s = segments_[i];
  attn_segment_args& a = segment_args_[i];
  const int64_t batch = s.shared ? 1 : p.batch;
  std::string k_name, v_name, offsets_name, table_name, lengths_name, descale_name;
  nb::object k_value = of_segment(Name::k, i, &k_name), v_value = of_segment(Name::v, i, &v_name);
  const Array& k = keep(reader_.next(k_value, k_name));
  // v None: V is the first columns of k.
  s.v_in_k = v_value.is_none();
  const Array& v = s.v_in_k ? k : keep(reader_.next(v_value, v_name));
  nb::object offsets = of_segment(Name::cu_seqlens_kv, i, &offsets_name);
  nb::object table = of_segment(Name::block_table, i, &table_name);
  nb::object lengths = of_segment(Name::seqlens_kv, i, &lengths_name);
  if (!offsets.is_none() && !(table.is_none() && lengths.is_none()))
    refuse(offsets_name + " and " + (table.is_none() ? lengths_name : table_name) +
           " are given; accepted: packed keys with cu_seqlens_kv alone");

  std::string pool_name;
  const nb::object pool = of_segment(Name::list_of_pool, i, &pool_name);
  s.list_of_pool = !pool.is_none() && boolean(pool, pool_name);
  const bool pages = !table.is_none() || s.list_of_pool;
  std::string most_name;
  const nb::object most = of_segment(Name::max_seqlen_kv, i, &most_name);
  if (table.is_none() && !most.is_none())
    refuse(most_name + " is given; accepted without block_table: None");
  const char* form = !offsets.is_none() ? "[total, Hkv, D]"
                     : pages            ? "[pages, page_size, Hkv, D]"
                                        : "[B, Skv, Hkv, D]";
  const size_t dims = offsets.is_none() ? 4 : 3;
  k.need_shape(Sizes(dims, -1), form);
  Sizes v_shape = k.shape();
  v_shape.back() = -1;
  v.need_shape(v_shape, "k's shape except the last dimension");
  std::string type_name;
  const auto [k_type, dim] = kv_type(k, p.head_dim, of_segment(Name::k_type, i, &type_name));
  auto [v_type, dim_v] = s.v_in_k ? std::pair(k_type, dim)
                                  : kv_type(v, i == 0 ? p.head_dim : p.head_dim_v,
                                            of_segment(Name::v_type, i, &type_name));
  if (given(Name::head_dim_v)) {
    if (!s.v_in_k)
      refuse("head_dim_v is given; accepted with v None, which takes v from k: " + v_name +
             " has its own");
    dim_v = integer(argument(Name::head_dim_v), "head_dim_v");
  }
  s.k_type = k_type;
  s.v_type = v_type;
  const int64_t heads = k.size(dims - 2);
  if (i == 0) {
    p.heads_kv = heads;
    p.head_dim_v = dim_v;
  }
  const auto same = [](const std::string& name, const char* what, int64_t value, int64_t want,
                       const char* whose) {
    if (value != want)
      refuse(name + ": " + what + " is " + std::to_string(value) +
             "; accepted: " + std::to_string(want) + " as in " + whose);
  };
  if (dim_v == 0 && s.v_in_k)  // which attn.h takes for head_dim
    refuse("head_dim_v is 0; accepted: 1 to " + std::to_string(dim));
  if (dim_v == 0)
    refuse(v_name + " has shape " + shape_text(v.shape()) +
           "; accepted: a head_dim_v of 1 or more");
  same(k_name, "head_dim", dim, p.head_dim, "q");
  same(k_name, "heads_kv", heads, p.heads_kv, "k[0]");
  same(v_name, "head_dim_v", dim_v, p.head_dim_v, "v[0]");

  s.k_stride = strides_of(k, k_type);
  a.k = k.data();
  if (!s.v_in_k) {
    s.v_stride = strides_of(v, v_type);
    a.v = v.data();
  }
  const auto scales = [&](Name what, const Array& of, attn_dtype type, int64_t elements,
                          attn_strides* stride) -> const void* {
    std::string name;
    nb::object value = of_segment(what, i, &name);
    if (value.is_none()) {
      if (find_type(type).has_scales)
        refuse(name + " is None; accepted for " + of.name + " in " + find_type(type).name + ": " +
               scales_form(type));
      return nullptr;
    }
    if (!find_type(type).has_scales)
      refuse(name + " is given; accepted for " + of.name + " in " + find_type(type).name +
             ": None");
    return read_scales(keep(reader_.next(value, name)), of, type, elements, stride);
  };
  a.k_scale = scales(Name::k_scale, k, k_type, dim, &s.k_scale_stride);
  if (!s.v_in_k) a.v_scale = scales(Name::v_scale, v, v_type, dim_v, &s.v_scale_stride);

  if (!offsets.is_none()) {
    s.layout = ATTN_PACKED;
    s.total = s.seqlen = k.size(0);
    a.cu_seqlens = static_cast<const int32_t*>(
        vector_of(offsets_name.c_str(), offsets, "i32", {p.batch + 1}, "[B + 1]"));
  } else if (!table.is_none()) {
    a.block_table = read_pages(k, keep(reader_.next(table, table_name)), batch, &s);
    if (!most.is_none()) {
      s.seqlen = integer(most, most_name);
      if (s.seqlen < 1)  // 0 is all that the table has room for
        refuse(most_name + " is " + std::to_string(s.seqlen) + "; accepted: 1 or more");
    }
  } else if (pages) {
    set_pages(k, &s);
  } else {
    same(k_name, "batch", k.size(0), batch,
         s.shared                    ? "a shared segment"
         : p.q_layout == ATTN_PACKED ? "cu_seqlens_q"
                                     : "q");
    s.seqlen = k.size(1);
  }
  if (!lengths.is_none()) {
    s.has_seqlens = 1;
    a.seqlens = static_cast<const int32_t*>(
        vector_of(lengths_name.c_str(), lengths, "i32", {batch}, s.shared ? "[1]" : "[B]"));
  }
  std::string name;
  if (const nb::object start = of_segment(Name::key_start, i, &name); !start.is_none()) {
    s.has_key_start = 1;
    a.key_start = static_cast<const int64_t*>(
        vector_of(name.c_str(), start, "i64", {batch}, s.shared ? "[1]" : "[B]"));
    if (given(Name::key_places)) read_places(&s);
  } else if (given(Name::key_places)) {
    refuse("key_places is given without " + name + "; accepted: None");
  }
  if (const nb::object ready = of_segment(Name::ready, i, &name); !ready.is_none()) {
    s.has_ready = 1;
    a.ready = static_cast<const uint32_t*>(vector_of(name.c_str(), ready, "u32", {2}, "[2]"));
  }
  nb::object descale = of_segment(Name::k_descale, i, &descale_name);
  s.k_descale = read_descale(descale_name, descale, &s, &a.k_descale);
  descale = of_segment(Name::v_descale, i, &descale_name);
  if (s.v_in_k && !descale.is_none())
    refuse(descale_name + " is given; accepted where v is in k: None, k_descale is its own");
  s.v_descale = read_descale(descale_name, descale, &s, &a.v_descale);
  read_lists(i);
}

void Call::read_lists(size_t i) {
  const attn_problem& p = problem_;
  attn_segment& s = segments_[i];
  attn_segment_args& a = segment_args_[i];
  std::string name, lengths_name;
  const nb::object positions = of_segment(Name::no_positions, i, &name);
  s.no_positions = !positions.is_none() && boolean(positions, name);
  const nb::object lengths = of_segment(Name::list_lengths, i, &lengths_name);
  const nb::object value = of_segment(Name::lists, i, &name);
  if (value.is_none()) {
    if (!lengths.is_none()) refuse(lengths_name + " is given; accepted without lists: None");
    return;
  }
  constexpr const char* sizes = "1, 64, 128";
  if (given(Name::list_block))
    s.list_block = integer32(argument(Name::list_block), "list_block", sizes);
  if (given(Name::list_queries))
    s.list_queries = integer32(argument(Name::list_queries), "list_queries", sizes);
  const int64_t block = s.list_queries > 1 ? s.list_queries : 1;
  const bool packed = p.q_layout == ATTN_PACKED;
  const Array& lists = keep(reader_.next(value, name));
  lists.need_type("i32");
  lists.need_shape(
      packed ? Sizes{p.total_q, -1, -1} : Sizes{p.batch, (p.seqlen_q + block - 1) / block, -1, -1},
      packed ? "[total_q, Hkv or 1, entries]" : "[B, ceil(Sq / list_queries), Hkv or 1, entries]");
  lists.need_contiguous();
  Sizes shape = lists.shape();
  s.list_size = shape.back();
  if (s.list_size == 0) refuse(name + " has no entries; accepted: 1 or more");
  shape.pop_back();
  s.list_heads = shape.back();
  if (s.list_heads == 0) refuse(name + " has no heads; accepted: 1, or those of k");
  a.list = static_cast<const int32_t*>(lists.address());
  if (lengths.is_none()) return;
  s.has_list_lengths = 1;
  a.list_lengths = static_cast<const int32_t*>(
      vector_of(lengths_name.c_str(), lengths, "i32", shape, "the shape of lists without entries"));
}

void Call::read_places(attn_segment* segment) {
  const nb::object places = argument(Name::key_places);
  constexpr const char* form =
      "key_places is not (interleave, ranks, rank); accepted: three integers";
  if ((!nb::isinstance<nb::list>(places) && !nb::isinstance<nb::tuple>(places)) ||
      nb::len(places) != 3)
    refuse(form);
  segment->key_interleave = integer(nb::object(places[0]), "key_places[0]");
  segment->key_ranks = integer32(nb::object(places[1]), "key_places[1]");
  segment->key_rank = integer32(nb::object(places[2]), "key_places[2]");
}

attn_descale_kind Call::read_descale(const std::string& name, nb::handle value,
                                     attn_segment* segment, const float** pointer) {
  if (value.is_none()) return ATTN_DESCALE_NONE;
  const Array& a = keep(reader_.next(value, name));
  *pointer = static_cast<const float*>(a.address());
  const int64_t batch = segment && segment->shared ? 1 : problem_.batch;
  return descale_kind(a, batch, problem_.heads_kv, segment);
}

void Call::read_scores() {
  attn_problem& p = problem_;
  if (is_set(Name::causal)) p.flags |= ATTN_CAUSAL;
  if (is_set(Name::causal_top_left)) p.flags |= ATTN_CAUSAL_TOP_LEFT;
  if (given(Name::window)) {
    const auto [left, right] = integers(argument(Name::window), "window",
                                        "a pair of integers (left, right), -1 = unbounded");
    if (left != -1 || right != -1) {
      p.flags |= ATTN_WINDOW;
      p.window_left = left;
      p.window_right = right;
    }
  }
  if (given(Name::scale)) {
    p.scale = number(argument(Name::scale), "scale", "a number or None");
    if (p.scale == 0) p.scale = FLT_MIN;  // which attn.h recommends: its own 0 is 1 / sqrt(D)
  }
  if (arguments_.find(Name::softcap).is_valid())
    p.softcap = number(argument(Name::softcap), "softcap", "a number");

  std::string name;
  p.q_descale = read_descale("q_descale", argument(Name::q_descale), nullptr, &args_.q_descale);
  if (given(Name::alibi_slopes)) {
    p.flags |= ATTN_ALIBI;
    args_.alibi_slopes = static_cast<const float*>(
        vector_of("alibi_slopes", argument(Name::alibi_slopes), "f32", {p.heads_q}, "[Hq]"));
  }
  if (given(Name::sinks)) {
    p.flags |= ATTN_SINKS;
    args_.sinks = static_cast<const float*>(
        vector_of("sinks", argument(Name::sinks), "f32", {p.heads_q}, "[Hq]"));
  }
  if (given(Name::kv_begin)) {
    p.has_kv_begin = 1;
    args_.kv_begin = static_cast<const int32_t*>(
        vector_of("kv_begin", argument(Name::kv_begin), "i32", {p.batch}, "[B]"));
  }
  if (given(Name::causal_sequences)) {
    p.has_causal_sequences = 1;
    args_.causal_sequences = static_cast<const int32_t*>(
        vector_of("causal_sequences", argument(Name::causal_sequences), "i32", {p.batch}, "[B]"));
  }
  if (given(Name::query_start)) {
    p.flags |= ATTN_QUERY_POSITIONS;
    args_.query_start = static_cast<const int64_t*>(
        vector_of("query_start", argument(Name::query_start), "i64", {p.batch}, "[B]"));
  }
  if (given(Name::out_scale)) {
    p.flags |= ATTN_OUT_SCALE;
    args_.out_scale = static_cast<const float*>(
        vector_of("out_scale", argument(Name::out_scale), "f32", {1}, "[1]"));
  }
  if (arguments_.find(Name::tree_keys).is_valid())
    p.tree_keys = integer(argument(Name::tree_keys), "tree_keys");
  if (given(Name::tree)) {
    if (p.tree_keys == 0) refuse("tree_keys is 0; accepted with tree: 1 to 128");
    const bool packed = p.q_layout == ATTN_PACKED;
    const Array& tree = keep(reader_.next(argument(Name::tree), "tree"));
    if (std::strcmp(tree.type.name, "u64") && std::strcmp(tree.type.name, "i64"))
      refuse(std::string("tree is ") + tree.type.name + "; accepted: u64, i64");
    tree.need_shape(packed ? Sizes{p.total_q, 2} : Sizes{p.batch, p.seqlen_q, 2},
                    packed ? "[total_q, 2]" : "[B, Sq, 2]");
    tree.need_contiguous();
    args_.tree = static_cast<const uint64_t*>(tree.address());
  }
  int64_t seqlen_kv = 0;
  for (const attn_segment& s : segments_)
    if (!s.no_positions) seqlen_kv += s.seqlen;
  if (given(bias_)) read_bias(seqlen_kv);
  if (given(Name::bias_slopes)) {
    p.flags |= ATTN_BIAS_SLOPES;
    args_.bias_slopes = static_cast<const float*>(
        vector_of("bias_slopes", argument(Name::bias_slopes), "f32", {p.heads_q}, "[Hq]"));
  }
  if (given(Name::block_mask)) {
    Mask* mask = nullptr;
    if (!nb::try_cast(nb::getattr(argument(Name::block_mask), "_mask", nb::none()), mask) || !mask)
      refuse_type(argument(Name::block_mask), "block_mask", "a BlockMask or None");
    if (mask->device != reader_.origin().device)
      refuse("block_mask is in " + mask->device.text() +
             "; accepted: " + reader_.origin().device.text() + ", where q is");
    mask->mask.apply(&problem_, &args_);
  }
}

void Call::read_bias(int64_t seqlen_kv) {
  attn_problem& p = problem_;
  reader_.heads_first = false;
  const Array& bias = keep(reader_.next(argument(bias_), text_of(bias_)));
  reader_.heads_first = of_torch();
  const int64_t want[] = {p.batch, p.heads_q, p.seqlen_q, seqlen_kv};
  bool good = bias.tensor.ndim() == 4;
  for (size_t i = 0; good && i < 4; ++i) good = bias.size(i) == 1 || bias.size(i) == want[i];
  if (!good)
    refuse(bias.name + " has shape " + shape_text(bias.shape()) +
           "; accepted: [B, Hq, Sq, Skv] = " + shape_text({want[0], want[1], want[2], want[3]}) +
           " or 1 where it broadcasts");
  if (bias.type.type != ATTN_F32 && bias.type.type != ATTN_F16 && bias.type.type != p.q_type)
    refuse(bias.name + " is " + bias.type.name + "; accepted: f32, f16 or q's type");
  p.bias_type = bias.type.type;
  args_.bias = bias.address();
  bool any = false, more = false;
  for (size_t i = 0; i < 4; ++i) {
    // The stride of one element means nothing, but four zeros mean "contiguous".
    p.bias_stride[i] = want[i] <= 1 ? 1 : bias.size(i) == 1 ? 0 : bias.tensor.stride(i);
    any |= p.bias_stride[i] != 0;
    more |= want[i] > 1;
  }
  if (!any && more) refuse(bias.name + " has one number for all scores; accepted: one that varies");
}

void Call::read_out_type() {
  attn_problem& p = problem_;
  const ElementType& q = find_type(p.q_type);
  if (of_torch()) {
    if (!q.is_float())
      refuse(std::string("q is ") + q.name + "; accepted: " + names_of(&ElementType::is_float));
    const Array& out = keep(reader_.like_first("out", p.head_dim_v));
    const Sizes strides = out.outer_strides();
    p.out_type = p.q_type;
    p.out_stride = {strides[0], strides[1], strides[2]};
    args_.out = out.data();
    out_ = out.source;
    return;
  }
  const auto accepted = [] { return names_of(&ElementType::is_out) + " (reference)"; };
  if (given(Name::out_dtype)) {
    const ElementType* type = find_type(argument(Name::out_dtype));
    if (!type || !type->is_out())
      refuse("out_dtype is " + text_of(argument(Name::out_dtype)) + "; accepted: " + accepted());
    p.out_type = type->type;
  } else {
    p.out_type = q.is_fp8() ? ATTN_BF16 : p.q_type;
  }
  if (is_set(Name::accumulate) && !(given(Name::out) && given(Name::lse)))
    refuse(
        "accumulate is set without out and lse; accepted: both, with the result of earlier calls");
  if (!given(Name::out)) return;
  out_ = argument(Name::out);
  const Array& out = keep(reader_.output(out_, "out"));
  if (!out.type.is_out())
    refuse(std::string("out is ") + out.type.name + "; accepted: " + accepted());
  if (given(Name::out_dtype) && out.type.type != p.out_type)
    refuse(std::string("out is ") + out.type.name + "; accepted: " + find_type(p.out_type).name +
           " as out_dtype says");
  p.out_type = out.type.type;
  if (is_set(Name::accumulate)) p.flags |= ATTN_ACCUMULATE;
  const bool packed = p.q_layout == ATTN_PACKED;
  out.need_shape(packed ? Sizes{p.total_q, p.heads_q, p.head_dim_v}
                        : Sizes{p.batch, p.seqlen_q, p.heads_q, p.head_dim_v},
                 packed ? "[total_q, Hq, Dv]" : "[B, Sq, Hq, Dv]");
  const Sizes strides = out.outer_strides();
  p.out_stride = packed ? attn_strides{0, strides[0], strides[1]}
                        : attn_strides{strides[0], strides[1], strides[2]};
  args_.out = out.data();
}

void Call::read_execution() {
  attn_problem& p = problem_;
  if (given(Name::kernel)) {
    kernel_ = text(argument(Name::kernel), "kernel", "a kernel's name or None");
    if (kernel_.empty()) refuse("kernel is empty text; accepted: a kernel's name or None");
    p.kernel = kernel_.c_str();
  }
  if (given(Name::max_sms)) p.max_sms = integer32(argument(Name::max_sms), "max_sms");
  if (given(Name::fixed_split)) p.fixed_split = integer(argument(Name::fixed_split), "fixed_split");
  if (given(Name::split_invariant) && is_set(Name::split_invariant))
    p.flags |= ATTN_SPLIT_INVARIANT;
  if (given(Name::kv_prefix_stable) && is_set(Name::kv_prefix_stable))
    p.flags |= ATTN_KV_PREFIX_STABLE;
  if (given(Name::fp8_precise) && is_set(Name::fp8_precise)) p.flags |= ATTN_FP8_PRECISE;
}

void Call::make_outputs() {
  const attn_problem& p = problem_;
  const bool packed = p.q_layout == ATTN_PACKED;
  if (out_.is_none()) {
    const Array& out =
        keep(reader_.empty("out",
                           packed ? Sizes{p.total_q, p.heads_q, p.head_dim_v}
                                  : Sizes{p.batch, p.seqlen_q, p.heads_q, p.head_dim_v},
                           find_type(p.out_type)));
    out_ = out.source;
    args_.out = out.data();
  }
  const Sizes shape = packed ? Sizes{p.heads_q, p.total_q} : Sizes{p.batch, p.heads_q, p.seqlen_q};
  if (given(Name::lse)) {
    const Array& lse = keep(reader_.output(argument(Name::lse), "lse"));
    lse.need_type("f32");
    lse.need_shape(shape, packed ? "[Hq, total_q]" : "[B, Hq, Sq]");
    lse.need_contiguous();
    args_.lse = static_cast<float*>(lse.data());
    if (is_set(Name::return_lse)) lse_ = argument(Name::lse);
  } else if (is_set(Name::return_lse)) {
    const Array& lse = keep(reader_.empty("lse", shape, find_type("f32")));
    lse_ = lse.source;
    args_.lse = static_cast<float*>(lse.data());
  }
}

attn_problem Call::in_steps() {
  const bool any_keys =
      problem_.bias_type == ATTN_DTYPE_NONE && !(problem_.flags & ATTN_BLOCK_MASK);
  for (attn_segment& s : segments_) {
    const bool blocks = s.k_descale == ATTN_DESCALE_BLOCK || s.v_descale == ATTN_DESCALE_BLOCK;
    const int64_t room = int64_t{s.max_pages} * s.page_size;
    if (any_keys && s.layout == ATTN_PAGED && s.has_seqlens && !blocks && s.seqlen < room)
      s.seqlen = std::min(room, int64_t(stepped(size_t(s.seqlen), few_keys)));
  }
  attn_problem p = problem_;
  // What kernels that consist of others compute takes the tokens of its plan alone.
  const bool exact = p.flags & (ATTN_ACCUMULATE | ATTN_BLOCK_MASK) ||
                     std::any_of(segments_.begin(), segments_.end(), [](const attn_segment& s) {
                       return s.list_size > 0 || s.shared || s.has_ready || s.has_key_start ||
                              s.no_positions || s.v_in_k || s.k_type == ATTN_F8_E4M3FN_TOKEN;
                     });
  // Of out by heads, tokens of one head would reach into the next one's.
  const attn_strides& out = p.out_stride;
  const bool by_tokens =
      std::abs(out.seq) >= std::abs(out.head) * (p.heads_q - 1) + p.head_dim_v || out.seq == 0;
  if (p.q_layout != ATTN_PACKED || p.total_q <= few_tokens || exact || !by_tokens) return p;
  args_.total_q = p.total_q;
  p.total_q = int64_t(stepped(size_t(p.total_q), 1));
  // The host compares each sequence with it, if it says anything.
  const attn_backend backend = owner_->backend();
  const bool compares = backend == ATTN_BACKEND_CPU || backend == ATTN_BACKEND_REFERENCE;
  if (p.seqlen_q > few_tokens && (!compares || p.seqlen_q == args_.total_q))
    p.seqlen_q = std::min(p.total_q, int64_t(stepped(size_t(p.seqlen_q), 1)));
  return p;
}

void Call::check(Compiled& compiled) {
  make_outputs();
  nb::gil_scoped_release release;
  compiled.made.check_args(args_, reader_.stream());
}

nb::object Call::run(Compiled& compiled) {
  make_outputs();
  launch(compiled, [&](void* workspace, size_t bytes, void* stream) {
    return attn_run(compiled.made.get(), &args_, workspace, bytes, stream);
  });
  return results();
}

void Call::launch(Compiled& compiled, const std::function<attn_status(void*, size_t, void*)>& run) {
  void* stream = reader_.stream();
  const plan& made = compiled.made;
  if (const size_t bytes = made.workspace(); bytes > 0) {
    // A graph keeps what its runs use, and is replayed at the same time as other graphs and other
    // runs.
    const nb::object own = reader_.captured(bytes);
    if (!own.is_none()) {
      void* workspace = reinterpret_cast<void*>(nb::cast<intptr_t>(own.attr("data_ptr")()));
      nb::gil_scoped_release release;
      attn::check(attn_workspace_init(made.get(), workspace, bytes, stream));
      attn::check(run(workspace, bytes, stream));
      return;
    }
  }
  Workspace workspace;
  if (made.workspace() > 0) workspace = take_workspace(compiled.owner, stream);
  {
    nb::gil_scoped_release release;
    if (workspace.memory.bytes() < made.workspace()) {
      workspace.memory = buffer();  // freed before there is a larger one
      workspace.memory = buffer(*compiled.owner, stepped(made.workspace(), 4096));
      workspace.plan = 0;
    }
    if (workspace.plan != compiled.number)
      attn::check(attn_workspace_init(made.get(), workspace.memory.data(), workspace.memory.bytes(),
                                      stream));
    workspace.plan = compiled.number;
    attn::check(run(workspace.memory.data(), workspace.memory.bytes(), stream));
    if (reader_.waits()) compiled.owner->synchronize(stream);
  }
  if (workspace.owner) keep_workspace(std::move(workspace));
}

nb::object Call::results() const {
  if (lse_.is_none()) return out_;
  return nb::make_tuple(out_, lse_);
}

}  // namespace attn::python
