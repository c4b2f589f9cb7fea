// The emulator behind the HIP functions, and the gfx942 kernels on it beyond what the conformance
// tests ask of every kernel.
#include <dlfcn.h>
#include <link.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "../types.h"
#include "asm/gfx942/convert_args.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "core/dtype.h"
#include "driver/driver.h"
#include "driver/library.h"
#include "gfx9emu/runtime/hipemu.h"
#include "kernels/gfx942_convert.h"

using namespace attn;
namespace fs = std::filesystem;

#ifndef ATTN_HIPEMU
TEST_CASE("hipemu: the emulator", "[hipemu]") {
  ATTN_SKIP("this build has no gfx9 emulator");
}
#else

namespace {

const Image* image_of(const char* kernel) {
  const Image* image = nullptr;
  return find_image(kernel, "gfx942", &image).ok() ? image : nullptr;
}

template <class F>
F symbol(const char* name) {
  static void* library = dlopen(ATTN_HIPEMU, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library);
  void* found = dlsym(library, name);
  INFO(name);
  REQUIRE(found);
  return reinterpret_cast<F>(found);
}
std::string fault() {
  return symbol<decltype(&attn_emu_last_fault)>("attn_emu_last_fault")();
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
void check_fault(int code, int expected, std::initializer_list<const char*> parts) {
  INFO(fault());
  CHECK(code == expected);
  for (const char* part : parts) {
    INFO("expected: " << part);
    CHECK(has(fault(), part));
  }
}

std::shared_ptr<Driver> open_emulator() {
  std::shared_ptr<Driver> driver;
  const Status status = open_hip(ATTN_HIPEMU, true, 0, &driver);
  INFO(status.text);
  REQUIRE(status.ok());
  return driver;
}

// The options of launches until it goes.
struct Configured {
  explicit Configured(const attn_emu_options& options) {
    symbol<decltype(&attn_emu_configure)>("attn_emu_configure")(&options);
  }
  ~Configured() { symbol<decltype(&attn_emu_configure)>("attn_emu_configure")(nullptr); }
};

// Runs `body` in a process of its own and gives what it returns.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(body());
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

// The name of the device that a backend opens, or "".
std::string device_name(bool emulator, const char* path) {
  std::shared_ptr<Driver> driver;
  return open_hip(path, emulator, 0, &driver).ok() ? driver->device().name : "";
}

}  // namespace

TEST_CASE("hipemu: what the library is called and exports", "[hipemu]") {
  void* library = dlopen(ATTN_HIPEMU, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library);
  link_map* map = nullptr;
  REQUIRE(dlinfo(library, RTLD_DI_LINKMAP, &map) == 0);
  const char* strings = nullptr;
  ElfW(Addr) name = 0;
  for (const ElfW(Dyn)* d = map->l_ld; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(d->d_un.d_ptr);
    if (d->d_tag == DT_SONAME) name = d->d_un.d_val;
  }
  REQUIRE(strings);
  CHECK(strings + name == std::string("libattn-hipemu.so"));
  CHECK(*symbol<const int*>("attn_emu_marker") == 1);
}

TEST_CASE("hipemu: both generations of hipDeviceProp_t", "[hipemu]") {
  int units = 304;
  const auto check = [&](const char* function, size_t bytes, size_t memory, size_t multiprocessors,
                         size_t wave, size_t arch) {
    std::vector<unsigned char> p(bytes + 16, 0xa5);
    REQUIRE(symbol<int (*)(void*, int)>(function)(p.data(), 0) == 0);
    const auto at = [&](size_t offset, auto value) {
      std::memcpy(&value, &p[offset], sizeof value);
      return value;
    };
    CHECK(at(memory, size_t{}) == size_t{192} << 30);
    CHECK(at(multiprocessors, 0) == units);
    CHECK(at(wave, 0) == 64);
    CHECK(reinterpret_cast<char*>(&p[arch]) == std::string("gfx942:sramecc+:xnack-"));
    for (size_t n = bytes; n < p.size(); ++n) CHECK(p[n] == 0xa5);
    CHECK(symbol<int (*)(void*, int)>(function)(p.data(), 1) == 101);
  };
  check("hipGetDevicePropertiesR0600", 1472, 288, 388, 308, 1160);
  check("hipGetDeviceProperties", 792, 256, 336, 276, 396);
  check("hipGetDevicePropertiesR0000", 792, 256, 336, 276, 396);
  attn_emu_options options{};
  options.compute_units = units = 5;
  const Configured configured(options);
  check("hipGetDevicePropertiesR0600", 1472, 288, 388, 308, 1160);
  check("hipGetDeviceProperties", 792, 256, 336, 276, 396);
}

TEST_CASE("hipemu: properties of gfx950") {
  attn_emu_options options{};
  options.gfx = 950;
  const Configured configured(options);
  std::vector<unsigned char> p(1472);
  REQUIRE(symbol<int (*)(void*, int)>("hipGetDevicePropertiesR0600")(p.data(), 0) == 0);
  CHECK(reinterpret_cast<char*>(&p[1160]) == std::string("gfx950:sramecc+:xnack-"));
  int units = 0;
  std::memcpy(&units, &p[388], sizeof units);
  CHECK(units == 256);
  size_t lds = 0;
  std::memcpy(&lds, &p[296], sizeof lds);
  CHECK(lds == 163840);
}

TEST_CASE("hipemu: each device takes its own code alone", "[hipemu]") {
  const Image* images[] = {image_of("merge_gfx942"), nullptr};
  if (!images[0]) ATTN_SKIP("this build has no gfx9 kernels");
  if (!find_image("merge_gfx950", "gfx950", &images[1]).ok())
    ATTN_SKIP("this build has no gfx950 kernels");
  for (const int gfx : {942, 950}) {
    attn_emu_options options{};
    options.gfx = gfx;
    const Configured configured(options);
    const auto driver = open_emulator();
    CHECK(driver->device().arch == "gfx" + std::to_string(gfx));
    for (const Image* image : images) {
      Module module = nullptr;
      const Status status = driver->load(image->bytes(), &module);
      INFO(status.text);
      if (has(status.text, "which LLVM")) ATTN_SKIP("the emulator's LLVM does not know gfx950");
      const bool own = image->arch == driver->device().arch;
      CHECK(status.ok() == own);
      if (own) {
        driver->unload(module);
      } else {
        CHECK(has(status.text, std::string("code object: made for ") + image->arch +
                                   ", this device is " + driver->device().arch));
      }
    }
  }
}

TEST_CASE("hipemu: memory that is not there or no longer there", "[hipemu]") {
  const auto alloc = symbol<int (*)(void**, size_t)>("hipMalloc");
  const auto release = symbol<int (*)(void*)>("hipFree");
  const auto copy = symbol<int (*)(void*, const void*, size_t, int)>("hipMemcpy");
  const auto fill = symbol<int (*)(void*, int, size_t)>("hipMemset");
  char host[64] = "some text";
  void* p = nullptr;
  check_fault(alloc(&p, size_t{1} << 50), 2, {"1125899906842624 bytes"});
  REQUIRE(alloc(&p, 64) == 0);
  CHECK(fault() == "");
  CHECK(copy(p, host, 64, 1) == 0);
  char back[64] = "";
  CHECK(copy(back, p, 64, 2) == 0);
  CHECK(back == std::string("some text"));
  CHECK(copy(p, host, 65, 1) == 1);
  CHECK(fault() != "");
  CHECK(fill(p, 'x', 65) == 1);
  CHECK(fill(p, 'x', 3) == 0);
  CHECK(copy(back, p, 64, 4) == 0);
  CHECK(back == std::string("xxxe text"));
  CHECK(release(p) == 0);
  CHECK(release(p) == 1);
  CHECK(copy(back, p, 64, 2) == 1);
  CHECK(fault() != "");
  CHECK(release(nullptr) == 0);
  int something = 0;
  CHECK(release(&something) == 1);

  // Host memory that the device reaches at its own address.
  void* pinned = nullptr;
  REQUIRE(symbol<int (*)(void**, size_t, unsigned)>("hipHostMalloc")(&pinned, 64, 0) == 0);
  std::strcpy(static_cast<char*>(pinned), "pinned");
  CHECK(copy(back, pinned, 64, 4) == 0);
  CHECK(back == std::string("pinned"));
  CHECK(symbol<int (*)(void*)>("hipHostFree")(pinned) == 0);
  CHECK(symbol<int (*)(void*)>("hipHostFree")(pinned) == 1);
}

TEST_CASE("hipemu: handles that it did not give out", "[hipemu]") {
  int nothing = 0;
  void* out = nullptr;
  CHECK(symbol<int (*)(void*)>("hipModuleUnload")(&nothing) == 400);
  CHECK(symbol<int (*)(void**, void*, const char*)>("hipModuleGetFunction")(&out, &nothing, "f") ==
        400);
  CHECK(symbol<int (*)(void*)>("hipStreamSynchronize")(&nothing) == 400);
  CHECK(symbol<int (*)(void*)>("hipStreamDestroy")(&nothing) == 400);
  CHECK(symbol<int (*)(void*, void*)>("hipEventRecord")(&nothing, nullptr) == 400);
  CHECK(symbol<int (*)(void*, int)>("hipStreamBeginCapture")(nullptr, 0) == 801);
  CHECK(symbol<int (*)(int)>("hipSetDevice")(1) == 101);
  CHECK(symbol<int (*)()>("hipGetLastError")() == 101);
  CHECK(symbol<int (*)()>("hipGetLastError")() == 0);
}

TEST_CASE("hipemu: images that are no code object for this device", "[hipemu]") {
  const Image* image = image_of("merge_gfx942");
  if (!image) ATTN_SKIP("this build has no gfx9 kernels");
  const auto load = symbol<int (*)(void**, const void*)>("hipModuleLoadData");
  void* module = nullptr;
  const char text[64] = "#!/bin/sh";
  check_fault(load(&module, text), 200, {"ELF"});
  check_fault(load(&module, nullptr), 1, {"null"});
  std::vector<unsigned char> file(image->begin, image->end);
  file[48] = 0x4f;  // EF_AMDGPU_MACH of gfx950
  check_fault(load(&module, file.data()), 209, {"gfx9"});
  file[48] = 0x4c;
  REQUIRE(load(&module, file.data()) == 0);
  void* function = nullptr;
  check_fault(symbol<int (*)(void**, void*, const char*)>("hipModuleGetFunction")(&function, module,
                                                                                  "merge"),
              500, {"merge", "merge_gfx942"});
  CHECK(symbol<int (*)(void*)>("hipModuleUnload")(module) == 0);
  check_fault(symbol<int (*)(void**, const char*)>("hipModuleLoad")(&module, "/nowhere/x.hsaco"),
              301, {"/nowhere/x.hsaco", "No such file"});
}

TEST_CASE("hipemu: launches that do not fit the kernel", "[hipemu]") {
  const Image* image = image_of("merge_gfx942");
  if (!image) ATTN_SKIP("this build has no gfx9 kernels");
  const auto driver = open_emulator();
  Module module = nullptr;
  REQUIRE(driver->load(image->bytes(), &module).ok());
  Launch launch;
  REQUIRE(driver->function(module, "merge_gfx942", 0, &launch.function).ok());
  std::vector<unsigned char> kernarg(400, 0);
  launch.kernarg = kernarg.data();
  const auto failure = [&](size_t bytes, uint32_t threads, uint32_t shared, uint32_t grid_y) {
    launch.kernarg_bytes = bytes;
    launch.block[0] = threads;
    launch.shared_bytes = shared;
    launch.grid[1] = grid_y;
    const Status status = driver->launch(launch, nullptr);
    CHECK(status.code == ATTN_DRIVER_ERROR);
    return status.text;
  };
  std::string text = failure(348, 256, 0, 1);
  INFO(text);
  CHECK(has(text, "hipErrorInvalidValue (1)"));
  CHECK(has(text, "merge_gfx942: the kernarg buffer has 348 bytes; its metadata says 352"));
  CHECK(has(failure(352, 512, 0, 1), "at most 256 threads"));
  CHECK(has(failure(352, 0, 0, 1), "a dimension is 0"));
  CHECK(has(failure(352, 256, 65537, 1), "merge_gfx942"));
  CHECK(has(failure(352, 256, 0, 65536), "2^16"));
  // No query: nothing is read, nothing is wrong.
  // A buffer may be larger than the arguments.
  for (const size_t bytes : {352, 356}) {
    launch = {launch.function, {1, 1, 1}, {256, 1, 1}, 0, kernarg.data(), bytes};
    const Status status = driver->launch(launch, nullptr);
    INFO(status.text);
    CHECK(status.ok());
  }
  CHECK(has(symbol<decltype(&attn_emu_last_counters)>("attn_emu_last_counters")(),
            "\"kernel\":\"merge_gfx942\""));
  driver->unload(module);
}

TEST_CASE("hipemu: hip never becomes the emulator", "[hipemu]") {
  constexpr const char* emulated = "gfx942 (emulated)";
  const std::string hardware = device_name(false, nullptr);
  CHECK(hardware != emulated);
  const auto expect = [&](bool emulator, const std::string& name) {
    return device_name(emulator, nullptr) == name;
  };
  CHECK(in_child([&] {
          return expect(true, emulated) && expect(false, hardware) && expect(true, emulated) ? 0
                                                                                             : 1;
        }) == 0);
  CHECK(in_child([&] {
          return expect(false, hardware) && expect(true, emulated) && expect(false, hardware) ? 0
                                                                                              : 1;
        }) == 0);
  // With a hip of its own in the process, loaded before or after.
  for (bool emulator_first : {true, false}) {
    CHECK(in_child([&] {
            if (emulator_first && !expect(true, emulated)) return 1;
            if (!dlopen(ATTN_MOCK_DIR "/hip_loaded.so", RTLD_NOW | RTLD_LOCAL)) return 2;
            if (!expect(false, "Mock HIP device")) return 3;
            return expect(true, emulated) && expect(false, "Mock HIP device") ? 0 : 4;
          }) == 0);
  }
  // Not even where it lies under the name of AMD's library.
  const fs::path folder = fs::temp_directory_path() / ("attn-hipemu-" + std::to_string(getpid()));
  fs::create_directory(folder);
  fs::copy_file(ATTN_HIPEMU, folder / "libamdhip64.so.6");
  std::shared_ptr<Driver> driver;
  const Status status = open_hip((folder / "libamdhip64.so.6").c_str(), false, 0, &driver);
  CHECK(status.code == ATTN_DRIVER_MISSING);
  CHECK(has(status.text, "attn_emu_marker"));
  fs::remove_all(folder);
}

TEST_CASE("hipemu: a fault of a kernel is the error of its launch", "[hipemu]") {
  if (!image_of("merge_gfx942")) ATTN_SKIP("this build has no gfx9 kernels");
  attn_context_options options{};
  options.struct_size = sizeof options;
  options.driver_path = ATTN_HIPEMU;
  attn_context* context = nullptr;
  REQUIRE(attn_context_create(ATTN_BACKEND_HIP_EMU, &options, &context) == ATTN_OK);
  attn_merge_problem problem{};
  problem.struct_size = sizeof problem;
  problem.batch = 1, problem.heads_q = 1, problem.seqlen_q = 4, problem.head_dim_v = 64;
  problem.num_parts = 1;
  problem.part_type = ATTN_F32;
  attn_plan* plan = nullptr;
  REQUIRE(attn_plan_create_merge(context, &problem, &plan) == ATTN_OK);
  const std::vector<float> ones(256, 1.0f);
  void *part = nullptr, *lse = nullptr, *out = nullptr, *small = nullptr, *unwritten = nullptr;
  for (void** p : {&part, &lse, &out, &unwritten}) REQUIRE(attn_alloc(context, 1024, p) == ATTN_OK);
  REQUIRE(attn_alloc(context, 512, &small) == ATTN_OK);
  for (void* p : {part, lse})
    REQUIRE(attn_copy_in(context, p, ones.data(), 1024, nullptr) == ATTN_OK);
  const auto run = [&](void* from, void* to) {
    const void* outs[] = {from};
    const float* lses[] = {static_cast<float*>(lse)};
    attn_merge_args args{sizeof args, 1, outs, lses, to, nullptr};
    return attn_run_merge(plan, &args, nullptr);
  };
  const uint64_t before = attn_launch_count("merge_gfx942");
  CHECK(run(part, small) == ATTN_DRIVER_ERROR);
  std::string text = attn_last_error();
  INFO(text);
  CHECK(has(text, "hipErrorLaunchFailure (719)"));
  CHECK(has(text, "out of bounds"));
  CHECK(has(text, "merge_gfx942+0x"));
  CHECK(has(text, "merge_gfx942.s:"));
  CHECK(run(unwritten, out) == ATTN_DRIVER_ERROR);
  text = attn_last_error();
  INFO(text);
  CHECK(has(text, "never written"));
  REQUIRE(attn_free(context, small) == ATTN_OK);
  CHECK(run(small, out) == ATTN_DRIVER_ERROR);
  text = attn_last_error();
  INFO(text);
  CHECK(has(text, "free"));
  CHECK(attn_launch_count("merge_gfx942") == before);
  // Nothing of it stays behind.
  CHECK(run(part, out) == ATTN_OK);
  std::vector<float> result(256);
  CHECK(attn_copy_out(context, result.data(), out, 1024, nullptr) == ATTN_OK);
  CHECK(result == ones);
  for (void* p : {part, lse, out, unwritten}) CHECK(attn_free(context, p) == ATTN_OK);
  attn_plan_destroy(plan);
  attn_context_destroy(context);
}

// ---- conversions -------------------------------------------------------------------------------

namespace {

class Converter {
 public:
  Converter() : driver_(open_emulator()) {
    const Image* image = image_of("convert_gfx942");
    REQUIRE(image);
    REQUIRE(driver_->load(image->bytes(), &module_).ok());
    REQUIRE(driver_->function(module_, "convert_gfx942", 0, &function_).ok());
  }
  ~Converter() { driver_->unload(module_); }

