#include "gfx9/shipped.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>

#include "core/dtype.h"
#include "plan/convert_gfx942.h"
#include "plan/device_kernel.h"

namespace attn::test {
namespace {

using gfx9emu::Memory;

struct Problem {
  Launch launch;
  std::vector<std::byte> kernarg;
  std::vector<std::pair<uint64_t, uint64_t>> outputs;  // address, bytes
  std::vector<uint64_t> allocations;
};

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text);
}

class Maker {
 public:
  Maker(Memory& memory, uint32_t data) : memory_(memory), rng_(data) {}
  Problem problem;

  void* input(const std::vector<uint8_t>& bytes) {
    const uint64_t at = add(bytes.size());
    memory_.write(at, std::as_bytes(std::span(bytes)));
    return reinterpret_cast<void*>(at);
  }
  void* output(uint64_t bytes) {
    const uint64_t at = add(bytes), whole = problem.allocations.back(), end = at + bytes;
    memory_.fill(whole, 0xa5, end - whole);
    problem.outputs.emplace_back(whole, end - whole);
    return reinterpret_cast<void*>(at);
  }
  // Values of all sizes, times `size`; one in `special` is zero, infinite, NaN or, with `ends`, at
  // the end of some fp8 type, one in four lies between two numbers of 16 bits.
  std::vector<uint8_t> values(attn_dtype type, size_t count, unsigned special, double size = 1,
                              bool ends = true) {
    std::vector<uint8_t> bytes(count * dtype_bytes(type));
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < count; ++i) {
      double x = normal(rng_) * std::ldexp(size, int(rng_() % 20) - 10);
      if (special != 0 && rng_() % special == 0) {
        constexpr double inf = std::numeric_limits<double>::infinity();
        const double some[] = {0.0, -0.0, inf, -inf, std::nan(""), 448, 464, 240, 57344, 1e30};
        x = some[rng_() % (ends ? 10 : 5)];
      }
      uint32_t code = 0;
      if (type == ATTN_F32) {
        const float f = float(x);
        std::memcpy(&code, &f, 4);
        if (size == 1 && rng_() % 4 == 0)
          code = (code & 0xffff0000) | (rng_() % 2 ? 0x8000 : 0x1000);
      } else if (dtype_is_fp8(type)) {
        code = uint32_t(rng_() & 255);
      } else {
        code = encode(type == ATTN_F16 ? f16_format : bf16_format, x, false);
        if (std::isnan(x)) code |= rng_() & 0x803f;  // any NaN
      }
      std::memcpy(&bytes[i * dtype_bytes(type)], &code, dtype_bytes(type));
    }
    return bytes;
  }
  // f32 whose quotients by `descale` lie halfway between two codes of an fp8 type, or a bit beside.
  std::vector<uint8_t> near_ties(attn_dtype type, size_t count, float descale) {
    const SmallFloat& format = fp8_format(type);
    std::vector<uint8_t> bytes(count * 4);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t code = rng_() % format.max_code;
      const double tie = (decode(format, code) + decode(format, code + 1)) / 2;
      float x = float(tie * descale);
      const unsigned beside = rng_() % 4;
      if (beside < 2) x = std::nextafter(x, beside == 0 ? 0.0f : 1e38f);
      if (rng_() % 2) x = -x;
      std::memcpy(&bytes[i * 4], &x, 4);
    }
    return bytes;
  }
  std::mt19937& rng() { return rng_; }

 private:
  // A multiple of 2^32 lies in the middle, so that addresses carry into their high halves.
  uint64_t add(uint64_t bytes) {
    constexpr uint64_t page = uint64_t{1} << 32;
    const uint64_t now = memory_.allocate(1), middle = (now / page + 2) * page;
    memory_.free(now);
    const uint64_t at = middle - bytes / 32 * 16, whole = at / 256 * 256;
    memory_.skip_to(whole);
    problem.allocations.push_back(memory_.allocate(at - whole + bytes));
    return at;
  }
  Memory& memory_;
  std::mt19937 rng_;
};

