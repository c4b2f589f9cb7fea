// Sequences over several GPUs from C++: NCCL, or RCCL, opened at run time, and prefill and decode
// by all-gather on it. Programs link neither NCCL nor MPI. Needs libdl. docs/distributed.md
#ifndef ATTN_NCCL_HPP
#define ATTN_NCCL_HPP

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attn/attn.hpp"

namespace attn {

// The functions of NCCL that are used, with the ABI of NCCL 2. Throws std::runtime_error if the
// library or a function is missing. Stays open for the life of the process.
class nccl {
 public:
  struct unique_id {
    char bytes[128];
  };

  // path: NULL = libnccl.so.2, or librccl.so.1, where the loader finds it.
  explicit nccl(const char* path = nullptr) {
    for (const char* name : {path ? path : "libnccl.so.2", path ? path : "librccl.so.1"})
      if (!library_) library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library_)
      throw std::runtime_error(
          std::string("NCCL is not there: ") + dlerror() +
          "; accepted: libnccl.so.2 or librccl.so.1 where the loader looks, or a path");
    find("ncclGetUniqueId", &get_unique_id);
    find("ncclCommInitRank", &init_rank);
    find("ncclCommDestroy", &destroy);
    find("ncclCommAbort", &abort);
    find("ncclAllGather", &all_gather);
    find("ncclGetErrorString", &error_string);
  }
  // One rank makes it, and gives it to the others: through a file, a pipe, a socket.
  unique_id make_id() const {
    unique_id id{};
    check(get_unique_id(&id), "ncclGetUniqueId");
    return id;
  }
  void check(int result, const char* call) const {
    if (result != 0) throw std::runtime_error(std::string(call) + ": " + error_string(result));
  }

  static constexpr int bytes = 0;  // ncclInt8
  int (*get_unique_id)(unique_id*) = nullptr;
  int (*init_rank)(void** communicator, int ranks, unique_id, int rank) = nullptr;
  int (*destroy)(void* communicator) = nullptr;
  int (*abort)(void* communicator) = nullptr;
  int (*all_gather)(const void* mine, void* all, std::size_t count, int type, void* communicator,
                    void* stream) = nullptr;
  const char* (*error_string)(int) = nullptr;

 private:
  template <class Function>
  void find(const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (!*function) throw std::runtime_error(std::string("NCCL has no ") + name);
  }
  void* library_ = nullptr;
};

// The ranks of a communicator. The current CUDA device of the calling thread is the rank's, for
// NCCL "invalid usage" if it is another's too; contexts do not change it. `nccl` must outlive it.
// Move only.
class ranks {
 public:
  ranks(const nccl& library, const nccl::unique_id& id, int rank, int count)
      : library_(&library), rank_(rank), count_(count) {
    void* made = nullptr;
    library.check(library.init_rank(&made, count, id, rank), "ncclCommInitRank");
    communicator_ = {made, [&library](void* c) { library.destroy(c); }};
  }
  int rank() const noexcept { return rank_; }
  int count() const noexcept { return count_; }
  // all: count() * bytes; the part of rank r is at r * bytes. In the order of the stream.
  void all_gather(const void* mine, void* all, std::size_t bytes, void* stream) const {
    library_->check(
        library_->all_gather(mine, all, bytes, nccl::bytes, communicator_.get(), stream),
        "ncclAllGather");
  }
  // Ends what other ranks would wait for: after an error of this one.
  void abort() noexcept {
    if (void* communicator = communicator_.release()) library_->abort(communicator);
  }

 private:
  const nccl* library_;
  int rank_, count_;
  std::unique_ptr<void, std::function<void(void*)>> communicator_;
};

