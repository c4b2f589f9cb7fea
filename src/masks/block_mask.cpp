#include "masks/block_mask.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "kernels/shared/mask.h"
#include "problem/problem.h"
#include "problem/rules.h"

namespace attn {
namespace {

// The elements of one block that exist: queries [i, i_end) and keys [j, j_end).
struct Cell {
  int64_t b, h, row, column;
  int64_t i, i_end, j, j_end;
  int64_t elements() const { return (i_end - i) * (j_end - j); }
};

// The bits of one block. Queries and keys are given as positions.
class Bits {
 public:
  Bits(const MaskShape& shape, const Cell& cell, uint32_t* words)
      : shape_(shape), cell_(cell), words_(words) {}
  uint32_t* row(int64_t i) { return words_ + (i - cell_.i) * shape_.row_words(); }
  // Query i sees the keys [begin, end), of which those outside the block are left out.
  void show(int64_t i, int64_t begin, int64_t end) {
    begin = std::max(begin, cell_.j) - cell_.j;
    end = std::min(end, cell_.j_end) - cell_.j;
    uint32_t* words = row(i);
    for (int64_t at = begin, next; at < end; at = next) {
      next = std::min(end, (at / 32 + 1) * 32);
      words[at / 32] |= ~0u >> (32 - (next - at)) << (at % 32);
    }
  }
  void show(int64_t i, int64_t j) { row(i)[(j - cell_.j) / 32] |= 1u << ((j - cell_.j) % 32); }

 private:
  const MaskShape& shape_;
  const Cell& cell_;
  uint32_t* words_;
};

// Appends PARTIAL blocks to a mask, equal ones once.
class Partials {
 public:
  explicit Partials(HostMask* mask) : mask_(*mask), known_(64, Hash{mask}, Equal{mask}) {}
  // Room for the next block, all zero. Valid until the next call.
  uint32_t* open() {
    mask_.bits.resize(mask_.bits.size() + mask_.shape.block_words());
    return mask_.bits.data() + mask_.bits.size() - mask_.shape.block_words();
  }
  // Keeps what open() gave; its index, or that of an equal block.
  int32_t keep() {
    const auto [found, added] = known_.insert(int32_t(mask_.partials() - 1));
    if (!added) drop();
    return *found;
  }
  void drop() { mask_.bits.resize(mask_.bits.size() - mask_.shape.block_words()); }

