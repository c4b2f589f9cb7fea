#include "driver/library.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

namespace fs = std::filesystem;

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

Status open_first(const LibrarySearch& search, void** library) {
  std::string tried, last;  // names with one reason are listed before it
  const auto attempt = [&](const std::string& name) {
    const Status status = open_library(name.c_str(), library);
    if (status.ok()) return true;
    std::string why = status.text;
    if (why.starts_with(name + ": ")) why.erase(0, name.size() + 2);
    if (!last.empty() && why == last)
      tried.insert(tried.size() - last.size() - 2, join(", ", name));
    else
      tried += join(tried.empty() ? "" : "; ", name, ": ", why);
    last = why;
    return false;
  };
  for (const char* name : search.names)
    if (attempt(name)) return {};
  std::string without;  // folders that have none
  for (const LibraryFolder& folder : search.folders) {
    bool any = false;
    for (const char* name : search.names) {
      const fs::path file = fs::path(folder.path) / name;
      std::error_code error;
      if (!fs::exists(file, error)) continue;
      any = true;
      if (attempt(file.string())) return {};
    }
    const bool variable = folder.name != folder.path;
    if (!any)
      without += join(without.empty() ? "" : ", ", folder.name,
                      variable ? join(" (", folder.path, ")") : "");
  }
  if (!without.empty()) tried += join("; nor in ", without);
  return {ATTN_DRIVER_MISSING,
          tried + "; LD_LIBRARY_PATH may name its folder, driver_path (attn --driver) the file"};
}

void* find_open_library(const char* name) {
  return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
}

void* find_symbol(void* library, const char* name) {
  return dlsym(library, name);
}

std::string own_folder() {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(reinterpret_cast<void*>(&own_folder), &info, reinterpret_cast<void**>(&map),
              RTLD_DL_LINKMAP) == 0)
    return "";
  std::error_code error;
  // A program has no name here, and what it was called by need not be in the current folder.
  const fs::path file = fs::canonical(map->l_name[0] ? map->l_name : "/proc/self/exe", error);
  return error ? "" : file.parent_path().string();
}

std::string beside_own_folder(const char* name) {
  const fs::path folder = own_folder();
  return folder.empty() ? "" : (folder.parent_path() / name).string();
}

std::string installed_file(const char* name) {
  const fs::path folder = own_folder();
  if (folder.empty()) return "";
  std::error_code error;
  for (const fs::path& candidate : {folder / name, folder / ATTN_LIB_FROM_BIN / name})
    if (fs::exists(candidate, error)) return candidate.lexically_normal().string();
  return "";
}

std::string library_file(void* library, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || !map || !map->l_name[0]) return fallback;
  return map->l_name;
}

}  // namespace attn
