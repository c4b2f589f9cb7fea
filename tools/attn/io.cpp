#include "attn/io.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "attn/mask_io.h"
#include "core/dtype.h"

namespace attn::tools {
namespace {

std::string dtype_text(Dtype dtype) {
  return std::string(dtype_name(dtype));
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct TypePair {
  Dtype file;
  attn_dtype type;
};
constexpr TypePair kTypes[] = {
    {Dtype::f32, ATTN_F32},
    {Dtype::f16, ATTN_F16},
    {Dtype::bf16, ATTN_BF16},
    {Dtype::f8_e4m3, ATTN_F8_E4M3FN},
    {Dtype::f8_e5m2, ATTN_F8_E5M2},
    {Dtype::f64, ATTN_F64},
    {Dtype::f8_e4m3, ATTN_F8_E4M3FNUZ},
    {Dtype::i8, ATTN_I8},
};

Dtype file_dtype(attn_dtype type) {
  for (const TypePair& pair : kTypes)
    if (pair.type == type) return pair.file;
  return Dtype::u8;  // as bytes
}

bool needs_metadata(attn_dtype type) {
  return type == ATTN_F8_E4M3FNUZ || file_dtype(type) == Dtype::u8;
}

// Of `types` those that are bytes in a file.
uint32_t in_bytes(uint32_t types) {
  for (const TypePair& pair : kTypes) types &= ~attn::type_bit(pair.type);
  return types;
}

constexpr const char* kSegmentTensors[] = {"k",
                                           "v",
                                           "seqlens_kv",
                                           "cu_seqlens_kv",
                                           "block_table",
                                           "k_descale",
                                           "v_descale",
                                           "k_scale",
                                           "v_scale",
                                           "lists",
                                           "list_lengths",
                                           "list_block",
                                           "list_queries",
                                           "list_of_pool",
                                           "no_positions"};
constexpr int64_t kMaxKeys = int64_t{1} << 40;

}  // namespace

const std::string input_help =
    "IN holds\n"
    "  q              [B, Sq, Hq, D]; packed [total_q, Hq, D]\n"
    "  k, v           [B, Skv, Hkv, D] and [B, Skv, Hkv, Dv]; packed [total, Hkv, D]; paged\n"
    "                 [pages, page_size, Hkv, D]. Several segments, older keys first: k.0, v.0, "
    "k.1, v.1\n"
    "                 and so on, and so with all that belongs to k and v\n"
    "and where they are wanted\n"
    "  cu_seqlens_q   I32 [B + 1], of packed q\n"
    "  cu_seqlens_kv  I32 [B + 1], of packed k and v\n"
    "  seqlens_kv     I32 [B], keys of each sequence\n"
    "  block_table    I32 [B, pages per sequence], of paged k and v\n"
    "  q_descale      F32 [1] or [B, Hkv]\n"
    "  k_descale, v_descale\n"
    "                 F32 [1], [B, Hkv] or [B, Hkv, blocks of 64 or 128 keys]\n"
    "  k_scale, v_scale\n"
    "                 F16 as k and v without the last dimension, of i8 and i4\n"
    "  bias           F32, F16 or q's type, [B or 1, Hq or 1, Sq, Skv]\n"
    "  bias_slopes    F32 [Hq], by which bias is multiplied\n"
    "  alibi_slopes, sinks\n"
    "                 F32 [Hq]\n"
    "  out_scale      F32 [1], of an fp8 out\n"
    "  block_kinds and the rest of a block mask, see attn mask --help\n"
    "  head_dim_v     I32 [1], without v: V is the first columns of k\n"
    "  lists          I32 [B, Sq, Hkv or 1, n], or packed [total_q, Hkv or 1, n]: the keys that "
    "each query\n"
    "                 sees, -1 = none; list_lengths I32 without n; list_block and list_queries I32 "
    "[1]: 1, 64\n"
    "                 or 128 keys of an entry, queries of a list; list_of_pool I32 [1]: 1 where "
    "entries are\n"
    "                 places in the pool\n"
    "  no_positions   I32 [1]: 1 where causal masks and windows do not hide the segment's keys\n"
    "  tree           U64 [B, Sq, 2], or packed [total_q, 2]: bit n shows query i the last keys' "
    "key "
    "n\n"
    "  tree_keys      I32 [1], how many keys these are\n"
    "  shared_segments\n"
    "                 I32 [1], how many of the first segments are a prefix that all sequences "
    "share: "
    "their\n"
    "                 arrays are those of a batch of 1\n"
    "__metadata__ has the types that safetensors lacks, by tensor: f8_e4m3fnuz of F8_E4M3; of U8,\n"
    "whose last dimension counts bytes, " +
    attn::type_names(in_bytes(attn::kv_types), " and ") + ".";

const char* const mask_help =
    "IN holds\n"
    "  block_kinds    U8 [B or 1, Hq or 1, ceil(Sq / bq), ceil(Skv / bk)]: 0 EMPTY, 1 CAUSAL, 2 "
    "FULL,\n"
    "                 3 PARTIAL\n"
    "  block_size     I32 [2], bq and bk\n"
    "and where they are wanted\n"
    "  block_index    I32 like block_kinds, -1 where not PARTIAL\n"
    "  block_bits     BOOL [partial blocks, bq, bk]\n"
    "  q, k, v        for Sq and Skv, see attn run --help";

const char* const parts_help =
    "IN holds, of each part from 0 on,\n"
    "  out.0          [B, Sq, Hq, Dv], or packed [total_q, Hq, Dv]\n"
    "  lse.0          F32 [B, Hq, Sq], or packed [Hq, total_q]";

namespace {

class Reader {
 public:
  explicit Reader(Input& input) : in_(input), file_(input.file), p_(input.problem) {}

