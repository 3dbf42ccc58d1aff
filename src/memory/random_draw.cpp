#include "src/memory/random_draw.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include "src/core/generators.h"

namespace snug::detail {
namespace {

using torch::jit::Stack;

std::optional<size_t> generator_argument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") {
      return i;
    }
  }
  return std::nullopt;
}

bool is_torchs_own(const c10::OperatorHandle& op) { return op.schema().name().starts_with("aten::"); }

// Whether the two schemas differ only by the generator, as rand.generator(size, generator) and rand(size) do.
bool is_twin(const c10::FunctionSchema& schema, size_t generator, const c10::FunctionSchema& of) {
  auto others = schema.arguments();
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(generator));
  return std::equal(
      others.begin(), others.end(), of.arguments().begin(), of.arguments().end(),
      [](const c10::Argument& a, const c10::Argument& b) { return a.name() == b.name() && *a.type() == *b.type(); });
}

// How an operator takes a generator.
struct Taker {
  std::optional<c10::OperatorHandle> op;  // the operator or the twin; none: the operator takes no generator
  size_t argument = 0;
  bool is_twin = false;
};

Taker find_taker(const c10::OperatorHandle& op) {
  if (const auto argument = generator_argument(op.schema())) {
    return {op, *argument, false};
  }
  if (!is_torchs_own(op)) {
    return {};
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name != op.operator_name().name) {
      continue;
    }
    const auto other = dispatcher.findSchema(name);
    const auto argument = other ? generator_argument(other->schema()) : std::nullopt;
    if (argument && is_twin(other->schema(), *argument, op.schema())) {
      return {*other, *argument, true};
    }
  }
  return {};
}

const Taker& taker_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorHandle, Taker> known;
  const auto found = known.find(op);
  return found != known.end() ? found->second : known.emplace(op, find_taker(op)).first->second;
}

c10::Device device_of(const c10::IValue* first, const c10::IValue* last) {
  std::optional<c10::Device> named;
  for (const c10::IValue* argument = first; argument != last; ++argument) {
    if (argument->isTensor() && argument->toTensor().defined()) {
      return argument->toTensor().device();
    }
    if (argument->isDevice()) {
      named = argument->toDevice();
    }
  }
  return named.value_or(c10::Device(c10::DeviceType::CPU));
}

// The generator from which the operator draws by itself.
at::Generator programs_generator(const c10::OperatorHandle& op, const Stack& stack) {
  const c10::IValue* const last = stack.data() + stack.size();
  const c10::IValue* const first = last - op.schema().arguments().size();
  if (const auto argument = generator_argument(op.schema()); argument && !first[*argument].isNone()) {
    return first[*argument].toGenerator();
  }
  const c10::Device device = device_of(first, last);
  const bool has_generators = device.is_cpu() || at::isAccelerator(device.type());
  return has_generators ? at::globalContext().defaultGenerator(device) : at::Generator();
}

void give(const Taker& taker, const c10::OperatorHandle& op, Stack& stack, const at::Generator& generator) {
  const auto place = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size() - taker.argument);
  if (taker.is_twin) {
    stack.insert(place, generator);
  } else {
    *place = generator;
  }
}

// For operators that take no generator: puts the given generator's state into the program's generator until the end of
// the scope. Other threads that draw during the scope draw from the given generator's state.
class InPlaceOf {
 public:
  InPlaceOf(at::Generator program, const at::Generator& generator) : program_(std::move(program)) {
    if (program_.defined()) {
      const std::lock_guard lock(program_.mutex());
      before_ = program_.clone();
      copy_state(generator, program_);
    }
  }
  ~InPlaceOf() {
    if (program_.defined()) {
      const std::lock_guard lock(program_.mutex());
      copy_state(before_, program_);
    }
  }
  InPlaceOf(const InPlaceOf&) = delete;
  InPlaceOf& operator=(const InPlaceOf&) = delete;

 private:
  at::Generator program_, before_;
};

}  // namespace

void RandomDraw::run(const c10::OperatorHandle& op, Stack& stack, Kernel kernel) {
  const Taker& taker = taker_of(op);
  if (from.defined()) {
    before = from;
    if (taker.op) {
      give(taker, op, stack, from.clone());
      kernel(*taker.op);
    } else {
      const InPlaceOf program(programs_generator(op, stack), from);
      kernel(op);
    }
    return;
  }
  at::Generator program = programs_generator(op, stack);
  if (!program.defined()) {
    before = {};
    kernel(op);
    return;
  }
  // Kernels lock their generator, here the copy, so the program's generator can stay locked. Operators of other
  // libraries might draw from the program's generator in spite of the copy, and wait for ever.
  std::unique_lock lock(program.mutex());
  at::Generator copy = program.clone();
  if (!taker.op || !is_torchs_own(op)) {
    lock.unlock();
    before = std::move(copy);
    kernel(op);
    return;
  }
  give(taker, op, stack, copy);
  kernel(*taker.op);
  exchange_states(program, copy);
  before = std::move(copy);
}

bool draws_the_same_again(const c10::OperatorHandle& op) { return is_torchs_own(op) || taker_of(op).op.has_value(); }

}  // namespace snug::detail
