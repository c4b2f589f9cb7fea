// The parameter structs that the host fills are the tables that the kernels declare, field by
// field.
#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "asm/gfx942/convert_args.h"
#include "asm/gfx942/decode_args.h"
#include "asm/gfx942/forward_args.h"
#include "asm/gfx942/kv_append_args.h"
#include "asm/gfx942/prepare_args.h"
#include "catch.h"
#include "gfx9/shipped.h"
#include "kernels/shared/merge_args.h"

namespace {

struct Field {
  std::string name;
  size_t offset, size;
};
// A field of a struct, by a name of its own where the table has another.
#define FIELD_AS(name, type, member)                   \
  Field {                                              \
    name, offsetof(type, member), sizeof(type::member) \
  }
#define FIELD(type, member) FIELD_AS(#member, type, member)

std::vector<Field> merge_fields() {
  using A = attn_merge_kernarg;
  return {FIELD(A, outs),        FIELD(A, lses),       FIELD(A, out),       FIELD(A, lse),
          FIELD(A, part_stride), FIELD(A, out_stride), FIELD(A, rows),      FIELD(A, heads),
          FIELD(A, seqlen_q),    FIELD(A, head_dim),   FIELD(A, num_parts), FIELD(A, part_type),
          FIELD(A, out_type)};
}

// Fields of a struct that lies within another.
std::vector<Field> within(const std::vector<Field>& fields, size_t offset) {
  std::vector<Field> moved = fields;
  for (Field& f : moved) f.offset += offset;
  return moved;
}
void append(std::vector<Field>* to, const std::vector<Field>& more) {
  to->insert(to->end(), more.begin(), more.end());
}

std::vector<Field> fp8_codes_fields() {
  using A = attn_gfx942_fp8_codes;
  return {FIELD(A, nan_shift), FIELD(A, to_hardware), FIELD(A, limit), FIELD(A, nan_mask),
          FIELD(A, sign_always)};
}

std::vector<Field> convert_fields() {
  using A = attn_convert_kernarg;
  std::vector<Field> all = {
      FIELD(A, src),           FIELD(A, dst),          FIELD(A, src_stride),
      FIELD(A, dst_stride),    FIELD(A, descale),      FIELD(A, descale_stride),
      FIELD(A, seqlen),        FIELD(A, head_dim),     FIELD(A, scale),
      FIELD(A, box),           FIELD(A, src_type),     FIELD(A, dst_type),
      FIELD(A, src_row_bytes), FIELD(A, dst_row_bytes)};
  append(&all, within(fp8_codes_fields(), offsetof(A, codes)));
  append(&all, {FIELD(A, max_mantissa), FIELD(A, max_inverse), FIELD(A, max_exponent),
                FIELD(A, from_hardware), FIELD(A, code_mask), FIELD(A, inf_value),
                FIELD(A, nan_value), FIELD(A, log2_per_lane)});
  return all;
}

std::vector<Field> band_fields() {
  using A = attn_gfx942_band;
  return {FIELD(A, left), FIELD(A, right), FIELD(A, top)};
}

// A divisor by the names that the table has for its parts.
std::vector<Field> divisor_fields(const std::string& of) {
  using A = attn_gfx942_divisor;
  return {FIELD_AS(of + "_magic", A, magic), FIELD_AS(of + "_shift", A, shift)};
}

std::vector<Field> descale_fields(const std::string& of) {
  using A = attn_descale;
  return {FIELD_AS(of + "_descale", A, at),
          FIELD_AS(of + "_descale_batch", A, batch),
          FIELD_AS(of + "_descale_head", A, head),
          FIELD_AS(of + "_descale_keys", A, block_keys),
          {"reserved_" + of, offsetof(A, block_keys) + 4, 4}};
}

// Of the first, where kernels have several.
std::vector<Field> segment_fields() {
  using S = attn_gfx942_kv_segment;
  using L = attn_kv_lengths;
  using P = attn_pages;
  std::vector<Field> segment = {FIELD(S, k), FIELD(S, v), FIELD(S, k_stride), FIELD(S, v_stride)};
  append(&segment, within({FIELD(L, seqlens),
                           FIELD(L, cu_seqlens),
                           FIELD(L, total),
                           FIELD(L, capacity),
                           {"reserved", offsetof(L, capacity) + 4, 4}},
                          offsetof(S, lengths)));
  append(&segment, within({FIELD(P, block_table),
                           FIELD(P, num_pages),
                           FIELD(P, page_size),
                           FIELD(P, max_pages),
                           {"reserved_2", offsetof(P, max_pages) + 4, 4}},
                          offsetof(S, pages)));
  append(&segment, within(divisor_fields("page"), offsetof(S, by_page_size)));
  append(&segment, within(descale_fields("k"), offsetof(S, k_descale)));
  append(&segment, within(descale_fields("v"), offsetof(S, v_descale)));
  append(&segment, {FIELD(S, ocp), FIELD_AS("reserved_ocp", S, reserved)});
  return segment;
}

std::vector<Field> prepare_fields() {
  using A = attn_gfx942_prepare_kernarg;
  std::vector<Field> all = {FIELD(A, prepared), FIELD(A, cu_seqlens_q), FIELD(A, lengths),
                            FIELD(A, seqlen_q), FIELD(A, total_q),      FIELD(A, seqlen_kv)};
  append(&all, within(band_fields(), offsetof(A, band)));
  append(&all, {FIELD(A, tiles), FIELD(A, head_dim), FIELD(A, head_dim_v), FIELD(A, padded_dim),
                FIELD(A, convert_k), FIELD(A, convert_v), FIELD(A, num_segments),
                FIELD_AS("reserved_end", A, reserved), FIELD(A, missing), FIELD(A, tile_records)});
  append(&all, within(descale_fields("q"), offsetof(A, q_descale)));
  all.push_back(FIELD(A, kv_begins));
  append(&all, within(segment_fields(), offsetof(A, segment)));
  all.push_back({"more_segments", offsetof(A, segment[1]),
                 sizeof(A::segment) - sizeof(attn_gfx942_kv_segment)});
  return all;
}

std::vector<Field> forward_fields() {
  using A = attn_gfx942_forward_kernarg;
  std::vector<Field> all = {FIELD(A, q),
                            FIELD(A, prepared),
                            FIELD(A, out),
                            FIELD(A, lse),
                            FIELD(A, cu_seqlens_q),
                            FIELD(A, seqlens_kv),
                            FIELD(A, cu_seqlens_kv),
                            FIELD(A, q_descale),
                            FIELD(A, k_descale),
                            FIELD(A, v_descale),
                            FIELD(A, sinks),
                            FIELD(A, q_stride),
                            FIELD(A, out_stride),
                            FIELD(A, seqlen_q),
                            FIELD(A, total_q),
                            FIELD(A, seqlen_kv),
                            FIELD(A, total_kv)};
  append(&all, within(band_fields(), offsetof(A, band)));
  append(&all,
         {FIELD(A, tiles),      FIELD(A, heads_kv),   FIELD(A, group),       FIELD(A, q_tiles),
          FIELD(A, pairs),      FIELD(A, parts_log2), FIELD(A, group_magic), FIELD(A, heads_magic),
          FIELD(A, options),    FIELD(A, scale),      FIELD(A, out_factor),  FIELD(A, convert_q),
          FIELD(A, out_type),   FIELD(A, head_dim),   FIELD(A, head_dim_v),  FIELD(A, items),
          FIELD(A, workgroups), FIELD(A, missing),    FIELD(A, out_scale),   FIELD(A, kv_begins)});
  return all;
}

std::vector<Field> descaled_fields() {
  using A = attn_gfx942_descaled_kernarg;
  std::vector<Field> all = forward_fields();
  append(&all, {FIELD(A, tile_records), FIELD(A, num_segments),
                FIELD_AS("reserved_segments", A, reserved)});
  return all;
}

std::vector<Field> direct_fields() {
  using A = attn_gfx950_direct_kernarg;
  std::vector<Field> all = forward_fields();
  append(&all, {FIELD(A, k), FIELD(A, v), FIELD(A, k_stride), FIELD(A, v_stride)});
  return all;
}

std::vector<Field> score_fields() {
  using A = attn_gfx942_score_kernarg;
  std::vector<Field> all = forward_fields();
  append(&all, {FIELD(A, alibi_slopes), FIELD(A, cap), FIELD(A, reserved)});
  return all;
}

std::vector<Field> bias_fields() {
  using A = attn_gfx942_bias_kernarg;
  std::vector<Field> all = score_fields();
  append(&all, {FIELD(A, bias), FIELD(A, bias_stride), FIELD(A, bias_bytes), FIELD(A, bias_type),
                FIELD(A, bias_reserved)});
  return all;
}

std::vector<Field> mask_fields() {
  using A = attn_mask_arrays;
  std::vector<Field> all = forward_fields();
  append(&all, within({FIELD(A, kinds), FIELD(A, index), FIELD(A, bits), FIELD(A, batch_stride),
                       FIELD(A, head_stride), FIELD(A, rows), FIELD(A, columns),
                       FIELD(A, block_q_log2), FIELD(A, block_k_log2), FIELD(A, partials)},
                      offsetof(attn_gfx942_mask_kernarg, block_mask)));
  // What ends the struct at a multiple of its alignment.
  all.push_back({"reserved", all.back().offset + 4, 4});
  return all;
}

std::vector<Field> decode_fields() {
  using A = attn_gfx942_decode_kernarg;
  std::vector<Field> all = {FIELD(A, q),
                            FIELD(A, out),
                            FIELD(A, lse),
                            FIELD(A, cu_seqlens_q),
                            FIELD(A, alibi_slopes),
                            FIELD(A, sinks),
                            FIELD(A, q_stride),
                            FIELD(A, out_stride),
                            FIELD(A, sums),
                            FIELD(A, stats),
                            FIELD(A, arrived)};
  append(&all, within(descale_fields("q"), offsetof(A, q_descale)));
  append(&all, {FIELD(A, batch), FIELD(A, heads_q), FIELD(A, heads_kv), FIELD(A, group)});
  append(&all, within(divisor_fields("group"), offsetof(A, by_group)));
  append(&all, {FIELD(A, seqlen_q), FIELD(A, total_q)});
  append(&all, within(band_fields(), offsetof(A, band)));
  append(&all, {FIELD(A, columns), FIELD(A, column_blocks), FIELD(A, slots), FIELD(A, num_segments),
                FIELD(A, head_dim), FIELD(A, head_dim_v), FIELD(A, q_type), FIELD(A, out_type),
                FIELD(A, factor), FIELD(A, cap), FIELD(A, out_bytes), FIELD(A, workgroups),
                FIELD_AS("reserved_end", A, reserved), FIELD(A, kv_begins)});
  append(&all, within(segment_fields(), offsetof(A, segment)));
  all.push_back({"more_segments", offsetof(A, segment[1]),
                 sizeof(A::segment) - sizeof(attn_gfx942_kv_segment)});
  return all;
}

std::vector<Field> append_fields() {
  using A = attn_gfx942_append_kernarg;
  using T = attn_gfx942_append_tensor;
  using D = attn_descale;
  std::vector<Field> all = {FIELD(T, src), FIELD(T, dst), FIELD(T, src_stride),
                            FIELD(T, dst_stride)};
  append(&all, within({FIELD_AS("descale", D, at),
                       FIELD_AS("descale_batch", D, batch),
                       FIELD_AS("descale_head", D, head),
                       FIELD_AS("descale_keys", D, block_keys),
                       {"reserved", offsetof(D, block_keys) + 4, 4}},
                      offsetof(T, descale)));
  append(&all, {FIELD(T, dst_type), FIELD(T, dim), FIELD(T, heads), FIELD(T, chunks)});
  append(&all, within(fp8_codes_fields(), offsetof(T, fp8)));
  append(&all, {FIELD_AS("reserved_2", T, reserved),
                {"v_tensor", offsetof(A, tensor[1]), sizeof(T)},
                {"q_tensor", offsetof(A, tensor[2]), sizeof(T)},
                FIELD(A, rotary_cos),
                FIELD(A, rotary_sin),
                FIELD(A, cu_seqlens_new),
                FIELD(A, seqlens),
                FIELD(A, seqlens_out),
                FIELD(A, block_table),
                FIELD(A, total_new),
                FIELD(A, seqlen_new)});
  append(&all, within(divisor_fields("seqlen"), offsetof(A, by_seqlen_new)));
  append(&all, {FIELD(A, batch), FIELD(A, capacity), FIELD(A, num_pages), FIELD(A, page_size)});
  append(&all, within(divisor_fields("page"), offsetof(A, by_page_size)));
  append(&all, {FIELD(A, max_pages), FIELD(A, chunk_heads)});
  append(&all, within(divisor_fields("head"), offsetof(A, by_head_threads)));
  append(&all, {FIELD(A, head_threads), FIELD(A, chunk_step), FIELD(A, new_type), FIELD(A, half),
                FIELD(A, interleaved), FIELD(A, aligned), FIELD(A, lengths_only),
                FIELD_AS("reserved_end", A, reserved), FIELD(A, slot_mapping)});
  return all;
}

}  // namespace

