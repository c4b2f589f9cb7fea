// kv_append().
#include <cstdint>

#include "cache_call.h"

namespace attn::python {
namespace {

class Append : CacheCall {
 public:
  explicit Append(const nb::dict& arguments) : CacheCall(arguments) {
    clear(&problem_);
    clear(&problem_.segment);
    args_ = make<attn_kv_append_args>();
    args_.cache = make<attn_segment_args>();
    read_new();
    read_cache();
    read_rotary();
    if (given("q")) read_queries();
    if (given("q_out") && !given("q")) refuse("q_out is given; accepted without q: None");
  }

  nb::object run() {
    const std::shared_ptr<Compiled> compiled =
        cached(context_for(argument("backend"), reader_.origin().device), problem_);
    if (given("q") && !given("q_out")) {
      const Array& out = keep(reader_.empty("q_out", q_shape_, reader_.origin().type));
      q_out_ = out.source;
      args_.q_out = out.data();
    }
    {
      nb::gil_scoped_release release;
      compiled->made.run(args_, reader_.stream());
      if (reader_.waits()) compiled->owner->synchronize(reader_.stream());
    }
    return q_out_;
  }

 private:
  const char* form(const char* padded, const char* packed) const {
    return problem_.new_layout == ATTN_PACKED ? packed : padded;
  }

  void read_new() {
    attn_kv_append_problem& p = problem_;
    const Array& k = keep(reader_.first(argument("k_new"), "k_new"));
    p.new_layout = given("cu_seqlens_new") ? ATTN_PACKED : ATTN_PADDED;
    // Packed for the caller: one entry with all tokens.
    const bool one = given("slot_mapping") && k.shape().size() == 3;
    const size_t dims = p.new_layout == ATTN_PACKED || one ? 3 : 4;
    k.need_shape(Sizes(dims, -1), one ? "[T, Hkv, D]" : form("[B, T, Hkv, D]", "[total, Hkv, D]"));
    k.need_floats();
    p.new_type = k.type.type;
    p.heads_kv = k.size(dims - 2);
    p.head_dim = k.size(dims - 1);
    p.k_new_stride = strides_of(k);
    args_.k_new = k.data();
    if (given("v_new")) {
      const Array& v = next("v_new");
      Sizes v_shape = k.shape();
      v_shape.back() = -1;
      v.need_shape(v_shape, "k_new's shape except the last dimension");
      v.need_type(k.type.name);
      if (v.size(dims - 1) == 0)  // which attn.h takes for head_dim
        refuse("v_new has shape " + shape_text(v.shape()) +
               "; accepted: a head_dim_v of 1 or more");
      p.head_dim_v = v.size(dims - 1);
      p.v_new_stride = strides_of(v);
      args_.v_new = v.data();
    }
    if (p.new_layout == ATTN_PACKED) {
      const Array& offsets = next("cu_seqlens_new");
      offsets.need_type("i32");
      offsets.need_shape({-1}, "[B + 1]");
      offsets.need_contiguous();
      if (offsets.size(0) < 1) refuse("cu_seqlens_new has shape [0]; accepted: [B + 1]");
      p.batch = offsets.size(0) - 1;
      p.total_new = k.size(0);
      p.seqlen_new = given("max_seqlen_new") ? integer(argument("max_seqlen_new"), "max_seqlen_new")
                                             : p.total_new;
      args_.cu_seqlens_new = static_cast<const int32_t*>(offsets.data());
    } else {
      if (given("max_seqlen_new"))
        refuse("max_seqlen_new is given; accepted without cu_seqlens_new: None");
      p.batch = one ? 1 : k.size(0);
      p.seqlen_new = k.size(dims - 3);
    }
    if (!given("slot_mapping")) return;
    for (const char* name : {"seqlens", "cu_seqlens_new", "block_table", "seqlens_out", "q"})
      if (given(name)) refuse(std::string(name) + " is given; accepted with slot_mapping: None");
    const Array& slots = next("slot_mapping");
    slots.need_type("i64");
    slots.need_shape(one ? Sizes{p.seqlen_new} : Sizes{p.batch, p.seqlen_new},
                     one ? "[T]" : "[B, T]");
    slots.need_contiguous();
    p.has_slots = 1;
    args_.slot_mapping = static_cast<const int64_t*>(slots.address());
  }

