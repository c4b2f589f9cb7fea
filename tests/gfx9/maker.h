// Makes problems of shipped kernels in the emulator's memory.
#pragma once
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "core/dtype.h"
#include "gfx9emu/emu.h"

namespace attn::test {

// One launch of a kernel.
struct ShippedProblem {
  Launch launch;
  std::vector<std::byte> kernarg;
  std::vector<std::pair<uint64_t, uint64_t>> outputs;  // address, bytes
  std::vector<uint64_t> allocations;
};

inline void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text);
}

// A kernel's name with another architecture's.
inline std::string named_for(std::string kernel, const std::string& arch) {
  const size_t at = kernel.find("gfx9");
  return kernel.replace(at, arch.size(), arch);
}
// Problems are written for gfx942; while this is set, those of gfx950 are made of them.
inline bool making_for_gfx950 = false;

// What the kernel's row makes of a problem.
inline Recipe recipe_of(const std::string& kernel, const AnyProblem& p,
                        const DeviceInfo& device = {}) {
  const std::string name = making_for_gfx950 ? named_for(kernel, "gfx950") : kernel;
  Recipe recipe;
  require(find_kernel(name.c_str())->recipe(p, device, &recipe));
  return recipe;
}
// Leaves no array that the problem does not ask for: runs refuse such ones, steps set them unasked.
inline void keep_wanted(const Problem& p, Args* args, std::vector<attn_segment_args>* segments) {
  const auto keep = [](bool wanted, auto& address) {
    if (!wanted) address = nullptr;
  };
  keep(p.q_descale != ATTN_DESCALE_NONE, args->q_descale);
  keep(p.has(ATTN_SINKS), args->sinks);
  keep(p.has(ATTN_ALIBI), args->alibi_slopes);
  keep(p.has(ATTN_OUT_SCALE), args->out_scale);
  for (size_t i = 0; i < segments->size(); ++i) {
    const attn_segment& s = p.segment[i];
    attn_segment_args& a = (*segments)[i];
    keep(s.has_seqlens, a.seqlens);
    keep(s.layout == ATTN_PACKED, a.cu_seqlens);
    keep(s.layout == ATTN_PAGED, a.block_table);
    keep(s.k_descale != ATTN_DESCALE_NONE, a.k_descale);
    keep(s.v_descale != ATTN_DESCALE_NONE, a.v_descale);
  }
}
inline void fill(const Step& step, const AnyProblem& p, const void* args, void* workspace,
                 ShippedProblem* to) {
  Parameters parameters;
  pack(step, p, args, workspace, &parameters);
  to->launch = step.launch;
  const auto* bytes = reinterpret_cast<const std::byte*>(parameters.kernarg);
  to->kernarg.assign(bytes, bytes + step.arguments.bytes.size());
}

class Maker {
 public:
  Maker(gfx9emu::Memory& memory, uint32_t data) : memory_(memory), rng_(data) {}
  ShippedProblem problem;

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
  // Of N(0, size).
  std::vector<uint8_t> alike(attn_dtype type, size_t count, double size) {
    std::vector<uint8_t> bytes(count * dtype_bytes(type));
    std::normal_distribution<double> normal(0, size);
    for (size_t i = 0; i < count; ++i) {
      const float x = float(normal(rng_));
      uint32_t code = std::bit_cast<uint32_t>(x);
      if (type != ATTN_F32) code = encode(type == ATTN_F16 ? f16_format : bf16_format, x, false);
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
      const double tie = (value_of(format, code) + value_of(format, code + 1)) / 2;
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
  gfx9emu::Memory& memory_;
  std::mt19937 rng_;
};

// Makes a problem in a Memory; `data` seeds its values.
using MakeProblem = std::function<ShippedProblem(gfx9emu::Memory& memory, uint32_t data)>;

// append_problems.cpp: for kv_append_gfx942.
std::vector<MakeProblem> append_problems(const std::string&);
// prepare_problems.cpp: for prepare_gfx942_*_segments and _descaled.
std::vector<MakeProblem> segment_problems(const std::string& prepare);
// decode_problems.cpp: for every decode_gfx942_*.
std::vector<MakeProblem> decode_problems(const std::string& kernel);

}  // namespace attn::test
