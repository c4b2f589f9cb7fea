#include "api/error.h"

namespace attn {
namespace {
thread_local std::string last_error;
}

attn_status report(attn_status code, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();
  }
  return code;
}

attn_status report(const Status& status) noexcept {
  return status.ok() ? ATTN_OK : report(status.code, status.text.c_str());
}

const char* last_error_text() noexcept {
  return last_error.c_str();
}

}  // namespace attn

const char* attn_last_error(void) {
  return attn::last_error_text();
}

const char* attn_status_string(attn_status status) {
  switch (status) {
    case ATTN_OK:
      return "ok";
    case ATTN_INVALID_ARGUMENT:
      return "invalid argument";
    case ATTN_UNSUPPORTED:
      return "unsupported here";
    case ATTN_NO_DEVICE:
      return "no device";
    case ATTN_DRIVER_MISSING:
      return "driver missing";
    case ATTN_DRIVER_ERROR:
      return "driver error";
    case ATTN_OUT_OF_MEMORY:
      return "out of memory";
    case ATTN_WORKSPACE_TOO_SMALL:
      return "workspace too small";
    case ATTN_INTERNAL:
      return "internal error";
    case ATTN_INTERRUPTED:
      return "interrupted";
  }
  return "unknown status";
}
