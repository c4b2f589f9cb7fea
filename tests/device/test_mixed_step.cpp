// fwd_sm90_*_mixed compute tokens and chunks at the same time, in three launches that do not wait
// for each other when they begin. Everything before them in the stream must have ended by then, and
// what follows must see all that they wrote. A sanitizer runs one launch at a time and cannot tell.
#include <algorithm>
#include <cstring>
#include <memory>

#include "api/handles.h"
#include "attn/attn.hpp"
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "cuda.h"

namespace attn::test {
namespace {

using Owned = std::unique_ptr<attn_plan, void (*)(attn_plan*)>;
constexpr attn_dtype type = ATTN_BF16;
constexpr int64_t heads_q = 8, heads_kv = 2, dim = 128, tokens = 60, page = 64, pages = 64,
                  max_pages = 1024, front_keys = 128;
constexpr const char* kernel = "fwd_sm90_bf16_d128_mixed";

attn_segment padded(int64_t keys) {
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = type;
  segment.seqlen = keys;
  return segment;
}
attn_problem problem_of(attn_segment& segment, int64_t queries, int64_t heads, int64_t of_kv) {
  auto problem = make<attn_problem>();
  problem.batch = 1;
  problem.heads_q = heads;
  problem.heads_kv = of_kv;
  problem.head_dim = dim;
  problem.seqlen_q = queries;
  problem.q_type = problem.out_type = type;
  problem.num_segments = 1;
  problem.segments = &segment;
  return problem;
}

// A plan with its workspace, on a stream.
class Call {
 public:
  Call(attn_context* context, Arena& arena, const Stream& stream, const attn_problem& problem)
      : context_(context), stream_(stream), plan_(nullptr, attn_plan_destroy) {
    attn_plan* plan = nullptr;
    const attn_status status = attn_plan_create(context, &problem, &plan);
    INFO((status == ATTN_OK ? "" : attn_last_error()));
    REQUIRE(status == ATTN_OK);
    plan_.reset(plan);
    bytes_ = attn_plan_workspace(plan);
    if (bytes_ == 0) return;
    workspace_ = arena.workspace(bytes_);
    REQUIRE(attn_workspace_init(plan, workspace_, bytes_, stream.get()) == ATTN_OK);
  }
  bool operator()(const void* q, const void* k, const void* v, void* out,
                  const int32_t* cu_seqlens_q = nullptr, const int32_t* seqlens = nullptr,
                  const int32_t* table = nullptr) const {
    auto segment = make<attn_segment_args>();
    segment.k = k;
    segment.v = v;
    segment.seqlens = seqlens;
    segment.block_table = table;
    auto args = make<attn_args>();
    args.q = q;
    args.out = out;
    args.cu_seqlens_q = cu_seqlens_q;
    args.num_segments = 1;
    args.segments = &segment;
    return attn_run(plan_.get(), &args, workspace_, bytes_, stream_.get()) == ATTN_OK;
  }
  void alone(const void* q, const void* k, const void* v, void* out,
             const int32_t* cu_seqlens_q = nullptr, const int32_t* seqlens = nullptr,
             const int32_t* table = nullptr) const {
    REQUIRE((*this)(q, k, v, out, cu_seqlens_q, seqlens, table));
    REQUIRE(attn_synchronize(context_, stream_.get()) == ATTN_OK);
  }
  std::string kernel() const { return attn_plan_kernel(plan_.get()); }
  size_t launches() const { return plan_->plan->choice.recipe.steps.size(); }

