#pragma once
// A hash of memory, for comparisons within one run: it is kept in no file.

#include <cstddef>
#include <cstdint>

namespace snug::detail {

/// 64 bits, about as fast as memory is read. Two blocks that differ in one word of 8 bytes have different hashes for certain, others but for
/// one case in 2^64.
uint64_t bytes_hash(const void* data, size_t count);

}  // namespace snug::detail
