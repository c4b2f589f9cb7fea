// A step of a server as one graph: an append that advances the lengths, and attention over the
// pages. The graph is replayed while lengths and tables change on the device.
#include <climits>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/ceil_div.h"
#include "core/dtype.h"
#include "cuda.h"

namespace attn::test {
namespace {

constexpr int64_t batch = 5, heads_q = 8, heads_kv = 2, dim = 128, capacity = 197;
constexpr int64_t group = heads_q / heads_kv, row = heads_kv * dim;

struct Problem {
  attn_dtype type, cache_type;  // of q and new tokens; of the pages
  int32_t page_size;

  int64_t columns() const { return ceil_div(capacity, page_size); }
  int64_t pages() const { return batch * columns() + 3; }
};

// What lies on the device in front of a replay.
struct State {
  std::vector<int32_t> lengths, table;
};

// Any lengths, and pages in any order; some of either out of range.
State state_of(const Problem& p, uint64_t number) {
  Draw draw{number, 41};
  State state;
  const int32_t odd_lengths[] = {0,
                                 INT_MIN,
                                 INT_MAX,
                                 int32_t(capacity),
                                 int32_t(capacity) - 1,
                                 -1,
                                 1 << 30,
                                 int32_t(capacity) + 1};
  for (int64_t b = 0; b < batch; ++b)
    state.lengths.push_back(draw.chance(4) ? draw.pick(odd_lengths) : int32_t(draw(capacity + 1)));
  state.table.resize(size_t(p.pages()));
  std::iota(state.table.begin(), state.table.end(), 0);
  for (size_t n = state.table.size(); n > 1; --n)
    std::swap(state.table[n - 1], state.table[size_t(draw(n))]);
  state.table.resize(size_t(batch * p.columns()));
  const int32_t bad[] = {-1, -2, INT_MIN, INT_MAX, int32_t(p.pages()), int32_t(p.pages()) + 1};
  for (int32_t& page : state.table)
    if (draw.chance(16)) page = draw.pick(bad);
  return state;
}

int64_t clamped(int32_t length) {
  return std::clamp<int64_t>(length, 0, capacity);
}

// Rows of the cache's type, so that appending rounds nothing. Those of a sequence differ; rows of
// others are elsewhere.
struct Rows {
  static constexpr int64_t count = 251, of_new = 211;
  std::vector<float> values;
  std::vector<unsigned char> codes;
  size_t row_bytes;

  Rows(const Problem& p, uint64_t seed)
      : values(count * row),
        codes(size_t(dtype_bytes(p.cache_type, count * row))),
        row_bytes(size_t(dtype_bytes(p.cache_type, row))) {
    for (int64_t n = 0; n < count * row; ++n) {
      encode_element(p.cache_type, codes.data(), n, normal(hash(seed, uint64_t(n))), true);
      values[size_t(n)] = float(decode_element(p.cache_type, codes.data(), n));
    }
  }
  static int64_t number(int64_t b, int64_t position) { return (b * 131 + position) % count; }
  const float* at(int64_t b, int64_t position) const {
    return &values[size_t(number(b, position) * row)];
  }
  // Of the token that each step appends to the sequence.
  const float* appended(int64_t b) const { return at(b, of_new + b); }
};

// The pages, between others that no run may touch: all NaN but for the tokens that are there.
constexpr int64_t canaries = 2;
class Pool {
 public:
  Pool(const Problem& p, const Rows& rows)
      : p_(p),
        rows_(rows),
        page_bytes_(size_t(dtype_bytes(p.cache_type, p.page_size * row))),
        buffer_(size_t(p.pages() + 2 * canaries) * page_bytes_, poison_of(p.cache_type)) {}

  void fill(const State& state) {
    std::fill(buffer_.bytes.begin(), buffer_.bytes.end(), buffer_.poison);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t j = 0; j < clamped(state.lengths[size_t(b)]); ++j) write(state, b, j, j);
  }
  // What a step writes.
  void append(const State& state) {
    for (int64_t b = 0; b < batch; ++b)
      if (const int64_t j = clamped(state.lengths[size_t(b)]); j < capacity)
        write(state, b, j, Rows::of_new + b);
  }
  const Buffer& buffer() const { return buffer_; }
  size_t canary_bytes() const { return canaries * page_bytes_; }  // in front of the pages
  char* pages(void* data) const { return static_cast<char*>(data) + canary_bytes(); }

