// Scaler, optimizers and clipping driven line by line, so that a script can do the same in Python and compare. One
// command per line of stdin, one answer per line of stdout: "ok ..." or "error MESSAGE". Floats go as the eight hex
// digits of their bits.
//
//   param BITS...               a new parameter with these values               ok INDEX
//   matrix ROWS COLUMNS BITS...                                                  ok INDEX
//   sgd LR PARAMS...            a new optimizer over these parameters           ok INDEX
//   adamw LR B1 B2 EPS WD PARAMS...    and adam                                 ok INDEX
//   fused_sgd LR MOMENTUM DAMPENING WD NESTEROV PARAMS...   snug's               ok INDEX
//   muon LR WD MOMENTUM NESTEROV MATCH_RMS PARAMS...                            ok INDEX
//   save_optimizer OPT FOLDER | load_optimizer OPT FOLDER   as a snapshot       ok
//   scaler INIT GROWTH BACKOFF INTERVAL [HYSTERESIS]   a new scaler; until then optimizers step by themselves
//   grad PARAM BITS...          sets the gradient;    nograd PARAM   drops it
//   scale BITS...               of as many losses                               ok BITS...
//   unscale OPT | step OPT | update | update_to X                               step: ok 1, or ok 0 if skipped
//   state                       the scaler's, doubles as hex digits             ok NAME=VALUE...
//   load NAME=VALUE...          gives it back
//   clip MAX TYPE PARAMS...                                                     ok NORM
//   values | grads              of all parameters                               ok BITS...

#include <bit>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/muon.h"
#include "snug/sgd.h"
#include "snug/snapshot.h"

namespace {

using torch::Tensor;

Tensor tensor_from(std::istream& words) {
  std::vector<float> values;
  for (std::string bits; words >> bits;) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(std::stoul(bits, nullptr, 16))));
  }
  return torch::tensor(values);
}

std::string bits_of(const Tensor& tensor) {
  const Tensor flat = tensor.detach().contiguous().flatten();
  std::string text;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    text += fmt::format(" {:08x}", std::bit_cast<uint32_t>(flat.data_ptr<float>()[i]));
  }
  return text;
}

std::string text_of(const snug::StateDict& state) {
  std::string text;
  for (const auto& [name, value] : state.entries()) {
    const auto* number = std::get_if<double>(&value);
    text += number != nullptr ? fmt::format(" {}={:016x}", name, std::bit_cast<uint64_t>(*number))
                              : fmt::format(" {}={}", name, std::get<int64_t>(value));
  }
  return text;
}

snug::StateDict state_from(std::istream& words) {
  snug::StateDict state;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string value = word.substr(equals + 1);
    if (value.size() == 16) {
      state.set(word.substr(0, equals), std::bit_cast<double>(static_cast<uint64_t>(std::stoull(value, nullptr, 16))));
    } else {
      state.set(word.substr(0, equals), static_cast<int64_t>(std::stoll(value)));
    }
  }
  return state;
}

