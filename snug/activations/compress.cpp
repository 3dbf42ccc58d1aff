#include "snug/activations/compress.h"

#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include "snug/activations/detail/block_codes.h"
#include "snug/activations/detail/late_copies.h"
#include "snug/activations/detail/packed_mask.h"
#include "snug/core/detail/has_bytes.h"
#include "snug/memory/detail/saved_tensor_policy.h"

// The unit of compression is a run of memory. If the tensor has at least a quarter of its storage, the run is the whole
// storage, so that the slices that a model cuts from one product share one compression. Otherwise it is the span from
// the tensor's first to its last element. A tensor is then a view of its run. The gaps are treated as data of the same
// kind.

namespace snug {
namespace {

/// The replacement of a run. Narrow: the same numbers in a narrower type.
struct Narrow {
  at::Tensor values;
};
struct Mask {
  at::Tensor bits;
};
using Packed = std::variant<Narrow, Mask, detail::TwoValued, detail::BlockCodes>;

// Autocast's copy of a parameter: a cast of a leaf that will get a gradient.
bool is_cast_of_leaf(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  if (node == nullptr || node->name() != "ToCopyBackward0" || node->num_outputs() != 1) {
    return false;
  }
  const auto& source = node->next_edge(0).function;
  return source != nullptr && source->name() == "torch::autograd::AccumulateGrad";
}

enum class Origin { Parameter, Leaf, Computed };

/// A view is what its base is.
Origin origin_of(const at::Tensor& tensor) {
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (base.is_leaf()) {
    return base.requires_grad() ? Origin::Parameter : Origin::Leaf;
  }
  return is_cast_of_leaf(base) ? Origin::Parameter : Origin::Computed;
}

bool is_plain_memory(const at::Tensor& tensor) {
  return detail::can_be_read(tensor) && !tensor.is_nested() && !tensor.is_neg() && !tensor.is_conj() &&
         tensor.numel() > 0;
}

struct Span {
  int64_t begin;
  int64_t count;
};

/// nullopt for a small part of a large storage, which is better kept with its neighbours.
std::optional<Span> span_of(const at::Tensor& tensor) {
  constexpr int64_t kShare = 4;
  const auto whole = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  if (kShare * tensor.numel() >= whole) {
    return Span{0, whole};
  }
  int64_t count = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    count += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return kShare * tensor.numel() >= count ? std::optional(Span{tensor.storage_offset(), count}) : std::nullopt;
}

/// Without loss, or not at all.
std::optional<Packed> exactly(const at::Tensor& memory) {
  if (memory.scalar_type() == at::kBool) {
    return Packed(Mask{detail::pack_mask(memory)});
  }
  if (!memory.is_cpu()) {
    return std::nullopt;
  }
  auto packed = detail::pack_two_valued(memory);
  return packed ? std::optional<Packed>(std::move(*packed)) : std::nullopt;
}

bool fits_float16(const at::Tensor& memory) {
  constexpr double kLargest = 65504;
  const auto [least, greatest] = at::aminmax(memory);
  return least.item<double>() >= -kLargest && greatest.item<double>() <= kLargest;
}

std::optional<Packed> with_loss(const at::Tensor& memory, Compression compression, uint64_t seed) {
  const bool is_wide = memory.element_size() > 2;
  switch (compression) {
    case Compression::BFloat16:
      return is_wide ? std::optional<Packed>(Narrow{memory.to(at::kBFloat16)}) : std::nullopt;
    case Compression::Float16:
      return is_wide && fits_float16(memory) ? std::optional<Packed>(Narrow{memory.to(at::kHalf)}) : std::nullopt;
    case Compression::Int8:
    case Compression::Int4:
      break;
  }
  if (memory.element_size() < 2) {
    return std::nullopt;
  }
  auto packed = detail::quantize_blocks(memory, compression == Compression::Int8 ? 8 : 4, seed);
  return packed ? std::optional<Packed>(std::move(*packed)) : std::nullopt;
}

/// A run of memory in its packed form, shared by the tensors saved from it.
class Run final : public detail::LateCopy {
 public:
  Run(detail::LateCopies& copies, const at::Tensor& tensor, const detail::StoragePart& part, Origin origin,
      Compression compression, uint64_t seed)
      : LateCopy(copies, tensor, part),
        options_(tensor.options()),
        origin_(origin),
        compression_(compression),
        seed_(seed) {}

  /// Tensors that one backward pass needs at the same time share the unpacked memory. Another pass gets memory of its
  /// own, because somebody may have written to the first.
  at::Tensor unpack() {
    const std::lock_guard lock(mutex);
    if (memory()) {
      return on(memory());
    }
    const int pass = detail::current_pass();
    const bool is_same_pass = std::exchange(pass_, pass) == pass && pass >= 0;
    if (const auto alive = is_same_pass ? unpacked_.lock() : c10::intrusive_ptr<c10::StorageImpl>()) {
      return at::empty({0}, options_).set_(c10::Storage(alive), 0, {part().count}, {1});
    }
    at::Tensor run = std::visit([this](const auto& packed) { return unpacked(packed); }, *packed_);
    unpacked_ = run.storage().getWeakStorageImpl();
    return run;
  }

