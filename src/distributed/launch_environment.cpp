#include "src/distributed/launch_environment.h"

#include <charconv>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <unistd.h>

#include "snug/core.h"
#include "src/core/fnv1a.h"

namespace snug::detail {
namespace {

constexpr std::string_view kWhere = "init_process_group";
constexpr const char* kLoopback = "127.0.0.1";
constexpr int kDefaultPort = 29500;  // torchrun's default

class Variables {
 public:
  explicit Variables(const Environment& all) : all_(all) {}

  bool has(const std::string& name) const { return !text(name).empty(); }

  std::string text(const std::string& name) const {
    const auto found = all_.find(name);
    return found == all_.end() ? "" : found->second;
  }

  int number(const std::string& name, int least, int most) const {
    const std::string value = text(name);
    if (value.empty()) {
      throw ConfigError(
          fmt::format("{}: the variable {} is not set, but others of its launcher are; set it as well", kWhere, name));
    }
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < least || result > most) {
      throw ConfigError(fmt::format("{}: the variable {} is '{}'; it must be a number from {} to {}", kWhere, name,
                                    value, least, most));
    }
    return result;
  }

 private:
  const Environment& all_;
};

// A launcher's names for the same variables.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;  // nullptr: the launcher does not set the variable
  const char* job;         // identifies the job: two jobs on one machine should not meet
};
constexpr Launcher kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr};
constexpr Launcher kOpenMpi = {"Open MPI",
                               "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE",
                               "PMIX_NAMESPACE"};
constexpr Launcher kMpich = {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"};
constexpr Launcher kSlurm = {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_JOB_ID"};

std::optional<Launcher> find_launcher(const Variables& variables) {
  for (const Launcher& launcher : {kTorchrun, kOpenMpi, kMpich}) {
    if (variables.has(launcher.rank) || variables.has(launcher.size)) {
      return launcher;
    }
  }
  if (variables.has("SLURM_STEP_ID") || variables.has("SLURM_STEPID")) {
    return kSlurm;
  }
  return std::nullopt;
}

// A port below the ports that systems use for outgoing connections.
uint16_t port_of_job(std::string_view job) { return static_cast<uint16_t>(20000 + detail::fnv1a(job) % 10000); }

// "node[07-09,12],login1" -> "node07"
std::string first_host(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) {
    return list.substr(0, comma);
  }
  const size_t end = list.find_first_of(",-]", bracket);
  const size_t close = list.find(']', bracket);
  if (end == std::string::npos || close == std::string::npos) {
    throw ConfigError(
        fmt::format("{}: cannot read the first host of SLURM_JOB_NODELIST, '{}'; set MASTER_ADDR", kWhere, list));
  }
  const size_t comma_after = list.find(',', close);
  const size_t after = comma_after == std::string::npos ? list.size() : comma_after;
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1) +
         list.substr(close + 1, after - close - 1);
}

void find_address(const Variables& variables, const Launcher& launcher, LaunchPlace& place) {
  if (variables.has("MASTER_ADDR")) {
    place.host = variables.text("MASTER_ADDR");
  } else if (variables.has("SLURM_JOB_NODELIST") && launcher.name == kSlurm.name) {
    place.host = first_host(variables.text("SLURM_JOB_NODELIST"));
  } else if (launcher.local_size != nullptr && variables.text(launcher.local_size) == variables.text(launcher.size)) {
    place.host = kLoopback;
  }
  if (variables.has("MASTER_PORT")) {
    place.port = static_cast<uint16_t>(variables.number("MASTER_PORT", 1, 65535));
  } else if (launcher.job != nullptr && variables.has(launcher.job)) {
    place.port = port_of_job(variables.text(launcher.job));
  } else if (!place.host.empty() && launcher.name != kTorchrun.name) {
    place.port = kDefaultPort;
  }
}

}  // namespace

LaunchPlace read_launch_environment(const Environment& environment) {
  const Variables variables(environment);
  const auto launcher = find_launcher(variables);
  LaunchPlace place;
  if (!launcher) {
    return place;
  }
  constexpr int kMost = 1 << 24;
  place.launcher = launcher->name;
  place.size = variables.number(launcher->size, 1, kMost);
  place.rank = variables.number(launcher->rank, 0, kMost);
  if (place.rank >= place.size) {
    throw ConfigError(fmt::format("{}: the variable {} is {}, but {} is {}; ranks are counted from 0", kWhere,
                                  launcher->rank, place.rank, launcher->size, place.size));
  }
  // Without the variable, the rank is the local rank. The rank is right if all ranks are on one machine, and launchers
  // leave the variable out only on one machine.
  place.local_rank =
      variables.has(launcher->local_rank) ? variables.number(launcher->local_rank, 0, kMost) : place.rank;
  find_address(variables, *launcher, place);
  if (launcher->name == kTorchrun.name) {
    place.launcher_serves_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    place.attempt = variables.text("TORCHELASTIC_RESTART_COUNT");
  }
  return place;
}

Environment process_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) {
      result.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  return result;
}

}  // namespace snug::detail
