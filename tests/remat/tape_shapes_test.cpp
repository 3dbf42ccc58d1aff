#include "src/remat/tape_shapes.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace snug::tape_shapes_test {
namespace {

using detail::TapeShapes;
using torch::Tensor;

TEST(TapeShapes, AreSharedByTensorsThatLookAtMemoryInTheSameWay) {
  TapeShapes shapes;
  const Tensor square = torch::ones({3, 3});
  const Tensor first = shapes.of(square);
  EXPECT_EQ(first.sizes(), square.sizes());
  EXPECT_EQ(first.storage().nbytes(), 0U);
  EXPECT_TRUE(shapes.of(torch::zeros({3, 3}, torch::requires_grad())).is_same(first));
  EXPECT_FALSE(shapes.of(square.t()).is_same(first));
  EXPECT_FALSE(shapes.of(torch::ones({2, 3, 3})[1]).is_same(first));
}

TEST(TapeShapes, KeepApartWhatSizesAndStridesDoNotTell) {
  TapeShapes shapes;
  const Tensor number = torch::ones({});
  Tensor literal = torch::ones({});
  literal.unsafeGetTensorImpl()->set_wrapped_number(true);
  EXPECT_FALSE(shapes.of(number).unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_TRUE(shapes.of(literal).unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_FALSE(shapes.of(number).unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_EQ(shapes.of(torch::ones({}, torch::kDouble)).scalar_type(), torch::kDouble);
  EXPECT_TRUE(shapes.of(torch::ones({}, torch::kMeta)).is_meta());

  const Tensor complex = torch::ones({2}, torch::kComplexFloat);
  EXPECT_FALSE(shapes.of(complex).is_conj());
  EXPECT_TRUE(shapes.of(complex.conj()).is_conj());
  EXPECT_FALSE(shapes.of(complex).is_conj());
}

}  // namespace
}  // namespace snug::tape_shapes_test
