// What loading a module costs, for cubins, PTX and fatbins: g++ -O2 -std=c++20
// bench/dev/load_time.cpp -o load_time -ldl; load_time FILE... prints, per file, the first load and
// the median of 20 more, in milliseconds. The driver's cache of compiled PTX is on unless
// CUDA_CACHE_DISABLE=1.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

template <class... Args>
void call(void* library, const char* name, Args... args) {
  const auto function = reinterpret_cast<int (*)(Args...)>(dlsym(library, name));
  const int code = function ? function(args...) : -1;
  if (code != 0) {
    std::fprintf(stderr, "%s: %d\n", name, code);
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  int device = 0;
  void* context = nullptr;
  call(cuda, "cuInit", 0u);
  call(cuda, "cuDeviceGet", &device, 0);
  call(cuda, "cuDevicePrimaryCtxRetain", &context, device);
  call(cuda, "cuCtxSetCurrent", context);
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    std::string image((std::istreambuf_iterator<char>(file)), {});  // ends in a 0, as PTX must
    std::string kernel = std::string(argv[i]).substr(std::string(argv[i]).rfind('/') + 1);
    kernel = kernel.substr(0, kernel.find('.'));
    std::vector<double> ms;
    for (int n = 0; n < 21; ++n) {
      void *module = nullptr, *function = nullptr;
      const auto start = Clock::now();
      call(cuda, "cuModuleLoadData", &module, static_cast<const void*>(image.c_str()));
      call(cuda, "cuModuleGetFunction", &function, module,
           kernel.c_str());  // lazy loading ends here
      ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      call(cuda, "cuModuleUnload", module);
    }
    std::sort(ms.begin() + 1, ms.end());
    std::printf("%-50s %8zu bytes  first %8.3f  median %8.3f\n", argv[i], image.size(), ms[0],
                ms[11]);
  }
}
