// What a run writes shares memory with nothing else: the rule itself against all bytes one by one,
// and every array of every operation.
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "backends.h"
#include "catch.h"
#include "problem/overlap.h"

using namespace attn;
using namespace attn::test;

namespace {

struct Random {
  uint64_t state;
  int64_t operator()(int64_t limit) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return int64_t((state >> 33) % uint64_t(limit));
  }
};

// A tensor of single bytes.
struct Strided {
  int64_t at, inner;
  int64_t size[3], stride[3];
  Footprint footprint() {
    return Footprint(
        ATTN_F8_E5M2, inner,
        {{"a", size[0], &stride[0]}, {"b", size[1], &stride[1]}, {"c", size[2], &stride[2]}});
  }
  std::set<int64_t> bytes() const {
    std::set<int64_t> all;
    for (int64_t a = 0; a < size[0]; ++a)
      for (int64_t b = 0; b < size[1]; ++b)
        for (int64_t c = 0; c < size[2]; ++c)
          for (int64_t d = 0; d < inner; ++d)
            all.insert(at + a * stride[0] + b * stride[1] + c * stride[2] + d);
    return all;
  }
};

bool found_apart(Strided a, Strided b) {
  const Footprint x = a.footprint(), y = b.footprint();
  const auto address = [](int64_t at) {
    return reinterpret_cast<const void*>(uintptr_t(1000000 + at));
  };
  return keep_apart({{"a"}, address(a.at), &x}, {{"b"}, address(b.at), &y}).ok();
}
bool are_apart(const Strided& a, const Strided& b) {
  const std::set<int64_t> other = b.bytes();
  for (int64_t byte : a.bytes())
    if (other.count(byte)) return false;
  return true;
}

}  // namespace

TEST_CASE("overlap: arrays that are found apart are apart") {
  Random random{1};
  int apart = 0, refused = 0, meet = 0;
  for (int n = 0; n < 20000; ++n) {
    const auto any = [&] {
      Strided s{random(120), 1 + random(6), {}, {}};
      for (int i = 0; i < 3; ++i) {
        s.size[i] = random(8) ? 1 + random(3) : 0;
        s.stride[i] = random(25) * (random(2) ? 1 : -1) * (random(2) ? 1 : 4);
      }
      return s;
    };
    const Strided a = any(), b = any();
    const bool truth = are_apart(a, b), found = found_apart(a, b);
    if (found && !truth) FAIL("case " << n << " shares bytes");
    apart += found;
    refused += truth && !found;
    meet += !truth;
  }
  CHECK(apart > 5000);
  CHECK(meet > 2000);
  INFO(refused << " of " << apart + refused << " without a shared byte are refused");
  CHECK(refused * 3 < apart);
}

TEST_CASE("overlap: slices of one tensor are refused if and only if they share an element") {
  Random random{2};
  int apart = 0;
  for (int n = 0; n < 20000; ++n) {
    const int64_t whole[] = {1 + random(3), 1 + random(4), 1 + random(4), 1 + random(4)};
    const auto slice = [&] {
      int64_t begin[4], count[4];
      for (int i = 0; i < 4; ++i) {
        begin[i] = random(whole[i]);
        count[i] = 1 + random(whole[i] - begin[i]);
      }
      Strided s{begin[3], count[3], {}, {}};
      int64_t stride = whole[3];
      for (int i = 2; i >= 0; --i) {
        const bool reversed = random(4) == 0;
        s.size[i] = count[i];
        s.stride[i] = reversed ? -stride : stride;
        s.at += (reversed ? begin[i] + count[i] - 1 : begin[i]) * stride;
        stride *= whole[i];
      }
      return s;
    };
    const Strided a = slice(), b = slice();
    const bool truth = are_apart(a, b);
    if (found_apart(a, b) != truth) FAIL("case " << n << ": apart is " << truth);
    apart += truth;
  }
  CHECK(apart > 2000);
}

