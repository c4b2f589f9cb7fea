#include "driver/library.h"

#include <dlfcn.h>
#include <link.h>

namespace attn {

Status open_library(const char* name, void** library) {
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    return {ATTN_DRIVER_MISSING, why ? why : join(name, ": dlopen failed")};
  }
  *library = handle;
  return {};
}

void* find_open_library(const char* name) {
  return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
}

void* find_symbol(void* library, const char* name) {
  return dlsym(library, name);
}

std::string library_file(void* library, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || !map || !map->l_name[0]) return fallback;
  return map->l_name;
}

}  // namespace attn
