// What a planned step changes is put back on every rank where it fails, and so are the buffers that rank 0 sends.

#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/step/ranked_training.h"

namespace snug::ranks_effects_test {
namespace {

using testing::kPlenty;
using testing::RankedRun;
using testing::planned::make_batch;
using torch::Tensor;

enum class Fails { WhilePlanning, InForward, InBackward, No };

// A step of 4 micro-batches, which fails on rank `failing`.
void step(RankedRun& run, const Batch& own, Fails fails, int failing) {
  const bool fails_here = run.group->rank() == failing;
  int calls = 0;
  run.stepper->step(own, [&](const Batch& micro) {
    const bool is_it = fails_here && ++calls == (fails == Fails::WhilePlanning ? 1 : 2);
    if (is_it && (fails == Fails::WhilePlanning || fails == Fails::InForward)) {
      throw std::runtime_error("the program's own");
    }
    if (is_it && fails == Fails::InBackward) {
      run.at_backward = [] { throw std::runtime_error("the program's own"); };
    }
    return run.loss_of(micro);
  });
}

TEST(RanksEffects, OfAStepThatFailsOnOneArePutBackOnAllWithTheBuffersThatRankZeroSends) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(128), *group);
    for (const Fails fails : {Fails::WhilePlanning, Fails::InForward, Fails::InBackward}) {
      for (const int failing : {0, 1}) {
        SCOPED_TRACE(::testing::Message() << static_cast<int>(fails) << " on rank " << failing);
        RankedRun run(group, RankedRun::with_room(kPlenty, {.micro_batch = 16}), testing::planned::with_batch_norm());
        if (fails != Fails::WhilePlanning) {
          step(run, own, Fails::No, failing);
        }
        for (const Tensor& buffer : run.model->buffers()) {
          buffer.fill_(3 + group->rank());  // as if each rank had gone on by itself
        }
        const auto before = run.state();
        EXPECT_ANY_THROW(step(run, own, fails, failing));
        EXPECT_TRUE(same_bits(run.state(), before));
        step(run, own, Fails::No, failing);
        EXPECT_FALSE(same_bits(run.state(), before)) << "the next one is made";
      }
    }
  });
}

}  // namespace
}  // namespace snug::ranks_effects_test
