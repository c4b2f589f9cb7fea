// Keys and queries at positions of their own, results added to earlier ones, and ready words: the
// kernels of reference and cpu against the formula in float64 over a mask made dense.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../catch.h"
#include "attn/attn.hpp"
#include "backend.h"
#include "catalog/catalog.h"
#include "kernels/shared/key_places.h"
#include "problem/problem.h"

namespace attn::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Shard {
  int64_t capacity = 0;
  std::vector<int32_t> lengths;
  std::vector<int64_t> start;
  int64_t interleave = 1, ranks = 1, rank = 0;
  std::vector<float> k, v;

  int64_t place(int64_t b, int64_t c) const {
    return start[size_t(b)] + (c / interleave * ranks + rank) * interleave + c % interleave;
  }
};

struct Sharded {
  uint64_t seed = 0;
  int64_t batch = 1, heads_kv = 1, group = 1, queries = 1, dim = 8, dim_v = 8;
  uint32_t flags = ATTN_QUERY_POSITIONS;
  int64_t left = -1, right = -1, fixed_split = 0;
  float softcap = 0;
  int32_t block_q = 0, block_k = 0;
  bool key_starts = true;
  std::vector<Shard> shards;
  std::vector<int64_t> query_start;
  std::vector<float> q, slopes, sinks;
  std::vector<uint8_t> kinds;
  std::vector<int32_t> causal;  // causal_sequences, or none

  bool has(uint32_t flag) const { return flags & flag; }
  int64_t heads() const { return heads_kv * group; }
  int64_t capacity() const {
    int64_t sum = 0;
    for (const Shard& s : shards) sum += s.capacity;
    return sum;
  }
};

std::vector<float> numbers(uint64_t seed, uint64_t salt, int64_t count) {
  std::vector<float> x(size_t(count), 0);
  for (int64_t n = 0; n < count; ++n) x[size_t(n)] = float(normal(hash(seed, salt, uint64_t(n))));
  return x;
}

Sharded random_case(uint64_t seed) {
  Sharded c;
  Draw draw{seed, 431};
  c.seed = seed;
  c.batch = 1 + draw(3);
  c.heads_kv = 1 + draw(2);
  c.group = 1 + draw(3);
  const int64_t queries[] = {1, 2, 7, 40}, dims[] = {8, 20, 64};
  c.queries = draw.pick(queries);
  c.dim = draw.pick(dims);
  c.dim_v = draw.pick(dims);
  if (draw.chance(2)) c.flags |= ATTN_CAUSAL;
  if (draw.chance(2)) {
    c.flags |= ATTN_WINDOW;
    c.left = draw(40) - 1;
    c.right = draw(20) - 1;
  }
  if (draw.chance(3)) c.flags |= ATTN_ALIBI;
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(2)) c.flags |= ATTN_ACCUMULATE;
  if (draw.chance(4)) c.softcap = 2;
  if (draw.chance(4)) c.fixed_split = 64;
  c.key_starts = !draw.chance(6);
  const int64_t count = draw.chance(2) ? 1 : 2 + draw(3);
  for (int64_t n = 0; n < count; ++n) {
    Shard s;
    const int64_t capacities[] = {1, 16, 60, 200}, interleaves[] = {1, 1, 4, 16};
    s.capacity = draw.pick(capacities);
    if (c.key_starts) {
      s.interleave = draw.pick(interleaves);
      s.ranks = 1 + draw(5);
      s.rank = draw(uint64_t(s.ranks));
    }
    for (int64_t b = 0; b < c.batch; ++b) {
      s.lengths.push_back(int32_t(draw.chance(6) ? 0 : draw(uint64_t(s.capacity) + 1)));
      s.start.push_back(draw(90) - 30);
    }
    s.k = numbers(seed, 10 + uint64_t(n), c.batch * s.capacity * c.heads_kv * c.dim);
    s.v = numbers(seed, 20 + uint64_t(n), c.batch * s.capacity * c.heads_kv * c.dim_v);
    c.shards.push_back(s);
  }
  for (int64_t b = 0; b < c.batch; ++b) c.query_start.push_back(draw(260) - 40);
  c.q = numbers(seed, 1, c.batch * c.queries * c.heads() * c.dim);
  for (int64_t h = 0; h < c.heads(); ++h) {
    c.slopes.push_back(0.05f * float(h + 1));
    c.sinks.push_back(float(h) - 1);
  }
  if (draw.chance(4)) {
    c.flags |= ATTN_BLOCK_MASK;
    const int32_t blocks[] = {3, 16, 64};
    c.block_q = draw.pick(blocks);
    c.block_k = draw.pick(blocks);
    const int64_t grid = ceil_div(c.queries, c.block_q) * ceil_div(c.capacity(), c.block_k);
    for (int64_t n = 0; n < grid; ++n) c.kinds.push_back(uint8_t(draw(3)));
  }
  if (c.has(ATTN_CAUSAL) && draw.chance(3))
    for (int64_t b = 0; b < c.batch; ++b) c.causal.push_back(int32_t(draw(2)));
  if (draw.chance(5)) {  // near the largest positions
    constexpr int64_t far = (int64_t{1} << 30) - 4000;
    const int64_t key_shift = draw.chance(2) ? far : -far;
    for (int64_t& start : c.query_start) start += far;
    for (Shard& s : c.shards)
      for (int64_t& start : s.start) start += key_shift;
  }
  return c;
}