 private:
  attn_context* context_;
  const Stream& stream_;
  Owned plan_;
  size_t bytes_ = 0;
  void* workspace_ = nullptr;
};

std::vector<int32_t> offsets_of(const std::vector<int32_t>& queries) {
  std::vector<int32_t> offsets(1, 0);
  for (const int32_t n : queries) offsets.push_back(offsets.back() + n);
  return offsets;
}

// Kernels write the step's queries and values, then it runs, then a kernel and a copy read all its
// rows. It runs with several inputs one after the other, in the same memory.
void check_step(int64_t chunk) {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  const int64_t rows = tokens + chunk;
  const Stream stream;
  // The library's own kernels, whichever the other context has.
  const context own(ATTN_BACKEND_CUDA);
  Arena arena(backend.context);

  attn_segment front_segment = padded(front_keys), behind_segment = padded(rows),
               cache = padded(page * max_pages);
  cache.layout = ATTN_PAGED;
  cache.has_seqlens = 1;
  cache.page_size = page;
  cache.max_pages = max_pages;
  cache.num_pages = pages;
  attn_problem step_problem = problem_of(cache, chunk, heads_q, heads_kv);
  step_problem.batch = tokens + 1;
  step_problem.q_layout = ATTN_PACKED;
  step_problem.total_q = rows;
  step_problem.flags = ATTN_CAUSAL;
  step_problem.kernel = kernel;
  const Call write_q(own.get(), arena, stream, problem_of(front_segment, rows, heads_q, heads_q)),
      write_v(own.get(), arena, stream,
              problem_of(front_segment, page * pages, heads_kv, heads_kv)),
      step(backend.context, arena, stream, step_problem),
      read(own.get(), arena, stream, problem_of(behind_segment, 1, heads_q, heads_q));
  INFO(step.kernel() << ", " << write_q.kernel() << ", " << write_v.kernel() << ", "
                     << read.kernel());
  CHECK(step.launches() == 3);  // chunks, tokens, what is left of chunks

  const int64_t row = heads_q * dim, q_count = rows * row,
                cache_count = pages * page * heads_kv * dim;
  const Buffer queries = random_values(type, q_count, 1),
               keys = random_values(type, front_keys * row, 2),
               k = random_values(type, cache_count, 3),
               poison_q(size_t(2 * (rows + tokens) * row), poison_of(type)),
               poison_v(size_t(2 * cache_count), poison_of(type)),
               poison_row(size_t(2 * row), poison_of(type));
  const Buffer many = random_values(type, page * pages * heads_kv * dim, 4);
  void* const queries_at = arena.add(queries);
  void* const keys_at = arena.add(keys);
  void* const many_at = arena.add(many);
  void* const k_at = arena.add(k);
  void* const behind_keys_at = arena.add(queries);
  // The chunk alone is read from row `tokens` on, with as many rows behind it as q has.
  void* const q_at = arena.add(poison_q);
  void* const v_at = arena.add(poison_v);
  void* const out_at = arena.add(poison_q);
  const size_t out_bytes = size_t(2 * rows * row);
  const Buffer poison_out(out_bytes, poison_of(type));

  Draw draw{5, 8};
  std::vector<int32_t> lengths, table(size_t((tokens + 1) * max_pages), -1), each(tokens + 1, 1);
  each.back() = chunk;
  // The chunk takes far longer than the tokens, whose launch must not end before it.
  for (int64_t b = 0; b <= tokens; ++b) {
    lengths.push_back(int32_t(b < tokens ? 1 + draw(900) : 40000));
    for (int64_t n = 0; n * page < lengths.back(); ++n)
      table[size_t(b * max_pages + n)] = int32_t(draw(pages));
  }
  std::vector<int32_t> of_tokens = each, of_chunk(tokens + 1, 0);
  of_tokens.back() = 0;
  of_chunk.back() = chunk;
  const Buffer lengths_buffer = bytes_of(lengths), table_buffer = bytes_of(table),
               all_buffer = bytes_of(offsets_of(each)),
               tokens_buffer = bytes_of(offsets_of(of_tokens)),
               chunk_buffer = bytes_of(offsets_of(of_chunk));
  const auto* const lengths_at = static_cast<const int32_t*>(arena.add(lengths_buffer));
  const auto* const table_at = static_cast<const int32_t*>(arena.add(table_buffer));
  const auto* const all_at = static_cast<const int32_t*>(arena.add(all_buffer));
  const auto* const tokens_at = static_cast<const int32_t*>(arena.add(tokens_buffer));
  const auto* const chunk_at = static_cast<const int32_t*>(arena.add(chunk_buffer));

  // Each input: what the kernels before read, and what each launch gives if it runs alone.
  constexpr int inputs = 4;
  std::vector<Buffer> values;
  values.reserve(inputs);
  void *values_at[inputs], *read_at[inputs], *copy_at[inputs];
  Buffer want_out[inputs], want_read[inputs];
  for (int n = 0; n < inputs; ++n) {
    values.push_back(random_values(type, front_keys * row, 10 + uint64_t(n)));
    values_at[n] = arena.add(values[size_t(n)]);
    read_at[n] = arena.add(poison_row);
    copy_at[n] = arena.add(poison_out);
    write_q.alone(queries_at, keys_at, values_at[n], q_at);
    write_v.alone(many_at, keys_at, values_at[n], v_at);
    step.alone(q_at, k_at, v_at, out_at, tokens_at, lengths_at, table_at);
    const Buffer first = arena.fetch(poison_q, out_at);
    step.alone(static_cast<char*>(q_at) + 2 * tokens * row, k_at, v_at, out_at, chunk_at,
               lengths_at, table_at);
    const Buffer second = arena.fetch(poison_q, out_at);
    arena.replace(out_at, poison_q);
    step.alone(q_at, k_at, v_at, out_at, all_at, lengths_at, table_at);
    want_out[n] = arena.fetch(poison_q, out_at);
    CHECK(std::memcmp(want_out[n].data(), first.data(), size_t(2 * tokens * row)) == 0);
    CHECK(std::memcmp(want_out[n].data() + 2 * tokens * row, second.data(),
                      size_t(2 * chunk * row)) == 0);
    read.alone(queries_at, behind_keys_at, out_at, read_at[n]);
    want_read[n] = arena.fetch(poison_row, read_at[n]);
    if (n > 0) REQUIRE(want_read[n].bytes != want_read[n - 1].bytes);  // inputs matter
  }

  const auto number = [](void* at) { return reinterpret_cast<unsigned long long>(at); };
  const auto launch = [&] {
    for (int n = 0; n < inputs; ++n) {
      const auto copy = [&] {
        return cuda().copy(number(copy_at[n]), number(out_at), out_bytes, stream.get()) == 0;
      };
      if (!write_q(queries_at, keys_at, values_at[n], q_at) ||
          !write_v(many_at, keys_at, values_at[n], v_at) ||
          !step(q_at, k_at, v_at, out_at, all_at, lengths_at, table_at))
        return false;
      // Either one is the first to follow.
      if (n % 2 == 0 && !copy()) return false;
      if (!read(queries_at, behind_keys_at, out_at, read_at[n])) return false;
      if (n % 2 == 1 && !copy()) return false;
    }
    return true;
  };
  const Captured graph(stream, launch);
  for (int replay = 0; replay < 40; ++replay) {
    INFO("replay " << replay);
    for (int n = 0; n < inputs; ++n) {
      arena.replace(read_at[n], poison_row);
      arena.replace(copy_at[n], poison_out);
    }
    for (void* at : {q_at, out_at}) arena.replace(at, poison_q);
    arena.replace(v_at, poison_v);
    if (replay % 2 == 0) {
      graph.replay();
    } else {
      REQUIRE(launch());
      REQUIRE(attn_synchronize(backend.context, stream.get()) == ATTN_OK);
    }
    for (int n = 0; n < inputs; ++n) {
      INFO("input " << n);
      REQUIRE((arena.fetch(poison_row, read_at[n]).bytes == want_read[n].bytes));
      const Buffer copied = arena.fetch(poison_out, copy_at[n]);
      REQUIRE(std::memcmp(copied.data(), want_out[n].data(), out_bytes) == 0);
    }
  }
}

TEST_CASE("cuda: a mixed step between kernels that it depends on and that depend on it") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  const auto kernels = kernels_here(Op::forward, false);
  if (std::none_of(kernels.begin(), kernels.end(),
                   [](const Kernel* k) { return k->name == std::string(kernel); }))
    ATTN_SKIP("no " + std::string(kernel) + " here");
  check_step(300);   // the first launch takes all of the chunk
  check_step(2200);  // the third takes some of what is left
}

}  // namespace
}  // namespace attn::test
