// The kernel table: the rows of all families, and where the code of each is.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "core/status.h"
#include "kernels/kernel.h"

namespace attn {

// Kernels with code of their own, as attn_info lists them. Rows of one operation and backend are in
// order of preference.
std::span<const Kernel> catalog();
// The same, and before them those that consist of others (Kernel::composed). What these take, and
// whether a build has them, follows from their parts for a problem: no list or table can say it.
std::span<const Kernel> all_kernels();
// By its name or a former one; nullptr if there is none.
const Kernel* find_kernel(const char* name);

// Launches of a kernel so far; counted where the launch has succeeded.
void count_launch(const Kernel& kernel);
uint64_t launch_count(const Kernel& kernel);

// Whether a kernel's Limits take a problem; if not, `why` (may be null) says what they do not take.
// The architecture is checked separately.
bool takes(const Kernel& kernel, const Needs& needs, std::string* why = nullptr);
// The same as a sentence; "" if they do.
std::string decline(const Kernel& kernel, const Needs& needs);
// Parts of that: q, k, v and out, alone and together, and demanded features; head_dim and
// head_dim_v.
bool takes_types(const Kernel& kernel, const Needs& needs);
bool takes_head_dims(const Kernel& kernel, const Needs& needs);
// "softcap", "packed q": what a problem asks for, in errors and in the README's matrix.
const char* feature_name(Feature feature);
const char* flag_name(attn_flag flag);

// Device code that the build embedded: file kernels/**/NAME.cu or asm/**/NAME.s for one
// architecture.
struct Image {
  const char* name;
  const char* arch;  // "sm_80", "sm_90a", "compute_80" (PTX), "gfx942"
  const unsigned char* begin;
  const unsigned char* end;
  std::span<const unsigned char> bytes() const { return {begin, end}; }
};
std::span<const Image> images();

// The image of `name` that runs on `arch`; nullptr if there is none.
const Image* image_for(const char* name, const std::string& arch);
// The same, or an error that says which architectures exist.
Status find_image(const char* name, const std::string& arch, const Image** image);
// Whether code for `image_arch` runs on a device of `device_arch`: same major and minor not above
// for sm_XX, equal for sm_XXa and gfx, major.minor not above for compute_XX.
bool arch_runs_on(const std::string& image_arch, const std::string& device_arch);

}  // namespace attn
