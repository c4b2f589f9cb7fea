#include "fp8_stress/cases.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>

#include "core/dtype.h"

namespace attn::tools {
namespace {

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
double uniform(uint64_t random) {  // [0, 1)
  return static_cast<double>(random >> 11) * 0x1p-53;
}
double normal(uint64_t random) {  // Box-Muller
  return std::sqrt(-2 * std::log(1 - uniform(random))) *
         std::cos(2 * std::numbers::pi * uniform(mixed(random)));
}

Fill normal_fill(double sigma) {
  return [=](const Place& at) { return sigma * normal(at.random); };
}
Fill one_hot_fill(double amplitude) {
  return [=](const Place& at) { return at.column == at.row % at.columns ? amplitude : 0; };
}

enum class Pattern { uniform, row, column, random };
constexpr const char* pattern_names[] = {"uniform", "row", "column", "random"};

Fill pattern_fill(Pattern pattern, double amplitude) {
  const auto part = [](int64_t index, int64_t count) {
    return static_cast<double>(index) / static_cast<double>(std::max<int64_t>(count - 1, 1));
  };
  switch (pattern) {
    case Pattern::uniform:
      return [=](const Place&) { return amplitude; };
    case Pattern::row:
      return [=](const Place& at) { return amplitude * part(at.row, at.rows); };
    case Pattern::column:
      return [=](const Place& at) { return amplitude * part(at.column, at.columns); };
    case Pattern::random:
      break;
  }
  return normal_fill(std::min(amplitude, 3.0));
}

// All keys 0 but one per head, whose score is `nats` for each query. Queries are 1; the sum of that
// key's elements, in units of 1/16, is spread so that no two differ by more than one unit.
StressCase sink_case(int64_t seqlen_q, int64_t seqlen_kv, int nats) {
  StressCase c;
  c.name = "sink/" + std::to_string(nats) + "/" + std::to_string(seqlen_kv);
  c.seqlen_q = seqlen_q;
  c.seqlen_kv = seqlen_kv;
  c.q = [](const Place&) { return 1; };
  c.k = [nats](const Place& at) -> double {
    // First, last and two odd places: in the first and last tile and in the middle.
    const int64_t sinks[] = {0, at.rows - 1, at.rows * 5 / 13, at.rows * 11 / 17};
    if (at.row != sinks[at.head % 4]) return 0;
    const auto units = std::llround(16 * nats * std::sqrt(static_cast<double>(at.columns)));
    const auto before = [&](int64_t column) { return units * column / at.columns; };
    return static_cast<double>(before(at.column + 1) - before(at.column)) / 16;
  };
  c.v = normal_fill(1);
  return c;
}

std::vector<uint8_t> codes(const Fill& fill, int64_t rows, const StressOptions& options,
                           attn_dtype type, const char* tensor) {
  const int64_t heads = options.heads, columns = options.head_dim;
  std::vector<uint8_t> result(static_cast<size_t>(rows * heads * columns));
  const uint64_t stream = mixed(mixed(options.seed) + static_cast<uint64_t>(tensor[0]));
  const double most = attn::type_info(type).max_finite;
  size_t index = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t column = 0; column < columns; ++column, ++index) {
        const auto x =
            static_cast<float>(fill({head, row, column, rows, columns, mixed(stream + index)}));
        if (!(std::abs(x) <= most))
          throw std::logic_error(std::string(tensor) + " has " + std::to_string(x) +
                                 ", which is beyond " + attn::dtype_name(type));
        result[index] = static_cast<uint8_t>(attn::encode(attn::fp8_format(type), x, false));
      }
    }
  }
  return result;
}

}  // namespace

std::vector<StressCase> stress_cases(const StressOptions& options) {
  std::vector<StressCase> cases;
  const auto add = [&](const std::string& name, const Fill& q, const Fill& k, const Fill& v) {
    cases.push_back({name, options.seqlen, options.seqlen, q, k, v});
  };
  const auto add_same = [&](const std::string& name, const Fill& fill) {
    add(name, fill, fill, fill);
  };
  add_same("normal/0.01", normal_fill(0.01));
  add_same("normal/0.5", normal_fill(0.5));
  add_same("normal/1", normal_fill(1));
  add_same("normal/3", normal_fill(3));
  add_same("uniform/0..1", [](const Place& at) { return uniform(at.random); });
  add_same("uniform/-1..1", [](const Place& at) { return 2 * uniform(at.random) - 1; });
  add_same("positive", [](const Place& at) { return std::abs(normal(at.random)); });
  add_same("sparse", [](const Place& at) {
    return uniform(mixed(~at.random)) < 0.2 ? normal(at.random) : 0;
  });
  for (const int amplitude : {1, 4}) {
    const Fill hot = one_hot_fill(amplitude);
    const std::string name = "one-hot/" + std::to_string(amplitude);
    add(name + "/one-hot", hot, hot, hot);
    add(name + "/random", hot, hot, normal_fill(1));
  }
  for (const int amplitude : {1, 16}) {
    add_same("sequential/" + std::to_string(amplitude), [=](const Place& at) {
      return amplitude * static_cast<double>(at.row * at.columns + at.column) /
             static_cast<double>(at.rows * at.columns);
    });
  }
  for (const int nats : {6, 8, 10})
    for (const int seqlen_kv : {512, 4096, 16384})
      cases.push_back(sink_case(options.seqlen, seqlen_kv, nats));

  constexpr Pattern patterns[] = {Pattern::uniform, Pattern::row, Pattern::column, Pattern::random};
  for (const Pattern q : patterns) {
    for (const Pattern k : patterns) {
      for (const Pattern v : patterns) {
        for (const int amplitude : {1, 4, 16}) {
          const auto name = [](Pattern p) { return pattern_names[static_cast<int>(p)]; };
          add(std::string("matrix/") + name(q) + "-" + name(k) + "-" + name(v) + "/" +
                  std::to_string(amplitude),
              pattern_fill(q, amplitude), pattern_fill(k, amplitude), pattern_fill(v, amplitude));
        }
      }
    }
  }
  return cases;
}

bool selected(const StressCase& c, const std::string& selection) {
  return selection.empty() || c.name == selection || c.name.starts_with(selection + "/");
}

StressInputs make_inputs(const StressCase& c, const StressOptions& options, attn_dtype type) {
  return {type,
          c.seqlen_q,
          c.seqlen_kv,
          options.heads,
          options.head_dim,
          codes(c.q, c.seqlen_q, options, type, "q"),
          codes(c.k, c.seqlen_kv, options, type, "k"),
          codes(c.v, c.seqlen_kv, options, type, "v")};
}

}  // namespace attn::tools