struct Rows {
  std::vector<float> out, lse;  // [B, Sq, Hq, Dv], [B, Hq, Sq]
};

// What out and lse hold before the call: of some rows nothing, whatever out contains.
Rows earlier(const Sharded& c) {
  Rows rows{numbers(c.seed, 30, c.batch * c.queries * c.heads() * c.dim_v),
            numbers(c.seed, 31, c.batch * c.queries * c.heads())};
  for (int64_t row = 0; row < int64_t(rows.lse.size()); ++row) {
    const int64_t b = row / c.queries / c.heads(), h = row / c.queries % c.heads();
    if (hash(c.seed, 32, uint64_t(row)) % 3) continue;
    rows.lse[size_t(row)] = float(-infinity);
    float* out = &rows.out[size_t(((b * c.queries + row % c.queries) * c.heads() + h) * c.dim_v)];
    std::fill_n(out, c.dim_v, std::numeric_limits<float>::quiet_NaN());
  }
  return rows;
}

bool sees(const Sharded& c, int64_t b, int64_t query, int64_t key, int64_t i, int64_t n) {
  const bool causal = c.has(ATTN_CAUSAL) && (c.causal.empty() || c.causal[size_t(b)]);
  if (causal && key > query) return false;
  if (c.has(ATTN_WINDOW) && c.left >= 0 && key < query - c.left) return false;
  if (c.has(ATTN_WINDOW) && c.right >= 0 && key > query + c.right) return false;
  if (!c.has(ATTN_BLOCK_MASK)) return true;
  const int64_t columns = ceil_div(c.capacity(), c.block_k);
  const int kind = c.kinds[size_t(i / c.block_q * columns + n / c.block_k)];
  return kind == ATTN_BLOCK_FULL || (kind == ATTN_BLOCK_CAUSAL && key <= query);
}