TEST_CASE("overlap: pages of two views of one pool are the same memory or apart") {
  Random random{3};
  int pools = 0, meet = 0;
  for (int n = 0; n < 20000; ++n) {
    Strided a{random(60), 1 + random(3), {}, {}};
    for (int i = 0; i < 3; ++i) {
      a.size[i] = 1 + random(4);
      a.stride[i] = (i == 0 ? 1 + random(30) : random(12)) * (random(4) ? 1 : -1);
    }
    Strided b = a;
    b.at += random(2) ? random(7) * a.stride[0] : random(60);
    if (random(4) == 0) b.stride[2] += 1;
    const Footprint x = a.footprint(), y = b.footprint();
    const auto placed = [](const char* name, const Strided& s, const Footprint& bytes) {
      return Placed{{name},
                    reinterpret_cast<const void*>(uintptr_t(1000000 + s.at)),
                    &bytes,
                    s.size[0] > 1 ? std::abs(s.stride[0]) : 0};
    };
    const int64_t apart = pages_between(placed("a", a, x), placed("b", b, y));
    if (apart == 0) continue;
    ++pools;
    const int64_t sign = a.stride[0] < 0 ? -1 : 1;  // pages count upwards in memory
    for (int64_t p = 0; p < a.size[0]; ++p)
      for (int64_t q = 0; q < b.size[0]; ++q) {
        Strided page_a = a, page_b = b;
        page_a.at += p * a.stride[0], page_b.at += q * b.stride[0];
        page_a.size[0] = page_b.size[0] = 1;
        const bool same = q == p + sign * apart;
        meet += same;
        if (same ? page_a.bytes() != page_b.bytes() : !are_apart(page_a, page_b))
          FAIL("case " << n << ": pages " << p << " and " << q);
      }
  }
  CHECK(pools > 500);
  CHECK(meet > 500);
}

namespace {

// An array of a call, moved about by a test.
struct Array {
  std::string name;
  std::function<void(const void*)> set;
  size_t bytes;
  bool written = false;
};

char* aligned(char* memory) {
  return memory + (256 - reinterpret_cast<uintptr_t>(memory) % 256) % 256;
}

// Arrays one behind the other, each in room for two of any.
class Places {
 public:
  explicit Places(std::vector<Array> arrays) : arrays_(std::move(arrays)) {
    size_t largest = 0;
    for (const Array& array : arrays_) largest = std::max(largest, array.bytes);
    const size_t slot = (2 * largest + 511) / 256 * 256;
    memory_.resize(slot * arrays_.size() + 256);
    for (size_t n = 0; n < arrays_.size(); ++n)
      starts_.push_back(aligned(memory_.data()) + n * slot);
    reset();
  }
  // run() must be refused where an array shares bytes with one that is written, and taken where it
  // begins behind it.
  void check(const std::function<attn_status()>& run) {
    CHECK(run() == ATTN_OK);
    for (size_t w = 0; w < arrays_.size(); ++w) {
      if (!arrays_[w].written) continue;
      for (size_t n = 0; n < arrays_.size(); ++n) {
        if (n == w) continue;
        const Array &written = arrays_[w], &other = arrays_[n];
        INFO(written.name << " and " << other.name);
        // Devices want 16 bytes of alignment; what is smaller lies at the start.
        const size_t shared = std::min<size_t>(16, std::min(written.bytes, other.bytes));
        for (size_t offset : {size_t(0), (written.bytes - shared) / 16 * 16}) {
          reset();
          other.set(starts_[w] + offset);
          const attn_status status = run();
          const std::string text = attn_last_error();
          INFO("offset " << offset << ": " << text);
          CHECK(status == ATTN_INVALID_ARGUMENT);
          CHECK(text.find("overlaps") != std::string::npos);
          CHECK(text.find(written.name) != std::string::npos);
          CHECK(text.find(other.name) != std::string::npos);
        }
        reset();
        other.set(starts_[w] + (written.bytes + 15) / 16 * 16);
        const attn_status status = run();
        INFO(attn_last_error());
        CHECK(status == ATTN_OK);
      }
    }
    reset();
  }

