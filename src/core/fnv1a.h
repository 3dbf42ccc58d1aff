#pragma once
// FNV-1a (Fowler, Noll, Vo), a hash that unlike std::hash is the same everywhere.

#include <cstdint>
#include <string_view>

namespace snug::detail {

/// `hash`: the hash of the preceding text, to continue from.
constexpr uint32_t fnv1a(std::string_view text, uint32_t hash = 2166136261U) {
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  }
  return hash;
}

}  // namespace snug::detail
