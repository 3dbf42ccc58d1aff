#include "src/core/generators.h"

#include <cstring>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

namespace snug::detail {
namespace {

// A CPU's generator without the tensor of 5 KB that get_state() makes.
struct CpuState {
  at::mt19937 engine;
  std::optional<float> next_float;  // the second of a pair of normals
  std::optional<double> next_double;

  explicit CpuState(const at::Generator& generator) {
    auto& impl = *generator.get<at::CPUGeneratorImpl>();
    engine = impl.engine();
    next_float = impl.next_float_normal_sample();
    next_double = impl.next_double_normal_sample();
  }
  void put_into(at::Generator& generator) const {
    auto& impl = *generator.get<at::CPUGeneratorImpl>();
    impl.set_engine(engine);
    impl.set_next_float_normal_sample(next_float);
    impl.set_next_double_normal_sample(next_double);
  }
  bool operator==(const CpuState& other) const {
    const at::mt19937_data_pod a = engine.data(), b = other.engine.data();
    return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.state_ == b.state_ &&
           next_float == other.next_float && next_double == other.next_double;
  }
};

bool are_of_the_cpu(const at::Generator& a, const at::Generator& b) {
  return a.device().is_cpu() && b.device().is_cpu();
}

}  // namespace

void copy_state(const at::Generator& from, at::Generator& to) {
  if (are_of_the_cpu(from, to)) {
    CpuState(from).put_into(to);
  } else {
    to.set_state(from.get_state());
  }
}

void exchange_states(at::Generator& a, at::Generator& b) {
  if (are_of_the_cpu(a, b)) {
    const CpuState of_a(a);
    CpuState(b).put_into(a);
    of_a.put_into(b);
  } else {
    const at::Tensor of_a = a.get_state();
    a.set_state(b.get_state());
    b.set_state(of_a);
  }
}

bool have_same_state(const at::Generator& a, const at::Generator& b) {
  if (are_of_the_cpu(a, b)) {
    return CpuState(a) == CpuState(b);
  }
  const at::Tensor of_a = a.get_state(), of_b = b.get_state();
  return of_a.nbytes() == of_b.nbytes() &&
         std::memcmp(of_a.const_data_ptr(), of_b.const_data_ptr(), of_a.nbytes()) == 0;
}

}  // namespace snug::detail
