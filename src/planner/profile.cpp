#include "src/planner/profile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/versioned_json.h"

namespace snug::plan {
namespace {

using Json = detail::OrderedJson;

constexpr detail::JsonKind kProfileJson{
    .key = "snug_step_profile", .type = "Profile", .noun = "profile", .cure = "take the profile again"};
constexpr std::array<const char*, 3> kKindNames = {"external", "activation", "pinned"};
constexpr std::array<const char*, 2> kLinkNames = {"file", "pinned"};
constexpr std::array<const char*, 7> kEventNames = {"forward",  "drop",    "unpack",  "done",
                                                    "allocate", "release", "backward"};

template <class Enum, size_t N>
Enum read_enum(const std::array<const char*, N>& names, const Json& value) {
  const std::string& name = value.get_ref<const std::string&>();
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) {
      return static_cast<Enum>(i);
    }
  }
  throw ConfigError(fmt::format("Profile: unknown word \"{}\"; take the profile again", name));
}

Json values_json(const std::vector<Value>& values) {
  Json result = Json::array();
  for (const Value& value : values) {
    result.push_back({value.storage, value.version});
  }
  return result;
}

std::vector<Value> read_values(const Json& json) {
  std::vector<Value> values;
  for (const Json& value : json) {
    values.push_back({detail::whole_number<int>(value.at(0)), detail::whole_number<int>(value.at(1))});
  }
  return values;
}

// Goes through the events in order, and throws ConfigError at the first contradiction.
class Checker {
 public:
  explicit Checker(const Profile& profile)
      : profile_(profile),
        version_(profile.storages.size(), -1),
        held_(profile.storages.size(), false),
        uses_(profile.storages.size(), 0) {
    for (size_t s = 0; s < version_.size(); ++s) {
      require(profile_.storages[s].bytes >= 0, "storage {} has {} bytes", s, profile_.storages[s].bytes);
      add_to_all(profile_.storages[s].bytes);
      if (profile_.storages[s].kind == StorageKind::External) {
        version_[s] = 0;
        held_[s] = true;
      }
    }
    for (const BackwardStep& step : profile_.backward) {
      require(step.gradient_bytes >= 0, "backward step {} leaves {} bytes of gradients", step.name,
              step.gradient_bytes);
      add_to_all(step.gradient_bytes);
    }
  }

  void run() {
    require(std::isfinite(profile_.host_seconds) && profile_.host_seconds >= 0, "the host took {} s",
            profile_.host_seconds);
    require(std::isfinite(profile_.tape_seconds) && profile_.tape_seconds >= 0, "the tape took {} s",
            profile_.tape_seconds);
    const OffloadLink& link = profile_.link;
    for (const double number : {link.out_bytes_per_second, link.back_bytes_per_second, link.seconds}) {
      require(std::isfinite(number) && number >= 0, "the link for offloading has a speed or time of {}", number);
    }
    const bool is_for_cpu = link.kind == OffloadLink::Kind::File;
    if (link.is_open() && is_for_cpu != (profile_.device == "cpu")) {
      throw ConfigError(
          fmt::format("Profile: its link for offloading leads to {}, and its device is {}; measure the device's link",
                      is_for_cpu ? "a file" : "pinned memory", profile_.device));
    }
    for (const Event& event : profile_.events) {
      visit(event);
      ++position_;
    }
    require(next_operator_ == profile_.operators.size(), "only {} of {} operators ran", next_operator_,
            profile_.operators.size());
    for (size_t s = 0; s < uses_.size(); ++s) {
      require(uses_[s] == 0, "storage {} was unpacked and never done with", s);
    }
  }

 private:
  template <class... Args>
  void require(bool holds, fmt::format_string<Args...> text, Args&&... args) const {
    if (!holds) {
      throw ConfigError(fmt::format("Profile: {} (at event {}); the recording is incomplete",
                                    fmt::format(text, std::forward<Args>(args)...), position_));
    }
  }

  // The sum of all bytes fits into 64 bits. Then every level fits, too: never more is alive than everything together.
  void add_to_all(int64_t bytes) {
    const bool fits = !__builtin_add_overflow(all_bytes_, bytes, &all_bytes_);
    require(fits, "all together is more than {} bytes", std::numeric_limits<int64_t>::max());
  }

