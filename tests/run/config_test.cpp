#include "program/run/config.h"

#include <cmath>
#include <set>
#include <string>
#include <variant>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "program/run/settings.h"
#include "snug/core.h"

namespace snug::config_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TrainConfig config_of(int64_t steps) { return {.data = {"text.txt"}, .out = "run", .steps = steps}; }

TEST(TrainConfig, PutsPartsOfTheRunWhereNoStepsAreGiven) {
  const TrainConfig config = config_of(200);
  EXPECT_EQ(config.warmup(), 10);
  EXPECT_EQ(config.validation_interval(), 10);
  EXPECT_EQ(config.snapshot_interval(), 20);
  const TrainConfig shortest = config_of(1);
  shortest.check();
  EXPECT_EQ(shortest.warmup(), 1);
}

TEST(TrainConfig, TakesZeroAsGiven) {
  TrainConfig config = config_of(200);
  config.warmup_steps = config.validate_every = config.snapshot_every = 0;
  config.check();
  EXPECT_EQ(config.warmup(), 0);
  EXPECT_EQ(config.validation_interval(), 0);
  EXPECT_EQ(config.snapshot_interval(), 0);
}

TEST(TrainConfig, RefusesNumbersOfStepsThatCannotBe) {
  const auto check = [](std::optional<int64_t> TrainConfig::* field, int64_t value) {
    TrainConfig config = config_of(200);
    config.*field = value;
    config.check();
  };
  check(&TrainConfig::warmup_steps, 200);
  EXPECT_THAT([&] { check(&TrainConfig::warmup_steps, 201); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("warmup_steps 201"), HasSubstr("200 steps"))));
  EXPECT_THAT([&] { check(&TrainConfig::warmup_steps, -1); },
              ThrowsMessage<ConfigError>(HasSubstr("warmup_steps is -1")));
  EXPECT_THAT([&] { check(&TrainConfig::validate_every, -1); },
              ThrowsMessage<ConfigError>(HasSubstr("validate_every is -1")));
  EXPECT_THAT([&] { check(&TrainConfig::snapshot_every, -1); },
              ThrowsMessage<ConfigError>(HasSubstr("snapshot_every is -1")));
}

TEST(TrainConfig, GuardsThePrecisionThatAutoChoosesUnlessToldNotTo) {
  TrainConfig config = config_of(200);
  EXPECT_EQ(config.guard_patience(), 0);
  config.precision = Precision::Auto;
  EXPECT_EQ(config.guard_patience(), PrecisionGuardOptions::kPatienceOfAuto);
  EXPECT_EQ(TrainConfig::from_settings(config.to_settings(), "run").guard_patience(), config.guard_patience());
  config.precision_guard = 0;
  EXPECT_EQ(TrainConfig::from_settings(config.to_settings(), "run").guard_patience(), 0);
}

TEST(TrainConfig, RefusesFp32ReductionsWhereAllIsFp32) {
  TrainConfig config = config_of(200);
  config.fp32_reductions = true;
  EXPECT_THAT([&] { config.check(); }, ThrowsMessage<ConfigError>(HasSubstr("fp32_reductions changes nothing")));
  config.precision = Precision::BFloat16;
  config.check();
  EXPECT_TRUE(TrainConfig::from_settings(config.to_settings(), "run").fp32_reductions);
}

TEST(TrainConfig, ComesBackFromItsSettings) {
  TrainConfig config = config_of(200);
  config.snapshot_every = 0;
  const LogValues settings = config.to_settings();
  const TrainConfig again = TrainConfig::from_settings(settings, "run");
  EXPECT_EQ(again.to_settings(), settings);
  EXPECT_EQ(again.warmup(), 10);
  EXPECT_EQ(again.snapshot_interval(), 0);
}

TEST(TrainConfig, KeepsPathsOfAnyBytesInSettingsThatAreText) {
  TrainConfig config = config_of(200);
  config.data = {"plain/path with %41 and ü.txt", "r\xe9sum\xe9 %.txt", "two\nlines", "percent-encoded:x", "last"};
  const LogValues settings = config.to_settings();
  EXPECT_EQ(std::get<std::string>(settings.front().second),
            "plain/path with %41 and ü.txt\npercent-encoded:r%e9sum%e9%20%25.txt\npercent-encoded:two%0alines\n"
            "percent-encoded:percent-encoded:x\nlast");
  EXPECT_EQ(TrainConfig::from_settings(settings, "run").data, config.data);
}

TEST(TrainConfig, RefusesSettingsWhosePathsAreNotAsWritten) {
  LogValues settings = config_of(200).to_settings();
  for (const char* path : {"percent-encoded:a%", "percent-encoded:a%4", "percent-encoded:%zz", "percent-encoded:%-1"}) {
    settings.front().second = path;
    EXPECT_THAT([&] { TrainConfig::from_settings(settings, "run"); }, ThrowsMessage<CorruptFile>(HasSubstr(path)));
  }
}