  void read() {
    read_queries();
    read_segments();
    read_rest();
    for (const auto& [name, tensor] : file_.tensors) {
      if (used_.contains(name)) continue;
      // A name of the contract in the wrong place would change the result by being left out.
      for (const char* segment_tensor : kSegmentTensors)
        if (name.substr(0, name.find('.')) == segment_tensor)
          fail(quote(name) + " belongs to no segment; the file has " +
               (file_.find("k") ? "k and v, without numbers"
                                : "segments 0 to " + std::to_string(p_.num_segments - 1)));
      in_.unused.push_back(name);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& text) const {
    throw InputError(file_.label + ": " + text);
  }

  const Tensor* find(const std::string& name) {
    const Tensor* tensor = file_.find(name);
    if (tensor) used_.insert(name);
    return tensor;
  }
  const Tensor& need_named(const std::string& name) {
    used_.insert(name);
    return need_tensor(file_, name);
  }
  const Tensor& expect(const std::string& name, const Tensor& tensor, Dtype dtype,
                       const std::vector<int64_t>& shape, const std::string& meaning) {
    need_shape(file_, name, tensor, dtype, shape, meaning);
    return tensor;
  }
  template <class T>
  void point(const T** pointer, const Tensor& tensor) {
    *pointer = static_cast<const T*>(static_cast<const void*>(tensor.data.get()));
    in_.slots.push_back({reinterpret_cast<const void**>(pointer), &tensor});
  }

  attn_dtype type_of(const std::string& name) const {
    const attn_dtype type = element_type(file_, name);
    if (type == ATTN_F64) fail(name + " is F64; F32 F16 BF16 F8_E4M3 F8_E5M2 are accepted");
    return type;
  }

  // The largest difference of a cu_seqlens array, after checking it.
  int64_t longest(const std::string& name, const Tensor& offsets, int64_t total) const {
    const int32_t* at = offsets.as<int32_t>();
    if (at[0] != 0) fail(name + "[0] is " + std::to_string(at[0]) + "; 0 is expected");
    int64_t most = 0;
    for (int64_t b = 1; b < offsets.elements(); ++b) {
      if (at[b] < at[b - 1])
        fail(name + "[" + std::to_string(b) + "] is " + std::to_string(at[b]) + " after " +
             std::to_string(at[b - 1]) + "; values that do not decrease are expected");
      most = std::max<int64_t>(most, int64_t{at[b]} - at[b - 1]);
    }
    const int32_t last = at[offsets.elements() - 1];
    if (last > total)
      fail(name + " ends at " + std::to_string(last) + "; up to " + std::to_string(total) +
           " tokens are in the buffer");
    return most;
  }

  const Tensor& need_offsets(const std::string& name, const Tensor& offsets) {
    expect(name, offsets, Dtype::i32, {p_.batch > 0 ? p_.batch + 1 : -1}, "[B + 1]");
    if (offsets.elements() < 2) fail(name + " has no batch entry; [B + 1] values are expected");
    return offsets;
  }

  void read_queries() {
    const Tensor& q = need_named("q");
    p_.q_type = type_of("q");
    if (attn::dtype_block(p_.q_type) > 1 || attn::dtype_has_scales(p_.q_type))
      fail(std::string("q is ") + attn::dtype_name(p_.q_type) +
           "; F32 F16 BF16 F8_E4M3 F8_E5M2 are accepted");
    const Tensor* offsets = find("cu_seqlens_q");
    const size_t dims = offsets ? 3 : 4;
    if (q.shape.size() != dims)
      fail("q has shape " + shape_text(q.shape) +
           (offsets ? "; [total_q, Hq, D] is expected with cu_seqlens_q"
                    : "; [B, Sq, Hq, D] is expected (packed q needs cu_seqlens_q)"));
    p_.heads_q = q.shape[dims - 2];
    p_.head_dim = q.shape[dims - 1];
    if (p_.heads_q < 1 || p_.head_dim < 1 || (!offsets && q.shape[0] < 1))
      fail("q has shape " + shape_text(q.shape) + "; B, Hq and D from 1 up are expected");
    if (offsets) {
      need_offsets("cu_seqlens_q", *offsets);
      p_.q_layout = ATTN_PACKED;
      p_.batch = offsets->elements() - 1;
      p_.total_q = q.shape[0];
      p_.seqlen_q = longest("cu_seqlens_q", *offsets, p_.total_q);
      point(&in_.args.cu_seqlens_q, *offsets);
    } else {
      p_.batch = q.shape[0];
      p_.seqlen_q = q.shape[1];
    }
    point(&in_.args.q, q);
  }

  void read_segments() {
    const int count = numbered_segments(file_);
    in_.segments.assign(static_cast<size_t>(std::max(count, 1)), make<attn_segment>());
    in_.segment_args.assign(in_.segments.size(), make<attn_segment_args>());
    if (const Tensor* shared = find("shared_segments")) {
      const int32_t n = expect("shared_segments", *shared, Dtype::i32, {1}, "[1]").as<int32_t>()[0];
      if (n < 0 || static_cast<size_t>(n) > in_.segments.size())
        fail("shared_segments is " + std::to_string(n) + "; 0 to " +
             std::to_string(in_.segments.size()) + " are accepted");
      for (int s = 0; s < n; ++s) in_.segments[static_cast<size_t>(s)].shared = 1;
    }
    for (int i = 0; i < static_cast<int>(in_.segments.size()); ++i) read_segment(i, count > 0);
    p_.num_segments = in_.args.num_segments = static_cast<int32_t>(in_.segments.size());
    p_.segments = in_.segments.data();
    in_.args.segments = in_.segment_args.data();
  }

  void read_segment(int i, bool numbered) {
    attn_segment& s = in_.segments[static_cast<size_t>(i)];
    attn_segment_args& a = in_.segment_args[static_cast<size_t>(i)];
    const int64_t batch = s.shared ? 1 : p_.batch;
    const auto named = [&](const char* name) { return segment_name(name, i, numbered); };
    const std::string k_name = named("k"), v_name = named("v");
    const Tensor& k = need_named(k_name);
    // Without v: V is the first columns of k.
    const Tensor* const columns = find("head_dim_v");
    s.v_in_k = columns && !file_.find(v_name);
    const Tensor& v = s.v_in_k ? k : need_named(v_name);
    s.k_type = type_of(k_name);
    s.v_type = s.v_in_k ? s.k_type : type_of(v_name);
    s.list_of_pool = number_of(named("list_of_pool"));
    const Tensor* offsets = find(named("cu_seqlens_kv"));
    const Tensor* table = find(named("block_table"));
    const Tensor* lengths = find(named("seqlens_kv"));
    if (offsets && (table || lengths))
      fail(named("cu_seqlens_kv") + " and " + named(table ? "block_table" : "seqlens_kv") +
           " are both there; packed keys take cu_seqlens_kv alone");

    const bool pages = table || s.list_of_pool;
    const char* form = offsets ? "[total, Hkv, D]"
                       : pages ? "[pages, page_size, Hkv, D]"
                               : "[B, Skv, Hkv, D]";
    const size_t dims = offsets ? 3 : 4;
    if (k.shape.size() != dims)
      fail(k_name + " has shape " + shape_text(k.shape) + "; " + form + " is expected");
    std::vector<int64_t> v_shape = k.shape;
    v_shape.back() = -1;
    if (v.shape.size() != dims || !std::equal(v.shape.begin(), v.shape.end() - 1, v_shape.begin()))
      fail(v_name + " has shape " + shape_text(v.shape) + "; " + k_name + "'s " +
           shape_text(k.shape) + " but for the last dimension is expected");

    const int64_t heads = k.shape[dims - 2];
    const int64_t dim = elements_in(file_, k_name, s.k_type, k.shape.back());
    const int64_t dim_v =
        s.v_in_k ? expect("head_dim_v", *columns, Dtype::i32, {1}, "[1]").as<int32_t>()[0]
                 : elements_in(file_, v_name, s.v_type, v.shape.back());
    if (i == 0) {
      p_.heads_kv = heads;
      p_.head_dim_v = dim_v;
    }
    if (s.v_in_k && dim_v < 1)
      fail("head_dim_v is " + std::to_string(dim_v) + "; 1 to head_dim are expected");
    if (heads < 1 || dim_v < 1)
      fail(v_name + " has shape " + shape_text(v.shape) + "; Hkv and Dv from 1 up are expected");
    const auto same = [&](const std::string& name, const char* what, int64_t value, int64_t want,
                          const char* whose) {
      if (value != want)
        fail(name + ": " + what + " is " + std::to_string(value) + "; " + std::to_string(want) +
             " as in " + whose + " is expected");
    };
    same(k_name, "head_dim", dim, p_.head_dim, "q");
    same(k_name, "heads_kv", heads, p_.heads_kv, "segment 0");
    same(v_name, "head_dim_v", dim_v, p_.head_dim_v, "segment 0");

    if (offsets) {
      need_offsets(named("cu_seqlens_kv"), *offsets);
      s.layout = ATTN_PACKED;
      s.total = k.shape[0];
      s.seqlen = longest(named("cu_seqlens_kv"), *offsets, s.total);
      point(&a.cu_seqlens, *offsets);
    } else if (table) {
      expect(named("block_table"), *table, Dtype::i32, {batch, -1},
             s.shared ? "[1, pages]" : "[B, pages per sequence]");
      s.layout = ATTN_PAGED;
      s.num_pages = k.shape[0];
      s.page_size = checked_int32(k_name + ": page_size", k.shape[1]);
      s.max_pages = checked_int32(named("block_table") + ": columns", table->shape[1]);
      s.seqlen = int64_t{s.max_pages} * s.page_size;
      if (s.seqlen > kMaxKeys)
        fail(named("block_table") + ": " + std::to_string(s.max_pages) + " pages of " +
             std::to_string(s.page_size) + " keys; up to " + std::to_string(kMaxKeys) +
             " keys are accepted");
      point(&a.block_table, *table);
    } else if (pages) {
      s.layout = ATTN_PAGED;
      s.num_pages = k.shape[0];
      s.page_size = checked_int32(k_name + ": page_size", k.shape[1]);
    } else {
      same(k_name, "batch", k.shape[0], batch,
           s.shared                     ? "a shared segment"
           : p_.q_layout == ATTN_PACKED ? "cu_seqlens_q"
                                        : "q");
      s.seqlen = k.shape[1];
    }
    if (lengths) {
      expect(named("seqlens_kv"), *lengths, Dtype::i32, {batch}, s.shared ? "[1]" : "[B]");
      s.has_seqlens = 1;
      point(&a.seqlens, *lengths);
    }
    point(&a.k, k);
    if (!s.v_in_k) point(&a.v, v);
    s.k_descale = read_descale(named("k_descale"), &s, &a.k_descale);
    s.v_descale = read_descale(named("v_descale"), &s, &a.v_descale);
    read_scales(named("k_scale"), s.k_type, k, dim, &a.k_scale);
    if (!s.v_in_k) read_scales(named("v_scale"), s.v_type, v, dim_v, &a.v_scale);
    s.no_positions = number_of(named("no_positions"));
    if (const Tensor* lists = find(named("lists"))) read_lists(named, *lists, &s, &a);
  }

  // Of a type that has them, for each token and head of k or v.
  void read_scales(const std::string& name, attn_dtype type, const Tensor& of, int64_t dim,
                   const void** pointer) {
    if (!attn::dtype_has_scales(type)) return;
    point(pointer, expect(name, need_named(name), scale_dtype(type),
                          scales_shape(type, of.shape, dim), "those of each token and head"));
  }

  // A tensor I32 [1]; 0 where there is none.
  int32_t number_of(const std::string& name) {
    const Tensor* tensor = find(name);
    return tensor ? expect(name, *tensor, Dtype::i32, {1}, "[1]").as<int32_t>()[0] : 0;
  }

  template <class Named>
  void read_lists(const Named& named, const Tensor& lists, attn_segment* s, attn_segment_args* a) {
    s->list_block = number_of(named("list_block"));
    s->list_queries = number_of(named("list_queries"));
    const bool packed = p_.q_layout == ATTN_PACKED;
    const int64_t queries = std::max<int64_t>(1, s->list_queries);
    const std::vector<int64_t> shape =
        packed ? std::vector<int64_t>{p_.total_q, -1, -1}
               : std::vector<int64_t>{p_.batch, ceil_div(p_.seqlen_q, queries), -1, -1};
    expect(named("lists"), lists, Dtype::i32, shape,
           packed ? "[total_q, Hkv or 1, n]" : "[B, ceil(Sq / list_queries), Hkv or 1, n]");
    s->list_size = lists.shape.back();
    s->list_heads = lists.shape[lists.shape.size() - 2];
    if (s->list_size < 1 || s->list_heads < 1)
      fail(named("lists") + " has shape " + shape_text(lists.shape) +
           "; heads and entries from 1 up are expected");
    point(&a->list, lists);
    const Tensor* lengths = find(named("list_lengths"));
    if (!lengths) return;
    s->has_list_lengths = 1;
    point(&a->list_lengths,
          expect(named("list_lengths"), *lengths, Dtype::i32,
                 {lists.shape.begin(), lists.shape.end() - 1}, "lists without their entries"));
  }

  int32_t checked_int32(const std::string& what, int64_t value) const {
    if (value > INT32_MAX)
      fail(what + " is " + std::to_string(value) + "; up to " + std::to_string(INT32_MAX) +
           " is accepted");
    return static_cast<int32_t>(value);
  }

  // `segment` is null for q, which knows no blocks of keys.
  attn_descale_kind read_descale(const std::string& name, attn_segment* segment,
                                 const float** pointer) {
    const Tensor* tensor = find(name);
    if (!tensor) return ATTN_DESCALE_NONE;
    const auto& shape = tensor->shape;
    expect(name, *tensor, Dtype::f32, std::vector<int64_t>(shape.size(), -1), "");
    const int64_t batch = segment && segment->shared ? 1 : p_.batch;
    const std::string per_head = shape_text(std::vector<int64_t>{batch, p_.heads_kv});
    point(pointer, *tensor);
    if (shape.size() <= 1 && tensor->elements() == 1) return ATTN_DESCALE_TENSOR;
    const bool heads = shape.size() >= 2 && shape[0] == batch && shape[1] == p_.heads_kv;
    if (heads && shape.size() == 2) return ATTN_DESCALE_HEAD;
    if (!segment)
      fail(name + " has shape " + shape_text(shape) + "; [1] and [B, Hkv] = " + per_head +
           " are accepted");
    if (heads && shape.size() == 3) {
      // Up to 64 keys are one block of either size: keep what the other of k and v needs.
      for (const int32_t keys : {segment->descale_block_keys, 128, 64}) {
        if (keys == 0 || ceil_div(segment->seqlen, keys) != shape[2]) continue;
        if (segment->descale_block_keys != 0 && segment->descale_block_keys != keys) break;
        segment->descale_block_keys = keys;
        return ATTN_DESCALE_BLOCK;
      }
    }
    fail(name + " has shape " + shape_text(shape) + "; [1], [B, Hkv] = " + per_head +
         " and [B, Hkv, blocks] with " + std::to_string(ceil_div(segment->seqlen, 64)) + " or " +
         std::to_string(ceil_div(segment->seqlen, 128)) +
         " blocks (64 or 128 keys each, the same for k and v) are accepted");
  }

  void read_rest() {
    p_.q_descale = read_descale("q_descale", nullptr, &in_.args.q_descale);
    if (const Tensor* scale = find("out_scale")) {
      point(&in_.args.out_scale, expect("out_scale", *scale, Dtype::f32, {1}, "[1]"));
      p_.flags |= ATTN_OUT_SCALE;
    }
    if (const Tensor* slopes = find("alibi_slopes")) {
      point(&in_.args.alibi_slopes,
            expect("alibi_slopes", *slopes, Dtype::f32, {p_.heads_q}, "[Hq]"));
      p_.flags |= ATTN_ALIBI;
    }
    if (const Tensor* sinks = find("sinks")) {
      point(&in_.args.sinks, expect("sinks", *sinks, Dtype::f32, {p_.heads_q}, "[Hq]"));
      p_.flags |= ATTN_SINKS;
    }
    const Tensor *tree = find("tree"), *tree_keys = find("tree_keys");
    if (!tree != !tree_keys)
      fail(tree ? "tree is there without tree_keys" : "tree_keys is there without tree");
    if (tree) {
      const bool packed = p_.q_layout == ATTN_PACKED;
      point(&in_.args.tree, expect("tree", *tree, Dtype::u64,
                                   packed ? std::vector<int64_t>{p_.total_q, 2}
                                          : std::vector<int64_t>{p_.batch, p_.seqlen_q, 2},
                                   packed ? "[total_q, 2]" : "[B, Sq, 2]"));
      p_.tree_keys = *expect("tree_keys", *tree_keys, Dtype::i32, {1}, "[1]").as<int32_t>();
    }
    int64_t seqlen_kv = 0;
    for (const attn_segment& s : in_.segments) seqlen_kv += s.seqlen;
    if (const Tensor* bias = find("bias")) read_bias(*bias, seqlen_kv);
    if (const Tensor* slopes = find("bias_slopes")) {
      point(&in_.args.bias_slopes,
            expect("bias_slopes", *slopes, Dtype::f32, {p_.heads_q}, "[Hq]"));
      p_.flags |= ATTN_BIAS_SLOPES;
    }
    if (find("block_kinds")) {
      read_block_mask(seqlen_kv);
    } else {
      for (const char* name : {"block_size", "block_bits", "block_index"})
        if (find(name)) fail(std::string(name) + " is there without block_kinds");
    }
  }

  void read_bias(const Tensor& bias, int64_t seqlen_kv) {
    p_.bias_type = type_of("bias");
    const auto& shape = bias.shape;
    const bool good = shape.size() == 4 && (shape[0] == 1 || shape[0] == p_.batch) &&
                      (shape[1] == 1 || shape[1] == p_.heads_q) && shape[2] == p_.seqlen_q &&
                      shape[3] == seqlen_kv;
    if (!good)
      fail("bias has shape " + shape_text(shape) + "; [B or 1, Hq or 1, Sq, Skv] with B " +
           std::to_string(p_.batch) + ", Hq " + std::to_string(p_.heads_q) + ", Sq " +
           std::to_string(p_.seqlen_q) + ", Skv " + std::to_string(seqlen_kv) + " is expected");
    p_.bias_stride[3] = 1;
    p_.bias_stride[2] = seqlen_kv;
    p_.bias_stride[1] = shape[1] == 1 ? 0 : p_.seqlen_q * seqlen_kv;
    p_.bias_stride[0] = shape[0] == 1 ? 0 : shape[1] * p_.seqlen_q * seqlen_kv;
    point(&in_.args.bias, bias);
  }

  void read_block_mask(int64_t seqlen_kv) {
    for (const char* name : {"block_size", "block_bits", "block_index"}) find(name);
    const FileMask mask = read_mask(file_);
    const int64_t rows = ceil_div(p_.seqlen_q, mask.block_q);
    const int64_t columns = ceil_div(seqlen_kv, mask.block_k);
    if ((mask.batch != 1 && mask.batch != p_.batch) ||
        (mask.heads != 1 && mask.heads != p_.heads_q) || mask.rows != rows ||
        mask.columns != columns)
      fail("block_kinds has shape " + shape_text(mask.kinds.shape) + "; [" +
           std::to_string(p_.batch) + " or 1, " + std::to_string(p_.heads_q) + " or 1, " +
           std::to_string(rows) + ", " + std::to_string(columns) +
           "] is expected with blocks of (" + std::to_string(mask.block_q) + ", " +
           std::to_string(mask.block_k) + ")");
    p_.flags |= ATTN_BLOCK_MASK;
    p_.block_q = mask.block_q;
    p_.block_k = mask.block_k;
    p_.mask_batch = mask.batch;
    p_.mask_heads = mask.heads;
    p_.mask_partials = mask.partials;
    point(&in_.args.block_kinds, in_.made.emplace_back(mask.kinds));
    if (mask.partials == 0) return;
    point(&in_.args.block_index, in_.made.emplace_back(mask.index));
    point(&in_.args.block_bits, in_.made.emplace_back(mask.bits));
  }

  Input& in_;
  const TensorFile& file_;
  attn_problem& p_;
  std::set<std::string, std::less<>> used_;
};

}  // namespace

void Input::stage(Arrays& to) {
  for (const Slot& slot : slots)
    *slot.pointer = to.copy_of(slot.tensor->data.get(), slot.tensor->bytes);
}

std::unique_ptr<Input> make_input(TensorFile file) {
  auto input = std::make_unique<Input>(std::move(file));
  Reader(*input).read();
  return input;
}

attn_dtype element_type(const TensorFile& file, const std::string& name) {
  const Tensor& tensor = need_tensor(file, name);
  const auto fail = [&](const std::string& text) { throw InputError(file.label + ": " + text); };
  if (const auto said = file.metadata.find(name); said != file.metadata.end()) {
    const attn_dtype type = attn::dtype_from_name(said->second);
    if (type == ATTN_DTYPE_NONE)
      fail("__metadata__ says that " + name + " is " + quote(said->second) +
           "; f8_e4m3fnuz and ggml's " + attn::type_names(attn::ggml_types, " and ") + ", and " +
           attn::type_names(in_bytes(attn::scaled_types | attn::cache_types)) + " are accepted");
    if (attn::dtype_block(type) > 1 && tensor.shape.empty())
      fail(name + " is " + said->second + " and has no dimensions; 1 or more are expected");
    if (file_dtype(type) != tensor.dtype)
      fail("__metadata__ says that " + name + " is " + said->second + ", its dtype is " +
           dtype_text(tensor.dtype) + "; " + dtype_text(file_dtype(type)) + " is expected");
    return type;
  }
  for (const TypePair& pair : kTypes)
    if (pair.file == tensor.dtype && !needs_metadata(pair.type)) return pair.type;
  fail(name + " is " + dtype_text(tensor.dtype) + "; F32 F16 BF16 F8_E4M3 F8_E5M2 are accepted" +
       (tensor.dtype == Dtype::u8 ? " (and U8 where __metadata__ says which of these types it is)"
                                  : ""));
  return ATTN_DTYPE_NONE;
}

int64_t elements_in(const TensorFile& file, const std::string& name, attn_dtype type,
                    int64_t size) {
  if (attn::dtype_block(type) == 1) return size;
  const int64_t bytes = attn::dtype_bytes(type);
  if (size % bytes != 0)
    throw InputError(file.label + ": " + name + ": last dimension " + std::to_string(size) +
                     " is not a multiple of the " + std::to_string(bytes) + " bytes of a " +
                     attn::dtype_name(type) + " block");
  return size / bytes * attn::dtype_block(type);
}

Dtype scale_dtype(attn_dtype type) {
  const int bytes = attn::type_info(type).scale_bytes;
  return bytes == 4 ? Dtype::f32 : bytes == 2 ? Dtype::f16 : Dtype::u8;
}

std::vector<int64_t> scales_shape(attn_dtype type, std::vector<int64_t> shape, int64_t dim) {
  if (attn::type_info(type).scale_elements > 0)
    shape.back() = attn::scales_of_row(attn::type_info(type), dim);
  else
    shape.pop_back();
  return shape;
}

Tensor make_typed(attn_dtype type, std::vector<int64_t> shape) {
  if (attn::dtype_block(type) > 1) shape.back() = attn::dtype_bytes(type, shape.back());
  return make_tensor(file_dtype(type), std::move(shape));
}

void add_typed(TensorFile& file, const std::string& name, attn_dtype type, Tensor tensor) {
  file.tensors[name] = std::move(tensor);
  if (needs_metadata(type)) {
    file.metadata[name] = attn::dtype_name(type);
  } else {
    file.metadata.erase(name);
  }
}

void write_result(const std::string& path, attn_dtype out_type, Tensor out, Tensor lse) {
  TensorFile result;
  add_typed(result, "out", out_type, std::move(out));
  result.tensors["lse"] = std::move(lse);
  need(write_tensors(path, result));
}

const Tensor& need_tensor(const TensorFile& file, std::string_view name) {
  const Tensor* tensor = file.find(name);
  if (!tensor) throw InputError(file.label + ": tensor " + quote(name) + " is missing");
  return *tensor;
}

void need_shape(const TensorFile& file, std::string_view name, const Tensor& tensor, Dtype dtype,
                const std::vector<int64_t>& shape, const std::string& meaning) {
  const std::string who = file.label + ": " + std::string(name);
  if (tensor.dtype != dtype)
    throw InputError(who + " is " + dtype_text(tensor.dtype) + "; " + dtype_text(dtype) +
                     " is expected");
  bool same = tensor.shape.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i)
    same = shape[i] == -1 || shape[i] == tensor.shape[i];
  if (same) return;
  std::string sizes = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    sizes += (i ? ", " : "") + (shape[i] == -1 ? "any" : std::to_string(shape[i]));
  throw InputError(who + " has shape " + shape_text(tensor.shape) + "; " + meaning + " = " + sizes +
                   "] is expected");
}

std::string segment_name(const char* name, int segment, bool numbered) {
  return numbered ? name + ("." + std::to_string(segment)) : name;
}

int numbered_segments(const TensorFile& file) {
  int count = 0;
  while (file.find("k." + std::to_string(count)) || file.find("v." + std::to_string(count)))
    ++count;
  if (count > 0 && (file.find("k") || file.find("v")))
    throw InputError(file.label +
                     ": has k or v as well as k.0 or v.0; either k and v or numbered "
                     "segments are expected");
  return count;
}

}  // namespace attn::tools
