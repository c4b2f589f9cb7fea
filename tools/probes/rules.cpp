#include "probes/rules.h"

#include <string_view>

#include "gfx9emu/hazards.h"
#include "gfx9emu/mfma.h"
#include "gfx9emu/model.h"
#include "gfx9emu/ops.h"

namespace attn::probes {
namespace {

using tools::Json;

const char* type_name(gfx9emu::MfmaType type) {
  switch (type) {
    using enum gfx9emu::MfmaType;
    case F32:
      return "f32";
    case Xf32:
      return "xf32";
    case F16:
      return "f16";
    case Bf16:
      return "bf16";
    case Fp8:
      return "fp8";
    case Bf8:
      return "bf8";
    case E4m3:
      return "e4m3";
    case I8:
      return "i8";
    case F64:
      return "f64";
  }
  return "";
}

const char* type_name(gfx9emu::Type type) {
  switch (type) {
    using enum gfx9emu::Type;
    case F16:
    case PkF16:
      return "f16";
    case F32:
    case PkF32:
    case Mix:
      return "f32";
    case F64:
      return "f64";
    case Fp8:
      return "fp8";
    default:
      return "";
  }
}

const char* severity_name(gfx9emu::Severity severity) {
  return severity == gfx9emu::Severity::Fault     ? "fault"
         : severity == gfx9emu::Severity::Warning ? "warning"
                                                  : "nothing";
}

}  // namespace

Json emulator_rules() {
  Json rules;
  Json& operations = rules["operations"] = Json::array();
  for (const auto& ops : {gfx9emu::salu_ops(), gfx9emu::valu_ops(), gfx9emu::cross_lane_ops(),
                          gfx9emu::mfma_ops(), gfx9emu::lds_ops(), gfx9emu::memory_ops()}) {
    for (const gfx9emu::Op& op : ops) {
      if (gfx9emu::gfx950_alone(op)) continue;
      Json sources = Json::array();
      for (const gfx9emu::Type type : op.types.src) sources.push_back(type_name(type));
      operations.push_back({{"name", op.name},
                            {"result", type_name(op.types.dst)},
                            {"sources", sources},
                            {"class", gfx9emu::class_name(op.cls)},
                            {"destinations", op.dsts},
                            {"bytes", op.bytes},
                            {"load", op.load},
                            {"store", op.store},
                            {"atomic", op.atomic != gfx9emu::Atomic::None}});
    }
  }
  Json& hazards = rules["hazards"] = Json::array();
  for (const gfx9emu::HazardRule& rule : gfx9emu::hazard_rules()) {
    if (rule.gfx950_alone) continue;
    hazards.push_back({{"text", rule.text},
                       {"strict", severity_name(rule.strict)},
                       {"isa", severity_name(rule.isa)}});
  }
  Json& mfma = rules["mfma"] = Json::array();
  for (const gfx9emu::MfmaShape& s : gfx9emu::mfma_shapes()) {
    mfma.push_back({{"name", s.name},
                    {"a", type_name(s.a)},
                    {"b", type_name(s.b)},
                    {"m", s.m},
                    {"n", s.n},
                    {"k", s.k},
                    {"blocks", s.blocks},
                    {"passes", s.passes},
                    {"a_regs", s.a_regs},
                    {"d_regs", s.d_regs}});
  }
  const gfx9emu::ModelSettings settings;
  for (const gfx9emu::ModelConstant& c : gfx9emu::model_constants())
    rules["constants"][c.name] = settings.*c.setting;
  rules["constants"]["overlap"] = settings.overlap;
  return rules;
}

}  // namespace attn::probes