 private:
  // Row `from` of the sequence.
  void write(const State& state, int64_t b, int64_t position, int64_t from) {
    const int64_t page = state.table[size_t(b * p_.columns() + position / p_.page_size)];
    if (page < 0 || page >= p_.pages()) return;
    const int64_t at = (page + canaries) * p_.page_size + position % p_.page_size;
    std::memcpy(buffer_.data() + size_t(at) * rows_.row_bytes,
                &rows_.codes[size_t(Rows::number(b, from)) * rows_.row_bytes], rows_.row_bytes);
  }
  const Problem& p_;
  const Rows& rows_;
  size_t page_bytes_;
  Buffer buffer_;
};

// "" or the first element of out [B, 1, Hq, D] or lse [B, Hq] that is not attention in float64 over
// the keys that are there after the state's step.
std::string check(const Problem& p, const State& state, const Rows& q, const Rows& k, const Rows& v,
                  const float* out, const float* lse) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t before = clamped(state.lengths[size_t(b)]);
    std::vector<std::pair<const float*, const float*>> keys;
    for (int64_t j = 0; j < std::min(before + 1, capacity); ++j) {
      const int64_t page = state.table[size_t(b * p.columns() + j / p.page_size)];
      if (page < 0 || page >= p.pages()) continue;
      j < before ? keys.emplace_back(k.at(b, j), v.at(b, j))
                 : keys.emplace_back(k.appended(b), v.appended(b));
    }
    for (int64_t h = 0; h < heads_q; ++h) {
      const float* query = &q.values[size_t((b * heads_q + h) * dim)];
      const int64_t first = h / group * dim;
      std::vector<double> x(size_t(dim), 0), size(size_t(dim), 0), scores;
      double most = -INFINITY, sum = 0;
      for (const auto& [key, value] : keys) {
        scores.push_back(std::inner_product(query, query + dim, key + first, 0.0) /
                         std::sqrt(double(dim)));
        most = std::max(most, scores.back());
      }
      for (size_t n = 0; n < keys.size(); ++n) {
        const double weight = std::exp(scores[n] - most);
        sum += weight;
        for (int64_t d = 0; d < dim; ++d) {
          x[size_t(d)] += weight * keys[n].second[first + d];
          size[size_t(d)] += weight * std::abs(keys[n].second[first + d]);
        }
      }
      const int64_t at = b * heads_q + h;
      const double want_lse = most + std::log(sum);
      if (keys.empty() ? lse[at] != -INFINITY : !(std::abs(lse[at] - want_lse) < 2e-5))
        return join("lse of b ", b, " h ", h, " is ", lse[at], ", expected ", want_lse);
      for (int64_t d = 0; d < dim; ++d) {
        const double want = keys.empty() ? 0 : x[size_t(d)] / sum,
                     bound =
                         keys.empty() ? 0 : 1e-5 + 2 * half_ulp(p.type, 1) * size[size_t(d)] / sum,
                     got = out[at * dim + d];
        if (!(std::abs(got - want) <= bound))
          return join("out of b ", b, " h ", h, " d ", d, " is ", got, ", expected ", want, " +- ",
                      bound);
      }
    }
  }
  return "";
}

// Rows in the type of q and new tokens.
Buffer encoded(attn_dtype type, const std::vector<float>& values) {
  Buffer buffer(size_t(dtype_bytes(type, int64_t(values.size()))), poison_of(type));
  for (size_t n = 0; n < values.size(); ++n)
    encode_element(type, buffer.data(), int64_t(n), values[n], false);
  return buffer;
}
Buffer new_tokens(attn_dtype type, const Rows& rows) {
  std::vector<float> values;
  for (int64_t b = 0; b < batch; ++b)
    values.insert(values.end(), rows.appended(b), rows.appended(b) + row);
  return encoded(type, values);
}

using Plan = std::unique_ptr<attn_plan, void (*)(attn_plan*)>;