  int log2_per_lane = 2;  // 2 or 0
  // One row of `count` elements, a multiple of 4 where a lane takes four.
  std::vector<unsigned char> convert(const std::vector<unsigned char>& src, int64_t count,
                                     attn_dtype from, attn_dtype to, bool saturate, int scale,
                                     float descale) {
    attn_convert_kernarg a{};
    set_formats(from, to, saturate, Fp8Hardware::fnuz, &a);
    std::vector<unsigned char> dst(size_t(dtype_bytes(to, count)), 0xee);
    void *src_memory = copied(src.data(), src.size()), *dst_memory = copied(dst.data(), dst.size()),
         *descale_memory = copied(&descale, 4);
    a.src = src_memory;
    a.dst = dst_memory;
    a.descale = static_cast<float*>(descale_memory);
    a.seqlen = 1;
    a.head_dim = int(count);
    a.log2_per_lane = log2_per_lane;
    a.scale = scale;
    a.box[0] = a.box[1] = a.box[2] = 1;
    a.src_row_bytes = int(src.size());
    a.dst_row_bytes = int(dst.size());
    Launch launch{function_, {1, 1, 1}, {64 * attn_convert_waves, 1, 1}, 0, &a, sizeof a};
    const Status status = driver_->launch(launch, nullptr);
    INFO(status.text);
    REQUIRE(status.ok());
    REQUIRE(driver_->copy_out(dst.data(), dst_memory, dst.size(), nullptr).ok());
    for (void* p : {src_memory, dst_memory, descale_memory}) REQUIRE(driver_->free(p).ok());
    return dst;
  }

