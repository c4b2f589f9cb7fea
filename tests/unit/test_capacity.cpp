// Segments whose capacity is more than their arrays hold: memory after a sequence's last key is not
// there.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../catch.h"
#include "attn/attn.hpp"

namespace {

// Floats that end where memory does.
class AtTheEnd {
 public:
  explicit AtTheEnd(const std::vector<float>& values) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), bytes = values.size() * sizeof(float);
    bytes_ = (bytes + page - 1) / page * page + page;
    memory_ = static_cast<char*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory_ != MAP_FAILED);
    REQUIRE(mprotect(memory_ + bytes_ - page, page, PROT_NONE) == 0);
    data_ = reinterpret_cast<float*>(memory_ + bytes_ - page - bytes);
    std::memcpy(data_, values.data(), bytes);
  }
  ~AtTheEnd() { munmap(memory_, bytes_); }
  AtTheEnd(const AtTheEnd&) = delete;
  AtTheEnd& operator=(const AtTheEnd&) = delete;
  float* data() const { return data_; }

 private:
  size_t bytes_ = 0;
  char* memory_ = nullptr;
  float* data_ = nullptr;
};

std::vector<float> numbers(size_t count, int from) {
  std::vector<float> x(count);
  for (size_t n = 0; n < count; ++n) x[n] = float(std::sin(double(n) * 0.7 + from));
  return x;
}

constexpr int64_t batch = 2, heads = 2, dim = 64, rows = 70;

// Runs `problem` over one segment of f32; with what is said here and not by the caller.
void run(const attn::context& context, attn_problem problem, attn_segment segment, attn_args args,
         attn_segment_args keys) {
  segment.k_type = segment.v_type = ATTN_F32;
  problem.heads_q = problem.heads_kv = heads;
  problem.head_dim = dim;
  problem.q_type = ATTN_F32;
  problem.num_segments = args.num_segments = 1;
  problem.segments = &segment;
  args.segments = &keys;
  const attn::plan plan(context, problem);
  plan.run(args, plan.make_workspace(context));
}

// Keys of two sequences, 33 and 70 of them, whose entries are `rows` keys apart; out of `queries`.
std::vector<float> answer(const attn::context& context, int64_t capacity, int64_t queries,
                          uint32_t flags, attn_layout layout) {
  const AtTheEnd k(numbers(size_t(batch * rows * heads * dim), 1)),
      v(numbers(size_t(batch * rows * heads * dim), 2));
  const std::vector<float> q = numbers(size_t(batch * queries * heads * dim), 3);
  std::vector<float> out(q.size());
  const std::vector<int32_t> lengths = {33, int32_t(rows)};
  std::vector<int32_t> table;  // pages of 7 keys, and then none
  const int64_t columns = (capacity + 6) / 7;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t n = 0; n < columns; ++n)
      table.push_back(n * 7 < lengths[size_t(b)] ? int32_t(b * 10 + n) : -1);
  auto segment = attn::make<attn_segment>();
  auto keys = attn::make<attn_segment_args>();
  segment.layout = layout;
  segment.has_seqlens = 1;
  segment.seqlen = capacity;
  if (layout == ATTN_PAGED) {
    segment.num_pages = batch * 10;
    segment.page_size = 7;
    segment.max_pages = int32_t(columns);
    keys.block_table = table.data();
  } else {
    segment.k_stride = segment.v_stride = {rows * heads * dim, heads * dim, dim};
  }
  auto problem = attn::make<attn_problem>();
  problem.batch = batch;
  problem.seqlen_q = queries;
  problem.flags = flags;
  keys.k = k.data();
  keys.v = v.data();
  keys.seqlens = lengths.data();
  auto args = attn::make<attn_args>();
  args.q = q.data();
  args.out = out.data();
  run(context, problem, segment, args, keys);
  return out;
}