 private:
  static void mark(const Narrow& kept) { detail::mark_as_saved(kept.values); }
  static void mark(const Mask& kept) { detail::mark_as_saved(kept.bits); }
  static void mark(const detail::TwoValued& kept) { detail::mark_as_saved(kept.bits); }
  static void mark(const detail::BlockCodes& kept) {
    detail::mark_as_saved(kept.codes);
    detail::mark_as_saved(kept.ranges);
  }

  at::Tensor on(const c10::Storage& memory) const {
    return at::empty({0}, options_).set_(memory, part().begin, {part().count}, {1});
  }

  bool copy(const c10::Storage& memory) override {
    const at::Tensor run = on(memory);
    const bool is_exact = part().dtype == at::kBool || origin_ == Origin::Leaf;
    packed_ = is_exact ? exactly(run) : with_loss(run, compression_, seed_);
    if (packed_) {
      std::visit([](const auto& kept) { mark(kept); }, *packed_);
    } else {
      detail::mark_as_saved(run);
    }
    return packed_.has_value();
  }
  void forget() override {
    packed_.reset();
    unpacked_.reset();
  }

  at::Tensor unpacked(const Narrow& packed) const { return packed.values.to(part().dtype); }
  at::Tensor unpacked(const Mask& packed) const { return detail::unpack_mask(packed.bits, part().count); }
  at::Tensor unpacked(const detail::TwoValued& packed) const {
    return detail::unpack_two_valued(packed, part().count, part().dtype);
  }
  at::Tensor unpacked(const detail::BlockCodes& packed) const {
    return detail::dequantize_blocks(packed, part().count, part().dtype);
  }

  const at::TensorOptions options_;  // of the run
  const Origin origin_;
  const Compression compression_;
  const uint64_t seed_;
  std::optional<Packed> packed_;
  int pass_ = -1;
  c10::weak_intrusive_ptr<c10::StorageImpl> unpacked_{c10::intrusive_ptr<c10::StorageImpl>()};
};

struct View {
  std::shared_ptr<Run> run;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
};

class CompressPolicy final : public detail::SavedTensorPolicy {
 public:
  CompressPolicy(Compression compression, const CompressOptions& options)
      : compression_(compression), options_(options) {}

  /// The copies, which must see the operators of this thread.
  detail::LateCopies& copies() { return copies_; }

  std::any pack(const at::Tensor& tensor) override {
    const auto span = is_plain_memory(tensor) ? span_of(tensor) : std::nullopt;
    if (!span || span->count * tensor.element_size() < options_.min_bytes.count() || !can_be_packed(tensor)) {
      return tensor.detach();
    }
    return View{run_of(tensor, {tensor.scalar_type(), span->begin, span->count}), tensor.sizes().vec(),
                tensor.strides().vec(), tensor.storage_offset() - span->begin};
  }

  at::Tensor unpack(std::any& packed) override {
    if (const auto* kept = std::any_cast<at::Tensor>(&packed)) {
      return *kept;
    }
    const View& view = std::any_cast<View&>(packed);
    view.run->make();
    return view.run->unpack().as_strided(view.sizes, view.strides, view.offset);
  }

 private:
  static bool can_be_packed(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kBool ||
           (at::isFloatingType(tensor.scalar_type()) && origin_of(tensor) != Origin::Parameter);
  }

  std::shared_ptr<Run> run_of(const at::Tensor& tensor, const detail::StoragePart& part) {
    if (auto found = copies_.find(tensor, part)) {
      return std::static_pointer_cast<Run>(std::move(found));
    }
    auto run = std::make_shared<Run>(copies_, tensor, part, origin_of(tensor), compression_, options_.seed);
    copies_.add(run);
    return run;
  }

  const Compression compression_;
  const CompressOptions options_;
  detail::LateCopies copies_;
};

}  // namespace

class SaveCompressed::Impl {
 public:
  Impl(Compression compression, const CompressOptions& options)
      : policy_(std::make_shared<CompressPolicy>(compression, options)),
        operators_(policy_->copies()),
        saved_(policy_) {}
  ~Impl() { policy_->copies().make_all(); }

 private:
  std::shared_ptr<CompressPolicy> policy_;
  detail::OperatorScope operators_;
  detail::PolicyScope saved_;
};

SaveCompressed::SaveCompressed(Compression compression, CompressOptions options)
    : impl_(std::make_unique<Impl>(compression, options)) {}

SaveCompressed::~SaveCompressed() = default;

}  // namespace snug