 private:
  void* copied(const void* host, size_t bytes) {
    void* memory = nullptr;
    REQUIRE(driver_->alloc(bytes, &memory).ok());
    REQUIRE(driver_->copy_in(memory, host, bytes, nullptr).ok());
    return memory;
  }
  std::shared_ptr<Driver> driver_;
  Module module_ = nullptr;
  Function function_ = nullptr;
};

template <class T>
std::vector<unsigned char> bytes_of(const std::vector<T>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The first code that is not that of dtype.h, as a sentence.
std::string wrong_code(attn_dtype from, const std::vector<unsigned char>& src, attn_dtype to,
                       bool saturate, float descale, const std::vector<unsigned char>& got) {
  for (size_t n = 0; n < got.size(); ++n) {
    const double x = decode_element(from, src.data(), int64_t(n));
    const uint32_t want = encode(fp8_format(to), std::isnan(x) ? x : x / descale, saturate);
    if (got[n] != want)
      return join(dtype_name(from), " ", x, " / ", descale, " to ", dtype_name(to), ": ",
                  int(got[n]), ", expected ", want);
  }
  return "";
}

}  // namespace

TEST_CASE("convert_gfx942: all 16-bit values to fp8, to the bit", "[hipemu]") {
  if (!image_of("convert_gfx942")) ATTN_SKIP("this build has no gfx9 kernels");
  Converter converter;
  std::vector<uint16_t> all(65536);
  for (size_t n = 0; n < all.size(); ++n) all[n] = uint16_t(n);
  const auto src = bytes_of(all);
  for (attn_dtype from : {ATTN_F16, ATTN_BF16}) {
    for (attn_dtype to : test::list_of(fp8_types)) {
      for (bool saturate : {false, true}) {
        const auto got = converter.convert(src, 65536, from, to, saturate, attn_convert_one, 1);
        CHECK(wrong_code(from, src, to, saturate, 1, got) == "");
      }
    }
  }
}

TEST_CASE("convert_gfx942: quotients are rounded once", "[hipemu]") {
  if (!image_of("convert_gfx942")) ATTN_SKIP("this build has no gfx9 kernels");
  Converter converter;
  uint64_t state = 20261121;
  const auto random = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 32);
  };
  const auto next = [](float x, int steps) {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(x) + uint32_t(steps));
  };
  for (attn_dtype to : test::list_of(fp8_types)) {
    const SmallFloat& format = fp8_format(to);
    for (int round = 0; round < 12; ++round) {
      // Any positive descale, the smallest and the largest among them.
      float descale = std::bit_cast<float>(1 + random() % 0x7f7fffff);
      if (round == 0) descale = 1e-45f;
      if (round == 1) descale = std::numeric_limits<float>::max();
      if (round == 2) descale = 1.0f / 3;
      std::vector<float> x;
      // Midpoints of neighbouring codes times the descale, and the floats around.
      for (uint32_t code = 0; code < format.max_code; ++code) {
        const double middle = (value_of(format, code) + value_of(format, code + 1)) / 2;
        const float product = float(middle * descale);
        if (!(product > 1e-44f) || std::isinf(product)) continue;
        for (int steps = -2; steps <= 2; ++steps)
          x.push_back((random() & 1 ? -1.0f : 1.0f) * next(product, steps));
      }
      while (x.size() < 2048) x.push_back(std::bit_cast<float>(random()));
      x.resize(2048);
      const auto src = bytes_of(x);
      const bool saturate = round % 2 != 0;
      converter.log2_per_lane = round % 3 == 2 ? 0 : 2;
      const auto got =
          converter.convert(src, 2048, ATTN_F32, to, saturate, attn_convert_divide, descale);
      CHECK(wrong_code(ATTN_F32, src, to, saturate, descale, got) == "");
    }
  }
}

