// What the C handles hold.
#pragma once
#include "plan/plan.h"

struct attn_context {
  std::shared_ptr<attn::Context> context;
};
struct attn_plan {
  std::unique_ptr<attn::Plan> plan;
};
