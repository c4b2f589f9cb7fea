// What the compiler made of each CUDA kernel, held against what its host side launches: threads of
// a block, bytes of parameters, static shared memory.
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "catch.h"
#include "kernels/cache/dequantise_args.h"
#include "kernels/cache/kv_append_args.h"
#include "kernels/decode/variants.h"
#include "kernels/forward_sm80/variants.h"
#include "kernels/forward_sm90/fp8_variants.h"
#include "kernels/forward_sm90/variants.h"
#include "kernels/shared/mask_args.h"
#include "kernels/shared/merge_args.h"
#include "kernels/shared/quantize_args.h"

namespace {

struct Compiled {
  int threads = 0;  // at most, of a block
  int parameter_bytes = 0;
  int static_shared_bytes = 0;
};

template <class T>
T at(const std::string& file, size_t offset) {
  T value;
  REQUIRE(offset + sizeof value <= file.size());
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

// Sections of an ELF file of 64 bits by name: offset and size.
std::map<std::string, std::pair<size_t, size_t>> sections(const std::string& file) {
  std::map<std::string, std::pair<size_t, size_t>> found;
  const size_t table = at<uint64_t>(file, 40), entry = at<uint16_t>(file, 58);
  const int count = at<uint16_t>(file, 60), names = at<uint16_t>(file, 62);
  const size_t text = at<uint64_t>(file, table + names * entry + 24);
  for (int i = 0; i < count; ++i) {
    const size_t header = table + i * entry;
    const char* name = file.c_str() + text + at<uint32_t>(file, header);
    found[name] = {at<uint64_t>(file, header + 24), at<uint64_t>(file, header + 32)};
  }
  return found;
}

// .nv.info.KERNEL is a list of attributes: a byte of format, one of kind, then a value of 16 bits
// or (format 4) as many bytes as it says.
Compiled read_cubin(const std::string& file, const std::string& kernel, int reserved_shared_bytes) {
  constexpr int max_threads = 0x05, required_threads = 0x10, parameter = 0x17;
  constexpr int parameter_size_at = 12, parameter_size_bit = 18;
  const auto all = sections(file);
  Compiled compiled;
  if (const auto shared = all.find(".nv.shared." + kernel); shared != all.end())
    compiled.static_shared_bytes = int(shared->second.second) - reserved_shared_bytes;
  const auto info = all.find(".nv.info." + kernel);
  REQUIRE(info != all.end());
  const auto [begin, size] = info->second;
  for (size_t i = begin; i < begin + size;) {
    const int format = at<uint8_t>(file, i), kind = at<uint8_t>(file, i + 1);
    const int value = at<uint16_t>(file, i + 2);
    if (kind == parameter)
      compiled.parameter_bytes +=
          int(at<uint32_t>(file, i + parameter_size_at) >> parameter_size_bit);
    if (kind == max_threads || kind == required_threads)
      compiled.threads = at<int32_t>(file, i + 4);
    i += 4 + (format == 4 ? value : 0);
  }
  return compiled;
}

// Each cubin of a kernel that the build has; how many there are.
template <class Check>
int each_cubin(const std::string& kernel, Check check) {
  int count = 0;
  for (const char* arch : {"sm_80", "sm_89", "sm_90", "sm_90a"}) {
    std::ifstream in(std::string(ATTN_CUBIN_DIR "/") + kernel + "." + arch + ".cubin",
                     std::ios::binary);
    if (!in) continue;
    ++count;
    INFO(kernel << " for " << arch);
    const std::string file(std::istreambuf_iterator<char>(in), {});
    check(read_cubin(file, kernel, std::string(arch).starts_with("sm_9") ? 1024 : 0));
  }
  return count;
}

// static_shared_bytes: what the host side reserves, at least what there is.
void check(const std::string& kernel, int threads, int parameter_bytes, int static_shared_bytes) {
  const int count = each_cubin(kernel, [&](const Compiled& compiled) {
    CHECK(compiled.threads == threads);
    CHECK(compiled.parameter_bytes == parameter_bytes);
    CHECK(compiled.static_shared_bytes <= static_shared_bytes);
  });
  INFO(kernel);
  CHECK(count > 0);
}

bool built() {
  return bool(std::ifstream(ATTN_CUBIN_DIR "/merge_cuda.sm_80.cubin"));
}

int sm80_bytes(unsigned of) {
  using namespace attn::sm80;
  return of & with_mask    ? sizeof(Kernarg<with_mask>)
         : of & with_pages ? sizeof(Kernarg<with_pages>)
                           : sizeof(Kernarg<0>);
}
int sm90_bytes(unsigned with) {
  using namespace attn::sm90;
  switch (with) {
    case with_mask:
      return sizeof(Kernarg<with_mask>);
    case with_bias:
      return sizeof(Kernarg<with_bias>);
    case with_pages:
    case with_score_and_pages:
      return sizeof(Kernarg<with_pages>);
    case with_fp8:
    case with_fp8_and_score:
      return sizeof(Kernarg<with_fp8>);
    case with_fp8_and_mask:
      return sizeof(Kernarg<with_fp8_and_mask>);
    default:
      return sizeof(Kernarg<plain>);
  }
}

}  // namespace

TEST_CASE("cubins: variants are what was compiled", "[catalog]") {
  if (!built()) ATTN_SKIP("this build has no CUDA kernels");
  for (const auto& v : attn::decode::variants)
    check(v.name, v.tile.threads(),
          v.copy_engine ? sizeof(attn_decode_sm90_kernarg) : sizeof(attn_decode_kernarg),
          v.tile.static_shared_bytes());
  for (const auto& v : attn::sm80::variants)
    check(v.name, v.tile().threads(), sm80_bytes(v.with), attn::sm80::static_shared_bytes(v.with));
  for (const auto& v : attn::sm90::variants) check(v.name, v.tile.threads(), sm90_bytes(v.with), 0);
  for (const auto& v : attn::sm90::fp8_variants)
    check(v.name, v.tile.threads(), sm90_bytes(v.with), 0);
}

TEST_CASE("cubins: parameters of the other kernels are what was compiled", "[catalog]") {
  if (!built()) ATTN_SKIP("this build has no CUDA kernels");
  const struct {
    const char* kernel;
    size_t parameter_bytes;
  } kernels[] = {{"merge_cuda", sizeof(attn_merge_kernarg)},
                 {"quantize_cuda", sizeof(attn_quantize_kernarg)},
                 {"kv_append_cuda", sizeof(attn_kv_append_kernarg)},
                 {"kv_roll_cuda", sizeof(attn_kv_roll_kernarg)},
                 {"mask_cuda", sizeof(attn_mask_kernarg)},
                 {"dequantise_sm90", sizeof(attn_dequantise_kernarg)}};
  for (const auto& k : kernels) {
    const int count = each_cubin(k.kernel, [&](const Compiled& compiled) {
      CHECK(compiled.parameter_bytes == int(k.parameter_bytes));
    });
    INFO(k.kernel);
    CHECK(count > 0);
  }
}
