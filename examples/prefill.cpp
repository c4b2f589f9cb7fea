// One sequence over several GPUs, by several processes, without MPI: each rank has a part of a
// sequence in zigzag, computes its rows, and compares them with those that it computes alone.
//
//   c++ -std=c++20 -O3 examples/prefill.cpp -o prefill $(pkg-config --cflags --libs attn) -ldl
//   ./prefill --ranks 4 --tokens 32768
//
// --backend cpu needs a stand-in for NCCL that works on host memory, given by --nccl PATH.
// --fail RANK lets a rank give up, to see that the others end too.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "attn/nccl.hpp"

namespace {

struct options {
  int ranks = 2, fail = -1;
  std::int64_t tokens = 4096, heads_q = 8, heads_kv = 2, dim = 64;
  std::string backend = "cuda";
  const char* nccl = nullptr;
};

// bf16 numbers that depend on their place in the sequence alone: the upper half of a float.
std::uint16_t number(std::uint64_t place, std::uint64_t salt) {
  std::uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u + salt * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 31)) * 0x94d049bb133111ebu;
  const float value = (float(x >> 40) / float(1 << 24) - 0.5f) * 4;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return std::uint16_t(bits >> 16);
}

// Tokens [begin, end) of a tensor with `width` numbers for each token.
void append(std::vector<std::uint16_t>* to, std::int64_t begin, std::int64_t end,
            std::int64_t width, std::uint64_t salt) {
  for (std::int64_t n = begin * width; n < end * width; ++n)
    to->push_back(number(std::uint64_t(n), salt));
}

template <class T>
attn::buffer copied(const attn::context& context, const std::vector<T>& values) {
  attn::buffer made(context, values.size() * sizeof(T));
  made.copy_in(values.data(), made.bytes());
  return made;
}

// NCCL takes the process's current CUDA device, which is the first that it sees: the rank's alone.
void see_one_gpu(int rank) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string gpu = std::to_string(rank);
  if (visible) {
    std::istringstream list(visible);
    for (int n = 0; n <= rank && std::getline(list, gpu, ',');) ++n;
  }
  setenv("CUDA_VISIBLE_DEVICES", gpu.c_str(), 1);
}

// 0 if the rank's rows are those of one process.
int run_rank(const options& o, int rank, const attn::nccl& library,
             const attn::nccl::unique_id& id) {
  const bool cuda = o.backend == "cuda";
  if (cuda) see_one_gpu(rank);
  auto where = attn::make<attn_context_options>();
  where.device = 0;
  where.has_device = 1;
  where.cpu_threads = 1;
  const attn::context context(cuda ? ATTN_BACKEND_CUDA : ATTN_BACKEND_CPU, &where);
  attn::ranks group(library, id, rank, o.ranks);
  if (rank == o.fail) {
    std::fprintf(stderr, "rank %d gives up\n", rank);
    group.abort();
    return 3;
  }

  const std::int64_t tokens = o.tokens / o.ranks, half = tokens / 2;
  const std::int64_t starts[2] = {rank * half, (2 * o.ranks - 1 - rank) * half};
  std::vector<std::uint16_t> q, k, v, all_k, all_v;
  for (const std::int64_t start : starts) {
    append(&q, start, start + half, o.heads_q * o.dim, 1);
    append(&k, start, start + half, o.heads_kv * o.dim, 2);
    append(&v, start, start + half, o.heads_kv * o.dim, 3);
  }
  append(&all_k, 0, o.tokens, o.heads_kv * o.dim, 2);
  append(&all_v, 0, o.tokens, o.heads_kv * o.dim, 3);

  auto problem = attn::make<attn_problem>();
  problem.batch = 1;
  problem.heads_q = o.heads_q;
  problem.heads_kv = o.heads_kv;
  problem.head_dim = o.dim;
  problem.seqlen_q = tokens;
  problem.q_type = ATTN_BF16;
  problem.out_type = ATTN_F32;
  problem.flags = ATTN_CAUSAL;
  attn::sharded_prefill prefill(context, group, problem);
  const attn::buffer of_q = copied(context, q), of_k = copied(context, k),
                     of_v = copied(context, v);
  const std::size_t count = std::size_t(tokens * o.heads_q * o.dim);
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
    args.q = static_cast<const char*>(of_q.data()) + n * half * o.heads_q * o.dim * 2;
    args.out = static_cast<char*>(out.data()) + n * half * o.heads_q * o.dim * 4;
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

int run_rank_or_say(const options& o, int rank, int in, int out) {
  try {
    const attn::nccl library(o.nccl);
    attn::nccl::unique_id id;
    if (rank == 0) {
      id = library.make_id();
      for (int other = 1; other < o.ranks; ++other)
        if (write(out, &id, sizeof id) != sizeof id) throw std::runtime_error("the pipe is closed");
    } else if (read(in, &id, sizeof id) != sizeof id) {
      throw std::runtime_error("rank 0 ended before it made an id");
    }
    return run_rank(o, rank, library, id);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 2;
  }
}

}  // namespace

int main(int count, char** arguments) {
  options o;
  for (int n = 1; n + 1 < count; n += 2) {
    const std::string name = arguments[n];
    if (name == "--ranks")
      o.ranks = std::atoi(arguments[n + 1]);
    else if (name == "--tokens")
      o.tokens = std::atoll(arguments[n + 1]);
    else if (name == "--backend")
      o.backend = arguments[n + 1];
    else if (name == "--nccl")
      o.nccl = arguments[n + 1];
    else if (name == "--fail")
      o.fail = std::atoi(arguments[n + 1]);
  }
  if (o.ranks < 1 || o.tokens % (2 * o.ranks) != 0) {
    std::fprintf(stderr, "--tokens is %lld; accepted: a multiple of 2 * ranks = %d\n",
                 static_cast<long long>(o.tokens), 2 * o.ranks);
    return 2;
  }
  // Processes begin before anything has opened a driver. The id goes through a pipe.
  int ends[2];
  if (pipe(ends) != 0) return 2;
  std::vector<pid_t> children;
  for (int rank = 0; rank < o.ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      if (rank != 0) close(ends[1]);
      std::exit(run_rank_or_say(o, rank, ends[0], ends[1]));
    }
    children.push_back(child);
  }
  close(ends[1]);
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  std::printf("%d of %d ranks agree with one process\n", o.ranks - failed, o.ranks);
  return failed ? 1 : 0;
}
