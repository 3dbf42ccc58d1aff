#include "src/activations/operator_traits.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

namespace snug::operator_traits_test {
namespace {

using detail::Arguments;
using detail::Stack;
using detail::traits_of;

// Called with these, and no other arguments.
bool draws_from_own_state(const char* name, double dropout, bool train) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Stack stack(op.schema().arguments().size());
  stack[static_cast<size_t>(*op.schema().argumentIndexWithName("dropout"))] = dropout;
  stack[static_cast<size_t>(*op.schema().argumentIndexWithName("train"))] = train;
  return traits_of(op).draws_from_own_state(Arguments(op, stack));
}

TEST(OperatorTraits, RecurrentLayersOfGpusDrawDropoutFromAStateOfTheirOwn) {
  for (const char* name : {"aten::_cudnn_rnn", "aten::miopen_rnn"}) {
    EXPECT_TRUE(draws_from_own_state(name, 0.1, true));
    EXPECT_FALSE(draws_from_own_state(name, 0.1, false)) << "not in evaluation";
    EXPECT_FALSE(draws_from_own_state(name, 0, true));
  }
}

TEST(OperatorTraits, OthersDrawFromGenerators) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_dropout", "");
  Stack stack(op.schema().arguments().size());
  stack[2] = true;
  EXPECT_TRUE(traits_of(op).draws(Arguments(op, stack)));
  EXPECT_FALSE(traits_of(op).draws_from_own_state(Arguments(op, stack)));
}

}  // namespace
}  // namespace snug::operator_traits_test