  size_t storage(int index) const {
    require(index >= 0 && index < static_cast<int>(version_.size()), "there is no storage {}", index);
    return static_cast<size_t>(index);
  }

  void visit_operator(int index) {
    require(!backward_, "operator {} ran after the backward pass began", index);
    require(index == static_cast<int>(next_operator_) && next_operator_ < profile_.operators.size(),
            "operator {} ran where {} was due", index, next_operator_);
    const Operator& op = profile_.operators[next_operator_++];
    require(std::isfinite(op.seconds) && op.seconds >= 0 && op.workspace >= 0,
            "operator {} ({}) took {} s and {} bytes of workspace", index, op.name, op.seconds, op.workspace);
    add_to_all(op.workspace);
    for (const Value& value : op.reads) {
      const size_t s = storage(value.storage);
      require(held_[s] && version_[s] == value.version,
              "operator {} ({}) reads version {} of storage {}, which is at version {}{}", index, op.name,
              value.version, s, version_[s], held_[s] ? "" : " and gone");
    }
    for (const Value& value : op.writes) {
      const size_t s = storage(value.storage);
      require(value.version == version_[s] + 1 && (held_[s] || value.version == 0),
              "operator {} ({}) writes version {} of storage {}, which is at version {}{}", index, op.name,
              value.version, s, version_[s], held_[s] ? "" : " and gone");
      version_[s] = value.version;
      held_[s] = true;
    }
  }

  void visit(const Event& event) {
    switch (event.kind) {
      case EventKind::Forward:
        visit_operator(event.index);
        return;
      case EventKind::Drop: {
        const size_t s = storage(event.index);
        require(held_[s] && profile_.storages[s].kind != StorageKind::External, "storage {} is dropped, but not held",
                s);
        held_[s] = false;
        return;
      }
      case EventKind::Unpack: {
        const size_t s = storage(event.index);
        backward_ = true;
        require(version_[s] >= 0, "storage {} is unpacked, but was never made", s);
        ++uses_[s];
        return;
      }
      case EventKind::Done: {
        const size_t s = storage(event.index);
        require(--uses_[s] >= 0, "storage {} is done with, but was not unpacked", s);
        return;
      }
      case EventKind::Allocate:
      case EventKind::Release:
        require(event.bytes >= 0, "{} bytes allocated or released", event.bytes);
        add_to_all(event.bytes);
        own_ += event.kind == EventKind::Allocate ? event.bytes : -event.bytes;
        require(own_ >= 0, "{} bytes more are released than were allocated", -own_);
        return;
      case EventKind::Backward:
        require(event.index >= 0 && event.index < static_cast<int>(profile_.backward.size()),
                "there is no backward step {}", event.index);
        backward_ = true;
        const double seconds = profile_.backward[static_cast<size_t>(event.index)].seconds;
        require(std::isfinite(seconds) && seconds >= 0, "backward step {} took {} s", event.index, seconds);
        return;
    }
  }

  const Profile& profile_;
  std::vector<int> version_;  // -1: not made yet
  std::vector<bool> held_;    // by the program
  std::vector<int> uses_;     // unpacked and not yet done
  size_t next_operator_ = 0;
  size_t position_ = 0;
  int64_t own_ = 0;
  int64_t all_bytes_ = 0;
  bool backward_ = false;
};

}  // namespace

void Profile::check() const { Checker(*this).run(); }

std::vector<bool> Profile::saved_storages() const {
  std::vector<bool> saved(storages.size(), false);
  for (const Event& event : events) {
    if (event.kind == EventKind::Unpack && storages[static_cast<size_t>(event.index)].kind != StorageKind::External) {
      saved[static_cast<size_t>(event.index)] = true;
    }
  }
  return saved;
}

double Profile::operator_seconds() const {
  double seconds = 0;
  for (const Event& event : events) {
    if (event.kind == EventKind::Forward) {
      seconds += operators[static_cast<size_t>(event.index)].seconds;
    } else if (event.kind == EventKind::Backward) {
      seconds += backward[static_cast<size_t>(event.index)].seconds;
    }
  }
  return seconds;
}

