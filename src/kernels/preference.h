// Which kernel is preferred where several take a problem.
//
// Rows of the catalog are in order of preference: families as src/catalog/catalog.cpp joins them,
// the kernels of a family in the order of its variants.h. The functions here are the exceptions:
// why a later row serves a problem better. All numbers in them were measured; docs/log has the
// measurements.
//
// Each returns the reason, "for ..." or "without ...", or "" if the kernel is as good as any later
// one. choose() completes the sentence with the name of the kernel that runs instead, and ignores
// the reason if no later kernel takes the problem.
#pragma once
#include <string>

#include "driver/device.h"
#include "kernels/decode/variants.h"
#include "kernels/forward_sm90/variant.h"
#include "problem/problem.h"

namespace attn {

std::string prefer_other(const Problem& problem, const DeviceInfo& device,
                         const sm90::Variant& variant);
std::string prefer_other(const Problem& problem, const DeviceInfo& device,
                         const decode::Variant& variant);
// paged: the variant that takes the sequences with many queries. converts: their keys are converted
// first.
std::string prefer_other_to_mixed(const Problem& problem, const sm90::Variant& paged,
                                  bool converts);
std::string prefer_other_to_dequantised(const Problem& problem);
// To prefix_*: why reading shared keys for each sequence is as fast.
std::string prefer_other_to_prefix(const Problem& problem);
constexpr int most_prefix_parts = 15;
// key_parts of the part of prefix_* that reads the shared keys: `rows` is its problem, of one
// sequence.
int64_t prefix_parts(const Problem& rows, const DeviceInfo& device);
// fixed_split of the part of prefix_* where no kernel takes key_parts.
int64_t prefix_split(const Problem& rows, const DeviceInfo& device);

}  // namespace attn
