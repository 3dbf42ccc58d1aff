// One epoch of the network of snug compare sin-cos, 20,000 points, through a Stepper: in FP32 and BF16, on a CPU with
// the micro-batch that is fastest there; and in FP16 with loss scaling and the whole batch, as in the article. See
// script/bench; benchmarks/peers/sin_cos.py does the same work in FP32 and BF16.
//
// usage: sin_cos [--device DEVICE]

#include <cstdio>
#include <functional>

#include "benchmarks/device.h"
#include "benchmarks/serve.h"
#include "program/measure/measure.h"
#include "program/measure/two_tasks.h"

namespace {

using namespace snug::measure;

snug::benchmarks::Prepare epochs(snug::Precision precision, c10::Device device) {
  return [=]() -> std::function<void()> {
    const TwoTasksData data = two_tasks_data(20000, device);
    const bool searches = precision != snug::Precision::Float16 && device.is_cpu();
    const int64_t micro_batch = searches ? fastest_micro_batch(data, kTwoTasksWidth, precision) : data.x.size(0);
    const Way way = stepper_loop("snug", data, kTwoTasksWidth, precision, micro_batch);
    std::fprintf(stderr, "sin_cos: micro-batches of %d\n", static_cast<int>(micro_batch));
    return [way, done = 0]() mutable {
      const bool tells = ++done % 250 == 0;
      const double loss = way.epoch(tells);
      if (tells) {
        std::fprintf(stderr, "sin_cos: loss %.5f after %d epochs\n", loss, done);
      }
    };
  };
}

}  // namespace

int main(int argc, char** argv) {
  const c10::Device device = snug::benchmarks::take_device(argc, argv);
  return snug::benchmarks::serve({{"float32", epochs(snug::Precision::Float32, device)},
                                  {"bfloat16", epochs(snug::Precision::BFloat16, device)},
                                  {"float16", epochs(snug::Precision::Float16, device)}},
                                 [device] { wait_for(device); });
}
