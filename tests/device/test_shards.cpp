// Results that are added to earlier ones, and segments that arrive while a run waits for them.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>

#include "attn/attn.hpp"
#include "conformance/random_families.h"
#include "core/dtype.h"
#include "cuda.h"

namespace attn::test {
namespace {

constexpr float nothing = -std::numeric_limits<float>::infinity();

using Plan = std::unique_ptr<attn_plan, void (*)(attn_plan*)>;

// Where row (b, i, h) has its lse and the first element of its out.
struct Places {
  const Case& c;
  attn_strides stride;
  int64_t tokens = 0;
  std::vector<int64_t> first;  // token of each sequence

  Places(const Case& of, attn_strides stride) : c(of), stride(stride) {
    for (int64_t b = 0; b < c.batch; ++b) {
      first.push_back(tokens);
      tokens += c.lengths_q.empty() ? c.seqlen_q : c.queries(b);
    }
    if (!c.lengths_q.empty()) tokens += c.tokens_of_nobody;
  }
  int64_t lse(int64_t b, int64_t i, int64_t h) const {
    return c.lengths_q.empty() ? (b * c.heads_q + h) * c.seqlen_q + i
                               : h * tokens + first[size_t(b)] + i;
  }
  int64_t out(int64_t b, int64_t i, int64_t h) const {
    const int64_t at = c.lengths_q.empty() ? b * stride.batch : first[size_t(b)] * stride.seq;
    return at + i * stride.seq + h * stride.head;
  }
};

// Contiguous, with room of 16 bytes multiples, or of an odd number of elements.
attn_strides out_strides(const Case& c, int64_t room) {
  const int64_t head = c.head_dim_v + room, seq = head * c.heads_q + 2 * room;
  return {c.seqlen_q * seq, seq, head};
}

// A case whose result is added, in float32.
Case adding(Case c, uint64_t number) {
  c.flags &= ~uint32_t{ATTN_OUT_SCALE};
  c.out_type = ATTN_F32;
  c.out_arrange = Arrange::contiguous;
  c.thinning = {};
  c.name += "-" + std::to_string(number);
  return c;
}

// Runs the case on the kernel, twice alone and once added to earlier rows. Whether it takes it.
bool check_added(Case c, const Data& data, const Kernel& kernel, int64_t room) {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  c.more_tokens = 0;  // shards_cuda takes as many as its plan has
  INFO("shards_cuda over " << kernel.name << ", room " << room << ": " << describe(c));
  Forward plain(backend, c, data, kernel.name, ATTN_F32);
  plain.launch(nullptr);
  const Outputs alone = plain.read();
  if (!alone.error.empty()) {
    CHECK(declined(kernel, alone));
    return false;
  }

  attn_problem p = plain.problem();
  p.flags |= ATTN_ACCUMULATE;
  p.out_stride = out_strides(c, room);
  attn_plan* made = nullptr;
  const attn_status status = attn_plan_create(backend.context, &p, &made);
  INFO((status == ATTN_OK ? "" : attn_last_error()));
  REQUIRE(status == ATTN_OK);
  const Plan plan(made, attn_plan_destroy);
  REQUIRE(attn_plan_kernel(made) == std::string("shards_cuda"));

  const Places places(c, p.out_stride);
  const int64_t rows = places.tokens * c.heads_q;
  Buffer out(size_t(places.tokens * p.out_stride.seq) * sizeof(float), 0xff);
  Buffer lse(size_t(rows) * sizeof(float), 0xff);
  // Of one row in three nothing, whatever its out has; of others much or little.
  for (int64_t n = 0; n < rows; ++n)
    lse.as<float>()[n] = hash(c.seed, 71, uint64_t(n)) % 3 == 0
                             ? nothing
                             : float(4 * normal(hash(c.seed, 72, uint64_t(n))));
  for (int64_t n = 0; n < places.tokens * p.out_stride.seq; ++n)
    out.as<float>()[n] = float(normal(hash(c.seed, 73, uint64_t(n))));
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t i = 0; i < c.queries(b); ++i)
      for (int64_t h = 0; h < c.heads_q; ++h)
        if (lse.as<float>()[places.lse(b, i, h)] == nothing)
          std::fill_n(out.as<float>() + places.out(b, i, h), c.head_dim_v, NAN);

