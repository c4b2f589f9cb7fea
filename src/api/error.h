// The boundary of the C ABI: exceptions become statuses, statuses become attn_last_error().
#pragma once
#include <new>

#include "core/status.h"

namespace attn {

// Stores the sentence for this thread and returns the code. Success leaves the last sentence alone.
attn_status report(const Status& status) noexcept;
attn_status report(attn_status code, const char* text) noexcept;

// Runs an entry point's body; nothing escapes into C.
template <class Body>
attn_status guarded(Body&& body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report(ATTN_OUT_OF_MEMORY, "host memory is exhausted");
  } catch (const std::exception& error) {
    return report(ATTN_INTERNAL, error.what());
  } catch (...) {
    return report(ATTN_INTERNAL, "an unknown exception was thrown");
  }
}

}  // namespace attn