 private:
  struct Hash {
    const HostMask* mask;
    size_t operator()(int32_t n) const {
      const int64_t words = mask->shape.block_words();
      uint64_t hash = 0;
      for (int64_t w = 0; w < words; ++w)
        hash = (hash ^ mask->bits[n * words + w]) * 0x9e3779b97f4a7c15ull + (hash >> 29);
      return size_t(hash ^ hash >> 32);
    }
  };
  struct Equal {
    const HostMask* mask;
    bool operator()(int32_t a, int32_t b) const {
      const int64_t words = mask->shape.block_words();
      return std::equal(&mask->bits[a * words], &mask->bits[a * words] + words,
                        &mask->bits[b * words]);
    }
  };
  HostMask& mask_;
  std::unordered_set<int32_t, Hash, Equal> known_;
};

// Calls visit(number, cell) for every block of the grid, unless the interrupt stops it.
template <class Visit>
Status for_each_cell(const MaskShape& s, Interrupt& interrupt, Visit&& visit) {
  if (s.cells() == 0) return {};
  const int64_t operations = 8 * (s.block_words() + s.block_q);
  int64_t n = 0;
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t row = 0; row < s.rows(); ++row)
        for (int64_t column = 0; column < s.columns(); ++column) {
          if (interrupt.stop(0, operations)) return interrupt.status();
          visit(n++, Cell{b, h, row, column, row * s.block_q,
                          std::min((row + 1) * s.block_q, s.seqlen_q), column * s.block_k,
                          std::min((column + 1) * s.block_k, s.seqlen_kv)});
        }
  return {};
}

void start(const MaskShape& shape, HostMask* out) {
  out->shape = shape;
  out->kinds.assign(shape.cells(), ATTN_BLOCK_EMPTY);
  out->index.assign(shape.cells(), -1);
  out->bits.clear();
}

constexpr auto nowhere = [](const Cell&) { return false; };

// A mask of the elements that fill(cell, bits) shows. CAUSAL blocks move with the lengths of a
// call, so there are none but those that causal(cell) asks for.
template <class Fill, class Causal = decltype(nowhere)>
Status build(const MaskShape& shape, Interrupt& interrupt, HostMask* out, Fill&& fill,
             const Causal& causal = nowhere) {
  constexpr int64_t most_words = 1 << 28;
  if (shape.block_words() > most_words)
    return invalid("shape.block_q * block_k is ", shape.block_q, " * ", shape.block_k,
                   "; accepted by this builder: up to ", 32 * most_words);
  start(shape, out);
  Partials partials(out);
  return for_each_cell(shape, interrupt, [&](int64_t n, const Cell& cell) {
    if (causal(cell)) {
      out->kinds[n] = ATTN_BLOCK_CAUSAL;
      return;
    }
    uint32_t* words = partials.open();
    Bits bits(shape, cell, words);
    fill(cell, bits);
    int64_t seen = 0;
    for (int64_t w = 0; w < shape.block_words(); ++w) seen += std::popcount(words[w]);
    if (seen == 0 || seen == cell.elements()) {
      partials.drop();
      out->kinds[n] = seen == 0 ? ATTN_BLOCK_EMPTY : ATTN_BLOCK_FULL;
    } else {
      out->kinds[n] = ATTN_BLOCK_PARTIAL;
      out->index[n] = partials.keep();
    }
  });
}

// One bit of each of eight bytes that are 0 or not.
unsigned gather_bits(const uint8_t* bytes) {
  uint64_t x;
  std::memcpy(&x, bytes, 8);
  x |= x >> 4;
  x |= x >> 2;
  x |= x >> 1;
  return unsigned((x & 0x0101010101010101ull) * 0x0102040810204080ull >> 56);
}

// Number of the block of another mask, whose batch and heads may be 1, under a cell.
int64_t number_in(const MaskShape& s, const Cell& cell) {
  const int64_t plane = (s.batch == 1 ? 0 : cell.b) * s.heads + (s.heads == 1 ? 0 : cell.h);
  return (plane * s.rows() + cell.row) * s.columns() + cell.column;
}

// Adds what a mask shows in a cell to `bits`.
void expand(const HostMask& mask, const Cell& cell, Bits* bits) {
  const MaskShape& s = mask.shape;
  const int64_t n = number_in(s, cell);
  const RangeMask causal{true, false, false, 0, 0};
  for (int64_t i = cell.i; i < cell.i_end; ++i) {
    switch (mask.kinds[n]) {
      case ATTN_BLOCK_CAUSAL:
        bits->show(i, 0, causal.keys(i, s.seqlen_q, s.seqlen_kv).end);
        break;
      case ATTN_BLOCK_FULL:
        bits->show(i, cell.j, cell.j_end);
        break;
      case ATTN_BLOCK_PARTIAL: {
        const uint32_t* from = &mask.bits[mask.index[n] * s.block_words()];
        for (int64_t j = cell.j; j < cell.j_end; ++j) {
          const int64_t at = (i - cell.i) * 32 * s.row_words() + (j - cell.j);
          if (from[at / 32] >> (at % 32) & 1) bits->show(i, j);
        }
        break;
      }
    }
  }
}

}  // namespace