// Attention over sequences in zigzag: of 2 R pieces of equal length rank r has number r and, after
// it, number 2 R - 1 - r, so that all ranks have the same work under a causal mask. Each run
// gathers K and V of all ranks, then computes each of the rank's two pieces of queries in one call
// over the pieces of keys as segments. Results do not depend on the number of ranks, but for
// float32 rounding. A kernel of sm_90 takes up to 8 segments: 4 ranks.
class sharded_prefill {
 public:
  // problem: of one rank: seqlen_q tokens of each sequence, an even number, padded and contiguous;
  // no segments. k_type and v_type are q_type. flags: ATTN_CAUSAL, ATTN_SINKS or none.
  sharded_prefill(const context& context, const ranks& group, attn_problem problem)
      : group_(&group), batch_(problem.batch), tokens_(problem.seqlen_q) {
    if (problem.seqlen_q <= 0 || problem.seqlen_q % 2 != 0 || problem.num_segments != 0 ||
        (problem.flags & ~std::uint32_t{ATTN_CAUSAL | ATTN_SINKS}) != 0)
      throw std::invalid_argument(
          "sharded_prefill: seqlen_q is odd or below 1, or there are segments or flags; accepted: "
          "an even seqlen_q, no segments, flags ATTN_CAUSAL and ATTN_SINKS");
    if (problem.head_dim_v == 0) problem.head_dim_v = problem.head_dim;
    if (problem.out_type == ATTN_DTYPE_NONE) problem.out_type = problem.q_type;
    const auto size = [&](attn_dtype type) {
      return std::int64_t(attn_dtype_info(type)->block_bytes) /
             attn_dtype_info(type)->block_elements;
    };
    const std::int64_t element = size(problem.q_type);
    row_k_ = problem.heads_kv * problem.head_dim * element;
    row_v_ = problem.heads_kv * problem.head_dim_v * element;
    row_q_ = problem.heads_q * problem.head_dim * element;
    row_out_ = problem.heads_q * problem.head_dim_v * size(problem.out_type);
    const std::int64_t half = tokens_ / 2;
    attn_segment segment = make<attn_segment>();
    segment.k_type = segment.v_type = problem.q_type;
    segment.seqlen = half;
    segment.k_stride = {tokens_ * problem.heads_kv * problem.head_dim,
                        problem.heads_kv * problem.head_dim, problem.head_dim};
    segment.v_stride = {tokens_ * problem.heads_kv * problem.head_dim_v,
                        problem.heads_kv * problem.head_dim_v, problem.head_dim_v};
    problem.q_stride = {tokens_ * problem.heads_q * problem.head_dim,
                        problem.heads_q * problem.head_dim, problem.head_dim};
    problem.out_stride = {tokens_ * problem.heads_q * problem.head_dim_v,
                          problem.heads_q * problem.head_dim_v, problem.head_dim_v};
    problem.seqlen_q = half;
    const int count = group.count();
    for (const int piece : {group.rank(), 2 * count - 1 - group.rank()}) {
      const std::vector<attn_segment> segments(
          std::size_t(problem.flags & ATTN_CAUSAL ? piece + 1 : 2 * count), segment);
      problem.segments = segments.data();
      problem.num_segments = std::int32_t(segments.size());
      pieces_.push_back(problem.num_segments);
      plans_.emplace_back(context, problem);
      workspaces_.push_back(plans_.back().make_workspace(context));
    }
    all_k_ = buffer(context, std::size_t(count * batch_ * tokens_ * row_k_));
    all_v_ = buffer(context, std::size_t(count * batch_ * tokens_ * row_v_));
    // The workspaces are initialised in the default stream, and any stream may use them.
    context.synchronize();
  }

  const char* kernel() const noexcept { return plans_[1].kernel(); }

  // q [B, n, Hq, D], k and v of this rank, out [B, n, Hq, Dv] in the backend's memory; the rank's
  // first piece, then its second. sinks: [Hq] or NULL. One run at a time.
  void run(const void* q, const void* k, const void* v, void* out, const float* sinks = nullptr,
           void* stream = nullptr) {
    group_->all_gather(k, all_k_.data(), std::size_t(batch_ * tokens_ * row_k_), stream);
    group_->all_gather(v, all_v_.data(), std::size_t(batch_ * tokens_ * row_v_), stream);
    for (std::size_t half = 0; half < 2; ++half) {
      const int count = group_->count();
      const int pieces = pieces_[half];
      std::vector<attn_segment_args> segments;
      for (int piece = 0; piece < pieces; ++piece) {
        const int owner = piece < count ? piece : 2 * count - 1 - piece;
        const std::int64_t row =
            owner * batch_ * tokens_ + (piece < count ? 0 : tokens_ / 2);  // of batch entry 0
        auto a = make<attn_segment_args>();
        a.k = static_cast<const char*>(all_k_.data()) + row * row_k_;
        a.v = static_cast<const char*>(all_v_.data()) + row * row_v_;
        segments.push_back(a);
      }
      const std::int64_t first = std::int64_t(half) * (tokens_ / 2);
      auto args = make<attn_args>();
      args.q = static_cast<const char*>(q) + first * row_q_;
      args.out = static_cast<char*>(out) + first * row_out_;
      args.sinks = sinks;
      args.segments = segments.data();
      args.num_segments = pieces;
      plans_[half].run(args, workspaces_[half], stream);
    }
  }