attn_kv_append_problem append_problem(const Problem& p) {
  attn_kv_append_problem append{};
  append.struct_size = sizeof append;
  append.batch = batch;
  append.heads_kv = heads_kv;
  append.head_dim = dim;
  append.seqlen_new = 1;
  append.new_type = p.type;
  append.advance_seqlens = 1;
  attn_segment& s = append.segment;
  s.struct_size = sizeof s;
  s.layout = ATTN_PAGED;
  s.k_type = s.v_type = p.cache_type;
  s.has_seqlens = 1;
  s.seqlen = capacity;
  s.page_size = p.page_size;
  s.max_pages = int32_t(p.columns());
  s.num_pages = p.pages();
  return append;
}

attn_problem forward_problem(const Problem& p, const attn_segment& segment) {
  attn_problem forward{};
  forward.struct_size = sizeof forward;
  forward.batch = batch;
  forward.heads_q = heads_q;
  forward.heads_kv = heads_kv;
  forward.head_dim = dim;
  forward.seqlen_q = 1;
  forward.q_type = p.type;
  forward.out_type = ATTN_F32;
  forward.flags = ATTN_CAUSAL;
  forward.num_segments = 1;
  forward.segments = &segment;
  return forward;
}

// Every `checked` replays the pages are filled anew and the answer is looked at. `states` states
// come there in turn, so that each comes again. Of the other replays one in eight finds another
// state; the rest go on from the lengths that the one before has left.
constexpr int replays = 10000, checked = 100, states = 25;

