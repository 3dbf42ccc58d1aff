#pragma once
// Profiles for the planner's tests: random graphs from fixed seeds, and a GPT with realistic shares of bytes and time.

#include <algorithm>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "src/planner/profile.h"

namespace snug::testing {

class ProfileBuilder {
 public:
  int external(int64_t bytes) {
    profile_.storages.push_back({"external", bytes, plan::StorageKind::External});
    versions_.push_back(0);
    return count() - 1;
  }

  // A storage that the next operator writes first.
  int fresh(std::string name, int64_t bytes) {
    profile_.storages.push_back({std::move(name), bytes, plan::StorageKind::Activation});
    versions_.push_back(-1);
    return count() - 1;
  }

  // An operator that makes one storage of `bytes` and saves `saved` of what it reads, and its result if `saves_result`.
  int op(std::string name, double seconds, int64_t bytes, const std::vector<int>& reads, std::vector<int> saved = {},
         bool saves_result = false, int64_t workspace = 0, bool replayable = true) {
    const int result = fresh(name, bytes);
    if (saves_result) {
      saved.push_back(result);
    }
    add(std::move(name), seconds, {result}, reads, std::move(saved), workspace, replayable);
    return result;
  }

  void add(std::string name, double seconds, const std::vector<int>& writes, const std::vector<int>& reads,
           std::vector<int> saved, int64_t workspace = 0, bool replayable = true) {
    plan::Operator made{std::move(name), seconds, workspace, {}, {}, replayable};
    for (const int s : reads) {
      made.reads.push_back({s, versions_[at(s)]});
      last_reader_.resize(at(count()), -1);
      last_reader_[at(s)] = static_cast<int>(profile_.operators.size());
    }
    last_reader_.resize(at(count()), -1);
    for (const int s : writes) {
      made.writes.push_back({s, ++versions_[at(s)]});
      last_reader_[at(s)] = static_cast<int>(profile_.operators.size());
    }
    profile_.operators.push_back(std::move(made));
    saved_.push_back(std::move(saved));
    parameters_.push_back(0);
  }

  // The operator before has parameters, whose gradient its backward step makes and leaves.
  void parameters(int64_t bytes) { parameters_.back() = bytes; }

  // Backward: each operator takes twice its time, and a gradient of the bytes of its first result lives during the next
  // step.
  plan::Profile finish() {
    const int ops = static_cast<int>(profile_.operators.size());
    for (int i = 0; i < ops; ++i) {
      profile_.events.push_back({plan::EventKind::Forward, i});
      for (int s = 0; s < count(); ++s) {
        if (last_reader_[at(s)] == i && profile_.storages[at(s)].kind != plan::StorageKind::External) {
          profile_.events.push_back({plan::EventKind::Drop, s});
        }
      }
    }
    int64_t before = 0;
    for (int i = ops - 1; i >= 0; --i) {
      const plan::Operator& made = profile_.operators[at(i)];
      const int64_t gradient = profile_.storages[at(made.writes[0].storage)].bytes;
      for (const int s : saved_[at(i)]) {
        profile_.events.push_back({plan::EventKind::Unpack, s});
      }
      profile_.events.push_back({plan::EventKind::Allocate, 0, gradient + parameters_[at(i)]});
      profile_.events.push_back({plan::EventKind::Backward, static_cast<int>(profile_.backward.size())});
      profile_.backward.push_back({made.name + "_backward", 2 * made.seconds, parameters_[at(i)]});
      for (const int s : saved_[at(i)]) {
        profile_.events.push_back({plan::EventKind::Done, s});
      }
      profile_.events.push_back({plan::EventKind::Release, 0, before});
      before = gradient;
    }
    return std::move(profile_);
  }

  int count() const { return static_cast<int>(profile_.storages.size()); }

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }

  plan::Profile profile_;
  std::vector<int> versions_;
  std::vector<int> last_reader_;
  std::vector<std::vector<int>> saved_;
  std::vector<int64_t> parameters_;
};

// A chain of equal operators that save their inputs: with a tenth of the bytes its parts have to be rebuilt over
// several levels.
inline plan::Profile deep_chain(int length, int random_every = 0) {
  ProfileBuilder builder;
  int x = builder.external(16);
  for (int i = 0; i < length; ++i) {
    const bool is_random = random_every > 0 && i % random_every == 0;
    x = builder.op(is_random ? "bernoulli" : "op", 1, 16, {x}, {x}, false, 0, !is_random);
  }
  return builder.finish();
}

