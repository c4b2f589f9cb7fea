// One token of each of three sequences over several GPUs, by several processes, without MPI: the
// keys of a sequence are dealt out token by token, each rank computes over its own, and compares
// the merged rows with those that it computes alone.
//
//   c++ -std=c++20 -O3 examples/decode.cpp -o decode $(pkg-config --cflags --libs attn) -ldl
//   ./decode --ranks 4 --tokens 32768
//
// --tokens: of the longest sequence. --backend, --nccl, --fail: as in prefill.cpp.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "ranks.h"

namespace {

constexpr std::int64_t batch = 3, heads_q = 8, heads_kv = 2, dim = 64;

// Keys, or values, of every `ranks`-th token from `rank` on, padded to `capacity` for each
// sequence.
std::vector<std::uint16_t> dealt(const std::vector<std::int64_t>& lengths, int rank, int ranks,
                                 std::int64_t capacity, std::uint64_t salt) {
  const std::int64_t width = heads_kv * dim;
  std::vector<std::uint16_t> all;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    for (std::int64_t token = rank; token < lengths[b]; token += ranks)
      append(&all, token, token + 1, width, salt + 10 * b);
    all.resize((b + 1) * std::size_t(capacity * width));
  }
  return all;
}

// A rank's part of the sequences in the backend's memory; of one rank, all of them.
struct cache {
  std::int64_t capacity;
  attn::buffer k, v, lengths;

  cache(const attn::context& context, const std::vector<std::int64_t>& whole, int rank, int ranks)
      : capacity(std::max<std::int64_t>(1, (whole[0] + ranks - 1) / ranks)) {
    std::vector<std::int32_t> mine;
    for (const std::int64_t length : whole)
      mine.push_back(std::int32_t((length - rank + ranks - 1) / ranks));
    k = copied(context, dealt(whole, rank, ranks, capacity, 2));
    v = copied(context, dealt(whole, rank, ranks, capacity, 3));
    lengths = copied(context, mine);
  }
  attn_segment segment() const {
    auto made = attn::make<attn_segment>();
    made.k_type = made.v_type = ATTN_BF16;
    made.seqlen = capacity;
    made.has_seqlens = 1;
    return made;
  }
  attn_segment_args args() const {
    auto made = attn::make<attn_segment_args>();
    made.k = k.data();
    made.v = v.data();
    made.seqlens = static_cast<const std::int32_t*>(lengths.data());
    return made;
  }
};

// 0 if the merged rows are those of one process.
int run_rank(const options& o, int rank, const attn::nccl& library,
             const attn::nccl::unique_id& id) {
  const attn::context context = context_of(o, rank);
  attn::ranks group(library, id, rank, o.ranks);
  if (gives_up(o, rank, group)) return 3;

  // The last sequence has one token, so only rank 0 has keys of it.
  const std::vector<std::int64_t> lengths = {o.tokens, o.tokens / 3, 1};
  const cache mine(context, lengths, rank, o.ranks), whole(context, lengths, 0, 1);
  std::vector<std::uint16_t> of_q;
  append(&of_q, 0, batch, heads_q * dim, 1);
  const attn::buffer q = copied(context, of_q);
  const attn::buffer sinks = copied(context, std::vector<float>(std::size_t(heads_q), 0.5f));
  const std::size_t count = std::size_t(batch * heads_q * dim);
  attn::buffer out(context, count * sizeof(float));
  std::vector<float> got(count), want(count);

  auto problem = attn::make<attn_problem>();
  problem.batch = batch;
  problem.heads_q = heads_q;
  problem.heads_kv = heads_kv;
  problem.head_dim = dim;
  problem.seqlen_q = 1;
  problem.q_type = ATTN_BF16;
  problem.out_type = ATTN_F32;
  problem.flags = ATTN_SINKS;
  problem.num_segments = 1;
  auto args = attn::make<attn_args>();
  args.q = q.data();
  args.out = out.data();
  args.sinks = static_cast<const float*>(sinks.data());
  args.num_segments = 1;

  const attn_segment segment = mine.segment();
  const attn_segment_args keys = mine.args();
  problem.segments = &segment;
  args.segments = &keys;
  attn::sharded_decode decode(context, group, problem);
  decode.run(args);
  out.copy_out(got.data(), out.bytes());

  const attn_segment all_segment = whole.segment();
  const attn_segment_args all_keys = whole.args();
  problem.segments = &all_segment;
  args.segments = &all_keys;
  const attn::plan plan(context, problem);
  const attn::buffer workspace = plan.make_workspace(context);
  plan.run(args, workspace);
  out.copy_out(want.data(), out.bytes());
  float worst = 0;
  for (std::size_t n = 0; n < count; ++n) worst = std::max(worst, std::abs(got[n] - want[n]));
  std::printf("rank %d of %d: %s, largest difference %.1e\n", rank, o.ranks, decode.kernel(),
              double(worst));
  // CUDA's kernels round weights to bf16, in relation to the largest score so far: that of other
  // keys here than in one process.
  return worst < (o.backend == "cuda" ? 2e-3f : 1e-5f) ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const options o = options_of(count, arguments);
  if (o.ranks < 1 || o.tokens < 3) {
    std::fprintf(stderr, "--ranks is %d, --tokens %lld; accepted: 1 or more, 3 or more\n", o.ranks,
                 static_cast<long long>(o.tokens));
    return 2;
  }
  return run_ranks(o, run_rank);
}
