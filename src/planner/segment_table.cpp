#include "src/planner/segment_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <limits>
#include <numeric>

#include "src/planner/at.h"
#include "src/planner/faster_choices.h"

// Rotor's recurrence (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous
// chains", RR-9302) with several options a block as in Rockmate (Zhao et al., ICML 2023), for graphs: a cut costs all
// tensors that cross the cut, not a single tensor. V(s, t) is the least time that segments s..t take beyond a plain
// step, as a function of m, the bytes that are left beside the storages that earlier segments keep.
//
//   save with option o: V(s, t)(m) = seconds_o + V(s+1, t)(m - kept_o)
//                       if m >= forward peak of o, and m >= backward peak of s
//   cut before j:       V(s, t)(m) = seconds(s..j-1) + V(j, t)(m - crossing(s, j, t)) + V(s, j-1)(m)
//                       if m >= forward peak of s..j-1
//
// crossing(s, j, t): bytes that segments s..j-1 make and segments j..t read. Storages of segments before s are kept by
// those segments. So a tensor that crosses many cuts (a skip connection, a mask, a list of outputs) is paid for once.
//
// The backward pass does not ask for every tensor that crosses a cut. The unsaved tensors are needed only if an
// operator after the cut runs again. So V is computed twice: with all inputs, and with saved inputs only. V with saved
// inputs has the options that do not need unsaved inputs; or buys the unsaved inputs:
//
//   V_saved(s, t)(m) = V_all(s, t)(m - unsaved bytes that cross s)
//
// Plans are optimal, up to slots and estimates, among plans that keep stored tensors until their backward. The
// simulator judges the plans.

namespace snug::plan {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool is_read(const std::vector<int>& consumers, int first, int last) {
  const auto next = std::lower_bound(consumers.begin(), consumers.end(), first);
  return next != consumers.end() && *next <= last;
}

}  // namespace

SegmentTable::SegmentTable(const Segments& segments, int64_t most_bytes)
    : segments_(segments), count_(segments.count()), unit_(std::max<int64_t>(1, most_bytes / (kSlots - 1))) {
  const size_t pairs = pair(0, count_);
  seconds_ = std::make_unique_for_overwrite<float[]>(2 * pairs * kSlots);
  choices_ = std::make_unique_for_overwrite<uint32_t[]>(2 * pairs * kSlots);
  size_t used = 0;
  for (std::vector<Cell>& cells : cells_) {
    cells.resize(pairs);
    for (Cell& cell : cells) {
      cell.seconds = &seconds_[used];
      cell.choice = &choices_[used];
      used += kSlots;
    }
  }
  find_crossing();
  find_taken();
  for (int last = 0; last < count_; ++last) {
    for (int first = last; first >= 0; --first) {
      solve(first, last);
    }
  }
}

// The number of slots for so many bytes; kSlots: too many. Different values of `number` round up or down differently,
// so that a sum of many small numbers of bytes is about right.
int SegmentTable::slots(int64_t bytes, int number) const {
  constexpr uint32_t kGolden = 2654435769;  // 2 to the 32, divided by the golden ratio: multiples are spread evenly
  const uint32_t share = static_cast<uint32_t>(number + 1) * kGolden;
  const int64_t slots = (bytes + static_cast<int64_t>(static_cast<double>(unit_) * share / 0x1p32)) / unit_;
  return static_cast<int>(std::min<int64_t>(slots, kSlots));
}

int64_t SegmentTable::crossing(Inputs inputs, int first, int cut, int last) const {
  const Crossing& bytes = crossing_[place(first, cut, last)];
  return bytes.all - (inputs == Inputs::All ? 0 : bytes.unsaved);
}

int64_t SegmentTable::unsaved_inputs(int first, int last) const {
  return first == 0 ? 0 : crossing_[place(0, first, last)].unsaved;
}

void SegmentTable::find_crossing() {
  crossing_.resize(place(0, 0, count_));
  for (int cut = 0; cut < count_; ++cut) {
    for (int maker = 0; maker < cut; ++maker) {
      for (const int s : segments_.list[at(maker)].made) {
        const std::vector<int>& consumers = segments_.consumers[at(s)];
        const auto next = std::lower_bound(consumers.begin(), consumers.end(), cut);
        if (next != consumers.end()) {
          Crossing& bytes = crossing_[place(maker, cut, *next)];
          bytes.all += segments_.bytes(s);
          bytes.unsaved += segments_.saved[at(s)] ? 0 : segments_.bytes(s);
        }
      }
    }
    sum_up(cut);
  }
}

// Before: bytes by maker and next reader. After: bytes of all makers from the given maker to the cut that are read by
// any reader from the cut to the given reader.
void SegmentTable::sum_up(int cut) {
  for (int maker = cut - 1; maker >= 0; --maker) {
    Crossing of_this;
    for (int last = cut; last < count_; ++last) {
      Crossing& bytes = crossing_[place(maker, cut, last)];
      const Crossing later = maker + 1 < cut ? crossing_[place(maker + 1, cut, last)] : Crossing{};
      of_this = {of_this.all + bytes.all, of_this.unsaved + bytes.unsaved};
      bytes = {of_this.all + later.all, of_this.unsaved + later.unsaved};
    }
  }
}

