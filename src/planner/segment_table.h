#pragma once
// The fastest plan of segments for every number of bytes at once, by dynamic programming. Internal to planner.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "src/planner/segments.h"

namespace snug::plan {

/// The table is made by the constructor. segment_table.cpp has the recurrence.
class SegmentTable {
 public:
  /// A table for budgets up to `most_bytes`. Keeps a reference.
  SegmentTable(const Segments& segments, int64_t most_bytes);

  /// A plan for each number of bytes at which the estimated time falls. Bytes ascend.
  std::vector<Stays> plans() const;

  /// The plan with the shortest estimated time within so many bytes; empty if no plan fits.
  std::optional<Stays> within(int64_t bytes) const;

 private:
  static constexpr int kSlots = 512;  // parts of the most bytes; estimates are not more precise

  /// Which storages of earlier segments are in memory: saved storages, or all that are read.
  enum class Inputs : int8_t { Saved, All };
  enum class Action : int8_t { None, Save, Cut, BuyInputs };
  struct Choice {
    Action action = Action::None;
    Inputs rest = Inputs::All;  // for the segments after the first, or after the cut
    int16_t number = 0;         // of the option; or of the segment after the cut
  };
  struct Cell {
    float* seconds = nullptr;    // [slots], from first_possible on; never rise; infinite if the slots are not enough
    uint32_t* choice = nullptr;  // the bits of a Choice; the same index
    int first_possible = kSlots;
  };
  struct Taken {  // bytes that an option takes, by the last segment that reads
    std::vector<int64_t> all;
    std::vector<int64_t> saved;  // if the later segments have saved inputs only
  };
  struct Crossing {
    int64_t all = 0;
    int64_t unsaved = 0;  // of storages that are not saved
  };

  int slots(int64_t bytes, int number) const;
  Cell& cell(Inputs inputs, int first, int last) { return cells_[static_cast<size_t>(inputs)][pair(first, last)]; }
  const Cell& cell(Inputs inputs, int first, int last) const {
    return cells_[static_cast<size_t>(inputs)][pair(first, last)];
  }
  static size_t pair(int first, int last) { return static_cast<size_t>(last * (last + 1) / 2 + first); }
  size_t place(int first, int cut, int last) const {
    return pair(first, last) * static_cast<size_t>(count_ + 1) + static_cast<size_t>(cut);
  }
  int64_t crossing(Inputs inputs, int first, int cut, int last) const;
  int64_t unsaved_inputs(int first, int last) const;
  template <class Way>
  int64_t forward_peak(const Way& way, int last) const;
  void find_crossing();
  void sum_up(int cut);
  void find_taken();
  int64_t taken(int segment, int option, Inputs rest, int last) const;
  template <class Visit>
  void visit_crossing(int first, int cut, int last, const Visit& visit) const;
  void solve(int first, int last);
  void save(Inputs inputs, int first, int last);
  void cut(int first, int last);
  static void relax(Cell& cell, int least, double seconds, int shift, const Cell* rest, const Cell* again,
                    Choice choice);
  Stays plan_of(int slots) const;
  void write(Inputs inputs, int first, int last, int slots_left, Stay from, Stays& plan) const;

  const Segments& segments_;
  const int count_;
  int64_t unit_;                           // bytes of a slot
  std::vector<Crossing> crossing_;         // [place]
  std::vector<std::vector<Taken>> taken_;  // [segment][option]
  std::unique_ptr<float[]> seconds_;       // of all cells
  std::unique_ptr<uint32_t[]> choices_;    // of all cells
  std::vector<Cell> cells_[2] = {};        // [inputs][pair]
};

}  // namespace snug::plan
