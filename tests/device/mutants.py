"""Kernels with one known mistake each, which the conformance tests must find.

    mutants.py check SOURCE_DIR                     that the kernels' sources still have what the mistakes change
    mutants.py compile SOURCE_DIR OUT_DIR NVCC [KERNEL...]   changes the kernels' sources and compiles them; needs no device
    mutants.py run OUT_DIR ATTN_TESTS [KERNEL...]            runs the tests on each, in place of the library's own kernel
    mutants.py all SOURCE_DIR OUT_DIR NVCC ATTN_TESTS [KERNEL...]          both, each run as soon as its kernel is compiled, for this machine's GPUs alone

Each kernel is compiled unchanged too and must pass. KERNEL: those alone, by default all. A mistake whose text is no longer in the sources, that
does not compile or whose tests do not end is reported as failed, and the others go on; of those in HANGS it is found that they do not end.
Verdicts are printed as they come, with what the tests said where a mistake was not found. Exit code 1: something failed; 77: no device.

`run` refuses CUDA's multi-process service: there a kernel that faults ends the processes beside it too, and new ones get no context for a while. Their
tests then pass without the kernel, or name it in an error that is not its own.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import gpus

DECODE = "decode_sm80_bf16_d128"
APPEND = "kv_append_cuda"
QUANTIZE = "quantize_cuda"
ROLL = "kv_roll_cuda"
EARLY = "decode_sm90_bf16_d128_r8"
BLOCKS = "decode_sm90_blocks_d64"
ROWS = "decode_sm90_fp8_d128_r64"
PAGES = "decode_sm90_f16_d64_r8"
FP8 = "fwd_sm90_fp8_d128"
FP8_SCORE = "fwd_sm90_fp8_d128_score"
FP8_HEADS = "fwd_sm90_fp8_d128_heads"
PAGED = "fwd_sm90_f16_d64_paged"
PLACES = "decode_sm90_bf16_d64_r16"
PLACES_FWD = "fwd_sm90_bf16_d64_paged"
SM80 = "fwd_sm80_bf16_d64"
DEQUANTISED = "fwd_sm90_f16_d64_dequantised"
MIXED = "fwd_sm90_bf16_d128_mixed"
MERGE = "merge_cuda"
BACKWARD = "bwd_sm80_bf16_d64"
BACKWARD_90 = "bwd_sm90_bf16_d64"
BACKWARD_90_SCORE = "bwd_sm90_bf16_d64_score"
BACKWARD_90_PAIR = "bwd_sm90_bf16_d256"
BACKWARD_90_BIAS = "bwd_sm90_bf16_d64_bias"
BACKWARD_BIAS = "bwd_sm80_bf16_d64_score"
LISTS = "lists_cuda"
LATENT = "mla_sm90_bf16_d576_r64_pages"
CODES = "mla_sm90_bf16_d576_r64_656"
SHARDS = "shards_cuda"
WIDE = "fwd_sm90_bf16_d512"
WIDE_TOKENS = "decode_sm80_bf16_d512"
# Of kernels that are several launches, and where tests take others beside them, the files of all.
SOURCES = {SHARDS: ["merge/accumulate_cuda.cu", "merge/wait_cuda.cu", "stubs/fwd_sm80_bf16_d128.cu"],
           LISTS: ["cache/gather_cuda.cu", "cache/list_slots_cuda.cu", "cache/gather_lse_cuda.cu", "stubs/mla_sm90_bf16_d576_r32.cu",
                   "stubs/mla_sm90_bf16_d576_r64_pages.cu", "mla/mla_merge_sm90.cu"],
           LATENT: ["stubs/mla_sm90_bf16_d576_r64_pages.cu", "mla/mla_merge_sm90.cu"],
           CODES: [*(f"stubs/mla_sm90_bf16_d576_r{rows}_656.cu" for rows in (8, 16, 64)), "mla/mla_merge_sm90.cu"],
           DEQUANTISED: ["cache/dequantise_sm90.cu", "stubs/fwd_sm90_f16_d64.cu"],
           MIXED: ["stubs/fwd_sm90_bf16_d128_paged.cu", "stubs/decode_sm90_bf16_d128_r16.cu"],
           ROLL: ["cache/kv_roll_cuda.cu", "cache/kv_append_cuda.cu"],
           BACKWARD: ["backward/bwd_prepare_cuda.cu", "backward/bwd_sinks_cuda.cu", "stubs/bwd_sm80_bf16_d64.cu",
                      "stubs/fwd_sm80_bf16_d64.cu"],
           BACKWARD_90: ["backward/bwd_prepare_cuda.cu", "backward/bwd_sinks_cuda.cu", "stubs/bwd_sm90_bf16_d64.cu",
                         "stubs/fwd_sm80_bf16_d64.cu"],
           BACKWARD_90_PAIR: ["backward/bwd_prepare_cuda.cu", "backward/bwd_sinks_cuda.cu", "stubs/bwd_sm90_bf16_d256.cu",
                              "stubs/fwd_sm80_bf16_d256.cu"],
           BACKWARD_BIAS: ["backward/bwd_prepare_cuda.cu", "backward/bwd_sinks_cuda.cu", "backward_sm80/bwd_bias_cuda.cu",
                           "stubs/bwd_sm80_bf16_d64_score.cu", "stubs/fwd_sm80_bf16_d64_score.cu"],
           BACKWARD_90_BIAS: ["backward/bwd_prepare_cuda.cu", "backward/bwd_sinks_cuda.cu", "backward_sm80/bwd_bias_cuda.cu",
                              "stubs/bwd_sm90_bf16_d64_bias.cu", "stubs/fwd_sm80_bf16_d64_score.cu"],
           BACKWARD_90_SCORE: ["backward/bwd_prepare_cuda.cu", "backward/bwd_sinks_cuda.cu", "stubs/bwd_sm90_bf16_d64_score.cu",
                               "stubs/fwd_sm80_bf16_d64.cu", "stubs/fwd_sm80_bf16_d64_score.cu"]}
TESTS = {SHARDS: ["cuda: results are added*,cuda: segments are read*"],
         LISTS: ["mla: lists_cuda*"],
         LATENT: ["mla: random latent caches*,mla: many more sequences*,mla: row tiles in many parts"],
         CODES: ["mla: rows of 656 bytes*"],
         DECODE: ["decode: random problems,kv_begin: random problems"],
         APPEND: ["kv_append: random layouts*,kv_append: many tokens*,kv_append: heads*,kv_append: slots,kv_append: caches*"], QUANTIZE: ["quantize: *"], ROLL: ["kv_roll: *"],
         EARLY: ["cuda: values that the kernel in front writes"], BLOCKS: ["blocks: *,scales: *"],
         ROWS: ["decode: random problems of many rows over fp8,tree: random problems,decode: a workspace serves*"],
         PAGES: ["decode: random problems,decode: a cut of KV into segments and pages changes nothing,kv_begin: random problems"],
         FP8: ["fp8: boundary shapes,fp8: exact*,accuracy: fp8 sums*"],
         FP8_SCORE: ["fp8: random problems of OCP's types,fp8: descales*,kv_begin: random problems,kv_begin: beside*"],
         FP8_HEADS: ["cuda: more items than blocks of fp8"],
         PLACES: ["positions: *"], PLACES_FWD: ["positions: *"],
         PAGED: ["kv_begin: random problems,kv_begin: beside*"], SM80: ["kv_begin: random problems,kv_begin: beside*"],
         MIXED: ["cuda: a mixed step*"],
         MERGE: ["merge: *"],
         BACKWARD: ["backward: every option on devices,backward: random problems on devices"],
         BACKWARD_90: ["backward: every option on devices,backward: random problems on devices,backward: many blocks*,backward: equal bits*"],
         BACKWARD_90_PAIR: ["backward: every option on devices,backward: random problems on devices,backward: many blocks*,backward: equal bits*"],
         BACKWARD_BIAS: ["backward: the gradient of a bias*"],
         BACKWARD_90_BIAS: ["backward: the gradient of a bias*,backward: NaN stays with those whom*,backward: a bias of each batch entry*"],
         BACKWARD_90_SCORE: ["backward: every option on devices,backward: many blocks*"],
         DEQUANTISED: ["blocks: values are*,blocks: random segments of any types*"],
         WIDE: ["forward: head dimensions,forward: random problems for matrix units"], WIDE_TOKENS: ["decode: random problems"]}
# kernel, mistake, file, text, what it becomes; of several edits tuples of these
MUTANTS = [
    (SHARDS, "a ready word not waited for", "merge/wait_cuda.cu", "while (int(", "while (false && int("),
    (SHARDS, "an arrival too few", "merge/wait_cuda.cu", "< 0)", "< -1)"),
    (SHARDS, "one segment of all waited for", "merge/wait_cuda.cu", "n < a.count;", "n < 1;"),
    (SHARDS, "merged twice", "merge/accumulate_cuda.cu", "weight = expf(lse - highest);", "weight = 2 * expf(lse - highest);"),
    (SHARDS, "the earlier result dropped", "merge/accumulate_cuda.cu", "keep = expf(old - highest);", "keep = 0;"),
    (SHARDS, "rows that see nothing written", "merge/accumulate_cuda.cu", "if (lse == nothing) return;", ""),
    (SHARDS, "what an empty row holds added", "merge/accumulate_cuda.cu", "keep == 0 ? from[d] : add(", "add("),
    (SHARDS, "the strides of the part", "merge/accumulate_cuda.cu", "i * a.out_stride[1]", "i * a.heads * a.head_dim"),
    (LISTS, "lists one off", "cache/visits.cuh", "key[n] = entry[n] * (long long)s.list_block", "key[n] = (entry[n] + 1ll) * s.list_block"),
    (LISTS, "-1 for the first key", "cache/visits.cuh", "key[n] >= v.begin && key[n] < v.end;",
     "key[n] < v.end;\n    for (long long& x : key) if (x < 0) x = v.begin;"),
    (LISTS, "a duplicate dropped", "cache/visits.cuh", "key[n] >= v.begin && key[n] < v.end;",
     "key[n] >= v.begin && key[n] < v.end;\n    if (v.list && s.list_block == 1)\n"
     "      for (int n = 0; n < count; ++n)\n"
     "        for (int m = 0; there[n] && m < first + n * step; ++m)\n"
     "          if (v.list[m] == v.list[first + n * step]) there[n] = false;"),
    (LISTS, "the neighbour's number of keys", "cache/gather_cuda.cu", "a.lengths[item] =", "a.lengths[item > 0 ? item - 1 : 0] ="),
    (LISTS, "keys of the block before overwritten", "cache/gather_cuda.cu", "for (int j = 0; j < first;", "for (int j = attn_gather_threads; j < first;"),
    (LISTS, "hidden keys kept", "cache/visits.cuh", "v.end = min(v.end, seen.end);", ""),
    (LISTS, "the first head's list for all", "cache/visits.cuh", "s.list_heads == 1 ? 0 : a.first_head", "0"),
    (LISTS, "the list of the next queries", "cache/visits.cuh", "int(item.i) / s.list_queries;", "int(item.i) / 128;"),
    (LISTS, "a place one off", "cache/list_slots_cuda.cu", "key[r].entry * to.entry_slots + key[r].row", "key[r].entry * to.entry_slots + key[r].row + 1"),
    (LISTS, "the next sequence's first key one row early", "cache/list_slots_cuda.cu", "key[r].entry * to.entry_slots", "key[r].entry * (to.entry_slots - 1)"),
    (LISTS, "places of the 2048 keys before overwritten", "cache/list_slots_cuda.cu", "before += kept.all;", "before = kept.all;"),
    (LISTS, "the neighbour's number of places", "cache/list_slots_cuda.cu", "to.lengths[item] =", "to.lengths[item > 0 ? item - 1 : 0] ="),
    (LATENT, "latent columns where rope ones belong", "mla/feed.cuh", "2 * latent_columns + 16 * (lane() % 8)",
     "2 * latent_columns - 128 + 16 * (lane() % 8)"),
    (LATENT, "rope columns left out", "mla/many.cuh", "ptx::wgmma<bf16>(s, q_last + step_of(4 + step), k_rope + step_of(step), true);", ""),
    (LATENT, "keys of bad pages kept", "mla/many.cuh", "!(there >> key & 1)", "false"),
    (CODES, "the scale of the neighbouring group", "mla/by_rows.cuh", "scale[half][0] = there ? x.x : 0, scale[half][1] = there ? x.y : 0;",
     "scale[half][0] = there ? x.y : 0, scale[half][1] = there ? x.x : 0;"),
    (CODES, "the scale of the neighbouring key", "mla/by_rows.cuh", "stage + (own + 8 * half) * pitch + row_scales_at",
     "stage + ((own ^ 1) + 8 * half) * pitch + row_scales_at"),
    (CODES, "latent columns where rope ones belong", "mla/by_rows.cuh", "from + row_rope_at + 32 * step", "from + 32 * step"),
    (CODES, "rope columns left out", "mla/by_rows.cuh", "multiply<true>(s, f[1], q + step_offset(32), false);", "for (float& x : s) x = 0;"),
    (CODES, "the first group's weights for all", "mla/by_rows.cuh", "m * groups / 8 * Shared::q_panel", "0 * Shared::q_panel"),
    (CODES, "the first rows' scores for all", "mla/by_rows.cuh", "Shared::q_at + which() * own_tiles", "Shared::q_at + 0 * own_tiles"),
    (CODES, "sums of another reference", "mla/by_rows.cuh", "multiply_sums(n, i, shrink);", "multiply_sums(n, i, 1);"),
    (CODES, "a key too many", "mla/by_rows.cuh", "key < end() &&", "key < end() + 1 &&"),
    (CODES, "a key too few", "mla/by_rows.cuh", "key < end() &&", "key < end() - 1 &&"),
    (CODES, "the last of adjacent rows not loaded", "mla/by_rows.cuh", "breaks ? __ffs(breaks) : 32 - lane()", "breaks ? __ffs(breaks) : 31 - lane()"),
    (LATENT, "merged row tiles of the block before", "mla/mla_merge_sm90.cu", "find_share(a, column, number + 1)", "find_share(a, column, number)"),
    (LATENT, "parts that a warp has in a second turn left out", "mla/mla_merge_sm90.cu", "j < n; j += at_once", "j < 1; j += at_once"),
    (LATENT, "the last sequence of a run counted for the next run", "mla/parts.cuh", "for (int b = run.begin; b < run.end; ++b)",
     "for (int b = run.begin; b < run.end - 1; ++b)"),
    (LISTS, "keys of a round where those of the round before are", "cache/visits.cuh", "there[n] ? table[page[n]]", "there[n] ? table[page[n > 0 ? n - 1 : n]]"),
    (LISTS, "a row of nobody with a sink", "cache/gather_lse_cuda.cu", "row >= a.cu_seqlens_q[a.batch]", "row > a.cu_seqlens_q[a.batch]"),
    (MERGE, "a part left out", "merge/merge_cuda.cu", "s < a.num_parts; s += together", "s < a.num_parts - 1; s += together"),
    (MERGE, "a part's sum without its size", "merge/merge_cuda.cu", "expf(lse - highest) : 0.0f", "1.0f : 0.0f"),
    (DECODE, "a split dropped", "decode/merge.cuh",
     "add_up(from, to, step, rows, places, at_once, [&]", "add_up(from, to - 1, step, rows, places, at_once, [&]"),
    (DECODE, "a page twice", "decode/load.cuh",
     "const int entry = page_of(s, local + lane + 32 * i);",
     "const int entry = page_of(s, local + lane + 32 * i) & ~1;"),
    (DECODE, "a sink counted for each split", "decode/decode.cuh",
     "          parts.write(",
     "          row.sum += a.sinks ? ptx::ex2(a.sinks[Row(a, at, 8 * n + r).head] * log2_e - row.reference) : 0,\n"
     "          parts.write("),
    (DECODE, "the neighbour's length", "decode/units.cuh",
     "segment_span(a.segment[i].lengths, b)", "segment_span(a.segment[i].lengths, (b + 1) % a.batch)"),
    (EARLY, "not waiting for the kernel in front", "decode/swapped.cuh",
     "    begin_access();\n    if (a.seqlen_q == 0) return;", "    if (a.seqlen_q == 0) return;"),
    (DECODE, "the tree ignored", "decode/decode.cuh",
     "if (a.tree) valid = hide_by_tree(s, first);", ""),
    (DECODE, "the tree's bits off by one", "decode/decode.cuh",
     "a.tree_mask.seen(words.x, words.y, first,", "a.tree_mask.seen(words.x, words.y, first + 1,"),
    (BLOCKS, "the scale of the neighbouring block", "decode/own.cuh",
     "Rows::k_scales(both, block)", "Rows::k_scales(both, block ^ 1)"),
    (BLOCKS, "the first of a row's heads for all", "decode/decode_tiles.h",
     "(head & (heads - 1)) * head_bytes", "0 * head_bytes"),
    (BLOCKS, "the fifth bit of the neighbouring column of K", "decode/own_elements.cuh",
     "a[upper][2 * i + key] |= twice >> i &", "a[upper][2 * i + key] |= twice >> (1 - i) &"),
    (BLOCKS, "the fifth bit of the neighbouring column of V", "decode/own_elements.cuh",
     "2 * g + half - to)", "2 * g + (1 - half) - to)"),
    (BLOCKS, "K's minimum left out", "decode/own.cuh", "add_scaled(x, columns, key.min);", ""),
    (BLOCKS, "V's minimum left out", "decode/own.cuh", "add_columns<F16>(block, minima, p);", ""),
    (BLOCKS, "the minimum of the neighbouring key", "decode/own.cuh", "Rows::v_scales(rows_of, block, 1, 2) & there.y;",
     "Rows::v_scales(rows_of, block, 0, 2) & there.y;"),
    (BLOCKS, "the value beside that of the code", "decode/own_elements.cuh", "w >> 16 * i & 0x7777;", "(w >> 16 * i & 0x7777) ^ 1;"),
    (BLOCKS, "halves of K swapped", "decode/own_elements.cuh", "const unsigned mask = upper ?", "const unsigned mask = !upper ?"),
    (BLOCKS, "the neighbouring key's scale of V", "decode/own_elements.cuh",
     "join(two(rows[2 * step], n, at)", "join(two(rows[2 * step + 1], n, at)"),
    (BLOCKS, "one warp's sums dropped", "decode/own.cuh", "return w < warps ?", "return w < warps - 1 ?"),
    (BLOCKS, "weights kept when scales of V are large", "decode/own.cuh",
     "p[n][i] = ptx::mul_f16x2(p[n][i], pair);", ""),
    (ROWS, "one warp's sums dropped", "decode/swapped.cuh",
     "for (int w = 1; w < decode_warps; ++w) all += of.most[w][r];",
     "for (int w = 2; w < decode_warps; ++w) all += of.most[w][r];"),
    (ROWS, "sums of rows kept when their largest score grows", "decode/swapped.cuh",
     "sum[n][i] *= shrink;", "sum[n][i] *= 1;"),
    (ROWS, "the keys of the neighbouring row", "decode/swapped.cuh",
     "if (!there || position < keys.z || position >= keys.w)", "if (!there || position < keys.x || position >= keys.y)"),
    (ROWS, "values of keys that nobody sees kept", "decode/swapped.cuh",
     "if (!usual && seen != ~0ull) clear_values(f[m], seen);", ""),
    (ROWS, "the tree's bits off by one", "decode/swapped.cuh",
     "a.tree_mask.seen(words.x, words.y, first,", "a.tree_mask.seen(words.x, words.y, first + 1,"),
    (DECODE, "kv_begin ignored", "common/lengths.cuh", "return kv_begin ?", "return false ?"),
    (DECODE, "kv_begin one key late", "common/lengths.cuh", "clamp(kv_begin[b], 0,", "clamp(kv_begin[b] + 1, 0,"),
    (DECODE, "the neighbour's kv_begin", "decode/units.cuh", "first_key(a.kv_begin, b,", "first_key(a.kv_begin, (b + 1) % a.batch,"),
    (PAGES, "kv_begin ignored", "common/lengths.cuh", "return kv_begin ?", "return false ?"),
    (PAGES, "kv_begin one key early", "common/lengths.cuh", "clamp(kv_begin[b], 0,", "clamp(kv_begin[b] - 1, 0,"),
    (PLACES, "the neighbour's first query", "common/positions.cuh", "return p.query_start[b] -", "return p.query_start[b > 0 ? b - 1 : 0] -"),
    (PLACES, "the neighbour's first key", "common/positions.cuh", "p.key_start[b * p.key_batch]", "p.key_start[0]"),
    (PLACES, "rank 0 for all", "common/positions.cuh", "- key - p.first_key;", "- key;"),
    (PLACES, "interleaving ignored by rows", "decode/swapped.cuh", "keys_before(positions_of<tile>(a), query + seen.upper, at.seqlen_kv)",
     "keys_before({}, query + seen.upper, at.seqlen_kv)"),
    (PLACES, "interleaving ignored by units", "decode/units.cuh", "low = keys_before(positions_of<tile>(a),", "low = keys_before({},"),
    (PLACES, "whole runs before a place", "shared/key_places.h", "(of_run < interleave ? of_run : interleave)", "interleave"),
    (PLACES, "distances of numbers", "common/positions.cuh", "interleave, p.period}.at(key) : key", "interleave, p.period}.at(0) + key : key"),
    (PLACES_FWD, "the neighbour's first query", "common/positions.cuh", "return p.query_start[b] -", "return p.query_start[b > 0 ? b - 1 : 0] -"),
    (PLACES_FWD, "rank 0 for all", "common/positions.cuh", "- key - p.first_key;", "- key;"),
    (PLACES_FWD, "interleaving ignored by rows", "forward_sm90/scores.cuh", "number_of(positions_of<tile>(a), row + item.upper)", "(row + item.upper)"),
    (PLACES_FWD, "interleaving ignored by tiles", "forward_sm90/items.cuh", "clamp(key(row + upper), 0, length)};",
     "clamp(row + upper, 0, length)};"),
    (SM80, "kv_begin ignored", "common/lengths.cuh", "return kv_begin ?", "return false ?"),
    (SM80, "kv_begin one key late", "common/lengths.cuh", "clamp(kv_begin[b], 0,", "clamp(kv_begin[b] + 1, 0,"),
    (PAGED, "kv_begin ignored", "common/lengths.cuh", "return kv_begin ?", "return false ?"),
    (PAGED, "kv_begin one key late", "common/lengths.cuh", "clamp(kv_begin[b], 0,", "clamp(kv_begin[b] + 1, 0,"),
    (PAGED, "keys before kv_begin in the first tile", "forward_sm90/load_paged.cuh", "&& walk.at.first >= first_seen(item))", ")"),
    (FP8_SCORE, "keys before kv_begin in the first tile", "forward_sm90/fp8_forward.cuh",
     "with & with_score ? first_seen(item) : INT_MIN", "INT_MIN"),
    (ROWS, "V's descale on K", "decode/swapped.cuh",
     "KV::scaled ? unit.k_descale : 1", "KV::scaled ? unit.v_descale : 1"),
    (ROWS, "the neighbour's page", "decode/swapped_load.cuh",
     "page[i] = key < unit_keys && entry < s.max_pages ? table[entry] : -1;",
     "page[i] = key < unit_keys && entry < s.max_pages ? table[entry & ~1] : -1;"),
    (PAGES, "the page of the neighbouring row", "decode/swapped_load.cuh",
     "rows ? own_key() : i * s.box_keys", "rows ? own_key() ^ 1 : i * s.box_keys"),
    (PAGES, "keys of one warp for both", "decode/swapped_load.cuh", "[index()] = valid;", "[0] = valid;"),
    (PAGES, "V from K's rows", "decode/swapped_load.cuh", "in_page_0(s.v, s.v_stride);", "in_page_0(s.k, s.k_stride);"),
    (PAGES, "a unit's pages for the next one too", "decode/swapped_load.cuh", "page[0] = walk.page;", ""),
    (PAGES, "pages by TMA from their second unit on", "decode/swapped_load.cuh", "walk.slot = 0;", "walk.slot = unit_keys;"),
    (ROWS, "a part dropped", "decode/merge.cuh", "unsigned left = step == 1 ? to - from :",
     "unsigned left = step == 1 ? to - from - 1 :"),
    (ROWS, "a counter not set back", "decode/merge.cuh", "if (last) *arrived = 0;", ""),
    (BLOCKS, "the scale of the neighbouring key", "decode/own_elements.cuh",
     "return {F16::unpack(ptx::load_shared_half(from)),", "return {F16::unpack(ptx::load_shared_half(from ^ 4)),"),
    (BLOCKS, "the other half of a scale's word", "decode/own_elements.cuh", "return (halves ^ (halves", "return (halves ^ 1 ^ (halves"),
    (BLOCKS, "a key's scale of V on K", "decode/own.cuh", "k_scale_at = a.scales_at + key_scale", "k_scale_at = a.v_scales_at + key_scale"),
    (BLOCKS, "K's scale of the neighbouring 16", "decode/own_elements.cuh", "t < 2 ? 0x2200 : 0x3311", "t < 2 ? 0x3311 : 0x2200"),
    (BLOCKS, "V's scale of the neighbouring 16", "decode/own_elements.cuh", "(n % 2 * 2 + i) * 0x11", "(n % 2 * 2 + (1 - i)) * 0x11"),
    (BLOCKS, "the first head's descale for all", "decode/own.cuh", "of_head(warp_head()).h, 0) : 1;", "of_head(0).h, 0) : 1;"),
    (BLOCKS, "V's descale on K", "decode/own.cuh", "const float descale = descales()[0];", "const float descale = descales()[1];"),
    (BLOCKS, "V's scale of the neighbouring 16, by fours", "decode/own_elements.cuh", "g < 4 ? 0x6240 : 0x7351", "g < 4 ? 0x7351 : 0x6240"),
    (BLOCKS, "signs of nvfp4 left out", "decode/own_elements.cuh", "in_place = 0x8e008e00", "in_place = 0x0e000e00"),
    (BLOCKS, "half of nvfp4's codes from the neighbours", "decode/own_elements.cuh", "ptx::bit_select(even, moved, w)", "ptx::bit_select(even, w, moved)"),
    (BLOCKS, "a neighbour's row of several heads", "decode/own.cuh", "of_row * place.head_bytes);", "(of_row ^ 1) * place.head_bytes);"),
    (BLOCKS, "the first head's scales of several", "decode/own.cuh", "warp_head() % heads * (16 / heads);", "0;"),
    (BLOCKS, "scales of several heads of the next key", "decode/own.cuh", "k_scale_at = a.scales_at + joint_scales<head_dim>(g);",
     "k_scale_at = a.scales_at + joint_scales<head_dim>(g ^ 1);"),
    (BLOCKS, "halves of i4 swapped, by fours", "decode/own_elements.cuh",
     "const unsigned codes = w[2 * i + step] >> 8 * two;", "const unsigned codes = w[2 * i + step] >> 8 * (1 - two);"),
    (BLOCKS, "scales of hidden keys kept", "decode/own.cuh", "if (!(valid >> (two_t + v_key(i)) & 1)) scales[i] = 0;", ";"),
    (BLOCKS, "a token's scale of its neighbour", "decode/own.cuh", "4 * (warp() * warp_keys + g));", "4 * (warp() * warp_keys + (g ^ 1)));"),
    (APPEND, "the largest of 8 of 16", "cache/kv_append.cuh", "ptx::max_nan(most, __shfl_xor_sync(all_lanes, most, 1))", "most"),
    (APPEND, "an element halfway to the odd code", "common/cache_format.cuh", "four ? 3.5f * one : 0.75f * one", "four ? 3.4f * one : 0.7f * one"),
    (APPEND, "the scale of the neighbouring 16", "cache/kv_append.cuh", "s.d / attn_nvfp4_group] =", "(s.d / attn_nvfp4_group ^ 1)] ="),
    (QUANTIZE, "the largest of 8 of 16", "cache/quantize_cuda.cu", "int step = attn_nvfp4_group / 2;", "int step = attn_nvfp4_group / 4;"),
    (QUANTIZE, "infinities taken for the largest", "common/cache_format.cuh", "if (most != infinity) [[likely]]", "if (most == most) [[likely]]"),
    (DEQUANTISED, "the scale of the neighbouring 16", "cache/dequantise_sm90.cu", "scales == Scales::of_16 ? column % of_head : 0",
     "scales == Scales::of_16 ? column % of_head ^ 1 : 0"),
    (BLOCKS, "halves of i4 swapped", "decode/own_elements.cuh",
     "a[i][2 * step] = pair_of_lower<8>(both, high ^ 0x00080008);\n        a[i][2 * step + 1] = pair_of_upper<8>(both, high ^ 0x00800080);",
     "a[i][2 * step + 1] = pair_of_lower<8>(both, high ^ 0x00080008);\n        a[i][2 * step] = pair_of_upper<8>(both, high ^ 0x00800080);"),
    (BLOCKS, "the last sequence's scales", "decode/own_load.cuh", "segment == at.segment && b == at.b &&",
     "segment == at.segment &&"),
    (BACKWARD, "lse in nats", "backward/bwd_prepare_cuda.cu", "lowest) * log2_e", "lowest)"),
    (BACKWARD, "the sign of d_lse", "backward/bwd_prepare_cuda.cu", "sum - d_lse", "sum + d_lse"),
    (BACKWARD, "d_sinks without its last tile", "backward/bwd_sinks_cuda.cu", "i < a.num_parts", "i < a.num_parts - 1"),
    (BACKWARD, "rows of nobody kept", "backward/bwd_prepare_cuda.cu", "clear(end_of(batch - 1) + worker,",
     "clear(end_of(batch - 1) + worker + 1,"),
    (BACKWARD, "dS where P belongs", "backward_sm80/backward.cuh", "sm80::multiply_values(s, y_at + lane_at)",
     "sm80::multiply_values(d, y_at + lane_at)"),
    (BACKWARD, "dk without the scale", "backward_sm80/backward.cuh", "store_rows<Shape>(d, a.dk, item, a.kv.cu_seqlens, warp_row, scale,",
     "store_rows<Shape>(d, a.dk, item, a.kv.cu_seqlens, warp_row, one,"),
    (BACKWARD, "the last head of a group skipped", "backward_sm80/items.cuh", "item.head * a.group + a.group - 1",
     "item.head * a.group + max(a.group - 2, 0)"),
    (BACKWARD, "the diagonal off by one", "backward_sm80/items.cuh", "from = is_keys<of> ? 1 - band.upper", "from = is_keys<of> ? 2 - band.upper"),
    (BACKWARD, "the window off by one", "backward_sm80/items.cuh", "to = is_keys<of> ? 1 - band.lower", "to = is_keys<of> ? 2 - band.lower"),
    (BACKWARD, "a tile of the walk skipped", "backward_sm80/items.cuh", "const int after = next.first + next.count;",
     "const int after = next.first + next.count + (next.first > 0 ? copied : 0);"),
    (BACKWARD, "delta of the neighbouring row", "backward_sm80/backward.cuh", "exists ? a.delta[at] : 0", "exists ? a.delta[at ^ 1] : 0"),
    (BACKWARD, "not waiting for the other warps", "backward_sm80/backward.cuh", "    ptx::cp_async_wait<0>();\n    __syncthreads();",
     "    ptx::cp_async_wait<0>();"),
    (BACKWARD_90, "a turn not waited for", "backward_sm90/load.cuh", "while (ptx::load_acquire(turn) <", "while (false && ptx::load_acquire(turn) <"),
    (BACKWARD_90, "the first block adds", "backward_sm90/load.cuh", "if (here.before == 0)\n", "if (false)\n"),
    (BACKWARD_90, "the last block forgets the sum", "backward_sm90/consumer.cuh", "if (to.last == last) {", "if (false) {"),
    (BACKWARD_90, "dk without the scale", "backward_sm90/by_keys.cuh", "store(a.dk, dk[u], item, subtile, a.scale,", "store(a.dk, dk[u], item, subtile, 1,"),
    (BACKWARD_90, "the diagonal off by one", "backward_sm90/consumer.cuh", "key - item.sequence.upper + 1 - origin", "key - item.sequence.upper + 2 - origin"),
    (BACKWARD_90, "P where ds belongs", "backward_sm90/consumer.cuh", "T::pack(dp[2 * i], dp[2 * i + 1])", "T::pack(s[2 * i], s[2 * i + 1])"),
    (BACKWARD_90, "delta of the neighbouring row", "backward_sm90/consumer.cuh", "(i % 2 ? delta.y : delta.x)", "(i % 2 ? delta.x : delta.y)"),
    (BACKWARD_90, "keys that nobody sees not cleared", "backward_sm90/load.cuh", "item.clears_keys = any && (", "item.clears_keys = false && ("),
    (BACKWARD_90, "queries that see nothing not cleared", "backward_sm90/load.cuh", "item.clears_first = any &&", "item.clears_first = false &&"),
    (BACKWARD_90, "dk and dv of the first head lost", "backward_sm90/consumer.cuh", "        if (number > 0) {\n          const float4 y", "        if (number > 1) {\n          const float4 y"),
    (BACKWARD_90, "dq that sees nothing kept", "backward_sm90/load.cuh", "if (!a.dq.at || a.dq.add) return;", "return;"),
    (BACKWARD_90_PAIR, "K of the own keys for the other block's", "backward_sm90/load.cuh", "block * tile.panels() / 2 + p, block ^ 1);",
     "block * tile.panels() / 2 + p, block);"),
    (BACKWARD_90_PAIR, "the other block's keys not cleared", "backward_sm90/load.cuh", "if (tile.blocks > 1) clear_keys(", "if (false) clear_keys("),
    (BACKWARD_90_PAIR, "the neighbouring columns of dq", "backward_sm90/consumer.cuh", "groups * block_of_cluster<tile>() + group; }",
     "groups * block_of_cluster<tile>() + (group ^ 1); }"),
    (BACKWARD_90_SCORE, "softcap's slope left out", "backward_sm90/consumer.cuh", "(capped ? 1 - x * x : 1)", "1"),
    (BACKWARD_90_SCORE, "ALiBi of the neighbouring query", "backward_sm90/consumer.cuh", "float(8 * j + i - 8 * half)", "float(8 * j + 1 - i - 8 * half)"),
    (BACKWARD_90_SCORE, "ALiBi from where the sequences begin", "backward_sm90/consumer.cuh",
     "first_key() + item.sequence.keys - item.sequence.queries", "first_key()"),
    (BACKWARD_BIAS, "d_bias of the neighbouring query", "backward_sm80/bwd_bias_cuda.cu", "rows * tile[2] + r,", "rows * tile[2] + (r ^ 1),"),
    (BACKWARD_BIAS, "the last tile left out of a sum", "backward_sm80/bwd_bias_cuda.cu", "count -= first;", "count -= first + (part + 1 == sums.parts);"),
    (BACKWARD_BIAS, "the last part of a sum left out", "backward_sm80/bwd_bias_cuda.cu", "part < a.sums.parts; ++part", "part < a.sums.parts - 1; ++part"),
    (BACKWARD_BIAS, "the last query of a tile left out of a sum", "backward_sm80/bwd_bias_cuda.cu", "r < rows; ++r", "r < rows - 1; ++r"),
    (BACKWARD_BIAS, "half of ds", "backward_sm80/bwd_bias_cuda.cu", "p * (dp[n][2 * half + i]", "0.5f * p * (dp[n][2 * half + i]"),
    (BACKWARD_BIAS, "delta of the neighbouring row", "backward_sm80/bwd_bias_cuda.cu", "exists ? a.delta[at] : 0", "exists ? a.delta[at ^ 1] : 0"),
    (BACKWARD_BIAS, "what is there lost", "backward_sm80/bwd_bias_cuda.cu", "if (a.add) x +=", "if (false) x +="),
    (BACKWARD_BIAS, "not waiting for the other warps", "backward_sm80/bwd_bias_cuda.cu", "      ptx::cp_async_wait<ahead - 1>();\n      __syncthreads();",
     "      ptx::cp_async_wait<ahead - 1>();"),
    (BACKWARD_90_BIAS, "the bias of the neighbouring query", "backward_sm90/consumer.cuh", "min(bias.query + 8 * (first + j) + i, bias.last)",
     "min(bias.query + 8 * (first + j) + 1 - i, bias.last)"),
    (BACKWARD_90_BIAS, "the bias of the first batch entry", "backward_sm90/consumer.cuh", "item.b * a.bias_stride[0] +", ""),
    (BACKWARD_90_BIAS, "a copied bias of the neighbouring query", "backward_sm90/load.cuh", "min(row, last) * a.bias_query", "min(row ^ 1, last) * a.bias_query"),
    (BACKWARD_90_BIAS, "a copied bias of the first batch entry", "backward_sm90/load.cuh", "item.b * a.bias_stride[0] + item.head * a.bias_stride[1] +\n                                     (long long)", "item.head * a.bias_stride[1] +\n                                     (long long)"),
    (BACKWARD_90_BIAS, "a copied bias not waited for", "backward_sm90/consumer.cuh", "ptx::mbarrier_wait(address(&c.bias_full), n & 1);", ";"),
    (BACKWARD_90_BIAS, "K that a bias hides kept", "backward_sm90/load.cuh", "lanes >> 8 * r & 0xff", "false"),
    (BACKWARD_90_BIAS, "queries that a bias hides kept", "backward_sm90/load.cuh", "if constexpr (biased) clear_poisoned_queries<tile>(c, shared, s);", ""),
    (BACKWARD_90_BIAS, "V that a bias hides kept", "backward_sm90/consumer.cuh", "if (biased && s[4 * j + i] == 0) x = 0;", ""),
    (DEQUANTISED, "the scale of the neighbouring block", "cache/dequantise_sm90.cu",
     "const float d = load_half(halves),",
     "const float d = load_half(halves + (at / 32 % 2 ? -1 : 1) * layout.size() / 2),"),
    (DEQUANTISED, "nibbles swapped", "cache/dequantise_sm90.cu", "byte >> 4 * half & 15", "byte >> 4 * (1 - half) & 15"),
    (DEQUANTISED, "two bytes in front", "cache/dequantise_sm90.cu", "last, 0x5432);", "last, 0x3210);"),
    (MIXED, "tokens before the kernel in front has ended", "forward_sm90/forward.cuh",
     "if (helpers == 0) ptx::grid_let", "ptx::grid_let"),
    (APPEND, "the neighbour's length", "cache/kv_append_cuda.cu",
     "const int held = length(token.b);", "const int held = length((token.b + 1) % a.batch);"),
    (APPEND, "the page in front", "cache/kv_append.cuh",
     "a.max_pages + row.page];", "a.max_pages + max(row.page - 1, 0)];"),
    (APPEND, "the first head's descale for all", "cache/kv_append.cuh",
     "*descale_at(descale, row.token.b, s.h, 0)", "*descale_at(descale, row.token.b, 0, 0)"),
    (APPEND, "a negative slot written", "cache/kv_append_cuda.cu",
     "return slot == (slot & 0x7fffffff) ?", "return slot < 0 ? 0 : slot == (slot & 0x7fffffff) ?"),
    (APPEND, "a slot beyond 32 bits written", "cache/kv_append_cuda.cu",
     "return slot == (slot & 0x7fffffff) ?", "return slot >= 0 ?"),
    (APPEND, "the neighbour's slot", "cache/kv_append_cuda.cu", "a.seqlen_new + token.t];", "a.seqlen_new + max(token.t - 1, 0)];"),
    (APPEND, "lengths advanced once too often", "cache/sequences.cuh",
     "clamp(length + (long long)added,", "clamp(length + (long long)added + 1,"),
    (APPEND, "the next position's angle", "cache/kv_append.cuh",
     "a.rotary_cos + position *", "a.rotary_cos + (position ? position - 1 : 1) *"),
    (APPEND, "the largest value of two neighbouring heads", "cache/kv_append.cuh",
     "if (log < a.log_head)", "if (log < a.log_head + 1)"),
    (APPEND, "the last token of a block twice", "cache/kv_append.cuh",
     "next_from = of_lane(source, i + ahead)", "next_from = of_lane(source, i + ahead - 1)"),
    (APPEND, "the sequence of the block's first token", "cache/kv_append_cuda.cu",
     "n < ends[found]))", "true))"),
    (ROLL, "a page fewer kept", "cache/kv_roll_cuda.cu", "r.recent_lengths, b).length - r.keep,",
     "r.recent_lengths, b).length - r.keep + r.recent.page_size,"),
    (ROLL, "the page in front", "cache/kv_roll_cuda.cu", "t / r.recent.page_size];", "max(t / r.recent.page_size - 1, 0)];"),
    (ROLL, "the table not turned", "cache/kv_roll_cuda.cu", "  reverse(table, end);\n", ""),
    (QUANTIZE, "halves swapped", "cache/quantize_cuda.cu", "(code & 15) | (behind & 15) << 4",
     "(behind & 15) | (code & 15) << 4"),
    (QUANTIZE, "the scale of the last 32 elements", "cache/quantize_cuda.cu", "amax = fmaxf(amax, fabsf(x));\n    }\n    amax = warp_max(amax);\n    if",
     "amax = fabsf(x);\n    }\n    amax = warp_max(amax);\n    if"),
    (FP8, "transposed keys in another order", "forward_sm90/fp8_values.cuh",
     "128 + ((m / 2 ^ r) << 4);", "128 + ((m / 2 ^ 1 ^ r) << 4);"),
    (FP8, "no row of ones", "forward_sm90/fp8_values.cuh", "if (part == 0) write_ones<tile>(shared, one);", ""),
    (FP8, "sums multiplied a tile late", ("forward_sm90/fp8_forward.cuh",) * 3,
     ("add_sums<0, tile.keys>(vt_at, 1, shrink, meanwhile);", "  float unit;  //", "    unit = 0;"),
     ("add_sums<0, tile.keys>(vt_at, 1, late, meanwhile);\n      late[0] = shrink[0], late[1] = shrink[1];",
      "  float late[2];\n  float unit;  //", "    unit = 0, late[0] = late[1] = 1;")),
    (FP8, "a tile begins with the last one's sums", "forward_sm90/fp8_softmax.cuh",
     "adds || step > from / 32 || part < tile.weight_parts - 1);", "true);"),
    # The sums of every other tile are added to all before by the matrix unit.
    (FP8, "promotion every other tile", ("forward_sm90/fp8_forward.cuh",) * 6,
     ("    ptx::forget(t[0]);\n    ptx::forget(t[1]);", "(piece_of<0>(t), p, vt_at);", "!one_by_one && piece > 0 && a.batch < 0);",
      "add_pieces<from, to>(t, vt_at, by, shrink);", "add_sums<0, tile.keys>(vt_at, 1, shrink, meanwhile);", "  float unit;  //"),
     ("    constexpr int columns = tile.piece_columns() / 2;\n    const float left[2] = {odd ? 0 : shrink[0], odd ? 0 : shrink[1]};\n"
      "    for (int n = 0; n < pieces; ++n)\n      for (int i = 0; i < columns + 4; ++i)\n"
      "        t[n][i] = odd ? shrink[i / 2 % 2] * (i < columns ? o[n * columns + i] : softmax.row_state[i / 2 % 2].sum) : 0;",
      "(piece_of<0>(t), p, vt_at, odd);", "odd);", "add_pieces<from, to>(t, vt_at, by, left);",
      "odd = n & 1;\n      add_sums<0, tile.keys>(vt_at, 1, shrink, meanwhile);", "  bool odd;\n  float unit;  //")),
    (FP8_SCORE, "the descale of the block in front", "forward_sm90/items.cuh",
     "at.first + min(64 * half, at.keys - 1) - begin;", "max(at.first + min(64 * half, at.keys - 1) - begin - 64, 0);"),
    (FP8_SCORE, "K's descale on V", "forward_sm90/items.cuh", "to.v[half] = descale(scales.v);", "to.v[half] = descale(scales.k);"),
    (FP8_SCORE, "one descale of K for both halves", "forward_sm90/fp8_softmax.cuh", "factor[at / scores]", "factor[0]"),
    (FP8_SCORE, "one descale of V for both halves", "forward_sm90/fp8_forward.cuh", "move_unit(v_scale[1])", "move_unit(v_scale[0])"),
    (FP8_HEADS, "one half of a tile twice", "forward_sm90/load.cuh",
     "const int first = tile.loaded_keys() * block_of_cluster<tile>();", "const int first = 0;"),
    (FP8_HEADS, "one head in both blocks", "forward_sm90/item_order.cuh",
     "at.h * heads + block_of_cluster<tile>();", "at.h * heads;"),
    (WIDE, "the first half of V's columns for both", "forward_sm90/warp.cuh", "tile.halves ? group * (panels", "tile.halves ? 0 * (panels"),
    (WIDE, "both halves of out in one place", "forward_sm90/epilogue.cuh", "item.h * a.out_stride[2] + first;", "item.h * a.out_stride[2];"),
    (WIDE, "the state's sum not handed over", "forward_sm90/alternating.cuh", "__uint_as_float(x.x), __uint_as_float(x.y)",
     "__uint_as_float(x.x), state.sum"),
    (WIDE, "sums not multiplied where the other's scores are larger", "forward_sm90/alternating.cuh",
     "          softmax.rescale(o, shrink);\n          add_handed_sums(n, v_now, add);\n        } else {",
     "          add_handed_sums(n, v_now, add);\n        } else {"),
    (WIDE, "weights in the place of the tile before the last", "forward_sm90/alternating.cuh", "n / 2 % 2 * 4 + 2 * step", "2 * step"),
    (WIDE, "Q of the item before", "forward_sm90/alternating.cuh", "          keep_queries<tile>(q, warp, warp.q_at(count));\n", ""),
    (WIDE_TOKENS, "half of the warps left out", "decode/decode.cuh", "if (other_any) x = fmaf(", "if (false) x = fmaf("),
]
# Kernels whose tests, or APPEND's compilation, take longest on an H200. They begin first.
SLOW = {WIDE, WIDE_TOKENS, PLACES, PLACES_FWD, APPEND}
# Mistakes that nobody sees but by the wait that does not end, and the tests to see it with.
HANGS = {(CODES, "the last of adjacent rows not loaded"): ["mla: rows of 656 bytes on few problems"]}


def file_of(folder, kernel, mistake):
    return folder / f"{kernel}-{mistake.replace(' ', '-').replace(chr(39), '')}.fatbin"


def edits(file, text, by):
    return zip(file, text, by) if isinstance(file, tuple) else [(file, text, by)] if file else []


def stale(source, change):
    """What of a change, the last three fields of a mistake, is not in the sources."""
    return [f"kernels/{file} has no {text!r}" for file, text, _ in edits(*change) if text not in (source / "kernels" / file).read_text()]


def check(source):
    found = [f"{mistake}: {what}" for _, mistake, *change in MUTANTS for what in stale(source, change)]
    if found:
        sys.exit("mutants: " + "\n".join(found))


def asked_for(names):
    """(kernels, mutants)"""
    for name in names:
        if name not in TESTS:
            sys.exit(f"mutants: kernel {name}; there are {', '.join(TESTS)}")
    return (sorted((k for k in TESTS if not names or k in names), key=lambda k: k not in SLOW),
            sorted((m for m in MUTANTS if not names or m[0] in names), key=lambda m: m[0] not in SLOW))


def compile_one(source, out, nvcc, kernel, mistake, file, text, by, here=False):
    """Whether it is compiled. An older file of that name is gone, so that `run` does not take it for this one. here:
    for this machine's GPUs alone."""
    begin = time.monotonic()
    file_of(out, kernel, mistake).unlink(missing_ok=True)
    missing = stale(source, (file, text, by))
    if missing:
        print(f"{kernel}: {mistake}: FAILED: {'; '.join(missing)}", flush=True)
        return False
    with tempfile.TemporaryDirectory() as scratch:
        kernels = Path(scratch) / "kernels"
        shutil.copytree(source / "kernels", kernels)
        for at, old, new in edits(file, text, by):
            (kernels / at).write_text((kernels / at).read_text().replace(old, new))
        (kernels / "stubs").mkdir()
        writer = Path(scratch) / "write_stubs"
        subprocess.run(["c++", "-std=c++20", "-o", writer, kernels / "write_stubs.cpp"], check=True)
        subprocess.run([writer, kernels / "stubs"], check=True, stdout=subprocess.DEVNULL)
        files = SOURCES[kernel] if kernel in SOURCES else [next(kernels.glob(f"*/{kernel}.cu")).relative_to(kernels)]
        source_file = Path(scratch) / "kernel.cu"
        source_file.write_text("".join(f'#include "{file}"\n' for file in files))
        declared = " ".join((kernels / file).read_text().splitlines()[0] for file in files).split()
        # sm_90 alone launches early, which code of compute_80 does not wait for.
        newest = "90a" if "sm_90a" in declared else "90"
        # No older code where some is for sm_90a alone.
        runs_older = not here or gpus.capabilities() != {"9.0"}
        older = ["-gencode", "arch=compute_80,code=sm_80"] if "sm_80" in declared and newest == "90" and runs_older else []
        made = subprocess.run([nvcc, "-fatbin", *older, "-gencode", f"arch=compute_{newest},code=[sm_{newest},compute_{newest}]",
                               "-std=c++20", "-O3", "-allow-unsupported-compiler", "-I", kernels, "-o", file_of(out, kernel, mistake),
                               source_file], capture_output=True, text=True)
        failed = made.returncode != 0
        verdict = "FAILED: nvcc: " + made.stderr[-500:].strip() if failed else f"compiled, {time.monotonic() - begin:.0f} s"
        print(f"{kernel}: {mistake}: {verdict}", flush=True)
        return not failed