template <class Visit>
void SegmentTable::visit_crossing(int first, int cut, int last, const Visit& visit) const {
  for (int k = first; k < cut; ++k) {
    for (const int s : segments_.list[at(k)].made) {
      if (is_read(segments_.consumers[at(s)], cut, last)) {
        visit(s);
      }
    }
  }
}

// Peak while a segment runs forward, for the first time or again when the backward pass comes to `last`.
template <class Way>
int64_t SegmentTable::forward_peak(const Way& way, int last) const {
  return last + 1 == count_ ? way.first_peak : segments_.list[at(last)].backward_base + way.again_peak;
}

// For each option: the bytes of the storages that the option keeps, and of all other storages that cross to later
// segments, by the first segment that reads the storage.
void SegmentTable::find_taken() {
  taken_.resize(at(count_));
  for (int k = 0; k < count_; ++k) {
    for (const SegmentOption& option : segments_.list[at(k)].options) {
      Taken taken{.all = std::vector<int64_t>(at(count_), 0), .saved = std::vector<int64_t>(at(count_), 0)};
      int64_t kept = 0;
      for (const int s : option.kept) {
        kept += segments_.bytes(s);
      }
      std::vector<int> others;
      std::set_difference(segments_.list[at(k)].made.begin(), segments_.list[at(k)].made.end(), option.kept.begin(),
                          option.kept.end(), std::back_inserter(others));
      for (const int s : others) {
        const std::vector<int>& consumers = segments_.consumers[at(s)];
        const auto next = std::upper_bound(consumers.begin(), consumers.end(), k);
        if (next != consumers.end()) {
          taken.all[at(*next)] += segments_.bytes(s);
          taken.saved[at(*next)] += segments_.saved[at(s)] ? segments_.bytes(s) : 0;
        }
      }
      for (std::vector<int64_t>* bytes : {&taken.all, &taken.saved}) {
        (*bytes)[0] += kept;
        std::partial_sum(bytes->begin(), bytes->end(), bytes->begin());
      }
      taken_[at(k)].push_back(std::move(taken));
    }
  }
}

int64_t SegmentTable::taken(int segment, int option, Inputs rest, int last) const {
  const Taken& bytes = taken_[at(segment)][at(option)];
  return (rest == Inputs::All ? bytes.all : bytes.saved)[at(last)];
}

void SegmentTable::solve(int first, int last) {
  save(Inputs::All, first, last);
  save(Inputs::Saved, first, last);
  cut(first, last);
  relax(cell(Inputs::Saved, first, last), 0, 0, slots(unsaved_inputs(first, last), first),
        &cell(Inputs::All, first, last), nullptr, {Action::BuyInputs});
}

void SegmentTable::save(Inputs inputs, int first, int last) {
  const Segment& segment = segments_.list[at(first)];
  for (size_t o = 0; o < segment.options.size(); ++o) {
    const SegmentOption& option = segment.options[o];
    if (inputs == Inputs::Saved && option.needs_unsaved_inputs) {
      continue;
    }
    const int64_t inputs_for_now = inputs == Inputs::All ? 0 : unsaved_inputs(first, last);
    int64_t least = std::max(inputs_for_now + forward_peak(option, last), segment.backward_peak);
    if (!option.dropped.empty()) {
      least = std::max(least, segment.backward_base + segment.options.front().again_peak);
    }
    const auto number = static_cast<int16_t>(o);
    if (first == last) {
      relax(cell(inputs, first, last), slots(least, 0), option.seconds, 0, nullptr, nullptr,
            {Action::Save, Inputs::Saved, number});
      continue;
    }
    for (const Inputs rest : {Inputs::Saved, Inputs::All}) {
      if (inputs == Inputs::All || rest == Inputs::Saved) {
        relax(cell(inputs, first, last), slots(least, 0), option.seconds,
              slots(taken(first, number, rest, last), first), &cell(rest, first + 1, last), nullptr,
              {Action::Save, rest, number});
      }
    }
  }
}

void SegmentTable::cut(int first, int last) {
  double seconds = 0;
  int64_t least = 0;
  for (int j = first + 1; j <= last; ++j) {
    const int64_t carried = j - 1 > first ? crossing(Inputs::All, first, j - 1, last) : 0;
    least = std::max(least, carried + forward_peak(segments_.list[at(j - 1)], last));
    seconds += segments_.list[at(j - 1)].seconds;
    for (const Inputs rest : {Inputs::Saved, Inputs::All}) {
      relax(cell(Inputs::All, first, last), slots(least, 0), seconds, slots(crossing(rest, first, j, last), j),
            &cell(rest, j, last), &cell(Inputs::All, first, j - 1), {Action::Cut, rest, static_cast<int16_t>(j)});
    }
  }
}

