// A forward problem and its data. One line (describe) is enough to reproduce a failure.
//
// Data is a function of (seed, batch entry, head, position), not of the layout, so that two cases
// that differ only in layout or in how the keys are cut into segments hold the same numbers, and
// the keys of a shard are those that the whole sequence has at their positions.
// Everything that a kernel must not read is NaN, and every buffer has a guard on both sides.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../share.h"
#include "attn/attn.h"

namespace attn::test {

// A number in [0, 1) or from N(0, 1) that depends on its coordinates alone.
uint64_t hash(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);
double normal(uint64_t hashed);

// A sequence of numbers for each seed and salt.
struct Draw {
  uint64_t seed, salt, count = 0;

  int64_t operator()(uint64_t end) { return int64_t(hash(seed, salt, ++count) % end); }
  bool chance(uint64_t one_in) { return (*this)(one_in) == 0; }
  template <class Values>
  auto pick(const Values& values) {
    return values[(*this)(std::size(values))];
  }
};

// Types of K and V that few device kernels take: those that host_type puts in.
constexpr attn_dtype host_types[] = {ATTN_Q4_1,   ATTN_Q5_0, ATTN_Q5_1,
                                     ATTN_IQ4_NL, ATTN_I8,   ATTN_I4};
// Replaces q4_0 in half of the random problems that have it, and e5m2 in a quarter, by one of these
// types. It draws from its own seed and salt, so the rest of the problem does not change.
inline attn_dtype host_type(attn_dtype type, int64_t dim, uint64_t seed, uint64_t salt) {
  Draw draw{seed, salt};
  if (type == ATTN_Q4_0 && draw.chance(2)) return draw.pick(host_types);
  if (type == ATTN_F8_E5M2 && draw.chance(4))
    return dim % 2 == 0 && draw.chance(2) ? ATTN_I4 : ATTN_I8;
  return type;
}

enum class Arrange {
  contiguous,   // strides unset
  padded,       // unused room after each head, token and batch entry, multiples of 16 bytes
  head_major,   // [B, H, S, D]
  odd,          // 3 elements of room after each head: not aligned (i4: 6, ggml blocks: 32)
  interleaved,  // segments: k and v in one tensor [.., H, 2, D]
  reversed,     // contiguous, all strides negative
  flipped,      // padded, the stride of tokens negative
};

// Whose keys a segment has.
enum class Keys {
  own,     // each sequence its own
  shared,  // attn_segment.shared
  copied,  // each sequence a copy of those that it has as `shared`
};

struct SegmentCase {
  attn_dtype k_type = ATTN_F32, v_type = ATTN_F32;
  attn_layout layout = ATTN_PADDED;
  int64_t capacity = 0;
  std::vector<int32_t> lengths;  // one per batch entry; empty: all are `capacity` long
  int32_t page_size = 16;
  attn_descale_kind k_descale = ATTN_DESCALE_NONE, v_descale = ATTN_DESCALE_NONE;
  int32_t descale_block_keys = 64;
  Arrange arrange = Arrange::contiguous;
  std::vector<int32_t> bad_pages;  // PAGED: these pages of every sequence get an id out of range
  Keys keys = Keys::own;           // not own: `lengths` are all the same
  std::vector<int64_t> key_start;  // not empty: has_key_start, with these of the arrays' entries
  int64_t key_interleave = 1, key_ranks = 1, key_rank = 0;

