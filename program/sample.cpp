// snug sample: lets the model of a run write.

#include <memory>
#include <string>

#include <fmt/format.h>

#include "program/command.h"
#include "program/models/sample_text.h"
#include "program/run_folder.h"
#include "src/core/file_system.h"

namespace snug::cli {
namespace {

struct SampleFlags {
  std::string run = "run";
  std::string prompt = "\n";
  int64_t count = 500;
  double temperature = 0.8;
  int64_t top_k = 0;
  int64_t seed = 1;
};

void run_sample(const SampleFlags& flags) {
  const Gpt model = load_model(flags.run);
  const std::string text = flags.prompt + sample_text(model, flags.prompt,
                                                      {.count = flags.count,
                                                       .temperature = flags.temperature,
                                                       .top_k = flags.top_k,
                                                       .seed = static_cast<uint64_t>(flags.seed)});
  fmt::print("{}\n", text);
  detail::replace_file(sample_path(flags.run), text);
}

}  // namespace

void add_sample(CLI::App& app) {
  CLI::App* command = app.add_subcommand("sample", "Let a trained model write text");
  const auto flags = std::make_shared<SampleFlags>();
  add_run(*command, flags->run);
  command->add_option("--prompt", flags->prompt, "Text to go on from (default: a line break)")->type_name("TEXT");
  command->add_option("--count", flags->count, "Bytes to write (default 500)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--temperature", flags->temperature, "Below 1 plays safe, 0 takes the likeliest (default 0.8)")
      ->type_name("X");
  command->add_option("--top-k", flags->top_k, "Choose among the so many likeliest bytes; 0: all (default)")
      ->type_name("N");
  command->add_option("--seed", flags->seed, "Of the random choices (default 1)")
      ->type_name("N")
      ->check(CLI::NonNegativeNumber);
  command->callback([flags] { run_sample(*flags); });
}

}  // namespace snug::cli