TEST_CASE("arguments: the host's structs are the tables that the kernels declare") {
  std::map<std::string, std::pair<std::vector<Field>, size_t>> kernels = {
      {"merge_gfx942", {merge_fields(), sizeof(attn_merge_kernarg)}},
      {"convert_gfx942", {convert_fields(), sizeof(attn_convert_kernarg)}},
      {"kv_append_gfx942", {append_fields(), sizeof(attn_gfx942_append_kernarg)}},
      {"prepare_gfx942_fp8", {prepare_fields(), sizeof(attn_gfx942_prepare_kernarg)}},
      {"decode_gfx942_bf16_d64", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_f16_d64", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_fp8_d64", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_fp8_d128", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_q8_0_d64", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_q8_0_d128", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_q4_0_d128", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_bf16_d128", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"decode_gfx942_f16_d128", {decode_fields(), sizeof(attn_gfx942_decode_kernarg)}},
      {"prepare_gfx942_16bit", {prepare_fields(), sizeof(attn_gfx942_prepare_kernarg)}},
      {"prepare_gfx942_fp8_segments", {prepare_fields(), sizeof(attn_gfx942_prepare_kernarg)}},
      {"prepare_gfx942_fp8_descaled", {prepare_fields(), sizeof(attn_gfx942_prepare_kernarg)}},
      {"fwd_gfx942_fp8_d64_descaled", {descaled_fields(), sizeof(attn_gfx942_descaled_kernarg)}},
      {"fwd_gfx942_fp8_d128_descaled", {descaled_fields(), sizeof(attn_gfx942_descaled_kernarg)}},
      {"prepare_gfx942_16bit_segments", {prepare_fields(), sizeof(attn_gfx942_prepare_kernarg)}},
  };
  for (const char* type : {"fp8", "bf16", "f16"})
    for (const char* dim : {"_d64", "_d128"}) {
      const std::string name = std::string("fwd_gfx942_") + type + dim;
      kernels[name] = {forward_fields(), sizeof(attn_gfx942_forward_kernarg)};
      kernels[name + "_mask"] = {mask_fields(), sizeof(attn_gfx942_mask_kernarg)};
      if (type == std::string("fp8")) continue;
      kernels[name + "_score"] = {score_fields(), sizeof(attn_gfx942_score_kernarg)};
      kernels[name + "_bias"] = {bias_fields(), sizeof(attn_gfx942_bias_kernarg)};
    }
  const auto check = [](const std::string& name, const std::vector<Field>& fields, size_t size) {
    gfx9emu::Memory memory;
    const auto code = attn::test::load_shipped(name, &memory);
    if (!code) return false;
    const gfx9emu::Kernel* kernel = code->kernel(name);
    REQUIRE(kernel);
    REQUIRE(kernel->args.size() == fields.size());
    for (size_t i = 0; i < fields.size(); ++i) {
      INFO(fields[i].name);
      CHECK(kernel->args[i].name == fields[i].name);
      CHECK(kernel->args[i].offset == fields[i].offset);
      CHECK(kernel->args[i].size == fields[i].size);
    }
    CHECK((kernel->kernarg_bytes + 7) / 8 * 8 == (size + 7) / 8 * 8);
    return true;
  };
  size_t shipped = 0;
  for (const bool slow : {false, true})
    for (const std::string& name : attn::test::shipped_kernels(slow)) {
      INFO(name);
      ++shipped;
      REQUIRE(kernels.contains(name));
      const auto& [fields, size] = kernels.at(name);
      if (!check(name, fields, size)) ATTN_SKIP("this build has no gfx9 kernels");
    }
  CHECK(shipped == kernels.size());
  // Of gfx950 alone, whose other kernels have the sources of gfx942.
  if (!check("fwd_gfx950_fp8_d128_direct", direct_fields(), sizeof(attn_gfx950_direct_kernarg)))
    ATTN_SKIP("this build has no gfx950 kernels");
}