// [batch, seq, heads, dim] without gaps; `sign` -1: the last row first, so that offsets are
// negative and all 64 bits of them count.
attn_strides packed(int64_t seqs, int64_t heads, int64_t dim, int sign) {
  attn_strides s{};
  s.batch = sign * seqs * heads * dim;
  s.seq = sign * heads * dim;
  s.head = sign * dim;
  return s;
}
void* first_row(void* memory, int sign, int64_t rows, int64_t row_bytes) {
  return static_cast<char*>(memory) + (sign < 0 ? (rows - 1) * row_bytes : 0);
}

Problem merge_problem(Memory& memory, uint32_t data, attn_dtype part, attn_dtype out, int parts,
                      int64_t dim, bool want_lse, int sign) {
  Maker m(memory, data);
  attn_merge_problem p{};
  p.batch = 2, p.heads_q = 3, p.seqlen_q = 6, p.head_dim_v = dim;
  p.num_parts = parts;
  p.part_type = part, p.out_type = out;
  p.part_stride = p.out_stride = packed(p.seqlen_q, p.heads_q, dim, sign);
  const size_t rows = p.batch * p.heads_q * p.seqlen_q;
  std::vector<const void*> outs;
  std::vector<const float*> lses;
  for (int s = 0; s < parts; ++s) {
    outs.push_back(
        first_row(m.input(m.values(part, rows * dim, 64)), sign, rows, dim * dtype_bytes(part)));
    std::vector<float> lse(rows);
    for (size_t r = 0; r < rows; ++r) {
      lse[r] = float(m.rng()() % 1000) / 100;
      if (m.rng()() % 4 == 0 || r % 7 == 0) lse[r] = -std::numeric_limits<float>::infinity();
    }
    std::vector<uint8_t> bytes(rows * 4);
    std::memcpy(bytes.data(), lse.data(), bytes.size());
    lses.push_back(static_cast<const float*>(m.input(bytes)));
  }
  attn_merge_args args{};
  args.num_parts = parts;
  args.outs = outs.data();
  args.lses = lses.data();
  args.out = first_row(m.output(rows * dim * dtype_bytes(out)), sign, rows, dim * dtype_bytes(out));
  args.lse = want_lse ? static_cast<float*>(m.output(rows * 4)) : nullptr;
  require(merge_gfx942_kernel.shape_merge(p, {}, &m.problem.launch));
  m.problem.kernarg.resize(merge_gfx942_kernel.kernarg_bytes);
  merge_gfx942_kernel.pack_merge(p, args, m.problem.kernarg.data());
  return std::move(m.problem);
}

struct Convert {
  attn_dtype from, to;
  attn_scale_source scale;
  attn_descale_kind kind;
  bool saturate;
  int64_t dim;
  int sign, dst_sign;
  bool ties = false;
  double size = 1;          // of the values
  bool short_rows = false;  // many heads of few values, some of them 0
};

