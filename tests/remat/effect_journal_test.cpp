// EffectJournal: what a run changes outside of itself is put back, whatever became of its memory, and only that is
// copied.

#include "src/remat/effect_journal.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/native/Resize.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/memory.h"
#include "snug/state.h"
#include "src/memory/backward_pass.h"
#include "src/memory/operator_mode.h"
#include "tests/support/tensors.h"

namespace snug::effect_journal_test {
namespace {

using detail::EffectJournal;
using testing::same_bits;
using torch::Tensor;

using JournalRun = EffectJournal::Run;
using Effect = std::function<void(Tensor&)>;

int64_t live() { return live_bytes(torch::kCPU).count(); }

// How a tensor looks, and its values.
struct Look {
  explicit Look(const Tensor& tensor)
      : bytes(tensor.storage().nbytes()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        type(tensor.scalar_type()),
        values(tensor.clone()) {}

  size_t bytes;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType type;
  Tensor values;
};

void expect_same_look(const Tensor& tensor, const Look& before) {
  ASSERT_EQ(tensor.storage().nbytes(), before.bytes);
  ASSERT_EQ(tensor.sizes(), before.sizes);
  EXPECT_EQ(tensor.strides(), before.strides);
  EXPECT_TRUE(same_bits(tensor, before.values));
}

// A plain tensor: nobody has told the journal of it.
void expect_put_back(Tensor tensor, const Effect& effect, bool is_registered = false) {
  const Look before(tensor);
  EffectJournal journal;
  journal.begin(is_registered ? std::vector{tensor} : std::vector<Tensor>());
  for (int i = 0; i < 2; ++i) {
    {
      const JournalRun run(journal);
      effect(tensor);
    }
    journal.take_back();
    expect_same_look(tensor, before);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

// --- memory

struct Written {
  const char* name;
  std::function<Tensor()> make;
  Effect effect;
};

std::vector<Written> written() {
  const auto ones = [] { return torch::ones({4, 4}); };
  return {
      {"in place", ones, [](Tensor& t) { t.mul_(3); }},
      {"zeros", [] { return torch::zeros({4, 4}); }, [](Tensor& t) { t.add_(1); }},
      {"through a view", ones, [](Tensor& t) { t.select(0, 2).add_(1); }},
      {"through a view of another type", ones, [](Tensor& t) { t.view(torch::kInt).add_(1); }},
      {"of a part", [] { return torch::arange(16).narrow(0, 4, 8); }, [](Tensor& t) { t.zero_(); }},
      {"as a result", ones, [](Tensor& t) { torch::add_out(t, t, t); }},
      {"as one of many", ones,
       [](Tensor& t) {
         Tensor other = torch::ones({2});
         at::_foreach_add_({other, t}, 1);
       }},
      {"transposed", [] { return torch::arange(12).view({3, 4}).t(); }, [](Tensor& t) { t.add_(1); }},
      {"grown", ones, [](Tensor& t) { t.resize_({64, 4}).fill_(7); }},
      {"grown from nothing", [] { return torch::zeros({0}); }, [](Tensor& t) { torch::arange_out(t, 9); }},
      {"shrunk", ones, [](Tensor& t) { t.resize_({2}).fill_(7); }},
      {"given up", ones,
       [](Tensor& t) {
         t.add_(1);
         at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), 0);
       }},
      {"swapped for more", ones,
       [](Tensor& t) {
         t.add_(1);
         at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), 4096);
         t.resize_({8, 128}).fill_(5);
       }},
  };
}

TEST(EffectJournal, PutsBackMemoryThatARunHasWrittenWithItsSize) {
  for (const Written& one : written()) {
    for (const bool is_registered : {false, true}) {
      SCOPED_TRACE(std::string(one.name) + (is_registered ? ", registered" : ""));
      expect_put_back(one.make(), one.effect, is_registered);
    }
  }
}

TEST(EffectJournal, PutsBackWhereARegisteredTensorLies) {
  const std::vector<Effect> effects = {
      [](Tensor& t) { t.set_data(torch::full({3, 2}, 5.0)); },
      [](Tensor& t) { t.set_data(torch::full({4}, 5, torch::kInt)); },
      [](Tensor& t) { t.set_(torch::full({9}, 5.0)); },
      [](Tensor& t) {
        t.add_(1);
        t.set_data(t.add(1));
        t.add_(1);
      },
      [](Tensor& t) { t.t_(); },
  };
  for (size_t i = 0; i < effects.size(); ++i) {
    SCOPED_TRACE(i);
    const Tensor tensor = torch::rand({2, 2});
    const void* const memory = tensor.storage().data();
    expect_put_back(tensor, effects[i], /*is_registered=*/true);
    EXPECT_EQ(tensor.storage().data(), memory);
  }
}

// Nobody holds its former memory, which its owner may have given up.
TEST(EffectJournal, LeavesAnotherTensorOnMemoryThatItWasPutOn) {
  for (const auto type : {torch::kHalf, torch::kFloat}) {
    SCOPED_TRACE(c10::toString(type));
    Tensor cache = torch::ones({8});
    EffectJournal journal;
    journal.begin();
    {
      const JournalRun run(journal);
      cache.add_(1);
      cache.set_data(cache.to(type, /*non_blocking=*/false, /*copy=*/true));
    }
    journal.take_back();
    EXPECT_EQ(cache.scalar_type(), type);
    ASSERT_EQ(cache.storage().nbytes(), 8 * cache.itemsize());
    EXPECT_TRUE(torch::equal(cache, torch::full({8}, 2, type)));
  }
}

TEST(EffectJournal, PutsBackWhatCodeThatIsNoOperatorSaysItWillWrite) {
  expect_put_back(torch::ones({4}), [](Tensor& t) {
    detail::report_coming_write(t);
    std::fill_n(t.data_ptr<float>(), 4, 7.0F);
  });
}

TEST(EffectJournal, ForgetsMemoryThatIsGone) {
  std::optional<Tensor> tensor = torch::ones({1 << 16});
  EffectJournal journal;
  journal.begin();
  const int64_t before = live();
  {
    const JournalRun run(journal);
    tensor->add_(1);
    tensor.reset();
  }
  EXPECT_EQ(live(), before) << "its copy is all that is left";
  journal.take_back();
  journal.end();
  EXPECT_EQ(live(), before - (1 << 18));
}

TEST(EffectJournal, CopiesWhatIsWrittenOnceAndNothingElse) {
  const Tensor read = torch::ones({64}), zeros = torch::zeros({64}), written = torch::ones({64});
  EffectJournal journal;
  journal.begin({read});
  for (int i = 0; i < 3; ++i) {
    JournalRun run(journal);
    for (int pass = 0; pass < 2; ++pass) {
      run.begin_forward();
      Tensor made = torch::empty_like(read);
      torch::add_out(made, read, read);
      made.mul_(2);
      zeros.add_(1);
      written.add_(made);
      run.begin_backward();
    }
    EXPECT_EQ(journal.bytes(), 64 * 4);
  }
  journal.take_back();
  EXPECT_EQ(journal.bytes(), 64 * 4) << "until the end";
  EXPECT_TRUE(torch::equal(zeros, torch::zeros({64})) && torch::equal(written, torch::ones({64})));
  journal.end();
  EXPECT_EQ(journal.bytes(), 0);
}

TEST(EffectJournal, NotesInTheBackwardPassWritesToRegisteredMemoryAlone) {
  const Tensor buffer = torch::ones({4}), other = torch::ones({4});
  EffectJournal journal;
  journal.begin({buffer});
  {
    JournalRun run(journal);
    run.begin_backward();
    buffer.narrow(0, 1, 2).add_(1);
    other.add_(1);
  }
  journal.take_back();
  EXPECT_TRUE(torch::equal(buffer, torch::ones({4})));
  EXPECT_TRUE(torch::equal(other, torch::full({4}, 2.0))) << "the contract says so";
}

TEST(EffectJournal, PassesTensorsWithoutBytes) {
  Tensor empty = torch::empty({0, 3}), meta = torch::ones({4}, torch::kMeta), freed = torch::ones({4}),
         undefined = Tensor();
  at::native::resize_bytes_cpu(freed.storage().unsafeGetStorageImpl(), 0);
  EffectJournal journal;
  journal.begin({empty, meta, freed}, {&undefined});
  {
    JournalRun run(journal);
    empty.add_(1);
    meta.add_(1);
    undefined = torch::ones({1});
    run.begin_backward();
    empty.zero_();
  }
  EXPECT_EQ(journal.bytes(), 0);
  journal.take_back();
  EXPECT_EQ(empty.sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(freed.storage().nbytes(), 0U);
  EXPECT_FALSE(undefined.defined());
}

TEST(EffectJournal, PutsGeneratorsBack) {
  EffectJournal journal;
  torch::manual_seed(5);
  journal.begin();
  const RngState before = RngState::capture();
  {
    const JournalRun run(journal);
    torch::rand({3});
  }
  EXPECT_FALSE(RngState::capture() == before);
  journal.take_back();
  EXPECT_TRUE(RngState::capture() == before);
}

// --- what is carried

TEST(EffectJournal, PutsBackCarriedTensorsAndTheirElements) {
  Tensor assigned = torch::ones({4}), written = torch::ones({4}), both = torch::ones({4});
  const Tensor assigned_before = assigned, both_before = both;
  EffectJournal journal;
  journal.begin({}, {&assigned, &written, &both});
  for (int i = 0; i < 2; ++i) {
    {
      const JournalRun run(journal);
      assigned = assigned + 1;
      written.add_(1);
      both.add_(1);
      both = both + 1;
    }
    journal.take_back();
    EXPECT_TRUE(assigned.is_same(assigned_before) && both.is_same(both_before));
    for (const Tensor& tensor : {assigned, written, both}) {
      EXPECT_TRUE(torch::equal(tensor, torch::ones({4})));
    }
  }
}

// --- gradients

void go_backward(JournalRun& run, const Tensor& loss) {
  run.begin_backward();
  detail::go_backward(loss);
}

TEST(EffectJournal, PutsBackGradientsOfLeavesOutside) {
  Tensor none = torch::ones({4}, torch::requires_grad()), some = torch::ones({4}, torch::requires_grad()),
         zeros = torch::ones({4}, torch::requires_grad());
  some.mutable_grad() = torch::full({4}, 3.0);
  zeros.mutable_grad() = torch::zeros({4});
  const Tensor of_some = some.grad(), of_zeros = zeros.grad();
  EffectJournal journal;
  journal.begin();
  for (int i = 0; i < 2; ++i) {
    {
      JournalRun run(journal);
      go_backward(run, (none * some * zeros).sum());
      EXPECT_TRUE(torch::equal(some.grad(), torch::full({4}, 4.0)));
    }
    journal.take_back();
    EXPECT_FALSE(none.grad().defined());
    EXPECT_TRUE(some.grad().is_same(of_some) && zeros.grad().is_same(of_zeros));
    EXPECT_TRUE(torch::equal(of_some, torch::full({4}, 3.0)) && torch::equal(of_zeros, torch::zeros({4})));
  }
  EXPECT_EQ(journal.bytes(), 4 * 4) << "zeros need no copy";
}

TEST(EffectJournal, PutsBackGradientsOfPassesInsideTheForwardPass) {
  Tensor outside = torch::ones({4}, torch::requires_grad());
  EffectJournal journal;
  journal.begin();
  {
    const JournalRun run(journal);
    (outside * 2).sum().backward();
    EXPECT_TRUE(outside.grad().defined());
  }
  journal.take_back();
  EXPECT_FALSE(outside.grad().defined());
}

TEST(EffectJournal, PutsBackSparseGradients) {
  const Tensor rows = torch::tensor({0, 2}), other_rows = torch::tensor({2, 5});
  const auto sparse_loss = [](const Tensor& weight, const Tensor& at) {
    return torch::embedding(weight, at, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false, /*sparse=*/true).sum();
  };
  const std::vector<std::function<Tensor(const Tensor&)>> losses = {
      [&](const Tensor& weight) { return sparse_loss(weight, other_rows); },
      [&](const Tensor& weight) { return weight.square().sum(); }};
  for (size_t i = 0; i < losses.size(); ++i) {
    SCOPED_TRACE(i == 0 ? "a sparse one is added" : "a dense one is added");
    Tensor weight = torch::ones({8, 3}, torch::requires_grad());
    sparse_loss(weight, rows).backward();
    const Tensor before = weight.grad().clone();
    ASSERT_TRUE(before.is_sparse());
    EffectJournal journal;
    journal.begin();
    for (int k = 0; k < 2; ++k) {
      {
        JournalRun run(journal);
        go_backward(run, losses[i](weight));
        EXPECT_FALSE(torch::equal(weight.grad().to_dense(), before.to_dense()));
      }
      journal.take_back();
      ASSERT_TRUE(weight.grad().is_sparse());
      EXPECT_TRUE(torch::equal(weight.grad().to_dense(), before.to_dense()));
      EXPECT_EQ(weight.grad()._nnz(), before._nnz());
    }
  }
}

TEST(EffectJournal, DoesNotCopyGradientsThatTheCallerDrops) {
  Tensor dropped = torch::ones({64}, torch::requires_grad()), kept = torch::ones({4}, torch::requires_grad()),
         given_up = torch::ones({64}, torch::requires_grad());
  for (Tensor* const leaf : {&dropped, &kept, &given_up}) {
    leaf->mutable_grad() = torch::ones_like(*leaf);
  }
  EffectJournal journal;
  journal.begin();
  {
    JournalRun run(journal, [&](const Tensor& leaf) { return leaf.is_same(dropped); });
    go_backward(run, dropped.sum() + kept.sum() + given_up.sum());
  }
  EXPECT_EQ(journal.bytes(), (4 + 64) * 4);
  journal.forget_gradients([&](const Tensor& leaf) { return leaf.is_same(given_up); });
  EXPECT_EQ(journal.bytes(), 4 * 4);
  journal.take_back();
  EXPECT_TRUE(torch::equal(dropped.grad(), torch::full({64}, 2.0)));
  EXPECT_TRUE(torch::equal(given_up.grad(), torch::full({64}, 2.0)));
  EXPECT_TRUE(torch::equal(kept.grad(), torch::ones({4})));
}

TEST(EffectJournal, DoesNotKeepALeafAliveThatTheRunHasMade) {
  Tensor outside = torch::ones({1 << 12}, torch::requires_grad());
  EffectJournal journal;
  journal.begin();
  const int64_t before = live();
  {
    JournalRun run(journal);
    for (int pass = 0; pass < 4; ++pass) {
      run.begin_forward();
      const Tensor h = outside * 2;
      const Tensor z = h.detach().requires_grad_();
      z.square().sum().backward();
      go_backward(run, (h * z.grad()).sum());
    }
    outside.mutable_grad().reset();
    EXPECT_EQ(live(), before) << "while it is open";
  }
  journal.take_back();
  EXPECT_FALSE(outside.grad().defined());
}

// --- what was written

TEST(EffectJournal, TellsWhatItsLatestRunHasWritten) {
  const Tensor first = torch::ones({4}), second = torch::ones({4}), never = torch::ones({4});
  EffectJournal journal;
  journal.begin();
  {
    const JournalRun run(journal);
    first.add_(1);
    second.select(0, 1).add_(1);
    first.add(never);
  }
  EXPECT_TRUE(journal.has_written(first) && journal.has_written(second) && !journal.has_written(never));
  EXPECT_EQ(journal.written().size(), 2U);
  journal.take_back();
  {
    const JournalRun run(journal);
    second.add_(1);
    EXPECT_FALSE(journal.has_written(first));
  }
  EXPECT_TRUE(journal.has_written(second.view({2, 2}))) << "its memory";
  const auto written = journal.written();
  ASSERT_EQ(written.size(), 1U);
  EXPECT_EQ(written[0].lock().get(), second.storage().unsafeGetStorageImpl());
  first.add_(5);
  journal.take_back();
  EXPECT_TRUE(torch::equal(first, torch::ones({4})) && torch::equal(second, torch::ones({4})))
      << "it goes back to its beginning, whichever run it was";
}

TEST(EffectJournal, NotesNothingBeforeItBeginsAndAfterItEnds) {
  const Tensor tensor = torch::ones({4});
  EffectJournal journal;
  const auto add = [&] {
    const JournalRun run(journal);
    tensor.add_(1);
  };
  add();
  EXPECT_FALSE(journal.is_open() || journal.has_written(tensor));
  journal.begin({tensor});
  EXPECT_TRUE(journal.is_open() && journal.is_registered(tensor));
  add();
  journal.end();
  EXPECT_FALSE(journal.is_open() || journal.is_registered(tensor) || journal.has_written(tensor));
  journal.take_back();
  EXPECT_TRUE(torch::equal(tensor, torch::full({4}, 3.0)));
  journal.begin();
  add();
  journal.take_back();
  EXPECT_TRUE(torch::equal(tensor, torch::full({4}, 3.0))) << "its second beginning";
}

}  // namespace
}  // namespace snug::effect_journal_test
