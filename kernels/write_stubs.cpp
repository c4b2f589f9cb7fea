// Writes the source file of each kernel that is a line of a variants.h: write_stubs FOLDER. A file
// that has its text already is left alone. Prints the files' names. Run when the build is
// configured.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "backward_sm80/variants.h"
#include "backward_sm90/variants.h"
#include "decode/variants.h"
#include "forward_sm80/variants.h"
#include "forward_sm90/fp8_variants.h"
#include "forward_sm90/variants.h"
#include "mla/variants.h"

namespace {

bool write(const std::string& path, const std::string& text) {
  std::ifstream before(path);
  if (before && std::string(std::istreambuf_iterator<char>(before), {}) == text) return true;
  return bool(std::ofstream(path) << text);
}

// The first line is what declaration.cmake reads. `more`: further arguments of the macro.
template <class Variant, unsigned n, class More>
bool write_all(const std::string& folder, const Variant (&variants)[n], const char* header,
               const char* macro, More more) {
  for (const Variant& v : variants) {
    std::string text = std::string("//# architectures ") + v.architectures();
    if (v.local_bytes > 0) text += " local_bytes=" + std::to_string(v.local_bytes);
    text +=
        std::string("\n#include \"") + header + "\"\n\n" + macro + "(" + v.name + more(v) + ")\n";
    const std::string file = std::string(v.name) + ".cu";
    if (!write(folder + "/" + file, text)) {
      std::perror((folder + "/" + file).c_str());
      return false;
    }
    std::puts(file.c_str());
  }
  return true;
}

std::string nothing(const auto&) {
  return "";
}
std::string cluster(const auto& v) {
  return v.tile.blocks > 1 ? ", __cluster_dims__(" + std::to_string(v.tile.blocks) + ")" : "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: write_stubs FOLDER\n", stderr);
    return 2;
  }
  using namespace attn;
  const bool written =
      write_all(argv[1], decode::variants, "decode/decode.cuh", "ATTN_DECODE",
                nothing<decode::Variant>) &&
      write_all(argv[1], mla::few_variants, "mla/few.cuh", "ATTN_MLA_FEW", nothing<mla::Variant>) &&
      write_all(argv[1], mla::by_rows_variants, "mla/by_rows.cuh", "ATTN_MLA_BY_ROWS",
                nothing<mla::Variant>) &&
      write_all(argv[1], mla::many_variants, "mla/many.cuh", "ATTN_MLA_MANY",
                nothing<mla::Variant>) &&
      write_all(argv[1], sm80::variants, "forward_sm80/forward.cuh", "ATTN_SM80_FORWARD",
                nothing<sm80::Variant>) &&
      write_all(argv[1], bwd_sm80::variants, "backward_sm80/backward.cuh", "ATTN_SM80_BACKWARD",
                nothing<bwd_sm80::Variant>) &&
      write_all(argv[1], bwd_sm90::variants, "backward_sm90/backward.cuh", "ATTN_SM90_BACKWARD",
                cluster<bwd_sm90::Variant>) &&
      write_all(argv[1], sm90::variants, "forward_sm90/forward.cuh", "ATTN_SM90_FORWARD",
                cluster<sm90::Variant>) &&
      write_all(argv[1], sm90::fp8_variants, "forward_sm90/fp8_forward.cuh",
                "ATTN_SM90_FP8_FORWARD", cluster<sm90::Variant>);
  return written ? 0 : 1;
}
