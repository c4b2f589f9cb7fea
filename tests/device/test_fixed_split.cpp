// fixed_split on CUDA: the bits of a query depend on its own keys alone. One set of sequences is
// computed in many ways, each compared with every query as a call of its own.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "attn/attn.hpp"
#include "conformance/backend.h"
#include "core/dtype.h"

namespace attn::test {
namespace {

constexpr int64_t page_size = 16;

struct Shape {
  attn_dtype q_type, kv_type;
  int64_t heads_q, heads_kv, head_dim;
  int64_t fixed_split;
  int64_t window_left = -1;
  float softcap = 0;
  bool sinks = false;
  int32_t segments = 1;
};

// Queries [begin, end) of a sequence against its keys before `end`.
struct Chunk {
  int sequence;
  int32_t begin, end;
};

struct Call {
  std::vector<Chunk> chunks;
  int32_t max_sms = 0;
  bool paged = false;
  int64_t capacity_q = 0;  // 0: the longest chunk
};

// Sequences in the memory of a backend: all have as many keys, in each of the segments.
class Sequences {
 public:
  Sequences(Backend& backend, const Shape& shape, int count, int32_t keys)
      : shape_(shape), count_(count), keys_(keys), backend_(backend), arena_(backend.context) {
    Case c;
    c.name = "fixed-split";
    c.batch = count;
    c.heads_q = shape.heads_q;
    c.heads_kv = shape.heads_kv;
    c.head_dim = c.head_dim_v = shape.head_dim;
    c.seqlen_q = keys;
    c.q_type = shape.q_type;
    c.out_type = ATTN_F32;
    SegmentCase s;
    s.k_type = s.v_type = shape.kv_type;
    s.capacity = keys;
    c.segments = {s};
    data_ = make_data(c);
    k_ = arena_.add(data_.segments[0].k);
    v_ = arena_.add(data_.segments[0].v);
  }

