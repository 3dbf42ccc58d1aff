#pragma once
// What is fuzzed: each target reads bytes of unknown origin as the program does. A target may refuse them by
// snug::Error; anything else (another exception, a sanitizer's report, a wrong result) is a finding.

#include <map>
#include <string_view>

namespace snug::fuzz {

using Target = void (*)(std::string_view bytes);

/// By name, which is also the name of its folder in tests/fuzz/corpus.
const std::map<std::string_view, Target>& targets();

}  // namespace snug::fuzz
