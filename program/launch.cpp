// snug launch: starts a program once per rank on this machine, which may be one of several machines, with torchrun's
// variables. Watches the ranks: output line by line, the first rank that fails, signals.

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "program/command.h"
#include "program/output.h"
#include "program/signals.h"
#include "snug/core.h"

namespace snug::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGrace = std::chrono::seconds(10);  // from SIGTERM to SIGKILL
constexpr auto kUntilOthersNotice = std::chrono::seconds(3);
constexpr int kPollMilliseconds = 50;
constexpr int kNotFound = 127;  // the status that shells use
constexpr size_t kTokenDigits = 32;

struct LaunchFlags {
  int ranks = 1;  // on this machine
  int nodes = 1;
  int node_rank = 0;
  int max_restarts = 0;
  int port = 0;
  std::string rendezvous = {};
};

struct Address {
  std::string host = "127.0.0.1";
  int port = 0;
};

std::vector<char*>& program() {
  static std::vector<char*> words;
  return words;
}

// Shows the content of a pipe, each line after the rank's name.
class Stream {
 public:
  Stream(int descriptor, std::FILE* to, int rank) : descriptor_(descriptor), to_(to), rank_(rank) {
    ::fcntl(descriptor_, F_SETFL, O_NONBLOCK);
  }
  ~Stream() { ::close(descriptor_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  pollfd poll_entry() const { return {.fd = is_open_ ? descriptor_ : -1, .events = POLLIN, .revents = 0}; }

  // Copies once: a rank that writes faster than the launcher shows must not keep the launcher busy. Returns the number
  // of bytes.
  size_t copy_some() {
    std::array<char, 1 << 16> buffer;
    const ssize_t count = ::read(descriptor_, buffer.data(), buffer.size());
    is_open_ = is_open_ && count != 0;
    if (count <= 0) {
      return 0;
    }
    partial_.append(buffer.data(), static_cast<size_t>(count));
    show_lines();
    if (partial_.size() > kLongestLine) {
      end_line();
    }
    return static_cast<size_t>(count);
  }

  // Shows the rest that an ended rank has left in the pipe. Does not wait for a process that the rank has left behind
  // and that writes on.
  void finish() {
    const auto most = static_cast<size_t>(std::max(0, ::fcntl(descriptor_, F_GETPIPE_SZ)));
    size_t copied = 0;
    for (size_t count = 0; copied <= most && (count = copy_some()) > 0; copied += count) {
    }
    if (!partial_.empty()) {
      end_line();
    }
  }

 private:
  static constexpr size_t kLongestLine = size_t{1} << 20;  // a longer line is shown in pieces

  void end_line() {
    partial_ += '\n';
    show_lines();
  }

  void show_lines() {
    size_t start = 0;
    std::string lines;
    for (size_t end = 0; (end = partial_.find('\n', start)) != std::string::npos; start = end + 1) {
      lines += fmt::format("[{}] {}\n", rank_, std::string_view(partial_).substr(start, end - start));
    }
    partial_.erase(0, start);
    show(to_, lines);
  }

  int descriptor_;
  std::FILE* to_;
  int rank_;
  bool is_open_ = true;
  std::string partial_;
};

struct Rank {
  int number = 0;
  pid_t pid = -1;
  bool is_alive = true;
  std::vector<std::unique_ptr<Stream>> streams;
};

[[noreturn]] void fail_with_errno(const char* what) {
  throw Error(fmt::format("launch: cannot {}: {}", what, std::generic_category().message(errno)));
}

// Another program may take the port before rank 0 listens, but the system gives ports in turn.
int find_free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const plain = reinterpret_cast<sockaddr*>(&address);
  if (socket < 0 || ::bind(socket, plain, length) != 0 || ::getsockname(socket, plain, &length) != 0) {
    fail_with_errno("find a free port");
  }
  ::close(socket);
  return ntohs(address.sin_port);
}

Address meeting_place(const LaunchFlags& flags) {
  if (flags.rendezvous.empty()) {
    return {.port = flags.port != 0 ? flags.port : find_free_port()};
  }
  const size_t colon = flags.rendezvous.rfind(':');
  const size_t digits = colon == std::string::npos ? flags.rendezvous.size() : colon + 1;
  const char* const end = flags.rendezvous.data() + flags.rendezvous.size();
  Address address = {.host = flags.rendezvous.substr(0, colon)};
  const auto read = std::from_chars(flags.rendezvous.data() + digits, end, address.port);
  if (address.host.empty() || read.ec != std::errc() || read.ptr != end || address.port < 1 || address.port > 65535) {
    throw ConfigError(
        fmt::format("launch: --rendezvous is '{}'; give HOST:PORT, the host of node 0 and a port that is free there",
                    flags.rendezvous));
  }
  return address;
}

void check(const LaunchFlags& flags) {
  if (flags.node_rank >= flags.nodes) {
    throw ConfigError(
        fmt::format("launch: --node-rank is {} of {} nodes; nodes are counted from 0", flags.node_rank, flags.nodes));
  }
  if (flags.port != 0 && !flags.rendezvous.empty()) {
    throw ConfigError("launch: --port and --rendezvous both say where the ranks meet; leave one of them out");
  }
  if (flags.nodes > 1 && flags.rendezvous.empty()) {
    throw ConfigError(
        "launch: with several nodes give --rendezvous HOST:PORT, the host of node 0 and a port that is free there");
  }
}

std::string random_token() {
  std::string token;
  std::random_device random;
  while (token.size() < kTokenDigits) {
    token += fmt::format("{:08x}", random());
  }
  return token;
}

void set_variables(const LaunchFlags& flags, int rank, const Address& meeting, int attempt) {
  const auto set = [](const char* name, int value) { ::setenv(name, std::to_string(value).c_str(), 1); };
  set("RANK", rank);
  set("LOCAL_RANK", rank - flags.node_rank * flags.ranks);
  set("WORLD_SIZE", flags.ranks * flags.nodes);
  set("LOCAL_WORLD_SIZE", flags.ranks);
  set("MASTER_PORT", meeting.port);
  set("TORCHELASTIC_RESTART_COUNT", attempt);
  ::setenv("MASTER_ADDR", meeting.host.c_str(), 1);
  // If every rank uses all cores, the ranks together are slower than one rank.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  ::setenv("OMP_NUM_THREADS", std::to_string(std::max(1, cores / flags.ranks)).c_str(), /*overwrite=*/0);
}

Rank start(const LaunchFlags& flags, int rank, const Address& meeting, int attempt) {
  std::array<int, 2> out = {};
  std::array<int, 2> err = {};
  if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) {
    fail_with_errno("make a pipe");
  }
  const pid_t launcher = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    fail_with_errno("start a process");
  }
  if (pid == 0) {
    ::setpgid(0, 0);  // the terminal's Ctrl-C comes only to the launcher, which passes the signal on once
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // no rank outlives the launcher
    if (::getppid() != launcher) {
      ::_exit(kFailed);
    }
    ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    set_variables(flags, rank, meeting, attempt);
    restore_ignored_signals();
    ::execvp(program().front(), program().data());
    ::dprintf(STDERR_FILENO, "snug: cannot start '%s': %s\n", program().front(), std::strerror(errno));
    ::_exit(kNotFound);
  }
  ::setpgid(pid, pid);  // here too, because a signal may come before the child has called setpgid
  ::close(out[1]);
  ::close(err[1]);
  Rank result{.number = rank, .pid = pid};
  result.streams.push_back(std::make_unique<Stream>(out[0], stdout, rank));
  result.streams.push_back(std::make_unique<Stream>(err[0], stderr, rank));
  return result;
}