  int64_t length(int64_t b) const { return lengths.empty() ? capacity : lengths[b]; }
  // Of its arrays along the batch, and where in them sequence b is.
  int64_t entries(int64_t batch) const {
    return keys == Keys::shared ? std::min<int64_t>(batch, 1) : batch;
  }
  int64_t entry(int64_t b) const { return keys == Keys::shared ? 0 : b; }
  // The sequence whose data sequence b has.
  int64_t source(int64_t b) const { return keys == Keys::own ? b : 0; }
};

enum class Values {
  normal,    // N(0, sigma)
  uniform,   // k = 0, so that all weights of a row are equal; v powers of two
  one_hot,   // each query picks one key by far; v powers of two
  identity,  // k = 0, v of key j = unit vector j % Dv: out shows which keys a query sees
};

enum class MaskBits {
  random,       // 3 different PARTIAL blocks
  one_element,  // a block in each plane: plane p shows element number mask_first + p
  one_per_row,  // a block in each plane: row i shows column i + mask_first + p, modulo block_k
};

// How few of a test's cases will do, see share() in backend.h. Kernels of devices compute all that
// a sanitizer leaves.
struct Thinning {
  uint64_t sanitized = 1;       // under a sanitizer one case in so many is computed
  uint64_t without_device = 1;  // the same where no device is, which the cases are made for
  // Emulated kernels, which are slow: by what a case costs and whether another does the same work;
  // all; all but where another does the same work; one in five, whichever others compute.
  enum Emulated { by_cost, all, no_other, fifth } emulated = by_cost;
  // The case's among its test's, by which cases and kernels take turns; without: a hash. Where they
  // do not begin at 0, emulated kernels would have none of the few that they take.
  std::optional<uint64_t> number = {};
};
constexpr Thinning on_all_kernels{.emulated = Thinning::all};
constexpr Thinning on_all_kernels_in_turn(uint64_t number) {
  return {.emulated = Thinning::all, .number = number};
}
constexpr Thinning one_of_many(uint64_t number) {
  return {.sanitized = sanitized_one_in, .number = number};
}
constexpr Thinning for_devices(uint64_t number, uint64_t one_in = 5) {
  return {.sanitized = sanitized_one_in, .without_device = one_in, .number = number};
}
constexpr Thinning many_on_all_kernels(uint64_t number) {
  return {.sanitized = sanitized_one_in, .emulated = Thinning::all, .number = number};
}
constexpr Thinning fifth_of_many(uint64_t number, uint64_t sanitized = sanitized_one_in) {
  return {.sanitized = sanitized, .emulated = Thinning::fifth, .number = number};
}

struct Case {
  std::string name;
  Thinning thinning;
  uint64_t seed = 1;
  int64_t batch = 1, heads_q = 1, heads_kv = 1, head_dim = 64, head_dim_v = 64;
  int64_t seqlen_q = 1;
  std::vector<int32_t> lengths_q;  // not empty: packed q
  int64_t tokens_of_nobody = 2;    // rows of packed q after the last sequence
  int64_t more_tokens = 0;         // packed q: that the plan is made for, and no run has
  attn_dtype q_type = ATTN_F32, out_type = ATTN_F32;
  attn_descale_kind q_descale = ATTN_DESCALE_NONE;
  Arrange q_arrange = Arrange::contiguous, out_arrange = Arrange::contiguous;
  std::vector<SegmentCase> segments;
  float scale = 0, softcap = 0;
  uint32_t flags = 0;
  int64_t window_left = 0, window_right = 0;
  attn_dtype bias_type = ATTN_DTYPE_NONE;
  bool bias_per_batch = true, bias_per_head = true, bias_per_query = true;
  int64_t bias_first = 0, bias_key_stride = 1;  // elements before it; from key to key
  float bias_value = 0;  // 0: N(0, 1) and -inf for one key in eight; else this for all
  float alibi_sign = 1;
  int32_t block_q = 64, block_k = 64;
  bool mask_per_batch = false, mask_per_head = false;
  std::vector<uint8_t> mask_kinds;  // of the grid's blocks, over and over; empty: any
  MaskBits mask_bits = MaskBits::random;
  bool mask_inverted = false;  // bits of one_element and one_per_row
  int64_t mask_first = 0;
  int64_t tree_keys = 0;             // bits of attn_args.tree are random
  std::vector<int32_t> kv_begin;     // not empty: of each sequence
  std::vector<int64_t> query_start;  // not empty: of each sequence, with ATTN_QUERY_POSITIONS
  int tree_density = 2;              // one bit in this many is set; 1: all
  bool mask_garbage = false;         // kinds and indices that mean nothing among the others
  int64_t fixed_split = 0;
  int32_t max_sms = 0;
  Values values = Values::normal;
  double sigma = 1;
  bool v_in_k = false;  // of all segments, whose v_type is k_type