Status make_mask_shape(const attn_block_mask_shape* in, bool host_memory, MaskShape* s) {
  ATTN_TRY(copy_versioned("shape", in, static_cast<attn_block_mask_shape*>(s)));
  if (s->batch == 0) s->batch = 1;
  if (s->heads == 0) s->heads = 1;
  ATTN_TRY(in_range("shape.batch", s->batch, 1, max_extent));
  ATTN_TRY(in_range("shape.heads", s->heads, 1, max_extent));
  ATTN_TRY(in_range("shape.seqlen_q", s->seqlen_q, 0, max_extent));
  ATTN_TRY(in_range("shape.seqlen_kv", s->seqlen_kv, 0, max_extent));
  for (const auto& [name, size] :
       {std::pair{"shape.block_q", s->block_q}, std::pair{"shape.block_k", s->block_k}}) {
    if (host_memory)
      ATTN_TRY(in_range(name, size, 1, max_extent));
    else if (size != 64 && size != 128)
      return invalid(name, " is ", size, "; accepted on a GPU: 64, 128");
  }
  // Each factor is below 2^31, so that products of two cannot overflow.
  const int64_t planes = s->batch * s->heads, blocks = s->rows() * s->columns();
  int64_t cells;
  if (__builtin_mul_overflow(planes, blocks, &cells) || cells >= max_extent)
    return invalid("shape has ", planes, " * ", blocks, " blocks; accepted: below 2^31");
  return {};
}

Status mask_from_dense(const MaskShape& s, const uint8_t* dense, Interrupt& interrupt,
                       HostMask* out) {
  return build(s, interrupt, out, [&](const Cell& cell, Bits& bits) {
    for (int64_t i = cell.i; i < cell.i_end; ++i) {
      const uint8_t* from =
          dense + ((cell.b * s.heads + cell.h) * s.seqlen_q + i) * s.seqlen_kv + cell.j;
      const int64_t count = cell.j_end - cell.j;
      uint32_t* to = bits.row(i);
      int64_t c = 0;
      for (; c + 8 <= count; c += 8) to[c / 32] |= gather_bits(from + c) << (c % 32);
      for (; c < count; ++c) to[c / 32] |= uint32_t{from[c] != 0} << (c % 32);
    }
  });
}

Status mask_from_documents(const MaskShape& s, const int64_t* lengths, int64_t num_documents,
                           int32_t causal, Interrupt& interrupt, HostMask* out) {
  if (s.seqlen_q != s.seqlen_kv)
    return invalid("shape.seqlen_q is ", s.seqlen_q,
                   "; accepted for documents: seqlen_kv = ", s.seqlen_kv);
  if (causal != 0 && causal != 1) return invalid("causal is ", causal, "; accepted: 0, 1");
  ATTN_TRY(in_range("num_documents", num_documents, 0, max_extent));
  std::vector<int64_t> begin(s.seqlen_q), end(s.seqlen_q);  // of the document of each position
  int64_t at = 0;
  for (int64_t n = 0; n < num_documents; ++n) {
    if (lengths[n] < 0 || lengths[n] > s.seqlen_q - at)
      return invalid("lengths[", n, "] is ", lengths[n], "; accepted: 0 to ", s.seqlen_q - at,
                     ", what the documents before it leave of seqlen_q = ", s.seqlen_q);
    std::fill_n(begin.begin() + at, lengths[n], at);
    std::fill_n(end.begin() + at, lengths[n], at + lengths[n]);
    at += lengths[n];
  }
  if (at != s.seqlen_q)
    return invalid("lengths add up to ", at, "; accepted: seqlen_q = ", s.seqlen_q);
  return build(s, interrupt, out, [&](const Cell& cell, Bits& bits) {
    for (int64_t i = cell.i; i < cell.i_end; ++i) bits.show(i, begin[i], causal ? i + 1 : end[i]);
  });
}

