// One epoch of the small network of snug compare sin-cos, 20,000 points, in FP32, through a Stepper with the micro-batch that is fastest
// here. See script/bench; benchmarks/peers/sin_cos.py does the same work.

#include <cstdio>
#include <functional>

#include "benchmarks/serve.h"
#include "cli/compare/two_tasks.h"

int main() {
  using namespace snug::cli;
  return snug::benchmarks::serve(
      {{"float32", []() -> std::function<void()> {
          const TwoTasksData data = two_tasks_data(20000);
          const int64_t micro_batch = fastest_micro_batch(data, kTwoTasksWidth, snug::Precision::Float32);
          std::fprintf(stderr, "sin_cos: micro-batches of %d\n", static_cast<int>(micro_batch));
          const Way way = stepper_loop("snug", data, kTwoTasksWidth, snug::Precision::Float32, micro_batch);
          return [way] { way.epoch(false); };
        }}});
}
