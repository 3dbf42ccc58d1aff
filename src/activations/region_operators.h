#pragma once
// A checkpointed region's record of the operators of its forward. With the record the recomputation makes the same
// values and changes nothing else (region_operators.cpp says how). The record has:
// - for memory that existed before the region and that the forward wrote (running statistics, counters): the earlier
//   content. The recomputation works on copies of this content;
// - for memory that existed before the region and that the forward only read: the latest write. A later write is an
//   error;
// - results that a policy keeps. The recomputation takes the results instead of running their operators;
// - the generators of the region's random operators;
// - the origin of each value, for the comparison of the two runs, and the sequence of operators, for messages.

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "snug/checkpoint.h"
#include "src/activations/filled_saves.h"
#include "src/activations/kept_result.h"
#include "src/activations/operator_traits.h"
#include "src/activations/region_draws.h"
#include "src/activations/region_values.h"
#include "src/memory/held.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

struct RegionOperators {
  /// The earlier content of some memory, in bytes. The weak pointer keeps the memory's address, which is its key, from
  /// being given to another storage.
  struct Before {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor bytes;
  };

  std::vector<c10::OperatorHandle> sequence;
  KnownMemory known;
  std::unordered_map<MemoryName, Before> overwritten;
  std::unordered_map<const void*, WriteCount> read;  // of memory from outside that the forward read, by counter
  KeptResults kept;
  std::optional<RegionDraws> draws;  // none: the recomputation draws other numbers
};

/// Fills a RegionOperators during the forward.
class ForwardOperators final : public OperatorPolicy {
 public:
  ForwardOperators(RegionOperators& record, const std::vector<at::Tensor>& inputs, CheckpointPolicy policy,
                   bool preserve_rng_state, bool draws_unseen);
  void call(const OperatorCall& call, Stack& stack) override;
  Origin origin_of(const at::Tensor& tensor) { return values_.origin_of(tensor); }
  /// Autograd saves the tensor; `filled` is called if the next operator fills it.
  void saved(const at::Tensor& tensor, FilledSaves::Filled filled) { just_saved_.add(tensor, std::move(filled)); }
  /// Whether only a comparison of values can show that the region draws random numbers outside of operators: the
  /// default generators have moved without an operator, by the region or by another thread, and such draws are not
  /// repeated.
  bool must_compare_values();
  /// The forward is over: from now on nothing may write to kept results.
  void close();
  /// Whether autograd recorded a write to a tensor from outside of the region. The recomputation would have to repeat
  /// this write.
  bool wrote_to_outside_graph() const;
  /// Whether the region wrote to a tensor from outside whose memory cannot be copied because the tensor has no storage,
  /// such as a sparse tensor.
  bool wrote_to_outside_sparse() const { return wrote_to_outside_sparse_; }

 private:
  struct OutsideTensor {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())> grad_fn;  // a pointer whose kind depends on LibTorch
  };
  struct Written {
    MemoryName memory;
    const void* counter;  // counts the tensor's writes
  };
  using WrittenMemory = c10::SmallVector<Written, 2>;

  void note_reads(const OperatorTraits& traits, const Arguments& arguments, const std::vector<size_t>& written);
  void keep_what_was_there(const at::Tensor& tensor);
  void keep_result(CallKey key, Keep keep, const Stack& stack, size_t first_result);
  void note_write(const Written& written, CallKey key, std::optional<size_t> argument);
  void note_aliases(const Stack& stack, size_t first);
  void pack_last();
  bool writes_to(CallKey kept, const WrittenMemory& written) const;

  RegionOperators& record_;
  CheckpointPolicy policy_;
  std::optional<ForwardDraws> draws_;
  std::vector<OutsideTensor> written_outside_;
  bool wrote_to_outside_sparse_ = false;
  RegionValues values_;
  CallKeys keys_;
  std::unordered_map<MemoryName, CallKey> kept_memory_;
  FilledSaves just_saved_;
  std::optional<CallKey> to_be_packed_;  // the latest kept result; the next operator may still write, such as a bias
};

/// Thrown through the callable to end a recomputation early. The exception passes through all frames in between. Frames
/// of a language binding rely on std::exception, and may turn the exception into another exception.
class RecomputedEnough final : public std::exception {
 public:
  const char* what() const noexcept override {
    return "snug::checkpoint ends a recomputation that has all it needs; let this exception pass";
  }
};

/// Uses a RegionOperators during the recomputation. The destructor gives written tensors their earlier versions back,
/// for autograd's checks.
class RecomputeOperators final : public OperatorPolicy {
 public:
  explicit RecomputeOperators(const RegionOperators& record, const std::vector<at::Tensor>& inputs = {},
                              std::string region = "checkpoint");
  ~RecomputeOperators() override;
  void call(const OperatorCall& call, Stack& stack) override;
  Origin origin_of(const at::Tensor& tensor) { return values_.origin_of(tensor); }

  /// Autograd saves the tensor.
  void saved(const at::Tensor& tensor) { just_saved_.push_back(memory_of(tensor)); }
  /// The next operator fills the saved tensor.
  void saved_unfilled(const at::Tensor& tensor, FilledSaves::Filled filled) {
    unfilled_.add(tensor, std::move(filled));
  }
  /// All needed tensors are recomputed. The next operator that takes a tensor that was just saved throws
  /// RecomputedEnough instead of running, if the backward pass `task` runs the operator. Not thrown:
  /// - at once: a custom function that is about to save its own output would be left with the output, in a cycle;
  /// - by an operator that fills a saved tensor, as RReLU does with its noise;
  /// - by any other operator: a destructor may have called the operator.
  void stop_before_use(int task) { stopped_task_ = task; }
  [[noreturn]] void stop();
  /// Whether RecomputedEnough was thrown. Any exception that then comes out of the callable is ignored.
  bool has_stopped() const { return has_stopped_; }

  /// "after operator 7 (aten::addmm)", and the first difference of the two sequences, if they differ before this
  /// operator.
  std::string place() const;

 private:
  using Redirected = std::vector<std::pair<at::Tensor, at::Tensor>>;

  bool is_end(const Arguments& arguments, const std::vector<size_t>& written) const;
  bool take_kept(const c10::OperatorHandle& op, CallKey key, Stack& stack);
  void check_reads(const c10::OperatorHandle& op, const OperatorTraits& traits, const Arguments& arguments,
                   const std::vector<size_t>& written) const;
  Redirected redirect(const Arguments& arguments, const std::vector<size_t>& written);
  void check_shapes(const c10::OperatorHandle& op, const Redirected& redirected) const;
  const c10::Storage* scratch_of(const at::Tensor& tensor, bool is_written);

  const RegionOperators& record_;
  std::string region_;  // the region's name, for messages
  std::optional<RecomputeDraws> draws_;
  std::optional<int> stopped_task_;
  bool has_stopped_ = false;
  int exceptions_around_ = std::uncaught_exceptions();
  c10::SmallVector<MemoryName, 8> just_saved_;  // since the last operator, or since all needed tensors were recomputed
  FilledSaves unfilled_;
  RegionValues values_;
  CallKeys keys_;
  std::vector<c10::OperatorHandle> sequence_;
  std::unordered_map<MemoryName, c10::Storage> scratch_;
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_;
};

}  // namespace snug::detail