 private:
  const ranks* group_;
  std::int64_t batch_, tokens_;
  std::int64_t row_k_ = 0, row_v_ = 0, row_q_ = 0, row_out_ = 0;  // bytes of a token
  std::vector<plan> plans_;
  std::vector<buffer> workspaces_;
  std::vector<int> pieces_;  // of keys, for each half
  buffer all_k_, all_v_;
};

// Decode over sequences whose keys are spread over the ranks in any way, each key at one rank; a
// rank may have none of a sequence. Each rank computes all query heads over its keys. The partial
// results, float32 with their lse, are gathered and merged in the order of ranks, so every rank
// gets all of out, in the same bits.
class sharded_decode {
 public:
  // problem: of this rank's keys: segments as for any plan. Padded queries, which see every key:
  // flags ATTN_SINKS, and ATTN_CAUSAL if seqlen_q is 1. Batch, queries, heads and types are those
  // of all ranks; capacities, pages and types of K and V may differ.
  sharded_decode(const context& context, const ranks& group, const attn_problem& problem)
      : group_(&group),
        part_(context, part_of(group, problem)),
        merge_(context, merge_of(group, problem)),
        workspace_(part_.make_workspace(context)) {
    const attn_merge_problem merge = merge_of(group, problem);
    const std::size_t rows = std::size_t(merge.batch * merge.heads_q * merge.seqlen_q);
    lse_at_ = rows * std::size_t(merge.head_dim_v) * sizeof(float);
    const std::size_t alignment = 256;
    mine_ =
        buffer(context, (lse_at_ + rows * sizeof(float) + alignment - 1) / alignment * alignment);
    all_ = buffer(context, std::size_t(group.count()) * mine_.bytes());
    for (int r = 0; r < group.count(); ++r) {
      const char* part = static_cast<const char*>(all_.data()) + std::size_t(r) * mine_.bytes();
      outs_.push_back(part);
      lses_.push_back(reinterpret_cast<const float*>(part + lse_at_));
    }
    // The workspace is initialised in the default stream, and any stream may use it.
    context.synchronize();
  }

  const char* kernel() const noexcept { return part_.kernel(); }

  // args: as for the plan of the rank's keys, but `out` gets the merged result, [B, Sq, Hq, Dv] of
  // the problem's out_type and strides, and `lse`, unless NULL, that of all keys. One run at a
  // time.
  void run(attn_args args, void* stream = nullptr) {
    auto merge = make<attn_merge_args>();
    merge.num_parts = group_->count();
    merge.outs = outs_.data();
    merge.lses = lses_.data();
    merge.out = args.out;
    merge.lse = args.lse;
    args.out = mine_.data();
    args.lse = reinterpret_cast<float*>(static_cast<char*>(mine_.data()) + lse_at_);
    if (group_->rank() != 0) args.sinks = nullptr;
    part_.run(args, workspace_, stream);
    group_->all_gather(mine_.data(), all_.data(), mine_.bytes(), stream);
    merge_.run(merge, stream);
  }

 private:
  static attn_problem part_of(const ranks& group, attn_problem problem) {
    if (problem.seqlen_q == 1) problem.flags &= ~std::uint32_t{ATTN_CAUSAL};
    if (problem.q_layout != ATTN_PADDED || problem.tree_keys != 0 ||
        (problem.flags & ~std::uint32_t{ATTN_SINKS}) != 0)
      throw std::invalid_argument(
          "sharded_decode: q is packed, or there is a tree mask or a flag; accepted: padded q, "
          "ATTN_SINKS, and ATTN_CAUSAL with seqlen_q = 1");
    // A sink is one more key, so one rank has it.
    if (group.rank() != 0) problem.flags &= ~std::uint32_t{ATTN_SINKS};
    problem.out_type = ATTN_F32;
    problem.out_stride = {};
    return problem;
  }
  static attn_merge_problem merge_of(const ranks& group, const attn_problem& problem) {
    auto merge = make<attn_merge_problem>();
    merge.batch = problem.batch;
    merge.heads_q = problem.heads_q;
    merge.seqlen_q = problem.seqlen_q;
    merge.head_dim_v = problem.head_dim_v ? problem.head_dim_v : problem.head_dim;
    merge.num_parts = group.count();
    merge.part_type = ATTN_F32;
    merge.out_type = problem.out_type == ATTN_DTYPE_NONE ? problem.q_type : problem.out_type;
    merge.out_stride = problem.out_stride;
    return merge;
  }

  const ranks* group_;
  plan part_, merge_;
  std::size_t lse_at_ = 0;  // bytes of a rank's partial out, which its lse follows
  buffer workspace_, mine_, all_;
  std::vector<const void*> outs_;
  std::vector<const float*> lses_;
};

}  // namespace attn
#endif