  CacheDims dims() const {
    return {problem_.batch, problem_.heads_kv, problem_.head_dim, problem_.head_dim_v,
            !given("v_new")};
  }
  void read_cache() {
    attn_kv_append_problem& p = problem_;
    attn_segment& s = p.segment;
    attn_segment_args& a = args_.cache;
    CacheCall::read_cache({"k_cache", "v_cache", "block_table", "new tokens", p.has_slots != 0},
                          dims(), &s, &a);
    if (p.has_slots) {
      if (boolean(argument("advance_seqlens"), "advance_seqlens"))
        refuse("advance_seqlens is True; accepted with slot_mapping: False");
      return read_descales(dims(), &s, &a);
    }
    const bool in_place = boolean(argument("advance_seqlens"), "advance_seqlens");
    if (in_place && given("seqlens_out"))
      refuse("seqlens_out is given; accepted with advance_seqlens: None");
    int32_t* const lengths = lengths_of(
        in_place ? output("seqlens", "without advance_seqlens any") : next("seqlens"), p.batch);
    s.has_seqlens = 1;
    a.seqlens = lengths;
    if (in_place) args_.seqlens_out = lengths;
    if (given("seqlens_out"))
      args_.seqlens_out = lengths_of(output("seqlens_out", "None"), p.batch);
    p.advance_seqlens = args_.seqlens_out != nullptr;
    read_descales(dims(), &s, &a);
  }

  const float* read_table(const char* name, const Sizes& shape) {
    const Array& table = next(name);
    table.need_type("f32");
    table.need_shape(shape, "[positions, R / 2]");
    table.need_contiguous();
    problem_.rotary_positions = table.size(0);
    problem_.rotary_dim = 2 * table.size(1);
    return static_cast<const float*>(table.address());
  }

  void read_rotary() {
    attn_kv_append_problem& p = problem_;
    p.rotary_interleaved = boolean(argument("rotary_interleaved"), "rotary_interleaved");
    if (given("rotary_cos") != given("rotary_sin"))
      refuse("one of rotary_cos and rotary_sin is None; accepted: both, or neither");
    if (!given("rotary_cos")) {
      if (p.rotary_interleaved || given("q"))
        refuse(std::string(given("q") ? "q" : "rotary_interleaved") +
               " is given; accepted with rotary_cos and rotary_sin alone");
      return;
    }
    args_.rotary_cos = read_table("rotary_cos", {-1, -1});
    if (p.rotary_dim == 0)  // which attn.h takes for none
      refuse("rotary_cos has no columns; accepted: R / 2 of 1 or more");
    args_.rotary_sin = read_table("rotary_sin", {p.rotary_positions, p.rotary_dim / 2});
  }

  void read_queries() {
    attn_kv_append_problem& p = problem_;
    const Array& q = next("q");
    const char* shape_form = form("[B, T, Hq, D]", "[total, Hq, D]");
    q_shape_ = reader_.origin().shape();
    q_shape_.end()[-2] = -1;
    q.need_shape(q_shape_, shape_form);
    q.need_type(reader_.origin().type.name);
    p.heads_q = q_shape_.end()[-2] = q.size(q_shape_.size() - 2);
    if (p.heads_q == 0)
      refuse("q has shape " + shape_text(q.shape()) + "; accepted: 1 head or more");
    p.q_stride = strides_of(q);
    args_.q = q.data();
    if (!given("q_out")) return;
    q_out_ = argument("q_out");
    const Array& out = output("q_out", "None");
    out.need_shape(q_shape_, shape_form);
    out.need_type(q.type.name);
    p.q_out_stride = strides_of(out);
    args_.q_out = out.data();
  }

  attn_kv_append_problem problem_;
  attn_kv_append_args args_;
  Sizes q_shape_;
  nb::object q_out_ = nb::none();
};

}  // namespace

nb::object kv_append(const nb::dict& arguments) {
  return Append(arguments).run();
}

}  // namespace attn::python