 private:
  void reset() {
    std::fill(memory_.begin(), memory_.end(), 0);  // lengths, offsets, pages and kinds are all good
    for (size_t n = 0; n < arrays_.size(); ++n) arrays_[n].set(starts_[n]);
  }
  std::vector<Array> arrays_;
  std::vector<char> memory_;
  std::vector<char*> starts_;
};

template <class T>
std::function<void(const void*)> into(T& pointer) {
  return [&pointer](const void* address) { pointer = static_cast<T>(const_cast<void*>(address)); };
}

}  // namespace

TEST_CASE("overlap: out, lse and workspace of forward with every array") {
  constexpr int64_t batch = 2, heads = 2, queries = 3, keys = 5, dim = 64;
  int ran = 0;
  on_every_backend([&](attn_context* context, const mock::MockLibrary* library) {
    const attn_backend backend = attn_context_backend(context);
    // What of a problem no two of which a device kernel may take together.
    for (int variant = 0; variant < 6; ++variant) {
      auto segment = make<attn_segment>();
      auto p = make<attn_problem>();
      auto kv = make<attn_segment_args>();
      auto args = make<attn_args>();
      p.q_type = segment.k_type = segment.v_type =
          backend == ATTN_BACKEND_HIP ? ATTN_F8_E4M3FN : ATTN_F16;
      p.out_type = ATTN_F16;
      p.batch = batch;
      p.heads_q = p.heads_kv = heads;
      p.head_dim = dim;
      p.seqlen_q = queries;
      segment.seqlen = keys;
      p.num_segments = args.num_segments = 1;
      p.segments = &segment;
      args.segments = &kv;
      const size_t size = backend == ATTN_BACKEND_HIP ? 1 : 2;
      std::vector<Array> arrays = {
          {"out", into(args.out), batch * queries * heads * dim * 2, true},
          {"lse", into(args.lse), batch * heads * queries * 4, true},
          {"q", into(args.q), batch * queries * heads * dim * size},
          {"k", into(kv.k), batch * keys * heads * dim * size},
          {"v", into(kv.v), batch * keys * heads * dim * size},
      };
      switch (variant) {
        case 0:
          p.flags = ATTN_SINKS;
          arrays.push_back({"sinks", into(args.sinks), heads * 4});
          segment.has_seqlens = 1;
          arrays.push_back({"seqlens", into(kv.seqlens), batch * 4});
          break;
        case 1:
          p.q_layout = segment.layout = ATTN_PACKED;
          p.total_q = batch * queries;
          segment.total = batch * keys;
          arrays.push_back({"cu_seqlens_q", into(args.cu_seqlens_q), (batch + 1) * 4});
          arrays.push_back({"cu_seqlens", into(kv.cu_seqlens), (batch + 1) * 4});
          if (backend == ATTN_BACKEND_HIP) break;
          p.tree_keys = 1;
          arrays.push_back({"tree", into(args.tree), batch * queries * 16});
          break;
        case 2:
          p.flags = ATTN_ALIBI;
          arrays.push_back({"alibi_slopes", into(args.alibi_slopes), heads * 4});
          p.bias_type = ATTN_F32;
          arrays.push_back({"bias", into(args.bias), batch * heads * queries * keys * 4});
          break;
        case 3:
          p.flags = ATTN_BLOCK_MASK;
          p.block_q = p.block_k = 64;
          p.mask_batch = batch;
          p.mask_partials = 1;
          arrays.push_back({"block_kinds", into(args.block_kinds), batch});
          arrays.push_back({"block_index", into(args.block_index), batch * 4});
          arrays.push_back({"block_bits", into(args.block_bits), 64 * 2 * 4});
          break;
        case 4:
          p.q_descale = segment.k_descale = segment.v_descale = ATTN_DESCALE_HEAD;
          arrays.push_back({"q_descale", into(args.q_descale), batch * heads * 4});
          arrays.push_back({"k_descale", into(kv.k_descale), batch * heads * 4});
          arrays.push_back({"v_descale", into(kv.v_descale), batch * heads * 4});
          break;
        case 5:
          segment.layout = ATTN_PAGED;
          segment.page_size = segment.num_pages = segment.max_pages = 3;
          arrays[3].bytes = arrays[4].bytes = 9 * heads * dim * size;
          segment.has_seqlens = 1;
          segment.k_descale = ATTN_DESCALE_BLOCK;
          segment.descale_block_keys = 64;
          p.out_type = ATTN_F8_E5M2;
          p.flags = ATTN_OUT_SCALE;
          arrays[0].bytes /= 2;
          arrays.push_back({"seqlens", into(kv.seqlens), batch * 4});
          arrays.push_back({"block_table", into(kv.block_table), batch * 3 * 4});
          arrays.push_back({"k_descale", into(kv.k_descale), batch * heads * 4});
          arrays.push_back({"out_scale", into(args.out_scale), 4});
          break;
      }
      Plan plan;
      const attn_status status = attn_plan_create(context, &p, &plan.plan);
      INFO("variant " << variant << ": " << attn_last_error());
      if (library && status == ATTN_UNSUPPORTED) continue;
      REQUIRE(status == ATTN_OK);
      const size_t workspace_bytes = attn_plan_workspace(plan.plan);
      std::vector<char> room(workspace_bytes + 8192);  // q may begin at its end
      char* workspace = aligned(room.data());
      const auto run = [&] {
        return attn_run(plan.plan, &args, workspace, workspace_bytes, nullptr);
      };
      Places places(arrays);
      places.check(run);
      if (workspace_bytes > 0) {
        args.q = workspace + (workspace_bytes - 1) / 16 * 16;
        CHECK(run() == ATTN_INVALID_ARGUMENT);
        const std::string text = attn_last_error();
        INFO(text);
        CHECK(text.find("workspace is at") != std::string::npos);
        CHECK(text.find("overlaps q") != std::string::npos);
      }
      ++ran;
    }
  });
  CHECK(ran >= 6 + 6 + 4 + 3);
}

