// The program: a table of commands, and one place where errors become exit statuses.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "cli/command.h"
#include "snug/core/error.h"
#include "snug/core/nearest_name.h"

namespace {

constexpr std::array kCommands{&snug::cli::add_train, &snug::cli::add_sample, &snug::cli::add_report};

int fail(int status, const std::string& message) {
  fmt::print(stderr, "snug: {}\n", message);
  return status;
}

// CLI11 names the argument that it does not know; the nearest known one is added here.
std::string with_suggestion(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  std::string message = error.what();
  const CLI::App* command = app.get_subcommands().empty() ? &app : app.get_subcommands().front();
  std::vector<std::string> known;
  if (command == &app) {
    for (const CLI::App* each : app.get_subcommands({})) {
      known.push_back(each->get_name());
    }
  }
  for (const CLI::Option* option : command->get_options()) {
    known.push_back(option->get_name());
  }
  for (int i = 1; i < argc; ++i) {
    const std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
    const bool is_known = std::find(known.begin(), known.end(), word) != known.end() || word == command->get_name();
    if (!is_known && message.find(word) != std::string::npos) {
      return fmt::format("'{}' is unknown; did you mean '{}'? See snug {}--help", word, snug::nearest_name(word, known),
                         command == &app ? "" : command->get_name() + " ");
    }
  }
  return message;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains models and batches that do not fit in memory, and trains them fast.", "snug");
  app.require_subcommand(1);
  app.set_version_flag("--version", "snug " SNUG_VERSION);
  app.footer("snug COMMAND --help tells more. Exit status: 0 done, 1 failed, 2 bad usage, 3 does not fit into memory.");
  for (const auto add : kCommands) {
    add(app);
  }
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return fail(snug::cli::kBadUsage, with_suggestion(app, error, argc, argv));
  } catch (const snug::BudgetExceeded& error) {
    return fail(snug::cli::kDoesNotFit, error.what());
  } catch (const snug::ConfigError& error) {
    return fail(snug::cli::kBadUsage, error.what());
  } catch (const c10::Error& error) {
    return fail(snug::cli::kFailed, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(snug::cli::kFailed, error.what());
  }
}
