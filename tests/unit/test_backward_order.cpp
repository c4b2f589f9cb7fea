// The order in which blocks of bwd_sm90_* add to dq, against plain loops over queries and keys, and
// blocks that take items one after the other.
#include <algorithm>
#include <vector>

#include "catch.h"
#include "conformance/forward_case.h"
#include "kernels/backward_sm90/order.h"

namespace attn::test {
namespace {

using namespace bwd_sm90;

constexpr int block_keys = 128;

struct Work {
  std::vector<Sequence> sequences;  // one for each pair
  ItemList list;
  Order order;
};

Work random_work(Draw& draw) {
  Work p;
  const bool any_lengths = draw.chance(2);
  RangeMask mask{.causal = draw.chance(3),
                 .top_left = draw.chance(6),
                 .window = draw.chance(4),
                 .left = draw(900) - 1,
                 .right = draw(300) - 1};
  const int queries = 1 + int(draw(2600)), keys = 1 + int(draw(2600));
  const int pairs = 1 + int(draw(6));
  for (int i = 0; i < pairs; ++i)
    p.sequences.push_back(any_lengths ? sequence(mask, int(draw(queries + 1)), int(draw(keys + 1)))
                                      : sequence(mask, queries, keys));
  const int blocks = (keys + block_keys - 1) / block_keys;
  const int group = mask.window ? blocks : 1 << draw(4);
  p.list = {.pairs = pairs,
            .blocks = blocks,
            .group = group,
            .chunk = 1 + int(draw(pairs)),
            .across = draw.chance(2)};
  p.order = {group};
  return p;
}

bool sees(const Sequence& s, int tile, int block) {
  for (int i = tile * tile_queries; i < std::min((tile + 1) * tile_queries, s.queries); ++i)
    for (int j = block * block_keys; j < std::min((block + 1) * block_keys, s.keys); ++j)
      if (j >= i + s.lower && j < i + s.upper) return true;
  return false;
}

TEST_CASE("backward order: blocks work on the tiles that see them, each in its turn") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Draw draw{seed, 51};
    const Work p = random_work(draw);
    INFO("seed " << seed);
    for (const Sequence& s : p.sequences) {
      const int tiles = (s.queries + tile_queries - 1) / tile_queries;
      std::vector<std::vector<int>> turns(static_cast<size_t>(tiles));
      bool right = true;
      for (int block = 0; block < p.list.blocks; ++block) {
        const Range own = s.tiles(block * block_keys, block_keys);
        for (int m = 0; m < tiles; ++m) {
          const bool works = own.first <= m && m <= own.last;
          right &= works == sees(s, m, block);
          if (!works) continue;
          const Order::Turn turn = p.order.turn(s.blocks(m, block_keys), block);
          turns[size_t(m)].push_back(turn.before);
          right &= turn.blocks == s.blocks(m, block_keys).count();
        }
      }
      for (std::vector<int>& of_tile : turns) {
        std::sort(of_tile.begin(), of_tile.end());
        for (size_t i = 0; i < of_tile.size(); ++i) right &= of_tile[i] == int(i);
      }
      CHECK(right);
    }
  }
}

TEST_CASE("backward order: rows of statistics beyond 32 bits") {
  const int head = (1 << 25) + 3;
  CHECK(BackwardRows{false, 2, 100, 0}.first_row(head) == int64_t{64} * 4 * head);
  CHECK(BackwardRows{true, 2, 100, 150}.first_row(head) == int64_t{64} * 4 * head);
}

TEST_CASE("backward order: rows that are not used") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Draw draw{seed, 53};
    const RangeMask mask{.causal = draw.chance(3),
                         .top_left = draw.chance(4),
                         .window = draw.chance(2),
                         .left = draw(20) - 1,
                         .right = draw(20) - 1};
    const Sequence s = sequence(mask, 1 + int(draw(40)), 1 + int(draw(40)));
    INFO("seed " << seed);
    Range seeing{s.queries, -1}, seen{s.keys, -1};
    for (int i = 0; i < s.queries; ++i)
      for (int j = 0; j < s.keys; ++j)
        if (j >= i + s.lower && j < i + s.upper) {
          seeing = {std::min(seeing.first, i), std::max(seeing.last, i)};
          seen = {std::min(seen.first, j), std::max(seen.last, j)};
        }
    if (seeing.count() == 0) continue;
    CHECK(s.seeing().first == seeing.first);
    CHECK(s.seeing().last == seeing.last);
    CHECK(s.seen().first == seen.first);
    CHECK(s.seen().last == seen.last);
  }
}

// Each multiprocessor takes the next item when it has ended one. One step is a tile.
TEST_CASE("backward order: every number of multiprocessors gets through") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Draw draw{seed, 52};
    const Work p = random_work(draw);
    for (const int multiprocessors : {1, 2, 13, 132}) {
      INFO("seed " << seed << ", " << multiprocessors << " multiprocessors");
      struct Worker {
        int pair = -1, block = 0;
        int tile = 0;
        Range tiles = {0, -1};
      };
      std::vector<Worker> workers(static_cast<size_t>(multiprocessors));
      std::vector<std::vector<int>> adds;
      for (const Sequence& s : p.sequences) adds.emplace_back(size_t(s.queries / tile_queries + 1));
      unsigned taken = 0;
      const unsigned items = unsigned(p.list.pairs * p.list.blocks);
      std::vector<char> seen(items);
      bool moves = true;
      while (moves) {
        moves = false;
        for (Worker& w : workers) {
          if (w.tile > w.tiles.last && taken < items) {
            const ItemList::At at = p.list.at(taken++);
            w.pair = at.pair, w.block = at.block;
            seen[size_t(at.pair * p.list.blocks + at.block)] = 1;
            w.tiles = p.sequences[size_t(at.pair)].tiles(at.block * block_keys, block_keys);
            w.tile = w.tiles.first;
            moves = true;
          }
          if (w.tile > w.tiles.last) continue;
          const Sequence& s = p.sequences[size_t(w.pair)];
          int& turn = adds[size_t(w.pair)][size_t(w.tile)];
          if (turn < p.order.turn(s.blocks(w.tile, block_keys), w.block).before) continue;
          ++turn;
          ++w.tile;
          moves = true;
        }
      }
      CHECK(std::all_of(workers.begin(), workers.end(),
                        [](const Worker& w) { return w.tile > w.tiles.last; }));
      CHECK(std::count(seen.begin(), seen.end(), 1) == std::ptrdiff_t(items));
    }
  }
}

}  // namespace
}  // namespace attn::test