TEST_CASE("overlap: out and lse of merge with every part") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    auto p = make<attn_merge_problem>();
    p.batch = 2;
    p.heads_q = 3;
    p.seqlen_q = 5;
    p.head_dim_v = 8;
    p.num_parts = 2;
    p.part_type = ATTN_F32;
    Plan plan;
    REQUIRE(attn_plan_create_merge(context, &p, &plan.plan) == ATTN_OK);
    const void* outs[2];
    const float* lses[2];
    auto args = make<attn_merge_args>();
    args.num_parts = 2;
    args.outs = outs;
    args.lses = lses;
    constexpr size_t rows = 2 * 3 * 5;
    Places places({{"out", into(args.out), rows * 8 * 4, true},
                   {"lse", into(args.lse), rows * 4, true},
                   {"outs[0]", into(outs[0]), rows * 8 * 4},
                   {"outs[1]", into(outs[1]), rows * 8 * 4},
                   {"lses[0]", into(lses[0]), rows * 4},
                   {"lses[1]", into(lses[1]), rows * 4}});
    places.check([&] { return attn_run_merge(plan.plan, &args, nullptr); });
  });
}

TEST_CASE("overlap: dst and descale of quantize with src") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    for (attn_scale_source scale : {ATTN_SCALE_ONE, ATTN_SCALE_GIVEN, ATTN_SCALE_AMAX}) {
      auto p = make<attn_quantize_problem>();
      p.batch = 2;
      p.seqlen = 5;
      p.heads = 3;
      p.head_dim = 32;
      p.src_type = ATTN_F32;
      p.dst_type = ATTN_F8_E4M3FN;
      p.kind = ATTN_DESCALE_HEAD;
      p.scale = scale;
      Plan plan;
      REQUIRE(attn_plan_create_quantize(context, &p, &plan.plan) == ATTN_OK);
      auto args = make<attn_quantize_args>();
      constexpr size_t elements = 2 * 5 * 3 * 32;
      Places places({{"dst", into(args.dst), elements, true},
                     {"src", into(args.src), elements * 4},
                     {"descale", into(args.descale), 2 * 3 * 4, scale != ATTN_SCALE_GIVEN}});
      places.check([&] { return attn_run_quantize(plan.plan, &args, nullptr); });
    }
  });
}

