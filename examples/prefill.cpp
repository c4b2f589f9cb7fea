// One sequence over several GPUs, by several processes, without MPI: each rank has a part of a
// sequence in zigzag, computes its rows, and compares them with those that it computes alone.
//
//   c++ -std=c++20 -O3 examples/prefill.cpp -o prefill $(pkg-config --cflags --libs attn) -ldl
//   ./prefill --ranks 4 --tokens 32768
//
// --backend cpu needs a stand-in for NCCL that works on host memory, given by --nccl PATH.
// --fail RANK lets a rank give up, to see that the others end too.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "ranks.h"

namespace {

constexpr std::int64_t heads_q = 8, heads_kv = 2, dim = 64;

// 0 if the rank's rows are those of one process.
int run_rank(const options& o, int rank, const attn::nccl& library,
             const attn::nccl::unique_id& id) {
  const attn::context context = context_of(o, rank);
  attn::ranks group(library, id, rank, o.ranks);
  if (gives_up(o, rank, group)) return 3;

  const std::int64_t tokens = o.tokens / o.ranks, half = tokens / 2;
  const std::int64_t starts[2] = {rank * half, (2 * o.ranks - 1 - rank) * half};
  std::vector<std::uint16_t> q, k, v, all_k, all_v;
  for (const std::int64_t start : starts) {
    append(&q, start, start + half, heads_q * dim, 1);
    append(&k, start, start + half, heads_kv * dim, 2);
    append(&v, start, start + half, heads_kv * dim, 3);
  }
  append(&all_k, 0, o.tokens, heads_kv * dim, 2);
  append(&all_v, 0, o.tokens, heads_kv * dim, 3);

  auto problem = attn::make<attn_problem>();
  problem.batch = 1;
  problem.heads_q = heads_q;
  problem.heads_kv = heads_kv;
  problem.head_dim = dim;
  problem.seqlen_q = tokens;
  problem.q_type = ATTN_BF16;
  problem.out_type = ATTN_F32;
  problem.flags = ATTN_CAUSAL;
  attn::sharded_prefill prefill(context, group, problem);
  const attn::buffer of_q = copied(context, q), of_k = copied(context, k),
                     of_v = copied(context, v);
  const std::size_t count = std::size_t(tokens * heads_q * dim);
  attn::buffer out(context, count * sizeof(float));
  prefill.run(of_q.data(), of_k.data(), of_v.data(), out.data());
  std::vector<float> got(count), want(count);
  out.copy_out(got.data(), out.bytes());

  // The same rows by this rank alone, over one array of keys.
  const attn::buffer whole_k = copied(context, all_k), whole_v = copied(context, all_v);
  for (int n = 0; n < 2; ++n) {
    auto segment = attn::make<attn_segment>();
    segment.k_type = segment.v_type = ATTN_BF16;
    segment.seqlen = starts[n] + half;
    problem.seqlen_q = half;
    problem.segments = &segment;
    problem.num_segments = 1;
    const attn::plan plan(context, problem);
    const attn::buffer workspace = plan.make_workspace(context);
    auto keys = attn::make<attn_segment_args>();
    keys.k = whole_k.data();
    keys.v = whole_v.data();
    auto args = attn::make<attn_args>();
    args.q = static_cast<const char*>(of_q.data()) + n * half * heads_q * dim * 2;
    args.out = static_cast<char*>(out.data()) + n * half * heads_q * dim * 4;
    args.segments = &keys;
    args.num_segments = 1;
    plan.run(args, workspace);
  }
  out.copy_out(want.data(), out.bytes());
  float worst = 0;
  for (std::size_t n = 0; n < count; ++n) worst = std::max(worst, std::abs(got[n] - want[n]));
  std::printf("rank %d of %d: tokens %lld.. and %lld.., %s, largest difference %.1e\n", rank,
              o.ranks, static_cast<long long>(starts[0]), static_cast<long long>(starts[1]),
              prefill.kernel(), double(worst));
  return worst < 1e-5f ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const options o = options_of(count, arguments);
  if (o.ranks < 1 || o.tokens % (2 * o.ranks) != 0) {
    std::fprintf(stderr, "--tokens is %lld; accepted: a multiple of 2 * ranks = %d\n",
                 static_cast<long long>(o.tokens), 2 * o.ranks);
    return 2;
  }
  return run_ranks(o, run_rank);
}
