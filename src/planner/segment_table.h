#pragma once
// The fastest way through segments for every number of bytes at once, by dynamic programming. Internal to planner.

#include <cstdint>
#include <optional>
#include <vector>

#include "src/planner/segments.h"

namespace snug::detail {

class SegmentTable {
 public:
  /// For budgets up to `most_bytes`. Keeps a reference.
  SegmentTable(const Segments& segments, int64_t most_bytes);

  /// One plan for each number of bytes at which the estimated time falls; bytes ascend.
  std::vector<plan::Stays> plans() const;

  /// The fastest by its estimates within so many bytes, if there is one.
  std::optional<plan::Stays> within(int64_t bytes) const;

 private:
  static constexpr int kSlots = 512;  // of the most bytes; estimates are no better than that

  /// What segments find that earlier ones made.
  enum class Inputs : int8_t { Saved, All };
  enum class Action : int8_t { None, Save, Cut, BuyInputs };
  struct Choice {
    Action action = Action::None;
    Inputs rest = Inputs::All;  // for the segments after the first, or after the cut
    int16_t number = 0;         // of the option; or the segment before which the cut is
  };
  struct Cell {
    std::vector<float> seconds;  // [slots]; infinite where they do not do
    std::vector<Choice> choice;
    int first_possible = kSlots;
  };
  struct Taken {  // by the last segment that counts
    std::vector<int64_t> all;
    std::vector<int64_t> saved;  // with saved inputs only for the rest
  };
  struct Crossing {
    std::vector<int64_t> all;      // [first * count + last]
    std::vector<int64_t> unsaved;  // likewise, of those
  };

  int slots(int64_t bytes, int number) const;
  Cell& cell(Inputs inputs, int first, int last) { return cells_[static_cast<size_t>(inputs)][place(first, last)]; }
  const Cell& cell(Inputs inputs, int first, int last) const {
    return cells_[static_cast<size_t>(inputs)][place(first, last)];
  }
  size_t place(int first, int last) const { return static_cast<size_t>(first * count_ + last); }
  int64_t crossing(Inputs inputs, int first, int cut, int last) const;
  int64_t unsaved_inputs(int first, int last) const;
  template <class Way>
  int64_t forward_peak(const Way& way, int last) const;
  void find_crossing();
  void sum_up(std::vector<int64_t>& bytes, int cut) const;
  void find_taken();
  int64_t taken(int segment, int option, Inputs rest, int last) const;
  template <class Visit>
  void visit_crossing(int first, int cut, int last, const Visit& visit) const;
  void solve(int first, int last);
  void save(Inputs inputs, int first, int last);
  void cut(int first, int last);
  static void relax(Cell& cell, int least, double seconds, int shift, const Cell* rest, const Cell* again,
                    Choice choice);
  plan::Stays plan_of(int slots) const;
  void write(Inputs inputs, int first, int last, int slots_left, plan::Stay from, plan::Stays& plan) const;

  const Segments& segments_;
  const int count_;
  int64_t unit_;                           // bytes of a slot
  std::vector<Crossing> crossing_;         // [cut]
  std::vector<std::vector<Taken>> taken_;  // [segment][option]
  std::vector<Cell> cells_[2] = {};        // [inputs][first * count + last]
};

}  // namespace snug::detail
