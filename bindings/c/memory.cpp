#include "snug/memory.h"

#include <memory>
#include <string>

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include "bindings/c/errors.h"

struct snug_meter {
  snug::MemoryMeter meter{c10::Device(c10::kCPU)};
};

struct snug_limit {
  snug::MemoryLimit limit;
};

namespace {

using snug::c::guarded;
using snug::c::required;

}  // namespace

int64_t snug_live_bytes(void) { return snug::live_bytes(c10::Device(c10::kCPU)).count(); }

snug_status snug_meter_new(snug_meter** meter) {
  return guarded([&] { required(meter, "snug_meter_new: meter") = new snug_meter; });
}

snug_status snug_meter_read(const snug_meter* meter, int64_t* live_bytes, int64_t* peak_bytes) {
  return guarded([&] {
    int64_t& live = required(live_bytes, "snug_meter_read: live_bytes");
    int64_t& peak = required(peak_bytes, "snug_meter_read: peak_bytes");
    const snug::MemoryMeter::Report report = required(meter, "snug_meter_read: meter").meter.report();
    live = report.live_bytes;
    peak = report.peak_bytes;
  });
}

void snug_meter_free(snug_meter* meter) { delete meter; }

snug_status snug_limit_new(int64_t bytes, snug_limit** limit) {
  return guarded([&] {
    required(limit, "snug_limit_new: limit") =
        new snug_limit{snug::MemoryLimit(c10::Device(c10::kCPU), snug::Bytes(bytes))};
  });
}

void snug_limit_free(snug_limit* limit) { delete limit; }

snug_status snug_manual_seed(uint64_t seed) {
  return guarded([&] { at::manual_seed(seed); });
}

snug_status snug_set_threads(int count) {
  return guarded([&] {
    if (count < 1) {
      throw snug::ConfigError("snug_set_threads: " + std::to_string(count) + " threads; give at least 1");
    }
    at::set_num_threads(count);
  });
}