class Session {
 public:
  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "param") {
      parameters_.push_back(tensor_from(words).requires_grad_());
      return fmt::format(" {}", parameters_.size() - 1);
    }
    if (command == "matrix") {
      const auto rows = static_cast<int64_t>(number(words)), columns = static_cast<int64_t>(number(words));
      parameters_.push_back(tensor_from(words).view({rows, columns}).requires_grad_());
      return fmt::format(" {}", parameters_.size() - 1);
    }
    if (command == "sgd") {
      const double lr = number(words);
      optimizers_.push_back(std::make_unique<torch::optim::SGD>(listed(words), torch::optim::SGDOptions(lr)));
      return fmt::format(" {}", optimizers_.size() - 1);
    }
    if (command == "adamw" || command == "adam" || command == "fused_sgd" || command == "muon") {
      optimizers_.push_back(fused(command, words));
      return fmt::format(" {}", optimizers_.size() - 1);
    }
    if (command == "save_optimizer" || command == "load_optimizer") {
      const snug::Stateful optimizer = snug::stateful(*optimizers_.at(index(words)));
      std::string folder;
      words >> folder;
      snug::SnapshotStore snapshots(folder);
      if (command == "save_optimizer") {
        snapshots.save(1, {{"optimizer", optimizer}});
      } else {
        snapshots.load_latest({{"optimizer", optimizer}});
      }
      return "";
    }
    if (command == "scaler") {
      const double init = number(words), growth = number(words), backoff = number(words);
      const double interval = number(words);
      int64_t hysteresis = 1;
      words >> hysteresis;
      scaler_.emplace(snug::GradScalerOptions{.init_scale = init,
                                              .growth_factor = growth,
                                              .backoff_factor = backoff,
                                              .growth_interval = static_cast<int64_t>(interval),
                                              .hysteresis = words ? hysteresis : 1});
      return "";
    }
    if (command == "grad" || command == "nograd") {
      const Tensor& parameter = parameters_.at(index(words));
      parameter.mutable_grad() = command == "grad" ? tensor_from(words).view_as(parameter) : Tensor();
      return "";
    }
    if (command == "clip") {
      const double max_norm = number(words), norm_type = number(words);
      return bits_of(snug::clip_grad_norm_(listed(words), max_norm, norm_type));
    }
    if (command == "values" || command == "grads") {
      std::string text;
      for (const Tensor& parameter : parameters_) {
        text += command == "values"          ? bits_of(parameter)
                : parameter.grad().defined() ? bits_of(parameter.grad())
                                             : " none";
      }
      return text;
    }
    if (command == "step") {
      torch::optim::Optimizer& optimizer = *optimizers_.at(index(words));
      if (!scaler_) {
        optimizer.step();
        return " 1";
      }
      return scaler_->step(optimizer) ? " 1" : " 0";
    }
    return scaling(command, words);
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> fused(const std::string& command, std::istream& words) const {
    std::vector<double> o(5);
    for (double& option : o) {
      option = number(words);
    }
    if (command == "adamw") {
      return std::make_unique<snug::AdamW>(
          listed(words), snug::AdamWOptions{.lr = o[0], .betas = {o[1], o[2]}, .eps = o[3], .weight_decay = o[4]});
    }
    if (command == "muon") {
      return std::make_unique<snug::Muon>(
          listed(words),
          snug::MuonOptions{
              .lr = o[0], .weight_decay = o[1], .momentum = o[2], .nesterov = o[3] != 0, .match_rms_adamw = o[4] != 0});
    }
    if (command == "adam") {
      return std::make_unique<snug::Adam>(
          listed(words), snug::AdamOptions{.lr = o[0], .betas = {o[1], o[2]}, .eps = o[3], .weight_decay = o[4]});
    }
    return std::make_unique<snug::SGD>(
        listed(words),
        snug::SGDOptions{.lr = o[0], .momentum = o[1], .dampening = o[2], .weight_decay = o[3], .nesterov = o[4] != 0});
  }

  std::string scaling(const std::string& command, std::istream& words) {
    if (command == "scale") {
      std::string text;
      for (const Tensor& scaled : scaler_->scale(tensor_from(words).unbind())) {
        text += bits_of(scaled);
      }
      return text;
    }
    if (command == "load") {
      scaler_->load_state_dict(state_from(words));
    } else if (command == "unscale") {
      scaler_->unscale_(*optimizers_.at(index(words)));
    } else if (command == "update") {
      scaler_->update();
    } else if (command == "update_to") {
      scaler_->update(number(words));
    } else if (command == "state") {
      return text_of(scaler_->state_dict());
    } else {
      throw std::invalid_argument("unknown command " + command);
    }
    return "";
  }

  static double number(std::istream& words) {
    std::string word;
    words >> word;
    return std::stod(word);
  }
  static size_t index(std::istream& words) { return static_cast<size_t>(number(words)); }
  std::vector<Tensor> listed(std::istream& words) const {
    std::vector<Tensor> result;
    for (size_t i = 0; words >> i;) {
      result.push_back(parameters_.at(i));
    }
    return result;
  }

  std::vector<Tensor> parameters_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::optional<snug::GradScaler> scaler_;
};

}  // namespace

int main() {
  std::optional<Session> session(std::in_place);
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "new") {
      session.emplace();
      std::cout << "ok\n";
      continue;
    }
    try {
      const std::string answer = session->answer(line);
      std::cout << "ok" << answer << "\n";
    } catch (const snug::Error& error) {
      std::cout << "error " << error.what() << "\n";
    }
  }
}