TEST_CASE("overlap: all that kv_append writes with every array") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    for (bool paged : {false, true}) {
      constexpr int64_t batch = 2, heads = 2, tokens = 3, capacity = 8, dim = 64;
      auto p = make<attn_kv_append_problem>();
      p.batch = batch;
      p.heads_kv = p.heads_q = heads;
      p.head_dim = dim;
      p.seqlen_new = tokens;
      p.total_new = batch * tokens;
      p.new_layout = ATTN_PACKED;
      p.new_type = ATTN_F16;
      p.segment = make<attn_segment>();
      p.segment.k_type = p.segment.v_type = ATTN_F16;
      p.segment.has_seqlens = 1;
      p.segment.seqlen = p.rotary_positions = capacity;
      p.segment.k_descale = p.segment.v_descale = ATTN_DESCALE_HEAD;
      p.rotary_dim = 32;
      p.advance_seqlens = 1;
      if (paged) {
        p.segment.layout = ATTN_PAGED;
        p.segment.page_size = capacity / 2;
        p.segment.max_pages = 2;
        p.segment.num_pages = 2 * batch;
      }
      Plan plan;
      const attn_status made = attn_plan_create_kv_append(context, &p, &plan.plan);
      if (made == ATTN_UNSUPPORTED) continue;  // on a device
      REQUIRE(made == ATTN_OK);
      // q and seqlens, which may be written in place, lie elsewhere.
      auto args = make<attn_kv_append_args>();
      args.cache = make<attn_segment_args>();
      constexpr size_t fresh = batch * tokens * heads * dim * 2, table = capacity * 16 * 4;
      constexpr size_t cache = batch * capacity * heads * dim * 2, scales = batch * heads * 4;
      std::vector<Array> arrays = {{"k", into(args.cache.k), cache, true},
                                   {"v", into(args.cache.v), cache, true},
                                   {"seqlens_out", into(args.seqlens_out), batch * 4, true},
                                   {"k_new", into(args.k_new), fresh},
                                   {"v_new", into(args.v_new), fresh},
                                   {"rotary_cos", into(args.rotary_cos), table},
                                   {"rotary_sin", into(args.rotary_sin), table},
                                   {"k_descale", into(args.cache.k_descale), scales},
                                   {"v_descale", into(args.cache.v_descale), scales},
                                   {"cu_seqlens_new", into(args.cu_seqlens_new), (batch + 1) * 4},
                                   {"q_out", into(args.q_out), fresh, true}};
      if (paged) arrays.push_back({"block_table", into(args.cache.block_table), batch * 2 * 4});
      alignas(16) int32_t lengths[batch] = {};
      alignas(16) uint16_t q[batch * tokens * heads * dim] = {};
      args.cache.seqlens = lengths;
      args.q = q;
      Places places(arrays);
      places.check([&] { return attn_run_kv_append(plan.plan, &args, nullptr); });
      // What may be in place is compared with the others still.
      args.q = args.q_out;
      args.cache.seqlens = args.seqlens_out;
      CHECK(attn_run_kv_append(plan.plan, &args, nullptr) == ATTN_OK);
      args.k_new = args.q_out;
      CHECK(attn_run_kv_append(plan.plan, &args, nullptr) == ATTN_INVALID_ARGUMENT);
      CHECK(std::string(attn_last_error()).find("overlaps k_new") != std::string::npos);
    }
  });
}

