#pragma once
// The place of a process in a job, as a launcher gives it in environment variables: the rank, the number of ranks, and
// their meeting place. Supported are torchrun (and `snug launch`), Open MPI, MPICH and its relatives, and Slurm.
//
//   const auto place = snug::read_launch_environment(
//       {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}});

#include <cstdint>
#include <map>
#include <string>

namespace snug {

/// Variable -> value.
using Environment = std::map<std::string, std::string>;

struct LaunchPlace {
  int rank = 0;                          ///< 0 <= rank < size
  int size = 1;                          ///< number of processes
  int local_rank = 0;                    ///< the rank among those of this machine: which GPU to take
  std::string host = {};                 ///< where rank 0 is; empty: not said
  uint16_t port = 0;                     ///< 0: not said
  bool launcher_serves_store = false;    ///< torchrun's agent listens at host:port itself, so that rank 0 must not
  std::string attempt = {};              ///< torchrun's number of restarts, "" if it does not restart
  std::string launcher = "no launcher";  ///< for messages
};

/// The place of this process.
/// - Launchers are tried in the order above, so mpirun inside a Slurm job counts as mpirun.
/// - MASTER_ADDR and MASTER_PORT have priority under all launchers. Without them, the host is Slurm's first host or, if
///   all ranks are on one machine, the loopback address, and the port is made from the job's id.
/// - Without any launcher's variables: a place of one process.
/// - Under Slurm only processes started by srun count as ranks. A batch script also has SLURM_PROCID, although it is
///   alone.
/// Throws ConfigError, naming the variable, if a value is no number, is out of range (rank >= size) or is missing.
LaunchPlace read_launch_environment(const Environment& environment);

/// All variables of this process.
Environment process_environment();

}  // namespace snug
