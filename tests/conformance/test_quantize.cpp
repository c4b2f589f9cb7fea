// The body of the quantize operation, for every kernel of the catalog that runs here: codes exactly
// as core/dtype.h makes them, which tests/unit/test_dtype.cpp checks against a search.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "../catch.h"
#include "../types.h"
#include "backend.h"
#include "core/cache_format.h"
#include "core/dtype.h"
#include "core/ggml.h"
#include "core/row_scale.h"
#include "random_families.h"

namespace attn::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

struct QuantizeCase {
  int64_t batch = 2, seqlen = 70, heads = 3, dim = 64;
  attn_dtype src = ATTN_F32, dst = ATTN_F8_E4M3FN;
  Arrange arrange = Arrange::contiguous;
  attn_descale_kind kind = ATTN_DESCALE_TENSOR;
  int32_t block_keys = 64;
  attn_scale_source scale = ATTN_SCALE_ONE;
  int32_t saturate = 0;
  bool want_descale = true;
  bool odd_values = false;  // NaN, infinities, subnormals and huge values among the others
  float sigma = 1;
  uint64_t seed = 1;
};

float source_value(const QuantizeCase& c, uint64_t row, uint64_t d) {
  const uint64_t h = hash(c.seed, row, d);
  if (c.odd_values) {
    switch (h % 16) {
      case 0:
        return NAN;
      case 1:
        return infinity;
      case 2:
        return -infinity;
      case 3:
        return 3e38f;
      case 4:
        return -1e-42f;
      case 5:
        return -0.0f;
      case 6:
        return std::bit_cast<float>(uint32_t(h >> 20));
    }
  }
  return c.sigma * float(normal(h));
}

