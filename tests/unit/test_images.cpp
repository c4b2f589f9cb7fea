// Which device code runs where.
#include <algorithm>
#include <cstring>

#include "catalog/catalog.h"
#include "catch.h"

using namespace attn;

TEST_CASE("images: what runs on what", "[catalog]") {
  struct Case {
    const char *image, *device;
    bool runs;
  };
  const Case cases[] = {
      {"sm_80", "sm_80", true},        {"sm_80", "sm_86", true},
      {"sm_80", "sm_89", true},        {"sm_86", "sm_80", false},
      {"sm_80", "sm_90", false},       {"sm_90", "sm_80", false},
      {"sm_90a", "sm_90", true},       {"sm_90a", "sm_100", false},
      {"sm_100a", "sm_103", false},    {"sm_100", "sm_103", true},
      {"sm_100", "sm_120", false},     {"compute_80", "sm_75", false},
      {"compute_80", "sm_80", true},   {"compute_80", "sm_90", true},
      {"compute_80", "sm_120", true},  {"compute_86", "sm_80", false},
      {"compute_100", "sm_90", false}, {"gfx942", "gfx942", true},
      {"gfx942", "gfx90a", false},     {"gfx942", "sm_90", false},
      {"sm_80", "gfx942", false},      {"", "", false},
      {"sm_", "sm_80", false},         {"sm_8x", "sm_80", false},
  };
  for (const Case& c : cases) {
    INFO(c.image << " on " << c.device);
    CHECK(arch_runs_on(c.image, c.device) == c.runs);
  }
}

TEST_CASE("images: a kernel without code says what there is", "[catalog]") {
  const Image* image = nullptr;
  const Status nvidia = find_image("no_such_kernel", "sm_90", &image);
  CHECK(nvidia.code == ATTN_UNSUPPORTED);
  CHECK(
      nvidia.text ==
      "no_such_kernel: no code for sm_90; this build has none: it was made without a CUDA toolkit");
  CHECK(find_image("no_such_kernel", "gfx942", &image).code == ATTN_UNSUPPORTED);
  CHECK(image == nullptr);
}

TEST_CASE("images: the best code for a device is found", "[catalog]") {
  const Image* image = nullptr;
  if (images().empty()) ATTN_SKIP("this build has no device code");
  for (const Image& i : images()) {
    INFO(i.name << " " << i.arch);
    CHECK(i.end > i.begin);
    const bool gfx = std::strncmp(i.arch, "gfx", 3) == 0;
    CHECK(reinterpret_cast<uintptr_t>(i.begin) % (gfx ? 256 : 16) == 0);
    if (gfx) {
      CHECK(std::memcmp(i.begin, "\177ELF", 4) == 0);
    } else {  // a fatbin: magic, version, bytes of this header, bytes behind it
      struct {
        uint32_t magic;
        uint16_t version, header;
        uint64_t rest;
      } fatbin;
      REQUIRE(i.bytes().size() > sizeof fatbin);
      std::memcpy(&fatbin, i.begin, sizeof fatbin);
      CHECK(fatbin.magic == 0xba55ed50);
      CHECK(fatbin.header + fatbin.rest == i.bytes().size());
      // The largest kernel's code has 240 KB, PTX 480.
      CHECK(i.bytes().size() < 160000);
    }
    // Of a row, or of a step before a row's own.
    CHECK((find_kernel(i.name) != nullptr ||
           std::any_of(all_kernels().begin(), all_kernels().end(), [&](const Kernel& row) {
             return std::any_of(
                 std::begin(row.first_images), std::end(row.first_images),
                 [&](const char* name) { return name && std::strcmp(name, i.name) == 0; });
           })));
  }
  if (find_image("merge_gfx942", "gfx942", &image).ok()) {
    CHECK(image->name == std::string("merge_gfx942"));
    const Status status = find_image("merge_gfx942", "gfx950", &image);
    CHECK(status.text == "merge_gfx942: no code for gfx950; this build has gfx942");
  }
  if (!find_image("merge_cuda", "sm_80", &image).ok())
    ATTN_SKIP("the rest needs CUDA kernels, which this build has none of");
  const struct {
    const char *device, *arch;
  } cases[] = {
      {"sm_80", "sm_80"}, {"sm_89", "sm_80"}, {"sm_90", "sm_90"}, {"sm_120", "compute_80"}};
  for (const auto& c : cases) {
    REQUIRE(find_image("merge_cuda", c.device, &image).ok());
    CHECK(image->arch == std::string(c.arch));
  }
  const Status status = find_image("merge_cuda", "gfx90a", &image);
  CHECK(status.code == ATTN_UNSUPPORTED);
  CHECK(status.text == "merge_cuda: no code for gfx90a; this build has sm_80, sm_90, compute_80");
}
