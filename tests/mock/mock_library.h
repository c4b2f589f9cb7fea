// A stand-in opened by a test.
#pragma once
#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "catch.h"
#include "mock.h"

namespace attn::mock {

namespace fs = std::filesystem;

// A copy of a stand-in under a name of its own, so that no other test has opened it.
class MockLibrary {
 public:
  explicit MockLibrary(const std::string& name) {
    static int count = 0;
    path_ = fs::temp_directory_path() /
            ("attn-mock-" + std::to_string(getpid()) + "-" + std::to_string(count++) + ".so");
    fs::copy_file(fs::path(ATTN_MOCK_DIR) / (name + ".so"), path_,
                  fs::copy_options::overwrite_existing);
    handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    REQUIRE(handle_);
    if (auto state = symbol<mock::StateFunction>("attn_mock_state")) state_ = state();
  }
  ~MockLibrary() { fs::remove(path_); }
  MockLibrary(const MockLibrary&) = delete;

  const char* path() const { return path_.c_str(); }
  mock::State* operator->() const { return state_; }
  template <class F>
  F symbol(const char* name) const {
    return reinterpret_cast<F>(dlsym(handle_, name));
  }
  void fail(const char* function, int code) {
    std::memset(state_->failing, 0, sizeof state_->failing);
    mock::set_text(state_->failing, function);
    state_->code = code;
  }
  void recover() { fail("", 0); }

 private:
  fs::path path_;
  void* handle_ = nullptr;
  mock::State* state_ = nullptr;
};

}  // namespace attn::mock
