// Accuracy and repeatability on a device; the numbers are printed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "catch.h"
#include "conformance/formula.h"
#include "conformance/head_dims.h"
#include "core/dtype.h"
#include "cuda.h"

namespace attn::test {
namespace {

void print(const std::string& line) {
  std::cout << line << std::endl;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", x);
  return text;
}

std::vector<const Kernel*> cuda_fp8_kernels() {
  std::vector<const Kernel*> found = kernels_here(Op::forward, false);
  std::erase_if(found, [](const Kernel* k) {
    return k->backend != ATTN_BACKEND_CUDA || !(k->limits.in_types & type_bit(ATTN_F8_E4M3FN));
  });
  return found;
}
// A problem in the kernel's types and largest head dimension; a block mask shows all. Two query
// heads have a K/V head, which all kernels take.
Case fp8_case(const Kernel& kernel, const std::string& name, int64_t seqlen_q, int64_t seqlen_kv) {
  Case c;
  c.name = name;
  c.heads_q = 2;
  c.seqlen_q = seqlen_q;
  c.head_dim = c.head_dim_v = kernel.limits.head_dim.max;
  c.q_type = ATTN_F8_E4M3FN;
  c.out_type = ATTN_F32;
  SegmentCase s;
  const bool e4m3 = kernel.limits.kv_types & type_bit(ATTN_F8_E4M3FN);
  s.k_type = s.v_type = e4m3 ? ATTN_F8_E4M3FN : ATTN_F8_E5M2;
  s.capacity = seqlen_kv;
  c.segments = {s};
  if (kernel.limits.demands & ATTN_BLOCK_MASK) {
    c.flags = ATTN_BLOCK_MASK;
    c.mask_kinds = {ATTN_BLOCK_FULL};
  }
  return c;
}

TEST_CASE("accuracy: B1 H4 S1024 D128 at sigma 0.5") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  struct Kind {
    attn_dtype type;
    int64_t group;  // 2 for kernels that take no 1
  };
  for (const auto [type, group] :
       {Kind{ATTN_F16, 1}, {ATTN_BF16, 1}, {ATTN_F16, 2}, {ATTN_BF16, 2}}) {
    for (const char* mask : {"full", "causal", "window 256"}) {
      Case c;
      c.name = std::string(dtype_name(type)) + " " + mask;
      c.heads_q = 4;
      c.heads_kv = 4 / group;
      c.head_dim = c.head_dim_v = 128;
      c.seqlen_q = 1024;
      c.sigma = 0.5;
      c.q_type = c.out_type = type;
      SegmentCase s;
      s.k_type = s.v_type = type;
      s.capacity = 1024;
      c.segments = {s};
      if (mask[0] == 'c') c.flags = ATTN_CAUSAL;
      if (mask[0] == 'w') c.flags = ATTN_WINDOW, c.window_left = 256, c.window_right = 0;
      const Data data = make_data(c);
      const Outputs want = reference_answer(c, data);
      std::map<Rounding, Outputs> rounded;
      for (const Kernel* kernel : kernels) {
        if (kernel->limits.group.multiple != group) continue;
        const Outputs got =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " " << c.name);
        REQUIRE(got.error == "");
        const Rounding as = rounding_of(c, kernel->numerics);
        Outputs& ideal_out = rounded[as];
        if (ideal_out.out.empty()) ideal_out = rounded_formula(c, data, as);
        const Distance error = distance(got, want), ideal = distance(ideal_out, want);
        print("accuracy: " + c.name + ": " + kernel->name + ": max " + number(error.max) +
              " mean " + number(error.mean) + "; rounding P and out alone: max " +
              number(ideal.max) + " mean " + number(ideal.mean));
        CHECK(compare_with_rounded(c, data, got, want, ideal_out) == "");
        CHECK(error.mean <= 2 * ideal.mean);
        if (type != ATTN_F16) continue;
        CHECK(error.max < 1e-3);
        CHECK(error.mean < 1e-5);
      }
    }
  }
}

