// Areas one after the other in memory of the caller's, such as the arrays of a thread's scratch.
#pragma once
#include <cstddef>

#include "core/ceil_div.h"

namespace attn {

// Without a base it only counts the bytes.
class Place {
 public:
  explicit Place(char* base) : base_(base) {}
  template <class T>
  void take(T*& pointer, int64_t count) {
    if (base_) pointer = reinterpret_cast<T*>(base_ + used_);
    used_ += size_t(round_up(count * int64_t(sizeof(T)), 256));
  }
  size_t used() const { return used_; }
  void go_to(size_t used) { used_ = used; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace attn