double Profile::step_seconds(double seconds, bool has_tape, int64_t replayed) const {
  const double host = host_seconds + (has_tape ? tape_seconds : 0);
  if (device == "cpu") {
    return seconds + host;
  }
  const auto calls = static_cast<double>(operators.size() + backward.size());
  return std::max(seconds, host + (replayed > 0 ? static_cast<double>(replayed) * host_seconds / calls : 0));
}

std::string Profile::to_json() const {
  Json json = detail::versioned_json(kProfileJson, {{"device", device},
                                                    {"storages", Json::array()},
                                                    {"operators", Json::array()},
                                                    {"backward", Json::array()},
                                                    {"events", Json::array()}});
  for (const Storage& s : storages) {
    json["storages"].push_back(
        {{"name", s.name}, {"bytes", s.bytes}, {"kind", kKindNames[static_cast<size_t>(s.kind)]}});
  }
  for (const Operator& op : operators) {
    json["operators"].push_back({{"name", op.name},
                                 {"seconds", op.seconds},
                                 {"workspace", op.workspace},
                                 {"reads", values_json(op.reads)},
                                 {"writes", values_json(op.writes)},
                                 {"replayable", op.replayable}});
    if (op.reads_batch_statistics) {
      json["operators"].back()["reads_batch_statistics"] = true;
    }
  }
  for (const BackwardStep& step : backward) {
    json["backward"].push_back({{"name", step.name}, {"seconds", step.seconds}});
    if (step.gradient_bytes > 0) {
      json["backward"].back()["gradient_bytes"] = step.gradient_bytes;
    }
  }
  for (const Event& event : events) {
    json["events"].push_back(Json::array({kEventNames[static_cast<size_t>(event.kind)], event.index, event.bytes}));
  }
  if (host_seconds > 0) {
    json["host_seconds"] = host_seconds;
  }
  if (tape_seconds > 0) {
    json["tape_seconds"] = tape_seconds;
  }
  if (link.is_open()) {
    json["link"] = {{"kind", kLinkNames[static_cast<size_t>(link.kind)]},
                    {"directory", link.directory},
                    {"out_bytes_per_second", link.out_bytes_per_second},
                    {"back_bytes_per_second", link.back_bytes_per_second},
                    {"seconds", link.seconds}};
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Profile Profile::from_json(std::string_view text) {
  Profile read = detail::read_versioned_json(kProfileJson, text, [](const Json& json) {
    Profile profile;
    profile.device = json.value("device", profile.device);
    profile.host_seconds = json.value("host_seconds", 0.0);
    profile.tape_seconds = json.value("tape_seconds", 0.0);
    for (const Json& s : json.at("storages")) {
      profile.storages.push_back({s.at("name").get<std::string>(), detail::whole_number<int64_t>(s.at("bytes")),
                                  read_enum<StorageKind>(kKindNames, s.at("kind"))});
    }
    for (const Json& op : json.at("operators")) {
      profile.operators.push_back({op.at("name").get<std::string>(), op.at("seconds").get<double>(),
                                   detail::whole_number<int64_t>(op.at("workspace")), read_values(op.at("reads")),
                                   read_values(op.at("writes")), op.at("replayable").get<bool>(),
                                   op.value("reads_batch_statistics", false)});
    }
    for (const Json& step : json.at("backward")) {
      profile.backward.push_back(
          {step.at("name").get<std::string>(), step.at("seconds").get<double>(),
           step.contains("gradient_bytes") ? detail::whole_number<int64_t>(step.at("gradient_bytes")) : 0});
    }
    for (const Json& event : json.at("events")) {
      profile.events.push_back({read_enum<EventKind>(kEventNames, event.at(0)), detail::whole_number<int>(event.at(1)),
                                detail::whole_number<int64_t>(event.at(2))});
    }
    if (json.contains("link")) {
      const Json& link = json.at("link");
      profile.link = {.kind = read_enum<OffloadLink::Kind>(kLinkNames, link.value("kind", Json("file"))),
                      .directory = link.at("directory").get<std::string>(),
                      .out_bytes_per_second = link.at("out_bytes_per_second").get<double>(),
                      .back_bytes_per_second = link.at("back_bytes_per_second").get<double>(),
                      .seconds = link.at("seconds").get<double>()};
    }
    return profile;
  });
  read.check();
  return read;
}

}  // namespace snug::plan
