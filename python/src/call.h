// From the arguments of forward() to a plan and its run.
#pragma once
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "arrays.h"
#include "plans.h"

namespace attn::python {

// A C struct, zero but for struct_size, also between its fields: its bytes are a key.
template <class T>
void clear(T* value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memset(static_cast<void*>(value), 0, sizeof *value);
  value->struct_size = sizeof *value;
}

class Mask {
 public:
  std::shared_ptr<context> owner;
  Device device;
  attn_block_mask_shape shape;
  block_mask mask;
};

// The type of k or v and its elements per row. Bytes are blocks of the type `named`, or, where it
// is None or null, of q8_0 or q4_0; where they could be either, `dim` tells which.
std::pair<attn_dtype, int64_t> kv_type(const Array& a, int64_t dim, nb::handle named);
// The four sizes of [B, S, H, D], or of [total, H, D], which is a batch of 1; other shapes are
// refused with `form`.
Sizes sizes_of(const Array& a, const char* form);
// Of [B, S, H, D], or [total, H, D] without a batch.
attn_strides strides_of(const Array& a, attn_dtype type = ATTN_DTYPE_NONE);
// The scales of k's or v's rows of `dim` elements of a type that has them, whose array is `of`.
const void* read_scales(const Array& a, const Array& of, attn_dtype type, int64_t dim,
                        attn_strides* stride);
// What those scales are: "f16 scales, one for each token and head".
std::string scales_form(attn_dtype type);
// Makes a segment one of k's pages; read_pages with a block table.
void set_pages(const Array& k, attn_segment* segment);
const int32_t* read_pages(const Array& k, const Array& table, int64_t batch, attn_segment* segment);
// What an array of descales is by its shape. `segment` is null for q, which knows no blocks of
// keys.
attn_descale_kind descale_kind(const Array& a, int64_t batch, int64_t heads_kv,
                               attn_segment* segment);

// One call of backward(), whose arguments are in a dict: the gradients that it wants.
nb::object backward(const nb::dict& arguments);
// One call of kv_append(), whose arguments are in a dict: q_out or None.
nb::object kv_append(const nb::dict& arguments);
// The same of kv_roll().
void kv_roll(const nb::dict& arguments);
// (out, lse) of parts (out, lse).
nb::object merge(const std::vector<std::pair<nb::object, nb::object>>& parts, nb::handle out_dtype,
                 nb::handle backend);
// (stored, descale or None), (stored, scale) or (stored, scale, descale). scale: 1, "amax", another
// number, or an array of f32. per: "tensor", "head", 64 or 128.
nb::object quantize(nb::handle value, nb::handle dtype, nb::handle scale, nb::handle per,
                    nb::handle saturate, nb::handle backend);
// Adds the class Mask and the functions that build masks.
void add_block_masks(nb::module_& m);

// One call of forward().
class Call {
 public:
  // Of forward(), and those that Plan and explain() take more. They outlive the call.
  explicit Call(const Arguments& arguments);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const attn_problem& problem() const { return problem_; }
  // The same problem with capacities of packed q and of pages that also serve calls with more
  // tokens, where a plan can have such. The call then runs with its own number of tokens.
  attn_problem in_steps();
  const std::shared_ptr<context>& owner() const { return owner_; }
  int32_t threads() const { return threads_; }  // as asked for; 0 on devices
  // out, or (out, lse).
  nb::object run(Compiled& compiled);
  // Refuses contents of the small arrays that a run on a GPU would not look at.
  void check(Compiled& compiled);

 protected:
  // Runs with a workspace of the plan: run(workspace, bytes, stream) returns a status.
  void launch(Compiled& compiled, const std::function<attn_status(void*, size_t, void*)>& run);
  nb::object argument(Name name) const;
  bool of_torch() const { return bias_ == Name::attn_mask; }
  // Missing ones have forward()'s defaults.
  bool given(Name name) const {
    const nb::handle found = arguments_.find(name);
    return found.is_valid() && !found.is_none();
  }
  bool is_set(Name name) const {
    const nb::handle found = arguments_.find(name);
    return found.is_valid() && boolean(found, text_of(name));
  }
  // Of segment i; `name` gets "k[i]" where there are several.
  nb::object of_segment(Name what, size_t i, std::string* name) const;
  const Array& keep(Array array);
  const void* vector_of(const char* name, nb::handle value, const char* type, const Sizes& shape,
                        const char* form);
  void read_queries();
  void read_segment(size_t i);
  void read_lists(size_t i);
  attn_descale_kind read_descale(const std::string& name, nb::handle value, attn_segment* segment,
                                 const float** pointer);
  void read_places(attn_segment* segment);
  void read_scores();
  void read_bias(int64_t seqlen_kv);
  void read_out_type();
  void read_execution();
  void make_outputs();
  nb::object results() const;

  Arguments arguments_;
  // attn_mask in a call of scaled_dot_product_attention(), which has PyTorch's order
  // of dimensions and makes its result as q is.
  Name bias_;
  Reader reader_;
  std::vector<std::unique_ptr<Array>> arrays_;
  bool several_ = false;
  std::shared_ptr<context> owner_;
  int32_t threads_ = 0;
  attn_problem problem_;
  attn_args args_;
  std::vector<attn_segment> segments_;
  std::vector<attn_segment_args> segment_args_;
  std::string kernel_;
  nb::object out_ = nb::none(), lse_ = nb::none();
};

}  // namespace attn::python
