// attn.h for C++: classes that own its handles and memory, and exceptions. Every function throws
// attn::error where the C function returns an error; shapes, units and errors are stated in attn.h.
#ifndef ATTN_ATTN_HPP
#define ATTN_ATTN_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attn/attn.h"

namespace attn {

// what() is the sentence of attn_last_error, status() the C status.
class error : public std::runtime_error {
 public:
  error(attn_status status, const char* text) : std::runtime_error(text), status_(status) {}
  attn_status status() const noexcept { return status_; }

 private:
  attn_status status_;
};

inline void check(attn_status status) {
  if (status != ATTN_OK) throw error(status, attn_last_error());
}

// A C struct with struct_size set and every other field zero: auto p = attn::make<attn_problem>();
template <class T>
T make() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

// All types of the loaded library, in the order of attn_dtype.
inline std::vector<attn_dtype_properties> dtypes() {
  std::vector<attn_dtype_properties> all;
  for (int t = ATTN_F32; const attn_dtype_properties* p = attn_dtype_info(attn_dtype(t)); ++t) {
    auto known = make<attn_dtype_properties>();
    std::memcpy(&known, p, p->struct_size < sizeof known ? p->struct_size : sizeof known);
    all.push_back(known);
  }
  return all;
}

// A backend and one of its devices. options: as in attn_context_create; nullptr = defaults.
class context {
 public:
  explicit context(attn_backend backend = ATTN_BACKEND_AUTO,
                   const attn_context_options* options = nullptr) {
    attn_context* made = nullptr;
    check(attn_context_create(backend, options, &made));
    handle_.reset(made);
  }
  attn_context* get() const noexcept { return handle_.get(); }
  attn_backend backend() const noexcept { return attn_context_backend(get()); }
  std::int32_t threads() const noexcept { return attn_context_threads(get()); }
  void synchronize(void* stream = nullptr) const { check(attn_synchronize(get(), stream)); }