std::string run_quantize_case(const QuantizeCase& c, const Kernel& kernel, bool* ran) {
  Backend& backend = backend_of(kernel.backend);
  int64_t src_elements, dst_elements;
  const View src_view =
      arrange_view(c.src, c.arrange, c.batch, c.seqlen, c.heads, c.dim, &src_elements);
  const View dst_view =
      arrange_view(c.dst, c.arrange, c.batch, c.seqlen, c.heads, c.dim, &dst_elements);
  const int64_t blocks = (c.seqlen + c.block_keys - 1) / c.block_keys;
  const int64_t groups = c.kind == ATTN_DESCALE_HEAD    ? c.batch * c.heads
                         : c.kind == ATTN_DESCALE_BLOCK ? c.batch * c.heads * blocks
                                                        : 1;
  const auto group_of = [&](int64_t b, int64_t s, int64_t h) {
    if (c.kind == ATTN_DESCALE_HEAD) return b * c.heads + h;
    if (c.kind == ATTN_DESCALE_BLOCK) return (b * c.heads + h) * blocks + s / c.block_keys;
    return int64_t(0);
  };
  Buffer src(size_t(dtype_bytes(c.src, src_elements)), 0xff);
  std::vector<float> amax(size_t(groups), 0.0f);
  const auto each_row = [&](auto&& visit) {
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t s = 0; s < c.seqlen; ++s) {
        for (int64_t h = 0; h < c.heads; ++h) visit(b, s, h);
      }
    }
  };
  each_row([&](int64_t b, int64_t s, int64_t h) {
    for (int64_t d = 0; d < c.dim; ++d) {
      const uint64_t row = uint64_t((b * c.seqlen + s) * c.heads + h);
      encode_element(c.src, src.data(), src_view.at(b, s, h) + d, source_value(c, row, uint64_t(d)),
                     false);
      const double x = decode_element(c.src, src.data(), src_view.at(b, s, h) + d);
      float& group = amax[size_t(group_of(b, s, h))];
      if (std::isfinite(x)) group = std::max(group, float(std::abs(x)));
    }
  });
  std::vector<float> descale(size_t(groups), 1.0f);
  for (int64_t g = 0; g < groups; ++g) {
    if (c.scale == ATTN_SCALE_GIVEN) descale[g] = 0.25f + float(hash(c.seed, 5, g) % 1000) / 500;
    if (c.scale == ATTN_SCALE_AMAX && amax[g] != 0) {
      descale[g] = amax[g] / float(type_info(c.dst).max_finite *
                                   (c.dst == ATTN_NVFP4 ? 448 : 1));  // of a code times a scale
    }
  }
  Buffer given;
  if (c.want_descale || c.scale != ATTN_SCALE_ONE) {
    given = Buffer(size_t(groups) * 4, 0xff);
    if (c.scale == ATTN_SCALE_GIVEN) std::copy(descale.begin(), descale.end(), given.as<float>());
  }
  Buffer want(size_t(dtype_bytes(c.dst, dst_elements)), poison_of(c.dst));
  int64_t scale_elements;
  const TypeInfo& dst_type = type_info(c.dst);
  const View scale_view =
      arrange_view(scale_element(c.dst), c.arrange, c.batch, c.seqlen, c.heads,
                   std::max<int64_t>(1, scales_of_row(dst_type, c.dim)), &scale_elements);
  Buffer scale;
  if (dtype_has_scales(c.dst))
    scale = Buffer(size_t(dst_type.scale_bytes * scale_elements), poison_of(ATTN_F16));
  Buffer want_scale = scale;
  each_row([&](int64_t b, int64_t s, int64_t h) {
    std::vector<double> x(static_cast<size_t>(c.dim));
    decode_row(c.src, src.data(), src_view.at(b, s, h), c.dim, x.data());
    const std::vector<float> narrow(x.begin(), x.end());
    const int64_t at = dst_view.at(b, s, h);
    if (c.dst == ATTN_NVFP4 || c.dst == ATTN_F8_E4M3FN_TOKEN) {
      char* const scales = reinterpret_cast<char*>(want_scale.data()) +
                           scale_view.at(b, s, h) * dst_type.scale_bytes;
      double most = 0;
      for (const double value : x)
        if (std::isfinite(value)) most = std::max(most, std::abs(value));
      const float of_token = token_scale(most);
      if (c.dst == ATTN_F8_E4M3FN_TOKEN) std::memcpy(scales, &of_token, sizeof of_token);
      for (double& value : x) value /= double(descale[size_t(group_of(b, s, h))]);
      return encode_cache(c.dst, reinterpret_cast<char*>(want.data()) + dtype_bytes(c.dst, at),
                          scales, 0, c.dim, x.data());
    }
    if (dtype_has_scales(c.dst)) {
      double most = 0;
      bool nan = false;
      for (double value : x) most = std::max(most, std::abs(value)), nan |= std::isnan(value);
      uint16_t& code = want_scale.as<uint16_t>()[scale_view.at(b, s, h)];
      code = row_scale(c.dst, most, nan, c.saturate != 0);
      return encode_codes(c.dst, want.data(), at, c.dim, x.data(), code);
    }
    for (int64_t d = 0; d < c.dim; ++d) {
      if (dtype_is_ggml(c.dst)) {
        if (d % 32 != 0) continue;
        unsigned char* block = want.data() + dtype_bytes(c.dst, at + d);
        encode_block(c.dst, &narrow[size_t(d)], block, c.saturate != 0);
      } else {
        encode_element(c.dst, want.data(), at + d,
                       x[size_t(d)] / double(descale[size_t(group_of(b, s, h))]), c.saturate != 0);
      }
    }
  });

  attn_quantize_problem p{};
  p.struct_size = sizeof p;
  p.batch = c.batch;
  p.seqlen = c.seqlen;
  p.heads = c.heads;
  p.head_dim = c.dim;
  p.src_type = c.src;
  p.dst_type = c.dst;
  p.src_stride = src_view.given;
  p.dst_stride = dst_view.given;
  if (dtype_has_scales(c.dst)) p.scale_stride = scale_view.given;
  p.kind = c.kind;
  p.descale_block_keys = c.kind == ATTN_DESCALE_BLOCK ? c.block_keys : 0;
  p.scale = c.scale;
  p.saturate = c.saturate;
  p.kernel = kernel.name;
  attn_plan* made = nullptr;
  const attn_status status = attn_plan_create_quantize(backend.context, &p, &made);
  *ran = status != ATTN_UNSUPPORTED;
  if (status == ATTN_UNSUPPORTED) return "";
  if (status != ATTN_OK) return attn_last_error();
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
  Arena arena(backend.context);
  const Buffer dst(want.size(), poison_of(c.dst));
  attn_quantize_args args{};
  args.struct_size = sizeof args;
  void* const dst_data = arena.add(dst);
  args.src = address_of(arena.add(src), src_view);
  args.dst = address_of(dst_data, dst_view);
  args.descale = static_cast<float*>(arena.add(given));
  void* const scale_data = arena.add(scale);
  args.scale = address_of(scale_data, scale_view);
  const uint64_t launches = attn_launch_count(kernel.name);
  if (attn_run_quantize(plan.get(), &args, nullptr) != ATTN_OK) return attn_last_error();
  if (attn_synchronize(backend.context, nullptr) != ATTN_OK) return attn_last_error();
  if (attn_launch_count(kernel.name) <= launches) return "not launched";
  if (std::string error = arena.check_unchanged({dst_data, args.descale, scale_data});
      !error.empty())
    return error;

  const Buffer got_descale = arena.fetch(given, args.descale);
  if (given.given && groups > 0 &&
      std::memcmp(got_descale.data(), descale.data(), size_t(groups) * 4) != 0) {
    return "descale differs: " + std::to_string(got_descale.as<float>()[0]) + ", expected " +
           std::to_string(descale[0]) + " first";
  }
  if (scale_data && arena.fetch(scale, scale_data).bytes != want_scale.bytes)
    return "scales differ, or a guard of them was written";
  const Buffer got = arena.fetch(dst, dst_data);
  // NaN codes may carry any sign.
  std::string error;
  each_row([&](int64_t b, int64_t s, int64_t h) {
    for (int64_t d = 0; d < c.dim && error.empty(); ++d) {
      const int64_t at = dst_view.at(b, s, h) + d;
      const double x = decode_element(c.dst, got.data(), at),
                   y = decode_element(c.dst, want.data(), at);
      const bool equal =
          (std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y));
      if (!equal) {
        error = "element b " + std::to_string(b) + " s " + std::to_string(s) + " h " +
                std::to_string(h) + " d " + std::to_string(d) + " is " + std::to_string(x) +
                ", expected " + std::to_string(y);
      }
    }
  });
  if (!error.empty()) return error;
  for (size_t n = 0; n < got.bytes.size(); ++n) {
    if (want.bytes[n] == dst.bytes[n] && got.bytes[n] != dst.bytes[n] &&
        (n < Buffer::guard || n >= Buffer::guard + dst.size())) {
      return "a guard of dst was written";
    }
  }
  return "";
}

