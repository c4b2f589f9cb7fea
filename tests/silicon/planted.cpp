// A HIP library that is the emulator's but for one thing, which ATTN_PLANTED names: a device that
// does not keep to a rule, to see that tools/silicon tells. What is not here comes from
// libattn-hipemu.so, which this one is linked to.
//   fp8    v_cvt_pk_fp8_f32 converts to bf8
//   order  MFMA of FP8 by BF8 takes both as FP8
//   lax    wait states do not matter
//   crash  the second launch ends the program
//   other  the device is another one
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

#include "gfx9emu/runtime/hipemu.h"

namespace {

bool planted(std::string_view what) {
  const char* text = std::getenv("ATTN_PLANTED");
  return text && text == what;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

struct Swap {
  const char* what;
  uint32_t mask, from, to;  // of an instruction's first word
};
constexpr Swap swaps[] = {
    {"fp8", 0xffff0000, 0xd2a20000, 0xd2a30000},
    {"order", 0xffff0000, 0xd3f60000, 0xd3f70000},
};

}  // namespace

#define HIP_API extern "C" __attribute__((visibility("default")))

HIP_API int hipModuleLoad(void** module, const char* path) {
  std::ifstream in(path, std::ios::binary);
  std::vector<char> image{std::istreambuf_iterator<char>(in), {}};
  for (const Swap& swap : swaps) {
    if (!planted(swap.what)) continue;
    for (size_t at = 0; at + 4 <= image.size(); at += 4) {
      uint32_t word = 0;
      std::memcpy(&word, &image[at], 4);
      if ((word & swap.mask) != swap.from) continue;
      word = (word & ~swap.mask) | swap.to;
      std::memcpy(&image[at], &word, 4);
    }
  }
  return real<int(void**, const void*)>("hipModuleLoadData")(module, image.data());
}

HIP_API int hipInit(unsigned flags) {
  attn_emu_options options{};
  options.hazards_off = planted("lax");
  real<void(const attn_emu_options*)>("attn_emu_configure")(&options);
  return real<int(unsigned)>("hipInit")(flags);
}

HIP_API int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz,
                                  unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                  void* stream, void** parameters, void** extra) {
  static int launches = 0;
  if (planted("crash") && ++launches == 2) std::abort();
  return real<int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void*, void**, void**)>("hipModuleLaunchKernel")(
      function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

HIP_API int hipGetDevicePropertiesR0600(void* properties, int ordinal) {
  const int code = real<int(void*, int)>("hipGetDevicePropertiesR0600")(properties, ordinal);
  constexpr size_t arch = 1160;  // gcnArchName
  if (planted("other"))
    std::strcpy(static_cast<char*>(properties) + arch, "gfx90a:sramecc+:xnack-");
  return code;
}
