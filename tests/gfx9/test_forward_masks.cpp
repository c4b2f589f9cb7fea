// What block masks cost the FP8 forward kernels: EMPTY blocks nothing, FULL blocks what they cost
// the kernels without masks.
#include <cstring>
#include <iostream>
#include <vector>

#include "catch.h"
#include "gfx9/forward_kernarg.h"
#include "gfx9/shipped.h"
#include "gfx9emu/emu.h"
#include "gfx9emu/model.h"

using namespace gfx9emu;

namespace {

constexpr uint8_t empty = attn_kind_empty, full = attn_kind_full;

struct Grid {
  int block_q, block_k;
  std::vector<uint8_t> kinds;  // rows of 256 queries; none: no mask
};

// 256 queries of one head over so many tiles of 64 keys. Memory of tiles that lie in EMPTY blocks
// alone is never written, nor is that of tile `unwritten`, which the emulator reports if it is
// read. `clocks`: what the issue model makes of it.
Report run(int dim, int tiles, const Grid& grid, int unwritten = -1, uint64_t* clocks = nullptr) {
  const std::string name =
      "fwd_gfx942_fp8_d" + std::to_string(dim) + (grid.kinds.empty() ? "" : "_mask");
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  const uint64_t tile_bytes = uint64_t(128) * dim;
  const uint64_t prepared = memory.allocate(tiles * tile_bytes);
  attn_gfx942_mask_kernarg m{};
  m.forward = attn::test::zero_queries(memory, dim, tiles, reinterpret_cast<void*>(prepared));
  const int in_block = grid.block_k / 64;
  m.block_mask.rows = 256 / grid.block_q;
  m.block_mask.columns = (tiles + in_block - 1) / in_block;
  m.block_mask.block_q_log2 = grid.block_q == 64 ? 6 : 7;
  m.block_mask.block_k_log2 = grid.block_k == 64 ? 6 : 7;
  for (int tile = 0; tile < tiles; ++tile) {
    bool live = grid.kinds.empty();
    for (int row = 0; row < m.block_mask.rows && !live; ++row)
      live = grid.kinds[size_t(row * m.block_mask.columns + tile / in_block)] != empty;
    if (live && tile != unwritten) memory.fill(prepared + tile * tile_bytes, 0, tile_bytes);
  }
  std::vector<std::byte> kernarg(sizeof m.forward);
  if (!grid.kinds.empty()) {
    REQUIRE(grid.kinds.size() == size_t(m.block_mask.rows * m.block_mask.columns));
    void* kinds = attn::test::zeros(memory, grid.kinds.size());
    memory.write(reinterpret_cast<uint64_t>(kinds), std::as_bytes(std::span(grid.kinds)));
    m.block_mask.kinds = static_cast<const unsigned char*>(kinds);
    kernarg.resize(sizeof m);
  }
  std::memcpy(kernarg.data(), &m, kernarg.size());
  const Report report =
      launch(memory, *object->kernel(name), {1}, {512}, kernarg, 0, {.trace = clocks != nullptr});
  if (clocks) *clocks = run_model(model_waves(object->program(), report.traces), {}).clocks;
  return report;
}
Counters counters(int dim, int tiles, const Grid& grid) {
  const Report report = run(dim, tiles, grid);
  for (const Fault& f : report.faults) UNSCOPED_INFO(f.to_string());
  REQUIRE(report.faults.empty());
  return report.counters;
}

// FULL at the columns `live`, in one row or another, EMPTY elsewhere.
Grid grid_of(int block_q, int block_k, int tiles, const std::vector<int>& live) {
  const int rows = 256 / block_q, columns = (tiles + block_k / 64 - 1) / (block_k / 64);
  Grid grid{block_q, block_k, std::vector<uint8_t>(size_t(rows * columns), empty)};
  for (size_t n = 0; n < live.size(); ++n)
    grid.kinds[n % size_t(rows) * size_t(columns) + size_t(live[n])] = full;
  return grid;
}

bool have_kernels() {
  Memory memory;
  return attn::test::load_shipped("fwd_gfx942_fp8_d128_mask", &memory) != nullptr;
}

}  // namespace

