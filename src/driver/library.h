// Shared libraries opened at run time, and the functions found in them.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/status.h"

namespace attn {

// A function of a driver under the name that errors give it. All return the driver's native code.
template <class... Parameters>
struct Call {
  int (*pointer)(Parameters...) = nullptr;
  const char* name = "";
  int operator()(Parameters... arguments) const { return pointer(arguments...); }
};

// One line of an API's table: where the function goes, its name, and for CUDA the version that
// introduced the ABI that Call declares (1000 * major + 10 * minor).
struct Symbol {
  void** pointer;
  const char* name;
  int version;
  template <class... Parameters>
  Symbol(Call<Parameters...>& call, const char* n, int v = 0)
      : pointer(reinterpret_cast<void**>(&call.pointer)), name(n), version(v) {
    call.name = n;
  }
};

// Opens `name`; *library stays open for the life of the process.
Status open_library(const char* name, void** library);
struct LibraryFolder {
  std::string path, name;  // name: in errors
};
struct LibrarySearch {
  std::vector<const char*> names;      // of any of them, the first that opens
  std::vector<LibraryFolder> folders;  // looked in after where the loader looks
};
// Opens the first that there is. The error names what was tried and how to name another.
Status open_first(const LibrarySearch& search, void** library);
// nullptr unless the process has it open already.
void* find_open_library(const char* name);
// nullptr if the library does not export it.
void* find_symbol(void* library, const char* name);
// The folder of the library or program that this code is part of.
std::string own_folder();
// `name` next to that folder; "" if the folder is not known.
std::string beside_own_folder(const char* name);
// The path of a file that is installed along with it: in its folder, or where libraries lie as seen
// from a program's. "" if it is in neither.
std::string installed_file(const char* name);
// The file that a library came from, for errors.
std::string library_file(void* library, const std::string& fallback);

// Function tables by library, each loaded once per process. Tables and map are never freed, so that
// no static destructor can touch them. A failure is not remembered: the next call tries again.
template <class Calls>
Status load_once(const std::string& key, const std::function<Status(Calls*)>& load,
                 const Calls** calls) {
  static auto& mutex = *new std::mutex;
  static auto& loaded = *new std::map<std::string, const Calls*>;
  std::lock_guard lock(mutex);
  auto& entry = loaded[key];
  if (!entry) {
    auto fresh = std::make_unique<Calls>();
    ATTN_TRY(load(fresh.get()));
    entry = fresh.release();
  }
  *calls = entry;
  return {};
}

}  // namespace attn