// Seconds never rise with the number of slots. So only slots with more than the row's last and least sum can become
// faster, and they are the first slots of the row.
void SegmentTable::relax(Cell& cell, int least, double seconds, int shift, const Cell* rest, const Cell* again,
                         Choice choice) {
  static std::array<float, kSlots> nothing{};
  static const Cell kNothing{.seconds = nothing.data(), .first_possible = 0};
  rest = rest == nullptr ? &kNothing : rest;
  again = again == nullptr ? &kNothing : again;
  const int begin = std::max({least, shift + rest->first_possible, again->first_possible});
  const int count = kSlots - begin;
  if (count <= 0) {
    return;
  }
  const auto own = static_cast<float>(seconds);
  const float* const of_rest = rest->seconds + (begin - shift);
  const float* const of_again = again->seconds + begin;
  float* const best = cell.seconds + begin;
  if (begin < cell.first_possible) {
    std::fill(best, cell.seconds + cell.first_possible, kInfinity);
    std::fill(cell.choice + begin, cell.choice + cell.first_possible, std::bit_cast<uint32_t>(Choice{}));
    cell.first_possible = begin;
  }
  const float least_sum = own + of_rest[count - 1] + of_again[count - 1];
  if (least_sum >= best[0]) {
    return;
  }
  take_faster(best, cell.choice + begin, of_rest, of_again, own, std::bit_cast<uint32_t>(choice), least_sum, count);
}

std::vector<Stays> SegmentTable::plans() const {
  std::vector<Stays> result;
  if (count_ == 0) {
    return result;
  }
  const Cell& all = cell(Inputs::All, 0, count_ - 1);
  const float* const seconds = all.seconds;
  float before = kInfinity;
  for (int m = all.first_possible; m < kSlots; ++m) {
    if (seconds[m] < before) {
      before = seconds[m];
      result.push_back(plan_of(m));
    }
  }
  return result;
}

std::optional<Stays> SegmentTable::within(int64_t bytes) const {
  if (count_ == 0 || bytes < 0) {
    return std::nullopt;
  }
  const int m = static_cast<int>(std::min<int64_t>(bytes / unit_, kSlots - 1));
  const Cell& all = cell(Inputs::All, 0, count_ - 1);
  const bool is_possible = m >= all.first_possible && all.seconds[m] < kInfinity;
  return is_possible ? std::optional(plan_of(m)) : std::nullopt;
}

Stays SegmentTable::plan_of(int slots) const {
  Stays plan(segments_.saved.size(), Stay::never());
  for (size_t s = 0; s < plan.size(); ++s) {
    plan[s] = segments_.droppable[s] ? Stay::never() : Stay::kept();
  }
  write(Inputs::All, 0, count_ - 1, slots, Stay::kept(), plan);
  return plan;
}

// Writes the choices for the segments first..last into `plan`. `from`: kept in the forward pass itself, or the event in
// which the segments run again.
void SegmentTable::write(Inputs inputs, int first, int last, int slots_left, Stay from, Stays& plan) const {
  const auto choice = std::bit_cast<Choice>(cell(inputs, first, last).choice[slots_left]);
  const auto hold = [&](int s, Stay stay) { plan[at(s)] = std::min(plan[at(s)], stay); };
  const auto hold_inputs = [&](Inputs wanted) {
    return [&, wanted](int s) {
      if (wanted == Inputs::All || segments_.saved[at(s)]) {
        hold(s, from);
      }
    };
  };
  if (choice.action == Action::BuyInputs) {
    visit_crossing(0, first, last, hold_inputs(Inputs::All));
    write(Inputs::All, first, last, slots_left - slots(unsaved_inputs(first, last), first), from, plan);
  } else if (choice.action == Action::Save) {
    const Segment& segment = segments_.list[at(first)];
    const SegmentOption& option = segment.options[at(choice.number)];
    for (const int s : option.kept) {
      hold(s, from);
    }
    for (const int s : option.dropped) {
      hold(s, std::max(from, Stay::from(segment.backward_begin)));
    }
    if (first < last) {
      visit_crossing(first, first + 1, last, hold_inputs(choice.rest));
      write(choice.rest, first + 1, last, slots_left - slots(taken(first, choice.number, choice.rest, last), first),
            from, plan);
    }
  } else if (choice.action == Action::Cut) {
    const int cut = choice.number;
    visit_crossing(first, cut, last, hold_inputs(choice.rest));
    write(choice.rest, cut, last, slots_left - slots(crossing(choice.rest, first, cut, last), cut), from, plan);
    write(Inputs::All, first, cut - 1, slots_left, Stay::from(segments_.list[at(cut - 1)].backward_begin), plan);
  }
}

}  // namespace snug::plan
