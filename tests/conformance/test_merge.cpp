// The body of the merge operation, for every kernel of the catalog that runs here.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "random_families.h"

namespace attn::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

struct MergeCase {
  int64_t batch = 2, heads = 3, seqlen = 5, dim = 64;
  int32_t parts = 3;
  attn_dtype part_type = ATTN_F32, out_type = ATTN_F32;
  Arrange arrange = Arrange::contiguous;
  uint64_t seed = 1;
  bool want_lse = true;
  // Of every `empty` parts of a row about one has lse -inf and out NaN, which nobody may use.
  uint64_t empty = 4;
};

// Runs the case on one kernel; "" or what is wrong. false in *ran: the kernel does not take the
// types.
std::string run_merge_case(const MergeCase& c, const Kernel& kernel, bool* ran) {
  Backend& backend = backend_of(kernel.backend);
  int64_t part_elements, out_elements;
  const View part_view =
      arrange_view(c.part_type, c.arrange, c.batch, c.seqlen, c.heads, c.dim, &part_elements);
  const View out_view =
      arrange_view(c.out_type, c.arrange, c.batch, c.seqlen, c.heads, c.dim, &out_elements);
  const int64_t rows = c.batch * c.heads * c.seqlen;
  std::vector<Buffer> outs, lses;
  std::vector<double> want(size_t(rows * c.dim)), want_lse;
  for (int32_t s = 0; s < c.parts; ++s) {
    outs.emplace_back(size_t(dtype_bytes(c.part_type, part_elements)), 0xff);
    lses.emplace_back(size_t(rows) * 4, 0xff);
  }
  double worst_value = 1;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / c.seqlen / c.heads, h = row / c.seqlen % c.heads, i = row % c.seqlen;
    std::vector<double> lse, values;
    double max = -infinity;
    for (int32_t s = 0; s < c.parts; ++s) {
      const uint64_t r = hash(c.seed, s, row);
      const float value = c.empty && r % c.empty == 0 ? -infinity : float(3 * normal(r));
      lses[s].as<float>()[row] = value;
      lse.push_back(value);
      max = std::max(max, lse.back());
      for (int64_t d = 0; d < c.dim; ++d) {
        if (value == -infinity) {
          values.push_back(0);
          continue;
        }
        encode_element(c.part_type, outs[s].data(), part_view.at(b, i, h) + d,
                       normal(hash(c.seed, s, row, d, 1)), false);
        values.push_back(decode_element(c.part_type, outs[s].data(), part_view.at(b, i, h) + d));
        worst_value = std::max(worst_value, std::abs(values.back()));
      }
    }
    double sum = 0;
    for (double l : lse) sum += l == -infinity ? 0 : std::exp(l - max);
    want_lse.push_back(sum == 0 ? -infinity : max + std::log(sum));
    for (int64_t d = 0; d < c.dim; ++d) {
      double x = 0;
      for (int32_t s = 0; s < c.parts; ++s) {
        if (lse[s] != -infinity) x += std::exp(lse[s] - max) / sum * values[size_t(s * c.dim + d)];
      }
      want[size_t(row * c.dim + d)] = x;
    }
  }

  attn_merge_problem p{};
  p.struct_size = sizeof p;
  p.batch = c.batch;
  p.heads_q = c.heads;
  p.seqlen_q = c.seqlen;
  p.head_dim_v = c.dim;
  p.num_parts = c.parts;
  p.part_type = c.part_type;
  p.out_type = c.out_type;
  p.part_stride = part_view.given;
  p.out_stride = out_view.given;
  p.kernel = kernel.name;
  attn_plan* made = nullptr;
  const attn_status status = attn_plan_create_merge(backend.context, &p, &made);
  *ran = status != ATTN_UNSUPPORTED;
  if (status == ATTN_UNSUPPORTED) return "";
  if (status != ATTN_OK) return attn_last_error();
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);

  Arena arena(backend.context);
  const Buffer out(size_t(dtype_bytes(c.out_type, out_elements)), 0xff);
  const Buffer lse = c.want_lse ? Buffer(size_t(rows) * 4, 0xff) : Buffer();
  std::vector<const void*> out_pointers;
  std::vector<const float*> lse_pointers;
  for (int32_t s = 0; s < c.parts; ++s) {
    out_pointers.push_back(address_of(arena.add(outs[s]), part_view));
    lse_pointers.push_back(static_cast<float*>(arena.add(lses[s])));
  }
  attn_merge_args args{};
  args.struct_size = sizeof args;
  args.num_parts = c.parts;
  args.outs = out_pointers.data();
  args.lses = lse_pointers.data();
  void* const out_data = arena.add(out);
  args.out = address_of(out_data, out_view);
  args.lse = static_cast<float*>(arena.add(lse));
  const uint64_t launches = attn_launch_count(kernel.name);
  if (attn_run_merge(plan.get(), &args, nullptr) != ATTN_OK) return attn_last_error();
  if (attn_synchronize(backend.context, nullptr) != ATTN_OK) return attn_last_error();
  if (attn_launch_count(kernel.name) <= launches) return "not launched";
  if (std::string error = arena.check_unchanged({out_data, args.lse}); !error.empty()) return error;

  Buffer got = arena.fetch(out, out_data), got_lse = arena.fetch(lse, args.lse);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / c.seqlen / c.heads, h = row / c.seqlen % c.heads, i = row % c.seqlen;
    for (int64_t d = 0; d < c.dim; ++d) {
      const double x = decode_element(c.out_type, got.data(), out_view.at(b, i, h) + d);
      const double expected = want[size_t(row * c.dim + d)];
      const double bound =
          1e-6 * worst_value + (c.out_type == ATTN_F32 ? 0 : 2 * half_ulp(c.out_type, expected));
      if (!(std::abs(x - expected) <= bound)) {
        return "out of row " + std::to_string(row) + " d " + std::to_string(d) + " is " +
               std::to_string(x) + ", expected " + std::to_string(expected);
      }
      std::memset(got.data() + dtype_bytes(c.out_type, out_view.at(b, i, h) + d), 0xff,
                  size_t(dtype_bytes(c.out_type)));
    }
    if (!c.want_lse) continue;
    float& x = got_lse.as<float>()[row];
    const double expected = want_lse[size_t(row)];
    if (!(x == expected || std::abs(x - expected) <= 2e-6 * std::max(1.0, std::abs(expected)))) {
      return "lse of row " + std::to_string(row) + " is " + std::to_string(x) + ", expected " +
             std::to_string(expected);
    }
    std::memset(&x, 0xff, 4);
  }
  if (got.bytes != out.bytes) return "bytes outside the rows of out were written";
  if (got_lse.bytes != lse.bytes) return "bytes outside lse were written";
  return "";
}