// `whole` in as many segments, of any sizes, packed and padded by turns.
Case in_parts(const Case& whole, int parts) {
  Case cut = whole;
  cut.segments.clear();
  int64_t left = whole.segments[0].capacity;
  for (int n = 0; n < parts; ++n) {
    SegmentCase s = whole.segments[0];
    s.capacity = n + 1 == parts ? left : int64_t(hash(7, uint64_t(parts), uint64_t(n)) % 400);
    s.capacity = std::clamp<int64_t>(s.capacity, 1, left - (parts - 1 - n));
    s.layout = n % 2 ? ATTN_PACKED : ATTN_PADDED;
    s.lengths = {int32_t(s.capacity)};
    left -= s.capacity;
    cut.segments.push_back(s);
  }
  return cut;
}

TEST_CASE("accuracy: K/V in 2 to 5 segments against uncut") {
  // Kernels that take the same problems share them: to make one takes longer than to run it.
  std::map<std::string, std::vector<const Kernel*>> alike;
  for (const Kernel* kernel : cuda_forward_kernels())
    if ((kernel->limits.flags & ATTN_SPLIT_INVARIANT) && !kernel->limits.demands)
      alike[describe(case_for(*kernel, "whole", 1, 200, 1024))].push_back(kernel);
  if (alike.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  int ran = 0;
  for (const auto& [problem, kernels] : alike) {
    for (const double sigma : {0.5, 1.0, 3.0}) {
      Case whole = case_for(*kernels[0], "whole", 1, 200, 1024);
      whole.sigma = sigma;
      whole.out_type = ATTN_F32;
      whole.flags = ATTN_CAUSAL | ATTN_SPLIT_INVARIANT;
      const Data data = make_data(whole);
      std::vector<std::pair<Case, Data>> cuts;
      for (int parts = 2; parts <= 5; ++parts) {
        const Case cut = in_parts(whole, parts);
        cuts.emplace_back(cut, make_data(cut));
      }
      for (const Kernel* kernel : kernels) {
        Backend& backend = backend_of(kernel->backend);
        const Outputs uncut = run_forward(backend, whole, data, kernel->name, ATTN_F32);
        if (declined(*kernel, uncut)) continue;
        REQUIRE(uncut.error == "");
        double worst = 0;
        for (const auto& [cut, cut_data] : cuts) {
          const Outputs got = run_forward(backend, cut, cut_data, kernel->name, ATTN_F32);
          INFO(kernel->name << " " << describe(cut));
          if (declined(*kernel, got)) continue;
          REQUIRE(got.error == "");
          ++ran;
          const double error = distance(got, uncut).max;
          CHECK(error < 1e-4);
          for (size_t n = 0; n < got.lse.size(); ++n)
            REQUIRE(std::abs(got.lse[n] - uncut.lse[n]) < 1e-4);
          worst = std::max(worst, error);
        }
        print("accuracy: " + std::string(kernel->name) + " in 2 to 5 segments, sigma " +
              std::to_string(sigma).substr(0, 3) + ": max " + number(worst) + " from uncut");
      }
    }
  }
  CHECK(ran > 0);
}

// All weights of a row are equal, so that none is rounded and out is the mean of V. The matrix unit
// cuts fp8 products to some 13 bits of the sum they meet; what a tile adds to the others may not
// grow with their number (docs/numerics.md).
TEST_CASE("accuracy: fp8 sums at every length") {
  int ran = 0;
  std::map<std::tuple<attn_dtype, int64_t, uint32_t, int64_t>, Data> made;  // which takes long
  for (const Kernel* kernel : cuda_fp8_kernels()) {
    for (int64_t keys : {1024, 8192, 32768}) {
      for (bool positive : {true, false}) {
        const Case c = fp8_case(*kernel, "sums", 64, keys);
        const auto [found, is_new] =
            made.try_emplace({c.segments[0].v_type, c.head_dim, c.flags, keys});
        if (is_new) found->second = make_data(c);
        Data data = found->second;
        std::fill_n(data.q.data(), data.q.size(), 0);
        Buffer& v = data.segments[0].v;
        std::vector<double> mean(size_t(c.head_dim_v));
        for (int64_t j = 0; j < keys; ++j) {
          const int64_t row = data.segments[0].v_view.at(0, j, 0);
          for (int64_t d = 0; d < c.head_dim_v; ++d) {
            if (positive) v.data()[row + d] &= 0x7f;
            mean[size_t(d)] +=
                decode_element(c.segments[0].v_type, v.data(), row + d) / double(keys);
          }
        }
        const Outputs got =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " keys " << keys << " positive " << positive);
        REQUIRE(got.error == "");
        double error2 = 0, mean2 = 0;
        for (size_t n = 0; n < got.out.size(); ++n) {
          const double want = mean[n % mean.size()];
          error2 += (got.out[n] - want) * (got.out[n] - want);
          mean2 += want * want;
        }
        const double error = std::sqrt(error2 / mean2);
        print("accuracy: " + std::string(kernel->name) + ": sums of " + std::to_string(keys) +
              (positive ? " positive" : " signed") + " values: " + number(error));
        CHECK(error < 1e-3);
        ++ran;
      }
    }
  }
  if (ran == 0) ATTN_SKIP("no CUDA device here has FP8 kernels");
}