TEST_CASE("forward fp8: EMPTY blocks are not loaded", "[gfx9]") {
  if (!have_kernels()) ATTN_SKIP("this build has no gfx942 kernels");
  for (const int dim : {64, 128}) {
    const uint64_t tile_bytes = uint64_t(128) * dim;
    for (const int block_q : {64, 128}) {
      for (const int block_k : {64, 128}) {
        INFO(dim << ", blocks of " << block_q << " x " << block_k);
        const uint64_t in_block = block_k / 64;
        const Grid few = grid_of(block_q, block_k, 60, {0, 17, 29});
        const Counters three = counters(dim, 60, few);
        const Counters nine =
            counters(dim, 60, grid_of(block_q, block_k, 60, {0, 1, 2, 3, 10, 11, 20, 28, 29}));
        CHECK(nine.global_read_bytes - three.global_read_bytes == 6 * in_block * tile_bytes);
        // The same instructions, loads among them, as with a mask of the live blocks alone.
        const int tiles = int(3 * in_block);
        const Counters alone = counters(dim, tiles, grid_of(block_q, block_k, tiles, {0, 1, 2}));
        CHECK(alone.instructions == three.instructions);
        // A wave multiplies what its own block shows: a tile is that of block_q / 32 waves.
        const uint64_t waves = uint64_t(block_q / 32), mfma = uint64_t(4 + dim / 4);
        CHECK(nine.instructions[int(Class::Mfma)] == 9 * in_block * waves * mfma);
        // A load would have been reported.
        CHECK(!run(dim, 60, few, 17 * int(in_block)).faults.empty());
      }
    }
  }
}

TEST_CASE("forward fp8: FULL blocks run without the code of masks", "[gfx9]") {
  if (!have_kernels()) ATTN_SKIP("this build has no gfx942 kernels");
  for (const int dim : {64, 128}) {
    const auto grid_for = [](bool mask, int tiles) {
      Grid g{64, 64, {}};
      if (mask) g.kinds.assign(size_t(4 * tiles), full);
      return g;
    };
    const auto per_tile = [&](bool mask, Class c) {
      const auto grid = [&](int tiles) { return grid_for(mask, tiles); };
      return double(counters(dim, 24, grid(24)).instructions[int(c)] -
                    counters(dim, 8, grid(8)).instructions[int(c)]) /
             (16 * 8.0);
    };
    for (const Class c : {Class::Valu, Class::PackedF32, Class::Trans, Class::Mfma, Class::Lds,
                          Class::Buffer, Class::Wait, Class::Barrier, Class::Nop}) {
      INFO(dim << " " << class_name(c));
      CHECK(per_tile(true, c) == per_tile(false, c));
    }
    std::cout << "fwd_gfx942_fp8_d" << dim << "_mask, FULL blocks: SALU "
              << per_tile(true, Class::Salu) << " a tile and wave, branches "
              << per_tile(true, Class::Branch) << "; without a mask "
              << per_tile(false, Class::Salu) << " and " << per_tile(false, Class::Branch)
              << std::endl;
    uint64_t clocks[2];  // of 16 steps, without and with a mask
    for (int mask = 0; mask < 2; ++mask) {
      uint64_t few = 0, many = 0;
      run(dim, 8, grid_for(mask, 8), -1, &few);
      run(dim, 24, grid_for(mask, 24), -1, &many);
      clocks[mask] = many - few;
    }
    std::cout << "  clocks per step of two waves on a SIMD: " << double(clocks[1]) / 16
              << ", without a mask " << double(clocks[0]) / 16 << std::endl;
    CHECK(double(clocks[0]) >= 0.97 * double(clocks[1]));
  }
}
