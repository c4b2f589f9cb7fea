// Builders of block masks, on every backend that is here, against masks of bool.
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "../catch.h"
#include "attn/attn.hpp"
#include "backend.h"

namespace attn::test {
namespace {

struct Grid {
  int64_t batch = 1, heads = 1, sq = 1, skv = 1;
  int32_t bq = 64, bk = 64;
  attn_block_mask_shape shape() const {
    auto s = make<attn_block_mask_shape>();
    s.batch = batch, s.heads = heads, s.seqlen_q = sq, s.seqlen_kv = skv, s.block_q = bq,
    s.block_k = bk;
    return s;
  }
  int64_t elements() const { return batch * heads * sq * skv; }
};
std::string describe(const Grid& g) {
  std::string text;
  for (int64_t n : {g.batch, g.heads, g.sq, g.skv, int64_t{g.bq}, int64_t{g.bk}})
    text += std::to_string(n) + " ";
  return text;
}

using Dense = std::vector<uint8_t>;  // [batch, heads, sq, skv]
Dense dense_of(const Grid& g, const std::function<bool(int64_t, int64_t, int64_t, int64_t)>& rule) {
  Dense dense;
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t h = 0; h < g.heads; ++h)
      for (int64_t i = 0; i < g.sq; ++i)
        for (int64_t j = 0; j < g.skv; ++j) dense.push_back(rule(b, h, i, j));
  return dense;
}

// A mask as a kernel finds it.
struct Read {
  attn_problem problem;
  std::vector<uint8_t> kinds;
  std::vector<int32_t> index;
  std::vector<uint32_t> bits;

  Read(attn_context* context, const Grid& g, const attn_block_mask* mask) {
    problem = make<attn_problem>();
    auto args = make<attn_args>();
    auto segment = make<attn_segment>();
    segment.seqlen = g.skv;
    problem.seqlen_q = g.sq;
    problem.batch = g.batch == 1 ? 3 : g.batch;
    problem.heads_q = g.heads == 1 ? 5 : g.heads;
    problem.num_segments = 1;
    problem.segments = &segment;
    check(attn_block_mask_apply(mask, &problem, &args));
    CHECK(problem.flags == ATTN_BLOCK_MASK);
    CHECK(problem.mask_batch == g.batch);
    CHECK(problem.mask_heads == g.heads);
    CHECK(problem.block_q == g.bq);
    CHECK(problem.block_k == g.bk);
    CHECK(args.block_kinds != nullptr);
    const int64_t cells =
        g.batch * g.heads * ((g.sq + g.bq - 1) / g.bq) * ((g.skv + g.bk - 1) / g.bk);
    kinds.resize(size_t(cells));
    index.assign(size_t(cells), -1);
    bits.resize(size_t(problem.mask_partials * g.bq * ((g.bk + 31) / 32)));
    check(attn_copy_out(context, kinds.data(), args.block_kinds, kinds.size(), nullptr));
    if (bits.empty()) return;
    check(attn_copy_out(context, index.data(), args.block_index, 4 * index.size(), nullptr));
    check(attn_copy_out(context, bits.data(), args.block_bits, 4 * bits.size(), nullptr));
  }

  Dense expand(const Grid& g) const {
    const int64_t rows = (g.sq + g.bq - 1) / g.bq, columns = (g.skv + g.bk - 1) / g.bk;
    return dense_of(g, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const auto n = size_t(((b * g.heads + h) * rows + i / g.bq) * columns + j / g.bk);
      if (kinds[n] == ATTN_BLOCK_CAUSAL) return j <= i + g.skv - g.sq;
      if (kinds[n] != ATTN_BLOCK_PARTIAL) return kinds[n] == ATTN_BLOCK_FULL;
      const int64_t words = (g.bk + 31) / 32;
      const int64_t word = (index[n] * g.bq + i % g.bq) * words + j % g.bk / 32;
      return (bits.at(size_t(word)) >> (j % g.bk % 32) & 1) != 0;
    });
  }
};