// out and lse of packed q, tokens that end where memory does, by a plan for `planned` tokens of
// sequences of up to `longest`.
std::vector<float> packed_answer(const attn::context& context, const std::vector<int32_t>& offsets,
                                 int64_t tokens, int64_t planned, int64_t longest, uint32_t flags) {
  const auto sequences = int64_t(offsets.size()) - 1;
  const std::vector<float> k = numbers(size_t(sequences * rows * heads * dim), 1),
                           v = numbers(size_t(sequences * rows * heads * dim), 2);
  const AtTheEnd q(numbers(size_t(tokens * heads * dim), 3)),
      out(std::vector<float>(size_t(tokens * heads * dim), NAN)),
      lse(std::vector<float>(size_t(tokens * heads), NAN));
  auto segment = attn::make<attn_segment>();
  segment.seqlen = rows;
  auto problem = attn::make<attn_problem>();
  problem.batch = sequences;
  problem.seqlen_q = longest;
  problem.q_layout = ATTN_PACKED;
  problem.total_q = planned;
  problem.flags = flags;
  auto keys = attn::make<attn_segment_args>();
  keys.k = k.data();
  keys.v = v.data();
  auto args = attn::make<attn_args>();
  args.q = q.data();
  args.out = out.data();
  args.lse = lse.data();
  args.cu_seqlens_q = offsets.data();
  if (planned != tokens) args.total_q = tokens;
  run(context, problem, segment, args, keys);
  std::vector<float> both(out.data(), out.data() + tokens * heads * dim);
  both.insert(both.end(), lse.data(), lse.data() + tokens * heads);
  return both;
}

}  // namespace

// The last two tokens are of no sequence.
TEST_CASE("capacity: more tokens of packed q than a run has") {
  const std::vector<int32_t> offsets = {0, 1, 1, 40, 110};
  constexpr int64_t tokens = 112;
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const uint32_t flags : {uint32_t{0}, uint32_t{ATTN_CAUSAL}}) {
      const auto want = packed_answer(context, offsets, tokens, tokens, 70, flags);
      for (const auto& [planned, longest] : {std::pair{113, 70}, {128, 72}, {5000, 4000}}) {
        INFO(attn_backend_string(backend) << " planned for " << planned);
        const auto got = packed_answer(context, offsets, tokens, planned, longest, flags);
        CHECK(std::equal(got.begin(), got.end(), want.begin(), want.end(),
                         [](float a, float b) { return a == b || std::abs(a - b) <= 2e-6f; }));
      }
    }
  }
}

TEST_CASE("capacity: tokens of a run that its plan does not take") {
  const attn::context context(ATTN_BACKEND_CPU);
  const auto error = [&](int64_t planned, int64_t tokens, int64_t list_size) {
    auto segment = attn::make<attn_segment>();
    segment.seqlen = 4;
    segment.list_size = list_size;
    auto problem = attn::make<attn_problem>();
    problem.batch = 1;
    problem.seqlen_q = 8;
    problem.q_layout = planned ? ATTN_PACKED : ATTN_PADDED;
    problem.total_q = planned;
    auto args = attn::make<attn_args>();
    args.total_q = tokens;
    try {
      run(context, problem, segment, args, attn::make<attn_segment_args>());
    } catch (const attn::error& error) {
      CHECK(error.status() == ATTN_INVALID_ARGUMENT);
      return std::string(error.what());
    }
    return std::string("none");
  };
  CHECK(error(8, 9, 0) == "args.total_q is 9; accepted: 0 to 8");
  CHECK(error(8, -1, 0) == "args.total_q is -1; accepted: 0 to 8");
  CHECK(error(0, 1, 0) == "args.total_q is 1; accepted: 0 to 0");
  CHECK(error(8, 7, 2) == "args.total_q is 7; accepted with lists of keys: the problem's 8");
}

TEST_CASE("capacity: more than the arrays hold, where lengths say what is there") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const attn_layout layout : {ATTN_PADDED, ATTN_PAGED})
      for (const int64_t queries : {1, 5, 70})
        for (const uint32_t flags : {uint32_t{0}, uint32_t{ATTN_CAUSAL}}) {
          const auto want = answer(context, rows, queries, flags, layout);
          for (const int64_t capacity : {71, 128, 5000}) {
            const auto got = answer(context, capacity, queries, flags, layout);
            float difference = 0;
            for (size_t n = 0; n < got.size(); ++n)
              difference = std::max(difference, std::abs(got[n] - want[n]));
            INFO(attn_backend_string(backend) << " layout " << layout << " queries " << queries
                                              << " flags " << flags << " capacity " << capacity);
            CHECK(difference <= 2e-6f);
          }
        }
  }
}