def start_compiling(pool, source, out, nvcc, names, here=False):
    """{(kernel, mistake): the compilation, whose result is whether there is a file}, the unchanged kernels first"""
    kernels, mutants = asked_for(names)
    out.mkdir(parents=True, exist_ok=True)
    each = [(kernel, "unchanged", "", "", "") for kernel in kernels] + mutants
    return {one[:2]: pool.submit(compile_one, source, out, nvcc, *one, here) for one in each}


def compile_all(source, out, nvcc, names):
    """How many failed."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = start_compiling(pool, source, out, nvcc, names)
    failures = sum(not one.result() for one in made.values())
    print(f"mutants: {failures} of {len(made)} not compiled" if failures else "mutants: all compiled")
    return failures


def run_tests(file, tests, cases, number, seconds):
    """(exit code, output); a run ends with its first failure. If it does not end, the code is None."""
    try:
        done = subprocess.run([tests, "--abort", *cases], env=dict(gpus.environment(number), ATTN_KERNEL_FILE=str(file.resolve())),
                              capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return None, f"not ended after {error.timeout:.0f} s"
    return done.returncode, done.stdout + done.stderr


def run(folder, tests, kernel, mistake, number, made):
    """(exit code, output) of run_tests, and the seconds that it took"""
    for one in (mistake, "unchanged"):
        if (kernel, one) in made:
            made[kernel, one].result()
        if not file_of(folder, kernel, one).exists():
            return None, f"{file_of(folder, kernel, one).name} is not there; mutants.py compile makes it", 0
    file, begin = file_of(folder, kernel, mistake), time.monotonic()
    if (kernel, mistake) not in HANGS:
        return *run_tests(file, tests, TESTS[kernel], number, 300), time.monotonic() - begin
    cases = HANGS[kernel, mistake]
    code, output = run_tests(file_of(folder, kernel, "unchanged"), tests, cases, number, 300)
    seconds = time.monotonic() - begin
    if not passes(code, output):
        return code, output, seconds
    return *run_tests(file, tests, cases, number, 10 + 2 * seconds), time.monotonic() - begin


def passes(code, output):
    return code == 0 and "All tests passed" in output


def verdict_of(kernel, mistake, code, output):
    if code is None:
        hangs = (kernel, mistake) in HANGS and output.startswith("not ended")
        return "found: " + output if hangs else "FAILED: " + output
    # A file may have several kernels, of which the first to fail is named.
    names = {kernel, *(Path(file).stem for file in SOURCES.get(kernel, []))}
    if code != 0 and "FAILED" in output and any(name in output for name in names):
        return "found"
    return f"NOT FOUND: exit code {code}, after:\n{output[-2000:]}"


def shares_a_server():
    """Whether processes would be clients of the multi-process service."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path("/tmp/nvidia-mps/control").exists()