// docs/numerics.md, "FP8 weights".
TEST_CASE("accuracy: fp8 at sigma 0.5 to 3") {
  const auto kernels = cuda_fp8_kernels();
  if (kernels.empty()) ATTN_SKIP("no CUDA device here has FP8 kernels");
  int precise = 0;
  for (int64_t head_dim : largest_head_dims(type_bit(ATTN_F8_E4M3FN))) {
    for (double sigma : {0.5, 1.0, 3.0}) {
      Data data;
      Outputs want;
      for (const Kernel* kernel : kernels) {
        if (kernel->limits.head_dim.max != head_dim ||
            !(kernel->limits.kv_types & type_bit(ATTN_F8_E4M3FN)))
          continue;
        Case c = fp8_case(*kernel, "sigma", 1024, 1024);
        c.sigma = sigma;
        if (want.out.empty()) {
          Case plain = c;
          plain.flags = 0;
          plain.mask_kinds.clear();
          data = make_data(plain);
          want = reference_answer(plain, data);
        }
        const Outputs got = run_forward(backend_of(kernel->backend), c,
                                        c.flags ? make_data(c) : data, kernel->name, ATTN_F32);
        INFO(kernel->name << " sigma " << sigma);
        REQUIRE(got.error == "");
        double error2 = 0, want2 = 0;
        for (size_t n = 0; n < want.out.size(); ++n) {
          error2 += (got.out[n] - want.out[n]) * (got.out[n] - want.out[n]);
          want2 += want.out[n] * want.out[n];
        }
        const double error = std::sqrt(error2 / want2);
        print("accuracy: " + std::string(kernel->name) + " at sigma " +
              std::to_string(sigma).substr(0, 3) + ": relative Frobenius " + number(error));
        const bool two_values = kernel->numerics.weight_parts > 1;
        // What scores lose is more the larger they are.
        CHECK(error < (!two_values ? 3e-2 : sigma > 1 ? 2.5e-3 : 1e-3));
        precise += two_values;
      }
    }
  }
  CHECK(precise > 0);
}

TEST_CASE("accuracy: 100 runs give the same bits") {
  auto kernels = cuda_forward_kernels();
  const auto fp8 = cuda_fp8_kernels();
  if (kernels.empty() && fp8.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  kernels.insert(kernels.end(), fp8.begin(), fp8.end());
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    const bool takes_fp8 = kernel->limits.in_types & type_bit(ATTN_F8_E4M3FN);
    Case c = takes_fp8 ? fp8_case(*kernel, "repeat", 300, 700)
                       : case_for(*kernel, "repeat", 2, 300, 700);
    c.batch = 2;
    c.flags |= ATTN_CAUSAL;
    c.segments[0].lengths = {700, 433};
    ran += repeat(*kernel, c, make_data(c), 100);
  }
  CHECK(ran > 0);
}

}  // namespace
}  // namespace attn::test
