#include "gfx9/shipped.h"

#include <cmath>
#include <cstring>
#include <fstream>
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
  explicit Maker(Memory& memory) : memory_(memory) {}
  Problem problem;

  void* input(const std::vector<uint8_t>& bytes) {
    const uint64_t at = add(bytes.size());
    memory_.write(at, std::as_bytes(std::span(bytes)));
    return reinterpret_cast<void*>(at);
  }
  void* output(uint64_t bytes) {
    const uint64_t at = add(bytes);
    memory_.fill(at, 0xa5, bytes);
    problem.outputs.emplace_back(at, bytes);
    return reinterpret_cast<void*>(at);
  }
  // Values of all sizes; one in `special` is zero, infinite, NaN or at the end of some fp8 type.
  std::vector<uint8_t> values(attn_dtype type, size_t count, unsigned special = 0) {
    std::vector<uint8_t> bytes(count * dtype_bytes(type));
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < count; ++i) {
      double x = normal(rng_) * std::ldexp(1.0, int(rng_() % 20) - 10);
      if (special != 0 && rng_() % special == 0) {
        constexpr double inf = std::numeric_limits<double>::infinity();
        const double some[] = {0.0, -0.0, inf, -inf, std::nan(""), 448, 464, 240, 57344, 1e30};
        x = some[rng_() % 10];
      }
      uint32_t code = 0;
      if (type == ATTN_F32) {
        const float f = float(x);
        std::memcpy(&code, &f, 4);
      } else if (dtype_is_fp8(type)) {
        code = uint32_t(rng_() & 255);
      } else {
        code = encode(type == ATTN_F16 ? f16_format : bf16_format, x, false);
      }
      std::memcpy(&bytes[i * dtype_bytes(type)], &code, dtype_bytes(type));
    }
    return bytes;
  }
  std::mt19937& rng() { return rng_; }

 private:
  uint64_t add(uint64_t bytes) {
    problem.allocations.push_back(memory_.allocate(bytes));
    return problem.allocations.back();
  }
  Memory& memory_;
  std::mt19937 rng_{42};
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

Problem merge_problem(Memory& memory, attn_dtype part, attn_dtype out, int parts, int64_t dim,
                      bool want_lse, int sign = 1) {
  Maker m(memory);
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

Problem convert_problem(Memory& memory, attn_dtype from, attn_dtype to, attn_scale_source scale,
                        attn_descale_kind kind, bool saturate, int64_t dim, int sign) {
  Maker m(memory);
  attn_quantize_problem p{};
  p.batch = 2, p.seqlen = kind == ATTN_DESCALE_BLOCK ? 70 : 11, p.heads = 2, p.head_dim = dim;
  const bool back = dtype_is_fp8(from);  // only the kernel knows that way
  p.src_type = back ? ATTN_F32 : from;
  p.dst_type = back ? from : to;
  p.src_stride = p.dst_stride = packed(p.seqlen, p.heads, dim, sign);
  p.kind = kind;
  p.descale_block_keys = 64;
  p.scale = scale;
  p.saturate = saturate;
  const int64_t rows = p.batch * p.seqlen * p.heads, count = rows * dim;
  attn_quantize_args args{};
  args.src = first_row(m.input(m.values(from, count, scale == ATTN_SCALE_AMAX ? 0 : 16)), sign,
                       rows, dim * dtype_bytes(from));
  args.dst = first_row(m.output(count * dtype_bytes(to)), sign, rows, dim * dtype_bytes(to));
  if (scale == ATTN_SCALE_GIVEN) {
    std::vector<float> descale(64);
    for (float& d : descale) d = 0.01f * float(1 + m.rng()() % 1000);
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
    set_formats(from, to, saturate, &a);
    for (int i = 0; i < 3; ++i) {
      std::swap(a.src_stride[i], a.dst_stride[i]);
      if (to != ATTN_F32) a.dst_stride[i] /= 2;
    }
    a.src_row_bytes = int(dim * dtype_bytes(from));
    a.dst_row_bytes = int(dim * dtype_bytes(to));
    a.scale = scale == ATTN_SCALE_GIVEN ? attn_convert_multiply : attn_convert_one;
    std::memcpy(m.problem.kernarg.data(), &a, sizeof a);
  }
  return std::move(m.problem);
}

std::vector<Problem> problems_of(const std::string& name, Memory& memory) {
  std::vector<Problem> all;
  if (name == "merge_gfx942") {
    all.push_back(merge_problem(memory, ATTN_F32, ATTN_F32, 3, 300, true));
    all.push_back(merge_problem(memory, ATTN_F16, ATTN_F16, 5, 300, true, -1));
    all.push_back(merge_problem(memory, ATTN_BF16, ATTN_BF16, 16, 260, false));
    all.push_back(merge_problem(memory, ATTN_F32, ATTN_F16, 1, 8, true, -1));
    all.push_back(merge_problem(memory, ATTN_BF16, ATTN_F32, 9, 256, true, -1));
  } else {
    const auto one = ATTN_SCALE_ONE, given = ATTN_SCALE_GIVEN, amax = ATTN_SCALE_AMAX;
    const auto tensor = ATTN_DESCALE_TENSOR, head = ATTN_DESCALE_HEAD, block = ATTN_DESCALE_BLOCK;
    const auto add = [&](attn_dtype from, attn_dtype to, attn_scale_source scale,
                         attn_descale_kind kind, bool saturate, int64_t dim, int sign) {
      all.push_back(convert_problem(memory, from, to, scale, kind, saturate, dim, sign));
    };
    add(ATTN_F32, ATTN_F8_E4M3FN, one, tensor, false, 260, 1);
    add(ATTN_F16, ATTN_F8_E4M3FN, amax, tensor, true, 68, -1);
    add(ATTN_BF16, ATTN_F8_E5M2, amax, head, false, 64, 1);
    add(ATTN_F32, ATTN_F8_E4M3FNUZ, given, block, true, 36, -1);
    add(ATTN_F16, ATTN_F8_E5M2, given, head, false, 36, 1);
    add(ATTN_F32, ATTN_F8_E5M2, amax, block, true, 64, -1);
    add(ATTN_F8_E4M3FN, ATTN_F32, one, tensor, false, 64, -1);
    add(ATTN_F8_E5M2, ATTN_F32, one, tensor, false, 64, 1);
    add(ATTN_F8_E5M2, ATTN_F16, given, head, false, 64, 1);
    add(ATTN_F8_E4M3FNUZ, ATTN_BF16, given, tensor, false, 128, -1);
  }
  return all;
}

}  // namespace

std::vector<std::string> shipped_kernels() {
  return {"merge_gfx942", "convert_gfx942"};
}

std::unique_ptr<gfx9emu::CodeObject> load_shipped(const std::string& name, Memory* memory) {
  std::ifstream in(std::string(ATTN_GFX9_IMAGES_DIR) + "/" + name + ".hsaco", std::ios::binary);
  if (!in) return nullptr;
  const std::vector<char> chars((std::istreambuf_iterator<char>(in)), {});
  std::string error;
  return gfx9emu::CodeObject::load(std::as_bytes(std::span(chars)), memory, &error);
}

ShippedRun run_shipped(const std::string& name, const gfx9emu::CodeObject& object, Memory& memory,
                       const gfx9emu::Options& options) {
  ShippedRun result;
  for (const Problem& p : problems_of(name, memory)) {
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
  }
  return result;
}

}  // namespace attn::test
