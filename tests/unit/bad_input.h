// A valid setup of which a case spoils one thing, and what the library says then.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.h"
#include "catch.h"

namespace attn::test {

template <class Setup>
struct BadInput {
  const char* name;
  std::function<void(Setup&)> spoil;
  attn_status status;
  std::vector<const char*> words;  // all in the sentence
};

template <class Setup>
void expect(const BadInput<Setup>& c, attn_status status) {
  INFO(c.name << ": " << attn_last_error());
  CHECK(status == c.status);
  for (const char* word : c.words)
    CHECK(std::string(attn_last_error()).find(word) != std::string::npos);
}

}  // namespace attn::test