Problem convert_problem(Memory& memory, uint32_t data, const Convert& c) {
  Maker m(memory, data);
  attn_quantize_problem p{};
  p.batch = p.heads = c.kind == ATTN_DESCALE_BLOCK || c.dim > 64 ? 1 : 3;
  p.seqlen = c.kind == ATTN_DESCALE_BLOCK ? 137 : 9;
  if (c.short_rows) p.batch = 4, p.heads = 5, p.seqlen = 1;
  p.head_dim = c.dim;
  const bool back = dtype_is_fp8(c.from);  // only the kernel knows that way
  p.src_type = back ? ATTN_F32 : c.from;
  p.dst_type = back ? c.from : c.to;
  p.src_stride = packed(p.seqlen, p.heads, c.dim, back ? c.dst_sign : c.sign);
  p.dst_stride = packed(p.seqlen, p.heads, c.dim, back ? c.sign : c.dst_sign);
  p.kind = c.kind;
  p.descale_block_keys = 64;
  p.scale = c.scale;
  p.saturate = c.saturate;
  const attn_dtype from = c.from, to = c.to;
  const int64_t rows = p.batch * p.seqlen * p.heads, count = rows * c.dim;
  std::vector<float> descale(64);
  for (float& d : descale) {
    const unsigned n = m.rng()();
    // Of few bits where it multiplies, so that products lie halfway between two numbers of 16 bits.
    d = back ? float(257 + n % 256) / 256 : 0.01f * float(1 + n % 1000);
  }
  std::vector<uint8_t> src =
      c.ties ? m.near_ties(to, count, descale[0])
             : m.values(from, count, c.dim % 8 == 0 ? 4 : 16, c.size, c.scale != ATTN_SCALE_AMAX);
  if (c.short_rows) std::fill(src.begin() + src.size() / 4, src.begin() + src.size() / 2, 0);
  attn_quantize_args args{};
  args.src = first_row(m.input(src), c.sign, rows, c.dim * dtype_bytes(from));
  args.dst =
      first_row(m.output(count * dtype_bytes(to)), c.dst_sign, rows, c.dim * dtype_bytes(to));
  if (c.scale == ATTN_SCALE_GIVEN) {
    std::vector<uint8_t> bytes(descale.size() * 4);
    std::memcpy(bytes.data(), descale.data(), bytes.size());
    args.descale = static_cast<float*>(m.input(bytes));
  } else {
    args.descale = static_cast<float*>(m.output(64 * 4));
  }
  require(convert_gfx942_kernel.shape_quantize(p, {}, &m.problem.launch));
  m.problem.kernarg.resize(convert_gfx942_kernel.kernarg_bytes);
  convert_gfx942_kernel.pack_quantize(p, args, m.problem.kernarg.data());
  if (back) {
    attn_convert_kernarg a;
    std::memcpy(&a, m.problem.kernarg.data(), sizeof a);
    set_formats(from, to, c.saturate, &a);
    for (int i = 0; i < 3; ++i) {
      std::swap(a.src_stride[i], a.dst_stride[i]);
      if (to != ATTN_F32) a.dst_stride[i] /= 2;
    }
    a.src_row_bytes = int(c.dim * dtype_bytes(from));
    a.dst_row_bytes = int(c.dim * dtype_bytes(to));
    a.scale = c.scale == ATTN_SCALE_GIVEN ? attn_convert_multiply : attn_convert_one;
    std::memcpy(m.problem.kernarg.data(), &a, sizeof a);
  }
  return std::move(m.problem);
}

// Makes a problem in a Memory; `data` seeds its values.
using MakeProblem = std::function<Problem(Memory& memory, uint32_t data)>;

std::vector<MakeProblem> merge_problems() {
  std::vector<MakeProblem> all;
  const auto add = [&](auto... problem) {
    all.push_back(
        [=](Memory& memory, uint32_t data) { return merge_problem(memory, data, problem...); });
  };
  add(ATTN_F32, ATTN_F32, 3, 300, true, 1);
  add(ATTN_F16, ATTN_F16, 5, 300, true, -1);
  add(ATTN_BF16, ATTN_BF16, 16, 260, false, 1);
  add(ATTN_F32, ATTN_BF16, 1, 300, false, -1);
  add(ATTN_F32, ATTN_F16, 1, 8, true, -1);
  add(ATTN_BF16, ATTN_F16, 2, 70, true, 1);
  add(ATTN_F16, ATTN_BF16, 2, 70, true, 1);
  add(ATTN_BF16, ATTN_F32, 9, 256, true, -1);
  return all;
}