// The formula for one row: its lse, and its out in *sum.
double formula_row(const Sharded& c, int64_t b, int64_t h, int64_t i, std::vector<double>* sum) {
  std::vector<double> scores;
  std::vector<const float*> values;
  const int64_t query = c.query_start[size_t(b)] + i, kv = h / c.group;
  int64_t n = 0;
  for (const Shard& s : c.shards)
    for (int64_t key = 0; key < s.lengths[size_t(b)]; ++key, ++n) {
      const int64_t place = c.key_starts ? s.place(b, key) : n;
      if (!sees(c, b, query, place, i, n)) continue;
      const int64_t row = (b * s.capacity + key) * c.heads_kv + kv;
      double dot = 0;
      for (int64_t d = 0; d < c.dim; ++d)
        dot += double(c.q[size_t(((b * c.queries + i) * c.heads() + h) * c.dim + d)]) *
               double(s.k[size_t(row * c.dim + d)]);
      double score = dot / std::sqrt(double(c.dim));
      if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
      if (c.has(ATTN_ALIBI)) score -= double(c.slopes[size_t(h)]) * double(std::abs(query - place));
      scores.push_back(score);
      values.push_back(&s.v[size_t(row * c.dim_v)]);
    }
  double max = c.has(ATTN_SINKS) ? double(c.sinks[size_t(h)]) : -infinity, total = 0;
  for (const double x : scores) max = std::max(max, x);
  sum->assign(size_t(c.dim_v), 0);
  if (max == -infinity) return -infinity;
  if (c.has(ATTN_SINKS)) total = std::exp(double(c.sinks[size_t(h)]) - max);
  for (size_t k = 0; k < scores.size(); ++k) {
    const double weight = std::exp(scores[k] - max);
    total += weight;
    for (int64_t d = 0; d < c.dim_v; ++d) (*sum)[size_t(d)] += weight * double(values[k][d]);
  }
  for (double& x : *sum) x /= total;
  return max + std::log(total);
}

attn_problem problem_of(const Sharded& c, std::vector<attn_segment>* segments) {
  auto p = make<attn_problem>();
  p.batch = c.batch;
  p.heads_q = c.heads();
  p.heads_kv = c.heads_kv;
  p.head_dim = c.dim;
  p.head_dim_v = c.dim_v;
  p.seqlen_q = c.queries;
  p.q_type = p.out_type = ATTN_F32;
  p.flags = c.flags;
  p.softcap = c.softcap;
  p.fixed_split = c.fixed_split;
  if (c.has(ATTN_WINDOW)) {
    p.window_left = c.left;
    p.window_right = c.right;
  }
  p.has_causal_sequences = !c.causal.empty();
  p.block_q = c.block_q;
  p.block_k = c.block_k;
  for (const Shard& s : c.shards) {
    auto segment = make<attn_segment>();
    segment.k_type = segment.v_type = ATTN_F32;
    segment.seqlen = s.capacity;
    segment.has_seqlens = 1;
    if (c.key_starts) {
      segment.has_key_start = 1;
      segment.key_interleave = s.interleave;
      segment.key_ranks = int32_t(s.ranks);
      segment.key_rank = int32_t(s.rank);
    }
    segments->push_back(segment);
  }
  p.num_segments = int32_t(segments->size());
  p.segments = segments->data();
  return p;
}

// Runs the case; `rows` holds earlier results, and then the new ones.
void run(const Sharded& c, const Kernel& kernel, Rows* rows) {
  const context host(kernel.backend);
  std::vector<attn_segment> segments;
  attn_problem p = problem_of(c, &segments);
  p.kernel = kernel.name;
  const plan made(host, p);
  std::vector<attn_segment_args> of_segments;
  for (const Shard& s : c.shards) {
    auto a = make<attn_segment_args>();
    a.k = s.k.data();
    a.v = s.v.data();
    a.seqlens = s.lengths.data();
    a.key_start = c.key_starts ? s.start.data() : nullptr;
    of_segments.push_back(a);
  }
  auto args = make<attn_args>();
  args.q = c.q.data();
  args.out = rows->out.data();
  args.lse = rows->lse.data();
  args.num_segments = p.num_segments;
  args.segments = of_segments.data();
  args.query_start = c.query_start.data();
  args.alibi_slopes = c.has(ATTN_ALIBI) ? c.slopes.data() : nullptr;
  args.sinks = c.has(ATTN_SINKS) ? c.sinks.data() : nullptr;
  args.block_kinds = c.has(ATTN_BLOCK_MASK) ? c.kinds.data() : nullptr;
  args.causal_sequences = c.causal.empty() ? nullptr : c.causal.data();
  buffer workspace = made.make_workspace(host, nullptr);
  const uint64_t launches = attn_launch_count(kernel.name);
  check(attn_run(made.get(), &args, workspace.data(), workspace.bytes(), nullptr));
  REQUIRE(attn_launch_count(kernel.name) > launches);
}

