// Between files of tensors and the structs of attn.h.
#pragma once

#include <memory>
#include <vector>

#include "attn/common.h"

namespace attn::tools {

// A file as a problem and its args. Args point to host memory of `file`; stage() moves them.
struct Input {
  TensorFile file;
  attn_problem problem = make<attn_problem>();
  attn_args args = make<attn_args>();
  std::vector<std::string> unused;  // tensors that no rule of the contract gives a meaning

  explicit Input(TensorFile from) : file(std::move(from)) {}
  Input(const Input&) = delete;

  // Copies every array to the memory of `to`'s context and points args there. Once.
  void stage(Arrays& to);

  // For the readers in io.cpp: where args point, and from where.
  struct Slot {
    const void** pointer;
    const Tensor* tensor;
  };
  std::vector<Slot> slots;
  std::vector<attn_segment> segments;
  std::vector<attn_segment_args> segment_args;
  std::deque<Tensor> made;  // arrays that the file holds in another form
};

// For --help: the tensors that make_input knows, those of a block mask, and those of attn merge.
extern const std::string input_help;
extern const char* const mask_help;
extern const char* const parts_help;

// Reads q, k, v and everything else that CONTRACT gives a name; InputError names tensor, value and
// what is accepted. What needs no knowledge of the file is left to attn_plan_create and attn_check.
std::unique_ptr<Input> make_input(TensorFile file);

// The element type of a tensor that holds q, k, v or partial results: its dtype, or what
// __metadata__ says about it.
attn_dtype element_type(const TensorFile& file, const std::string& name);

// Elements of a last dimension of `size`, which for ggml blocks and i4 counts bytes.
int64_t elements_in(const TensorFile& file, const std::string& name, attn_dtype type, int64_t size);

// The dtype and shape of the scales, in an array of their own, of rows of `dim` elements.
Dtype scale_dtype(attn_dtype type);
std::vector<int64_t> scales_shape(attn_dtype type, std::vector<int64_t> shape, int64_t dim);

// A tensor for `shape` elements of a type; ggml types and i4 make the last dimension bytes.
Tensor make_typed(attn_dtype type, std::vector<int64_t> shape);
// Adds it under a name, with the metadata that the type needs.
void add_typed(TensorFile& file, const std::string& name, attn_dtype type, Tensor tensor);

// Writes the file that attn run and attn merge give: out and lse.
void write_result(const std::string& path, attn_dtype out_type, Tensor out, Tensor lse);

// The tensor, which must be there.
const Tensor& need_tensor(const TensorFile& file, std::string_view name);
// InputError unless dtype and shape are these; -1 in `shape` takes any size.
void need_shape(const TensorFile& file, std::string_view name, const Tensor& tensor, Dtype dtype,
                const std::vector<int64_t>& shape, const std::string& meaning);

// "k" with segment 1 of several is "k.1".
std::string segment_name(const char* name, int segment, bool numbered);
// 0: the file has k and v; n > 0: it has k.0 v.0 ... k.n-1 v.n-1.
int numbered_segments(const TensorFile& file);

}  // namespace attn::tools
