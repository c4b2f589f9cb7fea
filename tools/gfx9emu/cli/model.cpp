// gfx9emu-model: runs a mix of instructions through the issue model and prints JSON.
#include "gfx9emu/model.h"

#include <fstream>
#include <iostream>
#include <iterator>
#include <string_view>

namespace {

int fail(const std::string& file, const std::string& what) {
  std::cerr << "gfx9emu-model: " << file << ": " << what << "\n";
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const bool with_constants = argc == 4 && std::string_view(argv[1]) == "--constants";
  if (argc != 2 && !with_constants) {
    std::cerr << "usage: gfx9emu-model [--constants REPORT.json] FILE.mix\n";
    return 2;
  }
  const auto read = [](const char* path, std::string& text) {
    std::ifstream in(path, std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(in), {});
    return bool(in);
  };
  std::string text;
  gfx9emu::ModelSettings settings;
  std::vector<std::string> measured;
  if (with_constants) {
    if (!read(argv[2], text)) return fail(argv[2], "cannot be read");
    const std::string error = gfx9emu::load_constants(text, settings, measured);
    if (!error.empty()) return fail(argv[2], error);
    if (measured.empty()) return fail(argv[2], "it has a value for none of the model's constants");
  }
  const char* mix = argv[argc - 1];
  gfx9emu::ModelWaves waves;
  if (!read(mix, text)) return fail(mix, "cannot be read");
  const std::string error = gfx9emu::parse_mix(text, waves);
  if (!error.empty()) return fail(mix, error);
  std::cout << gfx9emu::model_json(waves, settings, measured) << std::endl;
}
