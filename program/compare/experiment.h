#pragma once
// The parts of `snug compare`: experiments. Each experiment runs and returns a section of the page.

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "program/compare/comparison_page.h"

namespace snug::cli {

struct CompareFlags {
  bool quick = false;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::string digits = "build/data/digits";
  std::string results = {};  ///< results of benchmarks/run.py; empty: python has nothing to draw
  int64_t pairs = 0;         ///< turns of two compared programs; 0: the experiment's own number
  int64_t epochs = 0;        ///< of sin-cos; 0: 1,000, or 200 if quick
  int64_t points = 0;        ///< of sin-cos; 0: 20,000

  int64_t turns(int64_t usual) const { return pairs > 0 ? pairs : quick ? 3 : usual; }
};

/// Each experiment prints messages while the experiment runs.
Section compare_sin_cos(const CompareFlags& flags);
Section compare_precision(const CompareFlags& flags);
Section compare_checkpointing(const CompareFlags& flags);
Section compare_accumulation(const CompareFlags& flags);
Section compare_data_parallel(const CompareFlags& flags);
/// The work of the two ranks that the accumulation experiment starts: measures, and prints a line for each result (see
/// ranks.h).
void measure_accumulation_rank(const CompareFlags& flags);
void measure_data_parallel_rank(const CompareFlags& flags);
Section compare_fit(const CompareFlags& flags);
Section compare_python(const CompareFlags& flags);

}  // namespace snug::cli