void replay(const Problem& p, Backend& backend, const Stream& stream, Plan append_plan,
            Plan forward_plan) {
  const Rows q(p, 1), k(p, 2), v(p, 3);
  const std::vector<float> queries(q.values.begin(), q.values.begin() + batch * heads_q * dim);
  Pool k_pool(p, k), v_pool(p, v);
  State state = state_of(p, 0);
  const Buffer q_buffer = encoded(p.type, queries), k_new = new_tokens(p.type, k),
               v_new = new_tokens(p.type, v), out(queries.size() * sizeof(float), 0xff),
               lse(size_t(batch * heads_q) * sizeof(float), 0xff);
  Buffer lengths = bytes_of(state.lengths), table = bytes_of(state.table);
  Arena arena(backend.context);
  attn_kv_append_args append{};
  append.struct_size = sizeof append;
  append.k_new = arena.add(k_new);
  append.v_new = arena.add(v_new);
  append.cache.struct_size = sizeof append.cache;
  void *const k_data = arena.add(k_pool.buffer()), *const v_data = arena.add(v_pool.buffer());
  append.cache.k = k_pool.pages(k_data);
  append.cache.v = v_pool.pages(v_data);
  append.seqlens_out = static_cast<int32_t*>(arena.add(lengths));
  append.cache.seqlens = append.seqlens_out;
  void* const table_data = arena.add(table);
  append.cache.block_table = static_cast<const int32_t*>(table_data);
  attn_args forward{};
  forward.struct_size = sizeof forward;
  forward.q = arena.add(q_buffer);
  forward.out = arena.add(out);
  forward.lse = static_cast<float*>(arena.add(lse));
  forward.num_segments = 1;
  forward.segments = &append.cache;
  const size_t bytes = attn_plan_workspace(forward_plan.get());
  void* const workspace = arena.workspace(bytes);
  REQUIRE(attn_workspace_init(forward_plan.get(), workspace, bytes, nullptr) == ATTN_OK);
  REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);

  const char* const kernels[] = {attn_plan_kernel(append_plan.get()),
                                 attn_plan_kernel(forward_plan.get())};
  const uint64_t launches[] = {attn_launch_count(kernels[0]), attn_launch_count(kernels[1])};
  const Captured captured(stream, [&] {
    return attn_run_kv_append(append_plan.get(), &append, stream.get()) == ATTN_OK &&
           attn_run(forward_plan.get(), &forward, workspace, bytes, stream.get()) == ATTN_OK;
  });
  for (int n = 0; n < 2; ++n) CHECK(attn_launch_count(kernels[n]) == launches[n] + 1);

  const auto put = [&](uint64_t number) {
    state = state_of(p, number);
    lengths = bytes_of(state.lengths);
    table = bytes_of(state.table);
    arena.replace(append.seqlens_out, lengths);
    arena.replace(table_data, table);
  };
  struct Answer {
    std::vector<unsigned char> out, lse;
  };
  std::vector<Answer> answers(states);
  for (int n = 0; n < replays; ++n) {
    const bool check_this = n % checked == 0;
    if (check_this) {
      // All of the replays since the last check have left the lengths that they should have.
      REQUIRE((arena.fetch(lengths, append.seqlens_out).bytes == bytes_of(state.lengths).bytes));
      put(uint64_t(n / checked % states));
      k_pool.fill(state);
      v_pool.fill(state);
      arena.replace(k_data, k_pool.buffer());
      arena.replace(v_data, v_pool.buffer());
      arena.replace(forward.out, out);
      arena.replace(forward.lse, lse);
    } else if (n % 8 == 0) {
      put(uint64_t(states + n));
    }
    captured.replay();
    if (check_this) {
      INFO("replay " << n);
      const Buffer got = arena.fetch(out, forward.out), got_lse = arena.fetch(lse, forward.lse);
      Answer& answer = answers[size_t(n / checked % states)];
      if (n / checked < states) {
        REQUIRE(check(p, state, q, k, v, got.as<float>(), got_lse.as<float>()) == "");
        answer = {got.bytes, got_lse.bytes};
      } else {
        REQUIRE((got.bytes == answer.out));
        REQUIRE((got_lse.bytes == answer.lse));
      }
      k_pool.append(state);
      v_pool.append(state);
      REQUIRE((arena.fetch(k_pool.buffer(), k_data).bytes == k_pool.buffer().bytes));
      REQUIRE((arena.fetch(v_pool.buffer(), v_data).bytes == v_pool.buffer().bytes));
      REQUIRE(arena.check_unchanged(
                  {k_data, v_data, append.seqlens_out, forward.out, forward.lse}) == "");
    }
    for (int32_t& length : state.lengths)
      length = int32_t(std::min<int64_t>(clamped(length) + 1, capacity));
  }
  // Of the pools, what no replay may have written: the canaries and the guards.
  for (const auto& [pool, data] : {std::pair(&k_pool, k_data), std::pair(&v_pool, v_data)}) {
    const Buffer now = arena.fetch(pool->buffer(), data);
    const size_t edge = pool->canary_bytes() + Buffer::guard;
    const auto untouched = [&](auto begin) {
      return std::all_of(begin, begin + int64_t(edge),
                         [&](unsigned char byte) { return byte == now.poison; });
    };
    CHECK(untouched(now.bytes.begin()));
    CHECK(untouched(now.bytes.end() - int64_t(edge)));
  }
}

TEST_CASE("cuda: 10,000 replays of a step whose lengths and tables change") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  const Stream stream;
  int ran = 0;
  // Pages that the copy engine takes, others, and fp8.
  for (const Problem& p : {Problem{ATTN_BF16, ATTN_BF16, 16}, Problem{ATTN_F16, ATTN_F16, 5},
                           Problem{ATTN_BF16, ATTN_F8_E4M3FN, 32}}) {
    const attn_kv_append_problem append = append_problem(p);
    const attn_problem forward = forward_problem(p, append.segment);
    attn_plan *append_plan = nullptr, *forward_plan = nullptr;
    REQUIRE(attn_plan_create_kv_append(backend.context, &append, &append_plan) == ATTN_OK);
    Plan append_owner(append_plan, attn_plan_destroy);
    const attn_status status = attn_plan_create(backend.context, &forward, &forward_plan);
    if (status == ATTN_UNSUPPORTED) continue;  // fp8 in front of sm_89
    REQUIRE(status == ATTN_OK);
    Plan forward_owner(forward_plan, attn_plan_destroy);
    INFO(attn_plan_kernel(forward_plan));
    CHECK(std::string(attn_plan_kernel(forward_plan)).starts_with("decode_"));
    replay(p, backend, stream, std::move(append_owner), std::move(forward_owner));
    ++ran;
  }
  CHECK(ran >= 2);
}

}  // namespace
}  // namespace attn::test
