// gfx9emu-model FILE: runs a mix of instructions through the issue model and prints JSON.
#include "gfx9emu/model.h"

#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: gfx9emu-model FILE.mix\n";
    return 2;
  }
  std::ifstream in(argv[1]);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) {
    std::cerr << "gfx9emu-model: cannot read " << argv[1] << "\n";
    return 1;
  }
  gfx9emu::ModelWaves waves;
  const std::string error = gfx9emu::parse_mix(text, waves);
  if (!error.empty()) {
    std::cerr << "gfx9emu-model: " << argv[1] << ": " << error << "\n";
    return 1;
  }
  std::cout << gfx9emu::model_json(waves, {}) << std::endl;
}
