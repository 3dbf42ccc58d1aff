#pragma once
// The zoo: models of many kinds, for questions about "any graph". A plain step of each takes 50 to 500 ms of one core.

#include "benchmarks/zoo/captioning.h"
#include "benchmarks/zoo/entry.h"
#include "benchmarks/zoo/gpt2.h"

namespace snug::zoo {

inline std::vector<Species> zoo() {
  return {
      {"gpt2", [] { return make_gpt2(); }},
      {"captioning", make_captioning},
  };
}

}  // namespace snug::zoo
