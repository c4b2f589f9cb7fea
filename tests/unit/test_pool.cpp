// Threads: what the thread sanitizer watches. Its build has these tests only.
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "attn/attn.hpp"
#include "catch.h"
#include "cpu/pool.h"

using attn::ThreadPool;

TEST_CASE("pool: each item once, each thread within range") {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (int64_t items : {0, 1, 2, 3, 7, 8, 9, 1000}) {
      // Plain integers: that the caller may read them afterwards is part of the promise.
      std::vector<int> runs(items), thread_of(items, -1);
      pool.for_each(items, [&](int64_t item, int thread) {
        ++runs[item];
        thread_of[item] = thread;
      });
      CAPTURE(threads, items);
      CHECK(runs == std::vector<int>(items, 1));
      bool in_range = true;
      for (int t : thread_of) in_range &= t >= 0 && t < threads;
      CHECK(in_range);
    }
  }
}

TEST_CASE("pool: jobs in quick succession do not mix") {
  ThreadPool pool(4);
  int64_t wrong = 0;
  for (int64_t job = 0; job < 2000; ++job) {
    const int64_t items = 2 + job % 7;
    std::vector<int64_t> seen(items, -1);
    pool.for_each(items, [&](int64_t item, int) { seen[item] = job; });
    for (int64_t s : seen) wrong += s != job;
  }
  CHECK(wrong == 0);
}

TEST_CASE("pool: many callers at once") {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int n = 0; n < 200; ++n) {
        pool.for_each(10, [&](int64_t item, int) { sum += item; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(sum == 4 * 200 * 45);
}

TEST_CASE("pool: one plan runs on many threads at once, each with its workspace") {
  const int64_t heads = 4, seqlen = 70, head_dim = 16;
  const size_t count = size_t(heads * seqlen * head_dim);
  std::vector<float> q(count), k(count), v(count);
  for (size_t i = 0; i < count; ++i) {
    q[i] = float(std::sin(double(i)));
    k[i] = float(std::cos(1.7 * double(i)));
    v[i] = float(std::sin(0.3 * double(i)));
  }
  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_F32;
  segment.seqlen = seqlen;
  auto problem = attn::make<attn_problem>();
  problem.batch = 1;
  problem.heads_q = problem.heads_kv = heads;
  problem.head_dim = head_dim;
  problem.seqlen_q = seqlen;
  problem.q_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;

  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    auto options = attn::make<attn_context_options>();
    options.cpu_threads = 3;
    const attn::context context(backend, &options);
    const attn::plan plan(context, problem);
    auto run = [&] {
      std::vector<float> out(count, NAN);
      auto data = attn::make<attn_segment_args>();
      data.k = k.data();
      data.v = v.data();
      auto args = attn::make<attn_args>();
      args.q = q.data();
      args.out = out.data();
      args.num_segments = 1;
      args.segments = &data;
      plan.run(args, plan.make_workspace(context));
      return out;
    };
    const std::vector<float> alone = run();
    const uint64_t launches = attn_launch_count(plan.kernel());
    std::atomic<int> different{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c) {
      callers.emplace_back([&] {
        for (int n = 0; n < 5; ++n) different += run() != alone;
      });
    }
    for (std::thread& caller : callers) caller.join();
    INFO(plan.kernel());
    CHECK(different == 0);
    CHECK(attn_launch_count(plan.kernel()) == launches + 20);
    CHECK(std::isfinite(alone.front()));
  }
}

TEST_CASE("pool: last_error belongs to its thread") {
  attn_context* context = nullptr;
  REQUIRE(attn_context_create(attn_backend(99), nullptr, &context) != ATTN_OK);
  const std::string here = attn_last_error();
  std::string there = "unset";
  std::thread([&] { there = attn_last_error(); }).join();
  CHECK(here != "");
  CHECK(there == "");
  CHECK(attn_last_error() == here);
}
