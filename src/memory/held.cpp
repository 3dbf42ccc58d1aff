#include "src/memory/held.h"

namespace snug::detail {
namespace {

// VariableVersion does not tell the identity of the shared counter. Naming a private member in an explicit
// instantiation is legal. If LibTorch renames the member, the instantiation does not compile. Tried on torch 2.13.0.
template <auto Member>
struct Open {
  friend constexpr auto counter_of_version() { return Member; }
};
constexpr auto counter_of_version();
template struct Open<&c10::VariableVersion::version_counter_>;

}  // namespace

WriteCount::WriteCount(const at::Tensor& tensor)
    : counter_(tensor.is_inference() ? c10::VariableVersion() : tensor.unsafeGetTensorImpl()->version_counter()),
      known_(now()) {}

const void* WriteCount::counter() const { return (counter_.*counter_of_version()).get(); }

const void* WriteCount::counter_of(const at::Tensor& tensor) {
  return (tensor.unsafeGetTensorImpl()->version_counter().*counter_of_version()).get();
}

void WriteCount::expect(uint32_t writes) {
  moved_ = moved();
  known_ = now();
  expected_ = writes;
}

void WriteCount::accept() {
  moved_ = false;
  known_ = now();
  expected_ = 0;
}

}  // namespace snug::detail
