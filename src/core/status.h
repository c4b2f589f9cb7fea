// Status: a code and, on failure, the sentence that attn_last_error() hands out.
#pragma once
#include <sstream>
#include <string>
#include <utility>

#include "attn/attn.h"

namespace attn {

struct [[nodiscard]] Status {
  attn_status code = ATTN_OK;
  std::string text;

  Status() = default;
  Status(attn_status c, std::string t) : code(c), text(std::move(t)) {}
  bool ok() const { return code == ATTN_OK; }
};

// Joins its arguments as operator<< prints them.
template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
Status invalid(const Parts&... parts) {
  return {ATTN_INVALID_ARGUMENT, join(parts...)};
}
template <class... Parts>
Status unsupported(const Parts&... parts) {
  return {ATTN_UNSUPPORTED, join(parts...)};
}

// Returns from the enclosing function on failure.
#define ATTN_TRY(expression)                                                  \
  do {                                                                        \
    if (::attn::Status attn_try_status = (expression); !attn_try_status.ok()) \
      return attn_try_status;                                                 \
  } while (0)

}  // namespace attn