bool check_quantize(const QuantizeCase& c, const Kernel& kernel) {
  INFO(kernel.name << " " << dtype_name(c.src) << " -> " << dtype_name(c.dst) << " B" << c.batch
                   << " S" << c.seqlen << " H" << c.heads << " D" << c.dim << " kind " << c.kind
                   << " scale " << c.scale << " saturate " << c.saturate << " arrange "
                   << int(c.arrange) << " odd " << c.odd_values << " sigma " << c.sigma << " seed "
                   << c.seed);
  bool ran = false;
  CHECK(run_quantize_case(c, kernel, &ran) == "");
  if (kernel.host) CHECK(ran);
  return ran;
}

QuantizeCase random_quantize(uint64_t seed) {
  Draw draw{seed, 409};
  QuantizeCase c;
  c.seed = seed;
  constexpr attn_dtype from[] = {ATTN_F32, ATTN_F16, ATTN_BF16},
                       to[] = {ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ};
  c.src = draw.pick(from);
  c.dst = draw.pick(to);
  c.batch = 1 + draw(3);
  c.heads = 1 + draw(4);
  c.seqlen = draw(150);
  c.dim = draw.chance(3) ? 1 + draw(300) : 4 * (1 + draw(64));
  c.kind = attn_descale_kind(draw(4));
  c.block_keys = draw.chance(2) ? 64 : 128;
  constexpr attn_scale_source sources[] = {ATTN_SCALE_ONE, ATTN_SCALE_GIVEN, ATTN_SCALE_AMAX};
  c.scale = draw.pick(sources);
  c.saturate = int32_t(draw(2));
  c.odd_values = draw.chance(3);
  constexpr float sigmas[] = {1, 200, 1e-3f};
  c.sigma = draw.pick(sigmas);
  constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major,
                                  Arrange::reversed, Arrange::flipped};
  c.arrange = draw.pick(arranges);
  return c;
}

