#pragma once
// What a launcher tells its processes by environment variables: which rank this one is, of how many, and where they
// meet. Known are torchrun (and `snug launch`), Open MPI, MPICH and its kin, and Slurm.
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

/// The place of this process. Launchers are asked in the order above, so that mpirun inside a Slurm job counts as
/// mpirun. MASTER_ADDR and MASTER_PORT come first under all of them; without them, Slurm's first host and, where all
/// ranks are on one machine, the loopback address are taken, with a port made of the job's id. With no launcher's
/// variables: a place of one.
/// Under Slurm only processes started by srun count as ranks: a batch script has SLURM_PROCID as well, though it is
/// alone. Throws ConfigError, naming the variable, for what is no number, out of range (rank >= size) or missing.
LaunchPlace read_launch_environment(const Environment& environment);

/// All variables of this process.
Environment process_environment();

}  // namespace snug
