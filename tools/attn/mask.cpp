// attn mask: a block mask as text or as a picture.
#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>

#include "attn/mask_io.h"
#include "attn/png.h"

namespace attn::tools {
namespace {

struct MaskOptions {
  std::string in, picture;
  bool as_json = false;
};

constexpr std::array<const char*, 4> kKinds = {"EMPTY", "CAUSAL", "FULL", "PARTIAL"};
constexpr char kLetters[] = ".\\#%";

// Query and key positions: from q and k where the file has them, else whole blocks.
struct Extent {
  int64_t q, kv;
};
Extent extent(const TensorFile& file, const FileMask& mask) {
  if (file.find("q")) {
    const auto input = make_input(file);
    int64_t kv = 0;
    for (const attn_segment& s : input->segments) kv += s.seqlen;
    return {input->problem.seqlen_q, kv};
  }
  return {mask.rows * mask.block_q, mask.columns * mask.block_k};
}

bool visible(const FileMask& mask, const Extent& size, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t row = i / mask.block_q, column = j / mask.block_k;
  switch (mask.kind(b, h, row, column)) {
    case ATTN_BLOCK_CAUSAL:
      return j <= i + size.kv - size.q;
    case ATTN_BLOCK_FULL:
      return true;
    case ATTN_BLOCK_PARTIAL:
      return mask.bit(mask.index.as<int32_t>()[mask.cell(b, h, row, column)], i % mask.block_q,
                      j % mask.block_k);
    default:
      return false;
  }
}

// One picture per (batch, head), heads side by side, entries below each other. Elements of large
// masks are sampled so that the whole stays within a few million pixels.
Picture draw(const FileMask& mask, const Extent& size) {
  constexpr int64_t most_pixels = 16 << 20;
  constexpr int64_t gap = 4;
  constexpr uint8_t background = 4, hidden = 5;
  int64_t step = 1, width = 0, height = 0, grid_w = 0, grid_h = 0;
  for (;; ++step) {
    grid_w = (size.kv + step - 1) / step;
    grid_h = (size.q + step - 1) / step;
    width = mask.heads * (grid_w + gap) + gap;
    height = mask.batch * (grid_h + gap) + gap;
    if (width <= most_pixels / height) break;
    if (grid_w <= 1 && grid_h <= 1)
      throw InputError("the mask has too many batch entries and heads for one picture");
  }
  Picture picture;
  // EMPTY, CAUSAL, FULL, PARTIAL where visible; between the masks; hidden inside a block that is
  // not EMPTY.
  picture.palette = {{{255, 255, 255},
                      {52, 120, 60},
                      {40, 62, 110},
                      {214, 122, 30},
                      {150, 150, 150},
                      {232, 228, 214}}};
  picture.width = static_cast<uint32_t>(width);
  picture.height = static_cast<uint32_t>(height);
  picture.pixels.assign(static_cast<size_t>(width * height), background);
  for (int64_t b = 0; b < mask.batch; ++b)
    for (int64_t h = 0; h < mask.heads; ++h)
      for (int64_t y = 0; y < grid_h; ++y) {
        uint8_t* row = picture.pixels.data() + (gap + b * (grid_h + gap) + y) * width + gap +
                       h * (grid_w + gap);
        for (int64_t x = 0; x < grid_w; ++x) {
          const int64_t i = y * step, j = x * step;
          const uint8_t kind = mask.kind(b, h, i / mask.block_q, j / mask.block_k);
          row[x] = kind == ATTN_BLOCK_EMPTY || visible(mask, size, b, h, i, j) ? kind : hidden;
        }
      }
  return picture;
}

void show(const MaskOptions& options) {
  Progress progress;
  progress.say("reading " + options.in);
  const TensorFile file = need(read_tensors(options.in));
  const FileMask mask = read_mask(file);
  const Extent size = extent(file, mask);
  progress.say("");

  Json grids = Json::array();
  if (!options.as_json)
    std::printf("blocks of %d queries x %d keys: . EMPTY  \\ CAUSAL  # FULL  %% PARTIAL\n",
                mask.block_q, mask.block_k);
  for (int64_t b = 0; b < mask.batch; ++b)
    for (int64_t h = 0; h < mask.heads; ++h) {
      std::array<int64_t, 4> counts{};
      Json lines = Json::array();
      for (int64_t row = 0; row < mask.rows; ++row) {
        std::string line;
        for (int64_t column = 0; column < mask.columns; ++column) {
          const uint8_t kind = mask.kind(b, h, row, column);
          ++counts[kind];
          line += kLetters[kind];
        }
        lines.push_back(line);
      }
      Json grid = {{"batch", b}, {"head", h}};
      for (size_t kind = 0; kind < counts.size(); ++kind) grid[kKinds[kind]] = counts[kind];
      grid["rows"] = lines;
      if (!options.as_json) {
        std::printf("batch %lld, head %lld: %lld EMPTY, %lld CAUSAL, %lld FULL, %lld PARTIAL\n",
                    static_cast<long long>(b), static_cast<long long>(h),
                    static_cast<long long>(counts[0]), static_cast<long long>(counts[1]),
                    static_cast<long long>(counts[2]), static_cast<long long>(counts[3]));
        for (const Json& line : lines) std::printf("%s\n", line.get<std::string>().c_str());
      }
      grids.push_back(std::move(grid));
    }
  if (!options.picture.empty()) {
    const std::string png = png_bytes(draw(mask, size));
    need(write_file(options.picture, {std::as_bytes(std::span(png.data(), png.size()))}));
    if (!options.as_json) std::printf("picture written to %s\n", options.picture.c_str());
  }
  if (options.as_json) {
    const Json report = {{"block_size", {mask.block_q, mask.block_k}},
                         {"partials", mask.partials},
                         {"masks", grids}};
    std::cout << report.dump(2) << "\n";
  }
}

}  // namespace

void add_mask(CLI::App& app, int&) {
  auto* command = app.add_subcommand("mask", "Show the block mask of IN, a character per block");
  auto o = std::make_shared<MaskOptions>();
  command->footer(mask_help);
  command->add_option("IN", o->in)->required();
  command->add_option("--show", o->picture, "write a picture, a pixel per element")
      ->type_name("OUT.png");
  add_json(*command, o->as_json);
  command->callback([o] { show(*o); });
}

}  // namespace attn::tools
