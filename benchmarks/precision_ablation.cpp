// Prints the final loss of an MLP in FP32, in pure FP16, and with each ingredient of mixed precision added, and draws the curves.
//
// usage: precision_ablation [STEPS] [FILE.svg]

#include "tests/support/precision_ablation.h"

#include <cstdlib>
#include <fstream>
#include <iostream>

#include <fmt/format.h>

int main(int argc, char** argv) {
  using namespace snug::testing;
  const int steps = argc > 1 ? std::atoi(argv[1]) : 200;
  std::cout << "| recipe | loss after " << steps
            << " steps | zero gradients | weights that did not move |\n|---|---|---|---|\n";
  for (const auto& [recipe, name] : kRecipes) {
    const auto run = train_ablation(recipe, steps);
    std::cout << fmt::format("| {} | {:.4g} | {:.1f} % | {:.1f} % |\n", name, run.losses.back(),
                             100 * run.zero_gradients, 100 * run.unchanged_weights);
  }
}
