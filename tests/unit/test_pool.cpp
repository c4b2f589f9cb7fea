// Threads: what the thread sanitizer watches. Its build has these tests only.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "attn/attn.hpp"
#include "catch.h"
#include "core/interrupt.h"
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

TEST_CASE("pool: as many threads as pay, and no more than asked for") {
  ThreadPool pool(4);
  CHECK(pool.worth(0) == 1);
  CHECK(pool.worth(1e4) == 1);
  CHECK(pool.worth(1e12) == 4);
  // Every thread that takes part waits for as many as may, and nobody else comes.
  for (int most : {1, 2, 3, 4}) {
    std::atomic<int> inside{0}, highest{0};
    pool.for_each(
        1000,
        [&](int64_t item, int) {
          const int now = ++inside;
          for (int seen = highest; seen < now && !highest.compare_exchange_weak(seen, now);) {
          }
          while (item < most && highest < most) std::this_thread::yield();
          --inside;
        },
        nullptr, most);
    CHECK(highest == most);
  }
}

namespace {

// attn_context_options.run_threads that starts every second thread of those asked for, or all.
struct Team {
  int step = 1, calls = 0;
  int32_t most = 0;
  static void run(void* user, int32_t threads, attn_work work, void* data) {
    auto& team = *static_cast<Team*>(user);
    ++team.calls;
    team.most = std::max(team.most, threads);
    std::vector<std::thread> others;
    for (int32_t t = team.step; t < threads; t += team.step) others.emplace_back(work, data, t);
    work(data, 0);
    for (std::thread& other : others) other.join();
  }
};

}  // namespace

TEST_CASE("pool: threads of the program do each item once, however many come") {
  for (int step : {1, 2, 100}) {
    Team team{step};
    ThreadPool pool(4, {Team::run, &team});
    CHECK(pool.threads() == 4);
    for (int64_t items : {0, 1, 2, 3, 1000}) {
      std::vector<int> runs(items), thread_of(items, -1);
      pool.for_each(items, [&](int64_t item, int thread) {
        ++runs[item];
        thread_of[item] = thread;
      });
      CAPTURE(step, items);
      CHECK(runs == std::vector<int>(items, 1));
      bool came = true;
      for (int t : thread_of) came &= t >= 0 && t < 4 && t % step == 0;
      CHECK(came);
    }
    CHECK(team.calls == 3);  // none for no item and for one
    CHECK(team.most == 4);
  }
}

TEST_CASE("pool: a context's runs are on the program's threads") {
  const int64_t heads = 8, keys = 2048, dim = 64;
  std::vector<float> kv(size_t(keys * heads * dim)), q(size_t(heads * dim)), out[2];
  for (size_t n = 0; n < kv.size(); ++n) kv[n] = float(n * 7919 % 1000) / 500 - 1;
  for (size_t n = 0; n < q.size(); ++n) q[n] = float(n * 104729 % 1000) / 500 - 1;
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    Team team;
    for (int n = 0; n < 2; ++n) {
      auto options = attn::make<attn_context_options>();
      options.cpu_threads = 3;
      if (n == 1) {
        options.run_threads = Team::run;
        options.run_threads_user = &team;
      }
      const attn::context context(backend, &options);
      auto segment = attn::make<attn_segment>();
      segment.k_type = segment.v_type = ATTN_F32;
      segment.seqlen = keys;
      segment.k_stride = segment.v_stride = {0, heads * dim, dim};
      auto problem = attn::make<attn_problem>();
      problem.batch = 1;
      problem.heads_q = problem.heads_kv = heads;
      problem.head_dim = dim;
      problem.seqlen_q = 1;
      problem.q_type = ATTN_F32;
      problem.num_segments = 1;
      problem.segments = &segment;
      const attn::plan plan(context, problem);
      const attn::buffer workspace = plan.make_workspace(context);
      out[n].resize(q.size());
      auto data = attn::make<attn_segment_args>();
      data.k = data.v = kv.data();
      auto args = attn::make<attn_args>();
      args.q = q.data();
      args.out = out[n].data();
      args.num_segments = 1;
      args.segments = &data;
      plan.run(args, workspace);
    }
    INFO(attn_backend_string(backend));
    CHECK(team.calls == 1);
    CHECK(team.most > 1);
    CHECK(out[0] == out[1]);
  }
}

namespace {

// What options.interrupted is given: says yes when asked `yes_at` times.
struct Question {
  int yes_at = 1;
  std::atomic<int> asked{0};
  std::thread::id by = std::this_thread::get_id();
  std::atomic<bool> elsewhere{false};
  static int32_t ask(void* user) {
    auto& q = *static_cast<Question*>(user);
    if (std::this_thread::get_id() != q.by) q.elsewhere = true;
    return ++q.asked >= q.yes_at ? 7 : 0;
  }
};

}  // namespace