  Arena arena(backend.context);
  attn_args args = plain.args();
  args.out = arena.add(out);
  args.lse = static_cast<float*>(arena.add(lse));
  const size_t bytes = attn_plan_workspace(made);
  void* const workspace = arena.workspace(bytes);
  REQUIRE(attn_workspace_init(made, workspace, bytes, nullptr) == ATTN_OK);
  const uint64_t launches = attn_launch_count(kernel.name);
  Buffer got[2], lses[2];
  for (int turn = 0; turn < 2; ++turn) {
    arena.replace(args.out, out);
    arena.replace(args.lse, lse);
    const attn_status ran = attn_run(made, &args, workspace, bytes, nullptr);
    INFO((ran == ATTN_OK ? "" : attn_last_error()));
    REQUIRE(ran == ATTN_OK);
    REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);
    got[turn] = arena.fetch(out, args.out);
    lses[turn] = arena.fetch(lse, args.lse);
  }
  CHECK(attn_launch_count(kernel.name) == launches + 2);
  CHECK(got[0].bytes == got[1].bytes);
  CHECK(lses[0].bytes == lses[1].bytes);

  // Rows by the formula; all else keeps its bits, guards too.
  Buffer want = out, want_lse = lse;
  size_t row = 0;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t i = 0; i < c.queries(b); ++i)
      for (int64_t h = 0; h < c.heads_q; ++h, ++row) {
        INFO("batch entry " << b << ", query " << i << ", head " << h);
        const double added = alone.lse[row];
        const double* const added_out = &alone.out[row * size_t(c.head_dim_v)];
        float* const old_lse = want_lse.as<float>() + places.lse(b, i, h);
        float* const old = want.as<float>() + places.out(b, i, h);
        const float* const now = got[0].as<float>() + places.out(b, i, h);
        const float now_lse = lses[0].as<float>()[places.lse(b, i, h)];
        if (added == nothing) continue;
        if (*old_lse == nothing) {  // the result alone, to the bit
          *old_lse = float(added);
          for (int64_t d = 0; d < c.head_dim_v; ++d) old[d] = float(added_out[d]);
          continue;
        }
        const double both =
            std::max<double>(added, *old_lse) + std::log1p(std::exp(-std::abs(added - *old_lse)));
        const double keep = std::exp(*old_lse - both), weight = std::exp(added - both);
        double most = 0, size = 1;
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          const double x = keep * double(old[d]) + weight * added_out[d];
          most = std::max(most, std::abs(double(now[d]) - x));
          size = std::max({size, std::abs(double(old[d])), std::abs(added_out[d])});
          old[d] = now[d];
        }
        if (!(most < 4e-6 * size)) CHECK(most < 4e-6 * size);
        if (!(std::abs(double(now_lse) - both) < 4e-6 * (1 + std::abs(both))))
          CHECK(std::abs(double(now_lse) - both) < 4e-6 * (1 + std::abs(both)));
        *old_lse = now_lse;
      }
  CHECK(got[0].bytes == want.bytes);
  CHECK(lses[0].bytes == want_lse.bytes);
  return true;
}