  bool has(uint32_t flag) const { return (flags & flag) != 0; }
  int64_t queries(int64_t b) const { return lengths_q.empty() ? seqlen_q : lengths_q[b]; }
  int64_t keys(int64_t b) const;
  int64_t capacity() const;
  // Where query i and key j of sequence b are for masks of ranges and ALiBi.
  int64_t query_position(int64_t b, int64_t i) const;
  int64_t key_position(int64_t b, int64_t j) const;
};

// Lengths of queries, and of keys; one sequence has all queries, about one in six no keys.
void draw_lengths_q(Draw& draw, Case* c);
void draw_lengths(Draw& draw, int64_t batch, SegmentCase* s);
// First keys of sequences, by the lengths: about one sequence in six sees all keys, one in six
// none.
void draw_begins(Draw& draw, Case* c);

// The case with q, k and v of this type where they were f32; out stays as it is.
Case with_type(Case c, attn_dtype type);

// One line that shows every field that matters.
std::string describe(const Case& c);

// Bytes between two guards.
class Buffer {
 public:
  static constexpr size_t guard = 256;
  Buffer() = default;
  // All poison: NaN in every type of this size but FNUZ fp8, whose NaN is 0x80.
  Buffer(size_t size, unsigned char poison)
      : bytes(size + 2 * guard, poison), poison(poison), given(true) {}

  unsigned char* data() { return bytes.data() + guard; }
  const unsigned char* data() const { return bytes.data() + guard; }
  size_t size() const { return bytes.empty() ? 0 : bytes.size() - 2 * guard; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data());
  }

  std::vector<unsigned char> bytes;
  unsigned char poison = 0xff;
  bool given = false;  // else the pointer is NULL
};
unsigned char poison_of(attn_dtype type);

// A tensor [batch, seq, head, dim] somewhere in a buffer; strides and offset in elements.
struct View {
  attn_dtype type = ATTN_F32;
  attn_strides stride{};  // resolved
  attn_strides given{};   // what the problem says: zeros for contiguous
  int64_t offset = 0;     // of element 0 of every dimension
  int64_t at(int64_t b, int64_t s, int64_t h) const {
    return offset + b * stride.batch + s * stride.seq + h * stride.head;
  }
};
View arrange_view(attn_dtype type, Arrange arrange, int64_t batch, int64_t seq, int64_t heads,
                  int64_t dim, int64_t* elements);

struct SegmentData {
  View k_view, v_view, k_scale_view, v_scale_view;
  Buffer k, v;  // interleaved: v is empty, its elements are in k
  Buffer k_scale, v_scale;
  Buffer seqlens, cu_seqlens, block_table, k_descale, v_descale, key_start;
  int64_t total = 0, num_pages = 0, max_pages = 0;
};

struct Data {
  View q_view;
  Buffer q, cu_seqlens_q, q_descale, bias, bias_slopes, slopes, sinks, out_scale, kinds, index,
      bits, tree, kv_begin, query_start;
  std::vector<SegmentData> segments;
  int64_t bias_stride[4] = {};
  int64_t num_partials = 0;
  // The stored numbers as real values, whatever their layout: rows [b, h, i] of seqlen_q and
  // [b, kv_head, j] of most_keys; rows that no query sees are empty.
  std::vector<std::vector<double>> q_real, k_real, v_real;
  std::vector<std::vector<double>> v_scales;  // of the rows of v_real: of each of ggml's blocks,
                                              // of types with scales in an array one; each with a
                                              // minimum, 0 if none
  int64_t most_keys = 0;
  double v_max = 0;        // largest |v| (real value) that some query sees
  double logit_bound = 0;  // no |score| is larger, infinite biases aside
  double dot_bound = 0;    // no |scale q k| is larger
};

Data make_data(const Case& c);

// The mask rules, written from attn.h and independent of the library's code.
bool visible(const Case& c, const Data& data, int64_t b, int64_t h, int64_t i, int64_t j);

// The bias of a score, indexed as attn.h says.
double bias_at(const Case& c, const Data& data, int64_t b, int64_t h, int64_t i, int64_t j);

}  // namespace attn::test