std::vector<const Kernel*> host_kernels() {
  std::vector<const Kernel*> kernels = kernels_here(Op::forward, true);
  std::erase_if(kernels, [](const Kernel* k) {
    return k->backend != ATTN_BACKEND_REFERENCE && k->backend != ATTN_BACKEND_CPU;
  });
  return kernels;
}

bool same_bits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, size_t(n) * sizeof *a) == 0;
}

// Asserts that `got` is the case's answer added to `before`.
void check_rows(const Sharded& c, const Rows& before, const Rows& got) {
  std::vector<double> want;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads(); ++h)
      for (int64_t i = 0; i < c.queries; ++i) {
        const int64_t row = (b * c.heads() + h) * c.queries + i;
        const int64_t at = ((b * c.queries + i) * c.heads() + h) * c.dim_v;
        double lse = formula_row(c, b, h, i, &want);
        const double old = before.lse[size_t(row)];
        if (c.has(ATTN_ACCUMULATE) && lse == -infinity) {
          REQUIRE(same_bits(&got.lse[size_t(row)], &before.lse[size_t(row)], 1));
          REQUIRE(same_bits(&got.out[size_t(at)], &before.out[size_t(at)], c.dim_v));
          continue;
        }
        if (c.has(ATTN_ACCUMULATE) && old != -infinity) {
          const double both = std::max(lse, old) + std::log1p(std::exp(-std::abs(lse - old)));
          for (int64_t d = 0; d < c.dim_v; ++d)
            want[size_t(d)] = want[size_t(d)] * std::exp(lse - both) +
                              double(before.out[size_t(at + d)]) * std::exp(old - both);
          lse = both;
        }
        INFO("batch entry " << b << ", head " << h << ", query " << i);
        if (lse == -infinity) {
          REQUIRE(double(got.lse[size_t(row)]) == lse);
        } else {
          REQUIRE(std::abs(double(got.lse[size_t(row)]) - lse) < 4e-6 * (1 + std::abs(lse)));
        }
        for (int64_t d = 0; d < c.dim_v; ++d)
          REQUIRE(std::abs(double(got.out[size_t(at + d)]) - want[size_t(d)]) < 1e-5);
      }
}

TEST_CASE("shards: positions and accumulated results are those of a dense mask") {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    const Sharded c = random_case(seed);
    const Rows before = earlier(c);
    for (const Kernel* kernel : host_kernels()) {
      INFO("seed " << seed << ", " << kernel->name);
      Rows got = before;
      run(c, *kernel, &got);
      check_rows(c, before, got);
    }
  }
}

TEST_CASE("shards: ranks that add to one result have that of all keys") {
  for (const int64_t ranks : {1, 2, 3, 8})
    for (const int64_t interleave : {1, 4, 64}) {
      Sharded whole;
      whole.seed = uint64_t(ranks * 100 + interleave);
      whole.heads_kv = whole.group = 2;
      whole.batch = 2;
      whole.queries = 33;
      whole.dim = whole.dim_v = 16;
      whole.flags |= ATTN_CAUSAL | ATTN_WINDOW | ATTN_ALIBI | ATTN_ACCUMULATE;
      whole.left = 150;
      whole.query_start = {300 - 33, 211 - 33};
      whole.q = numbers(whole.seed, 1, 2 * 33 * 4 * 16);
      whole.slopes = {0.01f, 0.02f, 0.03f, 0.04f};
      Shard all;
      all.capacity = 300;
      all.lengths = {300, 211};
      all.start = {0, 0};
      all.k = numbers(whole.seed, 2, 2 * 300 * 2 * 16);
      all.v = numbers(whole.seed, 3, 2 * 300 * 2 * 16);
      whole.shards = {all};
      const Rows before = earlier(whole);
      for (const Kernel* kernel : host_kernels()) {
        Rows got = before;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          Sharded part = whole;
          Shard& s = part.shards[0];
          s.interleave = interleave;
          s.ranks = ranks;
          s.rank = rank;
          s.lengths = {0, 0};
          std::fill(s.k.begin(), s.k.end(), std::numeric_limits<float>::quiet_NaN());
          s.v = s.k;
          for (int64_t b = 0; b < 2; ++b)
            for (int64_t n = 0; n < all.lengths[size_t(b)]; ++n) {
              if (n / interleave % ranks != rank) continue;
              const int64_t from = (b * 300 + n) * 32, to = (b * 300 + s.lengths[size_t(b)]++) * 32;
              std::copy_n(&all.k[size_t(from)], 32, &s.k[size_t(to)]);
              std::copy_n(&all.v[size_t(from)], 32, &s.v[size_t(to)]);
            }
          run(part, *kernel, &got);
        }
        INFO(ranks << " ranks, interleave " << interleave << ", " << kernel->name);
        check_rows(whole, before, got);
      }
    }
}