TEST_CASE("cuda: results are added to earlier ones exactly, whichever kernel attends") {
  if (!backend_of(ATTN_BACKEND_CUDA).context) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  std::vector<const Kernel*> kernels = kernels_here(Op::forward, false);
  std::erase_if(kernels, [](const Kernel* k) { return k->backend != ATTN_BACKEND_CUDA; });
  std::set<std::string> ran;
  for (const RandomFamily& family : random_families())
    for (uint64_t seed = 1; seed <= (sanitized ? 2 : 12); ++seed) {
      const Case c = adding(family.make(seed), seed);
      const Data data = make_data(c);
      // Kernels take turns: each case runs on a few that take it.
      int left = 4;
      for (size_t n = 0; n < kernels.size() && left > 0; ++n) {
        const Kernel& kernel = *kernels[(n + seed * 17) % kernels.size()];
        const int64_t rooms[] = {0, 4, 1};
        if (!check_added(c, data, kernel, rooms[(seed + n) % 3])) continue;
        ran.insert(kernel.name);
        --left;
      }
    }
  // No random family is of latent caches alone.
  for (const Kernel* kernel : cuda_forward_kernels()) {
    if (!std::string_view(kernel->name).starts_with("mla_")) continue;
    const Case c = adding(case_for(*kernel, std::string("added-") + kernel->name, 2, 5, 200), 1);
    if (check_added(c, make_data(c), *kernel, 0)) ran.insert(kernel->name);
  }
  CHECK(!ran.empty());
  // Of each family some; a file of kernels has one.
  for (const char* prefix : {"fwd_sm80_", "fwd_sm90_", "decode_", "mla_"}) {
    const auto of_family = [&](const std::string& name) { return name.starts_with(prefix); };
    const bool here = std::any_of(kernels.begin(), kernels.end(),
                                  [&](const Kernel* k) { return of_family(k->name); });
    INFO(prefix << " of " << ran.size() << " kernels that ran");
    CHECK((!here || kernel_file() || std::any_of(ran.begin(), ran.end(), of_family)));
  }
}

// Of latent caches too. Little work, so that it ends soon under compute-sanitizer.
TEST_CASE("cuda: results of each kernel are added to earlier ones") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  for (const Kernel* kernel : kernels) DYNAMIC_SECTION(kernel->name) {
      for (const int64_t room : {0, 1}) {
        Case c = case_for(*kernel, std::string("added-") + kernel->name, 2, 5, 200);
        c = adding(c, uint64_t(room));
        if (!check_added(c, make_data(c), *kernel, room)) break;
      }
    }
}

context with_kernel_file() {
  auto options = make<attn_context_options>();
  options.kernel_file = kernel_file();
  return context(ATTN_BACKEND_CUDA, &options);
}

// Three segments of a sequence, on the device twice: one that arrives, and one that is there.
struct Arrival {
  static constexpr int64_t heads_kv = 2, heads_q = 8, dim = 128, batch = 2;
  static constexpr int segments = 3;
  static constexpr int64_t keys[segments] = {320, 512, 192};
  const context own = with_kernel_file();
  std::vector<attn_segment> kv{segments, make<attn_segment>()};
  attn_problem problem = make<attn_problem>();
  Buffer q, k[segments], v[segments];

  Arrival(attn_dtype type, int64_t queries, uint32_t flags) {
    for (int i = 0; i < segments; ++i) {
      kv[size_t(i)].k_type = kv[size_t(i)].v_type = type;
      kv[size_t(i)].seqlen = keys[i];
      kv[size_t(i)].has_ready = 1;
      k[i] = random_values(type, batch * keys[i] * heads_kv * dim, uint64_t(10 + i));
      v[i] = random_values(type, batch * keys[i] * heads_kv * dim, uint64_t(20 + i));
    }
    problem.batch = batch;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    problem.head_dim = dim;
    problem.seqlen_q = queries;
    problem.q_type = type;
    problem.out_type = ATTN_F32;
    problem.flags = flags;
    problem.num_segments = segments;
    problem.segments = kv.data();
    q = random_values(type, batch * queries * heads_q * dim, 1);
  }
  int64_t rows() const { return batch * problem.seqlen_q * heads_q; }
};

// One set of arrays on the device.
struct Set {
  const Arrival& a;
  buffer q, k[3], v[3], ready, out, lse, workspace;
  std::vector<attn_segment_args> segments{3, make<attn_segment_args>()};
  attn_args args = make<attn_args>();