// Chains, skips, dense blocks, shared inputs, writes in place, random operators.
inline plan::Profile random_profile(uint32_t seed, int operators) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  ProfileBuilder builder;
  std::vector<int> made = {builder.external(100)};
  std::vector<bool> is_saved = {true};
  const int style = below(4);  // 0: chain, 1: skips, 2: dense, 3: U-Net
  while (builder.count() <= operators) {
    const int last = static_cast<int>(made.size()) - 1;
    std::vector<int> reads = {made.back()};
    if (style == 1 && last > 2 && below(3) == 0) {
      reads.push_back(made[static_cast<size_t>(last - 1 - below(2))]);
    } else if (style == 2) {
      for (int i = std::max(1, last - 3); i < last; ++i) {
        reads.push_back(made[static_cast<size_t>(i)]);
      }
    } else if (style == 3 && builder.count() > operators / 2 && operators - builder.count() < last) {
      reads.push_back(made[static_cast<size_t>(std::max(0, operators - builder.count()))]);
    }
    std::sort(reads.begin(), reads.end());
    reads.erase(std::unique(reads.begin(), reads.end()), reads.end());
    const double seconds = 1e-3 * (1 + below(20));
    const int64_t bytes = 16 * (1 + below(32));
    std::vector<int> saved;
    for (const int s : reads) {
      if (below(4) != 0) {
        saved.push_back(s);
        is_saved[static_cast<size_t>(s)] = true;
      }
    }
    const int kind = below(10);
    const int fresh = builder.op("op", seconds, bytes, reads, saved, below(4) == 0, 8 * below(20), kind != 0);
    is_saved.push_back(true);
    if (kind == 1 || kind == 2) {
      is_saved.back() = false;
      builder.add("in_place", 1e-3 * (1 + below(4)), {fresh}, {}, {fresh}, 8 * below(4));
    }
    made.push_back(fresh);
  }
  return builder.finish();
}

// The same step measured again: times are off by up to a fifth.
inline plan::Profile measured_again(plan::Profile profile, uint32_t seed) {
  std::mt19937 random(seed);
  for (plan::Operator& op : profile.operators) {
    op.seconds *= 0.8 + 0.4 * static_cast<double>(random() % 1000) / 1000;
  }
  for (plan::BackwardStep& step : profile.backward) {
    step.seconds *= 0.8 + 0.4 * static_cast<double>(random() % 1000) / 1000;
  }
  return profile;
}

// Batch 4 x 256 tokens, d = 256, FP32, 8 heads. A unit of time is a matmul of 1024 x 256 x 256; the others as measured
// on two cores (GELU by erf: by tanh LibTorch takes 1.9).
inline plan::Profile gpt_profile(int blocks) {
  constexpr int64_t kWidth = int64_t{1} << 20;
  constexpr int64_t kMatrix = int64_t{1} << 18;
  constexpr double kUnit = 1e-3;
  ProfileBuilder b;
  const auto linear = [&](const char* name, int64_t in, int64_t out, int x) {
    const int made = b.op(name, static_cast<double>(in * out) * kUnit, out * kWidth, {x}, {x});
    b.parameters(in * out * kMatrix);
    return made;
  };
  int x = b.external(kWidth);
  x = b.op("embedding", 0.1 * kUnit, kWidth, {x});
  b.parameters(2 * kMatrix);
  for (int i = 0; i < blocks; ++i) {
    const int n1 = b.op("layer_norm", 0.1 * kUnit, kWidth, {x}, {x});
    const int qkv = linear("addmm_qkv", 1, 3, n1);
    const int attention = b.op("sdpa", 3 * kUnit, kWidth, {qkv}, {qkv}, true);
    const int projected = linear("addmm_proj", 1, 1, attention);
    x = b.op("add", 0.05 * kUnit, kWidth, {x, projected});
    const int n2 = b.op("layer_norm", 0.1 * kUnit, kWidth, {x}, {x});
    const int wide = linear("addmm_fc", 1, 4, n2);
    const int bent = b.op("gelu", 0.35 * kUnit, 4 * kWidth, {wide}, {wide});
    const int narrow = linear("addmm_mlp", 4, 1, bent);
    x = b.op("add", 0.05 * kUnit, kWidth, {x, narrow});
  }
  const int last = b.op("layer_norm", 0.1 * kUnit, kWidth, {x}, {x});
  const int logits = linear("mm_head", 1, 1, last);
  const int logged = b.op("log_softmax", 0.5 * kUnit, kWidth, {logits}, {}, true);
  b.op("loss", 0.1 * kUnit, 4, {logged});
  return b.finish();
}

// Of its parameters' gradients.
inline int64_t gpt_gradient_bytes(int blocks) { return (int64_t{12} * blocks + 3) << 18; }

}  // namespace snug::testing