TEST(Settings, AreAllInTheLogOnceAndComeBackFromIt) {
  TrainConfig config = config_of(200);
  config.data = {"one", "two words", std::string("line\nbreak")};
  config.precision = Precision::BFloat16;
  config.weights = Weights::Low;
  config.memory = Bytes(123456789);
  config.offload = config.shard_optimizer = true;
  config.optimizer = OptimizerChoice::AdamW8bit;
  config.lr = 0.1 + 0.2;
  config.seed = 7;
  const LogValues saved = config.to_settings();
  const TrainConfig loaded = TrainConfig::from_settings(saved, config.out);
  EXPECT_EQ(loaded.to_settings(), saved);
  EXPECT_EQ(loaded.data, config.data);
  EXPECT_EQ(loaded.lr, config.lr);
  std::set<std::string> names, flags;
  for (const Setting& setting : settings()) {
    EXPECT_TRUE(names.insert(setting.name).second) << setting.name;
    EXPECT_TRUE(*setting.flag == '\0' || flags.insert(setting.flag).second) << setting.flag;
    EXPECT_EQ(*setting.flag == '\0', *setting.help == '\0') << setting.name;
  }
  EXPECT_EQ(names.size(), saved.size());
}

TEST(Settings, OptimizersHaveNamesAndSayWhatTheyGoWith) {
  for (const char* name : {"adamw", "adamw8bit", "adam", "sgd", "muon"}) {
    EXPECT_EQ(to_string(optimizer_from_string(name)), name);
  }
  EXPECT_THAT([] { optimizer_from_string("lion"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("lion"), HasSubstr("muon"))));
  TrainConfig config = config_of(200);
  config.data = {"text"};
  config.out = "run";
  config.optimizer = OptimizerChoice::AdamW8bit;
  EXPECT_FALSE(config.splits_weights());
  config.weights = Weights::Low;
  config.precision = Precision::BFloat16;
  config.check();
  EXPECT_TRUE(config.splits_weights());
  config.precision = Precision::Float16;
  EXPECT_FALSE(config.splits_weights()) << "a byte of correction is for BF16";
  config.optimizer = OptimizerChoice::Muon;
  config.check();
  config.model = "model.pt2";
  EXPECT_THAT([&] { config.check(); }, ThrowsMessage<ConfigError>(HasSubstr("embeddings")));
}

TEST(Settings, RefuseALogThatLacksOneOrHasOneOfAnotherType) {
  for (size_t i = 0; i < settings().size(); ++i) {
    LogValues lacking = config_of(200).to_settings(), wrong = lacking;
    const std::string name = lacking[i].first;
    lacking.erase(lacking.begin() + static_cast<std::ptrdiff_t>(i));
    if (settings()[i].is_later) {
      EXPECT_EQ(TrainConfig::from_settings(lacking, "run").to_settings(), config_of(200).to_settings()) << name;
    } else {
      EXPECT_THAT([&] { TrainConfig::from_settings(lacking, "run"); }, ThrowsMessage<CorruptFile>(HasSubstr(name)));
    }
    wrong[i].second = std::holds_alternative<bool>(wrong[i].second) ? LogValue(1.5) : LogValue(true);
    EXPECT_THAT([&] { TrainConfig::from_settings(wrong, "run"); }, ThrowsMessage<CorruptFile>(HasSubstr(name)));
  }
}

TEST(ScaleLearningRate, MultipliesByTheRatioOfTheBatchesOrItsRoot) {
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.1, 1024, 256, LrScaling::None), 0.1);
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.1, 1024, 256, LrScaling::Linear), 0.4);
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.1, 1024, 256, LrScaling::Sqrt), 0.2);
}

TEST(ScaleLearningRate, LowersTheRateForSmallerBatchesAndKeepsItForTheSame) {
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.4, 16, 64, LrScaling::Linear), 0.1);
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.4, 16, 64, LrScaling::Sqrt), 0.2);
  EXPECT_EQ(scale_learning_rate(0.3, 48, 48, LrScaling::Linear), 0.3);
  EXPECT_EQ(scale_learning_rate(0.3, 48, 48, LrScaling::Sqrt), 0.3);
}

TEST(ScaleLearningRate, RejectsWhatIsNoBatchOrNoRate) {
  const auto scaled = [](double lr, int64_t batch, int64_t base) {
    return [=] { (void)scale_learning_rate(lr, batch, base, LrScaling::None); };
  };
  EXPECT_THAT(scaled(0.1, 0, 64), ThrowsMessage<ConfigError>(HasSubstr("batch is 0")));
  EXPECT_THAT(scaled(0.1, 64, -2), ThrowsMessage<ConfigError>(HasSubstr("base_batch is -2")));
  EXPECT_THAT(scaled(0.0, 64, 64), ThrowsMessage<ConfigError>(HasSubstr("base_lr is 0")));
  EXPECT_THAT(scaled(std::nan(""), 64, 64), ThrowsMessage<ConfigError>(HasSubstr("base_lr is nan")));
  EXPECT_THROW((void)scale_learning_rate(0.1, 64, 64, static_cast<LrScaling>(17)), ConfigError);
}

}  // namespace
}  // namespace snug::config_test
