// kv_roll().
#include <cstdint>

#include "cache_call.h"

namespace attn::python {
namespace {

class Roll : CacheCall {
 public:
  explicit Roll(const nb::dict& arguments) : CacheCall(arguments) {
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
  void read_recent() {
    attn_kv_roll_problem& p = problem_;
    const Array& k = keep(reader_.first(argument("k_recent"), "k_recent"));
    k.need_shape({-1, -1, -1, -1}, "[pages, page_size, Hkv, D]");
    k.need_floats();
    p.heads_kv = k.size(2);
    p.head_dim = k.size(3);
    recent_.k_type = recent_.v_type = k.type.type;
    recent_.k_stride = strides_of(k);
    from_.k = k.data();
    recent_.v_in_k = !given("v_recent");
    if (!recent_.v_in_k) {
      const Array& v = next("v_recent");
      v.need_shape({k.size(0), k.size(1), k.size(2), -1},
                   "k_recent's shape except the last dimension");
      v.need_type(k.type.name);
      if (v.size(3) == 0)  // which attn.h takes for head_dim
        refuse("v_recent has shape " + shape_text(v.shape()) +
               "; accepted: a head_dim_v of 1 or more");
      p.head_dim_v = v.size(3);
      recent_.v_stride = strides_of(v);
      from_.v = v.data();
    }
    const Array& table = output("recent_table", writable);
    table.need_shape({-1, -1}, "[B, pages of a sequence]");
    p.batch = table.size(0);
    from_.block_table = read_pages(k, table, p.batch, &recent_);
    recent_.has_seqlens = 1;
    from_.seqlens = lengths_of(output("recent_seqlens", writable), p.batch);
  }

  void read_old() {
    const attn_kv_roll_problem& p = problem_;
    const CacheDims dims = {p.batch, p.heads_kv, p.head_dim, p.head_dim_v, recent_.v_in_k != 0};
    read_cache({"k_old", "v_old", "old_table", "recent keys"}, dims, &old_, &to_);
    old_.has_seqlens = 1;
    to_.seqlens = lengths_of(output("old_seqlens", writable), p.batch);
    read_descales(dims, &old_, &to_);
  }

  attn_kv_roll_problem problem_;
  attn_segment recent_, old_;
  attn_segment_args from_, to_;
};

}  // namespace

void kv_roll(const nb::dict& arguments) {
  Roll(arguments).run();
}

}  // namespace attn::python
