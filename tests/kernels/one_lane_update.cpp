#include "tests/kernels/one_lane_update.h"

#include "src/kernels/update_chunk.h"

namespace snug::kernels {
namespace {

template <UpdateKind kKind>
void update_all(const UpdateTable& table) {
  for (uint32_t number = 0; number < table.chunks(); ++number) {
    const auto chunk = N_ONE_LANE::chunk_of(table, number);
    const AdamWConstants constants = N_ONE_LANE::constants_for(table, *chunk.tensor);
    for (int64_t i = chunk.begin; i < chunk.end; ++i) {
      N_ONE_LANE::update_element<kKind>(table, *chunk.tensor, constants, i);
    }
  }
}

}  // namespace

void update_by_one_lane(const UpdateTable& table) {
  if (N_ONE_LANE::is_skipped(table)) {
    return;
  }
  switch (table.kind) {
    case UpdateKind::kFloat32:
      return update_all<UpdateKind::kFloat32>(table);
    case UpdateKind::kFloat16Masters:
      return update_all<UpdateKind::kFloat16Masters>(table);
    case UpdateKind::kBFloat16Masters:
      return update_all<UpdateKind::kBFloat16Masters>(table);
    case UpdateKind::kStochastic:
      return update_all<UpdateKind::kStochastic>(table);
  }
}

double power_by_one_lane(double base, uint32_t exponent) { return N_ONE_LANE::power(base, exponent); }

}  // namespace snug::kernels