Status mask_from_window(const MaskShape& s, int64_t left, int64_t right, int64_t global_tokens,
                        int64_t prefix_tokens, Interrupt& interrupt, HostMask* out) {
  ATTN_TRY(window_side("window_left", &left));
  ATTN_TRY(window_side("window_right", &right));
  ATTN_TRY(in_range("global_tokens", global_tokens, 0, s.seqlen_kv + 1));
  ATTN_TRY(in_range("prefix_tokens", prefix_tokens, 0, s.seqlen_kv + 1));
  const RangeMask window{false, false, true, left, right};
  return build(s, interrupt, out, [&](const Cell& cell, Bits& bits) {
    for (int64_t i = cell.i; i < cell.i_end; ++i) {
      const KeyRange keys = window.keys(i, s.seqlen_q, s.seqlen_kv);
      bits.show(i, keys.begin, keys.end);
      bits.show(i, 0, std::max(global_tokens, prefix_tokens));
    }
  });
}

Status check_num_intervals(int32_t num_intervals) {
  if (num_intervals == 1 || num_intervals == 2) return {};
  return invalid("num_intervals is ", num_intervals, "; accepted: 1, 2");
}

Status mask_from_intervals(const MaskShape& s, const int32_t* intervals, int32_t num_intervals,
                           Interrupt& interrupt, HostMask* out) {
  const int64_t count = s.cells() == 0 ? 0 : s.batch * s.heads * s.seqlen_kv * num_intervals;
  for (int64_t n = 0; n < count; ++n) {
    const int32_t begin = intervals[2 * n], end = intervals[2 * n + 1];
    if (begin < 0 || begin > end || end > s.seqlen_q)
      return invalid("interval ", n % num_intervals, " of key ", n / num_intervals % s.seqlen_kv,
                     " is [", begin, ", ", end,
                     "); accepted: 0 <= begin <= end <= seqlen_q = ", s.seqlen_q);
  }
  return build(s, interrupt, out, [&](const Cell& cell, Bits& bits) {
    const int64_t keys = (cell.b * s.heads + cell.h) * s.seqlen_kv;
    for (int64_t j = cell.j; j < cell.j_end; ++j)
      for (int32_t n = 0; n < num_intervals; ++n) {
        const int32_t* interval = intervals + ((keys + j) * num_intervals + n) * 2;
        const int64_t end = std::min<int64_t>(interval[1], cell.i_end);
        for (int64_t i = std::max<int64_t>(interval[0], cell.i); i < end; ++i) bits.show(i, j);
      }
  });
}

Status mask_from_kinds(const MaskShape& s, const uint8_t* kinds, const int32_t* index,
                       const uint32_t* bits, int64_t num_partials, Interrupt& interrupt,
                       HostMask* out) {
  ATTN_TRY(in_range("num_partials", num_partials, 0, max_extent));
  if (num_partials > 0 && !bits)
    return invalid("bits is NULL; accepted: the bits of num_partials = ", num_partials, " blocks");
  Status status;
  start(s, out);
  Partials partials(out);
  ATTN_TRY(for_each_cell(s, interrupt, [&](int64_t n, const Cell& cell) {
    if (!status.ok()) return;
    if (kinds[n] > ATTN_BLOCK_PARTIAL) {
      status = invalid("kinds at block row ", cell.row, ", column ", cell.column, " is ",
                       int(kinds[n]), "; accepted: empty (0), causal (1), full (2), partial (3)");
      return;
    }
    out->kinds[n] = kinds[n];
    if (kinds[n] != ATTN_BLOCK_PARTIAL) return;
    if (num_partials == 0) {
      status = invalid("kinds at block row ", cell.row, ", column ", cell.column,
                       " is partial (3); accepted with num_partials = 0: empty (0), causal (1), "
                       "full (2), since there are no bits");
    } else if (!index) {
      status = invalid("index is NULL; accepted: the index of each partial block");
    } else if (index[n] < 0 || index[n] >= num_partials) {
      status = invalid("index at block row ", cell.row, ", column ", cell.column, " is ", index[n],
                       "; accepted: 0 to ", num_partials - 1, " for a partial block");
    } else {
      std::copy_n(bits + index[n] * s.block_words(), s.block_words(), partials.open());
      out->index[n] = partials.keep();
    }
  }));
  return status;
}