std::vector<MakeProblem> convert_problems() {
  constexpr attn_dtype f32 = ATTN_F32, f16 = ATTN_F16, bf16 = ATTN_BF16, e4m3 = ATTN_F8_E4M3FN,
                       e5m2 = ATTN_F8_E5M2, fnuz = ATTN_F8_E4M3FNUZ;
  constexpr auto one = ATTN_SCALE_ONE, given = ATTN_SCALE_GIVEN, amax = ATTN_SCALE_AMAX;
  constexpr auto tensor = ATTN_DESCALE_TENSOR, head = ATTN_DESCALE_HEAD, block = ATTN_DESCALE_BLOCK;
  std::vector<MakeProblem> all;
  for (const Convert& c : std::initializer_list<Convert>{
           {f32, e4m3, given, tensor, true, 68, -1, -1, true},
           {f16, e5m2, given, head, false, 36, 1, 1},
           {bf16, e5m2, amax, head, false, 8, 1, -1},
           {f16, e4m3, amax, tensor, true, 12, -1, -1},
           {e5m2, f16, given, head, false, 16, 1, -1},
           {fnuz, bf16, given, tensor, false, 128, -1, 1},
           {f32, fnuz, given, tensor, false, 69, 1, 1, true},
           {f32, e4m3, one, tensor, false, 260, 1, 1},
           {f32, fnuz, given, block, true, 8, -1, -1},
           {f16, fnuz, one, head, false, 16, -1, 1},
           {f32, e5m2, amax, block, true, 4, -1, -1},
           {f32, e4m3, given, tensor, false, 68, 1, -1, false, 0x1p40},
           {f32, e5m2, given, tensor, false, 68, -1, 1, false, 0x1p-45},
           {e4m3, f32, one, tensor, false, 64, -1, -1},
           {e5m2, f32, one, tensor, false, 68, 1, 1},
           {f32, e4m3, given, head, true, 7, 1, -1, true},
           {f16, fnuz, amax, head, false, 7, -1, 1},
           {bf16, e5m2, one, tensor, false, 69, 1, 1},
           {e4m3, f32, one, tensor, false, 5, -1, 1},
           {e5m2, f16, given, tensor, false, 67, 1, -1},
           {fnuz, bf16, one, tensor, false, 67, 1, 1},
           {f32, e4m3, amax, head, false, 8, 1, 1, false, 0x1p-124, true},
           {f32, fnuz, amax, head, true, 8, -1, -1, false, 0x1p-130, true},
           {f32, e4m3, amax, head, true, 8, -1, -1, false, 0x1p-153, true},
       }) {
    all.push_back([c](Memory& memory, uint32_t data) { return convert_problem(memory, data, c); });
  }
  return all;
}

// To add a kernel: write the function that lists its problems, each made with a Maker, so that
// every instruction of it is reached (which the tests check), and name it here.
struct Shipped {
  const char* name;
  std::vector<MakeProblem> (*problems)();
};
constexpr Shipped all_shipped[] = {{"merge_gfx942", merge_problems},
                                   {"convert_gfx942", convert_problems}};

}  // namespace

std::vector<std::string> shipped_kernels() {
  std::vector<std::string> names;
  for (const Shipped& s : all_shipped) names.push_back(s.name);
  return names;
}

std::unique_ptr<gfx9emu::CodeObject> load_shipped(const std::string& name, Memory* memory) {
  std::ifstream in(std::string(ATTN_GFX9_IMAGES_DIR) + "/" + name + ".hsaco", std::ios::binary);
  if (!in) return nullptr;
  const std::vector<char> chars((std::istreambuf_iterator<char>(in)), {});
  std::string error;
  return gfx9emu::CodeObject::load(std::as_bytes(std::span(chars)), memory, &error);
}

ShippedRun run_shipped(const std::string& name, const gfx9emu::CodeObject& object, Memory& memory,
                       const gfx9emu::Options& options, uint32_t data, const ShippedRun* right) {
  ShippedRun result;
  const auto* shipped = std::find_if(std::begin(all_shipped), std::end(all_shipped),
                                     [&](const Shipped& s) { return name == s.name; });
  for (const MakeProblem& make : shipped->problems()) {
    const Problem p = make(memory, data);
    const gfx9emu::Report report = gfx9emu::launch(
        memory, *object.kernel(name), {p.launch.grid[0], p.launch.grid[1], p.launch.grid[2]},
        {p.launch.block[0], p.launch.block[1], p.launch.block[2]}, p.kernarg, 0, options);
    for (const gfx9emu::Fault& f : report.faults) {
      if (!f.warning && result.fault.empty()) result.fault = f.to_string();
    }
    for (const auto& trace : report.traces) {
      for (const gfx9emu::TraceEntry& e : trace) result.executed.insert(e.inst);
    }
    for (const auto& [at, bytes] : p.outputs) {
      const size_t before = result.outputs.size();
      result.outputs.resize(before + bytes);
      memory.read(at, std::span(result.outputs).subspan(before));
    }
    for (const uint64_t at : p.allocations) memory.free(at);
    if (!result.fault.empty()) break;
    if (right && !std::equal(result.outputs.begin(), result.outputs.end(), right->outputs.begin()))
      break;
  }
  return result;
}

}  // namespace attn::test
