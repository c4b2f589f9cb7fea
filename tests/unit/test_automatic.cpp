// Which device ATTN_BACKEND_AUTO takes, of devices that are described and need not be here.
#include <algorithm>
#include <cstring>
#include <vector>

#include "catch.h"
#include "hopper.h"
#include "plan/automatic.h"

using namespace attn;

namespace {

DeviceInfo of_arch(const char* arch, int ordinal = 0) {
  DeviceInfo device = test::hopper();
  device.arch = arch;
  device.ordinal = ordinal;
  return device;
}

}  // namespace

TEST_CASE("auto: the first device that this build has code for", "[plan]") {
  const auto in_build = [](const char* arch) {
    return std::any_of(images().begin(), images().end(), [&](const Image& image) {
      return std::strcmp(image.name, "fwd_gfx942_bf16_d64") == 0 ||
                     std::strcmp(image.name, "fwd_gfx950_bf16_d64") == 0 ||
                     std::strcmp(image.name, "fwd_sm80_bf16_d64") == 0
                 ? arch_runs_on(image.arch, arch)
                 : false;
    });
  };
  const auto is_taken = [](const Automatic& taken, attn_backend backend, int device) {
    INFO(attn_backend_string(taken.backend) << " " << taken.device);
    CHECK(taken.backend == backend);
    CHECK(taken.device == device);
  };
  const auto shown = [](std::initializer_list<const char*> cuda,
                        std::initializer_list<const char*> hip, std::optional<int> current = {}) {
    std::vector<Shown> all = {{ATTN_BACKEND_CUDA, {}, {}, current}, {ATTN_BACKEND_HIP, {}, {}, {}}};
    for (const char* arch : cuda)
      all[0].devices.push_back(of_arch(arch, int(all[0].devices.size())));
    for (const char* arch : hip)
      all[1].devices.push_back(of_arch(arch, int(all[1].devices.size())));
    return all;
  };
  is_taken(automatic(shown({}, {}), {}), ATTN_BACKEND_CPU, 0);
  // Devices that no kernel is for, in any build.
  for (const char* arch : {"gfx1103", "gfx1201", "gfx90a", "gfx951", "gfx9", ""}) {
    INFO(arch);
    is_taken(automatic(shown({}, {arch}), {}), ATTN_BACKEND_CPU, 0);
    is_taken(automatic(shown({}, {arch}), 0), ATTN_BACKEND_CPU, 0);
    CHECK(!passed_by(ATTN_BACKEND_HIP, of_arch(arch)).empty());
  }
  for (const char* arch : {"sm_75", "sm_70", "sm_61"})
    is_taken(automatic(shown({arch}, {}), {}), ATTN_BACKEND_CPU, 0);

  if (in_build("gfx942")) {
    is_taken(automatic(shown({}, {"gfx942"}), {}), ATTN_BACKEND_HIP, 0);
    is_taken(automatic(shown({}, {"gfx1103", "gfx942"}), {}), ATTN_BACKEND_HIP, 1);
    is_taken(automatic(shown({}, {"gfx1103", "gfx942"}), 1), ATTN_BACKEND_HIP, 1);
    is_taken(automatic(shown({}, {"gfx1103", "gfx942"}), 0), ATTN_BACKEND_CPU, 0);
    is_taken(automatic(shown({"sm_75"}, {"gfx1103", "gfx942"}), {}), ATTN_BACKEND_HIP, 1);
    CHECK(passed_by(ATTN_BACKEND_HIP, of_arch("gfx1103")) ==
          std::string("no hip kernel of this build has code for gfx1103; accepted: gfx942") +
              (in_build("gfx950") ? ", gfx950" : ""));
  }
  if (in_build("gfx950")) {
    is_taken(automatic(shown({}, {"gfx950"}), {}), ATTN_BACKEND_HIP, 0);
    is_taken(automatic(shown({}, {"gfx90a", "gfx950"}), {}), ATTN_BACKEND_HIP, 1);
  } else {
    is_taken(automatic(shown({}, {"gfx950"}), {}), ATTN_BACKEND_CPU, 0);
  }
  if (in_build("sm_90")) {
    is_taken(automatic(shown({"sm_90"}, {"gfx942"}), {}), ATTN_BACKEND_CUDA, 0);
    is_taken(automatic(shown({"sm_75", "sm_90"}, {}), {}), ATTN_BACKEND_CUDA, 1);
    is_taken(automatic(shown({"sm_75", "sm_90"}, {}, 0), {}), ATTN_BACKEND_CPU, 0);
    is_taken(automatic(shown({"sm_80", "sm_90"}, {}, 1), {}), ATTN_BACKEND_CUDA, 1);
    is_taken(automatic(shown({"sm_80", "sm_90"}, {}, 1), 0), ATTN_BACKEND_CUDA, 0);
    // PTX of compute_80, which the driver compiles.
    for (const char* arch : {"sm_86", "sm_89", "sm_100", "sm_120"})
      is_taken(automatic(shown({arch}, {}), {}), ATTN_BACKEND_CUDA, 0);
  }
  if (!in_build("sm_90") || !in_build("gfx942")) ATTN_SKIP("this build lacks CUDA or gfx9 kernels");
}