// Kinds and the number of different partial blocks, straight from the dense mask.
void check_blocks(const Grid& g, const Dense& want, const Read& got, bool exact_partials) {
  const int64_t rows = (g.sq + g.bq - 1) / g.bq, columns = (g.skv + g.bk - 1) / g.bk;
  std::vector<Dense> partials;
  size_t wrong = 0;
  for (int64_t plane = 0; plane < g.batch * g.heads; ++plane)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column) {
        Dense block;  // padded with 0 to whole blocks, as equal blocks must be equal as a whole
        int64_t seen = 0, exist = 0;
        for (int64_t i = row * g.bq; i < (row + 1) * g.bq; ++i)
          for (int64_t j = column * g.bk; j < (column + 1) * g.bk; ++j) {
            const bool inside = i < g.sq && j < g.skv;
            block.push_back(inside ? want[size_t((plane * g.sq + i) * g.skv + j)] : 0);
            seen += block.back();
            exist += inside;
          }
        const int kind = seen == 0       ? ATTN_BLOCK_EMPTY
                         : seen == exist ? ATTN_BLOCK_FULL
                                         : ATTN_BLOCK_PARTIAL;
        const auto n = size_t((plane * rows + row) * columns + column);
        wrong += got.kinds[n] != kind;
        wrong += kind != ATTN_BLOCK_PARTIAL && got.index[n] != -1;
        if (kind == ATTN_BLOCK_PARTIAL &&
            std::find(partials.begin(), partials.end(), block) == partials.end())
          partials.push_back(block);
      }
  CHECK(wrong == 0);
  if (exact_partials) CHECK(got.problem.mask_partials == int64_t(partials.size()));
  // Where the number is a bound, no more are used than there are.
  std::vector<int32_t> used(got.index);
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  const bool others = !used.empty() && used[0] == -1;
  CHECK(int64_t(used.size() - others) == int64_t(partials.size()));
}

struct Target {
  const char* name;
  attn_context* context;
  bool host, arrays;  // arrays: builds from arrays in its memory
};
std::vector<Target> targets() {
  std::vector<Target> all;
  for (attn_backend backend :
       {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU, ATTN_BACKEND_CUDA, ATTN_BACKEND_HIP}) {
    attn_context* context = backend_of(backend).context;
    const bool host = backend == ATTN_BACKEND_REFERENCE || backend == ATTN_BACKEND_CPU;
    const bool arrays = host || backend == ATTN_BACKEND_CUDA;
    if (context) all.push_back({attn_backend_string(backend), context, host, arrays});
  }
  return all;
}

// The array in the backend's memory.
struct Staged {
  attn_context* context;
  void* memory = nullptr;
  template <class T>
  Staged(attn_context* c, const std::vector<T>& values) : context(c) {
    check(attn_alloc(c, values.size() * sizeof(T) + 1, &memory));
    check(attn_copy_in(c, memory, values.data(), values.size() * sizeof(T), nullptr));
  }
  ~Staged() { attn_free(context, memory); }
};

struct Mask {
  attn_block_mask* handle = nullptr;
  Mask() = default;
  Mask(const Mask&) = delete;
  ~Mask() { attn_block_mask_destroy(handle); }
};

void check_mask(const Target& t, const Grid& g, const Mask& mask, const Dense& want) {
  const Read got(t.context, g, mask.handle);
  CHECK(got.expand(g) == want);
  check_blocks(g, want, got, t.host);
}

const Grid grids[] = {{1, 1, 64, 64, 64, 64},     {1, 1, 300, 300, 64, 64},
                      {1, 1, 257, 257, 128, 128}, {2, 1, 130, 130, 128, 64},
                      {1, 3, 129, 129, 64, 128},  {2, 2, 1, 1, 64, 64},
                      {1, 2, 70, 70, 13, 37},     {1, 1, 0, 0, 64, 64}};
const Grid uneven[] = {{1, 1, 100, 300, 64, 64},
                       {2, 3, 200, 77, 64, 128},
                       {1, 1, 1, 1000, 128, 128},
                       {1, 2, 333, 64, 128, 64},
                       {1, 1, 50, 60, 7, 9}};

bool fits(const Target& t, const Grid& g) {
  const auto standard = [](int32_t n) { return n == 64 || n == 128; };
  return t.host || (standard(g.bq) && standard(g.bk));
}

