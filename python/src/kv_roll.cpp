// kv_roll().
#include <cstdint>

#include "call.h"

namespace attn::python {
namespace {

class Roll {
 public:
  explicit Roll(const nb::dict& arguments) : arguments_(arguments) {
    clear(&problem_);
    clear(&recent_);
    clear(&old_);
    from_ = to_ = make<attn_segment_args>();
    read_recent();
    read_old();
    problem_.keep = integer(argument("keep"), "keep");
    problem_.recent = &recent_;
    problem_.old = &old_;
  }
  Roll(const Roll&) = delete;

  void run() {
    const std::shared_ptr<Compiled> compiled =
        cached(context_for(argument("backend"), reader_.origin().device), problem_);
    auto args = make<attn_kv_roll_args>();
    args.recent = &from_;
    args.old = &to_;
    nb::gil_scoped_release release;
    compiled->made.run(args, reader_.stream());
    if (reader_.waits()) compiled->owner->synchronize(reader_.stream());
  }

 private:
  static constexpr const char* writable = "arrays of NumPy, PyTorch or CuPy";
  nb::object argument(const char* name) const { return nb::object(arguments_[name]); }
  bool given(const char* name) const { return !argument(name).is_none(); }
  const Array& keep(Array array) {
    arrays_.push_back(std::make_unique<Array>(std::move(array)));
    return *arrays_.back();
  }
  const Array& next(const char* name) { return keep(reader_.next(argument(name), name)); }
  const Array& output(const char* name) {
    return keep(reader_.output(argument(name), name, writable));
  }
  const int32_t* lengths(const char* name) {
    const Array& a = output(name);
    a.need_type("i32");
    a.need_shape({problem_.batch}, "[B]");
    a.need_contiguous();
    return static_cast<const int32_t*>(a.address());
  }

  void read_recent() {
    attn_kv_roll_problem& p = problem_;
    const Array& k = keep(reader_.first(argument("k_recent"), "k_recent"));
    k.need_shape({-1, -1, -1, -1}, "[pages, page_size, Hkv, D]");
    const Array& v = next("v_recent");
    v.need_shape({k.size(0), k.size(1), k.size(2), -1},
                 "k_recent's shape but for the last dimension");
    if (k.type.type == ATTN_DTYPE_NONE)
      refuse(std::string("k_recent is ") + k.type.name + "; accepted: f32, f16, bf16");
    v.need_type(k.type.name);
    if (v.size(3) == 0)  // which attn.h takes for head_dim
      refuse("v_recent has shape " + shape_text(v.shape()) +
             "; accepted: a head_dim_v of 1 or more");
    p.heads_kv = k.size(2);
    p.head_dim = k.size(3);
    p.head_dim_v = v.size(3);
    recent_.k_type = recent_.v_type = k.type.type;
    recent_.k_stride = strides_of(k);
    recent_.v_stride = strides_of(v);
    from_.k = k.data();
    from_.v = v.data();
    const Array& table = output("recent_table");
    table.need_shape({-1, -1}, "[B, pages of a sequence]");
    p.batch = table.size(0);
    from_.block_table = read_pages(k, table, p.batch, &recent_);
    recent_.has_seqlens = 1;
    from_.seqlens = lengths("recent_seqlens");
  }

  void read_old() {
    attn_kv_roll_problem& p = problem_;
    const Array& k = output("k_old");
    const Array& v = output("v_old");
    const bool paged = given("old_table");
    const auto read = [&](const Array& a, const std::vector<int64_t>& shape, const char* form,
                          int64_t dim, const char* type_name) {
      a.need_shape({shape[0], shape[1], p.heads_kv, -1}, form);
      const auto [type, elements] = kv_type(a, dim, argument(type_name));
      if (elements != dim)
        refuse(a.name + ": a row has " + std::to_string(elements) +
               " elements; accepted: " + std::to_string(dim) + " as of recent keys");
      return type;
    };
    old_.k_type =
        read(k, {paged ? -1 : p.batch, -1}, paged ? "[pages, page_size, Hkv, D]" : "[B, S, Hkv, D]",
             p.head_dim, "k_type");
    old_.v_type = read(v, {k.size(0), k.size(1)}, "k_old's shape but for the last dimension",
                       p.head_dim_v, "v_type");
    old_.k_stride = strides_of(k, old_.k_type);
    old_.v_stride = strides_of(v, old_.v_type);
    to_.k = k.data();
    to_.v = v.data();
    const auto scales = [&](const char* name, const Array& of, attn_dtype type,
                            attn_strides* stride) -> const void* {
      if (given(name) != find_type(type).has_scales())
        refuse(std::string(name) + (given(name) ? " is given" : " is None") + "; accepted for " +
               of.name + " in " + find_type(type).name +
               (given(name) ? ": None" : ": f16 scales, one for each token and head"));
      return given(name) ? read_scales(output(name), of, stride) : nullptr;
    };
    to_.k_scale = scales("k_scale", k, old_.k_type, &old_.k_scale_stride);
    to_.v_scale = scales("v_scale", v, old_.v_type, &old_.v_scale_stride);
    if (paged)
      to_.block_table = read_pages(k, next("old_table"), p.batch, &old_);
    else
      old_.seqlen = k.size(1);
    old_.has_seqlens = 1;
    to_.seqlens = lengths("old_seqlens");
    const auto descale = [&](const char* name, const float** pointer) {
      if (!given(name)) return ATTN_DESCALE_NONE;
      const Array& a = next(name);
      *pointer = static_cast<const float*>(a.address());
      return descale_kind(a, p.batch, p.heads_kv, &old_);
    };
    old_.k_descale = descale("k_descale", &to_.k_descale);
    old_.v_descale = descale("v_descale", &to_.v_descale);
  }

  nb::dict arguments_;
  Reader reader_;
  std::vector<std::unique_ptr<Array>> arrays_;
  attn_kv_roll_problem problem_;
  attn_segment recent_, old_;
  attn_segment_args from_, to_;
};

}  // namespace

void kv_roll(const nb::dict& arguments) {
  Roll(arguments).run();
}

}  // namespace attn::python