// Lists and keys without positions, over a latent cache: each run has a part of every list.
TEST_CASE("shards: lists in parts add to the result of the whole list") {
  constexpr int64_t batch = 2, queries = 5, heads = 3, keys = 90, listed = 24, dim = 24, dim_v = 16;
  const std::vector<float> q = numbers(1, 1, batch * queries * heads * dim),
                           k = numbers(1, 2, batch * keys * dim);
  std::vector<int32_t> list(size_t(batch * queries * listed));
  for (size_t n = 0; n < list.size(); ++n) list[n] = int32_t(hash(1, 3, n) % (keys + 6)) - 3;
  const std::vector<int64_t> query_start{60, 12};
  const auto run_lists = [&](const Kernel& kernel, bool positions, int64_t first, int64_t count,
                             Rows* rows) {
    const context host(kernel.backend);
    auto segment = make<attn_segment>();
    segment.k_type = ATTN_F32;
    segment.v_in_k = 1;
    segment.seqlen = keys;
    segment.list_size = count;
    segment.no_positions = !positions;
    auto p = make<attn_problem>();
    p.kernel = kernel.name;
    p.batch = batch;
    p.heads_q = heads;
    p.heads_kv = 1;
    p.head_dim = dim;
    p.head_dim_v = dim_v;
    p.seqlen_q = queries;
    p.q_type = p.out_type = ATTN_F32;
    p.flags = ATTN_CAUSAL | ATTN_QUERY_POSITIONS | ATTN_ACCUMULATE;
    p.num_segments = 1;
    p.segments = &segment;
    const plan made(host, p);
    std::vector<int32_t> part;
    for (int64_t row = 0; row < batch * queries; ++row)
      part.insert(part.end(), list.begin() + row * listed + first,
                  list.begin() + row * listed + first + count);
    auto a = make<attn_segment_args>();
    a.k = k.data();
    a.list = part.data();
    auto args = make<attn_args>();
    args.q = q.data();
    args.out = rows->out.data();
    args.lse = rows->lse.data();
    args.num_segments = 1;
    args.segments = &a;
    args.query_start = query_start.data();
    buffer workspace = made.make_workspace(host, nullptr);
    made.run(args, workspace);
  };
  for (const Kernel* kernel : host_kernels())
    for (const bool positions : {false, true}) {
      INFO(kernel->name << ", positions " << positions);
      Rows got{std::vector<float>(batch * queries * heads * dim_v, NAN),
               std::vector<float>(batch * queries * heads, float(-infinity))};
      for (const auto& [first, count] : {std::pair{0, 7}, {7, 1}, {8, 16}})
        run_lists(*kernel, positions, first, count, &got);
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < queries; ++i) {
            std::vector<double> sum(dim_v);
            double total = 0;
            for (int64_t n = 0; n < listed; ++n) {
              const int64_t key = list[size_t((b * queries + i) * listed + n)];
              if (key < 0 || key >= keys) continue;
              if (positions && key > query_start[size_t(b)] + i) continue;
              double dot = 0;
              for (int64_t d = 0; d < dim; ++d)
                dot += double(q[size_t(((b * queries + i) * heads + h) * dim + d)]) *
                       double(k[size_t((b * keys + key) * dim + d)]);
              const double weight = std::exp(dot / std::sqrt(double(dim)));
              total += weight;
              for (int64_t d = 0; d < dim_v; ++d)
                sum[size_t(d)] += weight * double(k[size_t((b * keys + key) * dim + d)]);
            }
            REQUIRE(total > 0);
            const size_t row = size_t((b * heads + h) * queries + i);
            REQUIRE(std::abs(double(got.lse[row]) - std::log(total)) < 1e-5);
            for (int64_t d = 0; d < dim_v; ++d) {
              const size_t at = size_t(((b * queries + i) * heads + h) * dim_v + d);
              REQUIRE(std::abs(double(got.out[at]) - sum[size_t(d)] / total) < 1e-5);
            }
          }
    }
}