template <class Body>
void everywhere(bool square_only, Body&& body) {
  for (const Target& t : targets()) {
    const auto one = [&](const Grid& g) {
      if (!fits(t, g)) return;
      INFO(t.name << " " << describe(g));
      body(t, g);
    };
    for (const Grid& g : grids) one(g);
    if (!square_only)
      for (const Grid& g : uneven) one(g);
  }
}

TEST_CASE("block mask: documents") {
  everywhere(true, [](const Target& t, const Grid& g) {
    for (int causal : {0, 1}) {
      std::vector<int64_t> lengths;
      std::vector<int64_t> document;
      for (int64_t at = 0; at < g.sq;) {
        const int64_t length =
            std::min<int64_t>(g.sq - at, int64_t(hash(7, lengths.size(), uint64_t(causal)) % 110));
        for (int64_t n = 0; n < length; ++n) document.push_back(int64_t(lengths.size()));
        lengths.push_back(length);
        at += length;
      }
      const attn_block_mask_shape shape = g.shape();
      Mask mask;
      check(attn_block_mask_from_documents(t.context, &shape, lengths.data(),
                                           int64_t(lengths.size()), causal, &mask.handle));
      check_mask(t, g, mask, dense_of(g, [&](int64_t, int64_t, int64_t i, int64_t j) {
                   return document[size_t(i)] == document[size_t(j)] && (!causal || j <= i);
                 }));
    }
  });
}

TEST_CASE("block mask: windows, global tokens, prefixes") {
  struct Window {
    int64_t left, right, global_tokens, prefix;
  };
  everywhere(false, [](const Target& t, const Grid& g) {
    for (Window w :
         {Window{-1, 0, 0, 0}, Window{-1, -1, 0, 0}, Window{64, 0, 0, 0}, Window{31, 33, 5, 0},
          Window{0, 0, 0, 90}, Window{-1, 0, 0, 65}, Window{16, 0, 4, 1}}) {
      w.global_tokens = std::min(w.global_tokens, g.skv);
      w.prefix = std::min(w.prefix, g.skv);
      const attn_block_mask_shape shape = g.shape();
      Mask mask;
      check(attn_block_mask_from_window(t.context, &shape, w.left, w.right, w.global_tokens,
                                        w.prefix, &mask.handle));
      check_mask(t, g, mask, dense_of(g, [&](int64_t, int64_t, int64_t i, int64_t j) {
                   const int64_t at = i + g.skv - g.sq;
                   return j < w.global_tokens || j < w.prefix ||
                          ((w.left < 0 || j >= at - w.left) && (w.right < 0 || j <= at + w.right));
                 }));
    }
  });
}

// Whole blocks that are empty, full, or a diagonal; random elements in the others.
Dense random_dense(const Grid& g, uint64_t seed) {
  return dense_of(g, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const uint64_t block =
        hash(seed, uint64_t(b), uint64_t(h), uint64_t(i / g.bq), uint64_t(j / g.bk)) % 4;
    if (block < 2) return block == 0;
    if (block == 2) return i % g.bq >= j % g.bk;
    return hash(seed, uint64_t(i), uint64_t(j)) % 2 == 0;
  });
}

TEST_CASE("block mask: dense") {
  everywhere(false, [](const Target& t, const Grid& g) {
    const attn_block_mask_shape shape = g.shape();
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const Dense want = random_dense(g, seed);
      Dense given(want);
      for (size_t n = 0; n < given.size(); ++n)  // whatever is not 0 is visible
        if (given[n]) given[n] = uint8_t(1u << hash(3, n) % 8);
      const Staged staged(t.context, given);
      Mask mask;
      const attn_status status = attn_block_mask_from_dense(
          t.context, &shape, static_cast<uint8_t*>(staged.memory), nullptr, &mask.handle);
      if (!t.arrays) {
        CHECK(status == (g.elements() > 0 ? ATTN_UNSUPPORTED : ATTN_OK));
        continue;
      }
      check(status);
      check_mask(t, g, mask, want);
    }
  });
}