TEST_CASE("pool: an interrupt ends a job on all threads, asked by the caller alone") {
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    Question question;
    question.yes_at = 2;
    attn::Interrupt interrupt(Question::ask, &question);
    const int64_t items = int64_t{1} << 40;
    std::atomic<int64_t> done{0};
    pool.for_each(
        items,
        [&](int64_t, int thread) {
          if (!interrupt.stop(thread, 1 << 20)) ++done;
        },
        &interrupt);
    CHECK(interrupt.stopped());
    CHECK(interrupt.status().code == ATTN_INTERRUPTED);
    CHECK(done < items);
    CHECK(question.asked == 2);
    CHECK(!question.elsewhere);
    // The pool is as good as before.
    std::atomic<int64_t> sum{0};
    pool.for_each(100, [&](int64_t item, int) { sum += item; });
    CHECK(sum == 4950);
  }
}

TEST_CASE("pool: a caller that has no items left asks while the others work") {
  ThreadPool pool(2);
  Question question;
  attn::Interrupt interrupt(Question::ask, &question);
  std::atomic<bool> other_began{false};
  pool.for_each(
      2,
      [&](int64_t, int thread) {
        if (thread == 0) {
          while (!other_began) std::this_thread::yield();
        } else {
          other_began = true;
          while (!interrupt.stop(thread, 1)) std::this_thread::yield();
        }
      },
      &interrupt);
  CHECK(interrupt.stopped());
  CHECK(question.asked == 1);
  CHECK(!question.elsewhere);
}

TEST_CASE("pool: without a callback, or with one that says no, nothing stops") {
  Question question;
  question.yes_at = 1 << 30;
  attn::Interrupt never, no(Question::ask, &question);
  for (attn::Interrupt* interrupt : {&never, &no}) {
    ThreadPool pool(3);
    std::atomic<int64_t> done{0};
    pool.for_each(
        1000, [&](int64_t, int thread) { done += !interrupt->stop(thread, 1 << 20); }, interrupt);
    CHECK(done == 1000);
    CHECK(interrupt->status().ok());
  }
  CHECK(question.asked == 0);  // it was over before the first time
}