TEST_CASE("convert_gfx942: fp8 codes to values", "[hipemu]") {
  if (!image_of("convert_gfx942")) ATTN_SKIP("this build has no gfx9 kernels");
  Converter converter;
  std::vector<unsigned char> src(256);
  for (size_t n = 0; n < src.size(); ++n) src[n] = uint8_t(n);
  for (attn_dtype from : test::list_of(fp8_types)) {
    for (attn_dtype to :
         {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ}) {
      for (float descale : {1.0f, 0.375f, -3.0f}) {
        converter.log2_per_lane = descale == 0.375f ? 0 : 2;
        const auto got =
            converter.convert(src, 256, from, to, false, attn_convert_multiply, descale);
        for (int64_t n = 0; n < 256; ++n) {
          std::vector<unsigned char> want(8);
          encode_element(to, want.data(), 0, decode_element(from, src.data(), n) * descale, false);
          const double x = decode_element(to, got.data(), n),
                       y = decode_element(to, want.data(), 0);
          const bool same =
              (std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y));
          INFO(dtype_name(from) << " code " << n << " * " << descale << " to " << dtype_name(to)
                                << ": " << x << ", expected " << y);
          REQUIRE(same);
        }
      }
    }
  }
}

TEST_CASE("hipemu: random wave orders and load latencies change nothing", "[hipemu]") {
  if (!image_of("convert_gfx942")) ATTN_SKIP("this build has no gfx9 kernels");
  attn_context_options options{};
  options.struct_size = sizeof options;
  options.driver_path = ATTN_HIPEMU;
  attn_context* context = nullptr;
  REQUIRE(attn_context_create(ATTN_BACKEND_HIP_EMU, &options, &context) == ATTN_OK);
  attn_quantize_problem problem{};
  problem.struct_size = sizeof problem;
  problem.batch = 2, problem.seqlen = 37, problem.heads = 2, problem.head_dim = 96;
  problem.src_type = ATTN_BF16;
  problem.dst_type = ATTN_F8_E4M3FN;
  problem.scale = ATTN_SCALE_AMAX;
  attn_plan* plan = nullptr;
  REQUIRE(attn_plan_create_quantize(context, &problem, &plan) == ATTN_OK);
  const size_t elements = 2 * 37 * 2 * 96;
  std::vector<uint16_t> src(elements);
  for (size_t n = 0; n < elements; ++n) src[n] = uint16_t(0x3c00 + n * 2654435761u % 1024);
  void *from = nullptr, *to = nullptr, *descale = nullptr;
  REQUIRE(attn_alloc(context, elements * 2, &from) == ATTN_OK);
  REQUIRE(attn_alloc(context, elements, &to) == ATTN_OK);
  REQUIRE(attn_alloc(context, 4, &descale) == ATTN_OK);
  REQUIRE(attn_copy_in(context, from, src.data(), elements * 2, nullptr) == ATTN_OK);
  const auto codes = [&](const attn_emu_options& emulation) {
    const Configured configured(emulation);
    attn_quantize_args args{sizeof args, from, to, static_cast<float*>(descale), nullptr};
    const attn_status status = attn_run_quantize(plan, &args, nullptr);
    INFO(attn_last_error());
    REQUIRE(status == ATTN_OK);
    std::vector<unsigned char> got(elements + 4);
    REQUIRE(attn_copy_out(context, got.data(), to, elements, nullptr) == ATTN_OK);
    REQUIRE(attn_copy_out(context, &got[elements], descale, 4, nullptr) == ATTN_OK);
    return got;
  };
  attn_emu_options emulation{};
  const auto want = codes(emulation);
  for (uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    emulation.seed = seed;
    INFO("seed " << seed);
    CHECK(codes(emulation) == want);
  }
  emulation = {};
  emulation.checks_off = 1;
  CHECK(codes(emulation) == want);
  for (void* p : {from, to, descale}) CHECK(attn_free(context, p) == ATTN_OK);
  attn_plan_destroy(plan);
  attn_context_destroy(context);
}

#endif  // ATTN_HIPEMU