TEST_CASE("block mask: intervals") {
  everywhere(false, [](const Target& t, const Grid& g) {
    const attn_block_mask_shape shape = g.shape();
    for (int32_t count : {1, 2}) {
      std::vector<int32_t> intervals;
      for (int64_t key = 0; key < g.batch * g.heads * g.skv; ++key)
        for (int32_t n = 0; n < count; ++n) {
          // Runs of equal keys, so that there are empty and full blocks.
          const uint64_t h = hash(11, uint64_t(key / 100), uint64_t(n));
          const int64_t a = int64_t(h % uint64_t(g.sq + 1));
          const int64_t b = int64_t((h >> 32) % uint64_t(g.sq + 1));
          intervals.push_back(int32_t(std::min(a, b)));
          intervals.push_back(int32_t(std::max(a, b)));
        }
      const Staged staged(t.context, intervals);
      Mask mask;
      const attn_status status = attn_block_mask_from_intervals(
          t.context, &shape, static_cast<int32_t*>(staged.memory), count, nullptr, &mask.handle);
      if (!t.arrays) {
        CHECK(status == (g.elements() > 0 ? ATTN_UNSUPPORTED : ATTN_OK));
        continue;
      }
      check(status);
      check_mask(t, g, mask, dense_of(g, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
                   bool sees = false;
                   for (int32_t n = 0; n < count; ++n) {
                     const size_t at = size_t(((b * g.heads + h) * g.skv + j) * count + n) * 2;
                     sees = sees || (i >= intervals[at] && i < intervals[at + 1]);
                   }
                   return sees;
                 }));
    }
  });
}

struct Kinds {
  std::vector<uint8_t> kinds;
  std::vector<int32_t> index;
  std::vector<uint32_t> bits;
  int64_t partials = 5;
  Kinds(const Grid& g, uint64_t seed) {
    const int64_t cells =
        g.batch * g.heads * ((g.sq + g.bq - 1) / g.bq) * ((g.skv + g.bk - 1) / g.bk);
    for (int64_t n = 0; n < cells; ++n) {
      const uint64_t h = hash(seed, uint64_t(n));
      kinds.push_back(uint8_t(h % 4));
      index.push_back(kinds.back() == ATTN_BLOCK_PARTIAL ? int32_t((h >> 8) % 5) : -1);
    }
    const int64_t words = g.bq * ((g.bk + 31) / 32);
    // Blocks 1 and 4 are equal.
    for (int64_t n = 0; n < partials * words; ++n)
      bits.push_back(uint32_t(hash(seed, 5, uint64_t(n / words == 4 ? n - 3 * words : n))));
  }
};

