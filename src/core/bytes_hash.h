#pragma once
// A hash of memory, for comparisons within one run, and for names of files. No content of a file rests on the hash.

#include <cstddef>
#include <cstdint>

namespace snug::detail {

/// 64 bits, about as fast as memory is read. Two blocks that differ in exactly one word of 8 bytes always have
/// different hashes. Other differences go unnoticed in one case of 2^64.
uint64_t bytes_hash(const void* data, size_t count);

}  // namespace snug::detail