 private:
  struct destroy {
    void operator()(attn_context* c) const noexcept { attn_context_destroy(c); }
  };
  std::unique_ptr<attn_context, destroy> handle_;
};

// Memory of a context's backend, freed by the destructor; 0 bytes are allowed and have data()
// nullptr. The context must outlive it. Move only.
class buffer {
 public:
  buffer() = default;
  buffer(const context& context, std::size_t bytes) : context_(context.get()), bytes_(bytes) {
    if (bytes > 0) check(attn_alloc(context_, bytes, &memory_));
  }
  buffer(buffer&& other) noexcept { swap(other); }
  buffer& operator=(buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~buffer() {
    if (memory_) attn_free(context_, memory_);
  }
  void* data() const noexcept { return memory_; }
  std::size_t bytes() const noexcept { return bytes_; }
  void copy_in(const void* host, std::size_t bytes, void* stream = nullptr) {
    check(attn_copy_in(context_, memory_, host, bytes, stream));
  }
  void copy_out(void* host, std::size_t bytes, void* stream = nullptr) const {
    check(attn_copy_out(context_, host, memory_, bytes, stream));
  }

 private:
  void swap(buffer& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
  }
  attn_context* context_ = nullptr;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// The kernel chosen for a problem of any operation. The context may be destroyed before the plan.
class plan {
 public:
  plan(const context& context, const attn_problem& problem) {
    adopt([&](attn_plan** made) { return attn_plan_create(context.get(), &problem, made); });
  }
  plan(const context& context, const attn_backward_problem& problem) {
    adopt(
        [&](attn_plan** made) { return attn_plan_create_backward(context.get(), &problem, made); });
  }
  plan(const context& context, const attn_merge_problem& problem) {
    adopt([&](attn_plan** made) { return attn_plan_create_merge(context.get(), &problem, made); });
  }
  plan(const context& context, const attn_quantize_problem& problem) {
    adopt(
        [&](attn_plan** made) { return attn_plan_create_quantize(context.get(), &problem, made); });
  }
  plan(const context& context, const attn_kv_append_problem& problem) {
    adopt([&](attn_plan** made) {
      return attn_plan_create_kv_append(context.get(), &problem, made);
    });
  }
  plan(const context& context, const attn_kv_roll_problem& problem) {
    adopt(
        [&](attn_plan** made) { return attn_plan_create_kv_roll(context.get(), &problem, made); });
  }

  attn_plan* get() const noexcept { return handle_.get(); }
  const char* kernel() const noexcept { return attn_plan_kernel(get()); }
  std::size_t workspace() const noexcept { return attn_plan_workspace(get()); }

  // A new workspace for runs of this plan, initialised in `stream`; see attn_workspace_init.
  buffer make_workspace(const context& context, void* stream = nullptr) const {
    buffer made(context, workspace());
    check(attn_workspace_init(get(), made.data(), made.bytes(), stream));
    return made;
  }

  void run(const attn_args& args, const buffer& workspace, void* stream = nullptr) const {
    check(attn_run(get(), &args, workspace.data(), workspace.bytes(), stream));
  }
  void run(const attn_backward_args& args, const buffer& workspace, void* stream = nullptr) const {
    check(attn_run_backward(get(), &args, workspace.data(), workspace.bytes(), stream));
  }
  void run(const attn_merge_args& args, void* stream = nullptr) const {
    check(attn_run_merge(get(), &args, stream));
  }
  void run(const attn_quantize_args& args, void* stream = nullptr) const {
    check(attn_run_quantize(get(), &args, stream));
  }
  void run(const attn_kv_append_args& args, void* stream = nullptr) const {
    check(attn_run_kv_append(get(), &args, stream));
  }
  void run(const attn_kv_roll_args& args, void* stream = nullptr) const {
    check(attn_run_kv_roll(get(), &args, stream));
  }
  // attn_check: validates lengths, tables and block kinds.
  void check_args(const attn_args& args, void* stream = nullptr) const {
    check(attn_check(get(), &args, stream));
  }

 private:
  template <class Make>
  void adopt(Make&& create) {
    attn_plan* made = nullptr;
    check(create(&made));
    handle_.reset(made);
  }
  struct destroy {
    void operator()(attn_plan* p) const noexcept { attn_plan_destroy(p); }
  };
  std::unique_ptr<attn_plan, destroy> handle_;
};

// A block mask. The rules of each builder are stated at the attn_block_mask_* function of its name.
class block_mask {
 public:
  static block_mask from_dense(const context& context, const attn_block_mask_shape& shape,
                               const std::uint8_t* dense, void* stream = nullptr) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_from_dense(context.get(), &shape, dense, stream, made);
    });
  }
  static block_mask from_documents(const context& context, const attn_block_mask_shape& shape,
                                   const std::vector<std::int64_t>& lengths, bool causal) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_from_documents(context.get(), &shape, lengths.data(),
                                            std::int64_t(lengths.size()), causal, made);
    });
  }
  static block_mask from_window(const context& context, const attn_block_mask_shape& shape,
                                std::int64_t left, std::int64_t right,
                                std::int64_t global_tokens = 0, std::int64_t prefix_tokens = 0) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_from_window(context.get(), &shape, left, right, global_tokens,
                                         prefix_tokens, made);
    });
  }
  static block_mask from_intervals(const context& context, const attn_block_mask_shape& shape,
                                   const std::int32_t* intervals, std::int32_t num_intervals,
                                   void* stream = nullptr) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_from_intervals(context.get(), &shape, intervals, num_intervals, stream,
                                            made);
    });
  }
  static block_mask from_kinds(const context& context, const attn_block_mask_shape& shape,
                               const std::uint8_t* kinds, const std::int32_t* index = nullptr,
                               const std::uint32_t* bits = nullptr, std::int64_t num_partials = 0) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_from_kinds(context.get(), &shape, kinds, index, bits, num_partials,
                                        made);
    });
  }
  static block_mask from_lists(const context& context, const attn_block_mask_shape& shape,
                               const std::int32_t* lists, std::int64_t list_size) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_from_lists(context.get(), &shape, lists, list_size, made);
    });
  }
  static block_mask intersection(const context& context, const block_mask& a, const block_mask& b) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_combine(context.get(), a.get(), b.get(), 0, made);
    });
  }
  static block_mask union_of(const context& context, const block_mask& a, const block_mask& b) {
    return adopt([&](attn_block_mask** made) {
      return attn_block_mask_combine(context.get(), a.get(), b.get(), 1, made);
    });
  }

  attn_block_mask* get() const noexcept { return handle_.get(); }
  void apply(attn_problem* problem, attn_args* args) const {
    check(attn_block_mask_apply(get(), problem, args));
  }

 private:
  template <class Make>
  static block_mask adopt(Make&& create) {
    attn_block_mask* made = nullptr;
    check(create(&made));
    block_mask mask;
    mask.handle_.reset(made);
    return mask;
  }
  struct destroy {
    void operator()(attn_block_mask* m) const noexcept { attn_block_mask_destroy(m); }
  };
  std::unique_ptr<attn_block_mask, destroy> handle_;
};

namespace detail {
template <class Call>
std::string text(Call&& call) {
  // The text may grow between two calls, for example if a device appears.
  std::string value;
  for (std::size_t size = 1; value.size() < size;) {
    value.resize(size);
    check(call(value.data(), value.size(), &size));
  }
  value.resize(value.find('\0'));
  return value;
}
}  // namespace detail

// JSON texts; their contents are described at attn_info and attn_explain.
inline std::string info() {
  return detail::text(
      [](char* t, std::size_t n, std::size_t* size) { return attn_info(t, n, size); });
}
inline std::string explain(const context& context, const attn_problem& problem) {
  return detail::text([&](char* t, std::size_t n, std::size_t* size) {
    return attn_explain(context.get(), &problem, t, n, size);
  });
}
inline std::string explain(const context& context, const attn_backward_problem& problem) {
  return detail::text([&](char* t, std::size_t n, std::size_t* size) {
    return attn_explain_backward(context.get(), &problem, t, n, size);
  });
}

}  // namespace attn
#endif