  // The bits of each query's rows and their lse, by sequence and position.
  using Rows = std::map<std::pair<int, int32_t>, std::vector<unsigned char>>;
  Rows run(const Call& call, std::set<std::string>* kernels) {
    const int64_t batch = int64_t(call.chunks.size());
    const int64_t row = shape_.heads_q * shape_.head_dim;  // elements
    Buffer cu(size_t(batch + 1) * 4, 0xff);
    int64_t total = 0, longest = 0;
    for (int64_t b = 0; b <= batch; ++b) {
      cu.as<int32_t>()[b] = int32_t(total);
      if (b == batch) break;
      total += call.chunks[size_t(b)].end - call.chunks[size_t(b)].begin;
      longest =
          std::max<int64_t>(longest, call.chunks[size_t(b)].end - call.chunks[size_t(b)].begin);
    }
    const size_t q_row_bytes = size_t(dtype_bytes(shape_.q_type, row));
    Buffer q(size_t(total) * q_row_bytes, 0xff);
    for (int64_t b = 0; b < batch; ++b) {
      const Chunk& chunk = call.chunks[size_t(b)];
      std::memcpy(q.data() + size_t(cu.as<int32_t>()[b]) * q_row_bytes,
                  data_.q.data() + size_t(chunk.sequence * keys_ + chunk.begin) * q_row_bytes,
                  size_t(chunk.end - chunk.begin) * q_row_bytes);
    }
    // Segment n has the keys [n * part, (n + 1) * part).
    const int32_t part = keys_ / shape_.segments, pages = int32_t(keys_ / page_size);
    std::vector<Buffer> lengths, tables;
    for (int32_t n = 0; n < shape_.segments; ++n) {
      Buffer& of = lengths.emplace_back(size_t(batch) * 4, 0xff);
      Buffer& table = tables.emplace_back(size_t(batch) * size_t(part / page_size) * 4, 0xff);
      for (int64_t b = 0; b < batch; ++b) {
        const Chunk& chunk = call.chunks[size_t(b)];
        of.as<int32_t>()[b] = std::clamp(chunk.end - n * part, 0, part);
        for (int64_t i = 0; i < part / page_size; ++i)
          table.as<int32_t>()[b * (part / page_size) + i] =
              int32_t(chunk.sequence * pages + n * (part / page_size) + i);
      }
    }
    // Without pages chunk n is of sequence n.
    std::vector<attn_segment> segments(size_t(shape_.segments), make<attn_segment>());
    std::vector<attn_segment_args> args(size_t(shape_.segments), make<attn_segment_args>());
    const int64_t kv_row = shape_.heads_kv * shape_.head_dim;
    for (int32_t n = 0; n < shape_.segments; ++n) {
      attn_segment& s = segments[size_t(n)];
      s.k_type = s.v_type = shape_.kv_type;
      s.seqlen = part;
      s.has_seqlens = 1;
      int64_t offset = 0;
      if (call.paged) {
        s.layout = ATTN_PAGED;
        s.page_size = page_size;
        s.num_pages = count_ * pages;
        s.max_pages = int32_t(part / page_size);
        args[size_t(n)].block_table = static_cast<const int32_t*>(arena_.add(tables[size_t(n)]));
      } else {
        s.k_stride = s.v_stride = {keys_ * kv_row, kv_row, shape_.head_dim};
        offset = dtype_bytes(shape_.kv_type, n * part * kv_row);
      }
      args[size_t(n)].k = static_cast<char*>(k_) + offset;
      args[size_t(n)].v = static_cast<char*>(v_) + offset;
      args[size_t(n)].seqlens = static_cast<const int32_t*>(arena_.add(lengths[size_t(n)]));
    }
    Buffer sinks(size_t(shape_.heads_q) * 4, 0xff);
    for (int64_t h = 0; h < shape_.heads_q; ++h) sinks.as<float>()[h] = 0.25f * float(h) - 1;

    auto problem = make<attn_problem>();
    problem.batch = batch;
    problem.heads_q = shape_.heads_q;
    problem.heads_kv = shape_.heads_kv;
    problem.head_dim = shape_.head_dim;
    problem.seqlen_q = call.capacity_q ? call.capacity_q : longest;
    problem.total_q = total;
    problem.q_layout = ATTN_PACKED;
    problem.q_type = shape_.q_type;
    problem.out_type = ATTN_F32;
    problem.num_segments = shape_.segments;
    problem.segments = segments.data();
    problem.flags = ATTN_CAUSAL;
    if (shape_.window_left >= 0) {
      problem.flags |= ATTN_WINDOW;
      problem.window_left = shape_.window_left;
    }
    if (shape_.sinks) problem.flags |= ATTN_SINKS;
    problem.softcap = shape_.softcap;
    problem.fixed_split = shape_.fixed_split;
    problem.max_sms = call.max_sms;
    attn_plan* made = nullptr;
    const attn_status planned = attn_plan_create(backend_.context, &problem, &made);
    INFO((planned == ATTN_OK ? "" : attn_last_error()));
    REQUIRE(planned == ATTN_OK);
    const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
    kernels->insert(attn_plan_kernel(made));

    Buffer out(size_t(total * row) * 4, 0xff), lse(size_t(total * shape_.heads_q) * 4, 0xff);
    auto run = make<attn_args>();
    run.q = arena_.add(q);
    run.out = arena_.add(out);
    run.lse = static_cast<float*>(arena_.add(lse));
    run.cu_seqlens_q = static_cast<const int32_t*>(arena_.add(cu));
    run.num_segments = shape_.segments;
    run.segments = args.data();
    if (shape_.sinks) run.sinks = static_cast<const float*>(arena_.add(sinks));
    const size_t bytes = attn_plan_workspace(made);
    void* workspace = bytes ? arena_.workspace(bytes) : nullptr;
    if (bytes) REQUIRE(attn_workspace_init(made, workspace, bytes, nullptr) == ATTN_OK);
    REQUIRE(attn_run(made, &run, workspace, bytes, nullptr) == ATTN_OK);
    REQUIRE(attn_synchronize(backend_.context, nullptr) == ATTN_OK);
    const Buffer got = arena_.fetch(out, run.out), got_lse = arena_.fetch(lse, run.lse);

    Rows rows;
    for (int64_t b = 0; b < batch; ++b) {
      const Chunk& chunk = call.chunks[size_t(b)];
      for (int32_t i = chunk.begin; i < chunk.end; ++i) {
        const int64_t t = cu.as<int32_t>()[b] + i - chunk.begin;
        const unsigned char* at = got.data() + size_t(t * row) * 4;
        std::vector<unsigned char>& of = rows[{chunk.sequence, i}];
        of.assign(at, at + row * 4);
        for (int64_t h = 0; h < shape_.heads_q; ++h) {
          const unsigned char* sum = got_lse.data() + size_t(h * total + t) * 4;
          of.insert(of.end(), sum, sum + 4);
        }
      }
    }
    return rows;
  }

