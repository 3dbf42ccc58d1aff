#pragma once
// Sampler: the order in which a data set is visited. Every index comes once per epoch. The order depends only on the
// seed and the epoch, and is the same on every platform. The memory needed does not grow with the data set.
//
//   snug::Sampler sampler(corpus.size(), /*seed=*/7);
//   std::vector<int64_t> indices = sampler.next(64);        // runs over the end of the epoch into the next one
//   ... save sampler.epoch() and sampler.position(); later, with the same size and seed:
//   sampler.seek(epoch, position);                          // goes on with exactly the indices that were next

#include <array>
#include <cstdint>
#include <vector>

namespace snug {

class Sampler {
 public:
  /// Visits the indices 0 ... size - 1. Throws ConfigError if size is below 1.
  Sampler(int64_t size, uint64_t seed);

  /// The next `count` indices. Throws ConfigError if count is negative.
  std::vector<int64_t> next(int64_t count);

  /// The share of rank `rank` out of `ranks` in the next `count` indices: a run of indices, as long as the other ranks'
  /// shares or one longer. If all ranks call next(), each index comes exactly once. Throws ConfigError unless 0 <= rank
  /// < ranks.
  std::vector<int64_t> next(int64_t count, int64_t rank, int64_t ranks);

  /// The arguments of the constructor.
  int64_t size() const { return size_; }
  uint64_t seed() const { return seed_; }

  /// The epoch of the next index, from 0.
  int64_t epoch() const { return epoch_; }

  /// The number of indices of this epoch that were drawn, in [0, size). After the last index, the position is 0 in the
  /// next epoch.
  int64_t position() const { return position_; }

  /// Continues from the given epoch and position. Throws ConfigError if epoch is negative or position is not in [0,
  /// size).
  void seek(int64_t epoch, int64_t position);

 private:
  static constexpr int kRounds = 128;

  void start_epoch(int64_t epoch);
  int64_t permuted(int64_t index) const;

  struct Round {
    uint64_t pivot;  ///< index and pivot - index (modulo size) are partners in this round
    uint64_t key;    ///< decides, pair by pair, which partners swap
  };

  int64_t size_;
  uint64_t seed_;
  int64_t epoch_ = 0;
  int64_t position_ = 0;
  std::array<Round, kRounds> rounds_{};
};

}  // namespace snug
