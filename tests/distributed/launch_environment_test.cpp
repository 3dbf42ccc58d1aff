#include "src/distributed/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::launch_environment_test {
namespace {

using detail::Environment;
using detail::read_launch_environment;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string error_of(const Environment& environment) {
  try {
    read_launch_environment(environment);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchEnvironment, WithoutALauncherIsAGroupOfOne) {
  const auto place = read_launch_environment({{"PATH", "/bin"}, {"MASTER_PORT", "nonsense"}});
  EXPECT_EQ(place.rank, 0);
  EXPECT_EQ(place.size, 1);
  EXPECT_TRUE(place.host.empty());
}

TEST(LaunchEnvironment, ReadsTorchrun) {
  const auto place = read_launch_environment(
      {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "host"}, {"MASTER_PORT", "12345"}});
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.size, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.host, "host");
  EXPECT_EQ(place.port, 12345);
  EXPECT_FALSE(place.launcher_serves_store);
}

TEST(LaunchEnvironment, KnowsThatTorchrunsAgentServesTheStore) {
  const auto place = read_launch_environment({{"RANK", "0"},
                                              {"WORLD_SIZE", "2"},
                                              {"MASTER_ADDR", "host"},
                                              {"MASTER_PORT", "1"},
                                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                              {"TORCHELASTIC_RESTART_COUNT", "3"}});
  EXPECT_TRUE(place.launcher_serves_store);
  EXPECT_EQ(place.attempt, "3");
}

TEST(LaunchEnvironment, KnowsThatRankZeroServesTheStoreOfARestartWithoutAgents) {
  const auto place = read_launch_environment({{"RANK", "1"},
                                              {"WORLD_SIZE", "2"},
                                              {"MASTER_ADDR", "host"},
                                              {"MASTER_PORT", "1"},
                                              {"TORCHELASTIC_RESTART_COUNT", "1"}});
  EXPECT_FALSE(place.launcher_serves_store);
  EXPECT_EQ(place.attempt, "1");
}

TEST(LaunchEnvironment, ReadsOpenMpiOnOneMachine) {
  const auto place = read_launch_environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                              {"OMPI_COMM_WORLD_SIZE", "2"},
                                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.size, 2);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.host, "127.0.0.1");
  EXPECT_EQ(place.port, 29500);
}

TEST(LaunchEnvironment, GivesTwoJobsOnOneMachineTwoPorts) {
  const auto port = [](const char* job) {
    return read_launch_environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                    {"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                    {"PMIX_NAMESPACE", job}})
        .port;
  };
  EXPECT_EQ(port("3489071105"), port("3489071105"));
  EXPECT_NE(port("3489071105"), port("3489071106"));
}

TEST(LaunchEnvironment, ReadsMpich) {
  const auto place = read_launch_environment({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALNRANKS", "3"}});
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.size, 3);
  EXPECT_EQ(place.local_rank, 2);
  EXPECT_EQ(place.host, "127.0.0.1");
}

TEST(LaunchEnvironment, SaysNoAddressWhereRanksAreOnSeveralMachines) {
  const auto place = read_launch_environment(
      {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_TRUE(place.host.empty());
}

Environment slurm(const std::string& hosts) {
  return {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "3"},  {"SLURM_NTASKS", "4"},
          {"SLURM_LOCALID", "1"}, {"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NODELIST", hosts}};
}

TEST(LaunchEnvironment, ReadsSlurm) {
  const auto place = read_launch_environment(slurm("a,b"));
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.size, 4);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.host, "a");
  EXPECT_GE(place.port, 20000);
  EXPECT_LT(place.port, 30000);
}

TEST(LaunchEnvironment, UnfoldsSlurmsListOfHosts) {
  for (const auto& [list, first] : std::map<std::string, std::string>{{"node1", "node1"},
                                                                      {"node1,node2", "node1"},
                                                                      {"node[07-09,12]", "node07"},
                                                                      {"node[3,5]-ib,login", "node3-ib"},
                                                                      {"node[4]", "node4"},
                                                                      {"login,node[1-2]", "login"}}) {
    EXPECT_EQ(read_launch_environment(slurm(list)).host, first) << list;
  }
  EXPECT_THAT(error_of(slurm("node[1")), AllOf(HasSubstr("SLURM_JOB_NODELIST"), HasSubstr("MASTER_ADDR")));
}

TEST(LaunchEnvironment, TakesASlurmBatchScriptForOneProcess) {
  EXPECT_EQ(read_launch_environment({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).size, 1);
}

TEST(LaunchEnvironment, PrefersTheInnermostLauncherAndTheAddressThatIsSet) {
  Environment both = slurm("a,b");
  both.merge(Environment{
      {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "c"}, {"MASTER_PORT", "7"}});
  const auto place = read_launch_environment(both);
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.host, "c");
  EXPECT_EQ(place.port, 7);
}

TEST(LaunchEnvironment, NamesTheVariableThatIsWrong) {
  EXPECT_THAT(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              AllOf(HasSubstr("RANK is 2"), HasSubstr("WORLD_SIZE is 2")));
  EXPECT_THAT(error_of({{"RANK", "one"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is 'one'"));
  EXPECT_THAT(error_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is '-1'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE is '0'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2x"}}), HasSubstr("WORLD_SIZE is '2x'"));
  EXPECT_THAT(error_of({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}), HasSubstr("RANK is not set"));
  EXPECT_THAT(error_of({{"PMI_RANK", "0"}}), HasSubstr("PMI_SIZE is not set"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}),
              HasSubstr("MASTER_PORT is '70000'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}), HasSubstr("WORLD_SIZE is '99999999999'"));
}

}  // namespace
}  // namespace snug::launch_environment_test