  Set(const Arrival& a, const plan& made)
      : a(a),
        q(a.own, a.q.size()),
        ready(a.own, 3 * 2 * sizeof(uint32_t)),
        out(a.own, size_t(a.rows() * Arrival::dim) * sizeof(float)),
        lse(a.own, size_t(a.rows()) * sizeof(float)),
        workspace(made.make_workspace(a.own, nullptr)) {
    q.copy_in(a.q.data(), a.q.size());
    for (size_t i = 0; i < 3; ++i) {
      k[i] = buffer(a.own, a.k[i].size());
      v[i] = buffer(a.own, a.v[i].size());
      segments[i].k = k[i].data();
      segments[i].v = v[i].data();
      segments[i].ready = static_cast<const uint32_t*>(ready.data()) + 2 * i;
    }
    args.q = q.data();
    args.out = out.data();
    args.lse = static_cast<float*>(lse.data());
    args.num_segments = 3;
    args.segments = segments.data();
    a.own.synchronize();
  }
  void set(void* stream, size_t word, uint32_t value) {
    attn::check(attn_copy_in(a.own.get(), static_cast<uint32_t*>(ready.data()) + word, &value,
                             sizeof value, stream));
  }
  // The segment's data, then the word that says so.
  void deliver(void* stream, size_t i, uint32_t arrivals) {
    k[i].copy_in(a.k[i].data(), a.k[i].size(), stream);
    v[i].copy_in(a.v[i].data(), a.v[i].size(), stream);
    set(stream, 2 * i, arrivals);
  }
  // Nothing is there but `arrivals` that were before, and one more is wanted. Earlier results.
  void forget(void* stream, uint32_t arrivals) {
    for (size_t i = 0; i < 3; ++i) {
      const std::vector<unsigned char> poison(a.k[i].size(), 0xff);
      k[i].copy_in(poison.data(), poison.size(), stream);
      v[i].copy_in(poison.data(), poison.size(), stream);
      set(stream, 2 * i, arrivals);
      set(stream, 2 * i + 1, arrivals + 1);
    }
    std::vector<float> old(size_t(a.rows() * Arrival::dim), 0.25f), old_lse(size_t(a.rows()), 1);
    out.copy_in(old.data(), old.size() * 4, stream);
    lse.copy_in(old_lse.data(), old_lse.size() * 4, stream);
  }
  void run(const plan& made, void* stream) {
    attn::check(attn_run(made.get(), &args, workspace.data(), workspace.bytes(), stream));
  }
  std::vector<float> read(void* stream) const {
    std::vector<float> values(out.bytes() / 4 + lse.bytes() / 4);
    out.copy_out(values.data(), out.bytes(), stream);
    lse.copy_out(values.data() + out.bytes() / 4, lse.bytes(), stream);
    return values;
  }
};

// By the cpu backend, of whole arrays.
std::vector<float> on_host(const Arrival& a) {
  static const context host(ATTN_BACKEND_CPU);
  attn_problem p = a.problem;
  std::vector<attn_segment> kv = a.kv;
  for (attn_segment& s : kv) s.has_ready = 0;
  p.segments = kv.data();
  p.kernel = nullptr;
  const plan made(host, p);
  std::vector<float> values(size_t(a.rows() * (Arrival::dim + 1)), 0.25f);
  std::fill(values.begin() + a.rows() * Arrival::dim, values.end(), 1.0f);
  std::vector<attn_segment_args> segments(3, make<attn_segment_args>());
  for (size_t i = 0; i < 3; ++i) segments[i].k = a.k[i].data(), segments[i].v = a.v[i].data();
  auto args = make<attn_args>();
  args.q = a.q.data();
  args.out = values.data();
  args.lse = values.data() + a.rows() * Arrival::dim;
  args.num_segments = 3;
  args.segments = segments.data();
  buffer workspace = made.make_workspace(host, nullptr);
  attn::check(attn_run(made.get(), &args, workspace.data(), workspace.bytes(), nullptr));
  return values;
}

void check_near(const std::vector<float>& got, const std::vector<float>& want) {
  double most = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    const double off = std::abs(double(got[n]) - double(want[n]));
    most = off <= most ? most : off;  // a NaN stays
  }
  CHECK(most < 0.01);
}

