#include "src/planner/faster_choices.h"

// Compiles the code below once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/planner/faster_choices.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace snug::plan::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Additions are in the same order for every number of lanes, so each instruction set gives the same plans.
void take_faster(float* HWY_RESTRICT best, uint32_t* HWY_RESTRICT choices, const float* HWY_RESTRICT rest,
                 const float* HWY_RESTRICT again, float own, uint32_t choice, float least_sum, int slots) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<uint32_t> dc;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto owns = hn::Set(d, own);
  const auto taken = hn::Set(dc, choice);
  int i = 0;
  for (; i + lanes <= slots && best[i] > least_sum; i += lanes) {
    const auto sum = hn::Add(hn::Add(owns, hn::LoadU(d, rest + i)), hn::LoadU(d, again + i));
    const auto present = hn::LoadU(d, best + i);
    const auto is_better = hn::Lt(sum, present);
    hn::StoreU(hn::IfThenElse(is_better, sum, present), d, best + i);
    hn::StoreU(hn::IfThenElse(hn::RebindMask(dc, is_better), taken, hn::LoadU(dc, choices + i)), dc, choices + i);
  }
  for (; i < slots && best[i] > least_sum; ++i) {
    const float sum = own + rest[i] + again[i];
    choices[i] = sum < best[i] ? choice : choices[i];
    best[i] = sum < best[i] ? sum : best[i];
  }
}

}  // namespace
}  // namespace snug::plan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::plan {

HWY_EXPORT(take_faster);

void take_faster(float* best, uint32_t* choices, const float* rest, const float* again, float own, uint32_t choice,
                 float least_sum, int slots) {
  HWY_DYNAMIC_DISPATCH(take_faster)(best, choices, rest, again, own, choice, least_sum, slots);
}

}  // namespace snug::plan
#endif