// The child of a fork has none of the threads.
TEST_CASE("pool: in the child of a fork the caller works alone") {
  auto pool = std::make_unique<ThreadPool>(3);
  std::atomic<int64_t> sum{0};
  pool->for_each(100, [&](int64_t item, int) { sum += item; });
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(60);
    int64_t alone = 0;
    pool->for_each(100, [&](int64_t item, int thread) { alone += thread == 0 ? item : -1; });
    pool.reset();
    _exit(alone == 4950 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(sum == 4950);
}

namespace {

// Problems that take seconds at least and no memory to speak of: strides of 0 repeat a row.
struct Long {
  const char* name;
  int64_t seqlen_q, seqlen_kv;
  bool bias;
};

attn_status run_long(const attn::context& context, const Long& length) {
  const int64_t dim = 64;
  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_F32;
  segment.seqlen = length.seqlen_kv;
  segment.k_stride = segment.v_stride = {1, 0, 1};
  auto problem = attn::make<attn_problem>();
  problem.batch = 2;  // so that the stride of a batch entry counts
  problem.heads_q = problem.heads_kv = 1;
  problem.head_dim = dim;
  problem.seqlen_q = length.seqlen_q;
  problem.q_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;
  if (length.bias) {
    problem.bias_type = ATTN_F32;
    problem.bias_stride[0] = 1;
  }
  const attn::plan plan(context, problem);
  const std::vector<float> row(dim + 1, 0.5f);
  std::vector<float> q(2 * length.seqlen_q * dim, 1.0f), out(q.size());
  auto data = attn::make<attn_segment_args>();
  data.k = data.v = row.data();
  auto args = attn::make<attn_args>();
  args.q = q.data();
  args.out = out.data();
  args.num_segments = 1;
  args.segments = &data;
  if (length.bias) args.bias = row.data();
  const attn::buffer workspace = plan.make_workspace(context);
  const uint64_t launches = attn_launch_count(plan.kernel());
  const attn_status status =
      attn_run(plan.get(), &args, workspace.data(), workspace.bytes(), nullptr);
  CHECK(attn_launch_count(plan.kernel()) == launches);
  return status;
}

}  // namespace

TEST_CASE("interrupt: a long call on the host ends with a status") {
  Question question;
  auto options = attn::make<attn_context_options>();
  options.interrupted = Question::ask;
  options.interrupted_user = &question;
  const auto ended = [&](const std::string& what, attn_status status) {
    INFO(what << ": " << attn_last_error());
    CHECK(status == ATTN_INTERRUPTED);
    CHECK(std::string(attn_last_error()).find("options.interrupted") != std::string::npos);
    CHECK(question.asked == 1);
    CHECK(!question.elsewhere);
    question.asked = 0;
  };
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const bool reference = backend == ATTN_BACKEND_REFERENCE;
    for (int threads : {1, 2}) {
      options.cpu_threads = threads;
      const attn::context context(backend, &options);
      const std::string name = attn_backend_string(backend) + (" " + std::to_string(threads));
      const int64_t most = reference ? 1 << 25 : (int64_t{1} << 31) - 2;
      for (const Long& length :
           {Long{"one row", 1, most, false}, Long{"rows", 1 << 14, 1 << 20, false},
            Long{"bias", 1, most, true}})
        ended(name + " " + length.name, run_long(context, length));
    }
    options.cpu_threads = 2;
    const attn::context context(backend, &options);
    const std::string name = attn_backend_string(backend);
    {
      const int64_t rows = 1 << 19, dim = 64;
      const int parts = 256;
      auto problem = attn::make<attn_merge_problem>();
      problem.batch = 1;
      problem.heads_q = 2;  // so that the stride of a head counts
      problem.seqlen_q = rows;
      problem.head_dim_v = dim;
      problem.num_parts = parts;
      problem.part_type = ATTN_F16;
      problem.part_stride = {1, 0, 1};
      const std::vector<uint16_t> in(dim + 1);
      const std::unique_ptr<uint16_t[]> out(new uint16_t[2 * rows * dim]);
      const std::unique_ptr<float[]> lse(new float[2 * rows]());
      const std::vector<const void*> outs(parts, in.data());
      const std::vector<const float*> lses(parts, lse.get());
      auto args = attn::make<attn_merge_args>();
      args.num_parts = parts;
      args.outs = outs.data();
      args.lses = lses.data();
      args.out = out.get();
      const attn::plan plan(context, problem);
      ended(name + " merge", attn_run_merge(plan.get(), &args, nullptr));
    }
    for (int64_t heads : {1, 1 << 20}) {  // one row, many rows
      auto problem = attn::make<attn_quantize_problem>();
      const int64_t elements = int64_t{1} << 29;
      problem.batch = problem.seqlen = 1;
      problem.heads = heads;
      problem.head_dim = elements / heads;
      problem.src_type = ATTN_BF16;
      problem.dst_type = ATTN_F8_E4M3FN;
      problem.scale = ATTN_SCALE_AMAX;
      const std::unique_ptr<uint16_t[]> x(new uint16_t[elements]);
      const std::unique_ptr<uint8_t[]> stored(new uint8_t[elements]);
      float descale;
      auto args = attn::make<attn_quantize_args>();
      args.src = x.get();
      args.dst = stored.get();
      args.descale = &descale;
      const attn::plan plan(context, problem);
      ended(name + " quantize", attn_run_quantize(plan.get(), &args, nullptr));
    }
    for (int64_t heads : {1, 1 << 20}) {  // one row, many rows
      auto problem = attn::make<attn_kv_append_problem>();
      const int64_t elements = int64_t{1} << 29;
      problem.batch = problem.seqlen_new = 1;
      problem.heads_kv = heads;
      problem.head_dim = elements / heads;
      problem.new_type = ATTN_BF16;
      problem.segment = attn::make<attn_segment>();
      problem.segment.k_type = problem.segment.v_type = ATTN_F8_E4M3FN;
      problem.segment.has_seqlens = 1;
      problem.segment.seqlen = 1;
      problem.advance_seqlens = 1;
      const std::unique_ptr<uint16_t[]> x(new uint16_t[elements]());
      const std::unique_ptr<uint8_t[]> k(new uint8_t[elements]), v(new uint8_t[elements]);
      int32_t length = 0;
      auto args = attn::make<attn_kv_append_args>();
      args.k_new = args.v_new = x.get();
      args.cache = attn::make<attn_segment_args>();
      args.cache.k = k.get();
      args.cache.v = v.get();
      args.cache.seqlens = args.seqlens_out = &length;
      const attn::plan plan(context, problem);
      ended(name + " kv_append", attn_run_kv_append(plan.get(), &args, nullptr));
      CHECK(length == 0);
    }
    auto shape = attn::make<attn_block_mask_shape>();
    shape.seqlen_q = shape.seqlen_kv = 1 << 17;
    shape.block_q = shape.block_k = 64;
    attn_block_mask* mask = nullptr;
    ended(name + " mask", attn_block_mask_from_window(context.get(), &shape, 100, 0, 0, 0, &mask));
    CHECK(mask == nullptr);
  }
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

TEST_CASE("pool: a context says how many threads its runs use") {
  auto options = attn::make<attn_context_options>();
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    options.cpu_threads = 3;
    CHECK(attn::context(backend, &options).threads() == 3);
    options.cpu_threads = 0;
    CHECK(attn::context(backend, &options).threads() == attn::default_threads());
    CHECK(attn::context(backend).threads() == attn::default_threads());
  }
  CHECK(attn::default_threads() >= 1);
  CHECK(attn_context_threads(nullptr) == 0);
  CHECK(std::string(attn_status_string(ATTN_INTERRUPTED)) == "interrupted");
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
