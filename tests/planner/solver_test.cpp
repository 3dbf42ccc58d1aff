// Plans against exhaustive search, budgets and the arithmetic of a GPT.

#include "snug/planner/solver.h"

#include <cstdio>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core/error.h"
#include "tests/planner/sample_profiles.h"

namespace snug {
namespace {

using testing::gpt_profile;
using ::testing::HasSubstr;
using testing::random_profile;

int64_t plain_peak(const StepSimulator& simulator) { return simulator.run(keep_all(simulator.profile())).peak_bytes; }

int64_t percent(int64_t bytes, int share) { return bytes * share / 100; }

const RematPlan* plan_of(const PlanAnswer& answer) { return std::get_if<RematPlan>(&answer); }

TEST(PlanSolver, IsWithinThreePercentOfTheBestPlanForSmallGraphs) {
  int compared = 0;
  double worst = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const StepSimulator simulator(random_profile(seed, 4 + static_cast<int>(seed % 5)));
    PlanSolver solver(simulator);
    const int64_t budget = percent(plain_peak(simulator), 60 + static_cast<int>(seed % 35));
    const PlanAnswer best = solve_exactly(simulator, budget);
    const PlanAnswer found = solver.solve(budget);
    ASSERT_EQ(plan_of(best) == nullptr, plan_of(found) == nullptr) << "seed " << seed;
    if (plan_of(best) == nullptr) {
      EXPECT_EQ(std::get<Infeasible>(found).smallest_feasible_bytes, std::get<Infeasible>(best).smallest_feasible_bytes)
          << "seed " << seed;
      continue;
    }
    ASSERT_LE(plan_of(found)->seconds, 1.03 * plan_of(best)->seconds) << "seed " << seed;
    ASSERT_LE(plan_of(found)->bound_seconds, plan_of(best)->seconds + 1e-12) << "seed " << seed;
    worst = std::max(worst, plan_of(found)->seconds / plan_of(best)->seconds);
    compared += plan_of(best)->seconds > plan_of(best)->plain_seconds ? 1 : 0;
  }
  RecordProperty("worst_ratio", std::to_string(worst));
  std::printf("compared %d, worst ratio %.5f\n", compared, worst);
  EXPECT_GT(compared, 40);
}

TEST(PlanSolver, KeepsItsWordAndIsNoSlowerWithMoreBytes) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const StepSimulator simulator(random_profile(seed, 30));
    const int64_t plain = plain_peak(simulator);
    PlanSolver solver(simulator, {.work = 200'000});
    std::vector<int64_t> budgets;
    for (int share = 20; share <= 100; share += 5) {
      budgets.push_back(percent(plain, share));
    }
    double before = std::numeric_limits<double>::infinity();
    const std::vector<PlanAnswer> answers = solver.curve(budgets);
    for (size_t i = 0; i < budgets.size(); ++i) {
      if (const RematPlan* plan = plan_of(answers[i])) {
        const Simulation run = simulator.run(plan->hold_from);
        ASSERT_EQ(run.impossible, -1);
        ASSERT_EQ(run.peak_bytes, plan->peak_bytes);
        ASSERT_EQ(run.seconds, plan->seconds);
        ASSERT_LE(plan->peak_bytes, budgets[i]);
        ASSERT_LE(plan->seconds, before);
        ASSERT_GE(plan->seconds, plan->bound_seconds);
        before = plan->seconds;
      } else {
        ASSERT_EQ(before, std::numeric_limits<double>::infinity()) << "a smaller budget was feasible";
        ASSERT_GT(std::get<Infeasible>(answers[i]).smallest_feasible_bytes, budgets[i]);
      }
    }
    ASSERT_EQ(before, simulator.profile().plain_seconds()) << "with all bytes nothing is rebuilt";
  }
}

TEST(PlanSolver, SaysHowManyBytesWouldDo) {
  const StepSimulator simulator(gpt_profile(2));
  PlanSolver solver(simulator);
  const PlanAnswer answer = solver.solve(1000);
  ASSERT_EQ(plan_of(answer), nullptr);
  const int64_t enough = std::get<Infeasible>(answer).smallest_feasible_bytes;
  PlanSolver another(simulator);
  EXPECT_NE(plan_of(solver.solve(enough)), nullptr);
  EXPECT_LT(enough, plain_peak(simulator) / 2);
}

TEST(PlanSolver, ComesNearTheBoundForAGptAndIsTheSameEachTime) {
  const StepSimulator simulator(gpt_profile(12));
  const int64_t plain = plain_peak(simulator);
  for (const int share : {62, 50, 25, 15}) {
    PlanSolver solver(simulator);
    PlanSolver again(simulator);
    const PlanAnswer answer = solver.solve(percent(plain, share));
    ASSERT_NE(plan_of(answer), nullptr) << share << " %";
    const RematPlan& plan = *plan_of(answer);
    std::printf("%d %%: %+.2f %%, gap %.2f %%\n", share, 100 * (plan.seconds / plan.plain_seconds - 1),
                100 * plan.gap());
    EXPECT_LT(plan.gap(), 0.06) << share << " %";
    EXPECT_EQ(plan, std::get<RematPlan>(again.solve(percent(plain, share))));
  }
}

TEST(PlanSolver, PlansFortyEightBlocksWithinItsWork) {
  const StepSimulator simulator(gpt_profile(48));
  PlanSolver solver(simulator);
  const PlanAnswer answer = solver.solve(percent(plain_peak(simulator), 30));
  ASSERT_NE(plan_of(answer), nullptr);
  std::printf("%lld simulations, gap %.4f, %+.4f\n", static_cast<long long>(solver.simulations()),
              plan_of(answer)->gap(), plan_of(answer)->seconds / plan_of(answer)->plain_seconds - 1);
  EXPECT_LT(plan_of(answer)->gap(), 0.05);
}

TEST(RematPlan, ReadsBackAsItWasWrittenAndExplainsItself) {
  const StepSimulator simulator(gpt_profile(3));
  PlanSolver solver(simulator);
  const RematPlan plan = std::get<RematPlan>(solver.solve(percent(plain_peak(simulator), 60)));
  EXPECT_EQ(RematPlan::from_json(plan.to_json()), plan);
  EXPECT_THROW(RematPlan::from_json("[]"), ConfigError);
  EXPECT_THAT(explain(simulator, plan), ::testing::AllOf(HasSubstr("gelu"), HasSubstr("alive at the peak")));
}

TEST(SolveExactly, RefusesWhatIsTooLarge) {
  const StepSimulator simulator(gpt_profile(2));
  EXPECT_THROW(solve_exactly(simulator, 1), ConfigError);
}

}  // namespace
}  // namespace snug