Status check_same_grid(const MaskShape& a, const MaskShape& b) {
  const auto same = [](const char* name, int64_t first, int64_t second) -> Status {
    if (first == second) return {};
    return invalid("b: ", name, " is ", second, "; accepted: that of a, ", first);
  };
  ATTN_TRY(same("seqlen_q", a.seqlen_q, b.seqlen_q));
  ATTN_TRY(same("seqlen_kv", a.seqlen_kv, b.seqlen_kv));
  ATTN_TRY(same("block_q", a.block_q, b.block_q));
  ATTN_TRY(same("block_k", a.block_k, b.block_k));
  if (a.batch != 1 && b.batch != 1) ATTN_TRY(same("batch", a.batch, b.batch));
  if (a.heads != 1 && b.heads != 1) ATTN_TRY(same("heads", a.heads, b.heads));
  return {};
}

Status mask_from_lists(const MaskShape& s, const int32_t* lists, int64_t list_size,
                       Interrupt& interrupt, HostMask* out) {
  start(s, out);
  if (s.cells() == 0) return {};
  const int64_t columns = s.columns(), rows = s.batch * s.heads * s.rows();
  for (int64_t row = 0; row < rows; ++row) {
    if (interrupt.stop(0, 4 * (list_size + 1))) return interrupt.status();
    for (int64_t n = 0; n < list_size; ++n) {
      const int64_t column = lists[row * list_size + n];
      if (column < -1 || column >= columns)
        return invalid("entry ", n, " of the list of block row ", row % s.rows(), " is ", column,
                       "; accepted: -1 (none) to ", columns - 1);
      if (column >= 0) out->kinds[row * columns + column] = ATTN_BLOCK_FULL;
    }
  }
  return {};
}

Status combine_masks(const HostMask& a, const HostMask& b, int32_t combine, Interrupt& interrupt,
                     HostMask* out) {
  if (combine != 0 && combine != 1)
    return invalid("combine is ", combine, "; accepted: intersection (0), union (1)");
  ATTN_TRY(check_same_grid(a.shape, b.shape));
  MaskShape shape = a.shape;
  shape.batch = std::max(a.shape.batch, b.shape.batch);
  shape.heads = std::max(a.shape.heads, b.shape.heads);
  if (int64_t cells;
      __builtin_mul_overflow(shape.batch * shape.heads, shape.rows() * shape.columns(), &cells) ||
      cells >= max_extent)
    return invalid("the two masks make more than 2^31 blocks");
  std::vector<uint32_t> second(shape.block_words());
  const auto fill = [&](const Cell& cell, Bits& bits) {
    expand(a, cell, &bits);
    std::fill(second.begin(), second.end(), 0);
    Bits more(shape, cell, second.data());
    expand(b, cell, &more);
    uint32_t* words = bits.row(cell.i);
    for (size_t w = 0; w < second.size(); ++w)
      words[w] = combine == 0 ? words[w] & second[w] : words[w] | second[w];
  };
  // Blocks of which one mask has CAUSAL and the other what leaves it as it is.
  const uint8_t neutral = combine == 0 ? ATTN_BLOCK_FULL : ATTN_BLOCK_EMPTY;
  return build(shape, interrupt, out, fill, [&](const Cell& cell) {
    const uint8_t x = a.kinds[number_in(a.shape, cell)], y = b.kinds[number_in(b.shape, cell)];
    const auto stays = [&](uint8_t kind) { return kind == ATTN_BLOCK_CAUSAL || kind == neutral; };
    return (x == ATTN_BLOCK_CAUSAL && stays(y)) || (y == ATTN_BLOCK_CAUSAL && stays(x));
  });
}

}  // namespace attn