TEST_CASE("shards: keys before a position, counted one by one") {
  for (const int64_t interleave : {1, 2, 5, 16})
    for (const int64_t ranks : {1, 2, 7})
      for (int64_t rank = 0; rank < ranks; ++rank)
        for (const int64_t start : {-9, 0, 40}) {
          const KeyPlaces<int64_t> places{start + rank * interleave, interleave,
                                          ranks * interleave};
          for (int64_t position = start - 3; position < start + 120; ++position) {
            int64_t count = 0;
            while (places.at(count) < position) ++count;
            REQUIRE(places.before(position) == count);
          }
        }
}

TEST_CASE("shards: a segment that is not there is refused on the host") {
  Sharded c = random_case(1);
  c.flags = ATTN_QUERY_POSITIONS;
  c.kinds.clear();
  c.causal.clear();
  c.block_q = c.block_k = 0;
  c.shards.resize(1);
  c.fixed_split = 0;
  std::vector<attn_segment> segments;
  attn_problem p = problem_of(c, &segments);
  segments[0].has_ready = 1;
  const context host(ATTN_BACKEND_CPU);
  const plan made(host, p);
  buffer workspace = made.make_workspace(host, nullptr);
  Rows rows = earlier(c);
  auto a = make<attn_segment_args>();
  const Shard& s = c.shards[0];
  uint32_t ready[2] = {3, 4};
  a.k = s.k.data();
  a.v = s.v.data();
  a.seqlens = s.lengths.data();
  a.key_start = c.key_starts ? s.start.data() : nullptr;
  a.ready = ready;
  auto args = make<attn_args>();
  args.q = c.q.data();
  args.out = rows.out.data();
  args.num_segments = 1;
  args.segments = &a;
  args.query_start = c.query_start.data();
  const auto status = [&] {
    return attn_run(made.get(), &args, workspace.data(), workspace.bytes(), nullptr);
  };
  CHECK(status() == ATTN_INVALID_ARGUMENT);
  CHECK(std::string(attn_last_error()).find("ready[0] is 3 and ready[1] 4") != std::string::npos);
  ready[0] = 4;
  CHECK(status() == ATTN_OK);
  ready[0] = 2;  // past the largest number
  ready[1] = 0xfffffffe;
  CHECK(status() == ATTN_OK);
  a.ready = nullptr;
  CHECK(status() == ATTN_INVALID_ARGUMENT);
}

