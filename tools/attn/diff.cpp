// attn diff: compares the tensors of two files.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>

#include "attn/io.h"
#include "core/dtype.h"

namespace attn::tools {
namespace {

struct DiffOptions {
  std::string a, b;
  std::vector<std::string> tensors;
  double max_abs = -1, rel_fro = -1;
  bool as_json = false;
};

struct Values {
  std::vector<int64_t> shape;  // in elements, where the file counts bytes of ggml blocks
  std::vector<double> data;
};

template <class T>
void widen(const Tensor& tensor, Values& values) {
  values.data.assign(tensor.as<T>(), tensor.as<T>() + tensor.elements());
}

Values read_values(const TensorFile& file, const std::string& name) {
  const Tensor& tensor = need_tensor(file, name);
  Values values{tensor.shape, {}};
  if (!file.metadata.contains(name)) {
    switch (tensor.dtype) {
      case Dtype::boolean:
      case Dtype::u8:
        widen<uint8_t>(tensor, values);
        return values;
      case Dtype::i8:
        widen<int8_t>(tensor, values);
        return values;
      case Dtype::i16:
        widen<int16_t>(tensor, values);
        return values;
      case Dtype::u16:
        widen<uint16_t>(tensor, values);
        return values;
      case Dtype::i32:
        widen<int32_t>(tensor, values);
        return values;
      case Dtype::u32:
        widen<uint32_t>(tensor, values);
        return values;
      case Dtype::i64:
        widen<int64_t>(tensor, values);
        return values;
      case Dtype::u64:
        widen<uint64_t>(tensor, values);
        return values;
      default:
        break;
    }
  }
  const attn_dtype type = element_type(file, name);
  if (attn::dtype_block(type) > 1)
    values.shape.back() = elements_in(file, name, type, tensor.shape.back());
  values.data.resize(static_cast<size_t>(*element_count(values.shape)));
  attn::decode_row(type, tensor.data.get(), 0, static_cast<int64_t>(values.data.size()),
                   values.data.data());
  return values;
}

struct Difference {
  bool same_shape = true;
  int64_t elements = 0;
  int64_t non_finite_mismatches = 0;
  int64_t first_mismatch = -1, worst = -1;
  double max_abs = 0, mean_abs = 0, rel_fro = 0, cosine = 1;
};

// NaN and infinities must be in the same places; two infinities must have one sign. The numbers are
// over the elements that are finite in both.
Difference compare(const std::vector<double>& a, const std::vector<double>& b) {
  Difference d;
  d.elements = static_cast<int64_t>(a.size());
  double squares = 0, squares_a = 0, squares_b = 0, dot = 0;
  int64_t finite = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i], y = b[i];
    if (!std::isfinite(x) || !std::isfinite(y)) {
      const bool agree = !std::isfinite(x) && !std::isfinite(y) &&
                         (std::isnan(x) || std::isnan(y) || (x > 0) == (y > 0));
      if (agree) continue;
      if (d.non_finite_mismatches++ == 0) d.first_mismatch = static_cast<int64_t>(i);
      continue;
    }
    const double error = std::abs(x - y);
    if (error > d.max_abs) {
      d.max_abs = error;
      d.worst = static_cast<int64_t>(i);
    }
    d.mean_abs += error;
    squares += error * error;
    squares_a += x * x;
    squares_b += y * y;
    dot += x * y;
    ++finite;
  }
  if (finite > 0) d.mean_abs /= static_cast<double>(finite);
  if (squares > 0)
    d.rel_fro =
        squares_b > 0 ? std::sqrt(squares / squares_b) : std::numeric_limits<double>::infinity();
  // Rounding may take the quotient past 1; two zero vectors point the same way.
  if (squares > 0)
    d.cosine = squares_a > 0 && squares_b > 0
                   ? std::clamp(dot / std::sqrt(squares_a) / std::sqrt(squares_b), -1.0, 1.0)
                   : 0;
  return d;
}

// The index of element n, "[0, 3, 1]".
std::string position(int64_t n, const std::vector<int64_t>& shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    index[i] = n % shape[i];
    n /= shape[i];
  }
  return shape_text(index);
}

