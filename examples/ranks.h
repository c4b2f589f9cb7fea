// What examples over several GPUs share: one process for each rank, and numbers that all ranks can
// make.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "attn/nccl.hpp"

struct options {
  int ranks = 2, fail = -1;
  std::int64_t tokens = 4096;
  std::string backend = "cuda";
  const char* nccl = nullptr;
};

inline options options_of(int count, char** arguments) {
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
  return o;
}

// bf16 numbers that depend on their place in the sequence alone: the upper half of a float.
inline std::uint16_t number(std::uint64_t place, std::uint64_t salt) {
  std::uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u + salt * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 31)) * 0x94d049bb133111ebu;
  const float value = (float(x >> 40) / float(1 << 24) - 0.5f) * 4;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return std::uint16_t(bits >> 16);
}

// Tokens [begin, end) of a tensor with `width` numbers for each token.
inline void append(std::vector<std::uint16_t>* to, std::int64_t begin, std::int64_t end,
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
inline void see_one_gpu(int rank) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string gpu = std::to_string(rank);
  if (visible) {
    std::istringstream list(visible);
    for (int n = 0; n <= rank && std::getline(list, gpu, ',');) ++n;
  }
  setenv("CUDA_VISIBLE_DEVICES", gpu.c_str(), 1);
}

// The rank's context: its GPU, or the CPU with one thread.
inline attn::context context_of(const options& o, int rank) {
  const bool cuda = o.backend == "cuda";
  if (cuda) see_one_gpu(rank);
  auto where = attn::make<attn_context_options>();
  where.device = 0;
  where.has_device = 1;
  where.cpu_threads = 1;
  return attn::context(cuda ? ATTN_BACKEND_CUDA : ATTN_BACKEND_CPU, &where);
}

// Whether this is the rank of --fail.
inline bool gives_up(const options& o, int rank, attn::ranks& group) {
  if (rank != o.fail) return false;
  std::fprintf(stderr, "rank %d gives up\n", rank);
  group.abort();
  return true;
}

// Waits for the ranks' processes. How many failed. NCCL does not notice a rank that is gone, so
// once one has failed the others are ended, unless they end within 5 s.
inline int wait_for(std::vector<pid_t> children) {
  using clock = std::chrono::steady_clock;
  int failed = 0;
  clock::time_point end = clock::time_point::max();
  while (!children.empty()) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, failed ? WNOHANG : 0);
    if (ended > 0) {
      std::erase(children, ended);
      if (status != 0 && failed++ == 0) end = clock::now() + std::chrono::seconds(5);
    } else if (clock::now() > end) {
      for (const pid_t child : children) kill(child, SIGKILL);
      end = clock::time_point::max();
    } else {
      usleep(10000);
    }
  }
  return failed;
}

// Calls run(options, rank, library, id), which returns 0 or an exit code, in a process for each
// rank. 0 if all have returned 0. Processes begin before anything has opened a driver. The id goes
// through a pipe.
template <class Run>
int run_ranks(const options& o, const Run& run) {
  const int ranks = o.ranks;
  int ends[2];
  if (pipe(ends) != 0) return 2;
  const auto in_process = [&](int rank) {
    try {
      const attn::nccl library(o.nccl);
      attn::nccl::unique_id id;
      if (rank == 0) {
        id = library.make_id();
        for (int other = 1; other < ranks; ++other)
          if (write(ends[1], &id, sizeof id) != sizeof id)
            throw std::runtime_error("the pipe is closed");
      } else if (read(ends[0], &id, sizeof id) != sizeof id) {
        throw std::runtime_error("rank 0 ended before it made an id");
      }
      return run(o, rank, library, id);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      return 2;
    }
  };
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      if (rank != 0) close(ends[1]);
      std::exit(in_process(rank));
    }
    children.push_back(child);
  }
  close(ends[1]);
  const int failed = wait_for(children);
  std::printf("%d of %d ranks agree with one process\n", ranks - failed, ranks);
  return failed ? 1 : 0;
}