const AddRandomOperation added("quantize", [](uint64_t seed) {
  int ran = 0;
  for (const Kernel* kernel : emulated_kernels(Op::quantize))
    ran += check_quantize(random_quantize(seed), *kernel);
  return ran;
});

TEST_CASE("quantize: types, scales, layouts and values that do not fit") {
  for (const Kernel* kernel : kernels_here(Op::quantize, true)) {
    uint64_t number = 0;
    const auto check = [&](const QuantizeCase& c) {
      if (share(number++)) check_quantize(c, *kernel);
    };
    // tests/python/test_mla.py has the other formats of servers' caches.
    for (attn_dtype dst : list_of((kv_types & ~float_types & ~cache_types) |
                                  type_bit(ATTN_F8_E4M3FN_TOKEN) | type_bit(ATTN_NVFP4))) {
      for (attn_dtype src : list_of(float_types)) {
        for (int32_t saturate : {0, 1}) {
          for (bool odd : {false, true}) {
            QuantizeCase c;
            c.src = src;
            c.dst = dst;
            c.saturate = saturate;
            c.odd_values = odd;
            for (float sigma : {1.0f, 200.0f, 1e-3f}) {
              c.sigma = sigma;
              ++c.seed;
              check(c);
            }
            if (dtype_is_ggml(dst) || (dtype_has_scales(dst) && dst != ATTN_NVFP4)) continue;
            for (attn_scale_source scale : {ATTN_SCALE_GIVEN, ATTN_SCALE_AMAX}) {
              for (attn_descale_kind kind : {ATTN_DESCALE_NONE, ATTN_DESCALE_TENSOR,
                                             ATTN_DESCALE_HEAD, ATTN_DESCALE_BLOCK}) {
                if (dst == ATTN_NVFP4 && kind > ATTN_DESCALE_TENSOR) continue;
                c.scale = scale;
                c.kind = kind;
                ++c.seed;
                check(c);
              }
            }
          }
        }
      }
      for (int64_t dim : {32, 64, 160, 256}) {
        for (int64_t seqlen : {0, 1, 64, 129}) {
          for (Arrange arrange : {Arrange::contiguous, Arrange::padded, Arrange::head_major,
                                  Arrange::reversed, Arrange::flipped}) {
            QuantizeCase c;
            c.dst = dst;
            c.dim = dim;
            c.seqlen = seqlen;
            c.arrange = arrange;
            c.heads = 2;
            c.want_descale = dim != 64;
            check(c);
          }
        }
      }
    }
    // A descale is written where there is nothing to find it in.
    for (attn_descale_kind kind : {ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD, ATTN_DESCALE_BLOCK}) {
      QuantizeCase none;
      none.seqlen = 0;
      none.kind = kind;
      none.scale = ATTN_SCALE_AMAX;
      check(none);
    }
    QuantizeCase odd_dim;
    odd_dim.dim = 7;
    odd_dim.scale = ATTN_SCALE_AMAX;
    check(odd_dim);
    QuantizeCase zeros;
    zeros.sigma = 0;
    zeros.scale = ATTN_SCALE_AMAX;
    check(zeros);
    zeros.dst = ATTN_Q4_0;
    zeros.scale = ATTN_SCALE_ONE;
    check(zeros);
  }
}

}  // namespace
}  // namespace attn::test