bool check_merge(const MergeCase& c, const Kernel& kernel) {
  INFO(kernel.name << " B" << c.batch << " H" << c.heads << " S" << c.seqlen << " D" << c.dim
                   << " parts " << c.parts << " " << dtype_name(c.part_type) << " -> "
                   << dtype_name(c.out_type) << " arrange " << int(c.arrange) << " seed "
                   << c.seed);
  bool ran = false;
  CHECK(run_merge_case(c, kernel, &ran) == "");
  return ran;
}

MergeCase random_merge(uint64_t seed) {
  Draw draw{seed, 401};
  MergeCase c;
  c.seed = seed;
  c.batch = 1 + draw(3);
  c.heads = 1 + draw(4);
  c.seqlen = draw(12);
  c.dim = draw.chance(2) ? 8 * (1 + draw(40)) : 1 + draw(300);
  c.parts = 1 + int32_t(draw.chance(4) ? draw(40) : draw(6));
  constexpr attn_dtype types[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
  c.part_type = draw.pick(types);
  c.out_type = draw.pick(types);
  constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major,
                                  Arrange::reversed, Arrange::flipped};
  c.arrange = draw.pick(arranges);
  c.want_lse = !draw.chance(4);
  c.empty = draw(6);
  return c;
}

const AddRandomOperation added("merge", [](uint64_t seed) {
  int ran = 0;
  for (const Kernel* kernel : emulated_kernels(Op::merge))
    ran += check_merge(random_merge(seed), *kernel);
  return ran;
});

