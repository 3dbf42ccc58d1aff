// The program: a table of commands, and the only code that turns errors into exit statuses.

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "program/command.h"
#include "program/output.h"
#include "program/printable.h"
#include "program/signals.h"
#include "snug/core.h"
#include "src/core/nearest_name.h"

namespace {

constexpr std::array kCommands{&snug::cli::add_train,     &snug::cli::add_sample,  &snug::cli::add_report,
                               &snug::cli::add_snapshots, &snug::cli::add_formats, &snug::cli::add_launch,
                               &snug::cli::add_plan,      &snug::cli::add_compare};

int fail(int status, const std::string& message) {
  snug::cli::show(stderr, fmt::format("snug: {}\n", snug::cli::printable(message)));
  return status;
}

std::vector<std::string> known_words(const CLI::App& app) {
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands({})) {
    known.push_back(command->get_name());
  }
  for (const CLI::Option* option : app.get_options()) {
    known.push_back(option->get_name());
  }
  return known;
}

// An unknown word is named together with the nearest known word, or the value that the word may be a part of. Other
// errors have messages of their own.
std::string explain(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  const bool has_command = !app.get_subcommands().empty();
  const bool has_unknown_word =
      error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError) || (!has_command && argc > 1);
  if (!has_unknown_word) {
    return error.what();
  }
  const CLI::App& command = has_command ? *app.get_subcommands().front() : app;
  const auto known = known_words(command), unknown = command.remaining();
  const auto is_in = [](const auto& words, const std::string& word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  for (int i = has_command ? 2 : 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string word = argument.substr(0, argument.find('='));
    if (has_command ? !is_in(unknown, argument) : is_in(known, word)) {
      continue;
    }
    if (has_command && i > 2 && !word.starts_with('-')) {
      return fmt::format("'{1}' is a word too many; if it belongs to '{0}', write both as one word: '{0} {1}'",
                         argv[i - 1], argument);
    }
    return fmt::format("'{}' is unknown; did you mean '{}'? See snug {}--help", word, snug::nearest_name(word, known),
                       has_command ? command.get_name() + " " : "");
  }
  return error.what();
}

// A negative number may come after "--", as is the custom. CLI11 keeps the "--" among the words, and "--" is not
// necessary here.
int without_dashes(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "formats") {
    return argc;
  }
  return static_cast<int>(std::remove(argv + 2, argv + argc, std::string_view("--")) - argv);
}

}  // namespace

int main(int argc, char** argv) {
  snug::cli::ignore_signal(SIGXFSZ);
  CLI::App app("Trains models and batches that do not fit in memory, and trains them fast.", "snug");
  app.require_subcommand(1);
  app.option_defaults()->take_last();  // a flag given twice has the last value
  app.set_version_flag("--version", "snug " SNUG_VERSION);
  app.footer(
      "snug COMMAND --help tells more. Exit status: 0 done, 1 failed, 2 bad usage, 3 does not fit into memory, 130 "
      "interrupted.");
  for (const auto add : kCommands) {
    add(app);
  }
  try {
    app.parse(snug::cli::keep_program(without_dashes(argc, argv), argv), argv);
    return 0;
  } catch (const snug::cli::Interrupted& interrupted) {
    return interrupted.status();
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return fail(snug::cli::kBadUsage, explain(app, error, argc, argv));
  } catch (const snug::BudgetExceeded& error) {
    return fail(snug::cli::kDoesNotFit, error.what());
  } catch (const snug::ConfigError& error) {
    return fail(snug::cli::kBadUsage, error.what());
  } catch (const c10::OutOfMemoryError& error) {
    return fail(snug::cli::kDoesNotFit, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return fail(snug::cli::kFailed, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return fail(snug::cli::kDoesNotFit, "this machine has not enough memory");
  } catch (const std::exception& error) {
    return fail(snug::cli::kFailed, error.what());
  }
}