TEST_CASE("overlap: kv_append of slices of one tensor to slices of another") {
  // New q, k and v [B, T, Hq + 2 Hkv, D], q in place; a cache [B, S, 2, H, D].
  const context host(ATTN_BACKEND_CPU);
  constexpr int64_t batch = 2, tokens = 3, capacity = 8, heads_q = 4, heads = 2, dim = 16;
  constexpr int64_t all = heads_q + 2 * heads;
  std::vector<float> fresh(batch * tokens * all * dim, 1),
      cache(batch * capacity * 2 * heads * dim);
  const std::vector<float> table(capacity * dim / 2);
  const std::vector<int32_t> lengths(batch);
  auto p = make<attn_kv_append_problem>();
  p.batch = batch;
  p.heads_kv = heads;
  p.heads_q = heads_q;
  p.head_dim = p.rotary_dim = dim;
  p.seqlen_new = tokens;
  p.new_type = ATTN_F32;
  p.q_stride = p.q_out_stride = p.k_new_stride =
      p.v_new_stride = {tokens * all * dim, all * dim, dim};
  p.segment = make<attn_segment>();
  p.segment.k_type = p.segment.v_type = ATTN_F32;
  p.segment.has_seqlens = 1;
  p.segment.seqlen = p.rotary_positions = capacity;
  p.segment.k_stride = p.segment.v_stride = {capacity * 2 * heads * dim, 2 * heads * dim, dim};
  auto args = make<attn_kv_append_args>();
  args.cache = make<attn_segment_args>();
  args.q = args.q_out = fresh.data();
  args.k_new = fresh.data() + heads_q * dim;
  args.v_new = fresh.data() + (heads_q + heads) * dim;
  args.cache.k = cache.data();
  args.cache.v = cache.data() + heads * dim;
  args.cache.seqlens = lengths.data();
  args.rotary_cos = args.rotary_sin = table.data();
  Plan plan;
  REQUIRE(attn_plan_create_kv_append(host.get(), &p, &plan.plan) == ATTN_OK);
  CHECK(attn_run_kv_append(plan.plan, &args, nullptr) == ATTN_OK);
  args.v_new = fresh.data() + (heads_q - 1) * dim;
  CHECK(attn_run_kv_append(plan.plan, &args, nullptr) == ATTN_INVALID_ARGUMENT);
}

TEST_CASE("overlap: q, k, v and out as slices of one tensor") {
  // [B, S, 4, H, D]: ranges overlap, elements do not.
  constexpr int64_t batch = 2, length = 7, heads = 3, dim = 16, slot = heads * dim;
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_F32;
  segment.seqlen = length;
  auto p = make<attn_problem>();
  p.batch = batch;
  p.heads_q = p.heads_kv = heads;
  p.head_dim = dim;
  p.seqlen_q = length;
  p.q_type = ATTN_F32;
  p.q_stride = p.out_stride = segment.k_stride =
      segment.v_stride = {length * 4 * slot, 4 * slot, dim};
  p.num_segments = 1;
  p.segments = &segment;
  std::vector<float> want;
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    std::vector<float> all(batch * length * 4 * slot);
    for (size_t n = 0; n < all.size(); ++n) all[n] = float(n * 37 % 101) / 50 - 1;
    const std::vector<float> before = all;
    const context host(backend);
    const plan chosen(host, p);
    const buffer workspace = chosen.make_workspace(host);
    auto kv = make<attn_segment_args>();
    auto args = make<attn_args>();
    args.q = all.data();
    kv.k = all.data() + slot;
    kv.v = all.data() + 2 * slot;
    args.out = all.data() + 3 * slot;
    args.num_segments = 1;
    args.segments = &kv;
    chosen.run(args, workspace);
    size_t wrong = 0;
    for (size_t n = 0; n < all.size(); ++n)
      if (n / slot % 4 != 3) wrong += all[n] != before[n];
    CHECK(wrong == 0);
    if (want.empty()) want = all;
    for (size_t n = 0; n < all.size(); ++n) wrong += std::abs(all[n] - want[n]) > 1e-6f;
    CHECK(wrong == 0);
    // One element further, and out has the first element of the next q.
    args.out = all.data() + 3 * slot + 1;
    CHECK(attn_run(chosen.get(), &args, workspace.data(), workspace.bytes(), nullptr) ==
          ATTN_INVALID_ARGUMENT);
  }
}
