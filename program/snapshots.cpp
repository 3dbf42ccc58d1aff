// snug snapshots: lists the snapshots of a run, and says whether each file of the snapshots is whole.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "program/command.h"
#include "program/printable.h"
#include "program/run/trainer.h"
#include "program/run_folder.h"
#include "snug/core.h"
#include "snug/snapshot.h"

namespace snug::cli {
namespace {

struct SnapshotsFlags {
  std::string run = "run";
  bool repair = false;
};

void list_snapshots(const SnapshotsFlags& flags) {
  read_run(flags.run);  // throws if no run exists
  SnapshotStore store(Trainer::snapshots_path(flags.run));
  const std::vector<SnapshotStore::Snapshot> all = store.inspect();
  fmt::print("{:>10} {:>12}\n", "step", "bytes");
  int64_t damaged = 0;
  for (const SnapshotStore::Snapshot& one : all) {
    std::string state = "whole";
    if (!one.damage.empty()) {
      state = "damaged: " + printable(one.damage);
      if (flags.repair) {
        state += fmt::format("; it is {} now", store.set_aside(one.step).filename().string());
      }
      ++damaged;
    }
    fmt::print("{:>10} {:>12}  {}\n", one.step, Bytes(one.bytes).str(), state);
  }
  if (damaged > 0 && !flags.repair) {
    throw Error(fmt::format(
        "snapshots: {} of {} {} damaged; snug train --resume passes over {}, and --repair sets {} "
        "aside now",
        damaged, all.size(), damaged == 1 ? "is" : "are", damaged == 1 ? "it" : "them", damaged == 1 ? "it" : "them"));
  }
}

}  // namespace

void add_snapshots(CLI::App& app) {
  CLI::App* command = app.add_subcommand("snapshots", "List the snapshots of a run, and check every file of theirs");
  const auto flags = std::make_shared<SnapshotsFlags>();
  add_run(*command, flags->run);
  command->add_flag("--repair", flags->repair, "Rename damaged ones to *.damaged, so that none goes on from them");
  command->callback([flags] { list_snapshots(*flags); });
}

}  // namespace snug::cli