 private:
  Shape shape_;
  int64_t count_;
  int32_t keys_;
  Backend& backend_;
  Arena arena_;
  Data data_;
  void *k_, *v_;
};

void check_bits(Backend& backend, const Shape& shape, int32_t keys) {
  constexpr int count = 3;
  Sequences sequences(backend, shape, count, keys);
  const int32_t first = keys - 200;  // of the queries asked for
  std::set<std::string> kernels;
  Sequences::Rows alone;
  for (const int32_t i : {first, first + 1, first + 63, keys - 100, keys - 2, keys - 1}) {
    Call call;
    call.chunks = {{0, i, i + 1}};
    alone.merge(sequences.run(call, &kernels));
  }
  std::vector<Call> calls;
  const auto add = [&](std::vector<Chunk> chunks, bool paged, int32_t max_sms = 0,
                       int64_t capacity_q = 0) {
    calls.push_back({std::move(chunks), max_sms, paged, capacity_q});
  };
  add({{0, first, keys}}, false);                                       // a prefill
  add({{0, first, keys}, {1, 0, keys}, {2, first, first + 1}}, false);  // beside others
  add({{2, first, keys}, {1, 5, 6}, {0, first, keys}}, true);           // in another order
  add({{0, first, first + 64}, {1, first, first + 1}}, true);           // chunks
  add({{0, first + 40, keys - 60}}, true, 1);                           // on one SM
  add({{0, keys - 2, keys}}, false, 0, 500);                            // capacity above
  add({{0, 0, keys}}, false, 7);
  add({{1, keys - 1, keys}, {0, keys - 1, keys}, {2, 100, 101}}, true);  // decode
  add({{0, keys - 8, keys}}, false);
  if (shape.fixed_split == 64) {
    // More splits than the workspace has slots for: blocks take whole row tiles.
    add({{0, first, keys}, {1, 0, keys}}, false, 0, 5000);
    std::vector<Chunk> tokens;
    for (int n = 0; n < 1000; ++n) tokens.push_back({n % count, keys - 1 - n % 3, keys - n % 3});
    add(tokens, true);
  }
  for (const Call& call : calls) {
    const Sequences::Rows rows = sequences.run(call, &kernels);
    INFO("chunk 0 is [" << call.chunks[0].begin << ", " << call.chunks[0].end << ") of sequence "
                        << call.chunks[0].sequence << ", max_sms " << call.max_sms);
    int compared = 0, different = 0;
    for (const auto& [at, bits] : alone) {
      const auto same = rows.find(at);
      if (same == rows.end()) continue;
      ++compared;
      different += same->second != bits;
    }
    CHECK(compared > 0);
    CHECK(different == 0);
  }
  CHECK(kernels.size() >= 2);  // of few rows and of many
}

TEST_CASE("cuda: with fixed_split a query's bits depend on its own keys alone") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  const Shape bf16 = {.q_type = ATTN_BF16,
                      .kv_type = ATTN_BF16,
                      .heads_q = 8,
                      .heads_kv = 2,
                      .head_dim = 128,
                      .fixed_split = 256};
  std::vector<Shape> shapes = {bf16, bf16, bf16, bf16, bf16, bf16, bf16};
  shapes[1].kv_type = ATTN_F8_E4M3FN;
  shapes[2].window_left = 300;
  shapes[2].fixed_split = 64;
  shapes[3].head_dim = 64;
  shapes[3].softcap = 5;
  shapes[3].sinks = true;
  shapes[4].segments = 3;
  shapes[4].fixed_split = 128;
  shapes[5].q_type = shapes[5].kv_type = ATTN_F16;
  shapes[5].heads_kv = 8;
  shapes[6].fixed_split = 64;  // more parts than are added up at once
  for (const Shape& shape : shapes) {
    INFO("fixed_split " << shape.fixed_split << ", head_dim " << shape.head_dim << ", window "
                        << shape.window_left << ", segments " << shape.segments << ", K and V "
                        << dtype_name(shape.kv_type));
    check_bits(backend, shape, shape.window_left >= 0 || shape.fixed_split == 64 ? 2688 : 1536);
  }
}

}  // namespace
}  // namespace attn::test
