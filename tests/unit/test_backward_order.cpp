// The order in which blocks of bwd_sm90_* add to dq, against plain loops over queries and keys, and
// blocks that take items one after the other.
#include <algorithm>
#include <vector>

#include "catch.h"
#include "forward_case.h"
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
  const bool staggers = !mask.window && draw.chance(2);
  p.list = {.pairs = pairs, .blocks = blocks, .group = group, .chunk = 1 + int(draw(pairs))};
  p.order = {.group = group, .staggers = staggers};
  return p;
}

bool sees(const Sequence& s, int tile, int block) {
  for (int i = tile * tile_queries; i < std::min((tile + 1) * tile_queries, s.queries); ++i)
    for (int j = block * block_keys; j < std::min((block + 1) * block_keys, s.keys); ++j)
      if (j >= i + s.lower && j < i + s.upper) return true;
  return false;
}

// A block's tiles on its way.
std::vector<int> way(const Work& p, const Sequence& s, int block) {
  const Range tiles = s.tiles(block * block_keys, block_keys);
  std::vector<int> way;
  int m = p.order.start(s, tiles, block, block_keys);
  for (int i = 0; i < tiles.count(); ++i) {
    way.push_back(m);
    m = m == tiles.last ? tiles.first : m + 1;
  }
  return way;
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
        std::vector<int> on_way = way(p, s, block);
        std::sort(on_way.begin(), on_way.end());
        std::vector<int> seeing;
        for (int m = 0; m < tiles; ++m)
          if (sees(s, m, block)) seeing.push_back(m);
        // Bands that nobody sees may leave tiles in which nothing is seen.
        right &= on_way == seeing;
        for (const int m : on_way) {
          const Order::Turn turn = p.order.turn(s, m, block, block_keys);
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

// Each multiprocessor takes the next item when it has ended one. One step is a tile.
TEST_CASE("backward order: every number of multiprocessors gets through") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Draw draw{seed, 52};
    const Work p = random_work(draw);
    const int least = p.order.staggers ? p.order.group : 1;
    for (const int multiprocessors : {least, least + 1, 13, 132}) {
      INFO("seed " << seed << ", " << multiprocessors << " multiprocessors");
      struct Worker {
        int pair = -1, block = 0;
        std::vector<int> left;  // its tiles, the next one last
      };
      std::vector<Worker> workers(static_cast<size_t>(std::max(multiprocessors, least)));
      std::vector<std::vector<int>> adds;
      for (const Sequence& s : p.sequences) adds.emplace_back(size_t(s.queries / tile_queries + 1));
      unsigned taken = 0;
      const unsigned items = unsigned(p.list.pairs * p.list.blocks);
      std::vector<char> seen(items);
      bool moves = true;
      while (moves) {
        moves = false;
        for (Worker& w : workers) {
          if (w.left.empty() && taken < items) {
            const ItemList::At at = p.list.at(taken++);
            w.pair = at.pair, w.block = at.block;
            seen[size_t(at.pair * p.list.blocks + at.block)] = 1;
            w.left = way(p, p.sequences[size_t(at.pair)], at.block);
            std::reverse(w.left.begin(), w.left.end());
            moves = true;
          }
          if (w.left.empty()) continue;
          int& turn = adds[size_t(w.pair)][size_t(w.left.back())];
          if (turn <
              p.order.turn(p.sequences[size_t(w.pair)], w.left.back(), w.block, block_keys).before)
            continue;
          ++turn;
          w.left.pop_back();
          moves = true;
        }
      }
      CHECK(std::all_of(workers.begin(), workers.end(),
                        [](const Worker& w) { return w.left.empty(); }));
      CHECK(std::count(seen.begin(), seen.end(), 1) == std::ptrdiff_t(items));
    }
  }
}

}  // namespace
}  // namespace attn::test