bool diff(const DiffOptions& options) {
  Progress progress;
  progress.say("reading");
  const TensorFile a = need(read_tensors(options.a)), b = need(read_tensors(options.b));
  std::vector<std::string> names = options.tensors;
  Json only_a = Json::array(), only_b = Json::array();
  if (names.empty()) {
    for (const auto& [name, tensor] : a.tensors) {
      if (b.find(name))
        names.push_back(name);
      else
        only_a.push_back(name);
    }
    for (const auto& [name, tensor] : b.tensors)
      if (!a.find(name)) only_b.push_back(name);
    if (names.empty())
      throw InputError(options.a + " and " + options.b + " have no tensor of the same name");
  }

  for (const std::string& name : names)
    for (const TensorFile* file : {&a, &b}) need_tensor(*file, name);

  bool all_good = true;
  Json rows = Json::object();
  for (const std::string& name : names) {
    progress.say("comparing " + name);
    const Values values_a = read_values(a, name), values_b = read_values(b, name);
    const auto &x = values_a.data, &y = values_b.data;
    const auto &shape = values_a.shape, &shape_b = values_b.shape;
    Difference d;
    d.same_shape = shape == shape_b;
    if (d.same_shape) d = compare(x, y);
    const bool good = d.same_shape && d.non_finite_mismatches == 0 &&
                      (options.max_abs < 0 || d.max_abs <= options.max_abs) &&
                      (options.rel_fro < 0 || d.rel_fro <= options.rel_fro);
    all_good = all_good && good;

    Json row = {{"passed", good}, {"shape_a", shape}, {"shape_b", shape_b}};
    if (d.same_shape) {
      row["max_abs"] = d.max_abs;
      row["mean_abs"] = d.mean_abs;
      row["rel_fro"] = d.rel_fro;
      row["cosine"] = d.cosine;
      row["non_finite_mismatches"] = d.non_finite_mismatches;
    }
    rows[name] = row;
    if (options.as_json) continue;
    progress.say("");
    if (!d.same_shape) {
      std::printf("%s: shape %s against %s\n", name.c_str(), shape_text(shape).c_str(),
                  shape_text(shape_b).c_str());
      continue;
    }
    std::printf("%s %s: max %.3e  mean %.3e  relative Frobenius %.3e  cosine %.9f%s\n",
                name.c_str(), shape_text(shape).c_str(), d.max_abs, d.mean_abs, d.rel_fro, d.cosine,
                good ? "" : "  FAILED");
    if (!good && d.worst >= 0)
      std::printf("  largest at %s: %.9g against %.9g\n", position(d.worst, shape).c_str(),
                  x[static_cast<size_t>(d.worst)], y[static_cast<size_t>(d.worst)]);
    if (d.non_finite_mismatches > 0)
      std::printf("  %lld elements are finite in one file only, the first at %s: %g against %g\n",
                  static_cast<long long>(d.non_finite_mismatches),
                  position(d.first_mismatch, shape).c_str(),
                  x[static_cast<size_t>(d.first_mismatch)],
                  y[static_cast<size_t>(d.first_mismatch)]);
  }
  if (options.as_json) {
    const Json report = {
        {"passed", all_good}, {"tensors", rows}, {"only_a", only_a}, {"only_b", only_b}};
    std::cout << report.dump(2) << "\n";
  } else {
    for (const auto& [only, path] :
         {std::pair(&only_a, &options.a), std::pair(&only_b, &options.b)})
      for (const Json& name : *only)
        std::printf("%s: only in %s\n", name.get<std::string>().c_str(), path->c_str());
  }
  return all_good;
}

}  // namespace

void add_diff(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("diff", "Compare the tensors of A with those of B");
  auto o = std::make_shared<DiffOptions>();
  command->add_option("A", o->a)->required();
  command->add_option("B", o->b, "what is right")->required();
  command->add_option("--tensor", o->tensors, "only this one; may be repeated")
      ->type_name("NAME")
      ->expected(1)
      ->take_all();
  command->add_option("--max-abs", o->max_abs, "fail above this difference")
      ->check(CLI::NonNegativeNumber)
      ->type_name("X");
  command->add_option("--rel-fro", o->rel_fro, "fail above this relative Frobenius norm")
      ->check(CLI::NonNegativeNumber)
      ->type_name("X");
  add_json(*command, o->as_json);
  command->callback([o, &exit_code] {
    for (const auto& [name, bound] :
         {std::pair("--max-abs", o->max_abs), {"--rel-fro", o->rel_fro}})
      if (std::isnan(bound)) throw InputError(std::string(name) + " is nan; a number is accepted");
    if (!diff(*o)) exit_code = exit_failed;
  });
}

}  // namespace attn::tools