TEST_CASE("block mask: kinds, and combinations of masks") {
  everywhere(false, [](const Target& t, const Grid& g) {
    const attn_block_mask_shape shape = g.shape();
    const Kinds a(g, 1), b(g, 2);
    Mask first, second;
    for (auto [from, to] : {std::pair{&a, &first}, std::pair{&b, &second}}) {
      check(attn_block_mask_from_kinds(t.context, &shape, from->kinds.data(), from->index.data(),
                                       from->bits.data(), from->partials, &to->handle));
      const Read got(t.context, g, to->handle);
      CHECK(got.kinds == from->kinds);
      CHECK(got.problem.mask_partials <= 4);
      for (size_t n = 0; n < got.kinds.size(); ++n)
        CHECK((got.index[n] >= 0) == (from->index[n] >= 0));
      const int64_t block = g.bq * ((g.bk + 31) / 32);
      for (size_t n = 0; n < got.index.size(); ++n)
        if (got.index[n] >= 0)
          CHECK(std::memcmp(&got.bits[size_t(got.index[n] * block)],
                            &from->bits[size_t(from->index[n] * block)], size_t(block) * 4) == 0);
    }
    const Dense x = Read(t.context, g, first.handle).expand(g),
                y = Read(t.context, g, second.handle).expand(g);
    for (int combine : {0, 1}) {
      Mask both;
      check(attn_block_mask_combine(t.context, first.handle, second.handle, combine, &both.handle));
      const Read got(t.context, g, both.handle);
      Dense want(x);
      for (size_t n = 0; n < want.size(); ++n) want[n] = combine ? x[n] | y[n] : x[n] & y[n];
      CHECK(got.expand(g) == want);
      const int neutral = combine ? ATTN_BLOCK_EMPTY : ATTN_BLOCK_FULL;
      size_t wrong = 0;
      for (size_t n = 0; n < got.kinds.size(); ++n) {
        const int p = a.kinds[n], q = b.kinds[n];
        const bool stays = (p == ATTN_BLOCK_CAUSAL && (q == ATTN_BLOCK_CAUSAL || q == neutral)) ||
                           (q == ATTN_BLOCK_CAUSAL && p == neutral);
        wrong += stays != (got.kinds[n] == ATTN_BLOCK_CAUSAL);
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("block mask: combinations broadcast batch and heads") {
  for (const Target& t : targets()) {
    Grid one{1, 3, 150, 100, 64, 64}, other{2, 1, 150, 100, 64, 64};
    const Kinds a(one, 1), b(other, 2);
    Mask first, second, both;
    const attn_block_mask_shape shape_a = one.shape(), shape_b = other.shape();
    check(attn_block_mask_from_kinds(t.context, &shape_a, a.kinds.data(), a.index.data(),
                                     a.bits.data(), 5, &first.handle));
    check(attn_block_mask_from_kinds(t.context, &shape_b, b.kinds.data(), b.index.data(),
                                     b.bits.data(), 5, &second.handle));
    check(attn_block_mask_combine(t.context, first.handle, second.handle, 0, &both.handle));
    const Dense x = Read(t.context, one, first.handle).expand(one),
                y = Read(t.context, other, second.handle).expand(other);
    const Grid g{2, 3, 150, 100, 64, 64};
    INFO(t.name);
    CHECK(Read(t.context, g, both.handle).expand(g) ==
          dense_of(g, [&](int64_t bb, int64_t h, int64_t i, int64_t j) {
            return x[size_t((h * 150 + i) * 100 + j)] && y[size_t((bb * 150 + i) * 100 + j)];
          }));
  }
}

TEST_CASE("block mask: attn.hpp") {
  const context host(ATTN_BACKEND_CPU);
  const Grid g{1, 1, 200, 200, 64, 64};
  const attn_block_mask_shape shape = g.shape();
  const auto causal = block_mask::from_window(host, shape, -1, 0);
  const auto documents = block_mask::from_documents(host, shape, {120, 80}, false);
  const auto expand = [&](const block_mask& mask) {
    return Read(host.get(), g, mask.get()).expand(g);
  };
  const Dense both = expand(block_mask::from_documents(host, shape, {120, 80}, true));
  CHECK(expand(block_mask::intersection(host, causal, documents)) == both);
  CHECK(expand(block_mask::from_dense(host, shape, both.data())) == both);
  const Dense either = expand(block_mask::union_of(host, causal, documents));
  CHECK(either == dense_of(g, [](int64_t, int64_t, int64_t i, int64_t j) {
          return j <= i || (i < 120) == (j < 120);
        }));
  std::vector<int32_t> below;
  for (int32_t j = 0; j < 200; ++j) below.insert(below.end(), {j, 200});
  CHECK(expand(block_mask::from_intervals(host, shape, below.data(), 1)) == expand(causal));
  const std::vector<uint8_t> kinds(16, ATTN_BLOCK_FULL);
  CHECK(expand(block_mask::from_kinds(host, shape, kinds.data())) == Dense(40000, 1));
}

// Without queries or without keys there is no block, however many batch entries and heads there
// are, and nothing of the caller's arrays is read.
TEST_CASE("block mask: grids without blocks") {
  attn_context* host = backend_of(ATTN_BACKEND_CPU).context;
  for (const bool keys : {false, true}) {
    auto shape = make<attn_block_mask_shape>();
    shape.batch = shape.heads = int64_t{1} << 30;
    (keys ? shape.seqlen_kv : shape.seqlen_q) = int64_t{1} << 30;
    shape.block_q = shape.block_k = 1;
    const auto made = [](auto&& build) {
      Mask mask;
      check(build(&mask.handle));
      auto args = make<attn_args>();
      check(attn_block_mask_apply(mask.handle, nullptr, &args));
      CHECK(args.block_kinds != nullptr);
      CHECK(args.block_index == nullptr);
    };
    made([&](auto** mask) { return attn_block_mask_from_window(host, &shape, -1, 0, 0, 0, mask); });
    made([&](auto** mask) {
      return attn_block_mask_from_dense(host, &shape, nullptr, nullptr, mask);
    });
    made([&](auto** mask) {
      return attn_block_mask_from_intervals(host, &shape, nullptr, 2, nullptr, mask);
    });
    made([&](auto** mask) { return attn_block_mask_from_lists(host, &shape, nullptr, 5, mask); });
    made([&](auto** mask) {
      return attn_block_mask_from_kinds(host, &shape, nullptr, nullptr, nullptr, 0, mask);
    });
  }
}

TEST_CASE("block mask: bad arguments") {
  attn_context* host = backend_of(ATTN_BACKEND_CPU).context;
  const Grid g{1, 1, 100, 100, 64, 64};
  attn_block_mask* mask = nullptr;
  const auto refused = [&](attn_status status, std::initializer_list<const char*> says) {
    CHECK(status == ATTN_INVALID_ARGUMENT);
    CHECK(mask == nullptr);
    const std::string text = attn_last_error();
    for (const char* part : says) {
      INFO(text);
      CHECK(text.find(part) != std::string::npos);
    }
  };
  const auto shaped = [&](auto&& change) {
    attn_block_mask_shape s = g.shape();
    change(s);
    return attn_block_mask_from_window(host, &s, -1, 0, 0, 0, &mask);
  };
  refused(shaped([](auto& s) { s.block_q = 0; }), {"shape.block_q is 0", "accepted: 1 to"});
  refused(shaped([](auto& s) { s.seqlen_q = -1; }), {"shape.seqlen_q is -1"});
  refused(shaped([](auto& s) { s.batch = -2; }), {"shape.batch is -2"});
  refused(shaped([](auto& s) { s.heads = int64_t{1} << 30, s.batch = 1 << 30; }), {"blocks"});
  refused(shaped([](auto& s) { s.block_q = s.block_k = 1 << 30; }), {"block_q * block_k"});
  refused(shaped([](auto& s) { s.struct_size = 3; }), {"shape.struct_size is 3"});
  const attn_block_mask_shape shape = g.shape();
  refused(attn_block_mask_from_window(host, nullptr, 0, 0, 0, 0, &mask), {"shape is NULL"});
  refused(attn_block_mask_from_window(nullptr, &shape, 0, 0, 0, 0, &mask), {"context is NULL"});
  refused(attn_block_mask_from_window(host, &shape, 0, 0, 0, 0, nullptr), {"mask is NULL"});
  refused(attn_block_mask_from_window(host, &shape, -2, 0, 0, 0, &mask), {"window_left is -2"});
  refused(attn_block_mask_from_window(host, &shape, 0, 0, 101, 0, &mask),
          {"global_tokens is 101", "0 to 100"});
  refused(attn_block_mask_from_window(host, &shape, 0, 0, 0, -1, &mask), {"prefix_tokens is -1"});

  const int64_t lengths[] = {60, 30, -1, 50};
  refused(attn_block_mask_from_documents(host, &shape, lengths, 2, 0, &mask),
          {"lengths add up to 90", "100"});
  refused(attn_block_mask_from_documents(host, &shape, lengths, 3, 0, &mask), {"lengths[2] is -1"});
  refused(attn_block_mask_from_documents(host, &shape, lengths + 3, 1, 2, &mask), {"causal is 2"});
  refused(attn_block_mask_from_documents(host, &shape, nullptr, 1, 0, &mask), {"lengths is NULL"});
  attn_block_mask_shape wide = shape;
  wide.seqlen_kv = 101;
  refused(attn_block_mask_from_documents(host, &wide, lengths, 2, 0, &mask),
          {"shape.seqlen_q is 100", "101"});

  std::vector<int32_t> intervals(200);
  intervals[20] = 7, intervals[21] = 3;
  refused(attn_block_mask_from_intervals(host, &shape, intervals.data(), 1, nullptr, &mask),
          {"key 10 is [7, 3)", "0 <= begin <= end <= seqlen_q = 100"});
  intervals[20] = 0, intervals[21] = 101;
  refused(attn_block_mask_from_intervals(host, &shape, intervals.data(), 1, nullptr, &mask),
          {"key 10 is [0, 101)"});
  refused(attn_block_mask_from_intervals(host, &shape, intervals.data(), 3, nullptr, &mask),
          {"num_intervals is 3"});
  refused(attn_block_mask_from_intervals(host, &shape, nullptr, 1, nullptr, &mask),
          {"intervals is NULL"});
  refused(attn_block_mask_from_dense(host, &shape, nullptr, nullptr, &mask), {"dense is NULL"});

  std::vector<uint8_t> kinds = {2, 1, 3, 0};
  std::vector<int32_t> index = {-1, -1, 1, -1};
  const std::vector<uint32_t> bits(2 * 128);
  const auto from_kinds = [&](const int32_t* i, const uint32_t* b, int64_t n) {
    return attn_block_mask_from_kinds(host, &shape, kinds.data(), i, b, n, &mask);
  };
  refused(from_kinds(index.data(), nullptr, 2), {"bits is NULL"});
  refused(from_kinds(index.data(), bits.data(), 1), {"block row 1, column 0 is 1", "0 to 0"});
  refused(from_kinds(index.data(), nullptr, 0), {"block row 1, column 0 is partial (3)"});
  refused(from_kinds(nullptr, bits.data(), 2), {"index is NULL"});
  kinds[1] = 4;
  refused(from_kinds(index.data(), bits.data(), 2),
          {"kinds at block row 0, column 1 is 4", "partial (3)"});
  refused(attn_block_mask_from_kinds(host, &shape, nullptr, nullptr, nullptr, 0, &mask),
          {"kinds is NULL"});

  Mask small, large;
  check(attn_block_mask_from_window(host, &shape, -1, 0, 0, 0, &small.handle));
  check(attn_block_mask_from_window(host, &wide, -1, 0, 0, 0, &large.handle));
  refused(attn_block_mask_combine(host, small.handle, large.handle, 0, &mask),
          {"b: seqlen_kv is 101", "100"});
  refused(attn_block_mask_combine(host, small.handle, small.handle, 2, &mask), {"combine is 2"});
  refused(attn_block_mask_combine(host, small.handle, nullptr, 0, &mask), {"b is NULL"});

  auto segment = make<attn_segment>();
  segment.seqlen = 100;
  auto problem = make<attn_problem>();
  problem.batch = problem.heads_q = 2;
  problem.seqlen_q = 100;
  refused(attn_block_mask_apply(small.handle, &problem, nullptr), {"num_segments is 0"});
  problem.num_segments = 1;
  problem.segments = &segment;
  refused(attn_block_mask_apply(large.handle, &problem, nullptr),
          {"the mask has seqlen_kv 101", "100"});
  problem.seqlen_q = 99;
  refused(attn_block_mask_apply(small.handle, &problem, nullptr),
          {"the mask has seqlen_q 100", "99"});
  problem.seqlen_q = 100;
  CHECK(problem.flags == 0);
  CHECK(attn_block_mask_apply(small.handle, &problem, nullptr) == ATTN_OK);
  CHECK(problem.flags == ATTN_BLOCK_MASK);
  attn_block_mask_shape three = shape;
  three.heads = 3;
  Mask per_head;
  check(attn_block_mask_from_window(host, &three, -1, 0, 0, 0, &per_head.handle));
  refused(attn_block_mask_apply(per_head.handle, &problem, nullptr), {"the mask has heads 3", "2"});
  refused(attn_block_mask_apply(nullptr, &problem, nullptr), {"mask is NULL"});
  attn_block_mask_destroy(nullptr);

  for (const Target& t : targets()) {
    if (t.host) continue;
    attn_block_mask_shape odd = shape;
    odd.block_k = 32;
    refused(attn_block_mask_from_window(t.context, &odd, -1, 0, 0, 0, &mask),
            {"shape.block_k is 32", "64, 128"});
  }
}

}  // namespace
}  // namespace attn::test