def run_all(folder, tests, names, made=None):
    """made: compilations on their way, of start_compiling."""
    if shares_a_server():
        sys.exit("mutants: the multi-process service is on; accepted: none, for a mistake that faults would end the other runs")
    kernels, mutants = asked_for(names)
    failures, broken = 0, set()
    # Mostly they wait for each other's turns on the device, or compute the reference.
    with ThreadPoolExecutor(max(1, os.cpu_count() * 7 // 8)) as pool:
        runs = {pool.submit(run, folder, tests, kernel, mistake, number, made or {}): (kernel, mistake)
                for number, (kernel, mistake) in enumerate([(kernel, "unchanged") for kernel in kernels] + [m[:2] for m in mutants])}
        for done in as_completed(runs):
            kernel, mistake = runs[done]
            code, output, seconds = done.result()
            if mistake != "unchanged":
                verdict = verdict_of(kernel, mistake, code, output)
                failures += not verdict.startswith("found")
            elif f"SKIP: {kernel}:" in output:
                pool.shutdown(cancel_futures=True)
                print(output[output.index(f"SKIP: {kernel}:"):].splitlines()[0])
                return 77
            elif passes(code, output):
                verdict = "passed"
            else:
                verdict = f"FAILED, so that nothing is found by its tests:\n{output[-3000:]}"
                broken.add(kernel)
            verdict += f", {seconds:.0f} s" if verdict in ("found", "passed") else ""
            print(f"{kernel}: {mistake}: {verdict}", flush=True)
    print(f"mutants: {len(mutants) - failures} of {len(mutants)} found" + "".join(f"; {kernel} fails unchanged" for kernel in sorted(broken)))
    return 1 if failures or broken else 0


def compile_and_run(source, out, nvcc, tests, names):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        code = run_all(out, tests, names, start_compiling(pool, source, out, nvcc, names, here=True))
        pool.shutdown(cancel_futures=True)
    return code


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "check":
        check(Path(sys.argv[2]))
    elif len(sys.argv) >= 5 and sys.argv[1] == "compile":
        sys.exit(1 if compile_all(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:]) else 0)
    elif len(sys.argv) >= 6 and sys.argv[1] == "all":
        sys.exit(compile_and_run(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:]))
    elif len(sys.argv) >= 4 and sys.argv[1] == "run":
        sys.exit(run_all(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    else:
        sys.exit(__doc__)