std::string how_it_ended(int status) {
  return WIFSIGNALED(status)
             ? fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)))
             : fmt::format("ended with status {}", WEXITSTATUS(status));
}

void send_to_all(const std::vector<Rank>& ranks, int signal) {
  for (const Rank& rank : ranks) {
    ::kill(-rank.pid, signal);  // an ended rank may have left children
  }
}

void wait_for_output(const std::vector<Rank>& ranks) {
  std::vector<pollfd> entries;
  for (const Rank& rank : ranks) {
    for (const auto& stream : rank.streams) {
      entries.push_back(stream->poll_entry());
    }
  }
  ::poll(entries.data(), entries.size(), kPollMilliseconds);
  for (const Rank& rank : ranks) {
    for (const auto& stream : rank.streams) {
      stream->copy_some();
    }
  }
}

// Describes how the first failed rank failed, "rank 2 ..."; empty: no rank failed, or a signal came.
std::string run_all(std::vector<Rank>& ranks) {
  std::string failure;
  int passed_on = 0;  // number of signals passed on
  auto deadline = Clock::time_point::max();
  const auto any_alive = [&] {
    return std::any_of(ranks.begin(), ranks.end(), [](const Rank& r) { return r.is_alive; });
  };
  while (any_alive()) {
    wait_for_output(ranks);
    if (passed_on < stops()) {
      ++passed_on;
      send_to_all(ranks, last_stop());
      if (passed_on == 2) {  // the second signal asks for an end at once
        deadline = Clock::now() + kGrace;
      }
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      int status = 0;
      if (!ranks[i].is_alive || ::waitpid(ranks[i].pid, &status, WNOHANG) != ranks[i].pid) {
        continue;
      }
      ranks[i].is_alive = false;
      if (status != 0 && failure.empty() && passed_on == 0) {
        failure = fmt::format("rank {} {}", ranks[i].number, how_it_ended(status));
        send_to_all(ranks, SIGTERM);
        deadline = Clock::now() + kGrace;
      }
    }
    if (Clock::now() > deadline) {
      send_to_all(ranks, SIGKILL);
      deadline = Clock::time_point::max();
    }
  }
  send_to_all(ranks, SIGKILL);  // processes left behind by the ranks
  for (const Rank& rank : ranks) {
    for (const auto& stream : rank.streams) {
      stream->finish();
    }
  }
  return failure;
}