struct ArrivalCase {
  const char* name;
  attn_dtype type;
  int64_t queries;
  uint32_t flags;
  const char* kernel;
};
constexpr ArrivalCase arrivals[] = {
    {"decode", ATTN_BF16, 1, 0, nullptr},
    {"prefill", ATTN_F16, 300, ATTN_CAUSAL, nullptr},
    {"prefill on sm_80's kernel", ATTN_BF16, 200, ATTN_CAUSAL, "fwd_sm80_bf16_d128"},
    {"one wait for all", ATTN_BF16, 130, ATTN_CAUSAL_TOP_LEFT, nullptr}};

// Calls body(problem, plan, what a run gives of segments that are there, the arrays of that run)
// for each case, alone and accumulated.
template <class Body>
void for_each_arrival(Body&& body) {
  for (const ArrivalCase& c : arrivals)
    for (const uint32_t accumulate : {0u, uint32_t{ATTN_ACCUMULATE}}) {
      INFO("shards_cuda, " << c.name << (accumulate ? ", accumulated" : ""));
      Arrival a(c.type, c.queries, c.flags | accumulate);
      a.problem.kernel = c.kernel;
      if (kernel_file()) {  // has one kernel, which may not take the case
        attn_plan* any = nullptr;
        if (attn_plan_create(a.own.get(), &a.problem, &any) == ATTN_UNSUPPORTED) continue;
        attn_plan_destroy(any);
      }
      const plan made(a.own, a.problem);
      REQUIRE(std::string(made.kernel()) == "shards_cuda");
      const Stream stream;
      Set there(a, made);
      there.forget(stream.get(), 0);
      for (size_t i = 0; i < 3; ++i) there.deliver(stream.get(), i, 1);
      there.run(made, stream.get());
      const std::vector<float> want = there.read(stream.get());
      check_near(want, on_host(a));
      body(a, made, want, there);
    }
}

// Also under sanitizers, which let one kernel run at a time.
TEST_CASE("cuda: segments that are there are not waited for") {
  if (!backend_of(ATTN_BACKEND_CUDA).context) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  for_each_arrival([](auto&&...) {});
}

// A run is begun, then, while it cannot have ended, another one beside it ends: had the first not
// waited, it would have read what is not there. Segments then arrive in another order.
TEST_CASE("cuda: segments are read when they have arrived") {
  if (!backend_of(ATTN_BACKEND_CUDA).context) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  for_each_arrival(
      [](const Arrival& a, const plan& made, const std::vector<float>& want, Set& there) {
        const Stream waiting, beside, copies;
        Set late(a, made);
        const auto arrive = [&](uint32_t number) {
          there.run(made, beside.get());
          REQUIRE(cuda().stream_synchronize(beside.get()) == 0);
          CHECK(cuda().stream_query(waiting.get()) == not_ready);
          for (const size_t i : {2, 0, 1}) {
            late.deliver(copies.get(), i, number);
            if (i == 1) continue;  // the last one
            REQUIRE(cuda().stream_synchronize(copies.get()) == 0);
            for (int turn = 0; turn < 2; ++turn) there.run(made, beside.get());
            REQUIRE(cuda().stream_synchronize(beside.get()) == 0);
            CHECK(cuda().stream_query(waiting.get()) == not_ready);
          }
          CHECK(late.read(waiting.get()) == want);
        };
        late.forget(copies.get(), 0);
        late.run(made, waiting.get());
        arrive(1);
        // The number of arrivals is that of the replay.
        const Captured graph(waiting, [&] {
          late.run(made, waiting.get());
          return true;
        });
        for (const uint32_t number : {1u, 2u, 3u}) {
          late.forget(copies.get(), number);
          graph.start();
          arrive(number + 1);
        }
        // Past the largest number.
        late.forget(copies.get(), 0xffffffffu);
        graph.start();
        arrive(0);
      });
}

}  // namespace
}  // namespace attn::test
