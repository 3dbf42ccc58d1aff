// The entry points of libFuzzer: SNUG_FUZZ_TARGET names the target.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "snug/core.h"
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  static const char* const name = std::getenv("SNUG_FUZZ_TARGET");
  static const snug::fuzz::Target target = snug::fuzz::targets().at(name ? name : "");
  try {
    target({reinterpret_cast<const char*>(bytes), size});
  } catch (const snug::Error&) {  // refused
  }
  return 0;
}