TEST_CASE("merge: shapes, types and strides") {
  for (const Kernel* kernel : kernels_here(Op::merge, true)) {
    const auto check = [&](const MergeCase& c, bool runs = true) {
      const bool ran = check_merge(c, *kernel);
      if (kernel->host || !runs) CHECK(ran == runs);
    };
    for (attn_dtype part : {ATTN_F32, ATTN_F16, ATTN_BF16}) {
      for (attn_dtype out : {ATTN_F32, ATTN_F16, ATTN_BF16}) {
        MergeCase c;
        c.part_type = part;
        c.out_type = out;
        check(c);
      }
    }
    for (int64_t dim : {1, 7, 8, 64, 127, 128, 129, 256, 300}) {
      for (int32_t parts : {1, 2, 5, 33}) {
        MergeCase c;
        c.dim = dim;
        c.parts = parts;
        c.seed = uint64_t(dim * 100 + parts);
        check(c);
        c.arrange = Arrange::reversed;
        check(c, kernel->host != nullptr);
        if (dim % 8 == 0) {
          c.arrange = Arrange::padded;
          check(c);
          c.arrange = Arrange::head_major;
          check(c);
          c.arrange = Arrange::flipped;
          check(c, kernel->host != nullptr);
        }
      }
    }
    MergeCase c;
    c.want_lse = false;
    check(c);
    c.seqlen = 0;
    check(c);
    c.seqlen = 1;
    c.heads = 1;
    c.batch = 1;
    check(c);
  }
}

// L2: max lse = -inf must not reach exp(-inf - -inf).
TEST_CASE("L2: merging empty parts gives 0 and -inf") {
  for (const Kernel* kernel : kernels_here(Op::merge, true)) {
    MergeCase c;
    c.empty = 1;
    for (int32_t parts : {1, 2, 7}) {
      c.parts = parts;
      bool ran = false;
      INFO(kernel->name << " parts " << parts);
      CHECK(run_merge_case(c, *kernel, &ran) == "");
    }
  }
}

// Parts computed by forward from pieces of KV, merged, are the answer for the whole.
TEST_CASE("merge: forward over pieces, merged, is forward over the whole") {
  for (const Kernel* kernel : kernels_here(Op::merge, true)) {
    Backend& backend = backend_of(kernel->backend);
    if (!kernel->host) continue;
    const char* forward = nullptr;
    for (const Kernel* k : kernels_here(Op::forward, true)) {
      if (k->backend == kernel->backend && !forward) forward = k->name;
    }
    REQUIRE(forward != nullptr);
    Case whole;
    whole.name = "merge-pieces";
    whole.seqlen_q = 9;
    whole.segments.resize(1);
    whole.segments[0].capacity = 100;
    const Outputs want = reference_answer(whole, make_data(whole));
    // Pieces of the same keys: a window per piece leaves lse of each piece alone.
    std::vector<Outputs> parts;
    for (int64_t piece = 0; piece < 2; ++piece) {
      Case c = whole;
      c.flags = ATTN_BLOCK_MASK;
      c.block_q = 64;
      c.block_k = 64;
      Data data = make_data(whole);
      const std::vector<uint8_t> kinds = {uint8_t(piece == 0 ? 2 : 0), uint8_t(piece == 1 ? 2 : 0)};
      data.kinds = Buffer(2, 0xff);
      std::copy(kinds.begin(), kinds.end(), data.kinds.data());
      data.index = Buffer(8, 0xff);
      data.bits = Buffer(64 * 2 * 4, 0);
      data.num_partials = 1;
      parts.push_back(run_forward(backend, c, data, forward, ATTN_F32));
      REQUIRE(parts.back().error == "");
    }
    attn_merge_problem p{};
    p.struct_size = sizeof p;
    p.batch = 1;
    p.heads_q = 1;
    p.seqlen_q = 9;
    p.head_dim_v = 64;
    p.num_parts = 2;
    p.part_type = ATTN_F32;
    p.kernel = kernel->name;
    attn_plan* plan = nullptr;
    REQUIRE(attn_plan_create_merge(backend.context, &p, &plan) == ATTN_OK);
    std::vector<std::vector<float>> lse;
    for (const Outputs& part : parts) lse.emplace_back(part.lse.begin(), part.lse.end());
    const void* outs[] = {parts[0].bits.data(), parts[1].bits.data()};
    const float* lses[] = {lse[0].data(), lse[1].data()};
    std::vector<float> out(9 * 64, NAN), merged(9, NAN);
    attn_merge_args args{sizeof(attn_merge_args), 2, outs, lses, out.data(), merged.data()};
    REQUIRE(attn_run_merge(plan, &args, nullptr) == ATTN_OK);
    attn_plan_destroy(plan);
    INFO(kernel->name);
    for (size_t n = 0; n < out.size(); ++n) REQUIRE(std::abs(out[n] - want.out[n]) < 2e-6);
    for (size_t n = 0; n < merged.size(); ++n) REQUIRE(std::abs(merged[n] - want.lse[n]) < 2e-6);
  }
}

}  // namespace
}  // namespace attn::test
