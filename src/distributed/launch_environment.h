#pragma once
// The place of a process in a job, from a launcher's environment variables: the rank, the number of ranks, and the
// ranks' meeting place. Supported are torchrun (and `snug launch`), Open MPI, MPICH and its relatives, and Slurm.
//
//   const auto place = read_launch_environment(
//       {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}});

#include <cstdint>
#include <map>
#include <string>

namespace snug::detail {

/// Variable -> value.
using Environment = std::map<std::string, std::string>;

struct LaunchPlace {
  int rank = 0;                          ///< 0 <= rank < size
  int size = 1;                          ///< number of processes
  int local_rank = 0;                    ///< the rank among the ranks of this machine: the number of the GPU to use
  std::string host = {};                 ///< the host of rank 0; empty: not given
  uint16_t port = 0;                     ///< 0: not given
  bool launcher_serves_store = false;    ///< torchrun's agent listens at host:port itself, so rank 0 must not listen
  std::string attempt = {};              ///< torchrun's number of restarts, "" if torchrun does not restart
  std::string launcher = "no launcher";  ///< for messages
};

/// The place of this process.
/// - Launchers are tried in the order above, so mpirun inside a Slurm job counts as mpirun.
/// - MASTER_ADDR and MASTER_PORT have priority under all launchers. Without them, the host is Slurm's first host or, if
///   all ranks are on one machine, the loopback address, and the port is made from the job's id.
/// - Without any launcher's variables: a place of one process.
/// - Under Slurm only processes started by srun count as ranks. A batch script also has SLURM_PROCID, although the
///   script is a single process.
/// Throws ConfigError, naming the variable, if a value is not a number, is out of range (rank >= size) or is missing.
LaunchPlace read_launch_environment(const Environment& environment);

/// All variables of this process.
Environment process_environment();

}  // namespace snug::detail
