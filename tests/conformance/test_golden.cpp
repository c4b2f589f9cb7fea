// The reference against values that NumPy made (tests/golden/make_golden.py), read as `attn run`
// reads its input.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "../catch.h"
#include "attn/io.h"

namespace attn::tools {
namespace {

using nlohmann::json;

std::string golden_path(const std::string& file) {
  return std::string(ATTN_GOLDEN_DIR) + "/" + file;
}

json index_of_cases() {
  std::ifstream file(golden_path("index.json"));
  REQUIRE(file);
  return json::parse(file);
}

TensorFile read_case(const std::string& name) {
  auto file = read_tensors(golden_path(name + ".safetensors"));
  if (!file) FAIL(file.error());
  REQUIRE(file->find("golden.out"));
  REQUIRE(file->find("golden.lse"));
  return std::move(*file);
}

void apply_options(const json& options, attn_problem& p) {
  for (const auto& [key, value] : options.items()) {
    if (key == "causal") {
      if (value.get<bool>()) p.flags |= ATTN_CAUSAL;
    } else if (key == "causal_top_left") {
      if (value.get<bool>()) p.flags |= ATTN_CAUSAL_TOP_LEFT;
    } else if (key == "window") {
      p.flags |= ATTN_WINDOW;
      p.window_left = value.at(0);
      p.window_right = value.at(1);
    } else if (key == "scale") {
      p.scale = value;
    } else if (key == "softcap") {
      p.softcap = value;
    } else if (key == "descale_block_keys") {
      for (int n = 0; n < p.num_segments; ++n) {
        CHECK(p.segments[n].descale_block_keys == value.get<int32_t>());
      }
    } else {
      FAIL("option " << key << " is unknown");
    }
  }
}

// Largest difference; NaN and infinities must stand where they are expected.
template <class Real>
double worst(const std::vector<Real>& got, const Tensor& want) {
  REQUIRE(want.dtype == Dtype::f64);
  REQUIRE(int64_t(got.size()) == want.elements());
  double result = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    const double expected = want.as<double>()[n];
    if (double(got[n]) == expected || (std::isnan(got[n]) && std::isnan(expected))) continue;
    const double difference = std::abs(double(got[n]) - expected);
    result = difference <= result ? result : difference;
    if (std::isnan(difference)) return INFINITY;
  }
  return result;
}

// lse is stored as float32: half a unit in its last place, and the rounding of a sum in double.
void check_lse(const std::vector<float>& got, const Tensor& want) {
  REQUIRE(int64_t(got.size()) == want.elements());
  size_t wrong = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    const double expected = want.as<double>()[n];
    if (got[n] == float(expected) || (std::isnan(got[n]) && std::isnan(expected))) continue;
    const float nearest = float(expected);
    const double ulp = std::nextafter(std::abs(nearest), INFINITY) - std::abs(nearest);
    wrong += !(std::abs(got[n] - expected) <= 0.5000001 * ulp);
  }
  CHECK(wrong == 0);
}

template <class Out>
void check_forward(const context& device, const std::string& name, double bound) {
  const auto input = make_input(read_case(name));
  attn_problem& p = input->problem;
  apply_options(json::parse(input->file.metadata.at("options")), p);
  const Tensor& want_out = *input->file.find("golden.out");
  const Tensor& want_lse = *input->file.find("golden.lse");
  p.out_type = sizeof(Out) == 8 ? ATTN_F64 : ATTN_F32;
  // Everything that the case has must mean something to the reader.
  for (const std::string& unused : input->unused) CHECK(unused.starts_with("golden."));

  Arrays arrays(device);
  input->stage(arrays);
  std::vector<Out> out(size_t(want_out.elements()), Out(NAN));
  std::vector<float> lse(size_t(want_lse.elements()), NAN);
  input->args.out = arrays.copy_of(out.data(), out.size() * sizeof(Out));
  input->args.lse = static_cast<float*>(arrays.copy_of(lse.data(), lse.size() * sizeof(float)));
  const plan chosen(device, p);
  chosen.check_args(input->args);
  const uint64_t launches = attn_launch_count("reference");
  chosen.run(input->args, chosen.make_workspace(device));
  REQUIRE(attn_launch_count("reference") > launches);
  copy_out(device, out.data(), input->args.out, out.size() * sizeof(Out));
  copy_out(device, lse.data(), input->args.lse, lse.size() * sizeof(float));
  CHECK(worst(out, want_out) < bound);
  check_lse(lse, want_lse);
}

void check_merge(const context& device, const std::string& name) {
  const TensorFile file = read_case(name);
  const Tensor& want_out = *file.find("golden.out");
  const Tensor& want_lse = *file.find("golden.lse");
  const bool packed = want_out.shape.size() == 3;
  auto p = make<attn_merge_problem>();
  p.batch = packed ? 1 : want_out.shape[0];
  p.seqlen_q = want_out.shape[packed ? 0 : 1];
  p.heads_q = want_out.shape[packed ? 1 : 2];
  p.head_dim_v = want_out.shape.back();
  p.part_type = element_type(file, "out.0");
  p.out_type = ATTN_F32;
  std::vector<const void*> outs;
  std::vector<const float*> lses;
  for (; file.find("out." + std::to_string(p.num_parts)); ++p.num_parts) {
    outs.push_back(file.find("out." + std::to_string(p.num_parts))->data.get());
    lses.push_back(file.find("lse." + std::to_string(p.num_parts))->as<float>());
  }
  std::vector<float> out(size_t(want_out.elements()), NAN), lse(size_t(want_lse.elements()), NAN);
  auto args = make<attn_merge_args>();
  args.num_parts = p.num_parts;
  args.outs = outs.data();
  args.lses = lses.data();
  args.out = out.data();
  args.lse = lse.data();
  const uint64_t launches = attn_launch_count("merge_reference");
  plan(device, p).run(args);
  REQUIRE(attn_launch_count("merge_reference") > launches);
  CHECK(worst(out, want_out) < 1e-6);
  check_lse(lse, want_lse);
}

TEST_CASE("golden: the reference agrees with NumPy on every case of the index") {
  const context device(ATTN_BACKEND_REFERENCE);
  const json index = index_of_cases();
  CHECK(index.size() >= 100);
  for (const auto& [name, description] : index.items()) {
    INFO(name << ": " << description.get<std::string>());
    try {
      if (name.starts_with("merge_")) {
        check_merge(device, name);
      } else {
        check_forward<double>(device, name, 1e-12);
        check_forward<float>(device, name, 1e-6);
      }
    } catch (const std::exception& error) {  // the reader's and attn.hpp's
      FAIL_CHECK(error.what());
    }
  }
}

}  // namespace
}  // namespace attn::tools