void run_launch(const LaunchFlags& flags) {
  if (program().empty()) {
    throw ConfigError("launch: no program; give it after --, as in snug launch -n 2 -- snug train --data corpus");
  }
  check(flags);
  program().push_back(nullptr);
  catch_stops(SecondStop::IsCounted);
  ignore_signal(SIGPIPE);
  if (flags.nodes == 1) {  // the user gives the token to the ranks of several machines
    ::setenv("SNUG_JOB_TOKEN", random_token().c_str(), /*overwrite=*/0);
  }
  for (int attempt = 0;; ++attempt) {
    const Address meeting = meeting_place(flags);
    std::vector<Rank> ranks;
    for (int local = 0; local < flags.ranks; ++local) {
      ranks.push_back(start(flags, flags.node_rank * flags.ranks + local, meeting, attempt));
    }
    const std::string failure = run_all(ranks);
    if (const int signal = last_stop(); signal != 0) {
      throw Interrupted{signal};
    }
    if (failure.empty()) {
      return;
    }
    if (attempt == flags.max_restarts) {
      throw Error(fmt::format("launch: {}; the others were stopped", failure));
    }
    show(stderr,
         fmt::format("snug: launch: {}; starting all again, {} of {}\n", failure, attempt + 1, flags.max_restarts));
    if (flags.nodes > 1) {
      // The other machines' ranks have lost these ranks, and are started again as well.
      std::this_thread::sleep_for(kUntilOthersNotice);
    }
  }
}

}  // namespace

int keep_program(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "launch") {
    return argc;
  }
  char** const end = argv + argc;
  char** const dashes = std::find(argv, end, std::string_view("--"));
  if (dashes != end) {
    program().assign(dashes + 1, end);
  }
  return static_cast<int>(dashes - argv);
}

void add_launch(CLI::App& app) {
  CLI::App* command = app.add_subcommand("launch", "Start a program on several ranks");
  const auto flags = std::make_shared<LaunchFlags>();
  command->add_option("-n,--ranks", flags->ranks, "How many processes on this machine (default 1)")
      ->type_name("N")
      ->check(CLI::Range(1, 4096).description(""));
  command
      ->add_option("--max-restarts", flags->max_restarts, "If a rank fails, start all again, so many times (default 0)")
      ->type_name("N")
      ->check(CLI::Range(0, 1 << 20).description(""));
  command->add_option("--port", flags->port, "Where the ranks meet, MASTER_PORT (default: a free one)")
      ->type_name("PORT")
      ->check(CLI::Range(1, 65535).description(""));
  command->add_option("--nodes", flags->nodes, "How many machines; the same command runs on each (default 1)")
      ->type_name("N")
      ->check(CLI::Range(1, 4096).description(""));
  command->add_option("--node-rank", flags->node_rank, "Which of them this is, counted from 0")
      ->type_name("I")
      ->check(CLI::Range(0, 4095).description(""));
  command->add_option("--rendezvous", flags->rendezvous, "Where the ranks meet: node 0 and a port that is free there")
      ->type_name("HOST:PORT");
  command->footer(
      "What to start follows --, as in snug launch -n 4 -- ./train --lr 0.1. Each process gets torchrun's variables:\n"
      "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; and OMP_NUM_THREADS, if not set, "
      "so\n"
      "that all share the cores; and SNUG_JOB_TOKEN, if not set, at random: by it ranks of other jobs are told apart\n"
      "(with --nodes set it yourself). Lines of output begin with the rank. If a rank fails, it is named, and the\n"
      "others are stopped.");
  command->callback([flags] { run_launch(*flags); });
}

}  // namespace snug::cli
