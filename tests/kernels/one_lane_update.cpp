#include "tests/kernels/one_lane_update.h"

#include "src/kernels/update_chunk.h"

namespace snug::kernels {

void update_by_one_lane(const UpdateTable& table) {
  if (N_ONE_LANE::is_skipped(table)) {
    return;
  }
  N_ONE_LANE::with_kind(table.kind, [&](auto kind) {
    for (uint32_t number = 0; number < table.chunks(); ++number) {
      const auto chunk = N_ONE_LANE::chunk_of(table, number);
      const AdamWConstants constants = N_ONE_LANE::constants_for(table, *chunk.tensor);
      for (int64_t i = chunk.begin; i < chunk.end; ++i) {
        N_ONE_LANE::update_element<decltype(kind)::value>(table, *chunk.tensor, constants, i);
      }
    }
  });
}

double power_by_one_lane(double base, uint32_t exponent) { return N_ONE_LANE::power(base, exponent); }

}  // namespace snug::kernels