// Refusals by make_problem, in a sentence each.
TEST_CASE("shards: problems that are refused") {
  const Sharded c = [] {
    Sharded made = random_case(3);
    made.flags = ATTN_QUERY_POSITIONS;
    made.causal.clear();
    made.key_starts = true;
    made.block_q = made.block_k = 0;
    made.shards.resize(1);
    made.shards.push_back(made.shards[0]);
    return made;
  }();
  const context host(ATTN_BACKEND_CPU);
  const auto refused = [&](const char* words, auto&& change) {
    std::vector<attn_segment> segments;
    attn_problem p = problem_of(c, &segments);
    change(p, segments);
    attn_plan* made = nullptr;
    INFO(words);
    CHECK(attn_plan_create(host.get(), &p, &made) == ATTN_INVALID_ARGUMENT);
    CHECK(std::string(attn_last_error()).find(words) != std::string::npos);
  };
  using Segments = std::vector<attn_segment>;
  refused("with out_type bf16", [](attn_problem& p, Segments&) {
    p.flags |= ATTN_ACCUMULATE;
    p.out_type = ATTN_BF16;
  });
  refused("ATTN_CAUSAL_TOP_LEFT",
          [](attn_problem& p, Segments&) { p.flags |= ATTN_CAUSAL_TOP_LEFT; });
  refused("accepted with ATTN_QUERY_POSITIONS", [](attn_problem& p, Segments&) { p.flags = 0; });
  refused("tree_keys 4", [](attn_problem& p, Segments&) { p.tree_keys = 4; });
  refused("has_kv_begin 1", [](attn_problem& p, Segments&) { p.has_kv_begin = 1; });
  refused("has_key_start is 1; accepted with lists of keys: 0",
          [](attn_problem&, Segments& s) { s[1].list_size = 3; });
  refused("has_key_start is 1; accepted with no_positions: 0",
          [](attn_problem&, Segments& s) { s[0].no_positions = 1; });
  refused("key_rank is", [](attn_problem&, Segments& s) { s[1].key_rank = s[1].key_ranks; });
  refused("key_interleave is -1", [](attn_problem&, Segments& s) { s[0].key_interleave = -1; });
  refused("has_ready is 2", [](attn_problem&, Segments& s) { s[0].has_ready = 2; });
  refused("segment 1: has_key_start is 0", [](attn_problem&, Segments& s) {
    s[1].has_key_start = 0;
    s[1].key_interleave = s[1].key_ranks = s[1].key_rank = 0;
  });
  refused("accepted without has_key_start", [](attn_problem&, Segments& s) {
    for (attn_segment& each : s) each.has_key_start = 0;
  });
}

TEST_CASE("shards: devices decline in a sentence what they do not take") {
  const auto needs = [](const char* what) {
    auto segment = make<attn_segment>();
    segment.k_type = segment.v_type = ATTN_F16;
    segment.seqlen = 64;
    auto p = make<attn_problem>();
    p.batch = p.heads_q = p.heads_kv = 1;
    p.head_dim = p.seqlen_q = 64;
    p.q_type = ATTN_F16;
    p.num_segments = 1;
    p.segments = &segment;
    const std::string asked = what;
    if (asked == "positions of queries") p.flags = ATTN_QUERY_POSITIONS;
    if (asked == "positions of keys") {
      p.flags = ATTN_QUERY_POSITIONS;
      segment.has_key_start = 1;
    }
    if (asked == "ready words") segment.has_ready = 1;
    if (asked == "accumulate") {
      p.flags = ATTN_ACCUMULATE;
      p.out_type = ATTN_F32;
    }
    Problem made;
    REQUIRE(make_problem(&p, &made).ok());
    return made.needs;
  };
  int asked = 0;
  for (const char* what :
       {"positions of queries", "positions of keys", "ready words", "accumulate"})
    for (const Kernel& kernel : all_kernels()) {
      if (kernel.op != Op::forward || kernel.host || kernel.composed != Composed::no) continue;
      const Needs with = needs(what);
      Needs without = with;
      without.flags = 0;
      without.features = 0;
      if (!decline(kernel, without).empty()) continue;
      INFO(kernel.name << ", " << what);
      const Limits& can = kernel.limits;
      const bool takes = !(with.flags & ~can.flags) && !(with.features & ~can.features);
      const std::string why = decline(kernel, with);
      CHECK(why.empty() == takes);
      if (takes) continue;
      CHECK((why == what || (why == "positions of queries" && with.flags != 0)));
      ++asked;
    }
  CHECK(asked > 20);
}

}  // namespace
}  // namespace attn::test
